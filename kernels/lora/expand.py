"""The last Triton kernels of ``lora``: they expand a tile of tokens into the output.

They read a ``LoraTable``: ``pointers``, int64 [linears, entries, FIELDS], and ``columns``, int64 [linears, 4].
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.launch import await_turn, fetch
from stoker.kernels.lora.shrink import matrix_of, rank_of, sum_of_first
from stoker.kernels.norm_rotary import act_times


@triton.jit
def _numbers_of(entry, ALIGNED: tl.constexpr):
    """What expands know of an entry: rank, scale, and the addresses of gain and shift, all of them 0 of slot 0."""
    scale = tl.load(entry + 5).to(tl.float64, bitcast=True).to(tl.float32)
    return rank_of(entry, ALIGNED), scale, tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def _part_of_b(b_ptr, entry, columns, width, start, rank, STRIDED: tl.constexpr, BLOCK_R: tl.constexpr):
    """Some columns of what expands, by BLOCK_R ranks from ``start`` on, [BLOCK_N, BLOCK_R]."""
    ranks = start + tl.arange(0, BLOCK_R)
    if STRIDED:
        width_stride, rank_stride = tl.load(entry + 8), tl.load(entry + 9)
        places = b_ptr + columns.to(tl.int64)[:, None] * width_stride + ranks[None, :] * rank_stride
    else:
        places = b_ptr + (columns[:, None] * rank + ranks[None, :])
    return tl.load(places, mask=(columns < width)[:, None] & (ranks < rank)[None, :], other=0.0)


@triton.jit
def _fetch_b(b_ptr, first, last, rank, MOST: tl.constexpr):
    """Some columns of what expands, MOST numbers at most, are on their way to L2."""
    if rank > 0:
        fetch(b_ptr + first * rank + tl.arange(0, 1), MOST, (last - first) * rank - 1)


@triton.jit
def _hidden_places(hidden_ptr, rows, linear, tokens, LINEARS: tl.constexpr, SPLITS: tl.constexpr, RANK: tl.constexpr):
    """Where rank 0 of what the shrink gave is, [SPLITS, BLOCK_T, 1]."""
    splits = (tl.arange(0, SPLITS)[:, None, None] * LINEARS + linear).to(tl.int64)
    return hidden_ptr + (splits * tokens + rows[None, :, None]) * RANK


@triton.jit
def _part_of_hidden(places, mine, start, rank, BLOCK_R: tl.constexpr):
    """BLOCK_R ranks from ``start`` on of what the shrink's splits gave, [SPLITS, BLOCK_T, BLOCK_R].

    Read as one: added one by one, each split's would be handed between threads for the product by itself.
    """
    ranks = start + tl.arange(0, BLOCK_R)[None, None, :]
    return tl.load(places + ranks, mask=mine[None, :, None] & (ranks < rank), other=0.0, cache_modifier=".cg")


@triton.jit
def _of_all_splits(hidden, DTYPE: tl.constexpr):
    """``_part_of_hidden`` as it is multiplied, [BLOCK_T, BLOCK_R]."""
    hidden = sum_of_first(hidden)
    return hidden if hidden.shape[0] == 1 else hidden.to(DTYPE)


@triton.jit
def _plus_ranks(total, hidden, b, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr):
    """``total``, fp32 [BLOCK_T, BLOCK_N], and what some ranks give. hidden: ``_of_all_splits``; b: ``_part_of_b``."""
    if BLOCK_T == 1:
        return total + tl.sum(b.to(tl.float32) * hidden, axis=1)[None, :]
    else:
        if BLOCK_T < 16:  # so few tokens a tensor core takes only as columns
            return tl.trans(tl.dot(b, tl.trans(hidden), tl.trans(total), input_precision=PRECISION))
        return tl.dot(hidden, tl.trans(b), total, input_precision=PRECISION)


@triton.jit
def _expanded(
    places,
    hidden,
    b_ptr,
    b,
    entry,
    rank,
    mine,
    columns,
    width,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STRIDED: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """hidden @ b.T of an entry's adapter, fp32 [BLOCK_T, BLOCK_N]. hidden, b: of rank 0 on, as ``_plus_ranks``'s."""
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    if BLOCK_R < RANK:
        for start in range(0, rank, BLOCK_R):
            total = _plus_ranks(total, hidden, b, PRECISION, BLOCK_T)
            hidden = _of_all_splits(_part_of_hidden(places, mine, start + BLOCK_R, rank, BLOCK_R), DTYPE)
            b = _part_of_b(b_ptr, entry, columns, width, start + BLOCK_R, rank, STRIDED, BLOCK_R)
    else:
        total = _plus_ranks(total, hidden, b, PRECISION, BLOCK_T)
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
    PLAIN: tl.constexpr,
    ALIGNED_OUT: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A tile of tokens by columns of one linear, of each adapter that it meets.

    It comes up beside the shrink, and perhaps beside the projection before that: it waits to read what these give. PLAIN: there
    are no gains and no shifts.
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
        used = rank > 0
        if not PLAIN:
            used |= shift_address != 0
        mine = rows >= tl.where(used, 0, 2**31 - 1)
        inside = mine[:, None] & (columns < width)[None, :]
        target = out_ptr + rows[:, None] * out_stride + columns[None, :]
        b_ptr = matrix_of(entry + 1, DTYPE, ALIGNED)
        b = _part_of_b(b_ptr, entry, columns, width, 0, rank, STRIDED, BLOCK_R)
        await_turn(DEPENDENT)
        before = tl.load(target, mask=inside, other=0.0, cache_modifier=".cg")
        if used:
            places = _hidden_places(hidden_ptr, rows, linear, tokens, LINEARS, SPLITS, RANK)
            hidden = _of_all_splits(_part_of_hidden(places, mine, 0, rank, BLOCK_R), DTYPE)
            added = _expanded(
                places, hidden, b_ptr, b, entry, rank, mine, columns, width, DTYPE, PRECISION, STRIDED, RANK, BLOCK_T,
                BLOCK_R, BLOCK_N,
            )  # fmt: skip
            added *= scale
            if PLAIN:
                out = before.to(tl.float32) + added
            else:
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
                b_ptr = matrix_of(entry + 1, DTYPE, ALIGNED)
                b = _part_of_b(b_ptr, entry, columns, width, 0, rank, STRIDED, BLOCK_R)
                places = _hidden_places(hidden_ptr, rows, linear, tokens, LINEARS, SPLITS, RANK)
                hidden = _of_all_splits(_part_of_hidden(places, mine, 0, rank, BLOCK_R), DTYPE)
                added = _expanded(
                    places, hidden, b_ptr, b, entry, rank, mine, columns, width, DTYPE, PRECISION, STRIDED, RANK, BLOCK_T,
                    BLOCK_R, BLOCK_N,
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
    PLAIN: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """As ``expand_kernel`` of gate and up, then ``act(gate) * up``; of tokens without an adapter, too.

    out: [T, width], beside gate_up, which stays as it is. PLAIN: there are no gains and no shifts. What it expands is on its way
    to L2 while the kernel before still runs, and then everything is read at once: a program reads little, and waits for most of
    its time.
    """
    slot = tl.load(slots_ptr + tl.program_id(0))
    rows = tl.load(rows_ptr + tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    if slot < 0:
        return
    mine = rows >= 0
    first = tl.program_id(1) * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)
    inside = mine[:, None] & (columns < width)[None, :]
    gate_entry = pointers_ptr + slot * FIELDS
    up_entry = gate_entry + entries * FIELDS
    gate_rank, gate_scale, gate_gain, gate_shift = _numbers_of(gate_entry, ALIGNED)
    up_rank, up_scale, up_gain, up_shift = _numbers_of(up_entry, ALIGNED)
    gate_b_ptr, up_b_ptr = matrix_of(gate_entry + 1, DTYPE, ALIGNED), matrix_of(up_entry + 1, DTYPE, ALIGNED)
    if DEPENDENT and not STRIDED:
        last = tl.minimum(first + BLOCK_N, width)
        _fetch_b(gate_b_ptr, first, last, gate_rank, BLOCK_N * RANK)
        _fetch_b(up_b_ptr, first, last, up_rank, BLOCK_N * RANK)
    await_turn(DEPENDENT)
    gate_places = _hidden_places(hidden_ptr, rows, 0, tokens, 2, SPLITS, RANK)
    up_places = _hidden_places(hidden_ptr, rows, 1, tokens, 2, SPLITS, RANK)
    gate_hidden = _part_of_hidden(gate_places, mine, 0, gate_rank, BLOCK_R)
    up_hidden = _part_of_hidden(up_places, mine, 0, up_rank, BLOCK_R)
    place = gate_up_ptr + rows[:, None] * gate_up_stride + columns[None, :]
    gate = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
    up = tl.load(place + width, mask=inside, other=0.0, cache_modifier=".cg")
    gate_b = _part_of_b(gate_b_ptr, gate_entry, columns, width, 0, gate_rank, STRIDED, BLOCK_R)
    up_b = _part_of_b(up_b_ptr, up_entry, columns, width, 0, up_rank, STRIDED, BLOCK_R)
    gate_hidden, up_hidden = _of_all_splits(gate_hidden, DTYPE), _of_all_splits(up_hidden, DTYPE)
    gate = gate.to(tl.float32)
    added = gate_scale * _expanded(
        gate_places, gate_hidden, gate_b_ptr, gate_b, gate_entry, gate_rank, mine, columns, width, DTYPE, PRECISION, STRIDED,
        RANK, BLOCK_T, BLOCK_R, BLOCK_N,
    )  # fmt: skip
    if PLAIN:
        gate += added
    else:
        bias = tl.load(columns_ptr + 3)
        gate = _adapted(gate, added, gate_gain, gate_shift, bias, columns, width, out_ptr.dtype.element_ty)
    up = up.to(tl.float32)
    added = up_scale * _expanded(
        up_places, up_hidden, up_b_ptr, up_b, up_entry, up_rank, mine, columns, width, DTYPE, PRECISION, STRIDED, RANK,
        BLOCK_T, BLOCK_R, BLOCK_N,
    )  # fmt: skip
    if PLAIN:
        up += added
    else:
        bias = tl.load(columns_ptr + 4 + 3)
        up = _adapted(up, added, up_gain, up_shift, bias, columns, width, out_ptr.dtype.element_ty)
    out = act_times(gate, up, out_ptr.dtype.element_ty, ACT)
    tl.store(out_ptr + rows[:, None] * width + columns[None, :], out, mask=inside)
