"""What differs between a CPU and a CUDA device outside the operations: memory and the way to the host."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Runtime:
    """The one place besides ``Ops`` that knows what kind of device an engine runs on."""

    device: torch.device

    def free_memory(self) -> int:
        """Bytes that could be allocated now."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def to_device(self, host: Tensor, static: Tensor) -> None:
        """Fill the static buffer from host memory."""
        static.copy_(host)

    def release_memory(self) -> None:
        """Give memory that has just been dropped back to the system."""

    def allocate_bytes(self, nbytes: int) -> Tensor:
        """Uninitialised uint8 [nbytes]."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


class CpuRuntime(Runtime):
    def free_memory(self) -> int:
        with open("/proc/meminfo") as file:  # counts reclaimable page cache as free, which sysconf does not
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return super().free_memory()


class CudaRuntime(Runtime):
    def free_memory(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def to_device(self, host: Tensor, static: Tensor) -> None:
        static.copy_(host.pin_memory(), non_blocking=True)

    def release_memory(self) -> None:
        torch.cuda.empty_cache()


def runtime_for(device: torch.device) -> Runtime:
    return CudaRuntime(device) if device.type == "cuda" else CpuRuntime(device)
