"""The sanitizer finds each kind of fault, and nothing in a kernel without any."""

from __future__ import annotations

import pytest
import torch
from sanitizer import sanitized

if torch.cuda.is_available():
    pytest.skip("kernels run compiled here", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

SAID = {"enable_fp_fusion": True}


@triton.jit
def _double(x, out, size, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    if MASKED:
        tl.store(out + at, 2 * tl.load(x + at, mask=mask), mask=mask)
    else:
        tl.store(out + at, 2 * tl.load(x + at))


@triton.jit
def _through_memory(x, scratch, out, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(scratch + at, tl.load(x + at))
    if BARRIER:
        tl.debug_barrier()
    tl.store(out + at, tl.load(scratch + BLOCK - 1 - at))


@triton.jit
def _last_adds_up(x, parts, arrived, out, BLOCK: tl.constexpr, WAIT: tl.constexpr):
    number = tl.program_id(0)
    tl.store(parts + number, tl.sum(tl.load(x + number * BLOCK + tl.arange(0, BLOCK)), 0))
    if WAIT:
        last = tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(0) - 1
    else:
        last = tl.atomic_add(arrived, 1, sem="relaxed") == tl.num_programs(0) - 1
    if last:
        total = 0.0
        for i in range(tl.num_programs(0)):
            total += tl.load(parts + i)
        tl.store(out, total)


@triton.jit
def _last_copies(x, parts, arrived, out, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(parts + tl.program_id(0) * BLOCK + at, tl.load(x + at))
    if BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        for i in range(tl.num_programs(0)):
            tl.store(out + i * BLOCK + at, tl.load(parts + i * BLOCK + at))


@triton.jit
def _to_one_place(x, out):
    tl.store(out, tl.load(x))


@triton.jit
def _sum_of_some(x, out, size, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if OTHER:
        tl.store(out, tl.sum(tl.load(x + at, mask=at < size, other=0.0), 0))
    else:
        tl.store(out, tl.sum(tl.load(x + at, mask=at < size), 0))


@triton.jit
def _every(x, out, step, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK) * tl.multiple_of(step, 4)
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + at))


@triton.jit
def _clamped(x, out, KEPT: tl.constexpr):
    at = tl.arange(0, 4)
    nan: tl.constexpr = tl.PropagateNan.ALL if KEPT else tl.PropagateNan.NONE
    tl.store(out + at, tl.minimum(tl.maximum(tl.load(x + at), -1.0, propagate_nan=nan), 1.0, propagate_nan=nan))


@pytest.mark.parametrize(("does", "size_in", "size_out"), [("loads", 10, 16), ("stores", 16, 10)])
def test_an_access_beyond_a_tensor_is_found(does: str, size_in: int, size_out: int) -> None:
    x, out = torch.ones(16)[:size_in], torch.zeros(16)[:size_out]  # beyond them is nobody else's memory
    with sanitized() as found:
        _double[(2,)](x, out, 10, BLOCK=8, MASKED=True, **SAID)
        assert not found and out.sum() == 20
        with pytest.raises(InterpreterError, match=f"_double {does} outside of every tensor"):
            _double[(2,)](x, out, 10, BLOCK=8, MASKED=False, **SAID)


def test_lanes_that_meet_in_memory_need_a_barrier() -> None:
    x, scratch, out = torch.arange(8.0), torch.empty(8), torch.empty(8)
    for barrier, fault in (
        (True, set()),
        (False, {"_through_memory stores, then loads in another lane, with no barrier between"}),
    ):
        with sanitized() as found:
            _through_memory[(1,)](x, scratch, out, BLOCK=8, BARRIER=barrier, **SAID)
        assert torch.equal(out, x.flip(0)) and found == fault


def test_programs_that_meet_in_memory_have_to_wait() -> None:
    for wait, fault in (
        (True, set()),
        (False, {"_last_adds_up one program stores what another loads, and neither waits"}),
    ):
        out = torch.zeros(1)
        with sanitized() as found:
            _last_adds_up[(3,)](
                torch.ones(24), torch.empty(3), torch.zeros(1, dtype=torch.int32), out, BLOCK=8, WAIT=wait, **SAID
            )
        assert out == 24 and found == fault
    with sanitized() as found:
        _to_one_place[(2,)](torch.ones(1), torch.zeros(1), **SAID)
    assert found == {"_to_one_place one program stores what another stores, and neither waits"}


def test_an_atomic_says_only_what_its_own_lane_knows() -> None:
    for barrier, fault in (
        (True, set()),
        (False, {"_last_copies one program stores what another loads, and neither waits"}),
    ):
        out, arrived = torch.zeros(24), torch.zeros(1, dtype=torch.int32)
        with sanitized() as found:
            _last_copies[(3,)](torch.ones(8), torch.empty(24), arrived, out, BLOCK=8, BARRIER=barrier, **SAID)
        assert out.sum() == 24 and found == fault


def test_masked_lanes_hold_anything() -> None:
    for other in True, False:
        out = torch.zeros(1)
        with sanitized() as found:
            _sum_of_some[(1,)](torch.ones(5), out, 5, BLOCK=8, OTHER=other, **SAID)
        assert bool(out.isnan()) is not other and not found


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_no_number_is_lost_where_a_gpu_loses_it(kept: bool) -> None:
    x, out = torch.tensor([float("nan"), -3.0, 0.5, 3.0]), torch.zeros(4)
    with sanitized() as found:
        _clamped[(1,)](x, out, KEPT=kept, **SAID)
    assert bool(out[0].isnan()) == kept and out[1:].tolist() == [-1.0, 0.5, 1.0] and not found


def test_hints_are_true() -> None:
    for step, fault in (4, set()), (3, {"_every calls a number a multiple of 4 that is none"}):
        with sanitized() as found:
            _every[(1,)](torch.ones(16), torch.zeros(4), step, BLOCK=4, **SAID)
        assert found == fault


def test_a_launch_says_whether_products_and_sums_are_fused() -> None:
    for said, fault in (SAID, set()), ({}, {"_to_one_place does not say whether products and sums are fused"}):
        with sanitized() as found:
            _to_one_place[(1,)](torch.ones(1), torch.zeros(1), **said)
        assert found == fault
