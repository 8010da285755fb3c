"""Low-rank adapters over a projection's output, for a GPU: shrink to each token's rank, expand into the output.

After Punica (Chen et al. 2023, arXiv:2310.18547) and S-LoRA (Sheng et al. 2023, arXiv:2311.03285), but the matrices stay where
their owner keeps them: a slot is a row of addresses, so that a change of slots is a change of a few numbers, which a
captured graph reads too. Linears of one input share both launches. The shrink of an embedding is a look-up.

Tokens are put in the order of their adapters, once a step, and a tile has those of one: however they lie in the batch, a
matrix is read once, or once for every few dozen of its tokens. The pairs of a token and an expert lie in an order already,
that of experts, whose tiles run once for each adapter in them: tiles of one pair where these are few and may all differ.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.grouping import most_tiles, order_by_group
from stoker.kernels.lora_kernels import expand_gated_kernel, expand_kernel, look_up_kernel, shrink_kernel
from stoker.kernels.norm_rotary import act_mul
from stoker.kernels.reference.lora import POINTER_FIELDS, AdapterRows, LoraTable
from stoker.kernels.reference.norm_rotary import Activation

_FEW = 1024  # tokens, which are low tiles; more are tall ones
_FEW_PAIRS = 256  # of a token and an expert
_MOST_SPLITS = 256  # of one rank
_LEAST_SPAN = 512  # of a split, so that it is worth its share of the sum


class Tiles(NamedTuple):
    """Which tokens each program takes: some of one adapter, or neighbours where ``slots`` is 0."""

    programs: int
    height: int
    order: Tensor  # int32 [T], tokens slot by slot
    starts: Tensor  # int32 [slots and 0], where each begins among them
    slots: int

    @staticmethod
    def of(rows: AdapterRows, table: LoraTable, deterministic: bool) -> Tiles:
        tokens, slots = len(rows.slots), table.num_slots
        if table.experts > 1:
            height = 1 if tokens <= _FEW_PAIRS and not deterministic else 16
            return Tiles(triton.cdiv(tokens, height), height, rows.slots, rows.slots, 0)
        if slots not in rows.of_step:
            rows.of_step[slots] = order_by_group(rows.slots, slots + 1)
        # Of fp32 on no tensor core, 64 rows by as many columns are more than there are registers.
        height = 16 if deterministic or tokens <= _FEW or table.dtype == torch.float32 else 64
        order, starts = rows.of_step[slots]
        return Tiles(most_tiles(tokens, slots, height), height, order, starts, slots)


def lora(
    x: Tensor,
    out: Tensor,
    table: LoraTable,
    rows: AdapterRows,
    gated: Activation | None = None,
    *,
    deterministic: bool = False,
) -> Tensor:
    """As the reference. deterministic: a row's result has the same bits whatever stands beside it."""
    if table.empty:
        return out if gated is None else act_mul(out, gated)
    tiles = Tiles.of(rows, table, deterministic)
    hidden = shrink(x, table, rows, tiles, deterministic=deterministic)
    if gated is not None and tiles.slots and len(set(table.widths)) == 1 and len(table.widths) == 2:
        return _expand_gated(hidden, out, table, tiles, gated, deterministic)
    out = _expand(hidden, out, table, rows, tiles, deterministic)
    return out if gated is None else act_mul(out, gated)


