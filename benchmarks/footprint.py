"""What this process and its device hold, and the most they held in between."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch


def clear(device: str) -> None:
    """Drop what nobody uses, and what torch's allocator keeps of it: other processes may want the device's memory."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def used(device: str) -> dict[str, int]:
    """Bytes: on CUDA what torch allocated and reserved and what the driver calls used; on a CPU resident memory."""
    if device == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "driver": total - free,
        }
    return {"resident": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")}


class Peak:
    """Bytes held at the most since it was made, beyond those at the time: allocated on CUDA, resident on a CPU.

    What an allocator kept and used again is not in a CPU's figure.
    """

    def __init__(self, device: str) -> None:
        gc.collect()
        self.device = device
        self.start = next(iter(used(device).values()))
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # starts the record of the kernel anew

    def extra(self) -> int:
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated() - self.start
        lines = Path("/proc/self/status").read_text().splitlines()
        return max(0, next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")) - self.start)
