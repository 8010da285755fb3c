"""Pauses, by the thread that waits for requests and by others."""

from __future__ import annotations

import logging
import re
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from live_setup import PROMPTS, at_rest, beside, build, check_logprobs, long, nudge

from stoker.kernels.errors import EngineStateError, InvalidRequestError
from stoker.rollout import RolloutEngine
from stoker.rollout import loop as loop_module
from stoker.rollout.loop import Loop


def test_pause_wait_and_pause_abort() -> None:
    with build() as engine:
        handles = [engine.submit(p, long()) for p in PROMPTS]
        engine.pause("wait")
        assert all(h.done for h in handles)
        late = engine.submit(PROMPTS[0], long())
        with pytest.raises(EngineStateError, match=r"this thread has paused the engine: call resume\(\) first"):
            late.result()
        with pytest.raises(EngineStateError, match="paused"):
            engine.generate_batch(PROMPTS)
        engine.pause("abort")
        assert late.result().completions[0].finish_reason == "abort"
        engine.resume()
        assert not engine.is_paused
        with pytest.raises(InvalidRequestError, match="mode='stop': give 'keep', 'wait' or 'abort'"):
            engine.pause("stop")  # type: ignore[arg-type]
        at_rest(engine)


def test_what_is_there_is_given_to_the_thread_that_has_paused_too() -> None:
    with build() as engine:
        ended, handle = engine.submit(PROMPTS[1], long(max_tokens=1)), engine.submit(PROMPTS[0], long())
        ended.result()
        chunk = next(iter(handle))
        engine.pause()
        assert next(iter(handle)) == chunk
        assert engine.wait([ended]) == ([ended], []) and engine.wait([handle, ended], share=0.5) == ([ended], [handle])
        assert len(list(ended)) == 1
        for call in (handle.result, lambda: list(handle), lambda: engine.wait([handle])):
            with pytest.raises(EngineStateError, match="this thread has paused the engine"):
                call()
        engine.resume()
        handle.result()
        at_rest(engine)


def test_a_pause_in_one_thread_holds_the_others() -> None:
    with build() as engine:
        handle = engine.submit(PROMPTS[0], long(max_tokens=100))
        next(iter(handle))
        engine.pause()
        stood = len(handle._requests[0].tokens)

        def ask() -> None:
            with pytest.raises(TimeoutError):
                handle.result(timeout=0)

        with beside(ask):
            pass
        assert len(handle._requests[0].tokens) == stood, "a step was made while the engine was paused"
        with beside(handle.result) as results:
            time.sleep(0.2)
            assert not results and len(handle._requests[0].tokens) == stood
            engine.resume()
        assert len(results[0].completions[0].token_ids) == 100


def test_who_waits_in_a_pause_hears_of_its_end_and_of_its_own_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_PATIENCE", 600.0)
    with build() as engine:
        handle, timed_out = engine.submit(PROMPTS[0], long()), threading.Event()
        engine.pause()

        def ask() -> Any:
            with pytest.raises(TimeoutError):
                handle.result(timeout=0.05)
            timed_out.set()
            return handle.result()

        with beside(ask) as results, beside(handle.result):
            assert timed_out.wait(60)
            while len(engine._loop._resumed._waiting) + len(engine._loop._followers) < 2:  # one for both
                time.sleep(1e-3)
            engine.resume()
        assert results[0].completions[0].finish_reason == "length" and not engine._loop._resumed._waiting


def test_a_pause_by_a_thread_that_is_over_is_no_other_threads() -> None:
    """Which may have its ident."""

    def run(action: Any) -> int:
        thread = threading.Thread(target=action)
        thread.start()
        ident = thread.ident
        thread.join(timeout=60)
        assert ident is not None
        return ident

    with build() as engine:
        handle, seen = engine.submit(PROMPTS[0], long()), list[Any]()

        def ask() -> None:
            seen.append(engine._loop.is_paused_elsewhere)
            with pytest.raises(TimeoutError):
                handle.result(timeout=0)
            seen.append("waited")

        same_ident, turns = False, 0
        while not same_ident and turns < 1000:  # which a thread has only once the one before is quite gone
            same_ident = run(engine.pause) == run(ask)
            turns += 1
            engine.resume()
        assert same_ident, "or this shows nothing"
        assert seen == [True, "waited"] * turns
        handle.result()


@pytest.mark.parametrize("call", ["submit", "generate_batch"])
def test_weights_are_not_looked_at_while_a_pause_may_change_them(call: str) -> None:
    """Whoever paused is in the middle of an optimizer step; what is asked for meanwhile is of the weights after it."""

    def ask(engine: RolloutEngine) -> Any:
        if call == "submit":
            return engine.submit(PROMPTS[3], long(3))
        return engine.generate_batch([PROMPTS[3]], long(3))[0]

    with build() as engine:
        engine.generate_batch(PROMPTS, long())
        engine.pause()
        nudge(engine)
        with beside(lambda: ask(engine)) as results:
            while not engine.core.has_work:
                time.sleep(1e-3)
            assert engine.weight_version == 0
            nudge(engine)
            engine.resume()
            assert engine.weight_version == 1
        output = results[0].result() if call == "submit" else results[0]
        assert output.cached_tokens == 0 and set(output.completions[0].weight_versions) == {1}
        check_logprobs(engine, PROMPTS[3], output.completions[0])
        at_rest(engine)


@pytest.mark.parametrize("end", ["close", "abort"])
def test_who_waits_in_a_pause_hears_that_nothing_is_to_come(end: str) -> None:
    with build() as engine:
        handle = engine.submit(PROMPTS[0], long())
        engine.pause()
        with beside(handle.result) as results:
            while not engine._loop._resumed._waiting:
                time.sleep(1e-3)
            engine.close() if end == "close" else handle.abort()
        assert results[0].completions[0].finish_reason == "abort"


