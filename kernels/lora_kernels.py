"""The kernels of ``lora``: tiles of tokens, their shrink and expand, and the look-up that is an embedding's shrink.

All of them read a ``LoraTable``: ``pointers``, int64 [linears, entries, FIELDS], and ``columns``, int64 [linears, 4].
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.launch import await_turn
from stoker.kernels.norm_rotary import act_times


@triton.jit
def _numbers_of(entry, ALIGNED: tl.constexpr):
    """What expands know of an entry: rank, scale, and the addresses of gain and shift, all of them 0 of slot 0."""
    scale = tl.load(entry + 5).to(tl.float64, bitcast=True).to(tl.float32)
    return rank_of(entry, ALIGNED), scale, tl.load(entry + 2), tl.load(entry + 3)


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
def _shrunk(
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

    WARPS: how many of them share each block of the depth; one product after the other would wait for the one before.
    """
    if STRIDED:
        rank_stride, depth_stride = tl.load(entry + 6), tl.load(entry + 7)
    else:
        rank_stride, depth_stride = depth, 1
    if WARPS > 1:
        total = tl.zeros((WARPS, BLOCK_T, BLOCK_R), tl.float32)
        part: tl.constexpr = BLOCK_K // WARPS
        for start in range(first, last, BLOCK_K):
            at = start + part * tl.arange(0, WARPS)[:, None, None] + tl.arange(0, part)[None, None, :]
            inside = at < depth  # where a span ends before, it ends with a block
            x = tl.load(x_ptr + rows[None, :, None] * x_stride + at, mask=mine[None, :, None] & inside, other=0.0)
            places = a_ptr + ranks[None, :, None] * rank_stride + at * depth_stride
            a = tl.load(places, mask=(ranks < rank)[None, :, None] & inside, other=0.0)
            total = tl.dot(x.to(DTYPE), tl.permute(a, (0, 2, 1)), total, input_precision=PRECISION)
        return tl.sum(total, axis=0)
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
            )
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
    DEPENDENT: tl.constexpr,
):
    """hidden[split, linear, token, rank] = x[token, span of the split] @ a.T, where the token's adapter has that rank.

    Of a tile of one slot all but x has been there for long, and with SETTLED x too: it waits for the kernel before only to write.
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
        if not SETTLED:
            await_turn(DEPENDENT)
        if used:
            total = _shrunk(
                x_ptr, x_stride, rows, mine, entry, a_ptr, ranks, rank, first, last, depth, DTYPE, PRECISION, STRIDED,
                BLOCK_T, BLOCK_R, BLOCK_K, WARPS,
            )  # fmt: skip
        if SETTLED:
            await_turn(DEPENDENT)
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
                total = _shrunk(
                    x_ptr, x_stride, rows, mine, entry, a_ptr, ranks, rank, first, last, depth, DTYPE, PRECISION, STRIDED,
                    BLOCK_T, BLOCK_R, BLOCK_K, WARPS,
                )  # fmt: skip
                target = out_ptr + rows[:, None] * RANK + ranks[None, :]
                tl.store(target, total, mask=mine[:, None] & (ranks < rank)[None, :])
            slots = tl.where(slots == slot, 0, slots)
            slot = tl.max(slots, axis=0)


@triton.jit
def _part_of_b(
    entry,
    columns,
    width,
    start,
    rank,
    DTYPE: tl.constexpr,
    STRIDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Some columns of what expands, by BLOCK_R ranks from ``start`` on, [BLOCK_N, BLOCK_R]."""
    b_ptr = matrix_of(entry + 1, DTYPE, ALIGNED)
    if STRIDED:
        width_stride, rank_stride = tl.load(entry + 8), tl.load(entry + 9)
    else:
        width_stride, rank_stride = rank, 1
    ranks = start + tl.arange(0, BLOCK_R)
    places = b_ptr + columns.to(tl.int64)[:, None] * width_stride + ranks[None, :] * rank_stride
    return tl.load(places, mask=(columns < width)[:, None] & (ranks < rank)[None, :], other=0.0)


