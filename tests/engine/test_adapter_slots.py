"""More adapters than slots: which requests wait for one, which go on, and that none waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import oracle
import pytest
from adapted import GREEDY, PROMPTS, assert_like_peft, expected_tokens, peft_model, tokens, two_adapters
from live_setup import at_rest
from machine import Machine, make_group, make_scheduler, make_spec, until
from peft import PeftModel

from stoker.engine.adapters.lora import LoraLayers
from stoker.engine.adapters.slots import AdapterSlots
from stoker.engine.request import Adapter, Request, Status
from stoker.engine.scheduler import Scheduler
from stoker.kernels.errors import EngineStateError
from stoker.rollout import EngineConfig, RolloutEngine, RolloutHandle
from stoker.rollout import adapters as of_requests
from stoker.rollout.requests import RequestMaker

ONE_SLOT = EngineConfig(
    max_num_seqs=8, max_model_len=64, block_size=4, kv_cache_memory="8MiB", max_loras=1, decode_window=1
)


# -- the rule ----------------------------------------------------------------------------------------------------


_IDS = count()


def queue(scheduler: Scheduler, adapter: Adapter | None, length: int = 4) -> Request:
    """One more request, the last in the queue."""
    (request,) = make_group(next(_IDS), [1], [make_spec(max_tokens=length)])
    request.adapter = adapter
    scheduler.add([request])
    return request


def adapters(count: int) -> list[Adapter]:
    return [Adapter(f"a{serial}", serial) for serial in range(count)]


def test_who_waits_for_a_slot_blocks_nobody() -> None:
    a, b = adapters(2)
    scheduler = make_scheduler(adapter_slots=AdapterSlots(1))
    machine = Machine(scheduler)
    first, waits, second, base = (queue(scheduler, adapter) for adapter in (a, b, a, None))
    machine.step()
    assert scheduler.running == [first, second, base] and list(scheduler.waiting) == [waits]
    until(lambda: first.status is second.status is Status.FINISHED, machine.step)
    machine.step()
    assert waits.status is Status.RUNNING and waits.adapter.slot == 1
    machine.drain()


def test_what_is_blocked_takes_no_place_from_others() -> None:
    """Two rows, and two requests ahead that wait for a slot."""
    a, b, c = adapters(3)
    scheduler = make_scheduler(adapter_slots=AdapterSlots(1), max_num_seqs=2)
    first, *_, base = (queue(scheduler, adapter) for adapter in (a, b, c, None))
    machine = Machine(scheduler)
    machine.step()
    assert scheduler.running == [first, base]
    machine.drain()


def test_nobody_starves_for_a_slot() -> None:
    """Though requests for the adapters that have one come all the time, and those for one of them go on."""
    a, b, c, d = adapters(4)
    scheduler = make_scheduler(adapter_slots=AdapterSlots(2))
    machine = Machine(scheduler)
    queue(scheduler, a, 6), queue(scheduler, b, 6)
    machine.step()
    waiting = [queue(scheduler, c), queue(scheduler, d)]
    passed: list[Request] = []
    steps = 0
    while any(r.status is Status.WAITING for r in waiting):
        passed += [queue(scheduler, a, 6), queue(scheduler, b, 6)]
        machine.step()
        steps += 1
        assert steps <= 16, "they wait for the turns of two adapters, of six steps each"
        if waiting[0].status is Status.WAITING:
            began = {r.adapter for r in passed if r.status is not Status.WAITING}
            assert began == {b}, "the adapter whose turn began first closes, the other one does not"
    scheduler.abort(list(scheduler.waiting))
    machine.drain()


def test_a_turn_is_all_that_was_there_when_it_began() -> None:
    """So that adapters in a row, as in a batch, do not change places at every request."""
    a, b, c = adapters(3)
    scheduler = make_scheduler(adapter_slots=AdapterSlots(1), max_num_seqs=3)
    machine = Machine(scheduler)
    for number in range(18):
        queue(scheduler, (a, b, c)[number % 3], 4 + number // 3 % 3)
    began: list[Adapter | None] = []
    while scheduler.waiting:
        waited = list(scheduler.waiting)
        machine.step()
        began += [r.adapter for r in waited if r.status is not Status.WAITING]
    assert began == [a] * 6 + [b] * 6 + [c] * 6
    machine.drain()


def test_the_slot_that_was_idle_for_longest_is_taken() -> None:
    a, b, c = adapters(3)
    scheduler = make_scheduler(adapter_slots=AdapterSlots(2))
    machine = Machine(scheduler)
    for adapter in (a, b, a, c):
        queue(scheduler, adapter)
        machine.drain()
    assert set(scheduler.adapter_slots) == {a, c} and a.slot != c.slot == b.slot


# -- the engine --------------------------------------------------------------------------------------------------


def one_runs_and_one_waits(engine: RolloutEngine) -> tuple[RolloutHandle, RolloutHandle]:
    """With adapters "default" and "other", for the one slot there is."""
    handles = tuple(engine.submit(PROMPTS[0], GREEDY, adapter=name) for name in ("default", "other"))
    next(iter(handles[0]))
    assert [h.status for h in handles] == ["running", "waiting"]
    return handles


def check(handle: RolloutHandle, model: PeftModel, adapter: str | None, prompt: int = 0) -> None:
    assert handle.result().completions[0].token_ids == expected_tokens(model, adapter)[prompt]


def test_more_adapters_than_slots() -> None:
    model = two_adapters()
    with RolloutEngine(model, config=ONE_SLOT) as engine:
        for adapter in ("default", "other", "default"):
            assert_like_peft(engine, model, [adapter, None, adapter, None])
        assert_like_peft(engine, model, ["other", "default", None, "other"])
        first, waits = one_runs_and_one_waits(engine)
        assert_like_peft(engine, model, ["other", "default", None, "default"])  # steps the others, too
        assert first.done and waits.done
        check(first, model, "default")
        check(waits, model, "other")
        at_rest(engine)


def test_whoever_steps_starts_what_waits_for_a_slot() -> None:
    model = two_adapters()
    with RolloutEngine(model, config=ONE_SLOT) as engine:
        first, waits = one_runs_and_one_waits(engine)
        base = engine.submit(PROMPTS[1], replace(GREEDY, max_tokens=30), adapter=None)
        next(iter(base))
        assert (first.status, waits.status, base.status) == ("running", "waiting", "running")
        check(first, model, "default")
        next(iter(base))
        while waits.status == "waiting":
            with pytest.raises(TimeoutError):
                base.result(timeout=0)
        assert not base.done
        check(waits, model, "other")
        base.abort()
        at_rest(engine)


def _interrupt(engine: RolloutEngine, *_: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.core, "step", _strike)
        with pytest.raises(KeyboardInterrupt):
            engine.generate_batch(PROMPTS, GREEDY, adapter=["other", "default", None, "other"])


def _strike() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "end",
    [
        lambda engine, waits: waits.abort(),
        lambda engine, waits: (engine.pause("abort"), engine.resume()),
        _interrupt,
    ],
    ids=["abort", "pause", "interrupt"],
)
def test_what_waits_for_a_slot_can_be_ended(end: Callable[[RolloutEngine, RolloutHandle], object]) -> None:
    model = two_adapters()
    with RolloutEngine(model, config=ONE_SLOT) as engine:
        first, waits = one_runs_and_one_waits(engine)
        end(engine, waits)
        assert waits.status == "finished" and waits.result().completions[0].token_ids == []
        first.abort()
        at_rest(engine)
        assert_like_peft(engine, model, ["other", "default", None, "other"])


def test_a_dropped_handle_and_a_closed_engine_end_what_waits() -> None:
    model = two_adapters()
    engine = RolloutEngine(model, config=ONE_SLOT)
    first, waits = one_runs_and_one_waits(engine)
    del waits
    check(first, model, "default")
    at_rest(engine)
    first, waits = one_runs_and_one_waits(engine)
    engine.close()
    assert first.done and waits.done and waits.result().completions[0].finish_reason == "abort"


def test_an_adapter_that_is_waited_for_is_in_use() -> None:
    model = two_adapters()
    with RolloutEngine(model, config=ONE_SLOT) as engine:
        engine.load_adapter("x", peft_model(seed=7))
        first = engine.submit(PROMPTS[0], GREEDY, adapter="default")
        waits = engine.submit(PROMPTS[0], GREEDY, adapter="x")
        next(iter(first))
        for change in (lambda: engine.unload_adapter("x"), lambda: engine.load_adapter("x", peft_model(seed=8))):
            with pytest.raises(EngineStateError, match=r"'x' cannot be \w+ while 1 requests use it: wait for or abort"):
                change()
        with pytest.raises(EngineStateError, match="cannot sleep while requests are under way"):
            engine.sleep()
        check(waits, peft_model(seed=7), "default")
        engine.unload_adapter("x")
        assert first.done


def test_an_adapter_that_is_deleted_fails_what_waits_for_it() -> None:
    model = two_adapters()
    with RolloutEngine(model, config=ONE_SLOT) as engine:
        first, waits = one_runs_and_one_waits(engine)
        engine.pause()
        model.delete_adapter("other")
        engine.update_weights()
        engine.resume()
        assert "'other' was deleted from the model" in str(waits.result().error)
        check(first, model, "default")
        at_rest(engine)


@pytest.mark.parametrize("again", [False, True])
def test_an_adapter_that_is_unloaded_before_its_request_is_queued(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, here by the same one. again: another one has its name then."""
    model = peft_model()
    with RolloutEngine(model, config=ONE_SLOT) as engine:
        other = engine.submit(PROMPTS[1], GREEDY)
        for call in (engine.submit, lambda p, *args, **options: engine.generate_batch([p], *args, **options)):
            engine.load_adapter("x", peft_model(seed=7))
            make = RequestMaker.for_generation

            def unload(*args: Any, make: Any = make) -> Any:
                if again:
                    engine.load_adapter("x", peft_model(seed=8))
                else:
                    engine.unload_adapter("x")
                return make(*args)

            with monkeypatch.context() as patch:
                patch.setattr(RequestMaker, "for_generation", unload)
                made: Any = call(PROMPTS[0], GREEDY, adapter="x")
            output = made.result() if isinstance(made, RolloutHandle) else made[0]
            assert "'x' was deleted" in str(output.error)
        check(other, model, "default", prompt=1)


