"""How the programs of a streamed product share its weight: which cuts are worth a try, and what each is launched with.

Plain arithmetic on shapes and on the sizes of a chip. ``streamed`` has the kernel, ``measured`` tries the cuts.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor

from stoker.kernels import launch

MOST_ROWS = 128
FEW = 32  # tokens, which a tensor core takes as columns, since it has no fewer than 64 rows
_LEAST_SHARED = 76 * 1024  # bytes for a program to have stages enough
_MOST_STAGES = 8
_MOST_SUMS = 3 * 2**13  # of all splits of a tile, in the registers of one program
_STEPS = 4  # of a split, at the least
_AHEAD = 2**16  # bytes of the weight a multiprocessor: what memory gives while the small kernel before runs
_ROOMS = 3  # programs a multiprocessor has at most at a time, with stages enough each


class Cut(NamedTuple):
    """How programs share a weight [N, D].

    rows: of the weight, for each program; of a gated one, of each of gate and up. splits: of the depth. rooms: how many
    programs run on one multiprocessor and share its memory.
    """

    rows: int
    splits: int
    rooms: int


def _block_m(tokens: int) -> int:
    return max(16, int(triton.next_power_of_2(tokens)))


def cuts_to_try(
    tokens: int, weight: tuple[int, int], itemsize: int, gated: bool, processors: int, *, narrow: bool = False
) -> list[Cut]:
    """The cuts of a weight [N, D] that are worth a try: wherever it was measured, one of them was the fastest.

    tokens, itemsize: rows of x, bytes of a number. With few tokens, x is cheap to read again for every tile, and low tiles
    are enough; otherwise that is traded against more programs. narrow: the weight is in fp8, and a program casts it first:
    meanwhile another one on the same multiprocessor can multiply.
    """
    width, depth = weight[0] // 2 if gated else weight[0], weight[1]
    few, half = tokens <= FEW, max(processors // 2, 1)
    cuts: list[Cut] = []
    for rows in (64, 128) if few else (32, 64) if gated else (32, 64, 128):
        tiles = triton.cdiv(width, rows)
        most = min(depth * itemsize // (256 * _STEPS), _MOST_SUMS // (rows * _block_m(tokens)))
        splits = 1 if gated else max(1, min(triton.cdiv(half, tiles), most))
        if cuts and (few or tiles * splits < half):
            break
        at_once = triton.cdiv(tiles * splits, processors)
        if at_once <= _ROOMS:
            cuts.append(Cut(rows, splits, at_once))
        more = min(processors // tiles, most)
        if rows == 64 and 1 < splits < more:  # which cost more, and leave no multiprocessor idle
            cuts.append(Cut(rows, more, 1))
        twice = min(2 * processors // tiles, most)
        if narrow and not gated and rows == 64 and tiles * splits <= processors < tiles * twice:
            cuts.append(Cut(rows, twice, 2))
    return cuts or [Cut(rows, splits, 2)]


def pipeline(
    block_m: int, weight_rows: int, cut: Cut, itemsizes: tuple[int, int], shared: int, beside: int = 0
) -> tuple[int, int]:
    """(BLOCK_K, stages) of programs that read ``block_m`` rows of x and ``weight_rows`` of the weight at a time.

    itemsizes: bytes of a number of each. shared: bytes of shared memory of a multiprocessor; beside: how many of these are
    left to other kernels.
    """
    of_x, of_weight = itemsizes
    rooms = min(cut.rooms, max(1, shared // _LEAST_SHARED))
    for width in (256, 128):  # bytes of a row of x
        columns = width // of_x
        converted = 0 if of_weight == of_x else weight_rows * columns * of_x
        room = (shared - beside) // rooms - 2048 - converted
        stages = room // (columns * (block_m * of_x + weight_rows * of_weight))
        if stages >= 3:
            break
    return columns, max(1, min(stages, _MOST_STAGES))


def fetched_ahead(column_bytes: int, rooms: int, depth: int) -> int:
    """How many columns of its rows a program fetches ahead: its share of ``_AHEAD``, a power of two.

    column_bytes: of one column of all its rows.
    """
    columns = max(_AHEAD // rooms // column_bytes, 1)
    return min(1 << (columns.bit_length() - 1), int(triton.next_power_of_2(depth)))


def warps(block_m: int, weight_rows: int, added: bool) -> int:
    """Warps of a program. Twice as many where a thread would have more than 64 sums, and then adds to these what adapters add."""
    return 8 if added and block_m * weight_rows > 64 * 128 else 4


class Settings(NamedTuple):
    """What the kernel of a product is launched with."""

    block_m: int
    block_k: int
    stages: int
    tiles: int
    splits: int
    split_depth: int
    ahead: int


def settings_of(x: Tensor, weight: Tensor, gated: bool, cut: Cut, beside: int) -> Settings:
    (tokens, depth), width = x.shape, weight.shape[0] // (1 + gated)
    block_m, weight_rows = _block_m(tokens), (1 + gated) * cut.rows
    shared = launch.shared_memory(x.device)
    block_k, stages = pipeline(block_m, weight_rows, cut, (x.itemsize, weight.itemsize), shared, beside)
    split_depth = triton.cdiv(triton.cdiv(depth, cut.splits), block_k) * block_k
    splits, tiles = triton.cdiv(depth, split_depth), triton.cdiv(width, cut.rows)
    ahead = fetched_ahead(weight_rows * weight.itemsize, cut.rooms, split_depth)
    return Settings(block_m, block_k, stages, tiles, splits, split_depth, ahead)
