"""Device memory that can be given back and taken again at the same addresses.

A range of virtual addresses is reserved once. Physical memory is mapped into it in chunks, unmapped to give it back, and new
memory is mapped to take it again. So whatever remembers an address, above all a captured CUDA graph, stays valid. This is
CUDA's virtual memory management, reached through ``cuda.bindings.driver``, which comes with torch's CUDA builds.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from stoker.kernels.host_memory import host_memory

# Physical memory is asked for in pieces of this size. With pieces a fourth of it, giving 100 GB back took a third longer (H200).
_CHUNK = 2**30
_log = logging.getLogger("stoker")


class DeviceBuffer(Protocol):
    """Bytes on the device that can be given back and taken again."""

    stable_addresses: bool  # whether the bytes have the same addresses when they come back

    @property
    def tensor(self) -> Tensor:
        """uint8 [nbytes], not initialised. Not to be touched between ``release`` and ``restore``."""

    def release(self) -> None:
        """Give the memory back, unless that was done already."""

    def restore(self) -> None:
        """Take the memory again. Where there is none: ``RuntimeError`` or ``MemoryError``, and it stays given back."""


class PlainBuffer:
    """An ordinary tensor: its address changes when it comes back."""

    stable_addresses = False

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.device = device
        self._tensor: Tensor | None = None
        self.restore()

    @property
    def tensor(self) -> Tensor:
        assert self._tensor is not None, "given back"
        return self._tensor

    def release(self) -> None:
        self._tensor = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def restore(self) -> None:
        if self._tensor is None:
            if self.device.type == "cpu":
                self._tensor = host_memory(self.nbytes)
            else:
                self._tensor = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)


class Driver(Protocol):
    """The calls of the CUDA driver that are needed here. Each raises ``RuntimeError`` where the driver refuses."""

    granularity: int

    def reserve(self, size: int) -> int: ...
    def free(self, address: int, size: int) -> None: ...
    def map(self, address: int, size: int) -> None:
        """Map new physical memory to these addresses, readable and writable. A failure leaves nothing behind."""

    def unmap(self, address: int, size: int) -> None:
        """Undo one ``map``: its memory is given back."""

    def synchronize(self) -> None: ...
    def tensor(self, address: int, size: int, owner: object) -> Tensor:
        """uint8 [size] at a mapped address, which keeps ``owner`` alive."""


class VirtualBuffer:
    """Bytes that keep their addresses when they are given back and taken again."""

    stable_addresses = True

    def __init__(self, nbytes: int, driver: Driver, chunk: int = _CHUNK) -> None:
        self._memory = _Memory(nbytes, driver, chunk)
        self._memory.map_all()
        self.tensor = driver.tensor(self._memory.address, nbytes, self._memory)

    def release(self) -> None:
        self._memory.unmap_all()

    def restore(self) -> None:
        self._memory.map_all()


class _Memory:
    """The range, and what is mapped in it. Kept alive by the tensor, so that the addresses outlive every view of them."""

    def __init__(self, nbytes: int, driver: Driver, chunk: int) -> None:
        def round_up(size: int) -> int:
            return -(-size // driver.granularity) * driver.granularity

        self.driver = driver
        self.size, self.chunk = round_up(nbytes), round_up(chunk)
        self.address = driver.reserve(self.size)
        self.mapped: list[tuple[int, int]] = []
        weakref.finalize(self, _give_up, driver, self.address, self.size, self.mapped, os.getpid()).atexit = False

    def map_all(self) -> None:
        missing = [chunk for chunk in self._chunks() if chunk not in self.mapped]  # all or none, but for a failed unmap
        try:
            for chunk in missing:
                self.driver.map(*chunk)
                self.mapped.append(chunk)
        except BaseException:
            _unmap(self.driver, self.mapped)
            raise

    def _chunks(self) -> list[tuple[int, int]]:
        end = self.address + self.size
        return [(start, min(self.chunk, end - start)) for start in range(self.address, end, self.chunk)]

    def unmap_all(self) -> None:
        if self.mapped:
            self.driver.synchronize()  # what was launched may still read it
            _unmap(self.driver, self.mapped)


def _unmap(driver: Driver, mapped: list[tuple[int, int]]) -> None:
    while mapped:
        driver.unmap(*mapped[-1])
        mapped.pop()


def _give_up(driver: Driver, address: int, size: int, mapped: list[tuple[int, int]], process: int) -> None:
    if os.getpid() != process:  # a fork (of a data loader, say) inherits this finalizer, and has no driver
        return
    if mapped:
        driver.synchronize()
        _unmap(driver, mapped)
    driver.free(address, size)


class _AtAddress:
    """An object that ``torch.as_tensor`` turns into a tensor without a copy."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaDriver:
    """``cuda.bindings.driver``, for one device. Raises ``ImportError`` or ``RuntimeError`` where it cannot be used."""

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        self.api: Any = driver
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().synchronize()  # makes the context that the calls below need
        self.location = driver.CUmemAllocationProp()
        self.location.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.location.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.location.location.id = self.device.index
        flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity = int(self._call("cuMemGetAllocationGranularity", self.location, flag))

    def check(self) -> None:
        """Map a little memory, write to it and give it back: a device may refuse the calls, or torch the memory."""
        buffer = VirtualBuffer(self.granularity, self)
        buffer.tensor.zero_()
        buffer.release()

    def reserve(self, size: int) -> int:
        return int(self._call("cuMemAddressReserve", size, 0, 0, 0))

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def map(self, address: int, size: int) -> None:
        handle = self._call("cuMemCreate", size, self.location, 0)
        access = self.api.CUmemAccessDesc()
        access.location = self.location.location
        access.flags = self.api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
        except BaseException:
            self._call("cuMemRelease", handle)
            raise
        try:
            self._call("cuMemRelease", handle)  # the mapping keeps the memory
            self._call("cuMemSetAccess", address, size, [access], 1)
        except BaseException:
            self.unmap(address, size)
            raise

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def tensor(self, address: int, size: int, owner: object) -> Tensor:
        made = torch.as_tensor(_AtAddress(address, size, owner), device=self.device)
        assert made.data_ptr() == address, "torch made a copy, which nothing would give back"
        return made

    def _call(self, name: str, *arguments: Any) -> Any:
        with torch.cuda.device(self.device):
            error, *results = getattr(self.api, name)(*arguments)
        if error != self.api.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name} failed: {getattr(error, 'name', error)}")
        return results[0] if results else None


def virtual_buffer(nbytes: int, device: torch.device) -> VirtualBuffer | None:
    """A ``VirtualBuffer`` on the device; None on a CPU, and with a warning where the device refuses it."""
    if device.type != "cuda":
        return None
    try:
        driver = CudaDriver(device)
        driver.check()
    except (ImportError, RuntimeError, AttributeError, TypeError, ValueError) as error:
        _log.warning("memory will not keep its addresses, and graphs are captured again after sleep: %s", error)
        return None
    return VirtualBuffer(nbytes, driver)
