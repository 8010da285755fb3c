"""The scheduler on a machine that can tell right from wrong: thousands of random steps, then each rule by itself."""

from __future__ import annotations

import math
import random

import pytest
from machine import (
    VOCAB,
    Machine,
    make_group,
    make_scheduler,
    make_spec,
    until,
)
from traffic import Traffic, half

from stoker.engine.cache.state_cache import StateLayout
from stoker.engine.plan import Sampled
from stoker.engine.request import Adapter, Request, Status
from stoker.kernels.errors import RequestFailedError

# Of a scheduler: block_size, num_blocks, max_num_seqs, budget, window, caching.
SIZES = [
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
]
STATES = [(0, None), (1, None), (2, None), (0, 1), (1, 5), (2, 5)]


@pytest.mark.parametrize(("sizes", "states", "ahead"), half(SIZES, STATES, range(3)), ids=str)
def test_whatever_the_schedule_the_results_are_those_of_a_request_alone(
    sizes: tuple[int, int, int, int, int, bool], states: tuple[int, int | None], ahead: int
) -> None:
    """states: a seed, and copies of states. With adapters from the second seed on, and with images from the third."""
    block_size, num_blocks, max_num_seqs, budget, window, caching = sizes
    seed, num_kept = states
    rng = random.Random(seed)
    layout = None if num_kept is None else StateLayout(num_slots=max_num_seqs, num_kept=num_kept)
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        decode_window=window,
        enable_prefix_caching=caching,
        state_layout=layout,
    )
    machine = Machine(scheduler, ahead)
    adapters = [None, *(Adapter(f"a{serial}", serial) for serial in range(3))]  # and two slots
    traffic = Traffic(
        rng, min(32, (num_blocks - 1) * block_size), adapters if seed else (None,), budget if seed > 1 else 0
    )
    arrived = traffic.run(machine, 750 if budget < 10 else 600)  # more, where a step computes little
    assert scheduler.tables.pool.num_free == num_blocks - 1
    counters = scheduler.counters
    assert counters.finished_requests == len(arrived)
    assert counters.generated_tokens == sum(r.num_output for r in arrived)
    assert (counters.prefix_hit_tokens > 0) == caching
    assert {r.finish_reason for r in arrived} == {"length", "stop", "error"}
    if budget > 1 and num_blocks < 30:
        assert counters.preemptions > 0, "the pool was not tight"


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


@pytest.mark.parametrize(
    ("num_short", "someone_waits", "steps"), [(8, False, 8), (1, True, 8), (4, True, 8), (8, True, 5)]
)
def test_a_window_is_cut_where_others_wait_for_more_than_an_eighth_of_its_rows(
    num_short: int, someone_waits: bool, steps: int
) -> None:
    """Of 16 rows, the short ones of which have 4 tokens to go."""
    lengths = [4] * num_short + [30] * (16 - num_short)
    scheduler = make_scheduler(decode_window=8, max_num_seqs=16)
    requests = [make_group(i, [i], [make_spec(seed=1, max_tokens=n)])[0] for i, n in enumerate(lengths)]
    late = make_group(len(lengths), [3], [make_spec(seed=1, max_tokens=40)])
    scheduler.add([*requests, *late] if someone_waits else requests)
    machine = Machine(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.num_steps == steps
    assert len(scheduler.commit(plan, machine.run(plan))) == num_short
    machine.drain()
    assert [r.num_output for r in requests] == lengths


@pytest.mark.parametrize(("num_ended", "num_slots", "at_once"), [(1, 16, False), (2, 16, True), (1, 17, True)])
def test_a_window_runs_before_places_are_filled_again_unless_many_are_free(
    num_ended: int, num_slots: int, at_once: bool
) -> None:
    """Where a request ends at every step, one that is admitted at every step would leave no step that is captured."""
    scheduler = make_scheduler(decode_window=8, max_num_seqs=num_slots)
    machine = Machine(scheduler)
    lengths = [1] * num_ended + [30] * 16
    requests = [make_group(i, [i % VOCAB] * 3, [make_spec(seed=1, max_tokens=n)])[0] for i, n in enumerate(lengths)]
    scheduler.add(requests[:16])
    assert len(machine.step()) == num_ended
    scheduler.add(requests[16:])
    steps = []
    while scheduler.waiting:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, machine.run(plan))
        steps.append(plan.num_steps)
    assert steps == ([1] if at_once else [8, 1])
    machine.drain()


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
    scheduler = make_scheduler(state_layout=StateLayout(num_slots=8, num_kept=4))
    machine = Machine(scheduler)
    requests = [make_group(i, [i] * 6, [make_spec(max_tokens=3)])[0] for i in range(3)]
    scheduler.add(requests)
    machine.step()  # as far as to where states are kept
    prefixes = scheduler.prefixes
    plan = scheduler.plan()
    assert plan is not None and len(prefixes.cache) == len(prefixes.states._row_of) == 3
    sampled = machine.run(plan)
    sampled.logprobs[1][0] = math.nan
    assert scheduler.commit(plan, sampled) == [requests[1]]
    assert isinstance(requests[1].error, RequestFailedError) and requests[1].output == []
    assert len(prefixes.cache) == len(prefixes.states._row_of) == 0, "may be NaN, and is for others to begin with"
    assert machine.drain() == [requests[0], requests[2]]


def test_a_nan_is_told_by_its_position_though_a_later_plan_is_under_way() -> None:
    scheduler = make_scheduler()
    (request,) = make_group(0, [1, 2, 3], [make_spec(max_tokens=9)])
    scheduler.add([request])
    first, _ = scheduler.plan(), scheduler.plan()
    assert first is not None
    scheduler.commit(first, Sampled([[1]], [[math.nan]]))
    assert "NaN logits at position 3 " in str(request.error)
