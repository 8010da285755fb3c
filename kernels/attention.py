"""Paged attention in Triton: split decode rows, units of rows that share a beginning, and tiles of prefill chunks.

Decode is bound by memory. A row of c keys costs ``c * kv_heads * (key_dim + value_dim) * itemsize`` bytes a layer, which
on an H200 (4.3 TB/s) is 0.5 us for 1,000 keys of Llama-3.2-1B, and only that and what splits leave for the merge should
move. So the query heads of a key head are rows of one tile and each key is read once; programs that work on neighbouring
key heads run together, since those lie side by side; a few programs an SM keep about 100 KiB of loads in flight, more
than latency times bandwidth asks for (about 25 KiB an SM); and keys read once for a unit of rows count once.

Pieces of a row are folded one after the other, in an order that follows from its length alone. Where there are rows enough,
one program reads all of a row's splits and folds them in registers. Else what it reads is left in an fp32 workspace, that mostly
stays in L2, and the last to arrive folds, with the same bits: a kernel less a layer than a second pass. It costs each program
that is one of several some 2 us (by hand on an H200: 6.0 for 3.9 us at one row of 512 keys, 103
for 72 at 256 such rows), most of them for the word that its stores have arrived.

Prefill is bound by arithmetic: tiles of queries and heads walk their row's keys as in "FlashAttention-2" (Dao, 2023).
Exponentials are of base two, with log2(e) in the scale. Keys and values come in 16-byte pieces along the head, gathered
through the block table, of which a token's entry is read once and serves its key and its value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.attention_decode import decode_kernel
from stoker.kernels.attention_plan import UNIT_ROWS, AttentionPlan, Lanes
from stoker.kernels.attention_prefill import prefill_kernel
from stoker.kernels.attention_write import write_kernel
from stoker.kernels.reference.attention_plan import Visibility

_LOG2E = 1.4426950408889634
_MOST_AT_ONCE = 8  # pieces that a merge has on their way: each is code of its own, and takes time to compile
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_KEY_DIM, _MAX_VALUE_DIM = 576, 512  # of DeepSeek's latent form; beyond it accumulators do not fit registers
_STAGE_BYTES = 36 * 1024  # of keys and values that are on their way at a time
_SHARED_BYTES = 220 * 1024  # of an SM
# Of the compiler's software pipeline. A tile's block numbers have to arrive before its keys and values can be asked for, which
# takes up stages: with five, two tiles of keys and values are on their way at a time, as compiled code shows.
_NUM_STAGES = 5
# Of decode rows with few heads a key head, in 16 bits: as many small programs as have registers enough, each with two tiles on
# their way. On an H200 four of two warps an SM read keys at 0.71 to 0.90 of the memory's speed (64 rows of 512 or 2,048 keys).
_FEW_HEADS = 16 * 128  # queries of a tile times dimensions
_SMALL_STAGE_BYTES, _SMALL_WARPS, _SMALL_PROGRAMS = 16 * 1024, 2, 4


def unsupported(key_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run such layers, or None where they can."""
    if dtype not in _DTYPES:
        return f"the attention kernels run bfloat16, float16 and float32, not {str(dtype).removeprefix('torch.')}"
    if key_dim > _MAX_KEY_DIM or value_dim > _MAX_VALUE_DIM:
        return (
            f"the attention kernels hold keys of up to {_MAX_KEY_DIM} and values of up to {_MAX_VALUE_DIM} dimensions, "
            f"and this model's have {key_dim} and {value_dim}"
        )
    return None


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """block_m: queries (rows, heads) of a tile; block_n: keys of a tile; programs: grid of a persistent kernel;
    registers: the most a thread may take, so that all of these programs are resident at once; folds: whether a program has
    registers enough to read several splits of a row one after the other."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    registers: int
    folds: bool = False


def launch_config(
    queries: int,
    key_dim: int,
    value_dim: int,
    itemsize: int,
    kept_itemsize: int,
    processors: int,
    *,
    prefill: bool = False,
) -> LaunchConfig:
    """How to launch attention. queries: rows and heads that see the same keys; dims of a head; bytes of a number, and in the cache.

    Never a function of lengths or of the number of rows: numbers must not depend on a row's neighbours.
    """
    wide = max(key_dim, value_dim)
    row_bytes = key_dim * itemsize + (value_dim * itemsize if key_dim <= 256 else 0)  # a latent key is its value
    fits = 2 ** int(math.log2(_STAGE_BYTES // row_bytes))
    if prefill:
        block_m = 128 if wide <= 128 else 64 if wide <= 256 else 32
        if itemsize == 4:  # plain fp32 has no tensor cores, and twice the registers
            block_m = 32 if wide <= 64 else 16
        block_n = max(16, min(fits, 64))
        return LaunchConfig(block_m, block_n, 8 if wide >= 64 and itemsize == 2 else 4, _NUM_STAGES, 0, 255)
    most = 16 if itemsize == 4 else 64 if wide <= 256 else 32
    block_m = min(max(16, triton.next_power_of_2(queries)), most)
    if block_m * wide <= _FEW_HEADS and itemsize == 2:
        kept_bytes = row_bytes * kept_itemsize // itemsize
        block_n = max(16, min(2 ** int(math.log2(_SMALL_STAGE_BYTES // kept_bytes)), 64))
        apart = (
            2 if kept_bytes < row_bytes and wide > 64 else 1
        )  # so many threads for what else one had no registers for
        num_warps, programs = _SMALL_WARPS * apart, processors * _SMALL_PROGRAMS // apart
        return LaunchConfig(block_m, block_n, num_warps, _NUM_STAGES, programs, 255, True)
    block_n = max(16, min(fits, 64))
    num_warps = 4 if block_m * wide < 64 * 128 else 8
    # What compiled kernels take of an SM's 64K registers and 227 KiB, roughly; a program more than fits would run last, alone.
    by_registers = 1 if num_warps == 8 else 3 if wide <= 64 else 2
    by_memory = _SHARED_BYTES // (2 * block_n * row_bytes + 2 * block_m * key_dim * itemsize)
    resident = max(1, min(by_registers, by_memory))
    registers = min(255, 65536 // (resident * num_warps * 32) // 8 * 8)
    folds = (
        block_m * triton.next_power_of_2(value_dim) <= 1024 * num_warps
    )  # a thread has a quarter of its registers for it
    return LaunchConfig(block_m, block_n, num_warps, _NUM_STAGES, processors * resident, registers, folds)


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Store each token's key and value. key: [T, H, Dk]; value: [T, H, Dv]; slots: int64 [T], block * size + offset."""
    key, value = launch.in_rows(key), launch.in_rows(value)
    heads, key_dim, value_dim = key.shape[1], key.shape[2], value.shape[2]
    write_kernel[(key.shape[0],)](
        key,
        value,
        key_cache,
        value_cache,
        slots,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=key_cache.shape[1],
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=triton.next_power_of_2(value_dim),
        **launch.options(key.device, waits=False),
    )


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    visibility: Visibility,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As the reference's: query [T, Hq, Dk], caches [N, block, Hkv, D]; returns [T, Hq, Dv]. Run it once before a capture."""
    out, _ = attend(
        query, key_cache, value_cache, plan, scale=scale, visibility=visibility, softcap=softcap, sinks=sinks
    )
    return out


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    visibility: Visibility,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``paged_attention``, and the log-sum-exp of each query's scores, fp32 [T, Hq], sinks not among them.

    A value cache that is the beginning of the key cache (the latent form of DeepSeek) is read once. Padded tokens of a
    batch with chunks get zeros.
    """
    query = launch.in_rows(query)
    tokens, heads, value_dim = *query.shape[:2], value_cache.shape[-1]
    layer = _Launch(query, key_cache, value_cache, plan, scale, visibility, softcap, sinks)
    make = torch.empty if plan.decode else torch.zeros  # every lane writes its token
    out = make(tokens, heads, value_dim, dtype=query.dtype, device=query.device)
    lse = make(tokens, heads, dtype=torch.float32, device=query.device) if with_lse else None
    for lanes in plan.lanes:
        layer.decode(lanes, out, lse)
    if plan.chunks is not None:
        layer.prefill(out, lse)
    return out, lse


class _Launch:
    """One layer's arguments, as the kernels of all pieces of a step take them."""

    def __init__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: AttentionPlan,
        scale: float,
        visibility: Visibility,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        self.plan, self.visibility = plan, visibility
        table = plan.tables.of(visibility)
        self.tensors = (query, key_cache, value_cache, query if sinks is None else sinks, table)
        self.heads, self.key_dim = query.shape[1:]
        self.kv_heads, self.value_dim = value_cache.shape[2:]
        self.group = self.heads // self.kv_heads
        self.itemsize, self.kept_itemsize = query.element_size(), key_cache.element_size()
        self.processors = launch.multiprocessors(query.device)
        # A capped score is ``cap * tanh(x) = cap * (1 - 2 / (exp(2 x) + 1))`` of ``x = score / cap``.
        self.numbers = (scale * _LOG2E, 0.0)
        if softcap is not None:
            self.numbers = (2 * scale * _LOG2E / softcap, softcap * _LOG2E)
        self.strides = (
            *query.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            table.stride(0),
        )
        whole = 2 ** int(math.log2(self.key_dim))
        rest = self.key_dim - whole
        if whole < 16:  # the least that tensor cores multiply
            whole, rest = 16, 0
        value_is_key = (
            self.value_dim == whole < self.key_dim
            and value_cache.data_ptr() == key_cache.data_ptr()
            and value_cache.stride() == key_cache.stride()
        )
        self.constants: dict[str, Any] = {
            "KV_HEADS": self.kv_heads,
            "GROUP": self.group,
            "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim,
            "D1": whole,
            "D2": max(16, triton.next_power_of_2(rest)) if rest else 0,
            "DV": max(16, triton.next_power_of_2(self.value_dim)),
            "BLOCK_SIZE": plan.block_size,
            "WINDOW": visibility.window or 0,
            "CHUNK": visibility.chunk or 0,
            "SOFTCAP": softcap is not None,
            "SINKS": sinks is not None,
            "VALUE_IS_KEY": value_is_key,
            "PRECISION": "ieee",  # of fp32; the others have one way
        }

    def config(self, queries: int, prefill: bool = False) -> LaunchConfig:
        sizes = self.key_dim, self.value_dim, self.itemsize, self.kept_itemsize
        return launch_config(queries, *sizes, self.processors, prefill=prefill)

    def decode(self, lanes: Lanes, out: Tensor, lse: Tensor | None) -> None:
        """Launch decode rows: first what units share, then each row's own pieces, the last of which to be done merges them all."""
        shares = lanes.shares(self.visibility)
        if shares:
            self._decode(lanes, out, lse, shares, prefix=True)
        self._decode(lanes, out, lse, shares, prefix=False)

    def _decode(self, lanes: Lanes, out: Tensor, lse: Tensor | None, shares: bool, *, prefix: bool) -> None:
        own = self.config(self.group)
        width = self.kv_heads * -(-self.group // own.block_m)
        buffers, work = lanes.buffers, lanes.work_list(self.visibility, width, own.programs if own.folds else 0)
        queries = self.group * (UNIT_ROWS if prefix else 1)
        config = self.config(queries) if prefix else own
        tiles = -(-queries // config.block_m)
        merged = min(triton.next_power_of_2(self.group), config.block_m)
        identity = lanes.tokens is None
        decode_kernel[(config.programs,)](
            *self.tensors,
            lanes.lengths,
            lanes.lengths if identity else lanes.tokens,
            lanes.lengths if identity else lanes.rows,
            buffers.prefix,
            buffers.unit_rows,
            work.items[int(prefix)],
            work.counts,
            *buffers.partials(self.heads, self.value_dim),
            buffers.arrived(self.kv_heads * tiles),
            out,
            out if lse is None else lse,
            *self.numbers,
            *self.strides,
            **self.constants,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_G=merged,
            BLOCK_P=max(1, min(_MOST_AT_ONCE, 1024 * config.num_warps // (merged * self.constants["DV"]))),
            TILES=tiles,
            MAX_PARTS=buffers.max_parts,
            SHARED=shares,
            PREFIX=prefix,
            FOLDS=own.folds and not prefix,
            IDENTITY=identity,
            WITH_LSE=lse is not None,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            maxnreg=config.registers,
            **launch.options(out.device),
        )

    def prefill(self, out: Tensor, lse: Tensor | None) -> None:
        assert self.plan.chunks is not None
        config = self.config(0, prefill=True)
        heads = min(self.group, config.block_m)
        spans = self.plan.chunks.has_spans(self.visibility)
        tiles = self.plan.chunks.tiles(config.block_m // heads, spans)
        prefill_kernel[(len(tiles), self.kv_heads * -(-self.group // heads))](
            *self.tensors,
            tiles,
            out,
            out if lse is None else lse,
            *self.numbers,
            *self.strides,
            **self.constants,
            TILE_HEADS=heads,
            SPANS=spans,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            WITH_LSE=lse is not None,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **launch.options(out.device, waits=False),
        )
