"""Several threads at one engine: each has its turn, and none gets another's results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from live_setup import PROMPTS, at_rest, build, check_logprobs, long, nudge, same

from stoker.rollout import EngineStateError, RolloutEngine


def test_threads_share_the_engine() -> None:
    with build(max_num_seqs=3) as engine:
        expected = [engine.generate_batch([p], long(i, n=2))[0] for i, p in enumerate(PROMPTS)]
        failures: list[BaseException] = []

        def user(kind: int) -> None:
            try:
                for turn in range(6):
                    i = (kind + turn) % 4
                    if kind % 2:
                        assert same([engine.submit(PROMPTS[i], long(i, n=2)).result()], [expected[i]])
                    else:
                        assert same(engine.generate_batch([PROMPTS[i]], long(i, n=2)), [expected[i]])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=user, args=(kind,)) for kind in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert not failures and not any(t.is_alive() for t in threads)
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

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(timeout=60)
        assert len(handle._requests[0].tokens) == stood, "a step was made while the engine was paused"
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(handle.result()))
        thread.start()
        time.sleep(0.2)
        assert not results and len(handle._requests[0].tokens) == stood
        engine.resume()
        thread.join(timeout=60)
        assert len(results[0].completions[0].token_ids) == 100


class SlowToWake:
    """A lock of which threads other than the main one hear late that it is free, as where cores are short."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.lock.acquire()
        else:
            while not self.lock.acquire(blocking=False):
                time.sleep(0.01)

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_whoever_waits_for_a_turn_has_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock alone lets the thread that steps take it again and again."""
    with build(decode_window=1) as engine:
        step, loop = engine.core.step, engine._loop
        monkeypatch.setattr(loop, "_turn", SlowToWake())
        waiting: list[threading.Thread] = []
        had_turn, steps_meanwhile = threading.Event(), [0]

        def counted() -> Any:
            if not waiting:
                waiting.append(threading.Thread(target=loop.do, args=("look", had_turn.set)))
                waiting[0].start()
                while not loop._wanted:
                    time.sleep(1e-4)
            elif not had_turn.is_set():
                steps_meanwhile[0] += 1
            return step()

        monkeypatch.setattr(engine.core, "step", counted)
        engine.generate_batch(PROMPTS[:1], long(max_tokens=100))
        waiting[0].join(timeout=60)
        assert had_turn.is_set() and steps_meanwhile == [0]


def test_an_interrupt_before_its_turn_leaves_nobody_waiting_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Struck:
        def __enter__(self) -> None:
            raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None:
            raise AssertionError

    with build() as engine:
        loop = engine._loop
        with monkeypatch.context() as patch:
            patch.setattr(loop, "_turn", Struck())
            with pytest.raises(KeyboardInterrupt):
                loop.do("look", lambda: None)
        assert not loop._wanted and loop._turn_over.is_set()
        at_rest(engine)


@contextmanager
def beside(call: Callable[[], Any]) -> Iterator[list[Any]]:
    """Another thread that makes a call, and what this gave once the block is over."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield results
    thread.join(timeout=60)
    assert results and not isinstance(results[0], BaseException), results


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


@pytest.mark.parametrize("call", ["submit", "generate_batch", "score"])
def test_no_thread_sleeps_under_a_call_that_begins(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(engine: RolloutEngine) -> Any:
        if call == "submit":
            return engine.submit(PROMPTS[3], long(3)).result()
        return (
            engine.generate_batch([PROMPTS[3]], long(3))[0] if call == "generate_batch" else engine.score([PROMPTS[3]])
        )

    with build() as engine:
        resolve, there, tried = engine._adapters.resolve, threading.Event(), threading.Event()

        def after_a_while(*args: Any) -> Any:
            there.set()
            tried.wait(0.5)
            return resolve(*args)

        monkeypatch.setattr(engine._adapters, "resolve", after_a_while)
        with beside(lambda: ask(engine)):
            assert there.wait(60)
            try:  # it is through or under way by then
                engine.sleep()
            except EngineStateError as error:
                assert "cannot sleep while requests are under way" in str(error)
            tried.set()
        if engine.is_sleeping:
            engine.wake_up()
        at_rest(engine)
