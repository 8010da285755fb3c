"""Host memory: how much is free, how to take large pieces of it, and how to copy from it to a device and back."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Protocol

import torch
from torch import Tensor

_HUGE = 2 * 2**20  # bytes of a huge page
_PINNED_BYTES = 2**28  # torch rounds each piece of pinned memory up to a power of two
# Control groups of version 1 and 2, by what /proc/self/cgroup calls them: their folder, and the files that tell the most they
# may take and what they take; of the latter, by its name in memory.stat, what is cache and would make way.
_GROUPS = {
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
}


def free_host_memory(root: Path = Path("/")) -> int:
    """Bytes that this process could still take: what the system has, within the limit of a container.

    root: where proc and sys are. A system that does not tell (one without /proc) counts as all free.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return max(0, min([available, *_left_to_groups(root)]))


def _left_to_groups(root: Path) -> Iterator[int]:
    """What each control group that this process is in may still take, where that is limited and can be read."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controller, path = line.split(":", 2)
            if controller in _GROUPS:
                folder, *files = _GROUPS[controller]
                # A container may see its own group as the root, whatever the path says.
                for group in (PurePosixPath(path), *PurePosixPath(path).parents):
                    with suppress(OSError, ValueError):  # no such group here, or one that may take "max"
                        yield _left_to(root / folder / group.relative_to("/"), *files)


def _left_to(group: Path, limit: str, usage: str, cache: str) -> int:
    most, taken = int((group / limit).read_text()), int((group / usage).read_text())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return most - taken + int(stat.get(cache, 0))


def host_memory(nbytes: int) -> Tensor:
    """uint8 [nbytes], not initialised, in huge pages where the system has them. It is freed with the last tensor on it.

    Pages that nobody writes to take no memory. Scattered writes, as to a KV cache, take several times as long in ordinary
    pages. Raises ``MemoryError``.
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
    """A host tensor copied to a device; itself if that is the CPU. It is pinned first, so that the host does not wait."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class StableBuffer(Protocol):
    """Bytes on a device that can be given back, and come back at the same addresses."""

    tensor: Tensor  # uint8 [nbytes]

    def release(self) -> None: ...
    def restore(self) -> None: ...


# Makes one of so many bytes on a device; None where the device cannot have such.
StableBuffers = Callable[[int, torch.device], StableBuffer | None]


class OffloadableMemory:
    """Bytes on a device that can be given back, with or without a copy in host memory, and taken again.

    ``data`` and its views stay the same objects. Their addresses stay the same, too, where ``stable_addresses``.
    """

    def __init__(self, nbytes: int, device: torch.device, stable: StableBuffers = lambda *_: None) -> None:
        self.nbytes = nbytes
        if device.type == "cuda":
            torch.cuda.empty_cache()  # or nobody could have what torch's allocator holds unused
        self._stable = stable(nbytes, device) if nbytes else None
        if self._stable is None:
            self.data = torch.empty(nbytes, dtype=torch.uint8, device=device)
        else:
            self.data = self._stable.tensor
        self.resident = True  # whether the bytes are in the device's memory
        self._host: list[Tensor] | None = None

    @property
    def stable_addresses(self) -> bool:
        return self._stable is not None or not self.nbytes

    def offload(self) -> None:
        """Move the bytes to host memory (pinned, for a device), and give the device's back."""
        if self.resident:
            self._settle()
            pinned = self.data.device.type != "cpu"
            parts = torch.split(self.data, _PINNED_BYTES)
            host = [torch.empty(len(part), dtype=torch.uint8, device="cpu", pin_memory=pinned) for part in parts]
            for to, part in zip(host, parts, strict=True):
                to.copy_(part, non_blocking=True)
            self._settle()
            self._host = host
            self._give_back()

    def release(self) -> None:
        """Give all memory back. Its content is lost."""
        self._host = None
        self._settle()
        self._give_back()

    def restore(self) -> None:
        """Take the memory again, with the content that was offloaded. Any exception leaves everything as it was."""
        if not self.resident:
            try:
                if self._stable is None:
                    self.data.untyped_storage().resize_(self.nbytes)
                else:
                    self._stable.restore()
                self.resident = True
                if self._host is not None:
                    for part, host in zip(torch.split(self.data, _PINNED_BYTES), self._host, strict=True):
                        part.copy_(host, non_blocking=True)
                    self._settle()
            except BaseException:  # an interrupt, say: memory without its numbers must not pass for weights
                self._settle()
                self._give_back()
                raise
            self._host = None

    def _give_back(self) -> None:
        self.resident = not self.nbytes
        if self._stable is None:
            self.data.untyped_storage().resize_(0)
        else:
            self._stable.release()

    def _settle(self) -> None:
        """Wait for all launched work on the bytes, on any stream, before their memory is given away."""
        torch.get_device_module(self.data.device).synchronize(self.data.device)
