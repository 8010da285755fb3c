"""The bytes of the KV cache: one allocation, seen as one key and one value tensor a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stoker.engine.device import Runtime
from stoker.engine.virtual_memory import DeviceBuffer


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """What one attention layer keeps of a token."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    same_as: int | None = None  # a layer before it, whose keys and values it attends to: it keeps none of its own

    @property
    def token_bytes(self) -> int:
        if self.same_as is not None:
            return 0
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class KVCache:
    """``num_blocks`` blocks of ``block_size`` tokens for every layer. Block 0 takes what padding writes.

    ``layers[i]`` is ``(key [N, block, heads, key_dim], value [N, block, heads, value_dim])``. Fresh blocks hold
    garbage: nothing may read a slot that was not written. ``layers`` is empty while the memory is given back.
    """

    def __init__(self, shapes: Sequence[LayerShape], num_blocks: int, block_size: int, runtime: Runtime) -> None:
        self.shapes = tuple(shapes)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.runtime = runtime
        self.layers: list[tuple[Tensor, Tensor]] = []
        self._buffer: DeviceBuffer | None = None
        self.allocate()

    @staticmethod
    def block_bytes(shapes: Sequence[LayerShape], block_size: int) -> int:
        return block_size * sum(shape.token_bytes for shape in shapes)

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_bytes(self.shapes, self.block_size) if self.layers else 0

    @property
    def stable_addresses(self) -> bool:
        """Whether the cache lies where it lay when its memory is taken again."""
        return self._buffer is not None and self._buffer.stable_addresses

    def allocate(self) -> None:
        if self._buffer is None:
            self._buffer = self.runtime.allocate(self.num_blocks * self.block_bytes(self.shapes, self.block_size))
        self._buffer.restore()
        buffer = self._buffer.tensor
        layers: list[tuple[Tensor, Tensor]] = []
        start = 0
        for shape in self.shapes:
            if shape.same_as is not None:
                layers.append(layers[shape.same_as])
                continue
            pair = []
            for dim in (shape.key_dim, shape.value_dim):
                size = (self.num_blocks, self.block_size, shape.heads, dim)
                end = start + math.prod(size) * shape.dtype.itemsize
                pair.append(buffer[start:end].view(shape.dtype).view(size))
                start = end
            layers.append((pair[0], pair[1]))
        for key, value in layers:  # padding reads and writes block 0: finite numbers, so that no NaN starts there
            key[0].zero_()
            value[0].zero_()
        self.layers = layers

    def release(self) -> None:
        self.layers = []
        if self._buffer is not None:
            self._buffer.release()

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all reads before all writes. copies: (from, to)."""
        (index,) = self.runtime.upload(np.array(copies))
        source, target = index[:, 0], index[:, 1]
        for pair, shape in zip(self.layers, self.shapes, strict=True):
            for cache in pair if shape.same_as is None else ():
                cache.index_copy_(0, target, cache.index_select(0, source))
