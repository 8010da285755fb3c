"""States of whole sequences: which row belongs to whom, what is copied when, and how the scheduler uses them."""

import random

import pytest
from machine import Machine, make_group, make_scheduler, make_spec
from traffic import Traffic

from stoker.engine.cache.block_layout import BlockLayout
from stoker.engine.cache.state_cache import StateCache, StateLayout
from stoker.engine.request import Request
from stoker.engine.scheduler import Scheduler
from stoker.kernels.reference.attention_plan import Visibility

SLOTS = 4
ZEROS, PADDING = SLOTS + 1, SLOTS
KEYS = [bytes([i]) for i in range(9)]


def cache(num_kept: int = 2) -> StateCache:
    return StateCache(StateLayout(num_slots=SLOTS, num_kept=num_kept), block_size=4)


def test_a_slot_begins_anew_or_where_a_kept_state_is():
    states = cache()
    states.begin(1, [])
    states.keep(0, KEYS[1])
    assert not list(states.known(KEYS[:3])), "it is there after the plan"
    begun, ((slot, row),) = states.take()
    assert begun == [(ZEROS, 1), (ZEROS, PADDING)] and slot == 0 and row > ZEROS
    assert [list(states.known(KEYS[:n])) for n in range(4)] == [[], [], [2], [2]]
    states.begin(3, KEYS[:2])
    assert states.take() == ([(row, 3), (ZEROS, PADDING)], [])
    states.check()


def test_the_copy_used_longest_ago_makes_room():
    states = cache()
    for key in KEYS[:2]:
        states.keep(0, key)
        states.take()
    for slot in (1, 2):
        states.begin(slot, KEYS[:1])
    states.keep(0, KEYS[2])
    begun, kept = states.take()
    assert [list(states.known([key])) for key in KEYS[:3]] == [[1], [], [1]]
    assert list(states.known(KEYS[:3])) == [3, 1]
    assert begun[0][0] != kept[0][1]
    states.keep(0, KEYS[2])
    assert states.take() == ([], []), "it is kept already"
    states.check()


def test_one_copy_for_all_that_come_to_the_same_place_in_a_plan():
    states = cache()
    for slot in range(3):
        states.keep(slot, KEYS[0])
    assert len(states.take()[1]) == 1
    states.check()
    states.keep(0, KEYS[1])
    states.take()
    assert list(states.known(KEYS[:2])) == [2, 1], "a row was lost"


def test_a_lost_row_is_noticed():
    for end in (0, -1):
        states = cache()
        del states._free[end]
        with pytest.raises(AssertionError, match="lost"):
            states.check()


def test_no_room_for_more_copies_than_there_are_rows():
    states = cache()
    for slot, key in enumerate(KEYS[:3]):
        states.keep(slot, key)
    assert len(states.take()[1]) == 2
    none = cache(num_kept=0)
    none.keep(0, KEYS[0])
    assert none.take() == ([], [])


def test_cleared_rows_are_free_again():
    states = cache()
    for _ in range(3):
        for key in KEYS[:2]:
            states.keep(0, key)
        assert len(states.take()[1]) == 2
        states.clear()
        states.check()
        assert not list(states.known(KEYS[:2]))


def hybrid(num_kept: int = 8, **fields: object) -> Scheduler:
    return make_scheduler(state_layout=StateLayout(num_slots=8, num_kept=num_kept), **fields)


def group(first_id: int, prompt: list[int], samples: int) -> list[Request]:
    return make_group(first_id, prompt, [make_spec(seed=i) for i in range(samples)])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 22])
@pytest.mark.parametrize("samples", [1, 8, 20])
def test_a_group_computes_its_prompt_once_up_to_its_last_full_block(length: int, samples: int) -> None:
    scheduler = hybrid()
    machine = Machine(scheduler)
    scheduler.add(group(0, [i % 3 for i in range(length)], samples))
    machine.drain()
    border = (length - 1) // 4 * 4
    assert scheduler.counters.shared_tokens + scheduler.counters.prefix_hit_tokens == (samples - 1) * border


def test_without_a_prefix_cache_every_sample_computes_its_prompt() -> None:
    scheduler = hybrid(enable_prefix_caching=False)
    scheduler.add(group(0, [0, 1, 2, 1, 0, 2], 6))
    Machine(scheduler).drain()
    assert scheduler.counters.shared_tokens == scheduler.counters.prefix_hit_tokens == 0


def test_a_state_serves_no_other_weights() -> None:
    scheduler = hybrid()
    machine = Machine(scheduler)
    for version in range(3):
        scheduler.set_weight_version(version)
        scheduler.add(group(100 * version, [0, 1, 2, 1, 0, 2], 1))
        machine.drain()
        assert scheduler.counters.prefix_hit_tokens == 0
    scheduler.add(group(300, [0, 1, 2, 1, 0, 2], 1))
    machine.drain()
    assert scheduler.counters.prefix_hit_tokens == 4


def test_a_state_that_began_under_other_weights_serves_nobody() -> None:
    """Of a request that weights changed under, halfway to where its state would be kept."""
    scheduler = hybrid(max_num_batched_tokens=4)
    machine = Machine(scheduler)
    first, *others = (group(i, [0, 1, 2, 1, 0, 2, 3, 4, 1], 1) for i in range(3))
    scheduler.add(first)
    machine.step()
    assert first[0].computed == 4
    scheduler.set_weight_version(1)
    plan = scheduler.plan()
    assert plan is not None and first[0].computed == 8
    scheduler.commit(plan, machine.run(plan))  # without the machine's proof that all is of the present weights
    scheduler.abort(first)
    for request in others:
        scheduler.add(request)
        machine.drain()
    assert scheduler.counters.prefix_hit_tokens == 8


def test_as_many_conversations_take_turns_as_there_are_copies() -> None:
    scheduler = hybrid(num_kept=4)
    machine = Machine(scheduler)
    prompts, expected = [[i] * 5 for i in range(4)], 0
    for turn in range(5):
        requests = [group(10 * turn + i, prompt, 1) for i, prompt in enumerate(prompts)]
        for request in requests:
            scheduler.add(request)
        machine.drain()
        assert scheduler.counters.prefix_hit_tokens == expected
        expected += sum((len(prompt) - 1) // 4 * 4 for prompt in prompts)
        prompts = [[*request.tokens, 1, 2, 0, 1] for (request,) in requests]


@pytest.mark.parametrize(("pages", "num_kept"), [(1, 2), (2, 5)])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_sequence_begins_where_both_its_state_and_its_window_are_there(pages: int, num_kept: int, ahead: int) -> None:
    """Layers with a window have blocks of their own, which may be gone where a state is kept, or the other way round."""
    layout, num_blocks = BlockLayout(1, pages, (Visibility(window=5),)), 18 * pages
    scheduler = hybrid(num_kept, num_blocks=num_blocks, block_layout=layout, max_num_batched_tokens=8, decode_window=3)
    room = min(32, layout.most_tokens(num_blocks, 4, 8))
    Traffic(random.Random(pages), room).run(Machine(scheduler, ahead), 600)
    assert scheduler.counters.prefix_hit_tokens > 0 and scheduler.counters.preemptions > 0
