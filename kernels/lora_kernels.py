"""The kernels of ``lora``: shrink and expand of a tile of tokens, and the look-up that is an embedding's shrink.

All of them read a ``LoraTable``: ``pointers``, int64 [linears, entries, FIELDS], and ``columns``, int64 [linears, 4].
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.grouping import group_of_tile
from stoker.kernels.launch import await_turn
from stoker.kernels.norm_rotary import act_times


@triton.jit
def _tokens_of(
    tile,
    slots_ptr,
    order_ptr,
    starts_ptr,
    tokens,
    num_slots,
    SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """A tile's tokens, and the slot of each, 0 where there is none."""
    if SLOTS > 0:
        slot, first, end = group_of_tile(starts_ptr + 1, num_slots, tile, SLOTS, BLOCK_T)
        places = first + tl.arange(0, BLOCK_T)
        real = places < end  # which is 0 for a tile beyond all groups
        rows = tl.load(order_ptr + places, mask=real, other=0)
        slots = tl.where(real, slot + 1, 0)
    else:
        rows = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        slots = tl.load(slots_ptr + rows, mask=rows < tokens, other=0).to(tl.int32)
    return rows.to(tl.int64), slots


@triton.jit
def rank_of(entry, ALIGNED: tl.constexpr):
    rank = tl.load(entry + 4).to(tl.int32)
    return tl.multiple_of(rank, 8) if ALIGNED else rank


