"""What differs between a CPU and a CUDA device, besides operations: memory, copies to and from the host, and graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.engine.packed_inputs import Channel, PinnedChannel, arrays_in, place, tensors_in
from stoker.engine.virtual_memory import DeviceBuffer, PlainBuffer, virtual_buffer
from stoker.kernels.host_memory import free_host_memory


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor on its way to the host."""

    tensor: Tensor
    event: Any = None  # torch.cuda.Event, recorded after the copy

    def wait(self) -> Tensor:
        if self.event is not None:
            self.event.synchronize()
        return self.tensor


@dataclass(frozen=True)
class Runtime:
    """The one place besides ``Ops`` that knows what kind of device an engine runs on."""

    device: torch.device
    ahead: int = 0  # plans worth launching before the oldest one's results are read
    graphs: bool = False  # whether ``capture`` works

    def free_memory(self) -> int:
        """Bytes that could be allocated now."""
        raise NotImplementedError

    def channel(self, nbytes: int) -> Channel:
        """A ``Channel`` of static memory for what every plan sends."""
        return Channel(nbytes, self.device)

    def upload(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """Send arrays of any size in one copy; returns them as tensors on the device. The arrays stay as they are."""
        return [torch.from_numpy(array) for array in arrays]

    def staging_memory(self, nbytes: int) -> Tensor:
        """Memory of the host from which the device copies fast, uint8 [nbytes]."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def chosen(self) -> AbstractContextManager[object]:
        """Context manager: this device is the current one, on which kernels are launched."""
        return nullcontext()

    def to_host(self, tensor: Tensor) -> HostCopy:
        """Start a copy to the host. The tensor may be written again by what is launched later."""
        return HostCopy(tensor.clone())

    def let_go(self, memory: Tensor) -> None:
        """Call before static memory is dropped: nobody else gets it before all that was launched has read it."""

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Record what ``body`` launches, without running it; returns a function that launches all of it."""
        raise NotImplementedError

    def release_graph_memory(self) -> None:
        """Give back the memory of captured graphs, all of which have been dropped."""

    def release_memory(self) -> None:
        """Give memory that has just been dropped back to the system."""

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Memory that can be given back and taken again."""
        return PlainBuffer(nbytes, self.device)


class CpuRuntime(Runtime):
    def free_memory(self) -> int:
        return free_host_memory()


@dataclass(frozen=True)
class CudaRuntime(Runtime):
    ahead: int = 1
    graphs: bool = True
    _pool: list[Any] = field(default_factory=list)  # the memory pool of graphs, made with the first one
    _graphs: WeakSet[Any] = field(default_factory=WeakSet)  # graphs in that pool that still exist
    _side: list[Any] = field(default_factory=list)  # the stream they are captured on, made with the first one
    _abandoned: list[Any] = field(default_factory=list)  # graphs whose capture could not be ended

    def free_memory(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def staging_memory(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def chosen(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device)

    def channel(self, nbytes: int) -> Channel:
        return PinnedChannel(nbytes, self.device, self.ahead + 1)

    def upload(self, *arrays: NDArray[Any]) -> list[Tensor]:
        specs = [(array.dtype.type, array.shape) for array in arrays]
        nbytes = place(specs)[1]
        host = self.staging_memory(nbytes)
        for packed, array in zip(arrays_in(host.numpy(), specs), arrays, strict=True):
            np.copyto(packed, array)
        # Torch gives pinned memory to nobody before the copies that read it are over.
        return tensors_in(host.to(self.device, non_blocking=True), specs)

    def to_host(self, tensor: Tensor) -> HostCopy:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return HostCopy(host, event)

    def let_go(self, memory: Tensor) -> None:
        # Torch only knows the stream the memory was made in, and steps may be in others. Each turn at the engine waits for
        # the one before, so all are over when the current stream is.
        memory.record_stream(torch.cuda.current_stream(self.device))

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        if not self._graphs:  # torch refuses to use a pool again once all its graphs are gone
            self._leave_pool()
        if not self._pool:
            self._pool.append(torch.cuda.graph_pool_handle())
        if (
            not self._side
        ):  # made once: torch has only 32, and captures whatever another thread launches on the same one
            self._side.append(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        main: Any = torch.cuda.current_stream(self.device)
        side = self._side[0]
        side.wait_stream(main)
        collects = gc.isenabled()
        gc.disable()  # a finaliser, say of another engine's memory, may synchronise, which would break the capture
        try:
            # Not torch.cuda.graph, which synchronises, collects garbage and empties the allocator's cache each time.
            with torch.cuda.stream(side):
                try:
                    with torch.inference_mode(
                        False
                    ):  # torch keeps tensors from the first capture, and later ones write to them
                        graph.capture_begin(pool=self._pool[0], capture_error_mode="thread_local")
                    body()
                except BaseException:
                    with suppress(RuntimeError):  # ending a broken capture raises
                        self._end(graph)
                    raise
                self._end(graph)
        finally:
            if collects:
                gc.enable()
        self._graphs.add(graph)
        main.wait_stream(side)
        return graph.replay

    def _end(self, graph: Any) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            # Up to torch 2.11 the allocator goes on as if this capture were under way, and emptying its cache is then a
            # failed assertion (pytorch pull request 180395); the graph never lets go of the pool either, which could then
            # not be given back. Later ones know that the capture is over, and say so.
            pool = torch.cuda.current_device(), self._pool[0]
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(*pool)
                torch._C._cuda_releasePool(*pool)
                # The allocator of pinned memory goes on asking this graph, which therefore has to live on; and its pool
                # cannot be used any more.
                self._abandoned.append(graph)
                self._leave_pool()
            raise

    def _leave_pool(self) -> None:
        """Have later captures use a new pool of memory.

        Torch keeps a cuBLAS workspace for every stream that has multiplied; that of ``_side`` is in the pool of its first graph.
        It would keep that memory from being given back, and graphs of another pool must not use it, as it may go at any time.
        Workspaces can only be dropped all together, also those that a trainer's graphs remember, if they were captured on a
        stream that had multiplied before. So this is done once for a pool, not for every graph.
        """
        self._graphs.clear()
        if self._pool:
            self._pool.clear()
            torch._C._cuda_clearCublasWorkspaces()

    def allocate(self, nbytes: int) -> DeviceBuffer:
        return virtual_buffer(nbytes, self.device) or PlainBuffer(nbytes, self.device)

    def release_graph_memory(self) -> None:
        self._leave_pool()
        self.release_memory()

    def release_memory(self) -> None:
        torch.cuda.empty_cache()


def runtime_for(device: torch.device) -> Runtime:
    return CudaRuntime(device) if device.type == "cuda" else CpuRuntime(device)
