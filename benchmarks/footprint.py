"""What this process and its device hold, and the most they held in between."""

from __future__ import annotations

import ctypes
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


def room(device: str, wanted: int, besides: int = 0) -> int:
    """Of ``wanted`` bytes, as many as the device has room for with ``besides`` still to come; a tenth of it stays free. On a CPU,
    where nothing is that large, all."""
    if device != "cuda":
        return wanted
    clear(device)
    return min(wanted, max(0, int(0.9 * torch.cuda.mem_get_info()[0]) - besides))


def keep_nothing(keep: int = 2**16) -> None:
    """Make a CPU's figures exact, at the cost of time; to be called before this process has allocated much.

    From now on the C library takes every piece of memory of ``keep`` bytes or more from the system, and gives it back at
    once. Before anything is timed, call it again with 32 MiB, what that bound becomes by itself.
    """
    trim_threshold, mmap_threshold = -1, -3  # of mallopt(3)
    library = ctypes.CDLL(None)
    library.mallopt(mmap_threshold, keep)
    library.mallopt(trim_threshold, 2 * keep)
    library.malloc_trim(0)


class Peak:
    """Bytes held at the most since it was made, beyond those at the time: allocated on CUDA, resident on a CPU.

    A CPU's figure is what the C library took from the system: less than was used where it had kept memory of before, and more
    where it kept some in between. ``keep_nothing`` rules out both.
    """

    def __init__(self, device: str) -> None:
        if device == "cpu":  # whose garbage would be part of the figure
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
