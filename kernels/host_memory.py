"""A CPU's memory: large pieces of it, and the way from it to a device."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_HUGE = 2 * 2**20  # bytes of a huge page


def host_memory(nbytes: int) -> Tensor:
    """uint8 [nbytes], not initialised, in huge pages where the system has them; given back with the last tensor of it.

    What no one writes to takes no memory. What is written here and there, as a KV cache is, takes several times as long in
    ordinary pages. Raises ``MemoryError``.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or nbytes < _HUGE:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{nbytes} bytes: {error}") from error
    with suppress(OSError):  # a system built without them
        pages.madvise(advice)
    return torch.frombuffer(pages, dtype=torch.uint8)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A CPU's tensor on a device, itself if that is the CPU. The host waits for nothing, which from unpinned memory it would."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
