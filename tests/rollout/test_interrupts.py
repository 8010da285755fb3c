"""What fails in the middle of a batch, and what an interrupt leaves: nothing is lost."""

import itertools
import os
import signal
import threading

import oracle
import pytest
import ranks
import torch
from families import make_model
from live_setup import beside
from mirrored import assert_matches, engine_on, step
from small_engine import (
    CROWD,
    GREEDY,
    NEEDLE,
    NEEDLE_PARAMS,
    TEXT_VOCAB,
    build,
    needle_alone,
    tokenizer,
    tokens,
)
from tqdm import tqdm

from stoker.engine.cache.block_pool import BlockPool
from stoker.engine.cache.block_tables import BlockTables
from stoker.engine.request import Request
from stoker.engine.runner import EagerStep
from stoker.engine.sampler import PenaltyState
from stoker.engine.scheduler import Scheduler
from stoker.engine.step_inputs import StepInputs
from stoker.kernels.errors import RequestFailedError
from stoker.kernels.interrupts import uninterrupted
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams
from stoker.rollout.stop_strings import StopStringChecker


def test_nan_weights_fail_the_requests_and_a_repair_heals_the_engine():
    model = make_model("llama")
    with build(model) as engine:
        expected = tokens(engine.generate_batch(CROWD, GREEDY))
        good = model.model.layers[1].mlp.up_proj.weight.detach().clone()
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.fill_(torch.nan)
        batch = engine.generate_batch(CROWD, GREEDY)
        assert all(isinstance(o.error, RequestFailedError) for o in batch)
        assert {c.finish_reason for o in batch for c in o.completions} == {"error"}
        for call in (batch.raise_for_errors, lambda: batch.to_tensors(0)):
            with pytest.raises(
                RequestFailedError,
                match=r"^prompt 0: the model gave NaN logits at position 1 under .* in step 1 of a plan of \d+ rows",
            ):
                call()
        engine.core.scheduler.check()
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.copy_(good)
        assert tokens(engine.generate_batch(CROWD, GREEDY)) == expected


def test_one_bad_request_does_not_touch_the_others():
    poison = 5
    model = make_model("llama")
    prompts = [[t for t in p if t != poison] or [1] for p in CROWD[:20]]
    alike = [*prompts[3], 7]
    expected = [oracle.greedy(model, p, 8) for p in prompts]
    healthy = oracle.greedy(model, alike, 8)
    assert poison not in healthy
    assert sum(poison in e for e in expected) < 10
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = torch.nan
    sick = [i for i in range(20) if poison in expected[i][:-1]]
    prompts[3] = [*prompts[3], poison, 9, 9]
    prompts[11] = [poison]
    for config in ({}, {"block_size": 4, "max_num_seqs": 4}, {"max_num_batched_tokens": 8, "decode_window": 1}):
        with build(model, **config) as engine:
            for _ in range(2):  # the second time among blocks that hold NaN
                batch = engine.generate_batch(prompts, GREEDY)
                for i, output in enumerate(batch):
                    if i in (3, 11) or i in sick:
                        assert isinstance(output.error, RequestFailedError)
                    else:
                        assert output.error is None and output.completions[0].token_ids == expected[i]
                with pytest.raises(RequestFailedError, match=rf"^prompt {min([3, *sick])}: "):
                    batch.to_tensors(0)
            # What a sick prompt was computed with is NaN before the poison, too, and nobody else begins with that.
            for run in (lambda e: e.generate_batch(prompts[3:4], GREEDY), lambda e: e.score(prompts[3:4])):
                assert run(engine)[0].error is not None
                assert tokens(engine.generate_batch([alike], GREEDY)) == [[healthy]]
            assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks
            engine.core.scheduler.check()


def interrupt_at(call: int, function):
    """``function``, but KeyboardInterrupt in call number ``call``: before it has run if that is even, after if odd."""
    calls = itertools.count()

    def interrupted(*args, **kwargs):
        now = next(calls)
        if now == call and call % 2 == 0:
            raise KeyboardInterrupt
        result = function(*args, **kwargs)
        if now == call:
            raise KeyboardInterrupt
        return result

    return interrupted


