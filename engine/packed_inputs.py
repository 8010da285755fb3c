"""Sends a plan's numbers to the device: arrays side by side in one block, in one copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Spec = tuple[type[np.generic], tuple[int, ...]]  # dtype and shape of an array

ALIGNMENT = 16  # bytes: kernels are compiled once more for addresses that are no multiple of it
_MOST_LAYOUTS = 64


def place(specs: Iterable[Spec]) -> tuple[list[slice], int]:
    """(where arrays lie one after another in a block of bytes, the size of the block)."""
    spans, end = [], 0
    for dtype, shape in specs:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + math.prod(shape) * np.dtype(dtype).itemsize
        spans.append(slice(start, end))
    return spans, end


def tensors_in(block: Tensor, specs: Sequence[Spec]) -> list[Tensor]:
    """The arrays of a block, uint8 [n]: views."""
    spans, _ = place(specs)
    dtypes = (torch.from_numpy(np.empty(0, dtype)).dtype for dtype, _ in specs)
    return [block[at].view(t).view(shape) for at, t, (_, shape) in zip(spans, dtypes, specs, strict=True)]


def arrays_in(block: NDArray[np.uint8], specs: Sequence[Spec]) -> list[NDArray[Any]]:
    """The arrays of a block on the host: views."""
    spans, _ = place(specs)
    return [block[at].view(dtype).reshape(shape) for at, (dtype, shape) in zip(spans, specs, strict=True)]


class Channel:
    """Static memory of a device that the host fills again and again. On a CPU the step reads the very memory that is written.

    ``blocks``: where the host writes, uint8 [nbytes] each.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.static = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.blocks: Sequence[NDArray[np.uint8]] = (self.static.numpy(),)

    def open(self) -> int:
        """The block to write next; nothing reads it any more."""
        return 0

    def send(self, block: int, nbytes: int) -> None:
        """Make the beginning of a block visible to what is launched from now on."""


class PinnedChannel(Channel):
    """A CUDA device's channel: a copy runs when its turn comes, so the next plan is written to another block meanwhile."""

    def __init__(self, nbytes: int, device: torch.device, depth: int) -> None:
        self.static = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._pinned = [torch.empty(nbytes, dtype=torch.uint8, device="cpu").pin_memory() for _ in range(depth)]
        self.blocks = [block.numpy() for block in self._pinned]
        self._sent: list[Any] = [torch.cuda.Event() for _ in range(depth)]  # type: ignore[no-untyped-call]
        self._next = 0

    def open(self) -> int:
        block, self._next = self._next, (self._next + 1) % len(self.blocks)
        self._sent[
            block
        ].synchronize()  # returns at once, as long as there are at least as many blocks as plans under way
        return block

    def send(self, block: int, nbytes: int) -> None:
        self.static[:nbytes].copy_(self._pinned[block][:nbytes], non_blocking=True)
        self._sent[block].record(torch.cuda.current_stream(self.static.device))


class PackedInputs:
    """Named arrays that are written on the host and read on the device. For equal sizes they are always the same tensors.

    layout: the arrays for given sizes. most: the largest sizes. channel: makes the memory.
    """

    def __init__(
        self, layout: Callable[..., Mapping[str, Spec]], most: tuple[int, ...], channel: Callable[[int], Channel]
    ) -> None:
        self._layout = layout
        self._channel = channel(place(layout(*most).values())[1])
        self._views: dict[tuple[int, ...], tuple[dict[str, NDArray[Any]], dict[str, Tensor], int]] = {}

    @property
    def static(self) -> Tensor:
        """The memory on the device."""
        return self._channel.static

    def open(self, *sizes: int) -> tuple[dict[str, NDArray[Any]], Callable[[], dict[str, Tensor]]]:
        """(the arrays, with garbage in them; a function that sends them to the device once they are written)."""
        block = self._channel.open()
        if (block, *sizes) not in self._views:
            if len(self._views) == _MOST_LAYOUTS:  # sizes of long prompts hardly ever come again
                self._views.clear()
            layout = self._layout(*sizes)
            specs = list(layout.values())
            arrays = dict(zip(layout, arrays_in(self._channel.blocks[block], specs), strict=True))
            tensors = dict(zip(layout, tensors_in(self._channel.static, specs), strict=True))
            self._views[block, *sizes] = arrays, tensors, place(specs)[1]
        arrays, tensors, nbytes = self._views[block, *sizes]

        def send() -> dict[str, Tensor]:
            self._channel.send(block, nbytes)
            return tensors

        return arrays, send
