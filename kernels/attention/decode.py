"""The Triton kernel of decode rows' attention. It takes its work from the list that ``plan`` makes.

Arguments named after a tensor and one of its dimensions (``key_block``) are its strides. Addresses are 64 bits wide.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.attention.splits import row_runs, row_splits, split_size
from stoker.kernels.attention.tiles import attend_tile, fold, load_query, merge, store_output, store_partial
from stoker.kernels.launch import await_turn, fetch


@triton.jit
def _own_keys(lane, run, shared, share, lengths, WINDOW: tl.constexpr, CHUNK: tl.constexpr, FOLDS: tl.constexpr):
    """Of a run of a row's own splits: their size, its first key and the one after its last, and how many splits are before it.

    And of the row: how many splits its first run has, how many there are in all, and the number of runs.
    """
    length = tl.load(lengths + lane).to(tl.int32)
    first, size, first_split, own_parts = row_splits(length, shared, WINDOW, CHUNK)
    runs, together = own_parts, 1
    if FOLDS:
        runs, together = row_runs(length - first, size, own_parts, share)
    fewer = runs * together - own_parts  # splits in the first run than in the others
    before = tl.maximum(run * together - fewer, 0)
    begin = tl.maximum((first_split + before) * size, first)
    end = tl.minimum((first_split + (run + 1) * together - fewer) * size, length)
    return size, begin, end, before, together - fewer, own_parts, runs


@triton.jit
def _fetch_first_keys(
    key_cache,
    value_cache,
    table,
    lengths,
    rows,
    prefix,
    items,
    counts,
    key_block,
    key_token,
    key_head,
    value_block,
    value_token,
    value_head,
    table_row,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARED: tl.constexpr,
    FOLDS: tl.constexpr,
    IDENTITY: tl.constexpr,
    VALUE_IS_KEY: tl.constexpr,
):
    """Have a program's first tile of keys and values on their way to L2, whoever writes the newest of them meanwhile."""
    work = tl.program_id(0)
    if work < tl.load(counts) * (KV_HEADS * TILES):
        kv_head = work % KV_HEADS
        item = tl.load(items + work // (KV_HEADS * TILES))
        lane = item // MAX_PARTS
        shared, share = 0, 0
        if SHARED:
            shared = tl.load(prefix + lane)
        if FOLDS:
            share = tl.load(counts + 2)
        _, begin, end, _, _, _, _ = _own_keys(lane, item % MAX_PARTS, shared, share, lengths, WINDOW, CHUNK, FOLDS)
        row = lane
        if not IDENTITY:
            row = tl.load(rows + lane)
        at = tl.minimum(begin // BLOCK_N * BLOCK_N + tl.arange(0, BLOCK_N), tl.maximum(end - 1, 0))
        block = tl.load(table + row.to(tl.int64) * table_row + at // BLOCK_SIZE).to(tl.int64)
        within = at % BLOCK_SIZE
        fetch(key_cache + kv_head * key_head + block * key_block + within * key_token, KEY_DIM)
        if not VALUE_IS_KEY:
            fetch(value_cache + kv_head * value_head + block * value_block + within * value_token, VALUE_DIM)


# Rows of one tensor, of any length.
@triton.jit(do_not_specialize=["early"], do_not_specialize_on_alignment=["tokens", "rows"])
def decode_kernel(
    query,
    key_cache,
    value_cache,
    sinks,
    table,
    lengths,
    tokens,
    rows,
    prefix,
    unit_rows,
    items,
    counts,
    partial,
    partial_stats,
    arrived,
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
    early,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILES: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARED: tl.constexpr,
    PREFIX: tl.constexpr,
    FOLDS: tl.constexpr,
    IDENTITY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SAME_PLACES: tl.constexpr,
    VALUE_IS_KEY: tl.constexpr,
    WITH_LSE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Work through a list: a run of splits of one row's own keys, or, if PREFIX, a split of those a unit of rows shares.

    FOLDS: runs may have several splits. Those that a row begins with are folded as they come, in the order and with the bits
    of ``merge``; of later runs each split is left for it.

    IDENTITY: lane i is token i and row i of the table. Key heads lie side by side in the cache, so programs that run
    together take neighbouring ones.

    early: whether lists, lengths and tables were there before the kernel before this one began.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    if DEPENDENT and not PREFIX:  # noqa: SIM102 - that is known when the kernel is compiled
        if early > 0:
            _fetch_first_keys(
                key_cache, value_cache, table, lengths, rows, prefix, items, counts, key_block, key_token, key_head,
                value_block, value_token, value_head, table_row, KV_HEADS, KEY_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_N, TILES,
                MAX_PARTS, WINDOW, CHUNK, SHARED, FOLDS, IDENTITY, VALUE_IS_KEY,
            )  # fmt: skip
    await_turn(DEPENDENT)
    work_items = tl.load(counts + PREFIX) * (KV_HEADS * TILES)
    share = 0
    if FOLDS:
        share = tl.load(counts + 2)
    for work in range(tl.program_id(0), work_items, tl.num_programs(0)):
        kv_head = work % KV_HEADS
        tile = work // KV_HEADS % TILES
        item = tl.load(items + work // (KV_HEADS * TILES))
        lane = item // MAX_PARTS
        run = item % MAX_PARTS

        shared = 0
        shared_parts = 0
        if SHARED:
            shared = tl.load(prefix + lane)
            shared_parts = tl.cdiv(shared, split_size(shared))
        if PREFIX:
            queries = tl.load(unit_rows + lane) * GROUP
            size = split_size(shared)
            begin = run * size
            end = tl.minimum(begin + size, shared)
            part = run
            leading = 1
            own_parts = 0
            runs = 0
        else:
            queries = GROUP
            size, begin, end, before, leading, own_parts, runs = _own_keys(
                lane, run, shared, share, lengths, WINDOW, CHUNK, FOLDS
            )
            part = shared_parts + before

        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        real = m < queries
        head = kv_head * GROUP + m % GROUP
        lanes = lane + m // GROUP
        row = lane
        token = lanes
        if not IDENTITY:
            row = tl.load(rows + lane)
            token = tl.load(tokens + lanes, mask=real, other=0)
        offsets = token.to(tl.int64) * query_token + head * query_head
        query1, query2 = load_query(query, offsets, real, D1, D2, KEY_DIM)
        places = (lanes.to(tl.int64) * MAX_PARTS + part) * HEADS + head
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DV], tl.float32)
        so_far_top, so_far_total, so_far_acc = top, total, acc
        blocks = table + row.to(tl.int64) * table_row
        for start in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
            n = tl.arange(0, BLOCK_N)
            at = start + n
            if BLOCK_N % BLOCK_SIZE == 0:  # tiles begin with blocks, and are alike but for the first page
                page, within = start // BLOCK_SIZE + n // BLOCK_SIZE, n % BLOCK_SIZE
            else:
                page, within = at // BLOCK_SIZE, at % BLOCK_SIZE
            seen = at < end
            if SHARED or WINDOW > 0 or CHUNK > 0:  # a row's own keys may begin within a tile
                seen = seen & (at >= begin)
            top, total, acc = attend_tile(
                top,
                total,
                acc,
                query1,
                query2,
                m,
                m,
                key_cache + kv_head * key_head,
                value_cache + kv_head * value_head,
                blocks,
                page,
                within,
                at,
                seen,
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
                True,
                False,
            )
            if FOLDS:
                following = start + BLOCK_N
                if (following % size == 0) & (following < end):
                    if run == 0:
                        so_far_top, so_far_total, so_far_acc = fold(
                            so_far_top, so_far_total, so_far_acc, top, total, acc
                        )
                    else:
                        store_partial(partial, partial_stats, places, real, top, total, acc, VALUE_DIM, DV)
                        places += HEADS
                    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
                    total = tl.zeros([BLOCK_M], tl.float32)
                    acc = tl.zeros([BLOCK_M, DV], tl.float32)
        if FOLDS:  # noqa: SIM102 - that is known when the kernel is compiled
            if run == 0:
                top, total, acc = fold(so_far_top, so_far_total, so_far_acc, top, total, acc)

        if PREFIX:
            store_partial(partial, partial_stats, places, real, top, total, acc, VALUE_DIM, DV)
        elif runs == 1:
            if SHARED and shared_parts > 0:  # left by the kernel before
                base = lane.to(tl.int64) * (MAX_PARTS * HEADS)
                shared_top, shared_total, shared_acc = merge(
                    partial + base * VALUE_DIM,
                    partial_stats + 2 * base,
                    head,
                    real,
                    shared_parts,
                    shared_parts,
                    0,
                    HEADS,
                    VALUE_DIM,
                    DV,
                    BLOCK_M,
                    max(1, BLOCK_P * BLOCK_G // BLOCK_M),
                )
                top, total, acc = fold(shared_top, shared_total, shared_acc, top, total, acc)
            store_output(out, lse, sinks, token, head, real, top, total, acc, HEADS, VALUE_DIM, DV, SINKS, WITH_LSE)
        else:
            store_partial(partial, partial_stats, places, real, top, total, acc, VALUE_DIM, DV)
            tl.debug_barrier()  # every thread's stores come before the one atomic that releases them
            counter = arrived + (lane * KV_HEADS + kv_head) * TILES + tile
            # Only the row's own pieces are waited for.
            if tl.atomic_add(counter, 1, sem="acq_rel") == runs - 1:
                tl.store(counter, 0)
                g = tile * BLOCK_M + tl.arange(0, BLOCK_G)
                head_g = kv_head * GROUP + g
                real_g = g < GROUP
                base = lane.to(tl.int64) * (MAX_PARTS * HEADS)
                top_g, total_g, acc_g = merge(
                    partial + base * VALUE_DIM,
                    partial_stats + 2 * base,
                    head_g,
                    real_g,
                    shared_parts + own_parts - leading + 1,
                    shared_parts + 1,
                    leading - 1,
                    HEADS,
                    VALUE_DIM,
                    DV,
                    BLOCK_G,
                    BLOCK_P,
                )
                token_g = g * 0 + lane
                if not IDENTITY:
                    token_g = g * 0 + tl.load(tokens + lane)
                store_output(
                    out,
                    lse,
                    sinks,
                    token_g,
                    head_g,
                    real_g,
                    top_g,
                    total_g,
                    acc_g,
                    HEADS,
                    VALUE_DIM,
                    DV,
                    SINKS,
                    WITH_LSE,
                )
