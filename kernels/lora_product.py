"""What adapters do to a projection, added by the product itself: a kernel less, and the shrink runs beside the product.

The shrink is launched first, and the product begins beside it: it reads x and the weight, which were there before the shrink
began, and waits for the shrink where it needs it, at its end. So nothing may be launched between the two, nor between them
and what the shrink waits for.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.lora import Tiles, padded_rank, shrink
from stoker.kernels.lora_kernels import matrix_of, rank_of
from stoker.kernels.reference.lora import POINTER_FIELDS, AdapterRows, LoraTable

# Bytes of shared memory that are left to a program of the shrink, so that both are on a multiprocessor at a time: compiled, one of
# ranks up to 32 takes 36 KiB. One of 64 takes 60, and the product begins where none of these is.
SHRINK_SHARED = 40 * 1024
_HIGHEST = 64  # rank
_MOST_SPLITS = 4  # of the shrink, as each tile of the product reads what all of them give, and there is time
_MOST_RANKS = tl.constexpr(2048)  # of all rows that a program adds at a time
NO_ADAPTERS: dict[str, Any] = {"LINEARS": 0} | dict.fromkeys(
    ("FIELDS", "DTYPE", "PRECISION", "ALIGNED", "H_SPLITS", "RANK")
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

    @property
    def constants(self) -> dict[str, Any]:
        """What ``plus_adapters`` is compiled for."""
        splits, linears, _, rank = self.hidden.shape
        return {
            "LINEARS": linears,
            "FIELDS": POINTER_FIELDS,
            "DTYPE": launch.TYPES[self.table.dtype],
            "PRECISION": "tf32x3" if self.table.dtype == torch.float32 else "ieee",
            "ALIGNED": self.table.aligned,
            "H_SPLITS": splits,
            "RANK": rank,
        }


def can_add(table: LoraTable, x: Tensor) -> bool:
    """Whether a product of x can add what adapters do to it: they only add, are low, and there are few of them."""
    return (
        table.experts == 1
        and table.only_products
        and not (table.strided or table.crowded or table.empty)
        and padded_rank(table) <= _HIGHEST
        and table.dtype in (x.dtype, torch.float32)
    )


@triton.jit
def plus_adapters(
    total,
    rows,
    columns,
    linear,
    width,
    slots_ptr,
    pointers_ptr,
    hidden_ptr,
    tokens,
    entries,
    LINEARS: tl.constexpr,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
):
    """Outputs of one linear, fp32 [M, N], with what the adapters of their tokens add. rows: [M], all tokens; columns: [N]."""
    BLOCK_R: tl.constexpr = min(RANK, max(16, _MOST_RANKS // total.shape[0]))
    slots = tl.load(slots_ptr + rows, mask=rows < tokens, other=0).to(tl.int32)
    slot = tl.max(slots, axis=0)
    while slot > 0:
        entry = pointers_ptr + (linear * entries + slot) * FIELDS
        rank, b_ptr = rank_of(entry, ALIGNED), matrix_of(entry + 1, DTYPE, ALIGNED)
        scale = tl.load(entry + 5).to(tl.float64, bitcast=True).to(tl.float32)
        mine = slots == slot
        for start in tl.range(0, rank, BLOCK_R, num_stages=1):
            ranks = start + tl.arange(0, BLOCK_R)
            b = tl.load(
                b_ptr + columns.to(tl.int64)[:, None] * rank + ranks[None, :],
                mask=(columns < width)[:, None] & (ranks < rank)[None, :],
                other=0.0,
            )
            hidden = tl.zeros((total.shape[0], BLOCK_R), tl.float32)
            for split in tl.static_range(SPLITS):
                place = hidden_ptr + ((split * LINEARS + linear) * tokens + rows[:, None]) * RANK + ranks[None, :]
                hidden += tl.load(place, mask=mine[:, None] & (ranks < rank)[None, :], other=0.0, cache_modifier=".cg")
            total += scale * tl.dot(hidden.to(DTYPE), tl.trans(b), input_precision=PRECISION)
        slots = tl.where(mine, 0, slots)
        slot = tl.max(slots, axis=0)
    return total
