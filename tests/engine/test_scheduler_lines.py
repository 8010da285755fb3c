"""The scheduler line by line: an exception before any line leaves its books sound, and a step executes few lines."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from machine import (
    Machine,
    make_group,
    make_scheduler,
    make_spec,
    until,
)
from traffic import Traffic

import stoker.engine.scheduler
from stoker.engine.plan import Sampled
from stoker.engine.request import Request, Status
from stoker.engine.request_scores import Scoring, TokenScores, Variant

ENGINE = str(Path(stoker.engine.scheduler.__file__).parent)


class Interrupt(BaseException):
    pass


@contextmanager
def traced(on_line: Callable[[], None]) -> Iterator[None]:
    """Call ``on_line`` before every line that the engine executes."""

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(ENGINE):
            return None
        if event == "line":
            on_line()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("seed", range(40))
def test_books_are_sound_after_an_exception_anywhere(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=14, block_size=2, max_num_batched_tokens=16, decode_window=rng.choice((1, 4)))
    machine = Machine(scheduler)
    traffic = Traffic(rng, 24)
    first_id = 0
    for _ in range(4):
        struck: list[Request] = []
        for _ in range(2):
            struck += traffic.batch(first_id + len(struck))
        first_id += len(struck)
        scheduler.add(struck)
        left = rng.randrange(4000)

        def strike() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Interrupt

        with pytest.raises(Interrupt), traced(strike):
            while True:
                if (plan := scheduler.plan()) is not None:
                    scheduler.commit(plan, machine.run(plan))
        scheduler.abort_all()
        scheduler.check()
        assert all(r.status is Status.FINISHED and r.finish_reason for r in struck), "a request was lost"
        assert not scheduler.running and not scheduler.waiting and scheduler.plan() is None
        assert scheduler.tables.pool.num_free == scheduler.num_blocks - 1 and len(scheduler.prefixes.cache) == 0

        machine = Machine(scheduler)  # which proves every result
        batch = traffic.batch(first_id)
        first_id += len(batch)
        scheduler.add(batch)
        assert len(machine.drain()) == len(batch)


def lines_of_a_step(finished: int, *, one_group: bool) -> int:
    """Lines executed by one step of four running requests after so many others have come and gone."""
    scheduler = make_scheduler(max_num_seqs=4, num_blocks=200)
    specs = [make_spec(max_tokens=2)] * finished + [make_spec(max_tokens=200)] * 4 + [make_spec()] * 8
    if one_group:
        scheduler.add(make_group(0, [1], specs))
    else:
        scheduler.add(make_group(i, [i], [spec])[0] for i, spec in enumerate(specs))
    lines = 0

    def count() -> None:
        nonlocal lines
        lines += 1

    def step() -> None:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, Sampled([[1] for _ in plan.requests], [[0.0] for _ in plan.requests]))

    until(lambda: {r.spec.max_tokens for r in scheduler.running} == {200}, step)
    scheduler._preempt(scheduler.running[-1])  # so that the step admits one as well
    with traced(count):
        step()
    return lines


@pytest.mark.parametrize("one_group", [False, True])
def test_a_step_costs_the_same_however_many_requests_have_finished(one_group: bool) -> None:
    assert lines_of_a_step(400, one_group=one_group) <= 1.1 * lines_of_a_step(8, one_group=one_group)


def lines_of_scoring(length: int) -> int:
    """Lines executed while a sequence is scored, eight tokens at a time."""
    scheduler = make_scheduler(num_blocks=length // 4 + 2, max_num_batched_tokens=8)
    scoring = Scoring(Variant(1.0, 0), 1, length)
    scheduler.add([Request(0, [], make_spec(max_tokens=length), 0, None, [], scoring, range(length))])
    lines = 0

    def count() -> None:
        nonlocal lines
        lines += 1

    with traced(count):
        while plan := scheduler.plan():
            (tokens,) = plan.scored
            scores = TokenScores.unknown(tokens.start, tokens.stop, 0)
            scores.logprobs.zero_()  # or nothing would be kept
            scheduler.commit(plan, Sampled([], [], scores=[scores]))
    assert scoring.complete and len(scheduler.prefixes.cache._scores) == (length - 1) // 4
    return lines


def test_scoring_costs_as_much_as_the_sequence_is_long() -> None:
    assert lines_of_scoring(1600) <= 4.1 * lines_of_scoring(400)
