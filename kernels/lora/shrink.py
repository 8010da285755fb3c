"""The first Triton kernels of ``lora``: tiles of tokens, their shrink, and the look-up that is an embedding's shrink.

They read a ``LoraTable``'s ``pointers``, int64 [linears, entries, FIELDS].
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.launch import await_end, await_turn, fetch, let_next_up


@triton.jit(do_not_specialize=["tokens", "tiles"])
def tiles_kernel(
    slots_ptr,
    rows_ptr,
    of_tile_ptr,
    tokens,
    tiles,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a slot: which tokens its tiles have, in their own order, -1 for none. Slot 0's come last, and those of nobody.

    rows: int32 [tiles, BLOCK_T]; of_tile: int32 [tiles], the slot of each, -1 for nobody. SLOTS: of them and 0, a power of two.
    """
    await_turn(DEPENDENT)
    slot = tl.program_id(0)
    numbers = tl.arange(0, SLOTS)
    counts = tl.zeros((SLOTS,), tl.int32)
    for start in range(0, tokens, BLOCK):
        at = start + tl.arange(0, BLOCK)
        slots = tl.load(slots_ptr + at, mask=at < tokens, other=-1).to(tl.int32)
        counts += tl.sum((slots[:, None] == numbers[None, :]).to(tl.int32), axis=0)
    filled = tl.cdiv(counts, BLOCK_T)
    earlier = (numbers > 0) & ((numbers < slot) | (slot == 0))
    first = tl.sum(tl.where(earlier, filled, 0), axis=0)
    end = first + tl.sum(tl.where(numbers == slot, filled, 0), axis=0)
    place = first * BLOCK_T
    for start in range(0, tokens, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mine = (tl.load(slots_ptr + at, mask=at < tokens, other=-1).to(tl.int32) == slot).to(tl.int32)
        tl.store(rows_ptr + place + tl.cumsum(mine, axis=0) - mine, at, mask=mine > 0)
        place += tl.sum(mine, axis=0)
    last = tl.where(slot == 0, tiles, end)
    for empty in range(place, last * BLOCK_T, BLOCK):
        at = empty + tl.arange(0, BLOCK)
        tl.store(rows_ptr + at, tl.full((BLOCK,), -1, tl.int32), mask=at < last * BLOCK_T)
    for tile in range(first, last, BLOCK):
        at = tile + tl.arange(0, BLOCK)
        tl.store(of_tile_ptr + at, tl.where(at < end, slot, -1), mask=at < last)


@triton.jit
def rank_of(entry, ALIGNED: tl.constexpr):
    rank = tl.load(entry + 4).to(tl.int32)
    return tl.multiple_of(rank, 8) if ALIGNED else rank


@triton.jit
def matrix_of(entry, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    matrix = tl.load(entry).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(matrix, 16) if ALIGNED else matrix


@triton.jit
def _depth_by_warp(start, BLOCK_K: tl.constexpr, WARPS: tl.constexpr):
    """Where in the depth each warp's part of a block is, [WARPS, 1, BLOCK_K // WARPS]."""
    part: tl.constexpr = BLOCK_K // WARPS
    return start + part * tl.arange(0, WARPS)[:, None, None] + tl.arange(0, part)[None, None, :]


@triton.jit
def sum_of_first(parts):
    """Of [P, M, N], over P, a power of two up to 256.

    Numbers are brought together first, by way of shared memory, and then added by threads: ``tl.sum`` would hand them from one
    to another, one after the other.
    """
    COUNT: tl.constexpr = parts.shape[0]
    M: tl.constexpr = parts.shape[1]
    N: tl.constexpr = parts.shape[2]
    if COUNT == 1:
        total = tl.reshape(parts, (M, N))
    else:
        total = tl.permute(parts, (1, 2, 0))
    for step in tl.static_range(8):
        if (COUNT >> step) > 1:
            if (COUNT >> step) > 2:
                total = tl.reshape(total, (M, N, COUNT >> (step + 1), 2))
            one, other = tl.split(total)
            total = one + other
    return total


@triton.jit
def shrunk(
    x_ptr,
    x_stride,
    rows,
    mine,
    entry,
    a_ptr,
    ranks,
    rank,
    first,
    last,
    depth,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STRIDED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
):
    """x[token, first:last] @ a.T of an entry's adapter, fp32 [BLOCK_T, BLOCK_R].

    DTYPE: that both are multiplied in.
    WARPS: how many of them share each block of the depth; one product after the other would wait for the one before.
    """
    if STRIDED:
        rank_stride, depth_stride = tl.load(entry + 6), tl.load(entry + 7)
    else:
        rank_stride, depth_stride = depth, 1
    if WARPS > 1:
        total = tl.zeros((WARPS, BLOCK_T, BLOCK_R), tl.float32)
        for start in range(first, last, BLOCK_K):
            at = _depth_by_warp(start, BLOCK_K, WARPS)
            inside = at < depth  # where a span ends before, it ends with a block
            x = tl.load(x_ptr + rows[None, :, None] * x_stride + at, mask=mine[None, :, None] & inside, other=0.0)
            places = a_ptr + ranks[None, :, None] * rank_stride + at * depth_stride
            a = tl.load(places, mask=(ranks < rank)[None, :, None] & inside, other=0.0).to(DTYPE)
            total = tl.dot(x.to(DTYPE), tl.permute(a, (0, 2, 1)), total, input_precision=PRECISION)
        return sum_of_first(total)
    else:
        total = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
        for start in range(first, last, BLOCK_K):
            at = start + tl.arange(0, BLOCK_K)
            inside = at < depth
            x = tl.load(
                x_ptr + rows[:, None] * x_stride + at[None, :], mask=mine[:, None] & inside[None, :], other=0.0
            ).to(DTYPE)
            a = tl.load(
                a_ptr + ranks[:, None] * rank_stride + at[None, :] * depth_stride,
                mask=(ranks < rank)[:, None] & inside[None, :],
                other=0.0,
            ).to(DTYPE)
            if BLOCK_T == 1:
                total += tl.sum(a.to(tl.float32) * x.to(tl.float32), axis=1)[None, :]
            else:
                total = tl.dot(x, tl.trans(a), total, input_precision=PRECISION)
        return total


@triton.jit(do_not_specialize=["tokens"])
def shrink_kernel(
    x_ptr,
    rows_ptr,
    slots_ptr,
    pointers_ptr,
    hidden_ptr,
    x_stride,
    tokens,
    depth,
    span,
    entries,
    LINEARS: tl.constexpr,
    GROUPED: tl.constexpr,
    SETTLED: tl.constexpr,
    ROUNDED: tl.constexpr,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STRIDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    HELD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """hidden[split, linear, token, rank] = x[token, span of the split] @ a.T, where the token's adapter has that rank.

    Of a tile of one slot all but x has been there for long, and with SETTLED x too: it waits for the kernel before only to write,
    and lets the expand up before. With ROUNDED, matrices of another dtype are rounded to x's. With HELD, a span is one block, and
    threads hold their part of a when x comes.
    """
    tile, split = tl.program_id(0), tl.program_id(2)
    linear = tl.program_id(1) // (RANK // BLOCK_R)
    first_rank = (tl.program_id(1) % (RANK // BLOCK_R)) * BLOCK_R
    ranks = first_rank + tl.arange(0, BLOCK_R)
    first = split * span
    last = tl.minimum(first + span, depth)
    out_ptr = hidden_ptr + (split * LINEARS + linear).to(tl.int64) * tokens * RANK
    if GROUPED:
        rows = tl.load(rows_ptr + tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        slot = tl.load(slots_ptr + tile)
        mine = rows >= 0
        entry = pointers_ptr + (linear * entries + tl.maximum(slot, 0)) * FIELDS
        rank, a_ptr = rank_of(entry, ALIGNED), matrix_of(entry, DTYPE, ALIGNED)  # both 0 of slot 0
        used = first_rank < rank
        total = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
        PRODUCT: tl.constexpr = x_ptr.dtype.element_ty if ROUNDED else DTYPE
        if SETTLED:
            let_next_up(DEPENDENT)
        if HELD:
            deep = tl.permute(_depth_by_warp(first, BLOCK_K, WARPS), (0, 2, 1))
            of_a = (ranks < rank)[None, None, :] & (deep < first + span) & (deep < depth)
            a = tl.load(a_ptr + ranks[None, None, :] * depth + deep, mask=of_a, other=0.0).to(PRODUCT)
        if not SETTLED:
            if DEPENDENT and not HELD and not STRIDED and BLOCK_T <= 16:  # noqa: SIM102 - known when it is compiled
                if used:  # what it reads of a is on its way to L2, while the kernel before still runs
                    its_rows = a_ptr + tl.minimum(ranks, rank - 1) * depth
                    for start in range(first, last, BLOCK_K):
                        fetch(its_rows + start, BLOCK_K, tl.minimum(BLOCK_K, depth - start) - 1)
            await_turn(DEPENDENT)
        if HELD:
            by_warp = tl.zeros((WARPS, BLOCK_T, BLOCK_R), tl.float32)
            for start in range(first, last, BLOCK_K):  # once: of a loop, all loads are on their way at the same time
                at = _depth_by_warp(start, BLOCK_K, WARPS)
                # ``mine & used``, which Triton 3.9's interpreter does not take for a mask.
                of_rows = mine & (tl.full((BLOCK_T,), first_rank, tl.int32) < rank)
                of_x = of_rows[None, :, None] & (at < first + span) & (at < depth)
                x = tl.load(x_ptr + rows[None, :, None] * x_stride + at, mask=of_x, other=0.0).to(PRODUCT)
                by_warp = tl.dot(x, a, by_warp, input_precision=PRECISION)
            total = sum_of_first(by_warp)
        elif used:
            total = shrunk(
                x_ptr, x_stride, rows, mine, entry, a_ptr, ranks, rank, first, last, depth, PRODUCT, PRECISION, STRIDED,
                BLOCK_T, BLOCK_R, BLOCK_K, WARPS,
            )  # fmt: skip
        if SETTLED:
            await_end(DEPENDENT)
        if used:
            target = out_ptr + rows[:, None] * RANK + ranks[None, :]
            tl.store(target, total, mask=mine[:, None] & (ranks < rank)[None, :])
    else:
        await_turn(DEPENDENT)
        rows = (tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        slots = tl.load(slots_ptr + rows, mask=rows < tokens, other=0).to(tl.int32)
        slot = tl.max(slots, axis=0)
        while slot > 0:
            entry = pointers_ptr + (linear * entries + slot) * FIELDS
            rank, a_ptr = rank_of(entry, ALIGNED), matrix_of(entry, DTYPE, ALIGNED)
            if first_rank < rank:
                mine = slots == slot
                total = shrunk(
                    x_ptr, x_stride, rows, mine, entry, a_ptr, ranks, rank, first, last, depth, DTYPE, PRECISION, STRIDED,
                    BLOCK_T, BLOCK_R, BLOCK_K, WARPS,
                )  # fmt: skip
                target = out_ptr + rows[:, None] * RANK + ranks[None, :]
                tl.store(target, total, mask=mine[:, None] & (ranks < rank)[None, :])
            slots = tl.where(slots == slot, 0, slots)
            slot = tl.max(slots, axis=0)


@triton.jit
def look_up_kernel(
    ids_ptr,
    slots_ptr,
    pointers_ptr,
    hidden_ptr,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """hidden[token, rank] = a[rank, id of the token], where the token's adapter has that rank."""
    await_turn(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    ranks = tl.arange(0, RANK)
    entry = pointers_ptr + tl.load(slots_ptr + token) * FIELDS
    known = ranks < tl.load(entry + 4)
    a_ptr = tl.load(entry).to(tl.pointer_type(DTYPE))
    at = ranks * tl.load(entry + 6) + tl.load(ids_ptr + token) * tl.load(entry + 7)
    tl.store(hidden_ptr + token * RANK + ranks, tl.load(a_ptr + at, mask=known, other=0.0).to(tl.float32), mask=known)