@triton.jit
def matrix_of(entry, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    matrix = tl.load(entry).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(matrix, 16) if ALIGNED else matrix


@triton.jit(do_not_specialize=["tokens"])
def shrink_kernel(
    x_ptr,
    slots_ptr,
    order_ptr,
    starts_ptr,
    pointers_ptr,
    hidden_ptr,
    x_stride,
    tokens,
    depth,
    span,
    entries,
    num_slots,
    LINEARS: tl.constexpr,
    SLOTS: tl.constexpr,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STRIDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """hidden[split, linear, token, rank] = x[token, span of the split] @ a.T, where the token's adapter has that rank."""
    await_turn(DEPENDENT)
    rows, slots = _tokens_of(tl.program_id(0), slots_ptr, order_ptr, starts_ptr, tokens, num_slots, SLOTS, BLOCK_T)
    linear = tl.program_id(1) // (RANK // BLOCK_R)
    ranks = (tl.program_id(1) % (RANK // BLOCK_R)) * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(2)
    first = split * span
    last = tl.minimum(first + span, depth)
    slot = tl.max(slots, axis=0)
    while slot > 0:
        entry = pointers_ptr + (linear * entries + slot) * FIELDS
        rank, a_ptr = rank_of(entry, ALIGNED), matrix_of(entry, DTYPE, ALIGNED)
        if tl.min(ranks, axis=0) < rank:
            if STRIDED:
                rank_stride, depth_stride = tl.load(entry + 6), tl.load(entry + 7)
            else:
                rank_stride, depth_stride = depth, 1
            mine = slots == slot
            total = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
            for start in range(first, last, BLOCK_K):
                at = start + tl.arange(0, BLOCK_K)
                inside = at < depth  # where a span ends before, it ends with a block
                x = tl.load(
                    x_ptr + rows[:, None] * x_stride + at[None, :],
                    mask=mine[:, None] & inside[None, :],
                    other=0.0,
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
            target = hidden_ptr + ((split * LINEARS + linear) * tokens + rows[:, None]) * RANK
            tl.store(target + ranks[None, :], total, mask=mine[:, None] & (ranks < rank)[None, :])
        slots = tl.where(slots == slot, 0, slots)
        slot = tl.max(slots, axis=0)


@triton.jit
def _adapted(
    hidden_ptr,
    entry,
    out_ptr,
    out_stride,
    bias_address,
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
    """Some outputs of a linear, at ``out_ptr``, with what an entry of the table does to them, fp32 [BLOCK_T, BLOCK_N].

    out + scale * hidden @ b.T; with a gain g, bias + g * (out - bias + the same); plus shift.
    """
    rank, b_ptr = rank_of(entry, ALIGNED), matrix_of(entry + 1, DTYPE, ALIGNED)
    gain_address, shift_address = tl.load(entry + 2), tl.load(entry + 3)
    scale = tl.load(entry + 5).to(tl.float64, bitcast=True).to(tl.float32)
    if STRIDED:
        width_stride, rank_stride = tl.load(entry + 8), tl.load(entry + 9)
    else:
        width_stride, rank_stride = rank, 1
    known = columns < width
    target = out_ptr + rows[:, None] * out_stride + columns[None, :]
    before = tl.load(target, mask=mine[:, None] & known[None, :], other=0.0)
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for start in range(0, rank, BLOCK_R):
        ranks = start + tl.arange(0, BLOCK_R)
        # Read as one: added one by one, each split's would be handed between threads for the product by itself.
        splits = tl.arange(0, SPLITS)[:, None, None]
        hidden = tl.load(
            hidden_ptr + ((splits * LINEARS + linear) * tokens + rows[None, :, None]) * RANK + ranks[None, None, :],
            mask=mine[None, :, None] & (ranks < rank)[None, None, :],
            other=0.0,
        )
        hidden = tl.sum(hidden, axis=0)
        b = tl.load(
            b_ptr + columns.to(tl.int64)[:, None] * width_stride + ranks[None, :] * rank_stride,
            mask=known[:, None] & (ranks < rank)[None, :],
            other=0.0,
        )
        if BLOCK_T == 1:
            total += tl.sum(b.to(tl.float32) * hidden, axis=1)[None, :]
        else:
            total = tl.dot(hidden.to(DTYPE), tl.trans(b), total, input_precision=PRECISION)
    total *= scale
    before = before.to(tl.float32)
    if gain_address != 0:
        gain = tl.load(gain_address.to(tl.pointer_type(tl.float32)) + columns, mask=known, other=0.0)[None, :]
        plain = before
        if bias_address != 0:
            bias_ptr = bias_address.to(tl.pointer_type(out_ptr.dtype.element_ty))
            plain -= tl.load(bias_ptr + columns, mask=known, other=0.0).to(tl.float32)[None, :]
        total = (gain - 1) * plain + gain * total
    if shift_address != 0:
        total += tl.load(shift_address.to(tl.pointer_type(tl.float32)) + columns, mask=known, other=0.0)[None, :]
    return before + total


@triton.jit(do_not_specialize=["tokens"])
def expand_kernel(
    hidden_ptr,
    slots_ptr,
    order_ptr,
    starts_ptr,
    pointers_ptr,
    columns_ptr,
    out_ptr,
    out_stride,
    tokens,
    entries,
    num_slots,
    LINEARS: tl.constexpr,
    SLOTS: tl.constexpr,
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

    Which those are was known before the shrink began, beside which this one comes up.
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
    rows, slots = _tokens_of(tl.program_id(0), slots_ptr, order_ptr, starts_ptr, tokens, num_slots, SLOTS, BLOCK_T)
    slot = tl.max(slots, axis=0)
    await_turn(DEPENDENT)
    while slot > 0:
        entry = pointers_ptr + (linear * entries + slot) * FIELDS
        if (tl.load(entry + 4) > 0) | (tl.load(entry + 3) != 0):
            mine = slots == slot
            out = _adapted(
                hidden_ptr,
                entry,
                out_ptr + offset,
                out_stride,
                bias_address,
                rows,
                mine,
                linear,
                columns,
                width,
                tokens,
                LINEARS,
                DTYPE,
                PRECISION,
                STRIDED,
                ALIGNED,
                SPLITS,
                RANK,
                BLOCK_T,
                BLOCK_R,
                BLOCK_N,
            )
            inside = mine[:, None] & (columns < width)[None, :]
            tl.store(out_ptr + offset + rows[:, None] * out_stride + columns[None, :], out, mask=inside)
        slots = tl.where(slots == slot, 0, slots)
        slot = tl.max(slots, axis=0)


@triton.jit(do_not_specialize=["tokens"])
def expand_gated_kernel(
    hidden_ptr,
    order_ptr,
    starts_ptr,
    pointers_ptr,
    columns_ptr,
    gate_up_ptr,
    out_ptr,
    gate_up_stride,
    tokens,
    width,
    entries,
    ACT: tl.constexpr,
    SLOTS: tl.constexpr,
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
    slot, first, end = group_of_tile(starts_ptr, entries, tl.program_id(0), SLOTS, BLOCK_T)
    places = first + tl.arange(0, BLOCK_T)
    mine = places < end  # of a tile beyond all groups: none
    rows = tl.load(order_ptr + places, mask=mine, other=0).to(tl.int64)
    await_turn(DEPENDENT)
    if slot >= entries:
        return
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate = _adapted(
        hidden_ptr,
        pointers_ptr + slot * FIELDS,
        gate_up_ptr,
        gate_up_stride,
        tl.load(columns_ptr + 3),
        rows,
        mine,
        0,
        columns,
        width,
        tokens,
        2,
        DTYPE,
        PRECISION,
        STRIDED,
        ALIGNED,
        SPLITS,
        RANK,
        BLOCK_T,
        BLOCK_R,
        BLOCK_N,
    )
    up = _adapted(
        hidden_ptr,
        pointers_ptr + (entries + slot) * FIELDS,
        gate_up_ptr + width,
        gate_up_stride,
        tl.load(columns_ptr + 4 + 3),
        rows,
        mine,
        1,
        columns,
        width,
        tokens,
        2,
        DTYPE,
        PRECISION,
        STRIDED,
        ALIGNED,
        SPLITS,
        RANK,
        BLOCK_T,
        BLOCK_R,
        BLOCK_N,
    )
    out = act_times(gate, up, out_ptr.dtype.element_ty, ACT)
    inside = mine[:, None] & (columns < width)[None, :]
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
