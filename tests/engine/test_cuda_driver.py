"""The calls of ``cuda.bindings.driver``, made to a stand-in that keeps the driver's books and refuses what is wrong."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.engine import device, virtual_memory
from stoker.engine.virtual_memory import CudaDriver, VirtualBuffer

KIB = 2**10
SIZE, CHUNK, GRANULARITY = 40 * KIB, 16 * KIB, 4 * KIB  # two whole chunks and a half
BASE = 2**30


class Struct(SimpleNamespace):
    """A CUDA struct: fields within fields, all of which may be set."""

    def __getattr__(self, name: str) -> Struct:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, Struct())
        found: Struct = getattr(self, name)
        return found


class StandIn(ModuleType):
    """Calls return (error, *results), as the bindings' do. ``fail_at``: the number of a call that does nothing but fail."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUmemAllocationProp = CUmemAccessDesc = Struct
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED="recommended")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="read and write")

    def __init__(self) -> None:
        super().__init__("driver")
        self.current = 0  # device
        self.log: list[str] = []
        self.fail_at = -1
        self.error: type[Exception] | None = None  # raised instead
        self.reserved: dict[int, int] = {}
        self.created: dict[int, int] = {}  # bytes by handle, until the handle is released
        self.mapped: dict[int, int] = {}
        self.usable: set[int] = set()

    def _fails(self, name: str) -> bool:
        assert self.current == 1, "not in the context of the buffer's device"
        self.log.append(name.removeprefix("cuMem"))
        if len(self.log) - 1 == self.fail_at and self.error is not None:
            raise self.error()
        return len(self.log) - 1 == self.fail_at

    def _on_device(self, location: Any) -> None:
        assert (location.type, location.id) == ("device", 1)

    def cuMemGetAllocationGranularity(self, properties: Any, flag: str) -> tuple[int, int]:
        assert properties.type == "pinned" and flag == "recommended"
        self._on_device(properties.location)
        return (2, 0) if self._fails("GetAllocationGranularity") else (0, GRANULARITY)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[int, int]:
        assert size % GRANULARITY == 0 and (alignment, address, flags) == (0, 0, 0)
        if self._fails("AddressReserve"):
            return 2, 0
        self.reserved[BASE] = size
        return 0, BASE

    def cuMemAddressFree(self, address: int, size: int) -> tuple[int]:
        assert not self.mapped, "memory is mapped in it"
        assert self.reserved.pop(address) == size
        return (int(self._fails("AddressFree")),)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[int, int]:
        assert size % GRANULARITY == 0 and properties.type == "pinned" and flags == 0
        self._on_device(properties.location)
        if self._fails("Create"):
            return 2, 0
        handle = len(self.log)
        self.created[handle] = size
        return 0, handle

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[int]:
        assert self.created[handle] == size and (offset, flags) == (0, 0)
        assert address >= BASE and address + size <= BASE + self.reserved[BASE]
        assert all(address + size <= a or a + n <= address for a, n in self.mapped.items()), "mapped twice"
        if self._fails("Map"):
            return (2,)
        self.mapped[address] = size
        return (0,)

    def cuMemRelease(self, handle: int) -> tuple[int]:
        if self._fails("Release"):
            return (1,)
        del self.created[handle]
        return (0,)

    def cuMemSetAccess(self, address: int, size: int, descriptors: list[Any], count: int) -> tuple[int]:
        assert count == len(descriptors) == 1 and descriptors[0].flags == "read and write"
        self._on_device(descriptors[0].location)
        assert self.mapped[address] == size
        if self._fails("SetAccess"):
            return (2,)
        self.usable.add(address)
        return (0,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[int]:
        assert self.mapped[address] == size, "not as it was mapped"
        if self._fails("Unmap"):
            return (1,)
        del self.mapped[address]
        self.usable.discard(address)
        return (0,)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The stand-in, imported as the bindings, and as much of ``torch.cuda`` as goes with it; the buffer is on device 1."""
    api = StandIn()

    @contextmanager
    def chosen(wanted: torch.device) -> Iterator[None]:
        before, api.current = api.current, wanted.index
        try:
            yield
        finally:
            api.current = before

    def synchronize(*_: Any) -> None:
        api.log.append("synchronize")

    bindings = ModuleType("cuda.bindings")
    bindings.driver = api  # type: ignore[attr-defined]
    for module in (ModuleType("cuda"), bindings):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "device", chosen)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    def tensor(self: CudaDriver, address: int, size: int, owner: object) -> Tensor:
        assert address == BASE and set(api.mapped) == api.usable and sum(api.mapped.values()) >= size
        made = torch.empty(size, dtype=torch.uint8, device="meta")
        made.owner = owner  # type: ignore[attr-defined]
        return made

    monkeypatch.setattr(CudaDriver, "tensor", tensor)
    return api


def buffer() -> VirtualBuffer:
    return VirtualBuffer(SIZE - 1, CudaDriver(torch.device("cuda", 1)), chunk=CHUNK)


MAP = ["Create", "Map", "Release", "SetAccess"]


def test_the_order_of_calls(api: StandIn) -> None:
    made = buffer()
    assert api.log == ["GetAllocationGranularity", "AddressReserve", *3 * MAP]
    for _ in range(2):
        assert sum(api.mapped.values()) == SIZE and set(api.mapped) == api.usable
        api.log.clear()
        made.release()
        assert api.log == ["synchronize", *3 * ["Unmap"]] and not api.mapped and api.reserved == {BASE: SIZE}
        api.log.clear()
        made.restore()
        assert api.log == 3 * MAP
    assert not api.created, "the handles are gone: only mappings hold the memory"
    api.log.clear()
    del made
    gc.collect()
    assert api.log == ["synchronize", *3 * ["Unmap"], "AddressFree"] and not api.reserved and api.current == 0


@pytest.mark.parametrize("call", range(12))
def test_a_restore_of_which_a_call_fails_leaves_nothing_and_can_be_tried_again(api: StandIn, call: int) -> None:
    made = buffer()
    made.release()
    api.log.clear()
    api.fail_at = call
    name = MAP[call % 4]
    with pytest.raises(RuntimeError, match=f"cuMem{name} failed: {1 if name == 'Release' else 2}"):
        made.restore()
    assert not api.mapped and not api.usable
    assert len(api.created) == (name == "Release"), "what cannot be released stays, all else does not"
    api.fail_at = -1
    made.restore()
    assert sum(api.mapped.values()) == SIZE and set(api.mapped) == api.usable


@pytest.mark.parametrize("call", range(14))
def test_a_buffer_that_cannot_be_made_leaves_nothing(api: StandIn, call: int) -> None:
    api.fail_at = call
    with pytest.raises(RuntimeError, match=r"cuMem\w+ failed"):
        buffer()
    gc.collect()
    assert not api.mapped and not api.reserved and api.current == 0


@pytest.mark.parametrize("call", [*range(6), 7])
@pytest.mark.parametrize("error", [None, TypeError])
def test_a_driver_that_refuses_the_least_there_is_is_not_used(
    api: StandIn,
    error: type[Exception] | None,
    call: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warnings: list[str] = []  # a record would keep the error, and that what was going on
    monkeypatch.setattr(virtual_memory._log, "warning", lambda message, *_: warnings.append(message))
    monkeypatch.setattr(device, "PlainBuffer", lambda *size_and_device: size_and_device)
    runtime = device.CudaRuntime(torch.device("cuda", 1))
    api.fail_at, api.error = call, error
    assert runtime.allocate(SIZE) == (SIZE, runtime.device)
    (warning,) = warnings
    assert "will not keep its addresses" in warning
    gc.collect()
    assert not api.mapped and not api.reserved


def test_memory_that_is_short_is_not_a_driver_that_refuses(api: StandIn) -> None:
    least = ["GetAllocationGranularity", "AddressReserve", *MAP, "synchronize", "Unmap", "AddressFree"]
    api.fail_at = len(least) + 1
    with pytest.raises(RuntimeError, match="cuMemCreate failed"):
        device.CudaRuntime(torch.device("cuda", 1)).allocate(SIZE)
    assert api.log[: api.fail_at + 1] == [*least, "AddressReserve", "Create"]


def test_what_cannot_be_unmapped_stays_until_it_can(api: StandIn) -> None:
    made = buffer()
    api.log.clear()
    api.fail_at = 2
    with pytest.raises(RuntimeError, match="cuMemUnmap failed: 1"):
        made.release()
    assert sum(api.mapped.values()) == 2 * CHUNK
    api.log.clear()
    api.fail_at = -1
    made.restore()
    assert api.log == MAP and sum(api.mapped.values()) == SIZE
    made.release()
    assert not api.mapped
