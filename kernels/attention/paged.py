"""Paged attention in Triton: its launches for decode rows and for chunks of prompts.

Decode is bound by memory. A row of c keys costs ``c * kv_heads * (key_dim + value_dim) * itemsize`` bytes a layer: on an
H200 (4.3 TB/s) 0.5 us for 1,000 keys of Llama-3.2-1B. Little else should move:

- The query heads of a key head are rows of one tile, so each key is read once.
- Programs for neighbouring key heads run together, since those lie side by side in memory.
- A few programs on each SM keep about 100 KiB of loads in flight; latency times bandwidth asks for about 25 KiB.
- Rows that share their first keys (samples of one prompt) form a unit, which reads those keys once.

A row is cut into splits, which are merged one after the other, in an order that follows from its length alone. With enough
rows, one program reads all splits of a row and merges them in registers. Otherwise each split's result goes to an fp32
workspace, which mostly stays in L2, and the last program to arrive merges them, with the same bits. That saves a second
kernel for each layer, and costs each such program some 2 us (by hand on an H200: 6.0 for 3.9 us at one row of 512 keys, 103
for 72 at 256 such rows), mostly the wait until its stores have arrived.

Prefill is bound by arithmetic: tiles of queries and heads walk their row's keys as in "FlashAttention-2" (Dao, 2023).
Exponentials are of base two, with log2(e) in the scale. Keys and values are gathered through the block table in 16-byte
pieces along the head. A token's entry of the table is read once, for its key and its value.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.attention.config import HeadShape, LaunchConfig, launch_config
from stoker.kernels.attention.decode import decode_kernel
from stoker.kernels.attention.plan import UNIT_ROWS, AttentionPlan, Lanes
from stoker.kernels.attention.prefill import prefill_kernel
from stoker.kernels.attention.write import write_kernel
from stoker.kernels.reference.attention_plan import Visibility

_LOG2E = 1.4426950408889634
_MOST_AT_ONCE = 8  # pieces that a merge has on their way: each is code of its own, and takes time to compile


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
    """``paged_attention``, and the log-sum-exp of each query's scores without sinks, fp32 [T, Hq].

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
    """One layer's arguments, as all attention kernels of a step take them."""

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
        value_is_key = (
            self.value_dim == 2 ** int(math.log2(self.key_dim)) < self.key_dim
            and value_cache.data_ptr() == key_cache.data_ptr()
            and value_cache.stride() == key_cache.stride()
        )
        itemsizes = query.element_size(), key_cache.element_size()
        self.shape = HeadShape(self.key_dim, self.value_dim, *itemsizes, value_is_key=value_is_key)
        self.device = query.device
        first, rest = self.shape.key_parts
        self.constants: dict[str, Any] = {
            "KV_HEADS": self.kv_heads,
            "GROUP": self.group,
            "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim,
            "D1": first,
            "D2": rest,
            "DV": self.shape.value_part,
            "BLOCK_SIZE": plan.block_size,
            "WINDOW": visibility.window or 0,
            "CHUNK": visibility.chunk or 0,
            "SOFTCAP": softcap is not None,
            "SINKS": sinks is not None,
            "SAME_PLACES": key_cache.stride() == value_cache.stride(),
            "VALUE_IS_KEY": value_is_key,
            "PRECISION": "ieee",  # of fp32; the others have one way
        }

    def config(self, queries: int, prefill: bool = False) -> LaunchConfig:
        device = launch.multiprocessors(self.device), launch.shared_memory(self.device)
        return launch_config(queries, self.shape, *device, prefill=prefill)

    def decode(self, lanes: Lanes, out: Tensor, lse: Tensor | None) -> None:
        """Launch decode rows: first the keys that units share, then each row's own splits, the last of which merges them all."""
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
            int(work.used),
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
        work.used = True

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
