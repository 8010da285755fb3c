"""The Triton kernel of attention in chunks of prompts, tile by tile.

Arguments named after a tensor and one of its dimensions (``key_block``) are its strides. Addresses are 64 bits wide.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.attention.tiles import attend_tile, load_query, store_output


@triton.jit
def prefill_kernel(
    query,
    key_cache,
    value_cache,
    sinks,
    table,
    tiles,
    out,
    lse,
    scale,
    softcap,
    query_token,
    query_head,
    key_block,
    key_token,
    key_head,
    value_block,
    value_token,
    value_head,
    table_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SPANS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SAME_PLACES: tl.constexpr,
    VALUE_IS_KEY: tl.constexpr,
    WITH_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program a tile of one row's queries, key head, and TILE_HEADS of the heads that share it.

    SPANS: a tile has the end of the keys that all its queries see, be they after their own.
    """
    entry = tiles + tl.program_id(0) * (5 if SPANS else 4)
    row = tl.load(entry)
    first_token = tl.load(entry + 1)
    queries = tl.load(entry + 2)
    start = tl.load(entry + 3)
    kv_head = tl.program_id(1) % KV_HEADS
    first_head = tl.program_id(1) // KV_HEADS * TILE_HEADS

    m = tl.arange(0, BLOCK_M)
    index = m // TILE_HEADS
    in_group = first_head + m % TILE_HEADS
    real = (index < queries) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    token = first_token + index
    newest = start + index
    last = start + queries - 1
    oldest = newest * 0
    first_seen = 0  # by the first query, and by the last
    last_seen = 0
    if WINDOW > 0:
        oldest = tl.maximum(oldest, newest - WINDOW + 1)
        first_seen = tl.maximum(first_seen, start - WINDOW + 1)
        last_seen = tl.maximum(last_seen, last - WINDOW + 1)
    if CHUNK > 0:
        oldest = tl.maximum(oldest, newest // CHUNK * CHUNK)
        first_seen = tl.maximum(first_seen, start // CHUNK * CHUNK)
        last_seen = tl.maximum(last_seen, last // CHUNK * CHUNK)
    end = last + 1  # of the keys that some query sees, and of those that all see
    all_end = start + 1
    if SPANS:
        until = tl.load(entry + 4)
        newest = tl.maximum(newest, until - 1)
        end = tl.maximum(end, until)
        all_end = tl.maximum(all_end, until)

    offsets = token.to(tl.int64) * query_token + head * query_head
    query1, query2 = load_query(query, offsets, real, D1, D2, KEY_DIM)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV], tl.float32)
    # Only tiles at the edges, where some queries see what others do not, need a mask. What no query sees is not loaded: its
    # block may be another row's by now.
    all_see = first_seen + tl.cdiv(last_seen - first_seen, BLOCK_N) * BLOCK_N
    all_saw = tl.maximum(first_seen + (all_end - first_seen) // BLOCK_N * BLOCK_N, all_see)
    for phase in tl.static_range(3):
        if phase == 0:
            low, high = first_seen, tl.minimum(all_see, end)
        elif phase == 1:
            low, high = all_see, all_saw
        else:
            low, high = all_saw, end
        if (phase != 0) or (WINDOW > 0) or (CHUNK > 0):
            for begin in range(low, high, BLOCK_N):
                at = begin + tl.arange(0, BLOCK_N)
                top, total, acc = attend_tile(
                    top,
                    total,
                    acc,
                    query1,
                    query2,
                    newest,
                    oldest,
                    key_cache + kv_head * key_head,
                    value_cache + kv_head * value_head,
                    table + row.to(tl.int64) * table_row,
                    at // BLOCK_SIZE,
                    at % BLOCK_SIZE,
                    at,
                    at < high,
                    scale,
                    softcap,
                    key_block,
                    key_token,
                    value_block,
                    value_token,
                    KEY_DIM,
                    VALUE_DIM,
                    D1,
                    D2,
                    DV,
                    SOFTCAP,
                    SAME_PLACES,
                    VALUE_IS_KEY,
                    PRECISION,
                    phase != 1,
                    phase != 1,
                )
    store_output(
        out,
        lse,
        sinks,
        token,
        head,
        real,
        top,
        total,
        acc,
        HEADS=KV_HEADS * GROUP,
        VALUE_DIM=VALUE_DIM,
        DV=DV,
        SINKS=SINKS,
        WITH_LSE=WITH_LSE,
    )
