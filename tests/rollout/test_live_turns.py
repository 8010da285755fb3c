"""The gate that requests begin behind, the turns in which the core is touched, and what a reader sees between two lines of one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from adapted import two_adapters
from live_setup import PROMPTS, at_rest, beside, build, check_logprobs, long

from stoker.rollout import EngineStateError, RolloutEngine
from stoker.rollout.loop import _Signal
from stoker.rollout.requests import RequestMaker

CALLS: dict[str, Callable[[RolloutEngine], Any]] = {
    "generate_batch": lambda engine: engine.generate_batch([PROMPTS[3]], long(3))[0],
    "score": lambda engine: engine.score([PROMPTS[3]])[0],
    "submit": lambda engine: engine.submit(PROMPTS[3], long(3)).result(),
}
CHANGES: dict[str, Callable[[RolloutEngine], Any]] = {
    "pause": lambda engine: engine.pause(),
    "resume": lambda engine: engine.resume(),
    "sleep": lambda engine: engine.sleep(),
    "wake_up": lambda engine: engine.wake_up(),
    "update_weights": lambda engine: engine.update_weights(),
    "verify_weights": lambda engine: engine.verify_weights(),
    "load_adapter": lambda engine: engine.load_adapter("more", (two_adapters(), "other")),
    "unload_adapter": lambda engine: engine.unload_adapter("more"),
    "close": lambda engine: engine.close(),
}


@pytest.mark.parametrize("call", [*CALLS, *CHANGES])
def test_a_callback_inside_a_step_waits_for_no_other_thread(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That one may be waiting for the end of the step, with the gate in its hands: both would wait for ever."""
    with build() as engine:
        step, held, refused, in_time = engine.core.step, threading.Event(), threading.Event(), list[bool]()

        def hold() -> None:
            with engine._loop.gate("hold it"):
                held.set()
                in_time.append(refused.wait(20))

        def stepping() -> Any:
            if not held.is_set():
                other = threading.Thread(target=hold, daemon=True)
                other.start()
                assert held.wait(60)
                with pytest.raises(EngineStateError, match="inside a step of its own"):
                    (CALLS | CHANGES)[call](engine)
                refused.set()
                other.join(60)
            return step()

        monkeypatch.setattr(engine.core, "step", stepping)
        check_logprobs(engine, PROMPTS[0], engine.generate_batch(PROMPTS[:1], long())[0].completions[0])
        assert in_time == [True]
        at_rest(engine)


@pytest.mark.parametrize("call", CALLS)
def test_an_engine_that_falls_asleep_before_a_call_has_the_gate(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, after the first look at the engine: there is no KV cache to begin on."""
    with build() as engine:
        check = "check_sequences" if call == "score" else "check_prompts"
        original = getattr(RequestMaker, check)
        with monkeypatch.context() as patch:
            patch.setattr(RequestMaker, check, lambda *given: (original(*given), engine.sleep())[0])
            with pytest.raises(EngineStateError, match=r"the engine is asleep \(kv_cache\): call wake_up\(\) first"):
                CALLS[call](engine)
        assert not engine.core.has_work
        engine.wake_up()
        assert CALLS[call](engine).error is None
        at_rest(engine)


@pytest.mark.parametrize("call", CALLS)
def test_no_thread_sleeps_between_a_look_at_the_weights_and_the_requests_of_them(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with build() as engine:
        add, there, tried = engine._loop.add, threading.Event(), threading.Event()

        def after_a_while(*given: Any) -> None:
            there.set()
            tried.wait(0.5)
            add(*given)

        monkeypatch.setattr(engine._loop, "add", after_a_while)
        with beside(lambda: CALLS[call](engine)):
            assert there.wait(60)
            try:  # it is through or under way by then
                engine.sleep()
            except EngineStateError as error:
                assert "cannot sleep while requests are under way" in str(error)
            tried.set()
        if engine.is_sleeping:
            engine.wake_up()
        at_rest(engine)


def test_no_thread_has_a_turn_while_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is under way in a pause is preempted then; an abort in the middle of that would find blocks that are gone."""
    with build() as engine:
        handle = engine.submit(PROMPTS[0], long())
        next(iter(handle))
        engine.pause()
        sleep, abort = engine._memory.sleep, threading.Thread(target=handle.abort)

        def sleeping(*given: Any, **options: Any) -> None:
            abort.start()
            abort.join(0.2)
            assert not handle.done
            sleep(*given, **options)
            assert not handle.done

        with monkeypatch.context() as patch:
            patch.setattr(engine._memory, "sleep", sleeping)
            engine.sleep()
        abort.join(60)
        assert handle.done
        engine.wake_up()
        engine.resume()
        at_rest(engine)


def test_who_reads_between_two_lines_of_a_turn_sees_whole_tokens() -> None:
    """A token and its log-probability are taken one after the other, and whoever polls holds no lock."""
    with build() as engine:
        handle = engine.submit(PROMPTS[0], long(n=2))
        pieces = {0: list[Any](), 1: list[Any]()}

        class Read(list[Any]):
            def __iadd__(self, more: Any) -> Any:
                look()
                super().__iadd__(more)
                look()
                return self

            def append(self, one: Any) -> None:
                look()
                super().append(one)
                look()

        def look() -> None:
            for chunk in handle.poll():
                pieces[chunk.index] += zip(chunk.token_ids, chunk.logprobs, chunk.weight_versions, strict=True)

        for request in handle._requests:
            for name in ("tokens", "logprobs", "weight_versions"):
                setattr(request, name, Read(getattr(request, name)))
        for c in handle.result().completions:
            assert pieces[c.index] == [*zip(c.token_ids, c.logprobs, c.weight_versions, strict=True)]
            assert len(c.token_ids) == 24
        at_rest(engine)


def test_nobody_waits_for_a_signal_that_came_before() -> None:
    """Between the look that made it wait and the wait."""
    signal = _Signal()
    signal.set()
    with beside(lambda: signal.wait(600) or True):
        pass
    assert not signal._waiting
