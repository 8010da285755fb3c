"""The bytes of the KV cache: one allocation, seen as one key and one value tensor a layer, and as rows of states.

Layers with a window may have blocks of their own, as few as the window needs. For that the memory is cut into pages, of as
many layers as there are of the rarer kind: a block of these is one page, and a block of the others as many pages as they
fill, side by side. So both kinds take from the same memory, whatever the lengths of sequences ("Efficient Memory Management
for Large Language Model Serving with PagedAttention", Kwon et al. 2023, has one kind of block).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from stoker.engine.block_layout import BlockLayout
from stoker.engine.device import Runtime
from stoker.engine.state_cache import StateLayout
from stoker.engine.virtual_memory import DeviceBuffer
from stoker.kernels.reference.attention import movable
from stoker.kernels.reference.attention_plan import PLAIN, Visibility

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
    visibility: Visibility = PLAIN
    same_as: int | None = None  # a layer before it, whose keys and values it attends to: it keeps none of its own
    states: tuple[StateShape, ...] = ()

    @property
    def token_bytes(self) -> int:
        if self.same_as is not None:
            return 0
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


def block_layout(shapes: Sequence[LayerShape], block_size: int, max_model_len: int) -> BlockLayout:
    """Blocks of their own for layers with a window, where there are others, all alike, and the longest sequence takes less."""
    own = [shape for shape in shapes if shape.token_bytes]
    windowed = [shape for shape in own if shape.visibility != PLAIN]
    mixed = 0 < len(windowed) < len(own) and len({replace(s, visibility=PLAIN, same_as=None) for s in own}) == 1
    for shape in shapes:  # who attends to the keys of another has to find them
        other = None if shape.same_as is None else shapes[shape.same_as]
        mixed = mixed and not shape.states and (other is None or other.visibility == shape.visibility)
    if not mixed:
        return BlockLayout()
    few, many = sorted((len(windowed), len(own) - len(windowed)))
    span = -(-many // few)
    rare = len(windowed) == few
    windows = tuple({shape.visibility for shape in windowed})
    layout = BlockLayout(span if rare else 1, 1 if rare else span, windows)
    taken = layout.needed(max_model_len, block_size, block_size) * span * few
    return layout if taken < -(-max_model_len // block_size) * len(own) else BlockLayout()


def _page(shapes: Sequence[LayerShape], layout: BlockLayout) -> list[dict[int, int]]:
    """For each part of a page, the layers whose keys and values it may hold, and in which page of their blocks."""
    own = [i for i, shape in enumerate(shapes) if shape.token_bytes]
    if not layout.window_pages:
        return [{i: 0} for i in own]
    windowed = [i for i in own if shapes[i].visibility != PLAIN]
    whole = [i for i in own if shapes[i].visibility == PLAIN]
    parts: list[dict[int, int]] = [{} for _ in range(min(len(whole), len(windowed)))]
    for layers in (whole, windowed):
        for number, layer in enumerate(layers):
            parts[number % len(parts)][layer] = number // len(parts)
    return parts


class KVCache:
    """``num_blocks`` pages of ``block_size`` tokens. Block 0 takes what padding writes.

    ``layers[i]`` is ``(key [N, block, heads, key_dim], value [N, block, heads, value_dim])``, where a block of several pages
    has the number of the first. Fresh blocks hold garbage: nothing may read a slot that was not written. ``layers`` is empty
    while the memory is given back.

    ``states[i]`` are the tensors of ``shapes[i].states``, a row for each of ``state_layout``.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        runtime: Runtime,
        state_layout: StateLayout | None = None,
        block_layout: BlockLayout | None = None,
    ) -> None:
        self.shapes = tuple(shapes)
        self.block_layout = block_layout or BlockLayout()
        self.num_blocks = num_blocks
        self.state_layout = state_layout
        self.block_size = block_size
        self.runtime = runtime
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.states: list[tuple[Tensor, ...]] = []
        self._buffer: DeviceBuffer | None = None
        self.allocate()

    @staticmethod
    def block_bytes(shapes: Sequence[LayerShape], block_size: int, layout: BlockLayout | None = None) -> int:
        """Of a page."""
        return block_size * sum(shapes[next(iter(part))].token_bytes for part in _page(shapes, layout or BlockLayout()))

    @property
    def token_bytes(self) -> int:
        """What another token of a long sequence takes."""
        layout = self.block_layout
        return layout.pages * self.block_bytes(self.shapes, 1, layout)

    def most_tokens(self, chunk: int) -> int:
        """Of the longest sequence there is room for, ``chunk`` tokens of it computed at a time at most."""
        return self.block_layout.most_tokens(self.num_blocks, self.block_size, chunk)

    @property
    def nbytes(self) -> int:
        return self.wanted_bytes if self.layers else 0

    @staticmethod
    def state_bytes(shapes: Sequence[LayerShape], layout: StateLayout | None) -> int:
        return 0 if layout is None else sum(s.nbytes(layout.num_rows) for shape in shapes for s in shape.states)

    @property
    def wanted_bytes(self) -> int:
        """``nbytes`` when awake."""
        blocks = self.num_blocks * self.block_bytes(self.shapes, self.block_size, self.block_layout)
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
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for part in _page(self.shapes, self.block_layout):
            shape, pair = self.shapes[next(iter(part))], []
            for dim in (shape.key_dim, shape.value_dim):
                size = (self.num_blocks, self.block_size, shape.heads, dim)
                end = start + math.prod(size) * shape.dtype.itemsize
                pair.append(buffer[start:end].view(shape.dtype).view(size))
                start = end
            found |= {layer: (pair[0][page:], pair[1][page:]) for layer, page in part.items()}
        nothing = buffer[:0].view(1, 1, 0, 0)
        layers = [
            found.get(i if shape.same_as is None else shape.same_as, (nothing, nothing))
            for i, shape in enumerate(self.shapes)
        ]
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

    def copy_blocks(self, copies: Sequence[tuple[int, int]], window_copies: Sequence[tuple[int, int]] = ()) -> None:
        """Copy whole blocks, all reads before all writes. copies: (from, to).

        window_copies: of layers with a window, where these have blocks of their own.
        """
        index, window_index = self.runtime.upload(
            *(np.array(pairs, np.int64).reshape(-1, 2) for pairs in (copies, window_copies))
        )
        for pair, shape in zip(self.layers, self.shapes, strict=True):
            windowed = self.block_layout.window_pages and shape.visibility != PLAIN
            source, target = (window_index if windowed else index).unbind(1)
            for cache in pair if shape.token_bytes and len(source) else ():
                rows = movable(cache)
                rows.index_copy_(0, target, rows.index_select(0, source))

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole rows of states, a few at a time: they are large. copies: (from, to); no row is in both."""
        (index,) = self.runtime.upload(np.array(copies))
        for source, target in (part.unbind(1) for part in torch.split(index, _ROWS_AT_A_TIME)):
            for state in chain.from_iterable(self.states):
                state.index_copy_(0, target, state.index_select(0, source))
