"""However deep the caller's stack is, the calls of a step stay fast: counted by the pages that are mapped for them."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import pytest

from stoker.engine.core import EngineCore
from stoker.engine.frames import in_one_piece

CALLS = 500


def small(number: int) -> int:
    return number


def many_calls() -> None:
    for number in range(CALLS):
        small(number)


def most_faults(function: Callable[[], None]) -> int:
    """The most page faults that one call causes, over callers of all depths."""

    def below(depth: int) -> int:
        if depth:
            return below(depth - 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        function()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    return max(map(below, range(400)))


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted as Linux does")
def test_calls_find_room_at_any_depth() -> None:
    assert most_faults(in_one_piece(many_calls)) < CALLS / 5
    if sys.implementation.name == "cpython" and sys.version_info < (3, 14):  # later ones may keep a piece
        assert most_faults(many_calls) >= CALLS


def test_steps_run_so() -> None:
    assert EngineCore.step.__code__.co_stacksize == in_one_piece(many_calls).__code__.co_stacksize


def test_the_function_stays_what_it_is() -> None:
    @in_one_piece
    def total(*numbers: int, start: int = 0) -> int:
        """Of numbers."""
        return sum(numbers, start)

    assert (total(1, 2, start=3), total.__name__, total.__doc__) == (6, "total", "Of numbers.")
    with pytest.raises(TypeError, match="unsupported operand"):
        total("a")  # type: ignore[arg-type]
