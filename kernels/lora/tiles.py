"""Which tokens each program of ``lora`` takes: tiles of one adapter, made once a step."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.grouping import most_tiles
from stoker.kernels.lora.shrink import tiles_kernel
from stoker.kernels.reference.lora import AdapterRows, LoraTable

FEW = 1024  # tokens; up to so many get tiles of 16, more get tall ones
_LOW = 8  # tokens of a tile, where each slot has about as many
_FEW_PAIRS = 256  # of a token and an expert
_MOST_COMPARED = 8192  # numbers that a program holds at a time, of tokens by slots


class Tiles(NamedTuple):
    """Which tokens each program takes: some of one adapter, or neighbours where pairs of a token and an expert are sorted."""

    programs: int
    height: int
    grouped: bool
    # Where grouped: the tokens of each tile, int32 [tiles, height], -1 for none; and its slot, int32 [tiles], where tiles of slot
    # 0 come last, and then tiles of -1. Otherwise the slot of each token, int64 [T], in both.
    rows: Tensor
    slots: Tensor
    fresh: bool  # whether the last launch made the tiles

    @staticmethod
    def of(rows: AdapterRows, table: LoraTable, deterministic: bool, *, low: bool = False) -> Tiles:
        """low: with tiles for few tokens of each slot."""
        tokens, slots = len(rows.slots), table.num_slots
        if table.experts > 1:
            height = 1 if tokens <= _FEW_PAIRS and not deterministic else 16
            return Tiles(triton.cdiv(tokens, height), height, False, rows.slots, rows.slots, fresh=False)
        # In fp32, without tensor cores, 64 rows by as many columns are more than there are registers.
        height = 16 if deterministic or tokens <= FEW or table.dtype == torch.float32 else 64
        if low and tokens <= _LOW * slots:
            height = _LOW
        known = rows.of_step.get((slots, height))
        if known is None:
            rows.of_step[slots, height] = tiles_by_slot(rows.slots, slots, height)
        of_rows, of_tile = rows.of_step[slots, height]
        return Tiles(most_tiles(tokens, slots, height), height, True, of_rows, of_tile, fresh=known is None)


def tiles_by_slot(slots: Tensor, num_slots: int, height: int) -> tuple[Tensor, Tensor]:
    """Tokens in tiles of one slot each: int32 [tiles, height], and the slot of each, int32 [tiles], as in ``Tiles``.

    slots: int64 [T], from 0 to ``num_slots``.
    """
    tokens, groups = len(slots), max(triton.next_power_of_2(num_slots + 1), 2)
    tiles = most_tiles(tokens, num_slots + 1, height)
    rows = torch.empty(tiles, height, dtype=torch.int32, device=slots.device)
    of_tile = torch.empty(tiles, dtype=torch.int32, device=slots.device)
    block = min(max(triton.next_power_of_2(tokens), 16), max(_MOST_COMPARED // groups, 16), 1024)
    tiles_kernel[(num_slots + 1,)](
        slots,
        rows,
        of_tile,
        tokens,
        tiles,
        SLOTS=groups,
        BLOCK=block,
        BLOCK_T=height,
        num_warps=4,
        **launch.options(slots.device),
    )
    return rows, of_tile
