"""What requests share: a group's prompt, cached prefixes, blocks that a plan is about to write."""

from __future__ import annotations

import pytest
from machine import (
    VOCAB,
    Machine,
    expected,
    make_group,
    make_scheduler,
    make_spec,
    until,
)

from stoker.engine.request import Adapter, Status


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


@pytest.mark.parametrize("length", [1, 4, 8])
def test_no_window_is_run_for_the_first_of_a_group_that_waits_for_one_token(length: int) -> None:
    """Which is all that is to be computed of a prompt that the cache holds whole, or of one token."""
    scheduler = make_scheduler(block_size=4, decode_window=8)
    machine = Machine(scheduler)
    for first_id in (0, 5):  # the second time all of it is cached
        scheduler.add(make_group(first_id, [3] * length, [make_spec(seed=i, max_tokens=8) for i in range(5)]))
        assert [len(machine.step()) for _ in range(2)] == [0, 5]


def test_a_window_is_run_though_samples_wait_that_another_one_serves() -> None:
    """They wait for a place alone: the prompt is there already."""
    scheduler = make_scheduler(max_num_seqs=2, decode_window=8)
    machine = Machine(scheduler)
    scheduler.add(make_group(0, [3] * 10, [make_spec(seed=i, max_tokens=20) for i in range(4)]))
    machine.step()
    plan = scheduler.plan()
    assert plan is not None
    assert len(plan.admitted) == 1 and plan.num_steps == 8
    scheduler.commit(plan, machine.run(plan))
    machine.drain()


def test_a_prompt_that_the_cache_holds_whole_costs_one_token() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    machine = Machine(scheduler)
    prompt = [4, 0, 1, 3, 2, 2, 1, 0]
    spec = make_spec(seed=5, max_tokens=1)
    scheduler.add(make_group(0, prompt, [spec]))
    machine.drain()
    assert machine.tokens_computed == len(prompt) and len(scheduler.prefixes.cache) == 2
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
        assert len(scheduler.prefixes.cache) == 0
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
    (longer,) = make_group(3, older.tokens[:13], [make_spec()])
    scheduler.add([longer])
    machine.drain()
    assert longer.cached_tokens == 4, "nor does what it computed afterwards, which looked at older keys"


def test_a_sample_that_comes_back_takes_no_more_of_another_than_the_prompt() -> None:
    scheduler = make_scheduler()
    machine = Machine(scheduler)
    group = make_group(0, [1, 2, 3, 4, 2], [make_spec(seed=i, max_tokens=12) for i in range(3)])
    scheduler.add(group)
    for _ in range(8):
        machine.step()
    scheduler.preempt_all()
    assert len(machine.drain()) == 3 and len({tuple(r.output) for r in group}) == 3


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
