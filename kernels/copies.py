"""Copies of many tensors in one kernel: torch launches one for some 84 MB, after each of which the chip runs empty."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import and_, attrgetter

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.host_memory import to_device
from stoker.kernels.reference import copies

# Bytes of its source that a program copies, all on their way at once: 256 for each thread. With a fourth of that, 16 GB take 9.6 in
# place of 8.4 ms (H200).
_PART_BYTES, _WARPS = 2**16, 8
_dtype, _device = attrgetter("dtype"), attrgetter("device")


@triton.jit
def _copies_kernel(owners, table, SOURCE: tl.constexpr, TARGET: tl.constexpr, PART: tl.constexpr):
    owner = tl.load(owners + tl.program_id(0))
    source, target = tl.load(table + 4 * owner), tl.load(table + 4 * owner + 1)
    count, first = tl.load(table + 4 * owner + 2), tl.load(table + 4 * owner + 3)
    source = tl.multiple_of(source.to(tl.pointer_type(SOURCE)), 16)
    target = tl.multiple_of(target.to(tl.pointer_type(TARGET)), 16)
    begin = (tl.program_id(0) - first) * PART
    source, target = source + begin, target + begin
    end = tl.minimum(count - begin, PART).to(tl.int32)
    wide = end // 8 * 8  # up to there 16 bytes are read or written at a time
    at = tl.arange(0, PART)
    tl.store(target + at, tl.load(source + at, mask=at < wide, other=0.0).to(TARGET), mask=at < wide)
    at = wide + tl.arange(0, 8)
    tl.store(target + at, tl.load(source + at, mask=at < end, other=0.0).to(TARGET), mask=at < end)


@dataclass(frozen=True)
class _Plan:
    """What copies are made of, by their numbers.

    by_kernel: of each kind (dtypes of the source and of the target) these; which of them each program works on, int32
    [programs]; and where each is read and written, its elements and its first program, int64 [n, 4]. others: left to torch.
    """

    by_kernel: list[tuple[torch.dtype, torch.dtype, list[int], Tensor, Tensor]]
    others: list[int]


# Where a tensor is read and written; its elements; the dtypes; where the source is; whether both are contiguous.
_Copy = tuple[int, int, int, torch.dtype, torch.dtype, torch.device, bool]


@lru_cache(maxsize=8)  # weights seldom move
def _plan(each: tuple[_Copy, ...], device: torch.device, stream: int) -> _Plan:
    kinds: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    others: list[int] = []
    for i, (source, target, _, came, to, place, plain) in enumerate(each):
        fits = plain and place == device and not (source % 16 or target % 16) and launch.TYPES.keys() >= {came, to}
        (kinds.setdefault((came, to), []) if fits else others).append(i)
    by_kernel = []
    for (came, to), chosen in kinds.items():
        by_kernel.append((came, to, chosen, *_programs([each[i][:3] for i in chosen], part_of(came), device, stream)))
    return _Plan(by_kernel, others)


def part_of(source: torch.dtype) -> int:
    """Elements that a program copies."""
    return _PART_BYTES // source.itemsize


def _programs(
    places: list[tuple[int, int, int]], part: int, device: torch.device, stream: int
) -> tuple[Tensor, Tensor]:
    owners, firsts = _owners(tuple(count for *_, count in places), part, device, stream)
    table = torch.tensor([(*place, first) for place, first in zip(places, firsts, strict=True)], device="cpu")
    return owners, to_device(table, device)


@lru_cache(maxsize=8)  # tensors that lie elsewhere each time have the same sizes
def _owners(elements: tuple[int, ...], part: int, device: torch.device, stream: int) -> tuple[Tensor, list[int]]:
    """Which tensor each program works on, and of each tensor the first program."""
    counts = -(-torch.tensor(elements, device="cpu") // part)
    owners = torch.repeat_interleave(torch.arange(len(elements), dtype=torch.int32, device="cpu"), counts)
    return to_device(owners, device), (counts.cumsum(0) - counts).tolist()


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """As the reference; in one kernel where both are in 16 or 32 bits, contiguous, and begin at multiples of 16 bytes.

    targets: all on one device.
    """
    prepare_copies(targets, sources)(targets, sources)


def prepare_copies(
    targets: Sequence[Tensor], sources: Sequence[Tensor]
) -> Callable[[Sequence[Tensor], Sequence[Tensor]], None]:
    """As the reference. What is returned holds no tensor of these, and asks nothing of those it is given before the kernel runs."""
    if not targets:
        return copies.copy_each
    device = targets[0].device
    plain = map(and_, map(Tensor.is_contiguous, sources), map(Tensor.is_contiguous, targets))
    places = map(Tensor.data_ptr, sources), map(Tensor.data_ptr, targets), map(Tensor.numel, targets)
    each = zip(*places, map(_dtype, sources), map(_dtype, targets), map(_device, sources), plain, strict=True)
    return partial(_copy, _plan(tuple(each), device, launch.stream(device)), device)


def _copy(plan: _Plan, device: torch.device, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for came, to, chosen, owners, table in plan.by_kernel:
        if len(owners):
            with torch.accelerator.device_index(device.index):
                _copies_kernel[(len(owners),)](
                    owners,
                    table,
                    SOURCE=launch.TYPES[came],
                    TARGET=launch.TYPES[to],
                    PART=part_of(came),
                    num_warps=_WARPS,
                    **launch.options(device, waits=False),
                )
            counted = [targets[i] for i in chosen if not targets[i].is_inference()]
            torch.autograd.graph.increment_version(counted)
    if plan.others:  # last: torch asks about each, while the kernels run
        copies.copy_each([targets[i] for i in plan.others], [sources[i] for i in plan.others])
