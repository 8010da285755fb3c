"""Sorts rows by group, on the device: tokens by expert or by adapter.

Nothing waits for the host, so it can be captured: there are as many programs as that many rows and groups can ever need.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.launch import await_turn

_MAX_SCAN = 4096  # group numbers that a program looks at together


@triton.jit(do_not_specialize=["rows"])
def _order_kernel(ids_ptr, order_ptr, starts_ptr, rows, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Counting sort by one program a group: where its rows start, and which they are, in their own order."""
    await_turn(DEPENDENT)
    group = tl.program_id(0)
    below = 0
    for start in range(0, rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + at, mask=at < rows, other=group)
        below += tl.sum((ids < group).to(tl.int32), axis=0)
    tl.store(starts_ptr + group, below)
    for start in range(0, rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mine = tl.load(ids_ptr + at, mask=at < rows, other=-1) == group
        count = mine.to(tl.int32)
        tl.store(order_ptr + below + tl.cumsum(count, axis=0) - count, at, mask=mine)
        below += tl.sum(count, axis=0)


@triton.jit
def group_of_tile(starts_ptr, groups, tile, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """The group that a tile is of, and its first and its group's last place in the order, the last one excluded.

    Each group has as many tiles of BLOCK rows as its rows fill; of a tile beyond all of them the group is ``groups``.
    """
    numbers = tl.arange(0, GROUPS)
    known = numbers < groups
    starts = tl.load(starts_ptr + numbers, mask=known, other=0)
    ends = tl.load(starts_ptr + numbers + 1, mask=known, other=0)
    tiles = tl.cdiv(ends - starts, BLOCK)
    tiles_until = tl.cumsum(tiles, axis=0)
    group = tl.minimum(tl.sum((tiles_until <= tile).to(tl.int32), axis=0), groups)
    mine = numbers == group
    first = tl.sum(tl.where(mine, starts + (tile - tiles_until + tiles) * BLOCK, 0), axis=0)
    end = tl.sum(tl.where(mine, ends, 0), axis=0)
    return group, first, end


def order_by_group(ids: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The rows sorted by group, int32 [P], and where each group starts among them, int32 [groups + 1].

    ids: int64 [P], contiguous, the group of each row, from 0 to ``groups`` - 1.
    """
    order = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    starts = torch.empty(groups + 1, dtype=torch.int32, device=ids.device)
    block = min(max(triton.next_power_of_2(ids.numel()), 16), _MAX_SCAN)
    _order_kernel[(groups + 1,)](
        ids, order, starts, ids.numel(), BLOCK=block, num_warps=4, **launch.options(ids.device)
    )
    return order, starts


def rows_per_tile(rows: int, groups: int) -> int:
    """Height of a tile: about as many rows as a group has, so that few places are empty and no weight is read twice."""
    return int(min(max(triton.next_power_of_2(triton.cdiv(rows, groups)), 16), 128))


def most_tiles(rows: int, groups: int, height: int) -> int:
    """The most tiles that rows can need: the full ones, of ``height`` rows each, and one more for each group."""
    return rows // height + min(rows, groups)