@pytest.mark.parametrize("call", [0, 3, 8])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *((Scheduler, name) for name in ("plan", "commit", "_admit", "_release")),
        *((BlockTables, name) for name in ("reserve", "reserve_steps", "hold", "release")),
        (Request, "take"),
        (BlockPool, "allocate"),
        (StepInputs, "fill"),
        (EagerStep, "__call__"),
        (PenaltyState, "start"),
        (PenaltyState, "add"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_after_an_interrupt_nothing_is_lost(owner, name, call, monkeypatch):
    with build(block_size=4, kv_cache_memory=120_000, max_num_batched_tokens=32, decode_window=2) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt_at(call, getattr(owner, name)))
            with pytest.raises(KeyboardInterrupt):
                engine.generate_batch(CROWD[:12], SamplingParams(n=2, seed=1, repetition_penalty=1.1))
        engine.core.scheduler.check()
        assert not engine.core.has_work
        assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks
        assert tokens(engine.generate_batch([NEEDLE], NEEDLE_PARAMS)) == tokens(needle_alone())
        engine.sleep()
        engine.wake_up()
        assert tokens(engine.generate_batch([NEEDLE], NEEDLE_PARAMS)) == tokens(needle_alone())


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("name", ["clear", "set"])
def test_a_pause_or_its_end_that_is_interrupted_is_nothing_to_wait_for(name, ran, monkeypatch):
    with build(decode_window=1) as engine:
        event = engine._loop._resumed
        original = getattr(event, name)

        def interrupted():
            if ran:
                original()
            raise KeyboardInterrupt

        if name == "set":
            engine.pause()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(event, name, interrupted)
            engine.resume() if name == "set" else engine.pause()
        if engine.is_paused:
            engine.resume()
        assert engine.submit(NEEDLE, GREEDY).result(timeout=60).completions[0].finish_reason == "length"


def test_an_interrupt_in_the_middle_of_an_abort_loses_no_block(monkeypatch):
    with build() as engine:
        handle = engine.submit(CROWD[0], SamplingParams(max_tokens=50, ignore_eos=True))
        next(iter(handle))
        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "_release", interrupt_at(0, Scheduler._release))
            with pytest.raises(KeyboardInterrupt):
                handle.abort()
        assert not engine._loop.has_work("look")
        engine.core.scheduler.check()
        assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks


def test_an_interrupt_while_an_interrupt_is_dealt_with(monkeypatch):
    with build() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(EagerStep, "__call__", interrupt_at(2, EagerStep.__call__))
            patch.setattr(Scheduler, "_reset_blocks", interrupt_at(0, Scheduler._reset_blocks))
            with pytest.raises(KeyboardInterrupt):
                engine.generate_batch(CROWD[:12], SamplingParams(n=2, seed=1))
        assert tokens(engine.generate_batch([NEEDLE], NEEDLE_PARAMS)) == tokens(needle_alone())
        engine.core.scheduler.check()


