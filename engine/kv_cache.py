"""The bytes of the KV cache: one allocation, seen as one key and one value tensor a layer, and as rows of states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from stoker.engine.device import Runtime
from stoker.engine.state_cache import StateLayout
from stoker.engine.virtual_memory import DeviceBuffer
from stoker.kernels.reference.attention import movable

_ALIGNED = 256  # bytes
_ROWS_AT_A_TIME = 16


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor that a layer keeps of a sequence, whatever its length."""

    size: tuple[int, ...]
    dtype: torch.dtype
    operation: str = "causal_conv"  # of ``Ops``, that moves it on

    def nbytes(self, num_rows: int) -> int:
        """So that what comes after it is aligned."""
        return -(-num_rows * math.prod(self.size) * self.dtype.itemsize // _ALIGNED) * _ALIGNED


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """What one layer keeps of a token, and of a sequence besides. Without attention it has no heads."""

    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    dtype: torch.dtype = torch.float32
    same_as: int | None = None  # a layer before it, whose keys and values it attends to: it keeps none of its own
    states: tuple[StateShape, ...] = ()

    @property
    def token_bytes(self) -> int:
        if self.same_as is not None:
            return 0
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class KVCache:
    """``num_blocks`` blocks of ``block_size`` tokens for every layer. Block 0 takes what padding writes.

    ``layers[i]`` is ``(key [N, block, heads, key_dim], value [N, block, heads, value_dim])``. Fresh blocks hold
    garbage: nothing may read a slot that was not written. ``layers`` is empty while the memory is given back.

    ``states[i]`` are the tensors of ``shapes[i].states``, a row for each of ``state_layout``.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        runtime: Runtime,
        state_layout: StateLayout | None = None,
    ) -> None:
        self.shapes = tuple(shapes)
        self.num_blocks = num_blocks
        self.state_layout = state_layout
        self.block_size = block_size
        self.runtime = runtime
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.states: list[tuple[Tensor, ...]] = []
        self._buffer: DeviceBuffer | None = None
        self.allocate()

    @staticmethod
    def block_bytes(shapes: Sequence[LayerShape], block_size: int) -> int:
        return block_size * sum(shape.token_bytes for shape in shapes)

    @property
    def nbytes(self) -> int:
        return self.wanted_bytes if self.layers else 0

    @staticmethod
    def state_bytes(shapes: Sequence[LayerShape], layout: StateLayout | None) -> int:
        return 0 if layout is None else sum(s.nbytes(layout.num_rows) for shape in shapes for s in shape.states)

    @property
    def wanted_bytes(self) -> int:
        """``nbytes`` when awake."""
        blocks = self.num_blocks * self.block_bytes(self.shapes, self.block_size)
        return blocks + self.state_bytes(self.shapes, self.state_layout)

    @property
    def stable_addresses(self) -> bool:
        """Whether the cache lies where it lay when its memory is taken again."""
        return self._buffer is not None and self._buffer.stable_addresses

    def allocate(self) -> None:
        if self._buffer is None:
            self._buffer = self.runtime.allocate(self.wanted_bytes)
        self._buffer.restore()
        buffer = self._buffer.tensor
        self.states, start = self._state_tensors(buffer)
        layers: list[tuple[Tensor, Tensor]] = []
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

    def _state_tensors(self, buffer: Tensor) -> tuple[list[tuple[Tensor, ...]], int]:
        """Of every layer, and where they end."""
        layout, start = self.state_layout, 0
        if layout is None:
            return [() for _ in self.shapes], start
        layers: list[tuple[Tensor, ...]] = []
        for shape in self.shapes:
            tensors = []
            for state in shape.states:
                end = start + state.nbytes(layout.num_rows)
                rows = buffer[start:end].view(state.dtype)[: layout.num_rows * math.prod(state.size)]
                tensors.append(rows.view(layout.num_rows, *state.size))
                tensors[-1][layout.padding : layout.zeros + 1].zero_()
                start = end
            layers.append(tuple(tensors))
        return layers, start

    def release(self) -> None:
        self.layers, self.states = [], []
        if self._buffer is not None:
            self._buffer.release()

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all reads before all writes. copies: (from, to)."""
        (index,) = self.runtime.upload(np.array(copies))
        source, target = index[:, 0], index[:, 1]
        for pair, shape in zip(self.layers, self.shapes, strict=True):
            for cache in pair if shape.token_bytes else ():
                rows = movable(cache)
                rows.index_copy_(0, target, rows.index_select(0, source))

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole rows of states, a few at a time: they are large. copies: (from, to); no row is in both."""
        (index,) = self.runtime.upload(np.array(copies))
        for source, target in (part.unbind(1) for part in torch.split(index, _ROWS_AT_A_TIME)):
            for state in chain.from_iterable(self.states):
                state.index_copy_(0, target, state.index_select(0, source))
