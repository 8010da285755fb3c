"""Tensors that layers read in place of weights, made of these, and made anew whenever they change."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stoker.engine.virtual_memory import virtual_buffer
from stoker.kernels.host_memory import OffloadableMemory

_ALIGNMENT = 256  # bytes


class Wanted(NamedTuple):
    """Weights that are to lie side by side in what is made of them.

    parts: for each weight, the size and dtype of each tensor that is made of it. give: takes the tensors over all weights, each
    of the parts joined along its first dimension.
    """

    names: Sequence[str]
    sources: Sequence[Tensor]
    parts: Sequence[Sequence[tuple[torch.Size, torch.dtype]]]
    give: Callable[..., None]


class Derived(NamedTuple):
    """A weight, and what is made of it."""

    source: Tensor
    made: tuple[Tensor, ...]


class DerivedWeights(ABC):
    """What is made of a shell's weights, in one piece of memory, which can be given back and taken again.

    ``refresh`` makes it anew. by_name: by the name of each weight of which something is made.
    """

    def __init__(self, wanted: Sequence[Wanted], passing: Collection[str]) -> None:
        """wanted: at least one. passing: names of weights that are in memory only for moments, in which ``refresh`` is called
        with them."""
        self._passing = passing
        # Each makes anew something small, of tensors that are always there.
        self._besides: list[Callable[[], object]] = []
        places: list[list[tuple[int, torch.Size, torch.dtype]]] = []
        end = 0
        for one in wanted:
            places.append([])
            for parts in zip(*one.parts, strict=True):
                (first, dtype), rows = parts[0], sum(size[0] for size, _ in parts)
                size = torch.Size((rows, *first[1:]))
                start = -(-end // _ALIGNMENT) * _ALIGNMENT
                places[-1].append((start, size, dtype))
                end = start + math.prod(size) * dtype.itemsize
        self._memory = OffloadableMemory(end, wanted[0].sources[0].device, virtual_buffer)
        self.by_name: dict[str, Derived] = {}
        for one, of_one in zip(wanted, places, strict=True):
            wholes = [
                self._memory.data[start : start + math.prod(size) * dtype.itemsize].view(dtype).view(size)
                for start, size, dtype in of_one
            ]
            rows_of = ([size[0] for size, _ in parts] for parts in zip(*one.parts, strict=True))
            made = zip(*map(torch.split, wholes, rows_of), strict=True)
            self.by_name.update(zip(one.names, map(Derived, one.sources, made), strict=True))
            one.give(*wholes)
        self.refresh()

    @abstractmethod
    def _make(self, name: str, source: Tensor, *made: Tensor) -> None:
        """Write what is made of a weight."""

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def resident(self) -> bool:
        return self._memory.resident

    @property
    def stable_addresses(self) -> bool:
        return self._memory.stable_addresses

    @torch.no_grad()
    def refresh(self, names: Collection[str] | None = None) -> int:
        """Make it of weights as they are now; returns the bytes that were written, 0 while the memory is given back.

        names: of passing weights that can be read now; None: all weights that do not pass.
        """
        if not self.resident:
            return 0
        written = 0
        for name in self._always if names is None else names:
            source, made = self.by_name[name]
            self._make(name, source, *made)
            written += sum(t.nbytes for t in made)
        if names is None:
            for make in self._besides:
                make()
        return written

    @property
    def _always(self) -> list[str]:
        return [name for name in self.by_name if name not in self._passing]

    def release(self) -> None:
        """Let go of all tensors. Layers refer to this object, and to themselves in cycles, so it may live on for some time."""
        self.by_name.clear()
        self._besides.clear()

    def give_back(self, *, drop: bool) -> None:
        """Give the memory back, once nothing that was launched reads it. drop: without a copy in host memory."""
        if drop:
            self._memory.release()
        else:
            self._memory.offload()

    def take_again(self) -> None:
        """Take the memory again, and fill it. Any exception leaves everything as it was.

        Passing weights that were dropped have to be handed over again.
        """
        if not self.resident:
            try:
                self._memory.restore()
                self.refresh()
            except BaseException:  # an interrupt, say: memory that was not filled must not pass for weights
                self.give_back(drop=not self._passing)
                raise

    @torch.no_grad()
    def mismatches(self, names: Collection[str] | None = None) -> list[str]:
        """Names of the weights of which something else would be made now. names: as for ``refresh``."""
        wrong = []
        for name in self._always if names is None else names:
            source, made = self.by_name[name]
            expected = [torch.empty_like(t) for t in made]
            self._make(name, source, *expected)
            if not all(map(_same_bits, expected, made)):
                wrong.append(name)
        return wrong


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
