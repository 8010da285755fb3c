"""The scheduler on a machine that knows right from wrong: thousands of random steps, then each rule by itself."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from machine import (
    VOCAB,
    Machine,
    Traffic,
    expected,
    make_group,
    make_scheduler,
    make_spec,
    until,
)

import stoker.engine.scheduler
from stoker.engine.request import Adapter, Request, Status
from stoker.engine.scheduler import Sampled
from stoker.kernels.errors import RequestFailedError

ENGINE = str(Path(stoker.engine.scheduler.__file__).parent)


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "max_num_seqs", "budget", "window", "caching"),
    [
        (1, 25, 4, 7, 1, True),
        (1, 25, 4, 7, 4, False),
        (2, 14, 6, 64, 8, True),
        (2, 14, 6, 5, 1, False),
        (4, 9, 8, 64, 1, True),
        (4, 9, 8, 64, 8, False),
        (4, 9, 8, 3, 3, True),
        (4, 11, 3, 1, 2, True),
        (4, 60, 16, 24, 5, True),
        (4, 60, 16, 24, 5, False),
        (8, 5, 8, 32, 4, True),
    ],
)
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_whatever_the_schedule_the_results_are_those_of_a_request_alone(
    block_size: int, num_blocks: int, max_num_seqs: int, budget: int, window: int, caching: bool, seed: int, ahead: int
) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        decode_window=window,
        enable_prefix_caching=caching,
    )
    machine = Machine(scheduler, ahead)
    adapters = [None, *(Adapter(f"a{serial}", serial) for serial in range(3))]  # and two slots
    traffic = Traffic(rng, min(32, (num_blocks - 1) * block_size), adapters if seed else (None,))
    arrived: list[Request] = []
    finished: list[Request] = []
    for _ in range(1500):
        if rng.random() < 0.3 and len(scheduler.waiting) < 12:
            batch = traffic.batch(len(arrived))
            arrived += batch
            scheduler.add(batch)
        if not scheduler.running and not machine.launched and rng.random() < 0.3:
            scheduler.set_weight_version(scheduler.weight_version + 1)
        finished += machine.step()
    finished += machine.drain()

    assert sorted(r.id for r in finished) == list(range(len(arrived)))
    assert scheduler.pool.num_free == num_blocks - 1
    counters = scheduler.counters
    assert counters.finished_requests == len(arrived)
    assert counters.generated_tokens == sum(r.num_output for r in arrived)
    assert (counters.prefix_hit_tokens > 0) == caching
    assert {r.finish_reason for r in arrived} == {"length", "stop", "error"}
    if budget > 1 and num_blocks < 30:
        assert counters.preemptions > 0, "the pool was not tight"


# -- sharing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("num_prompt", [1, 2, 4, 5, 7, 8, 9])
def test_a_groups_prompt_is_computed_once_and_its_last_block_copied_where_it_is_partial(
    num_prompt: int, block_size: int, caching: bool
) -> None:
    samples, new = 5, 3
    scheduler = make_scheduler(block_size=block_size, enable_prefix_caching=caching)
    machine = Machine(scheduler)
    group = make_group(0, [3] * num_prompt, [make_spec(seed=1, max_tokens=new)] * samples)
    scheduler.add(group)
    assert len(machine.drain()) == samples
    # Each later sample computes the prompt's last token again, for a hidden state to sample from; no sample computes
    # its own last token.
    assert machine.tokens_computed == num_prompt + (samples - 1) + samples * (new - 1)
    assert machine.copies == (samples - 1 if (num_prompt - 1) % block_size else 0)
    counters = scheduler.counters
    assert (counters.prompt_tokens, counters.shared_tokens) == (samples * num_prompt, (samples - 1) * (num_prompt - 1))
    assert counters.prefix_hit_tokens == 0


def test_a_group_waits_for_its_prompt_and_keeps_its_slots() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4, max_num_seqs=4)
    machine = Machine(scheduler)
    group = make_group(0, [1] * 10, [make_spec(seed=2)] * 3)
    (other,) = make_group(3, [2] * 3, [make_spec(seed=2)])
    (late,) = make_group(4, [2, 1], [make_spec(seed=2)])
    scheduler.add([*group, other, late])
    machine.step()
    machine.step()
    assert scheduler.running == [group[0]], "chunks of the prompt take the whole budget"
    machine.step()  # its last two tokens, and two of the next prompt
    assert scheduler.running == [group[0], other]
    machine.step()
    assert scheduler.running == [*group, other], "the last slot was the group's"
    assert machine.drain()[-1] is late


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("length", [1, 4, 5, 8, 11])
def test_a_group_of_one_token_each_goes_on_from_one_prompt(length: int, ahead: int) -> None:
    """The first would end, and give up what the others wait for, with the token that its prompt gives."""
    scheduler = make_scheduler(num_blocks=40, block_size=4, max_num_seqs=6, enable_prefix_caching=False)
    machine = Machine(scheduler, ahead)
    group = make_group(0, [3] * length, [make_spec(seed=i, max_tokens=1) for i in range(6)])
    scheduler.add(group)
    finished = [len(machine.step()) for _ in range(2 + ahead)]
    assert sum(finished) == len(group)
    assert machine.tokens_computed == length - 1 + 6


def test_a_prompt_that_the_cache_holds_whole_costs_one_token() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    machine = Machine(scheduler)
    prompt = [4, 0, 1, 3, 2, 2, 1, 0]
    spec = make_spec(seed=5, max_tokens=1)
    scheduler.add(make_group(0, prompt, [spec]))
    machine.drain()
    assert machine.tokens_computed == len(prompt) and len(scheduler.prefix_cache) == 2
    again = [make_group(i, prompt, [make_spec(seed=5, max_tokens=4)])[0] for i in (1, 2)]
    scheduler.add(again)
    machine.step()
    assert machine.tokens_computed == len(prompt) + 2
    assert machine.copies == 1, "the second may not write into a block that the first holds too"
    assert [r.cached_tokens for r in again] == [len(prompt) - 1] * 2
    machine.drain()
    assert scheduler.counters.prefix_hit_tokens == 2 * (len(prompt) - 1)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    ("length", "budget", "cached"), [(11, 64, 8), (12, 64, 8), (13, 64, 12), (13, 7, 12), (3, 64, 0)]
)
def test_equal_prompts_that_are_no_group_compute_their_full_blocks_once(
    length: int, budget: int, cached: int, ahead: int
) -> None:
    """Also within the plan that computes them, where no block can be copied that it writes."""
    scheduler = make_scheduler(max_num_batched_tokens=budget)
    machine = Machine(scheduler, ahead)
    prompt = [i % VOCAB for i in range(length)]
    requests = [make_group(i, prompt, [make_spec(seed=i, max_tokens=3)])[0] for i in range(6)]
    (other,) = make_group(6, [*prompt[:8], 4, 4], [make_spec(seed=9, max_tokens=3)])
    scheduler.add([*requests, other])
    assert len(machine.drain()) == 7
    assert [r.cached_tokens for r in requests[1:]] == [cached] * 5 and other.cached_tokens == min(cached, 8)
    assert machine.tokens_computed == length + 5 * (length - cached) + other.num_prompt - other.cached_tokens + 7 * 2
    assert machine.copies == 0


def test_what_a_plan_computes_serves_no_other_weights_or_adapter() -> None:
    scheduler = make_scheduler()
    machine = Machine(scheduler)
    adapters = [None, Adapter("a", 0), Adapter("b", 1), None]
    requests = [make_group(i, [1] * 9, [make_spec(seed=i)])[0] for i in range(4)]
    for request, adapter in zip(requests, adapters, strict=True):
        request.adapter = adapter
    scheduler.add(requests)
    machine.drain()
    assert [r.cached_tokens for r in requests] == [0, 0, 0, 8]


def test_prefixes_are_shared_up_to_where_prompts_part() -> None:
    scheduler = make_scheduler()
    machine = Machine(scheduler)
    begin = [1, 2, 3, 4, 0, 1, 2, 3, 4, 0]
    for number, (end, cached) in enumerate([([1, 1, 1], 0), ([2, 2, 2], 8), ([1, 1, 4], 12), ([], 8)]):
        (request,) = make_group(number, begin + end, [make_spec(seed=3, max_tokens=2)])
        scheduler.add([request])
        machine.drain()
        assert request.cached_tokens == cached
    (stranger,) = make_group(4, [0, *begin], [make_spec()])
    scheduler.add([stranger])
    machine.drain()
    assert stranger.cached_tokens == 0, "the same tokens at other positions are another prefix"


def test_a_copy_of_a_block_that_is_itself_still_to_be_copied() -> None:
    scheduler = make_scheduler()
    machine = Machine(scheduler)
    greedy = make_spec(temperature=0.0, max_tokens=12)
    prompt = [1, 2, 3, 0, 1, 2]
    (older,) = make_group(0, prompt, [greedy])
    twins = make_group(1, prompt, [greedy] * 2)
    scheduler.add([older])
    machine.step()
    scheduler.add(twins)
    until(lambda: twins[0].total == 8, machine.step)
    for request in reversed(twins):
        scheduler._preempt(request)
    assert older.computed == 8
    # The first twin finds both blocks in the cache and copies the second to write its eighth token; the other shares
    # the prompt with the first and copies that very block.
    machine.drain()
    assert older.output == twins[0].output == twins[1].output


def test_no_copy_of_what_another_sample_has_from_the_plan_being_made() -> None:
    scheduler = make_scheduler()
    machine = Machine(scheduler)
    greedy = make_spec(temperature=0.0, max_tokens=12)
    twins = make_group(1, [1, 2, 3, 0, 1, 2], [greedy] * 2)
    scheduler.add(twins)
    until(lambda: twins[1].total == 9, machine.step)
    scheduler.preempt_all()
    scheduler.set_weight_version(1)
    # It computes both blocks that the first twin then finds; the other one wants half of the second.
    (older,) = make_group(0, twins[0].tokens[:8], [greedy])
    scheduler.waiting.appendleft(older)
    machine.step()
    assert [(r.status, r.cached_tokens) for r in (older, *twins)] == [(Status.RUNNING, 0)] * 3
    assert machine.copies == 1, "of before"
    machine.drain()


def test_new_weights_forget_every_prefix() -> None:
    scheduler = make_scheduler()
    machine = Machine(scheduler)
    prompt = [1] * 9
    for version in (0, 3, 4):
        if version:
            scheduler.set_weight_version(version)
        assert len(scheduler.prefix_cache) == 0
        first, second = (make_group(10 * version + i, prompt, [make_spec(seed=1)])[0] for i in range(2))
        scheduler.add([first])
        machine.drain()
        scheduler.add([second])
        machine.drain()
        assert (first.cached_tokens, second.cached_tokens) == (0, 8)
        assert set(first.weight_versions + second.weight_versions) == {version}


def test_a_waiting_request_goes_on_under_new_weights() -> None:
    scheduler = make_scheduler()
    machine = Machine(scheduler)
    (request,) = make_group(0, [1] * 6, [make_spec(seed=1, max_tokens=5)])
    scheduler.add([request])
    for _ in range(3):
        machine.step()
    scheduler.preempt_all()
    scheduler.set_weight_version(1)
    machine.drain()
    assert request.weight_versions == [0, 0, 0, 1, 1]
    (again,) = make_group(1, request.tokens[:9], [make_spec()])
    scheduler.add([again])
    machine.drain()
    assert again.cached_tokens == 8, "what it computed under the new weights serves others"


def test_kv_of_older_weights_serves_its_own_request_alone() -> None:
    scheduler = make_scheduler()
    machine = Machine(scheduler)
    requests = make_group(0, [1, 2, 3, 4, 2], [make_spec(seed=i, max_tokens=12, temperature=0) for i in range(2)])
    scheduler.add(requests[:1])
    machine.step()
    scheduler.set_weight_version(1)
    scheduler.add(requests[1:])
    until(lambda: not scheduler.running and not scheduler.waiting, lambda: commit_unproved(machine))
    older, newer = requests
    assert older.weight_versions == [0] + [1] * 11 and set(newer.weight_versions) == {1}
    assert (newer.output, newer.logprobs) == expected(newer, 1)[:2]
    (again,) = make_group(2, [1, 2, 3, 4, 2], [make_spec(max_tokens=12, temperature=0)])
    scheduler.add([again])
    machine.drain()
    assert again.cached_tokens == 4 and again.output == newer.output != older.output


def commit_unproved(machine: Machine) -> None:
    """A step whose marks may be of two versions."""
    plan = machine.scheduler.plan()
    assert plan is not None
    machine.scheduler.commit(plan, machine.run(plan))
    machine.scheduler.check()


def test_pending_tokens_forbid_new_weights() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_group(0, [1] * 6, [make_spec()]))
    scheduler.plan()
    with pytest.raises(AssertionError):
        scheduler.set_weight_version(1)


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    scheduler = make_scheduler(num_blocks=7)
    machine = Machine(scheduler)
    for i, (prompt, cached) in enumerate([([1] * 16, 0), ([2] * 12, 0), ([1] * 16, 12)]):
        (request,) = make_group(i, prompt, [make_spec(max_tokens=1)])
        scheduler.add([request])
        machine.drain()
        assert request.cached_tokens == cached


# -- order, preemption, windows ----------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=6)
    machine = Machine(scheduler)
    requests = [make_group(i, [i % VOCAB] * (1 + 3 * (i % 4)), [make_spec(seed=i, max_tokens=4)])[0] for i in range(12)]
    scheduler.add(requests)
    admitted: list[int] = []
    while scheduler.waiting:
        waited = [r.id for r in scheduler.waiting]
        machine.step()
        admitted += [i for i in waited if requests[i].status is not Status.WAITING]
    assert admitted == list(range(12))
    machine.drain()


def test_a_preempted_request_is_back_before_later_arrivals_and_gives_the_same() -> None:
    def specs() -> list[Request]:
        return [make_group(i, [i, 1, 2, 3], [make_spec(seed=i, max_tokens=12)])[0] for i in range(4)]

    roomy, tight = make_scheduler(), make_scheduler(num_blocks=9)
    alone, crowded = specs(), specs()
    roomy.add(alone)
    Machine(roomy).drain()
    machine = Machine(tight)
    tight.add(crowded[:3])
    until(lambda: tight.counters.preemptions > 0, machine.step)
    preempted = [r for r in crowded[:3] if r.status is Status.WAITING]
    assert preempted == crowded[3 - len(preempted) : 3], "the latest go first"
    assert all(r.num_output > 0 for r in preempted)
    tight.add(crowded[3:])
    until(lambda: crowded[3].status is not Status.WAITING, machine.step)
    assert all(r.status is not Status.WAITING for r in preempted)
    machine.drain()
    assert [r.output for r in crowded] == [r.output for r in alone]
    assert [r.logprobs for r in crowded] == [r.logprobs for r in alone]
    assert roomy.counters.preemptions == 0


def test_a_preempted_request_stays_behind_an_earlier_one_that_waits() -> None:
    """A sample that lets others pass while its prompt is computed keeps its place in the queue."""
    scheduler = make_scheduler(max_num_batched_tokens=4)
    machine = Machine(scheduler)
    group = make_group(0, [1] * 6, [make_spec(seed=1)] * 2)
    (later,) = make_group(2, [2], [make_spec(seed=1)])
    scheduler.add([*group, later])
    machine.step()
    machine.step()
    assert scheduler.running == [group[0], later]
    scheduler._preempt(later)
    assert list(scheduler.waiting) == [group[1], later]
    machine.drain()


def test_a_prompt_counts_once_however_often_it_is_started() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    machine = Machine(scheduler)
    (request,) = make_group(0, [1] * 10, [make_spec(seed=1)])
    scheduler.add([request])
    machine.step()
    scheduler._preempt(request)
    machine.drain()
    assert scheduler.counters.prompt_tokens == 10
    assert request.cached_tokens == scheduler.counters.prefix_hit_tokens == 0, "it found only what it had computed"


def test_what_would_be_preempted_at_once_is_not_admitted() -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=1)
    machine = Machine(scheduler)
    one, two = (make_group(i, [i] * (3 - i), [make_spec(seed=1, max_tokens=3)])[0] for i in range(2))
    scheduler.add([one])
    machine.step()
    scheduler.add([two])
    machine.step()  # the first takes its fourth block: two are left, and it is about to need one of them
    assert scheduler.running == [one]
    machine.drain()
    assert scheduler.counters.preemptions == 0


def test_nobody_starves() -> None:
    """Every step serves the oldest request, though others come all the time and the pool holds two of them."""
    scheduler = make_scheduler(num_blocks=9, max_num_batched_tokens=8)
    machine = Machine(scheduler)
    finished: list[Request] = []
    for i in range(200):
        scheduler.add(make_group(i, [i % VOCAB, 1, 2, 3, 4], [make_spec(seed=i, max_tokens=11)]))
        finished += machine.step()
    assert len(finished) > 20
    ids = [r.id for r in finished]
    assert max(abs(i - place) for place, i in enumerate(ids)) < 8, "far out of turn"
    finished += machine.drain()
    assert len(finished) == 200


@pytest.mark.parametrize("someone_waits", [False, True])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_window_ends_with_the_first_request_where_one_waits_for_its_slot(window: int, someone_waits: bool) -> None:
    lengths = (4, 9, 30)
    scheduler = make_scheduler(decode_window=window, block_size=1, max_num_seqs=len(lengths))
    requests = [make_group(i, [i], [make_spec(seed=1, max_tokens=n)])[0] for i, n in enumerate(lengths)]
    late = make_group(len(lengths), [3], [make_spec(seed=1, max_tokens=40)])
    scheduler.add([*requests, *late] if someone_waits else requests)
    machine = Machine(scheduler)
    ends = []
    while any(r.status is not Status.FINISHED for r in requests):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, machine.run(plan))
        ends.append(plan.num_steps)
    assert [r.num_output for r in requests] == list(lengths)
    assert max(ends) == window
    if someone_waits:
        assert lengths[0] in accumulate(ends), "its slot is free as soon as it can be"
    else:
        assert sum(ends) == max(lengths) and len(ends) == -(-max(lengths) // window), "no window is cut short"


def test_a_window_shrinks_to_the_blocks_there_are() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=1, decode_window=8)
    machine = Machine(scheduler)
    requests = [make_group(i, [i], [make_spec(seed=1, max_tokens=4)])[0] for i in range(2)]
    scheduler.add(requests)
    plan = scheduler.plan()
    assert plan is not None and plan.requests == requests
    assert plan.num_steps == 2, "two tokens each fit in five blocks, three do not"
    scheduler.commit(plan, machine.run(plan))
    machine.drain()
    assert [r.num_output for r in requests] == [4, 4] and scheduler.counters.preemptions == 1


def test_a_stop_within_a_window_drops_what_was_sampled_behind_it() -> None:
    scheduler = make_scheduler(decode_window=8)
    spec = make_spec(seed=6, max_tokens=20)
    (long,) = make_group(0, [1, 2], [spec])
    scheduler.add([long])
    Machine(scheduler).drain()
    stop = long.output[4]
    first = long.output.index(stop) + 1
    scheduler = make_scheduler(decode_window=8)
    (short,) = make_group(0, [1, 2], [make_spec(seed=6, max_tokens=20, stop_ids=frozenset({stop}))])
    scheduler.add([short])
    Machine(scheduler).drain()
    assert (short.output, short.finish_reason, short.stop_reason) == (long.output[:first], "stop", stop)
    assert scheduler.counters.generated_tokens == first


def test_the_token_that_a_window_stopped_at_is_not_computed() -> None:
    scheduler = make_scheduler(decode_window=8)
    machine = Machine(scheduler)
    first, second = 0, 0
    for seed in range(20):  # one whose first two tokens differ, so that the second can be what stops it
        (request,) = make_group(seed, [1, 2], [make_spec(seed=seed, max_tokens=8)])
        scheduler.add([request])
        machine.drain()
        first, second = request.output[:2]
        if first != second:
            break
    assert first != second
    scheduler.set_weight_version(0)  # forgets prefixes
    spec = make_spec(seed=seed, max_tokens=8, stop_ids=frozenset({second}))
    (stopped,) = make_group(20, [1, 2], [spec])
    scheduler.add([stopped])
    machine.drain()
    assert stopped.tokens == [1, 2, first, second] and stopped.finish_reason == "stop"
    (turn,) = make_group(21, [*stopped.tokens, 0], [spec])
    scheduler.add([turn])
    machine.drain()
    assert turn.cached_tokens == 0


def test_a_nan_fails_its_request_and_no_other() -> None:
    scheduler = make_scheduler()
    machine = Machine(scheduler)
    requests = [make_group(i, [i], [make_spec(max_tokens=3)])[0] for i in range(3)]
    scheduler.add(requests)
    plan = scheduler.plan()
    assert plan is not None
    sampled = machine.run(plan)
    sampled.logprobs[0][1] = math.nan
    assert scheduler.commit(plan, sampled) == [requests[1]]
    assert isinstance(requests[1].error, RequestFailedError) and requests[1].output == []
    assert machine.drain() == [requests[0], requests[2]]


# -- exceptions --------------------------------------------------------------------------------------------------


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
        assert scheduler.pool.num_free == scheduler.num_blocks - 1 and len(scheduler.prefix_cache) == 0

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
        ones = [[1] * len(plan.requests)]
        scheduler.commit(plan, Sampled(ones, [[0.0] * len(plan.requests)]))

    until(lambda: {r.spec.max_tokens for r in scheduler.running} == {200}, step)
    scheduler._preempt(scheduler.running[-1])  # so that the step admits one as well
    with traced(count):
        step()
    return lines


@pytest.mark.parametrize("one_group", [False, True])
def test_a_step_costs_the_same_however_many_requests_have_finished(one_group: bool) -> None:
    assert lines_of_a_step(400, one_group=one_group) <= 1.1 * lines_of_a_step(8, one_group=one_group)


# -- block pool and prefix cache ---------------------------------------------------------------------------------
