"""Adapters that are not on the engine's device: packed into one piece of memory, and copied into a slot as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.engine.device import Runtime
from stoker.kernels.reference.adapter_weights import AdapterWeights

_ALIGNMENT = 256  # bytes: as for tensors that torch allocates


@dataclass(frozen=True, slots=True)
class Packed:
    """An adapter whose tensors lie one after another."""

    adapter: AdapterWeights
    memory: Tensor  # uint8 [bytes]


def lies_on(adapter: AdapterWeights, device: torch.device) -> bool:
    """Whether all of an adapter's tensors are on the device, so that a slot reads them where they are."""
    return all(t.device == device for t in adapter.tensors())


def pack(adapter: AdapterWeights, runtime: Runtime) -> Packed:
    """A copy of an adapter in host memory from which the device copies fast, or on another device if the adapter is there.

    It takes one concatenation for each dtype.
    """
    tensors = {id(t): t.detach() for t in adapter.tensors()}  # some may be there twice
    devices = {t.device for t in tensors.values()}
    if len(devices) > 1:
        tensors = {key: t.cpu() for key, t in tensors.items()}
    where = devices.pop() if len(devices) == 1 else torch.device("cpu")
    by_dtype: dict[torch.dtype, dict[int, Tensor]] = {}
    for key, t in tensors.items():
        by_dtype.setdefault(t.dtype, {})[key] = t
    places: dict[int, int] = {}  # first byte of each
    end = 0
    parts: list[tuple[int, list[Tensor]]] = []
    for dtype, group in by_dtype.items():
        parts.append((end, []))
        for key, t in group.items():
            places[key] = end
            padding = -t.nbytes % _ALIGNMENT
            parts[-1][1].extend((t.reshape(-1), t.new_zeros(padding // dtype.itemsize)))
            end += t.nbytes + padding
    on_host = where.type == "cpu"
    memory = runtime.staging_memory(end) if on_host else torch.empty(end, dtype=torch.uint8, device=where)
    for (start, flat), dtype in zip(parts, by_dtype, strict=True):
        size = sum(t.nbytes for t in flat)
        torch.cat(flat, out=memory[start : start + size].view(dtype))
    return Packed(_views(adapter, memory, places), memory)


def _views(adapter: AdapterWeights, memory: Tensor, places: Mapping[int, int]) -> AdapterWeights:
    """places: the first byte of each tensor, by its id."""

    def view(t: Tensor) -> Tensor:
        start = places[id(t)]
        return memory[start : start + t.nbytes].view(t.dtype).view(t.shape)

    return adapter.map(view)


class Slab:
    """A slot's memory on the device, for adapters that are elsewhere."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._memory = torch.empty(0, dtype=torch.uint8, device=runtime.device)

    @property
    def nbytes(self) -> int:
        return len(self._memory)

    def let_go(self) -> None:
        """Call it before the slab is dropped: launched work may still read it."""
        self._runtime.let_go(self._memory)

    def fill(self, packed: Packed) -> AdapterWeights:
        """Copy the adapter into the slab, in place of what was there. Adapters of one layout get the same addresses."""
        size = len(packed.memory)
        if len(self._memory) < size:
            memory = self._memory.new_empty(size)
            self.let_go()
            self._memory = memory
        memory = self._memory[:size]
        memory.copy_(packed.memory, non_blocking=True)
        places = {id(t): int(t.storage_offset()) * t.itemsize for t in packed.adapter.tensors()}
        return _views(packed.adapter, memory, places)