def test_an_error_in_the_middle_of_a_batch_is_passed_on(monkeypatch):
    with build(make_model("llama", vocab_size=TEXT_VOCAB), tokenizer=tokenizer()) as engine:
        params = SamplingParams(stop="zzz", seed=1, max_tokens=30)
        expected = tokens(engine.generate_batch(["abc"] * 4, params))
        with monkeypatch.context() as patch:
            patch.setattr(StopStringChecker, "__call__", lambda self, token: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.generate_batch(["abc"] * 4, params)
        engine.core.scheduler.check()
        assert tokens(engine.generate_batch(["abc"] * 4, params)) == expected


_CTRL_C = """
import random, signal
from families import make_model
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams
config = EngineConfig(kv_cache_memory=300_000, block_size=4, max_num_batched_tokens=64)
model = make_model("llama")
prompts = [[1 + (i * j) % 127 for j in range(1, 20)] for i in range(40)]
params = SamplingParams(seed=1, max_tokens=100, stop_token_ids=(3,), n=2)
needle = SamplingParams(seed=2, max_tokens=20)
expected = [o.completions for o in RolloutEngine(model, config=config).generate_batch(prompts[:4], needle)]
engine = RolloutEngine(model, config=config)
signal.signal(signal.SIGALRM, signal.default_int_handler)
rng, interrupts = random.Random(0), 0
for _ in range(12):
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0001, 0.15))
        engine.generate_batch(prompts, params)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupts += 1
    engine.core.scheduler.check()
    stats = engine.stats()
    assert stats.num_free_kv_blocks == stats.num_kv_blocks and not engine.core.has_work
    again = [o.completions for o in engine.generate_batch(prompts[:4], needle)]
    assert [[c.token_ids for c in o] for o in again] == [[c.token_ids for c in o] for o in expected]
print(interrupts)
"""


def test_ctrl_c_at_any_moment():
    assert int(ranks.run_script(_CTRL_C)) >= 6


def test_a_real_sigint_in_this_process():
    with build() as engine:
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        step = engine.core.step
        calls = iter(range(100))

        def kill_in_step():
            if next(calls) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return step()

        engine.core.step = kill_in_step
        try:
            with pytest.raises(KeyboardInterrupt):
                engine.generate_batch(CROWD, SamplingParams(max_tokens=100))
        finally:
            signal.signal(signal.SIGINT, previous)
            engine.core.step = step
        engine.core.scheduler.check()
        assert tokens(engine.generate_batch([NEEDLE], NEEDLE_PARAMS)) == tokens(needle_alone())


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_window_that_runs_past_an_end_leaves_the_cached_prefix_alone(block_size):
    model = make_model("llama")
    config = EngineConfig(block_size=block_size, kv_cache_memory="4MiB")
    prompts = [[5, 6, 7], [9, 8, 7, 6], [3], [11, 12, 13, 14, 15]]
    lengths = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 30, 4, 6)]
    after = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs_mode="raw")
    with RolloutEngine(model, config=config) as engine:
        for output in engine.generate_batch(prompts, lengths):
            again = output.prompt_token_ids + output.completions[0].token_ids
            (output,) = engine.generate_batch([again], after)
            assert output.cached_tokens >= len(again) - 1 - block_size
            (completion,) = output.completions
            assert completion.token_ids == oracle.greedy(model, again, 12)
            expected = oracle.logprobs(model, again, completion.token_ids)
            torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4)


# -- in an update ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["auto", "float64"])
def test_an_interrupt_waits_for_the_end_of_an_update(dtype, monkeypatch):
    model = make_model("llama")
    with engine_on(model, dtype) as engine:
        assert assert_matches(engine, model) == {0}
        step(model)
        pull = type(engine._binding.source).pull

        def interrupted(*arguments):
            signal.raise_signal(signal.SIGINT)
            return pull(*arguments)

        monkeypatch.setattr(type(engine._binding.source), "pull", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.update_weights()
        monkeypatch.undo()
        assert engine.weight_version == 1 and engine.verify_weights().ok
        assert assert_matches(engine, model) == {1}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_does_not_wait():
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append(1)
        signal.raise_signal(signal.SIGINT)
        done.append(2)
    assert done == [1]
    with uninterrupted():
        pass


class InterruptedLock:
    """A lock that Ctrl-C reaches right after it was taken for the ``interrupted``-th time."""

    def __init__(self, interrupted: int) -> None:
        self.lock, self.left = threading.RLock(), interrupted

    def acquire(self) -> None:
        self.lock.acquire()
        self.left -= 1
        if not self.left:
            signal.raise_signal(signal.SIGINT)

    def release(self) -> None:
        self.lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


def test_an_interrupt_leaves_no_lock_of_progress_bars_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads have one lock for all bars, and tqdm takes it for one that is disabled, too."""
    with build() as engine:
        for number in itertools.count(1):
            monkeypatch.setattr(tqdm, "_lock", lock := InterruptedLock(number), raising=False)
            try:
                engine.generate_batch(CROWD[:2], GREEDY, progress_bar=True)
            except KeyboardInterrupt:
                with beside(lambda lock=lock: lock.lock.acquire(timeout=10)) as taken:
                    pass
                assert taken == [True]
            else:
                break
        assert number > 2
        monkeypatch.setattr(tqdm, "_lock", lock := InterruptedLock(1))
        engine.generate_batch(CROWD[:2], GREEDY)
        assert lock.left == 1


def test_an_interrupt_is_not_lost_where_what_it_waits_for_fails():
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted():
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_an_interrupt_waits_for_the_block_around_and_a_second_one_for_none() -> None:
    passed: list[str] = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
        passed.append("the inner one")
    assert passed == ["the inner one"]
    with pytest.raises(KeyboardInterrupt), uninterrupted(), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        passed.append("a second one")
    assert passed == ["the inner one"]
