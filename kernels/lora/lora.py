"""Low-rank adapters over a projection's output, for a GPU: shrink to each token's rank, expand into the output.

As in Punica (Chen et al. 2023, arXiv:2310.18547) and S-LoRA (Sheng et al. 2023, arXiv:2311.03285), but the matrices stay
where their owner keeps them. A slot is a row of addresses: to change it is to change a few numbers, which a captured graph
reads, too. Linears of one input share both launches. The shrink of an embedding is a look-up.

Tokens are sorted by adapter once a step, and a tile has tokens of one adapter: however they lie in the batch, a matrix is
read once, or once for every few dozen of its tokens. Pairs of a token and an expert are sorted by expert already. Their
tiles run once for each adapter in them; where pairs are few and may all differ, a tile is one pair.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.lora.ahead import expand_ahead_kernel
from stoker.kernels.lora.expand import expand_gated_kernel, expand_kernel
from stoker.kernels.lora.shrink import look_up_kernel, shrink_kernel
from stoker.kernels.lora.tiles import FEW, Tiles
from stoker.kernels.norm_rotary import act_mul
from stoker.kernels.reference.lora import POINTER_FIELDS, AdapterRows, LoraTable
from stoker.kernels.reference.norm_rotary import Activation

# Bytes of shared memory that a program of the shrink of few tokens takes, with what CUDA adds. Another kernel has to leave these
# for the shrink to run beside it. For ranks above 32 it takes 62 KiB, and runs only where that kernel has no program.
SHRINK_SHARED = 36 * 1024
# The same of adapters that run ahead of a product, which has to leave it: at the least, and with room for a second shrink.
AHEAD_SHARED = (64 * 1024, 90 * 1024)
_MOST_SPLITS = 256  # of one rank; of many tokens, which have more programs anyway, half as many
_MANY = 64
_LEAST_BLOCK = 64
_LEAST_SPAN = 512  # of a split: below it, adding its sum costs more than it saves
_MOST_SPLITS_AHEAD = 4  # a program that reads more at a time finishes sooner beside a product
_PROGRAMS_AHEAD = 5.5  # of an expand, for each multiprocessor: all of them and the product's are there at once
_LEAST_PROGRAMS_GATED = 12  # of a gated expand, for each multiprocessor; half of them may have nothing to do


def lora(
    x: Tensor,
    out: Tensor,
    table: LoraTable,
    rows: AdapterRows,
    gated: Activation | None = None,
    *,
    settled: bool = False,
    deterministic: bool = False,
    shrunk: Tensor | None = None,
) -> Tensor:
    """As the reference. deterministic: a row's result has the same bits in any batch. shrunk: what ``shrink`` gave of the same."""
    if table.empty:
        return out if gated is None else act_mul(out, gated)
    tiles, low, block_n, together = _plan(x, table, rows, gated, deterministic)
    if shrunk is None:
        shrunk = _shrink(x, table, tiles, settled=settled, deterministic=deterministic)
    if together and gated is not None:
        return _expand_gated(shrunk, out, table, low, block_n, gated, deterministic)
    out = _expand(shrunk, out, table, tiles, block_n, deterministic)
    return out if gated is None else act_mul(out, gated)


def shrink(x: Tensor, table: LoraTable, rows: AdapterRows, gated: Activation | None = None) -> Tensor:
    """The first half of ``lora``, for before the projection instead of behind it: x was made by the last launch."""
    tiles = _plan(x, table, rows, gated, False)[0]
    return _shrink(x, table, tiles, settled=False, deterministic=False)


def _plan(
    x: Tensor, table: LoraTable, rows: AdapterRows, gated: Activation | None, deterministic: bool
) -> tuple[Tiles, Tiles, int, bool]:
    """The tiles of shrink and expand, the columns of the latter's, and whether it does the activation, too.

    What is not on the device yet is sent now, and not between these launches.
    """
    tiles = low = Tiles.of(rows, table, deterministic)
    together = gated is not None and tiles.grouped and len(table.widths) == 2 and len(set(table.widths)) == 1
    if together:
        # Its time goes with the numbers that its programs have, of places that no token takes as well.
        low = Tiles.of(rows, table, deterministic, low=table.only_matrices and not deterministic)
        tiles = tiles._replace(fresh=tiles.fresh or low.fresh)
        block_n = _columns_of_gated(table, low, x.device, deterministic)
    else:
        block_n = _columns_of_tile(table, tiles, x.device, deterministic)
    table.columns(block_n)
    return tiles, low, block_n, together