@triton.jit
def _plus_ranks(
    total,
    place,
    b,
    start,
    rank,
    mine,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """``total``, fp32 [BLOCK_T, BLOCK_N], and what BLOCK_R ranks from ``start`` on give. place: of rank 0, [SPLITS, BLOCK_T, 1]."""
    ranks = start + tl.arange(0, BLOCK_R)[None, None, :]
    # Read as one: added one by one, each split's would be handed between threads for the product by itself.
    hidden = tl.load(place + ranks, mask=mine[None, :, None] & (ranks < rank), other=0.0, cache_modifier=".cg")
    hidden = tl.sum(hidden, axis=0)
    if BLOCK_T == 1:
        return total + tl.sum(b.to(tl.float32) * hidden, axis=1)[None, :]
    else:
        return tl.dot(hidden.to(DTYPE), tl.trans(b), total, input_precision=PRECISION)


@triton.jit
def _expanded(
    hidden_ptr,
    entry,
    b,
    rank,
    rows,
    mine,
    linear,
    columns,
    width,
    tokens,
    LINEARS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STRIDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """hidden @ b.T of an entry's adapter, fp32 [BLOCK_T, BLOCK_N]. b: ``_part_of_b`` from rank 0 on."""
    splits = (tl.arange(0, SPLITS)[:, None, None] * LINEARS + linear).to(tl.int64)
    place = hidden_ptr + (splits * tokens + rows[None, :, None]) * RANK
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    if BLOCK_R < RANK:
        for start in range(0, rank, BLOCK_R):
            total = _plus_ranks(total, place, b, start, rank, mine, DTYPE, PRECISION, BLOCK_T, BLOCK_R)
            b = _part_of_b(entry, columns, width, start + BLOCK_R, rank, DTYPE, STRIDED, ALIGNED, BLOCK_R)
    else:
        total = _plus_ranks(total, place, b, 0, rank, mine, DTYPE, PRECISION, BLOCK_T, BLOCK_R)
    return total


@triton.jit
def _adapted(before, added, gain_address, shift_address, bias_address, columns, width, OUT: tl.constexpr):
    """Some outputs of a linear with what an entry of the table does to them, fp32 [BLOCK_T, BLOCK_N].

    before: the outputs, of dtype OUT; added: what the matrices give, times the scale. The sum of both; with a gain g,
    bias + g * (before - bias + added); plus shift.
    """
    before = before.to(tl.float32)
    known = columns < width
    if gain_address != 0:
        gain = tl.load(gain_address.to(tl.pointer_type(tl.float32)) + columns, mask=known, other=0.0)[None, :]
        plain = before
        if bias_address != 0:
            bias_ptr = bias_address.to(tl.pointer_type(OUT))
            plain -= tl.load(bias_ptr + columns, mask=known, other=0.0).to(tl.float32)[None, :]
        added = (gain - 1) * plain + gain * added
    if shift_address != 0:
        added += tl.load(shift_address.to(tl.pointer_type(tl.float32)) + columns, mask=known, other=0.0)[None, :]
    return before + added


@triton.jit(do_not_specialize=["tokens"])
def expand_kernel(
    hidden_ptr,
    rows_ptr,
    slots_ptr,
    pointers_ptr,
    columns_ptr,
    out_ptr,
    out_stride,
    tokens,
    entries,
    LINEARS: tl.constexpr,
    GROUPED: tl.constexpr,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STRIDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    ALIGNED_OUT: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A tile of tokens by columns of one linear, of each adapter that it meets.

    All but what the shrink gives was there before that began, beside which this one comes up: it waits to read that.
    """
    tile = tl.program_id(1)
    linear = 0
    for other in tl.static_range(1, LINEARS):
        linear += (tile >= tl.load(columns_ptr + other * 4)).to(tl.int32)
    first_tile = tl.load(columns_ptr + linear * 4).to(tl.int32)
    offset = tl.load(columns_ptr + linear * 4 + 1).to(tl.int32)
    width = tl.load(columns_ptr + linear * 4 + 2).to(tl.int32)
    bias_address = tl.load(columns_ptr + linear * 4 + 3)
    if ALIGNED_OUT:
        offset, width = tl.multiple_of(offset, 16), tl.multiple_of(width, 16)
    columns = (tile - first_tile) * BLOCK_N + tl.arange(0, BLOCK_N)
    its_entries = pointers_ptr + linear * entries * FIELDS
    out_ptr += offset
    if GROUPED:
        rows = tl.load(rows_ptr + tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        slot = tl.load(slots_ptr + tl.program_id(0))
        entry = its_entries + tl.maximum(slot, 0) * FIELDS
        rank, scale, gain_address, shift_address = _numbers_of(entry, ALIGNED)
        used = (rank > 0) | (shift_address != 0)
        mine = (rows >= 0) & used
        inside = mine[:, None] & (columns < width)[None, :]
        target = out_ptr + rows[:, None] * out_stride + columns[None, :]
        before = tl.load(target, mask=inside, other=0.0, cache_modifier=".cg")
        b = _part_of_b(entry, columns, width, 0, rank, DTYPE, STRIDED, ALIGNED, BLOCK_R)
        await_turn(DEPENDENT)
        if used:
            added = _expanded(
                hidden_ptr, entry, b, rank, rows, mine, linear, columns, width, tokens, LINEARS, DTYPE, PRECISION, STRIDED,
                ALIGNED, SPLITS, RANK, BLOCK_T, BLOCK_R, BLOCK_N,
            )  # fmt: skip
            added *= scale
            out = _adapted(
                before, added, gain_address, shift_address, bias_address, columns, width, out_ptr.dtype.element_ty
            )
            tl.store(target, out, mask=inside)
    else:
        rows = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        slots = tl.load(slots_ptr + rows, mask=rows < tokens, other=0).to(tl.int32)
        slot = tl.max(slots, axis=0)
        await_turn(DEPENDENT)
        while slot > 0:
            entry = its_entries + slot * FIELDS
            rank, scale, gain_address, shift_address = _numbers_of(entry, ALIGNED)
            if (rank > 0) | (shift_address != 0):
                mine = slots == slot
                inside = mine[:, None] & (columns < width)[None, :]
                target = out_ptr + rows[:, None] * out_stride + columns[None, :]
                before = tl.load(target, mask=inside, other=0.0)
                b = _part_of_b(entry, columns, width, 0, rank, DTYPE, STRIDED, ALIGNED, BLOCK_R)
                added = _expanded(
                    hidden_ptr, entry, b, rank, rows, mine, linear, columns, width, tokens, LINEARS, DTYPE, PRECISION,
                    STRIDED, ALIGNED, SPLITS, RANK, BLOCK_T, BLOCK_R, BLOCK_N,
                )  # fmt: skip
                added *= scale
                out = _adapted(
                    before, added, gain_address, shift_address, bias_address, columns, width, out_ptr.dtype.element_ty
                )
                tl.store(target, out, mask=inside)
            slots = tl.where(slots == slot, 0, slots)
            slot = tl.max(slots, axis=0)


@triton.jit(do_not_specialize=["tokens"])
def expand_gated_kernel(
    hidden_ptr,
    rows_ptr,
    slots_ptr,
    pointers_ptr,
    columns_ptr,
    gate_up_ptr,
    out_ptr,
    gate_up_stride,
    tokens,
    width,
    entries,
    ACT: tl.constexpr,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STRIDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """As ``expand_kernel`` of gate and up, then ``act(gate) * up``; of tokens without an adapter, too.

    out: [T, width], beside gate_up, which stays as it is.
    """
    rows = tl.load(rows_ptr + tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    slot = tl.load(slots_ptr + tl.program_id(0))
    mine = rows >= 0
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = mine[:, None] & (columns < width)[None, :]
    gate_entry = pointers_ptr + tl.maximum(slot, 0) * FIELDS
    up_entry = gate_entry + entries * FIELDS
    place = gate_up_ptr + rows[:, None] * gate_up_stride + columns[None, :]
    gate = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
    up = tl.load(place + width, mask=inside, other=0.0, cache_modifier=".cg")
    gate_rank, gate_scale, gate_gain, gate_shift = _numbers_of(gate_entry, ALIGNED)
    up_rank, up_scale, up_gain, up_shift = _numbers_of(up_entry, ALIGNED)
    gate_bias, up_bias = tl.load(columns_ptr + 3), tl.load(columns_ptr + 4 + 3)
    of_gate = _part_of_b(gate_entry, columns, width, 0, gate_rank, DTYPE, STRIDED, ALIGNED, BLOCK_R)
    of_up = _part_of_b(up_entry, columns, width, 0, up_rank, DTYPE, STRIDED, ALIGNED, BLOCK_R)
    await_turn(DEPENDENT)
    if slot < 0:
        return
    added = gate_scale * _expanded(
        hidden_ptr, gate_entry, of_gate, gate_rank, rows, mine, 0, columns, width, tokens, 2, DTYPE, PRECISION, STRIDED,
        ALIGNED, SPLITS, RANK, BLOCK_T, BLOCK_R, BLOCK_N,
    )  # fmt: skip
    gate = _adapted(gate, added, gate_gain, gate_shift, gate_bias, columns, width, out_ptr.dtype.element_ty)
    added = up_scale * _expanded(
        hidden_ptr, up_entry, of_up, up_rank, rows, mine, 1, columns, width, tokens, 2, DTYPE, PRECISION, STRIDED,
        ALIGNED, SPLITS, RANK, BLOCK_T, BLOCK_R, BLOCK_N,
    )  # fmt: skip
    up = _adapted(up, added, up_gain, up_shift, up_bias, columns, width, out_ptr.dtype.element_ty)
    out = act_times(gate, up, out_ptr.dtype.element_ty, ACT)
    tl.store(out_ptr + rows[:, None] * width + columns[None, :], out, mask=inside)


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
