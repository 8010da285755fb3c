"""What adapters do to a projection, added by the product itself: a kernel less, and the shrink runs beside the product.

The shrink is launched first, and the product begins beside it: it reads x and the weight, which were there before the shrink
began, and waits for the shrink where it needs it, at its end. So nothing may be launched between the two, nor between them
and what the shrink waits for.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.lora import Tiles, padded_rank, shrink
from stoker.kernels.reference.lora import POINTER_FIELDS, AdapterRows, LoraTable

# Bytes of shared memory that are left to a program of the shrink, so that both are on a multiprocessor at a time: compiled, one of
# ranks up to 32 takes 36 KiB. One of 64 takes 60, and the product begins where none of these is.
SHRINK_SHARED = 40 * 1024
_HIGHEST = 64  # rank
_MOST_SPLITS = 4  # of the shrink, as each tile of the product reads what all of them give, and there is time
_MOST_REGISTERS = 112  # of a thread, for sums and for the matrices of adapters: compiled, next to nothing spills
_HIDDEN = 2**11  # numbers of the shrink's, at most, that a program reads at a time of each split
_THREADS = 128
NO_ADAPTERS: dict[str, Any] = {"LINEARS": 0} | dict.fromkeys(
    ("FIELDS", "DTYPE", "PRECISION", "ALIGNED", "H_SPLITS", "RANK", "BLOCK_R", "SLOTS")
)


class Shrunk(NamedTuple):
    """What a product adds adapters by. hidden: fp32 [splits, linears, T, padded rank]; slots: int64 [T]."""

    hidden: Tensor
    table: LoraTable
    slots: Tensor

    @staticmethod
    def of(x: Tensor, table: LoraTable, rows: AdapterRows) -> Shrunk:
        """Launches the shrink. x: [T, D], of a product that ``can_add``."""
        tiles = Tiles.of(rows, table, deterministic=False)
        return Shrunk(shrink(x, table, rows, tiles, most_splits=_MOST_SPLITS), table, rows.slots)

    def constants(self, tile: tuple[int, int], gated: bool) -> dict[str, Any]:
        """What ``plus_adapters`` is compiled for. tile: tokens and columns that a program has; gated: of each of two parts."""
        splits, linears, _, rank = self.hidden.shape
        (block_m, block_n), parts = tile, 2 if gated else 1
        room = _MOST_REGISTERS - block_m * block_n * parts // _THREADS
        # Of a rank: what is multiplied by the matrix, and this one and the next.
        each = (block_m + 2 * block_n * parts) * self.table.dtype.itemsize / (4 * _THREADS)
        ranks = 2 ** int(math.log2(max(room / each, 16)))
        return {
            "LINEARS": linears,
            "FIELDS": POINTER_FIELDS,
            "DTYPE": launch.TYPES[self.table.dtype],
            "PRECISION": "tf32x3" if self.table.dtype == torch.float32 else "ieee",
            "ALIGNED": self.table.aligned,
            "H_SPLITS": splits,
            "RANK": rank,
            "BLOCK_R": min(ranks, rank, max(_HIDDEN // block_m, 16)),
            "SLOTS": min(max(ranks // rank, 1), triton.next_power_of_2(self.table.num_slots)),
        }


def can_add(table: LoraTable, x: Tensor) -> bool:
    """Whether a product of x can add what adapters do to it: they only add, and are low."""
    return (
        table.experts == 1
        and table.only_products
        and not (table.strided or table.empty)
        and padded_rank(table) <= _HIGHEST
        and table.dtype in (x.dtype, torch.float32)
    )


@triton.jit
def matrices_of(
    piece,
    slots,
    columns,
    width,
    entries_ptr,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Some columns of what expands, [SLOTS, N, BLOCK_R], 0 of a slot that is none of ``slots``.

    piece: all ranks of the first SLOTS slots are pieces, then those of the next. entries_ptr: the linear's rows of the table.
    """
    numbers, start = _place_of(piece, RANK, BLOCK_R, SLOTS)
    used = tl.max((slots[:, None] == numbers[None, :]).to(tl.int32), axis=0) > 0
    entry = entries_ptr + numbers * FIELDS
    rank = tl.load(entry + 4, mask=used, other=0).to(tl.int32)
    b_ptr = tl.load(entry + 1, mask=used, other=0).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        rank, b_ptr = tl.multiple_of(rank, 8), tl.multiple_of(b_ptr, 16)
    rank, ranks = rank[:, None, None], (start + tl.arange(0, BLOCK_R))[None, None, :]
    places = b_ptr[:, None, None] + (columns.to(tl.int64)[None, :, None] * rank + ranks)
    return tl.load(places, mask=(columns < width)[None, :, None] & (ranks < rank), other=0.0)


