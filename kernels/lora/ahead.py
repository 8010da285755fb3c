"""Adapters ahead of a streamed product: they run first, and the product comes up beside them and adds what they give at its end.

A product takes all that memory gives, and beside it each of the adapters' few loads, which wait for one another, takes several
times as long; before it they are short. And nobody reads the product's result again to add to it. It takes adapters that only
add: where one looks at what the product gave (DoRA), it comes after it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from stoker.kernels.launch import await_end, fetch, let_next_up
from stoker.kernels.lora.shrink import matrix_of, rank_of, sum_of_first
from stoker.kernels.reference.lora import LoraTable

_MOST_RANK = 64
# What fp32 adapters, PEFT's own default, are rounded to beside a product, whose result is rounded likewise. fp16 lacks their range.
_ROUNDED = (torch.bfloat16,)


def goes_ahead(table: LoraTable, dtype: torch.dtype) -> bool:
    """Whether adapters can run ahead of a product of a dtype."""
    plain = table.experts == 1 and table.only_matrices and table.aligned and not table.strided
    known = table.dtype == dtype or (table.dtype == torch.float32 and dtype in _ROUNDED)
    return plain and known and table.max_rank <= _MOST_RANK and all(width % 16 == 0 for width in table.widths)


@triton.jit
def _part_of_b(b_ptr, columns, ranks, width, rank):
    places = b_ptr + columns[:, None] * rank + ranks[None, :]
    return tl.load(places, mask=(columns < width)[:, None] & (ranks < rank)[None, :], other=0.0)


@triton.jit
def _before(residual_rows, columns, known, width, RESIDUAL: tl.constexpr):
    """Some columns of the residual, fp32 [M, N]; known: of rows, [M, 1]."""
    if RESIDUAL:
        inside = known & (columns < width)[None, :]
        return tl.load(residual_rows + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        return tl.zeros((known.shape[0], columns.shape[0]), tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def expand_ahead_kernel(
    hidden_ptr,
    rows_ptr,
    slots_ptr,
    pointers_ptr,
    columns_ptr,
    residual_ptr,
    out_ptr,
    residual_stride,
    tokens,
    all_width,
    entries,
    LINEARS: tl.constexpr,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out [T, all_width]: the residual, or zeros, and what adapters add, of a tile of tokens of one slot by SPAN columns.

    hidden: as ``shrink_kernel``'s. The product is let up at once, so this one has few programs and takes little room. What they
    expand is read, or of several blocks of columns on its way to L2, while the shrink runs.
    """
    let_next_up(DEPENDENT)
    rows = tl.load(rows_ptr + tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    slot = tl.load(slots_ptr + tl.program_id(0))
    if slot < 0:
        return
    tile = tl.program_id(1)
    linear = 0
    for other in tl.static_range(1, LINEARS):
        linear += (tile >= tl.load(columns_ptr + other * 4)).to(tl.int32)
    first = (tile - tl.load(columns_ptr + linear * 4).to(tl.int32)) * SPAN
    offset = tl.multiple_of(tl.load(columns_ptr + linear * 4 + 1).to(tl.int32), 16)
    width = tl.multiple_of(tl.load(columns_ptr + linear * 4 + 2).to(tl.int32), 16)
    entry = pointers_ptr + (linear * entries + slot) * FIELDS
    rank, b_ptr = rank_of(entry, True), matrix_of(entry + 1, DTYPE, True)  # both 0 of slot 0
    scale = tl.load(entry + 5).to(tl.float64, bitcast=True).to(tl.float32)
    ranks = tl.arange(0, RANK)
    known = (rows >= 0)[:, None]
    out_ptr += rows[:, None] * all_width + offset
    residual_ptr += rows[:, None] * residual_stride + offset
    columns = first + tl.arange(0, BLOCK_N)
    if SPAN == BLOCK_N:
        b = _part_of_b(b_ptr, columns, ranks, width, rank)
        before = _before(residual_ptr, columns, known, width, RESIDUAL)
    elif DEPENDENT:  # noqa: SIM102 - known when it is compiled
        if rank > 0:
            fetch(b_ptr + first * rank + tl.arange(0, 1), SPAN * RANK, tl.minimum(SPAN, width - first) * rank - 1)
    await_end(DEPENDENT)
    splits = (tl.arange(0, SPLITS)[:, None, None] * LINEARS + linear).to(tl.int64)
    place = hidden_ptr + (splits * tokens + rows[None, :, None]) * RANK + ranks[None, None, :]
    hidden = tl.load(place, mask=known[None] & (ranks < rank)[None, None, :], other=0.0, cache_modifier=".cg")
    hidden = sum_of_first(hidden).to(out_ptr.dtype.element_ty)
    if SPAN == BLOCK_N:
        added = tl.dot(hidden, tl.trans(b.to(hidden.dtype)), input_precision="ieee") * scale + before
        tl.store(out_ptr + columns[None, :], added, mask=known & (columns < width)[None, :])
    else:
        for at in tl.range(first, tl.minimum(first + SPAN, width), BLOCK_N, num_stages=3):
            columns = at + tl.arange(0, BLOCK_N)
            b = _part_of_b(b_ptr, columns, ranks, width, rank)
            before = _before(residual_ptr, columns, known, width, RESIDUAL)
            added = tl.dot(hidden, tl.trans(b.to(hidden.dtype)), input_precision="ieee") * scale + before
            tl.store(out_ptr + columns[None, :], added, mask=known & (columns < width)[None, :])
