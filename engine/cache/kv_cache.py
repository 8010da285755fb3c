"""The memory of the KV cache: one allocation, seen as a key and a value tensor for each layer, and as rows of states.

Layers with a window may have blocks of their own, only as many as the window needs. For that the memory is cut into pages. A page
has room for as many layers as there are of the rarer kind: a block of that kind is one page, and a block of the other kind is
several pages side by side. So both kinds share the same memory, whatever the lengths of sequences ("Efficient Memory
Management for Large Language Model Serving with PagedAttention", Kwon et al. 2023, has one kind of block). Where a layer of
one kind keeps a multiple of what one of the other kind keeps, as in Gemma 4, several layers share its place. Where all layers
have a window, a page is one layer's; blocks of layers that see all keys then exist for counting only, with nothing in their page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from stoker.engine.cache.block_layout import BlockLayout
from stoker.engine.cache.state_cache import StateLayout
from stoker.engine.device import Runtime
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
        """Bytes of ``num_rows`` rows, rounded up so that what follows is aligned."""
        return -(-num_rows * math.prod(self.size) * self.dtype.itemsize // _ALIGNED) * _ALIGNED


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """What one layer keeps of a token, and of a sequence besides. Without attention it has no heads."""

    query_heads: int = 0  # that attend to them; layers of one model may differ
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    dtype: torch.dtype = torch.float32
    visibility: Visibility = PLAIN
    same_as: int | None = None  # an earlier layer, whose keys and values it attends to; it keeps none of its own
    states: tuple[StateShape, ...] = ()

    @property
    def sizes(self) -> tuple[int, int]:
        """(bytes of a token's key, bytes of its value)."""
        if self.same_as is not None:
            return 0, 0
        return self.heads * self.key_dim * self.dtype.itemsize, self.heads * self.value_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        return sum(self.sizes)


def block_layout(shapes: Sequence[LayerShape], block_size: int, max_model_len: int) -> BlockLayout:
    """The layout that gives layers with a window blocks of their own, where that saves memory; else the plain one.

    That needs layers which are alike within each kind, the larger a multiple of the smaller; and it has to save memory for the
    longest sequence.
    """
    kinds = _kinds(shapes)
    beside = _beside(*({(shapes[i].sizes, shapes[i].dtype) for i in kind} for kind in kinds))
    for shape in shapes:  # a layer that attends to another one's keys needs the same blocks
        other = None if shape.same_as is None else shapes[shape.same_as]
        if other is not None and other.visibility != shape.visibility:
            beside = None
    if beside is None:
        return BlockLayout()
    whole, windowed = (-(-len(kind) // number) for kind, number in zip(kinds, beside, strict=True))
    few, many = sorted((max(1, whole), windowed))
    span = -(-many // few)
    windows = tuple({shapes[i].visibility for i in kinds[1]})
    layout = BlockLayout(span if windowed == few else 1, 1 if windowed == few else span, windows, beside)
    taken = layout.needed(max_model_len, block_size, block_size) * span * KVCache.block_bytes(shapes, 1, layout)
    plain = -(-max_model_len // block_size) * KVCache.block_bytes(shapes, 1)
    return layout if taken < plain else BlockLayout()


def _kinds(shapes: Sequence[LayerShape]) -> tuple[list[int], list[int]]:
    """(layers that see all keys, layers with a window), of those that have keys of their own."""
    own = [i for i, shape in enumerate(shapes) if shape.token_bytes]
    return [i for i in own if shapes[i].visibility == PLAIN], [i for i in own if shapes[i].visibility != PLAIN]


def _beside(*kinds: set[tuple[tuple[int, int], torch.dtype]]) -> tuple[int, int] | None:
    """``BlockLayout.beside``; None where layers of one kind do not fit in the places of the other."""
    if list(map(len, kinds)) == [0, 1]:
        return 1, 1
    if any(len(kind) != 1 for kind in kinds):
        return None
    (whole, dtype), (windowed, other) = (next(iter(kind)) for kind in kinds)
    ratio = max(1, windowed[0] // whole[0]), max(1, whole[0] // windowed[0])
    fits = all(ratio[0] * all_keys == ratio[1] * window for all_keys, window in zip(whole, windowed, strict=True))
    return ratio if fits and dtype == other else None


def _page(shapes: Sequence[LayerShape], layout: BlockLayout) -> list[dict[int, int]]:
    """For each part of a page, the layers that may use it, each with its page within a block."""
    whole, windowed = _kinds(shapes)
    if not layout.window_pages:
        return [{i: 0} for i in sorted(whole + windowed)]
    kinds = list(zip((whole, windowed), layout.beside, strict=True))
    parts: list[dict[int, int]] = [{} for _ in range(max(1, min(-(-len(kind) // beside) for kind, beside in kinds)))]
    for kind, beside in kinds:
        for number, layer in enumerate(kind):
            page, part = divmod(number // beside, len(parts))
            parts[part][layer] = page * beside + number % beside
    return parts


class KVCache:
    """``num_blocks`` pages of ``block_size`` tokens. Block 0 takes what padding writes.

    ``layers[i]`` is ``(key [N, block, heads, key_dim], value [N, block, heads, value_dim])``, where a block has the number of
    its first page, times ``block_layout.beside``. Fresh blocks hold garbage: nothing may read a slot that was not written.
    ``layers`` is empty while the memory is given back.

    ``states[i]`` are the tensors of ``shapes[i].states``, a row for each of ``state_layout``.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        runtime: Runtime,
        state_layout: StateLayout | None,
        block_layout: BlockLayout,
    ) -> None:
        self.shapes = tuple(shapes)
        self.block_layout = block_layout
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
        """Bytes of a page."""
        page = _page(shapes, layout or BlockLayout())
        return block_size * sum(max(shapes[layer].token_bytes for layer in part) for part in page)

    @property
    def token_bytes(self) -> int:
        """Bytes that one more token of a long sequence takes."""
        layout = self.block_layout
        return layout.pages * self.block_bytes(self.shapes, 1, layout)

    def most_tokens(self, chunk: int) -> int:
        """The length of the longest sequence there is room for, at most ``chunk`` tokens of it computed at a time."""
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
        """Whether the cache lies at the same addresses when its memory is taken again."""
        return self._buffer is not None and self._buffer.stable_addresses

    def allocate(self) -> None:
        if self._buffer is None:
            self._buffer = self.runtime.allocate(self.wanted_bytes)
        self._buffer.restore()
        buffer = self._buffer.tensor
        self.states, start = self._state_tensors(buffer)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for part in _page(self.shapes, self.block_layout):
            middle = start + self.num_blocks * self.block_size * max(self.shapes[layer].sizes[0] for layer in part)
            end = middle + self.num_blocks * self.block_size * max(self.shapes[layer].sizes[1] for layer in part)
            for layer, place in part.items():
                shape = self.shapes[layer]
                blocks = self.num_blocks * self.block_layout.beside[shape.visibility != PLAIN]
                keys, values = (held.view(shape.dtype) for held in (buffer[start:middle], buffer[middle:end]))
                found[layer] = (
                    keys.view(blocks, self.block_size, shape.heads, shape.key_dim)[place:],
                    values.view(blocks, self.block_size, shape.heads, shape.value_dim)[place:],
                )
            start = end
        nothing = buffer[:0].view(1, 1, 0, 0)
        layers = [
            found.get(i if shape.same_as is None else shape.same_as, (nothing, nothing))
            for i, shape in enumerate(self.shapes)
        ]
        for key, value in layers:  # padding reads block 0: start with finite numbers, so that no NaN comes from there
            key[0].zero_()
            value[0].zero_()
        self.layers = layers

    def _state_tensors(self, buffer: Tensor) -> tuple[list[tuple[Tensor, ...]], int]:
        """The state tensors of every layer, and the byte at which they end."""
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

    def copy_blocks(self, copies: Sequence[tuple[int, int]], window_copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all reads before all writes. copies: (from, to).

        window_copies: of layers with a window, where these have blocks of their own.
        """
        both = zip((copies, window_copies), self.block_layout.beside, strict=True)
        index, window_index = self.runtime.upload(
            *(np.array(pairs, np.int64).reshape(-1, 2) * beside for pairs, beside in both)
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
