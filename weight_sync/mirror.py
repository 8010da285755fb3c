"""``Mirror``: the engine's own copy of the weights, in one piece of memory. Tensors of one matmul lie side by side."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from stoker.kernels.host_memory import OffloadableMemory, StableBuffers
from stoker.weight_sync.form import Form
from stoker.weight_sync.staging import copy_each

_ALIGNMENT = 256  # bytes


class Consumer(Protocol):
    """Keeps something that it makes of weights, so that the weights themselves need not be kept."""

    def refresh(self, names: Collection[str]) -> int:
        """Make it anew from these weights, which are in memory only now; returns the bytes that were written."""
        ...

    def mismatches(self, names: Collection[str]) -> list[str]:
        """The names of those of these weights from which it would now make something else. They are in memory only now."""
        ...


class Mirror(OffloadableMemory):
    """Named tensors in one storage, those of a group side by side. Its memory can be given back and taken again.

    The tensors stay the same objects, and views of the storage, through ``offload``, ``release`` and ``restore``; their addresses
    may change. ``complete``: whether they hold one set of weights, and not none, or parts of two.

    Of tensors in ``passing`` the mirror keeps only what ``consumer`` makes of them. The sets of ``layers`` that they are in all
    share one piece of memory, which is there within ``room()``: writing one set overwrites the others.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        dtypes: Mapping[str, torch.dtype],
        aliases: Mapping[str, str],
        groups: Sequence[tuple[str, ...]],
        device: torch.device,
        layers: Sequence[frozenset[str]],
        stable: StableBuffers,
    ) -> None:
        """aliases: from a tied tensor's other names to the one in ``shapes``. layers: sets of ``passing`` tensors, none tied."""
        self.layers = tuple(layers)
        self.layer_of = {name: index for index, layer in enumerate(layers) for name in layer}
        self.passing = frozenset(self.layer_of)
        kept = shapes.keys() - self.passing
        layouts = [_Layout(shapes, dtypes, groups, names) for names in (kept, *layers)]
        super().__init__(layouts[0].nbytes, device, stable)
        self.device, self.dtypes = device, dtypes
        self._room = torch.empty(max((o.nbytes for o in layouts[1:]), default=0), dtype=torch.uint8, device=device)
        found: dict[str, Tensor] = {}
        self.fused: dict[tuple[str, ...], Tensor] = {}
        for layout, data in zip(layouts, (self.data, *[self._room] * len(layers)), strict=True):
            for name, start in layout.places.items():
                found[name] = _view(data, start, shapes[name], dtypes[name])
            for first, *rest in layout.groups:
                rows = sum(shapes[name][0] for name in (first, *rest))
                size = torch.Size((rows, *shapes[first][1:]))
                self.fused[first, *rest] = _view(data, layout.places[first], size, dtypes[first])
        self.tensors = {name: found[name] for name in shapes}
        self.tensors.update({other: self.tensors[first] for other, first in aliases.items()})
        self.complete = False
        self.consumer: Consumer | None = None
        self.places = object()  # as of ``WeightSource``

    def write(self, new: Mapping[str, Tensor], form: Form | None = None) -> int:
        """Write new tensors; returns the bytes that were written, the consumer's included. form: as for ``WeightSource.write``."""
        kept = {name: tensor for name, tensor in new.items() if name not in self.passing}
        written = copy_each([self.tensors[name] for name in kept], kept.values(), form)
        for names in self.let_through(new):
            assert self.consumer is not None
            written += self.consumer.refresh(names)
        return written

    def let_through(self, new: Mapping[str, Tensor]) -> Iterator[list[str]]:
        """Write the ``passing`` tensors among these, layer by layer; yields a layer's names while its numbers are in memory."""
        by_layer: dict[int, list[str]] = {}
        for name in filter(self.layer_of.__contains__, new):
            by_layer.setdefault(self.layer_of[name], []).append(name)
        for names in by_layer.values():
            with self.room():
                copy_each([self.tensors[name] for name in names], [new[name] for name in names])
                yield names

    def release(self) -> None:
        """Give all memory back, and lose its content: after ``restore`` a complete update has to come."""
        self.complete = False
        super().release()

    def restore(self) -> None:
        self.places = object()
        super().restore()

    @contextmanager
    def room(self) -> Iterator[None]:
        """Context manager: tensors in ``passing`` have memory."""
        storage = self._room.untyped_storage()
        before = storage.nbytes()
        storage.resize_(len(self._room))
        try:
            yield
        finally:
            storage.resize_(before)

    @torch.no_grad()
    def fill_room(self) -> None:
        """Fill tensors in ``passing`` with noise as large as weights are. It shows what a layer computes as well as weights do."""
        generator = torch.Generator(self._room.device).manual_seed(0)
        tensors = (self.tensors[name] for layer in self.layers for name in sorted(layer))
        for tensor in {(t.storage_offset(), t.shape): t for t in tensors}.values():  # most layers are alike
            tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)

    def close_room(self) -> None:
        """Give back the memory that tensors in ``passing`` have at first."""
        self._room.untyped_storage().resize_(0)


class _Layout:
    """The first byte of each of some tensors, those of a group side by side."""

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        dtypes: Mapping[str, torch.dtype],
        groups: Sequence[tuple[str, ...]],
        names: Collection[str],
    ) -> None:
        self.places: dict[str, int] = {}
        self.groups: list[tuple[str, ...]] = []
        self.nbytes = 0
        for group in groups:
            alike = all(name in names and name not in self.places for name in group)
            if alike and len({(dtypes[name], shapes[name][1:]) for name in group}) == 1:
                self.groups.append(group)
                self._put(group, shapes, dtypes)
        for name in shapes:
            if name in names and name not in self.places:
                self._put((name,), shapes, dtypes)

    def _put(self, group: tuple[str, ...], shapes: Mapping[str, torch.Size], dtypes: Mapping[str, torch.dtype]) -> None:
        end = -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT
        for name in group:
            self.places[name] = end
            end += math.prod(shapes[name]) * dtypes[name].itemsize
        self.nbytes = end


def _view(data: Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return data[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