def test_asleep_and_under_new_weights_what_waits_keeps_its_place() -> None:
    model = two_adapters()
    with RolloutEngine(model, config=ONE_SLOT) as engine:
        first, waits = one_runs_and_one_waits(engine)
        engine.pause()
        engine.sleep()
        for parameter in model.base_model.model.lm_head.parameters():
            parameter.data.mul_(-1)
        engine.wake_up()
        engine.update_weights()
        engine.resume(recompute=True)
        assert (first.status, waits.status) == ("waiting", "waiting")
        check(waits, model, "other")
        assert first.done and set(waits.result().completions[0].weight_versions) == {1}
        (completion,) = first.result().completions
        kept = completion.weight_versions.count(0)
        at = [*PROMPTS[0], *completion.token_ids[:kept]]
        assert kept and completion.token_ids[kept:] == oracle.greedy(model, at, 9 - kept)


@pytest.mark.parametrize("when", ["long before", "before", "after"])
def test_a_slot_that_was_not_filled_is_not_taken_for_filled(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it compared as if it were: it may still have another adapter's weights."""
    model = two_adapters()
    with RolloutEngine(model, config=ONE_SLOT) as engine:
        assert tokens(engine) == expected_tokens(model)
        put = LoraLayers.put

        def interrupted(*args: Any) -> None:
            if when == "after":
                put(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(*((of_requests, "lies_on") if when == "long before" else (LoraLayers, "put")), interrupted)
            with pytest.raises(KeyboardInterrupt):
                tokens(engine, adapter="other")
        at_rest(engine)
        assert engine.verify_weights().ok
        for adapter in ("other", "default") if when == "before" else ("default", "other"):
            assert tokens(engine, adapter=adapter) == expected_tokens(model, adapter)
