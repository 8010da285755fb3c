"""What looks at kernels that come up early finds each way to break their rules, and nothing where they are kept."""

from __future__ import annotations

import pytest
import torch
from early_starts import Found, early_starts
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("kernels run compiled here", allow_module_level=True)

import triton
import triton.language as tl

from stoker.kernels import launch
from stoker.kernels.launch import await_turn

CPU = torch.device("cpu")


@triton.jit
def _plus_one(x, weight, out, size, WHEN: tl.constexpr, DEPENDENT: tl.constexpr):
    """WHEN it waits, or lets the next come up; ``weight`` is read before, x after that."""
    at = tl.arange(0, 8)
    if WHEN == "first":
        await_turn(DEPENDENT)
    added = tl.load(weight + at, mask=at < size, other=0.0)
    if WHEN == "between":
        await_turn(DEPENDENT)
    total = tl.load(x + at, mask=at < size, other=0.0) + added
    if WHEN == "before it writes":
        await_turn(DEPENDENT)
    tl.store(out + at, total, mask=at < size)
    if WHEN == "last":
        await_turn(DEPENDENT)


@triton.jit
def _plus_one_at_once(x, out, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        launch.cuda.gdc_launch_dependents()
    await_turn(DEPENDENT)
    tl.store(out, tl.load(x) + 1)


def plus(x: Tensor, weight: Tensor, when: str, **options: bool) -> Tensor:
    out = torch.empty_like(x)
    _plus_one[(2,)](x, weight, out, len(x), WHEN=when, **launch.options(CPU, **options))
    return out


def looked_at(*steps: tuple[str, int]) -> Found:
    """A chain of launches, each of which has as x what the one before wrote: when each waits, and how many launches ago its weight
    was written, 0 for never."""
    made, ready = [torch.ones(8)], torch.ones(8)
    with early_starts() as found:
        for when, ago in steps:
            made.append(plus(made[-1], made[-ago] if ago else ready, when))
    return found


def test_what_keeps_the_rules_is_as_it_is() -> None:
    found = looked_at(("first", 0), ("between", 0), ("first", 1), ("between", 2))
    assert not found.faults and found.early == {"_plus_one": 2}


@pytest.mark.parametrize(
    ("when", "ago", "fault"),
    [
        ("before it writes", 0, "_plus_one reads, before its turn, what _plus_one just wrote"),
        ("between", 1, "_plus_one reads, before its turn, what _plus_one just wrote"),
        ("last", 0, "_plus_one writes before its turn"),
        ("never", 0, "a program of _plus_one ends without having waited"),
    ],
)
def test_each_way_to_break_them_is_found(when: str, ago: int, fault: str) -> None:
    assert fault in looked_at(("first", 0), (when, ago)).faults


def test_the_next_one_comes_up_after_a_wait() -> None:
    with early_starts() as found:
        _plus_one_at_once[(1,)](torch.ones(1), torch.ones(1), **launch.options(CPU))
    assert found.faults == {"_plus_one_at_once lets the next kernel come up before its own turn"}


def test_what_torch_writes_counts() -> None:
    """Where kernels are given that; and what is poison to tests is none of it."""
    x, weight = torch.ones(8), torch.ones(8)
    said = {"_plus_one reads, before its turn, what torch's mul_ just wrote"}
    for write, faults in ((lambda: weight.mul_(2), said), (lambda: weight.fill_(torch.nan), set()), (x.sum, set())):
        with early_starts() as found:
            plus(x, weight, "first")
            write()
            plus(x, weight, "between")
        assert found.faults == faults
    with early_starts() as found:  # one between is far enough
        weight.mul_(2)
        plus(x, torch.ones(8), "first")
        plus(x, weight, "between")
    assert not found.faults


def test_what_is_launched_late_may_read_all() -> None:
    with early_starts() as found:
        weight = plus(torch.ones(8), torch.ones(8), "first")
        plus(torch.ones(8), weight, "before it writes", early=False)
    assert not found.faults and not found.early