def shrink(
    x: Tensor,
    table: LoraTable,
    rows: AdapterRows,
    tiles: Tiles,
    *,
    deterministic: bool = False,
    most_splits: int = _MOST_SPLITS,
) -> Tensor:
    """fp32 [splits, linears, T, padded rank], of which nothing above a token's rank is written. x: [T, D]."""
    tokens, depth = x.shape
    linears, rank = len(table.widths), padded_rank(table)
    splits = min(_splits(tokens, depth, rank, deterministic), most_splits)
    wide = table.dtype == torch.float32  # with strides, 64 ranks of it are more than there are registers
    block_r, block_k = min(rank, 32 if wide and table.strided else 64), 64 if wide else 128
    span = triton.cdiv(triton.cdiv(depth, splits), block_k) * block_k
    hidden = torch.empty(splits, linears, tokens, rank, dtype=torch.float32, device=x.device)
    shrink_kernel[(tiles.programs, linears * (rank // block_r), splits)](
        x,
        rows.slots,
        tiles.order,
        tiles.starts,
        table.pointers,
        hidden,
        x.stride(0),
        tokens,
        depth,
        span,
        table.entries,
        table.num_slots,
        STRIDED=table.strided,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=4,
        **_settings(x, table, tiles, rank),
    )
    return hidden


def lora_embedding(
    token_ids: Tensor, out: Tensor, table: LoraTable, rows: AdapterRows, *, deterministic: bool = False
) -> Tensor:
    """As the reference. deterministic: as for ``lora``."""
    if table.empty:
        return out
    tokens, rank, tiles = len(token_ids), padded_rank(table), Tiles.of(rows, table, deterministic)
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
    return _expand(hidden, out, table, rows, tiles, deterministic)


def padded_rank(table: LoraTable) -> int:
    return int(max(16, triton.next_power_of_2(table.max_rank)))


def _splits(tokens: int, depth: int, rank: int, deterministic: bool) -> int:
    """In how many spans a shrink goes over its input, so that every multiprocessor reads: few kinds of them, as each is
    compiled for, and fewer of high ranks, whose blocks are programs too. Deterministic: whatever the other ranks are.
    """
    most = 4 if deterministic else _MOST_SPLITS // rank if tokens <= _FEW else 1
    splits = 1
    while splits < most and depth >= 2 * splits * _LEAST_SPAN:
        splits *= 2
    return splits


def _settings(like: Tensor, table: LoraTable, tiles: Tiles, rank: int) -> dict[str, Any]:
    """The settings that both kernels are compiled for. like: a tensor of the dtype that the model computes in."""
    # What an fp32 adapter gives a model of 16 bits is rounded to these: three products on tensor cores are exact enough.
    thrice = table.dtype == torch.float32 and like.dtype != torch.float32
    return {
        "LINEARS": len(table.widths),
        "SLOTS": max(triton.next_power_of_2(tiles.slots), 8) if tiles.slots else 0,
        "FIELDS": POINTER_FIELDS,
        "DTYPE": launch.TYPES[table.dtype],
        "PRECISION": "tf32x3" if thrice else "ieee",
        "ALIGNED": table.aligned,
        "RANK": rank,
        "BLOCK_T": tiles.height,
        **launch.options(like.device),
    }


def _ranks_together(table: LoraTable, hidden: Tensor, deterministic: bool) -> int:
    """Ranks that an expand reads at a time, of all splits, all on their way together: a loop over them would wait for memory
    at each turn. As many as there are registers for. Deterministic: whatever the other ranks are.
    """
    most = 32 if table.dtype == torch.float32 else 64
    return min(most, 256 // len(hidden), most if deterministic else hidden.shape[3])


def _expand(
    hidden: Tensor, out: Tensor, table: LoraTable, rows: AdapterRows, tiles: Tiles, deterministic: bool
) -> Tensor:
    """hidden: fp32 [splits, linears, T, padded rank], of which nothing above a token's rank is read."""
    splits, _, tokens, rank = hidden.shape
    # Wide tiles where there are many: each reads what the splits of the shrink gave.
    many = tiles.height <= 16 and tiles.programs * sum(table.widths) >= 16 * 64 * launch.multiprocessors(out.device)
    block_n = 128 if many else 64
    expand_kernel[(tiles.programs, sum(triton.cdiv(width, block_n) for width in table.widths))](
        hidden,
        rows.slots,
        tiles.order,
        tiles.starts,
        table.pointers,
        table.columns(block_n),
        out,
        out.stride(0),
        tokens,
        table.entries,
        table.num_slots,
        STRIDED=table.strided,
        ALIGNED_OUT=all(width % 16 == 0 for width in table.widths),
        SPLITS=splits,
        BLOCK_R=_ranks_together(table, hidden, deterministic),
        BLOCK_N=block_n,
        num_warps=4 if tiles.height <= 16 else 8,
        num_stages=1,
        **_settings(out, table, tiles, rank),
    )
    return out


def _expand_gated(
    hidden: Tensor, gate_up: Tensor, table: LoraTable, tiles: Tiles, gated: Activation, deterministic: bool
) -> Tensor:
    """Returns ``act(gate) * up`` of all tokens, in memory of its own. hidden: as for ``_expand``."""
    splits, _, tokens, rank = hidden.shape
    width, groups = table.widths[0], tiles.slots + 1  # tokens without an adapter are one
    count = most_tiles(tokens, groups, tiles.height)
    block_n = 64
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    settings = _settings(gate_up, table, tiles, rank) | {"SLOTS": max(triton.next_power_of_2(groups), 8)}
    del settings["LINEARS"]  # two
    expand_gated_kernel[(count, triton.cdiv(width, block_n))](
        hidden,
        tiles.order,
        tiles.starts,
        table.pointers,
        table.columns(block_n),
        gate_up,
        out,
        gate_up.stride(0),
        tokens,
        width,
        table.entries,
        ACT=gated,
        STRIDED=table.strided,
        SPLITS=splits,
        BLOCK_R=_ranks_together(table, hidden, deterministic),
        BLOCK_N=block_n,
        num_warps=4 if tiles.height <= 16 else 8,
        num_stages=1,
        **settings,
    )
    return out