def ahead(x: Tensor, residual: Tensor | None, table: LoraTable, rows: AdapterRows) -> Tensor:
    """The residual, or zeros, and what adapters add, [T, N], for a product of x that is launched next and adds it.

    x: [T, D], some dozens of rows; residual: [T, N]. table: one that ``goes_ahead``.
    """
    tokens, rank, tiles = len(x), padded_rank(table), Tiles.of(rows, table, False)
    most, block_n = _PROGRAMS_AHEAD * launch.multiprocessors(x.device), max(4096 // (rank * table.dtype.itemsize), 16)
    span = block_n
    while span < 1024 and tiles.programs * sum(triton.cdiv(width, span) for width in table.widths) > most:
        span *= 2
    columns = table.columns(span)  # as in ``lora``
    hidden = _shrink(x, table, tiles, settled=False, deterministic=False, first=True)
    out = torch.empty(tokens, sum(table.widths), dtype=x.dtype, device=x.device)
    launched = expand_ahead_kernel[(len(tiles.slots), sum(triton.cdiv(width, span) for width in table.widths))](
        hidden,
        tiles.rows,
        tiles.slots,
        table.pointers,
        columns,
        out if residual is None else residual,
        out,
        0 if residual is None else residual.stride(0),
        tokens,
        out.shape[1],
        table.entries,
        LINEARS=len(table.widths),
        FIELDS=POINTER_FIELDS,
        DTYPE=launch.TYPES[table.dtype],
        RESIDUAL=residual is not None,
        SPLITS=len(hidden),
        RANK=rank,
        BLOCK_T=tiles.height,
        BLOCK_N=block_n,
        SPAN=span,
        num_warps=4,
        **launch.options(x.device),
    )
    launch.leave_room(launched)
    return out


def _shrink(
    x: Tensor, table: LoraTable, tiles: Tiles, *, settled: bool, deterministic: bool, first: bool = False
) -> Tensor:
    """fp32 [splits, linears, T, padded rank], where nothing above a token's rank is written. x: [T, D]. first: ahead of a product."""
    tokens, depth = x.shape
    linears, rank = len(table.widths), padded_rank(table)
    splits, behind = _splits(tokens, depth, rank, deterministic), table.is_behind
    rounded = first and table.dtype != x.dtype
    # With strides, 64 ranks of fp32 are more than there are registers.
    block_r = min(rank, 32 if table.strided and table.dtype == torch.float32 else 64)
    room = block_r
    if first:
        splits = min(splits, _MOST_SPLITS_AHEAD)
        room = block_r * table.dtype.itemsize // x.itemsize  # what wider matrices take, in ranks of x's dtype
    dtype = x.dtype if rounded else table.dtype
    part = triton.cdiv(depth, splits)
    block_k, warps, stages = _blocks_of_shrink(dtype, tiles, room, part, deterministic=deterministic)
    held = warps > 1 and part <= block_k and tiles.grouped and not (settled or table.strided)
    # An L4 has no room for as many stages of fp32 as an H200. A loop of n of them holds one less at a time.
    stage = block_k * (block_r * table.dtype.itemsize + tiles.height * x.itemsize)
    stages = min(stages, 1 + (launch.shared_memory(x.device) - 2 * launch.PROGRAM_SHARED) // stage)
    whole = _LEAST_BLOCK if held else block_k
    span = triton.cdiv(part, whole) * whole
    hidden = torch.empty(splits, linears, tokens, rank, dtype=torch.float32, device=x.device)
    launched = shrink_kernel[(tiles.programs, linears * (rank // block_r), splits)](
        x,
        tiles.rows,
        tiles.slots,
        table.pointers,
        hidden,
        x.stride(0),
        tokens,
        depth,
        span,
        table.entries,
        SETTLED=settled,
        ROUNDED=rounded,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        WARPS=warps,
        HELD=held,
        num_warps=4,
        num_stages=stages,
        **_settings(x, table, tiles, rank, early=not (tiles.fresh or behind), exact=not rounded),
    )
    launch.leave_room(launched)
    return hidden


def lora_embedding(
    token_ids: Tensor, out: Tensor, table: LoraTable, rows: AdapterRows, *, deterministic: bool = False
) -> Tensor:
    """As the reference. deterministic: as for ``lora``."""
    if table.empty:
        return out
    tokens, rank, tiles = len(token_ids), padded_rank(table), Tiles.of(rows, table, deterministic)
    block_n = _columns_of_tile(table, tiles, out.device, deterministic)
    table.columns(block_n)  # as in ``lora``
    hidden = torch.empty(1, 1, tokens, rank, dtype=torch.float32, device=out.device)
    look_up_kernel[(tokens,)](
        token_ids,
        rows.slots,
        table.pointers,
        hidden,
        FIELDS=POINTER_FIELDS,
        DTYPE=launch.TYPES[table.dtype],
        RANK=rank,
        **launch.options(out.device),
    )
    return _expand(hidden, out, table, tiles, block_n, deterministic)


def padded_rank(table: LoraTable) -> int:
    return int(max(16, triton.next_power_of_2(table.max_rank)))


def _splits(tokens: int, depth: int, rank: int, deterministic: bool) -> int:
    """Into how many spans a shrink cuts its input, so that every multiprocessor reads.

    Only powers of two, as a kernel is compiled for each number; and fewer for high ranks, which have more programs anyway.
    Where deterministic, it does not depend on the other adapters' ranks.
    """
    if deterministic:
        most = 4
    else:
        most = _MOST_SPLITS // (2 if tokens > _MANY else 1) // rank if tokens <= FEW else 1
    splits = 1
    while splits < most and depth >= 2 * splits * _LEAST_SPAN:
        splits *= 2
    return splits


def _blocks_of_shrink(
    dtype: torch.dtype, tiles: Tiles, ranks: int, span: int, *, deterministic: bool
) -> tuple[int, int, int]:
    """How much of a span a program reads at once; how many warps multiply a part of it each, in the dtype; how many stages."""
    wide = dtype == torch.float32
    if wide or deterministic or tiles.height != 16 or ranks > 32:
        return 64 if wide else 128, 1, 4
    return _block_at_once(span, ranks), 4, 2


def _block_at_once(span: int, ranks: int) -> int:
    """How much of a span a program reads at once: all of it if there are registers for that, as each turn of a loop waits for memory.

    Else as much as there are, but no block of which a good part lies beyond the span.
    """
    block, most = max(int(triton.next_power_of_2(span)), _LEAST_BLOCK), 8192 // ranks
    if block <= most:
        return block
    while most > 128 and triton.cdiv(span, most) * most > 1.2 * span:
        most //= 2
    return most


def _settings(
    like: Tensor, table: LoraTable, tiles: Tiles, rank: int, *, early: bool = True, exact: bool = True
) -> dict[str, Any]:
    """The settings that both kernels are compiled with. like: a tensor of the dtype that the model computes in.

    early: the kernel may start while the one before runs, and read what was there before that one. exact: it multiplies in the
    matrices' dtype.
    """
    # A 16-bit model rounds what an fp32 adapter gives it, so three products on tensor cores are exact enough.
    thrice = exact and table.dtype == torch.float32 and like.dtype != torch.float32
    return {
        "LINEARS": len(table.widths),
        "GROUPED": tiles.grouped,
        "FIELDS": POINTER_FIELDS,
        "DTYPE": launch.TYPES[table.dtype],
        "PRECISION": "tf32x3" if thrice else "ieee",
        "STRIDED": table.strided,
        "ALIGNED": table.aligned,
        "RANK": rank,
        "BLOCK_T": tiles.height,
        **launch.options(like.device, early=early),
    }


def _ranks_together(table: LoraTable, hidden: Tensor, deterministic: bool) -> int:
    """How many ranks an expand loads at a time, for all splits: a loop over them would wait for memory at each turn.

    As many as there are registers for. Where deterministic, it does not depend on the other adapters' ranks.
    """
    most = 32 if table.dtype == torch.float32 else 64
    return min(most, 256 // len(hidden), most if deterministic else hidden.shape[3])


def _columns_of_tile(table: LoraTable, tiles: Tiles, device: torch.device, deterministic: bool) -> int:
    """Columns of an expand's tile: wide, as each reads all that the shrink's splits gave, unless that leaves too few tiles.

    Where deterministic, it does not depend on the other adapters' ranks.
    """
    if tiles.height > 16:
        return 64
    few = tiles.programs * sum(table.widths) < 16 * 64 * launch.multiprocessors(device)
    if tiles.grouped and not deterministic and padded_rank(table) <= 32:  # H200: up to 3 us less, of 128 and 256 tokens
        few = False
    return 64 if few else 128


def _columns_of_gated(table: LoraTable, tiles: Tiles, device: torch.device, deterministic: bool) -> int:
    """Columns of a gated expand's tile: as many as there are registers for, where adapters only add, unless that leaves too few tiles."""
    if not table.only_matrices or tiles.height > 16 or deterministic:
        return 64
    columns = max(64, 4096 // (padded_rank(table) * table.dtype.itemsize // 2))
    least = _LEAST_PROGRAMS_GATED * launch.multiprocessors(device)
    while columns > 128 and tiles.programs * table.widths[0] < least * columns:
        columns //= 2
    return columns


def _expand(hidden: Tensor, out: Tensor, table: LoraTable, tiles: Tiles, block_n: int, deterministic: bool) -> Tensor:
    """hidden: fp32 [splits, linears, T, padded rank], where nothing above a token's rank is read."""
    splits, _, tokens, rank = hidden.shape
    launched = expand_kernel[(tiles.programs, sum(triton.cdiv(width, block_n) for width in table.widths))](
        hidden,
        tiles.rows,
        tiles.slots,
        table.pointers,
        table.columns(block_n),
        out,
        out.stride(0),
        tokens,
        table.entries,
        PLAIN=table.only_matrices,
        ALIGNED_OUT=all(width % 16 == 0 for width in table.widths),
        SPLITS=splits,
        BLOCK_R=_ranks_together(table, hidden, deterministic),
        BLOCK_N=block_n,
        num_warps=4 if tiles.height <= 16 else 8,
        num_stages=1,
        **_settings(out, table, tiles, rank),
    )
    launch.leave_room(launched)
    return out


def _expand_gated(
    hidden: Tensor,
    gate_up: Tensor,
    table: LoraTable,
    tiles: Tiles,
    block_n: int,
    gated: Activation,
    deterministic: bool,
) -> Tensor:
    """Returns ``act(gate) * up`` of all tokens, in new memory. hidden: as for ``_expand``."""
    splits, _, tokens, rank = hidden.shape
    width = table.widths[0]
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    settings = _settings(gate_up, table, tiles, rank)
    del settings["LINEARS"], settings["GROUPED"]  # two, and it is
    launched = expand_gated_kernel[(len(tiles.slots), triton.cdiv(width, block_n))](
        hidden,
        tiles.rows,
        tiles.slots,
        table.pointers,
        table.columns(block_n),
        gate_up,
        out,
        gate_up.stride(0),
        tokens,
        width,
        table.entries,
        ACT=gated,
        PLAIN=table.only_matrices,
        SPLITS=splits,
        BLOCK_R=_ranks_together(table, hidden, deterministic),
        BLOCK_N=block_n,
        num_warps=4 if tiles.height * block_n <= 2048 else 8,
        num_stages=1,
        **settings,
    )
    launch.leave_room(launched)
    return out
