"""Sizes of tiles, stages and warps that attention is launched with, by the shape of a layer's heads and the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from stoker.kernels import launch

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_KEY_DIM, _MAX_VALUE_DIM = 576, 512  # of DeepSeek's latent form; beyond it accumulators do not fit registers
_STAGE_BYTES = 36 * 1024  # of keys and values in flight at a time
# Stages of the compiler's software pipeline, by how many tiles of keys and values are in flight, as compiled code shows. A tile's
# block numbers have to arrive before its keys can be loaded, which takes up stages.
_STAGES = {2: 5, 1: 3}
# For decode rows with few heads for each key head, in 16 bits: as many small programs as have registers enough, each with two tiles
# in flight. On an H200, four of two warps on each SM read keys at 0.71 to 0.90 of the memory's speed (64 rows of 512 or 2,048 keys).
_FEW_HEADS = 16 * 128  # queries of a tile times dimensions
_SMALL_STAGE_BYTES, _SMALL_WARPS, _SMALL_PROGRAMS = 16 * 1024, 2, 4


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Dimensions of a head's key and value; bytes of a number, and of one in the cache.

    value_is_key: a value is the beginning of its key.
    """

    key_dim: int
    value_dim: int
    itemsize: int
    kept_itemsize: int
    value_is_key: bool = False

    @property
    def key_parts(self) -> tuple[int, int]:
        """A key's dimensions as they are multiplied: the largest power of two in them, and the rest, padded to one."""
        whole = 2 ** int(math.log2(self.key_dim))
        rest = self.key_dim - whole
        if whole < 16:  # the least that tensor cores multiply
            return 16, 0
        return whole, max(16, triton.next_power_of_2(rest)) if rest else 0

    @property
    def value_part(self) -> int:
        return max(16, int(triton.next_power_of_2(self.value_dim)))


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """block_m: queries (rows and heads) of a tile; block_n: keys of a tile; programs: grid of a persistent kernel.

    registers: the most a thread may take, so that all programs are resident at once. folds: whether a program has enough
    registers to read several splits of a row one after the other.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    registers: int
    folds: bool = False


def launch_config(
    queries: int, heads: HeadShape, processors: int, shared: int, *, prefill: bool = False
) -> LaunchConfig:
    """How to launch attention on so many multiprocessors, each with so many bytes of shared memory.

    queries: rows and heads that see the same keys. The result must not depend on lengths or on the number of rows, as a
    row's numbers must not depend on its neighbours.
    """
    itemsize, wide = heads.itemsize, max(heads.key_dim, heads.value_dim)
    row_bytes = heads.key_dim * itemsize + (heads.value_dim * itemsize if heads.key_dim <= 256 else 0)
    stage_bytes, folds = _STAGE_BYTES, False
    if prefill:
        block_m = 128 if wide <= 128 else 64 if wide <= 256 else 32
        if itemsize == 4:  # plain fp32 has no tensor cores, and twice the registers
            block_m = 32 if wide <= 64 else 16
        num_warps, most_resident = 8 if wide >= 64 and itemsize == 2 else 4, 1
    else:
        most = 16 if itemsize == 4 else 64 if wide <= 256 else 32
        block_m = min(max(16, triton.next_power_of_2(queries)), most)
        if block_m * wide <= _FEW_HEADS and itemsize == 2:
            stage_bytes, row_bytes = _SMALL_STAGE_BYTES, row_bytes * heads.kept_itemsize // itemsize
            # Twice the threads where one would not have enough registers.
            apart = 2 if heads.kept_itemsize < itemsize and wide > 64 else 1
            num_warps, most_resident, folds = _SMALL_WARPS * apart, _SMALL_PROGRAMS // apart, True
        else:
            num_warps = 4 if block_m * wide < 64 * 128 else 8
            # Roughly, from the registers that compiled kernels take of an SM.
            most_resident = 1 if num_warps == 8 else 3 if wide <= 64 else 2
            folds = block_m * heads.value_part <= 1024 * num_warps  # a thread has a quarter of its registers for it
    most_keys = max(16, min(2 ** int(math.log2(stage_bytes // row_bytes)), 64))
    # Where there is too little room: fewer keys at a time, then one tile less in flight, and at last no folding of splits.
    tiles_and_folds = (2, folds), (1, folds), (1, False)
    choices = [(*each, n) for each in tiles_and_folds for n in (64, 32, 16) if n <= most_keys]
    for tiles, folds, block_n in choices:
        taken = _shared_memory(heads, block_m, block_n, tiles, folds) + launch.PROGRAM_SHARED
        if taken <= shared:
            break
    resident = max(min(most_resident, shared // taken), 1)  # one program too many would run last, alone
    registers = min(255, 65536 // (resident * num_warps * 32) // 8 * 8)
    return LaunchConfig(block_m, block_n, num_warps, _STAGES[tiles], processors * resident, registers, folds)


def _shared_memory(heads: HeadShape, queries: int, keys: int, tiles: int, folds: bool) -> int:
    """The most bytes of shared memory that a program takes, as compiled code shows for devices with little of it.

    The instructions of the largest chips may take more, and these chips have it. tiles: of keys and values in flight.
    """
    key, value = sum(heads.key_parts), 0 if heads.value_is_key else heads.value_part
    # Also what threads hand to each other: weights, where a warp may not have all of a query's, or a split's sums.
    weights = queries * keys * heads.itemsize if queries < 128 else 0
    sums = queries * heads.value_part * 4 if folds else 0
    rest = 2048 if heads.value_part == heads.value_dim else 3072
    return (
        tiles * keys * (key + value) * heads.kept_itemsize + queries * key * heads.itemsize + max(weights, sums) + rest
    )


def unsupported(key_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run such layers, or None where they can."""
    if dtype not in _DTYPES:
        return f"the attention kernels run bfloat16, float16 and float32, not {str(dtype).removeprefix('torch.')}"
    if key_dim > _MAX_KEY_DIM or value_dim > _MAX_VALUE_DIM:
        return (
            f"the attention kernels hold keys of up to {_MAX_KEY_DIM} and values of up to {_MAX_VALUE_DIM} dimensions, "
            f"and this model's have {key_dim} and {value_dim}"
        )
    return None