def test_a_pause_that_waits_has_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though others go on asking: what they ask for is queued."""
    with build() as engine:
        engine.submit(PROMPTS[0], long())
        handles: list[Any] = []
        drive, threads = engine._loop.drive, []

        def ask() -> None:
            handles.append(engine.submit(PROMPTS[1], long()))
            with suppress(TimeoutError):
                handles[-1].result(timeout=0)

        def drive_and_ask(*args: Any) -> bool:
            result = drive(*args)
            if threading.current_thread() is threading.main_thread():
                threads.append(threading.Thread(target=ask, daemon=True))
                threads[-1].start()
                threads[-1].join(timeout=0.5)
            return result

        with monkeypatch.context() as patch:
            patch.setattr(engine._loop, "drive", drive_and_ask)
            engine.pause("wait")
        assert not engine.core.scheduler.running
        for thread in threads:
            thread.join(timeout=60)
        assert len(handles) == len(threads) and not handles[-1].done
        engine.resume()
        assert all(len(h.result().completions[0].token_ids) == 24 for h in handles)
        at_rest(engine)


def test_each_owner_ends_its_own_pause() -> None:
    """And until the last of them has resumed, nothing runs, and nothing looks at weights that another one may be changing."""
    with build() as engine:
        handle = engine.submit(PROMPTS[0], long())
        next(iter(handle))
        engine.pause(owner="step")
        nudge(engine)
        tokens = list(handle._requests[0].tokens)
        engine.pause()
        engine.pause()
        for recompute in (False, True):  # the second has no pause to end
            engine.resume(recompute=recompute)
            assert engine.is_paused and engine.weight_version == 0
            with beside(lambda: engine.wait([handle], timeout=0)):
                pass
            assert handle._requests[0].tokens == tokens and handle.status == "running"
        for change in (engine.pause, engine.resume):
            with pytest.raises(InvalidRequestError, match=r"owner=\[\]: unhashable type: 'list', give a name"):
                change(owner=[])  # type: ignore[arg-type]
        engine.resume(owner="somebody", recompute=True)
        assert engine.is_paused and handle.status == "running"
        with pytest.raises(EngineStateError, match="this thread has paused the engine"):
            handle.result()
        with beside(handle.result) as results:
            engine.resume(owner="step")
        assert not engine.is_paused and set(results[0].completions[0].weight_versions) == {0, 1}
        at_rest(engine)


def test_a_pause_that_waits_leaves_another_threads_pause_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with build() as engine:
        handle = engine.submit(PROMPTS[0], long())
        engine.pause()
        with beside(lambda: engine.pause("wait")):
            while not engine._loop._resumed._waiting:
                time.sleep(1e-3)
            engine.resume()
        assert handle.done and engine.is_paused
        engine.resume()


def test_a_pause_that_waits_for_another_that_ends_at_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks at it, with nothing under way."""
    held, over = threading.Event(), threading.Event()
    with build() as engine:

        def hold() -> None:
            engine.pause()
            held.set()
            over.wait(60)

        def ends_once_seen(loop: Loop) -> bool:
            paused = bool(loop._pauses)
            loop.resume(recompute=False)
            return paused

        with beside(hold):
            held.wait(60)
            with monkeypatch.context() as patch:
                patch.setattr(Loop, "is_paused", property(ends_once_seen))
                engine.pause("wait")
            assert engine.is_paused
            engine.resume()
            over.set()


def test_a_pause_that_waits_keeps_nobody_from_ending_one_that_came_just_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with build() as engine:
        handle, loop, others, free = (
            engine.submit(PROMPTS[0], long()),
            engine._loop,
            list[threading.Thread](),
            list[bool](),
        )
        drive = loop.drive

        def driving(*args: Any) -> bool:
            found = drive(*args)
            if not others:  # nobody has paused, as was just seen
                others.append(threading.Thread(target=engine.pause))
                others[0].start()
                others[0].join(60)
            return found

        def end() -> None:
            while not loop._resumed._waiting:
                time.sleep(1e-3)
            free.append(loop._gate.acquire(blocking=False))  # which resume() needs
            if free[0]:
                loop._gate.release()
            loop.resume(recompute=False)

        monkeypatch.setattr(loop, "drive", driving)
        with beside(end):
            engine.pause("wait")
        assert free == [True] and handle.done and engine.is_paused
        engine.resume()


def test_who_waits_for_long_says_who_has_paused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: whoever has paused may be gone, and all others would wait in silence."""
    monkeypatch.setattr(loop_module, "_LONG_PAUSE", 0.0)
    with build() as engine:
        handle = engine.submit(PROMPTS[0], long())
        pausing = threading.Thread(target=engine.pause, name="the harness")
        pausing.start()
        pausing.join(timeout=60)
        with caplog.at_level(logging.WARNING, "stoker"):
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    handle.result(timeout=0)
        (record,) = caplog.records
        words = r"paused \d+ s ago by thread the harness, which has ended"
        assert re.fullmatch(rf"requests wait for resume\(\): the engine was {words}", record.getMessage())
        assert re.search(words, repr(engine))
        engine.resume()
        with beside(engine.pause), caplog.at_level(logging.WARNING, "stoker"):
            pass
        with pytest.raises(TimeoutError):
            handle.result(timeout=0)
        assert len(caplog.records) == 2, "of another pause it is said again"
        engine.resume()
        assert handle.result().completions and "paused" not in repr(engine)