@triton.jit
def _place_of(piece, RANK: tl.constexpr, BLOCK_R: tl.constexpr, SLOTS: tl.constexpr):
    """The slots of a piece, and its first rank."""
    return 1 + piece // (RANK // BLOCK_R) * SLOTS + tl.arange(0, SLOTS), piece % (RANK // BLOCK_R) * BLOCK_R


@triton.jit
def _hidden_of(
    start,
    rows,
    slots,
    rank,
    hidden_ptr,
    tokens,
    LINEARS: tl.constexpr,
    DTYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """What the shrink gave, of BLOCK_R ranks from ``start`` on: [M, BLOCK_R]. rank: [M], of each token's adapter."""
    ranks = start + tl.arange(0, BLOCK_R)
    hidden = tl.zeros((rows.shape[0], BLOCK_R), tl.float32)
    for split in tl.static_range(SPLITS):
        place = hidden_ptr + (split * LINEARS * tokens + rows[:, None]) * RANK + ranks[None, :]
        hidden += tl.load(place, mask=(slots > 0)[:, None], other=0.0, cache_modifier=".cg")
    return tl.where(ranks[None, :] < rank[:, None], hidden, 0.0).to(DTYPE)


@triton.jit
def plus_adapters(
    total,
    b,
    rows,
    slots,
    columns,
    width,
    entries_ptr,
    hidden_ptr,
    tokens,
    LINEARS: tl.constexpr,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Outputs of one linear, fp32 [M, N], with what the adapters of their tokens add. b: ``matrices_of`` the first piece.

    rows: [M], all tokens; slots: theirs; columns: [N]; entries_ptr, hidden_ptr: of the linear. Several adapters are one product:
    what a token's gives lies where the matrix of that one does, and zeros where others do. While it is made the next ones are on
    their way.
    """
    own = entries_ptr + slots * FIELDS
    rank = tl.load(own + 4).to(tl.int32)
    scale = tl.load(own + 5).to(tl.float64, bitcast=True).to(tl.float32)
    hidden = _hidden_of(0, rows, slots, rank, hidden_ptr, tokens, LINEARS, DTYPE, SPLITS, RANK, BLOCK_R)
    pieces = tl.cdiv(tl.max(slots, axis=0), SLOTS) * (RANK // BLOCK_R)
    for piece in tl.range(0, pieces, num_stages=1):
        following = matrices_of(
            piece + 1, slots, columns, width, entries_ptr, FIELDS, DTYPE, ALIGNED, RANK, BLOCK_R, SLOTS
        )
        numbers, start = _place_of(piece, RANK, BLOCK_R, SLOTS)
        mine = slots[:, None] == numbers[None, :]
        if tl.max(tl.max(mine.to(tl.int32), axis=1), axis=0) > 0:
            if BLOCK_R < RANK:
                hidden = _hidden_of(start, rows, slots, rank, hidden_ptr, tokens, LINEARS, DTYPE, SPLITS, RANK, BLOCK_R)
            # Zero times NaN or infinity is NaN: these are to be of the adapter's own tokens alone.
            finite = b.to(tl.float32) - b.to(tl.float32) == 0.0
            broken = tl.max(tl.max(1 - finite.to(tl.int32), axis=2), axis=1)
            lost = tl.max(tl.where(mine, broken[None, :], 0), axis=1) > 0
            left = tl.where(mine[:, :, None], hidden[:, None, :], 0.0).reshape(total.shape[0], SLOTS * BLOCK_R)
            right = tl.where(finite, b, 0.0).permute(0, 2, 1).reshape(SLOTS * BLOCK_R, total.shape[1])
            added = scale[:, None] * tl.dot(left, right, input_precision=PRECISION)
            total += tl.where(lost[:, None], float("nan"), added)
        b = following
    return total
