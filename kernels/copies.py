"""Copies of many tensors in one kernel: torch launches one for some 84 MB, after each of which the chip runs empty."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import and_, attrgetter

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.host_memory import to_device
from stoker.kernels.reference import copies

# A program copies so many elements, a part at a time: 64 or 128 bytes are on their way for each thread.
_PART, _PARTS, _WARPS = 4096, 8, 4
_kind = attrgetter("dtype", "device", "shape")


@triton.jit
def _copies_kernel(
    owners, table, SOURCE: tl.constexpr, TARGET: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    owner = tl.load(owners + tl.program_id(0))
    source, target = tl.load(table + 4 * owner), tl.load(table + 4 * owner + 1)
    count, first = tl.load(table + 4 * owner + 2), tl.load(table + 4 * owner + 3)
    source = tl.multiple_of(source.to(tl.pointer_type(SOURCE)), 16)
    target = tl.multiple_of(target.to(tl.pointer_type(TARGET)), 16)
    begin = (tl.program_id(0) - first) * (PARTS * PART)
    source, target = source + begin, target + begin
    end = tl.minimum(count - begin, PARTS * PART).to(tl.int32)
    wide = end // 8 * 8  # up to there 16 bytes are read or written at a time
    for part in range(0, wide, PART):
        at = part + tl.arange(0, PART)
        tl.store(target + at, tl.load(source + at, mask=at < wide, other=0.0).to(TARGET), mask=at < wide)
    at = wide + tl.arange(0, 8)
    tl.store(target + at, tl.load(source + at, mask=at < end, other=0.0).to(TARGET), mask=at < end)


@lru_cache(maxsize=8)
def _plan(places: tuple[tuple[int, int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Which tensor each program works on, int32 [programs]; and of each tensor where it is read and written, elements, and
    first program, int64 [n, 4]."""
    table = torch.tensor(places, device="cpu")
    counts = -(-table[:, 2] // (_PART * _PARTS))
    firsts = counts.cumsum(0) - counts
    owners = torch.repeat_interleave(torch.arange(len(places), dtype=torch.int32, device="cpu"), counts)
    return to_device(owners, device), to_device(torch.cat([table, firsts[:, None]], 1), device)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """As the reference; in one kernel where both are in 16 or 32 bits, contiguous, and begin at multiples of 16 bytes.

    targets: all on one device.
    """
    kinds: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    others: list[int] = []
    places = list(
        zip(map(Tensor.data_ptr, sources), map(Tensor.data_ptr, targets), map(Tensor.numel, targets), strict=True)
    )
    plain = map(and_, map(Tensor.is_contiguous, sources), map(Tensor.is_contiguous, targets))
    alike = zip(map(_kind, sources), map(_kind, targets), places, plain, strict=True)
    for i, ((came, *there), (to, *here), place, is_plain) in enumerate(alike):
        if (
            is_plain
            and there == here
            and not (place[0] % 16 or place[1] % 16)
            and came in launch.TYPES
            and to in launch.TYPES
        ):
            kinds.setdefault((came, to), []).append(i)
        else:
            others.append(i)
    if others:
        copies.copy_each([targets[i] for i in others], [sources[i] for i in others])
    for (came, to), chosen in kinds.items():
        device = targets[chosen[0]].device
        owners, table = _plan(tuple(places[i] for i in chosen), device)
        if len(owners):
            with torch.accelerator.device_index(device.index):
                _copies_kernel[(len(owners),)](
                    owners,
                    table,
                    SOURCE=launch.TYPES[came],
                    TARGET=launch.TYPES[to],
                    PART=_PART,
                    PARTS=_PARTS,
                    num_warps=_WARPS,
                    **launch.options(device, waits=False),
                )
            torch.autograd.graph.increment_version([targets[i] for i in chosen])
