"""Adapters inside a streamed product: their shrink runs beside it, and is one more tile of the product's input.

In that tile, a token's numbers stand in the columns of its own slot, and zeros elsewhere, so one product serves all slots.
The matrices B it needs are loaded together with the last tiles of the weight.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.launch import await_turn, fetch
from stoker.kernels.linear import plus_product
from stoker.kernels.lora_shrink import matrix_of, rank_of, shrunk
from stoker.kernels.reference.lora import LoraTable

_MOST_RANK = 64
_MOST_BLOCK_N = 64  # a program has no registers for more of B beside its sums
_MOST_COLUMNS = 256
_MOST_LINEARS = 4
_SPAN = 2048  # of the input's depth, for a program of the shrink
# What fp32 adapters, PEFT's own default, are rounded to inside a product, whose result is rounded likewise. fp16 lacks their range.
_ROUNDED = (torch.bfloat16,)


class Inside(NamedTuple):
    """What a product needs to add adapters itself."""

    table: LoraTable
    slots: Tensor  # int64 [T]
    hidden: Tensor  # [linears, T, columns]: what the shrink gave, times the scale, in the columns of the token's slot; else 0
    rank: int  # columns of a slot


def columns_inside(table: LoraTable, rank: int, block_n: int, dtype: torch.dtype) -> int:
    """Columns for all slots, a power of two; 0 where these adapters cannot go inside.

    rank: padded; block_n: columns of the product's tiles; dtype: of the product.
    """
    columns = int(triton.next_power_of_2(table.num_slots)) * rank
    plain = table.experts == 1 and table.only_matrices and table.aligned and not table.strided
    plain &= table.dtype == dtype or (table.dtype == torch.float32 and dtype in _ROUNDED)
    even = len(table.widths) <= _MOST_LINEARS and all(width % block_n == 0 for width in table.widths)
    small = block_n <= _MOST_BLOCK_N and rank <= _MOST_RANK and columns <= _MOST_COLUMNS
    return columns if plain and even and small else 0


def first_tiles(inside: Inside | None, block_n: int) -> list[int]:
    """The first tile of the second, third and fourth linear. Where there is no such linear, one beyond all tiles."""
    widths = [] if inside is None else inside.table.widths[:-1]
    found = [ends // block_n for ends in accumulate(widths)]
    return found + [2**30] * (_MOST_LINEARS - 1 - len(found))


def splits_inside(depth: int) -> int:
    return int(triton.next_power_of_2(triton.cdiv(depth, _SPAN)))


@triton.jit(do_not_specialize=["tokens"])
def shrink_into_columns_kernel(
    x_ptr,
    rows_ptr,
    slots_ptr,
    pointers_ptr,
    partial_ptr,
    arrived_ptr,
    hidden_ptr,
    x_stride,
    tokens,
    depth,
    span,
    entries,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    AHEAD: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """``Inside.hidden`` of a tile of one slot and one linear; of several splits of the depth, the last to come adds up all.

    partial: fp32 [tile, linear, split, BLOCK_T * RANK]; arrived: int32 [tile, linear], 0 before and after.
    AHEAD: columns of A, not fewer than a span, that are on their way to L2 before the kernel's turn comes.
    """
    tile, linear, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ranks = tl.arange(0, RANK)
    rows = tl.load(rows_ptr + tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    slot = tl.load(slots_ptr + tile)
    mine = rows >= 0
    entry = pointers_ptr + (linear * entries + tl.maximum(slot, 0)) * FIELDS
    rank, a_ptr = rank_of(entry, True), matrix_of(entry, DTYPE, True)  # both 0 of slot 0
    scale = tl.load(entry + 5).to(tl.float64, bitcast=True).to(tl.float32)
    total = tl.zeros((BLOCK_T, RANK), tl.float32)
    first = split * span
    if DEPENDENT:  # noqa: SIM102 - known when it is compiled
        if rank > 0:
            its_a_ptr = a_ptr + tl.minimum(ranks, rank - 1) * depth + first
            fetch(its_a_ptr, AHEAD, tl.minimum(span, depth - first) - 1)
    await_turn(DEPENDENT)
    if rank > 0:
        total = shrunk(
            x_ptr, x_stride, rows, mine, entry, a_ptr, ranks, rank, first, tl.minimum(first + span, depth), depth,
            x_ptr.dtype.element_ty, "ieee", False, BLOCK_T, RANK, BLOCK_K, WARPS,
        )  # fmt: skip
    last = True
    if SPLITS > 1:
        number = tile * tl.num_programs(1) + linear
        place = partial_ptr + number * (SPLITS * BLOCK_T * RANK)
        place += tl.arange(0, BLOCK_T)[:, None] * RANK + ranks[None, :]
        tl.store(place + split * (BLOCK_T * RANK), total)
        tl.debug_barrier()  # of all threads, before one of them says so to other programs
        last = tl.atomic_add(arrived_ptr + number, 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            tl.debug_barrier()
            total = tl.zeros((BLOCK_T, RANK), tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(place + other * (BLOCK_T * RANK), cache_modifier=".cg")
            tl.store(arrived_ptr + number, 0)
        slots = tl.arange(0, COLUMNS // RANK)
        columns = slots[None, :, None] * RANK + ranks[None, None, :]
        own = (slots + 1 == slot)[None, :, None] & (ranks < rank)[None, None, :]
        filled = tl.where(own, (total * scale)[:, None, :], 0.0)
        target = hidden_ptr + (linear * tokens + rows)[:, None, None] * COLUMNS + columns
        tl.store(target, filled.to(hidden_ptr.dtype.element_ty), mask=mine[:, None, None])


@triton.jit
def linear_of_tile(tile, second, third, fourth, BLOCK_N: tl.constexpr):
    """Which of several linears side by side a tile is of, and its columns of that, [BLOCK_N]. second, third, fourth: ``first_tiles``."""
    linear = (tile >= second).to(tl.int32) + (tile >= third).to(tl.int32) + (tile >= fourth).to(tl.int32)
    first_tile = tl.where(linear == 3, fourth, tl.where(linear == 2, third, tl.where(linear == 1, second, 0)))
    return linear, (tile - first_tile) * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def slots_in_columns(first, table_ptr, entries, FIELDS: tl.constexpr, RANK: tl.constexpr, ADDED: tl.constexpr):
    """The ranks, and the addresses of B, of the slots in ADDED columns of ``Inside.hidden`` from ``first`` on: as they are in the
    table, which is not read again at the end, and not waited for in the beginning. table: of one linear."""
    slots = tl.minimum(first // RANK + 1 + tl.arange(0, ADDED // RANK), entries - 1)
    return tl.load(table_ptr + slots * FIELDS + 4), tl.load(table_ptr + slots * FIELDS + 1)


@triton.jit
def b_in_columns(
    first,
    its_columns,
    ranks,
    addresses,
    entries,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
    ADDED: tl.constexpr,
):
    """B of all slots in those columns, [N, ADDED]. its_columns: of the linear, [N], all of which there are; ranks, addresses:
    ``slots_in_columns``."""
    known = first // RANK + 1 + tl.arange(0, ADDED // RANK) < entries
    its_ranks = tl.multiple_of(tl.where(known, ranks.to(tl.int32), 0), 8)[None, :, None]
    b_ptr = tl.multiple_of(addresses.to(tl.pointer_type(DTYPE)), 16)[None, :, None]
    rank = tl.arange(0, RANK)[None, None, :]
    b = tl.load(b_ptr + its_columns[:, None, None] * its_ranks + rank, mask=rank < its_ranks, other=0.0)
    return tl.reshape(b, (its_columns.shape[0], ADDED))


@triton.jit
def plus_adapters(
    total,
    b,
    hidden,
    rows,
    linear,
    first,
    its_columns,
    tokens,
    table_ptr,
    entries,
    slots_ptr,
    hidden_ptr,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADDED: tl.constexpr,
    LEFT: tl.constexpr,
):
    """``total`` [M, N], with LEFT [N, M], with what ADDED columns from ``first`` on give. b, hidden: of these, [N, ADDED], [M, ADDED].

    An adapter with a number that is not finite is every token's, by a factor of 0. Where a sum says so, it is added slot by
    slot: only its own tokens are to know.
    """
    added = plus_product(total, hidden, b, LEFT)
    known = rows[None, :] if LEFT else rows[:, None]
    odd = tl.where((added != added) & (known < tokens), 1, 0)
    if tl.max(tl.max(odd, axis=1), axis=0) > 0:
        added = total
        ranks = tl.arange(0, RANK)
        own_slots = tl.load(slots_ptr + rows, mask=rows < tokens, other=0)
        for slot in range(first // RANK + 1, tl.minimum(entries, (first + ADDED) // RANK + 1)):
            rank = rank_of(table_ptr + slot * FIELDS, True)
            b_ptr = matrix_of(table_ptr + slot * FIELDS + 1, DTYPE, True)
            its_b_ptr = b_ptr + its_columns[:, None] * rank + ranks[None, :]
            there = (ranks < rank)[None, :]
            wide = tl.abs(tl.load(its_b_ptr, mask=there, other=0.0).to(hidden.dtype).to(tl.float32))
            finite = (wide == wide) & (wide != float("inf"))
            broken = tl.max(tl.max(tl.where(finite, 0, 1), axis=1), axis=0)
            # Loaded with what stands for the rest, and not chosen afterwards: from 3.9 on, Triton fails to hand choices on to tensor
            # cores. Rows beyond the last token become what they like.
            whole = (rows < tokens) & ((broken == 0) | (own_slots != slot))
            place = hidden_ptr + (linear * tokens + rows) * COLUMNS + (slot - 1) * RANK
            its_hidden = tl.load(place[:, None] + ranks[None, :], mask=whole[:, None], other=float("nan"))
            its_b = tl.load(its_b_ptr, mask=there & finite, other=0.0).to(hidden.dtype)
            added = plus_product(added, its_hidden, its_b, LEFT)
    return added


def settings_inside(inside: Inside | None, splits: int) -> dict[str, Any]:
    """What a product with adapters inside is compiled with. splits: of the product, which share the columns."""
    if inside is None:
        return {"DTYPE": tl.float32, "LINEARS": 0, "RANK": 0, "COLUMNS": 0, "ADDED": 0}
    linears, _, columns = inside.hidden.shape
    added = max(int(triton.next_power_of_2(triton.cdiv(columns, splits))), inside.rank)
    return {
        "DTYPE": launch.TYPES[inside.table.dtype],
        "LINEARS": linears,
        "RANK": inside.rank,
        "COLUMNS": columns,
        "ADDED": added,
    }
