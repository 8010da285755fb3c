"""Several threads at one engine: each has its turn, and none gets another's results."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import oracle
import pytest
import torch
from adapted import running, two_adapters
from live_setup import PROMPTS, at_rest, beside, build, check_logprobs, long, nudge, same
from mirrored import copies

from stoker.engine.request import Request, Status
from stoker.kernels.errors import InvalidRequestError
from stoker.rollout import EngineConfig, EngineStateError, RolloutEngine, requests
from stoker.rollout import loop as loop_module


def test_threads_share_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_PATIENCE", 600.0)  # each hears of the end of another's turn
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


def test_whoever_sees_that_a_request_has_ended_sees_how(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are read without a lock, by a thread that may look at any moment of another one's abort."""
    seen: dict[int, set[Any]] = {}

    class Watched(Request):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if getattr(self, "status", None) is Status.FINISHED:
                seen.setdefault(self.id, set()).add((self.finish_reason, self.error))

    monkeypatch.setattr(requests, "Request", Watched)
    with build() as engine:
        handles = [engine.submit(PROMPTS[0], long(max_tokens=count)) for count in (3, 60, 60)]
        handles[1].abort()
        handles[0].result()
        monkeypatch.setattr(engine.core, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            handles[2].result()
        outputs = [handle.result() for handle in handles]
        assert [o.completions[0].finish_reason for o in outputs] == ["length", "abort", "abort"] and outputs[2].error
        ends = [(h._requests[0].id, o) for h, o in zip(handles, outputs, strict=True)]
        assert seen == {id: {(o.completions[0].finish_reason, o.error)} for id, o in ends}


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
        assert not loop._wanted and loop._turn_over._on
        at_rest(engine)


def test_a_finalizer_at_the_beginning_of_a_turn_does_not_wait_for_its_end() -> None:
    """The garbage collector may run anywhere, and what it finalizes may end a request."""
    engine = build()  # left open where this fails: closing it would wait for ever
    loop = engine._loop

    class Collecting(set[int]):
        collected = False

        def discard(self, thread: int) -> None:
            super().discard(thread)
            if not self.collected:
                self.collected = True
                handle.abort()

    handle = engine.submit(PROMPTS[0], long())
    loop._wanted = Collecting()
    with beside(lambda: loop.has_work("say") or True):
        pass
    assert not loop.has_work("say") and handle.result().completions[0].finish_reason == "abort"
    at_rest(engine)
    engine.close()


@pytest.mark.parametrize("call", ["submit", "generate_batch", "score"])
def test_no_thread_sleeps_under_a_call_that_begins(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(engine: RolloutEngine) -> Any:
        if call == "submit":
            return engine.submit(PROMPTS[3], long(3)).result()
        return (
            engine.generate_batch([PROMPTS[3]], long(3))[0] if call == "generate_batch" else engine.score([PROMPTS[3]])
        )

    with build() as engine:
        found, there, tried = engine._adapters.found, threading.Event(), threading.Event()

        def after_a_while(*args: Any) -> Any:
            there.set()
            tried.wait(0.5)
            return found(*args)

        monkeypatch.setattr(engine._adapters, "found", after_a_while)
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


@pytest.mark.parametrize("call", ["generate_batch", "score", "update_weights"])
def test_weights_do_not_change_within_a_step(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror's are the engine's own. Those that come from elsewhere may have begun to before the request did."""
    with build(dtype="float64") as engine:
        model, step = engine._binding.model, engine.core.step
        before = deepcopy(model)
        bits = next(iter(copies(engine).values()))
        began, go = threading.Event(), threading.Event()

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            began.set()
            assert go.wait(60)
            yield from model.named_parameters()

        def ask() -> Any:
            if call == "update_weights":
                return engine.update_weights(weights())
            began.set()
            assert go.wait(60)
            return engine.score([PROMPTS[2]]) if call == "score" else engine.generate_batch(PROMPTS[2:], long(3))

        def stepping() -> Any:
            if len(engine.core.under_way[0].tokens) > 12 and not go.is_set():
                kept = bits.clone()
                nudge(engine)
                go.set()
                end = time.monotonic() + 10
                while not engine._loop._wanted and time.monotonic() < end:
                    time.sleep(1e-3)
                assert torch.equal(kept, bits)
            return step()

        with beside(ask):
            assert began.wait(60)
            handle = engine.submit(PROMPTS[0], long())
            monkeypatch.setattr(engine.core, "step", stepping)
            (completion,) = handle.result().completions
        seam = completion.weight_versions.index(1)
        assert seam > 0
        old = oracle.logprobs(before, PROMPTS[0], completion.token_ids)[:seam]
        torch.testing.assert_close(torch.tensor(completion.logprobs)[:seam].double(), old, rtol=0, atol=1e-4)
        if call != "update_weights":  # after which requests under way go on with the KV they have
            check_logprobs(engine, PROMPTS[0], completion, first=seam)
        at_rest(engine)


def test_copies_of_adapters_stay_through_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a step has found are read until its end, whoever begins another call meanwhile."""
    model = two_adapters()
    config = EngineConfig(max_num_seqs=8, max_model_len=64, block_size=4, kv_cache_memory="8MiB", decode_window=1)
    with RolloutEngine(model, config=config) as engine:
        threads: list[threading.Thread] = []
        stacks = engine._binding.shell.lora.stacks
        pieces = stacks.pieces

        def after_a_while(*args: Any) -> Any:
            found = pieces(*args)
            if not threads:
                threads.append(threading.Thread(target=engine.score, args=([PROMPTS[1]],), daemon=True))
                threads[0].start()
                threads[0].join(timeout=0.5)
            return found

        monkeypatch.setattr(stacks, "pieces", after_a_while)
        adapters = ["default", "other"] * 2
        for output, adapter in zip(engine.generate_batch(PROMPTS, long(), adapter=adapters), adapters, strict=True):
            with running(model, adapter):
                check_logprobs(engine, output.prompt_token_ids, output.completions[0])
        threads[0].join(timeout=60)
        assert not threads[0].is_alive()
        at_rest(engine)


def test_two_threads_forget_one_adapter() -> None:
    """The second is told that there is none; nobody's requests end."""
    model = two_adapters()
    config = EngineConfig(max_num_seqs=8, max_model_len=64, block_size=4, kv_cache_memory="8MiB")
    with RolloutEngine(model, config=config) as engine:
        engine.load_adapter("more", (two_adapters(), "other"))
        handle = engine.submit(PROMPTS[0], long())
        errors: list[BaseException] = []

        def unload() -> None:
            try:
                engine.unload_adapter("more")
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=unload, daemon=True) for _ in range(2)]
        with engine._loop.gate("let them begin"):
            for thread in threads:
                thread.start()
            time.sleep(0.2)
        for thread in threads:
            thread.join(timeout=60)
        assert [(type(e), str(e)) for e in errors] == [(InvalidRequestError, "adapter 'more' is not known")]
        assert handle.result().error is None


@pytest.mark.parametrize("call", ["wake_up", "resume", "load_adapter", "verify_weights", "update_weights"])
def test_a_call_that_waits_for_the_end_of_the_engine_comes_after_it(call: str) -> None:
    arguments = ("more", (two_adapters(), "other")) if call == "load_adapter" else ()
    with build() as engine:
        held = threading.Event()

        def late() -> None:
            assert held.wait(60)
            with pytest.raises(EngineStateError, match="the engine is closed"):
                getattr(engine, call)(*arguments)

        with beside(late), engine._loop.gate("close slowly"):
            held.set()
            time.sleep(0.2)
            engine.close()
        assert engine._kv.nbytes == 0


def test_one_of_those_who_wait_steps_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """And who has what it waits for goes on at once: were each to have a turn for that, the others made a step in theirs."""
    monkeypatch.setattr(loop_module, "_PATIENCE", 60.0)
    with build() as engine:
        longest, *others = [engine.submit(p, long(max_tokens=40 - 8 * i)) for i, p in enumerate(PROMPTS)]
        step, by, back = engine.core.step, [], threading.Event()

        def stepping() -> Any:
            by.append(threading.current_thread())
            end = time.monotonic() + 60
            while len(by) == 3 and len(engine._loop._followers) < 3 and time.monotonic() < end:
                time.sleep(1e-3)  # until they all wait
            if others[-1].done:
                back.wait(60)
            return step()

        monkeypatch.setattr(engine.core, "step", stepping)
        with beside(longest.result):
            while len(by) < 3:
                time.sleep(1e-3)
            with beside(others[0].result), beside(others[1].result), beside(lambda: (others[2].result(), back.set())):
                pass
        assert len(set(by)) == 1 and threading.current_thread() not in by
        at_rest(engine)


def test_another_steps_where_the_one_who_stepped_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_PATIENCE", 60.0)
    with build() as engine:
        short, *others = [engine.submit(p, long(max_tokens=4 + 20 * i)) for i, p in enumerate(PROMPTS)]
        with beside(short.result), beside(others[0].result), beside(others[1].result), beside(others[2].result):
            pass
        assert all(len(h.result().completions[0].token_ids) == 24 + 20 * i for i, h in enumerate(others))
        assert engine._loop._leader is None and not engine._loop._followers
        at_rest(engine)


@pytest.mark.parametrize("timeout", [None, 0.05])
def test_a_thread_that_steps_no_more_without_a_word_is_missed(
    monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    """As after Ctrl-C in the line that names the next one."""
    monkeypatch.setattr(loop_module, "_PATIENCE", 0.05)
    with build() as engine:
        handle = engine.submit(PROMPTS[0], long())
        engine._loop._leader = -1
        assert timeout is None or not engine.wait([handle], timeout=timeout)[0]
        assert engine._loop._leader is None or timeout is None
        assert len(handle.result().completions[0].token_ids) == 24
        at_rest(engine)
