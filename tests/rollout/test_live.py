"""Requests that live longer than a call: handles, interrupts, next turns."""

from __future__ import annotations

import copy
import gc
import pickle
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from family_fields import VOCAB
from live_setup import PROMPTS, at_rest, build, check_logprobs, long, nudge, same

from stoker.engine.request import Request
from stoker.kernels.errors import EngineStateError, InvalidRequestError, RequestFailedError, UnsupportedModelError
from stoker.rollout import progress as progress_module


def test_handles_give_what_a_batch_gives() -> None:
    with build() as engine:
        params = [long(i, n=1 + i % 2) for i in range(4)]
        batch = engine.generate_batch(PROMPTS, params)
        handles = [engine.submit(p, s) for p, s in zip(PROMPTS, params, strict=True)]
        assert {h.status for h in handles} == {"waiting"}
        last = handles[3].result()
        assert same([last], [batch[3]]) and handles[3].result() == last
        assert same([h.result() for h in handles], batch)
        assert {h.status for h in handles} == {"finished"}
        at_rest(engine)


def test_chunks_are_the_completion_in_pieces() -> None:
    with build() as engine:
        handle = engine.submit(PROMPTS[0], long(n=2))
        pieces: dict[int, list[Any]] = {0: [], 1: []}
        statuses = set()
        for chunk in handle:
            statuses.add(handle.status)
            pieces[chunk.index].append(chunk)
        assert statuses == {"running", "finished"}
        for completion in handle.result().completions:
            mine = pieces[completion.index]
            assert len(mine) > 5
            assert [t for c in mine for t in c.token_ids] == completion.token_ids
            assert [t for c in mine for t in c.logprobs] == completion.logprobs
            assert [t for c in mine for t in c.weight_versions] == completion.weight_versions
        assert not [c for c in handle if not c.token_ids]  # again, from the beginning
        assert sum(len(c.token_ids) for c in handle) == 48


def test_chunks_that_come_while_one_is_looked_at_are_not_lost() -> None:
    """By whoever steps the engine then; here it is the one who looks."""
    with build() as engine:
        handle, pieces = engine.submit(PROMPTS[0], long()), list[int]()
        for chunk in handle:
            pieces += chunk.token_ids
            handle.result()
        assert pieces == handle.result().completions[0].token_ids


def test_chunks_end_where_a_request_is_aborted() -> None:
    with build() as engine:
        handle, pieces = engine.submit(PROMPTS[0], long()), list[int]()
        for chunk in handle:
            pieces += chunk.token_ids
            handle.abort()
        assert pieces == handle.result().completions[0].token_ids and len(pieces) < 24
        other = engine.submit(PROMPTS[1], long())
        other.abort()
        assert list(other) == []
        at_rest(engine)


def test_a_handle_runs_until_the_last_of_its_samples_ends() -> None:
    with build() as engine:
        one, other = engine.generate_batch([PROMPTS[0]], long(n=2, logprobs=2))[0].completions
        stop = next(t for t in one.token_ids[1:8] if t not in other.token_ids)
        handle = engine.submit(PROMPTS[0], long(n=2, logprobs=2, stop_token_ids=[stop]))
        seen = [(handle.status, chunk) for chunk in handle]
        alone = [status for status, _ in seen[-5:]]
        assert alone == ["running"] * 4 + ["finished"]
        ended, whole = handle.result().completions
        assert len(ended.token_ids) < 9 and whole.token_ids == other.token_ids
        assert [t for _, c in seen if c.index == 1 for t in c.top_logprobs or ()] == whole.top_logprobs


@pytest.mark.parametrize(("share", "enough"), [(1e-12, 1), (0.25, 1), (0.5, 2), (0.51, 3), (1, 4)])
def test_waiting_for_a_share_waits_for_one_at_least(share: float, enough: int) -> None:
    with build() as engine:
        handles = [engine.submit(prompt, long(max_tokens=9 * (i + 1))) for i, prompt in enumerate(PROMPTS[:4])]
        finished, others = engine.wait(handles, share=share)
        assert len(finished) == enough and finished + others == handles
        assert engine.wait([], share=share) == ([], [])


def test_polls_are_the_completion_in_pieces() -> None:
    """And step nothing: what there is comes of whoever steps."""
    with build() as engine:
        (expected,) = engine.generate_batch([PROMPTS[1]], long(n=2))
        handles = [engine.submit(PROMPTS[1], long(n=2)) for _ in range(2)]
        assert handles[0].poll() == [] and handles[0].status == "waiting"
        pieces: list[Any] = []
        while not handles[0].done:
            engine.wait(handles[1:], share=0)
            last = handles[0].done
            pieces += handles[0].poll()
        assert last and handles[0].poll() == [] and len(pieces) > 4
        for completion in expected.completions:
            own = [piece for piece in pieces if piece.index == completion.index]
            assert [t for piece in own for t in piece.token_ids] == completion.token_ids
            assert [p for piece in own for p in piece.logprobs] == pytest.approx(completion.logprobs, abs=2e-5)
        assert [t for piece in handles[0] for t in piece.token_ids if piece.index == 0] == expected.completions[
            0
        ].token_ids


def test_a_time_out_leaves_the_request_where_it_is() -> None:
    with build() as engine:
        expected = engine.generate_batch(PROMPTS[:1], long())[0]
        handle = engine.submit(PROMPTS[0], long())
        for timeout in (0, np.float32(0), Fraction(0)):
            with pytest.raises(
                TimeoutError, match=r"^not finished after 0(\.0)? s: call result\(\) again, or abort\(\)"
            ):
                handle.result(timeout=timeout)  # type: ignore[arg-type]
        assert handle.status == "running"
        assert same([handle.result(timeout=10**400)], [expected])  # as good as no limit


def test_aborted_requests_keep_their_tokens_and_give_back_their_blocks() -> None:
    with build() as engine:
        whole = engine.generate_batch(PROMPTS[:1], long())[0].completions[0]
        running, other, waiting = (engine.submit(p, long()) for p in (PROMPTS[0], PROMPTS[1], PROMPTS[2]))
        next(iter(running))
        waiting.abort()
        running.abort()
        running.abort()
        assert waiting.result().completions[0].finish_reason == "abort"
        completion = running.result().completions[0]
        assert completion.finish_reason == "abort" and 0 < len(completion.token_ids) < 24
        assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
        assert other.result().completions[0].finish_reason == "length"
        never = engine.submit([7, *PROMPTS[0]], long(prompt_logprobs=0))
        never.abort()
        assert never.result().prompt_logprobs is None
        at_rest(engine)


def test_a_handle_that_is_dropped_ends_its_request() -> None:
    with build() as engine:
        handle = engine.submit(PROMPTS[0], long(max_tokens=100))
        next(iter(handle))
        requests = handle._requests
        del handle
        gc.collect()
        engine.generate_batch(PROMPTS[1:2], long())
        assert [r.finish_reason for r in requests] == ["abort"]
        at_rest(engine)


def test_a_handle_that_was_dropped_holds_no_block() -> None:
    with build() as engine:
        handle = engine.submit(PROMPTS[3], long(max_tokens=100))
        next(iter(handle))
        stats = engine.stats()
        assert stats.num_free_kv_blocks < stats.num_kv_blocks
        del handle
        gc.collect()
        stats = engine.stats()
        assert stats.num_free_kv_blocks == stats.num_kv_blocks


def test_a_handle_that_was_dropped_stands_in_nobodys_way() -> None:
    """As one that a tool's exception leaves behind."""
    with build() as engine:

        def drop() -> None:
            with pytest.raises(ZeroDivisionError):
                for _ in engine.submit(PROMPTS[3], long(max_tokens=100)):
                    raise ZeroDivisionError

        drop()
        assert engine.update_weights() == 1
        at_rest(engine)
        drop()
        engine.sleep()
        engine.wake_up()
        drop()
        nudge(engine)
        output = engine.submit(PROMPTS[3], long(3)).result()
        assert output.cached_tokens == 0 and set(output.completions[0].weight_versions) == {2}
        check_logprobs(engine, PROMPTS[3], output.completions[0])


def test_asleep_with_requests_on_the_way() -> None:
    with build() as engine:
        expected = engine.generate_batch(PROMPTS, long())
        handles = [engine.submit(p, long()) for p in PROMPTS]
        next(iter(handles[2]))
        with pytest.raises(EngineStateError, match="cannot sleep while requests are under way"):
            engine.sleep()
        engine.pause()
        engine.sleep()
        assert engine.stats().kv_cache_bytes == 0
        engine.wake_up()
        engine.resume()
        for handle, output in zip(handles, expected, strict=True):
            assert handle.result().completions[0].token_ids == output.completions[0].token_ids
        at_rest(engine)


def test_a_next_turn_computes_what_is_new() -> None:
    with build() as engine:
        first = engine.submit([3] * 21, long(max_tokens=16)).result()
        turn = first.prompt_token_ids + first.completions[0].token_ids + [7, 7, 7]
        second = engine.submit(turn, long()).result()
        assert len(turn) - second.cached_tokens <= 3 + 4 + 1  # what was appended, a block, and the token sampled last
        check_logprobs(engine, turn, second.completions[0])


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v2"])  # fused layers, sinks and windows, latents
def test_prompts_that_begin_alike_are_computed_once_though_submitted_apart(family: str) -> None:
    """In one step: what reads a block runs beside what writes it."""
    with build(family) as engine:
        prompts = [[7] * 5 + [9] * 9, [7] * 5 + [9] * 7, [8] * 3, [7] * 5 + [9] * 9]
        handles = [engine.submit(p, long(i)) for i, p in enumerate(prompts)]
        outputs = [h.result() for h in handles]
        assert [o.cached_tokens for o in outputs] == [0, 8, 0, 12]
        for output in outputs:
            check_logprobs(engine, output.prompt_token_ids, output.completions[0])
        at_rest(engine)


def test_an_interrupt_between_two_steps_ends_the_requests_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))  # before the batch, before its first step, and then between two

    def strike() -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt

    with build() as engine:
        other = engine.submit(PROMPTS[0], long())
        with monkeypatch.context() as patch:
            patch.setattr(engine._loop, "check_not_paused", strike)
            with pytest.raises(KeyboardInterrupt):
                engine.generate_batch(PROMPTS[1:], long())
        assert engine.core.under_way == other._requests
        check_logprobs(engine, PROMPTS[0], other.result().completions[0])
        at_rest(engine)


def test_a_failed_step_is_told_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    with build() as engine:
        handle = engine.submit(PROMPTS[0], long())
        next(iter(handle))
        with monkeypatch.context() as patch:
            patch.setattr(engine.core.inputs, "fill", lambda plan: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.generate_batch(PROMPTS[1:], long())
        output = handle.result()
        assert output.completions[0].finish_reason == "abort" and isinstance(output.error, RequestFailedError)
        assert "submit it again" in str(output.error)
        at_rest(engine)
        assert engine.submit(PROMPTS[0], long()).result().error is None


def test_bad_submissions() -> None:
    with build() as engine:
        for prompt, message in (([], "empty"), ([VOCAB], "from 0 to 127"), ([1] * 128, "128")):
            with pytest.raises(InvalidRequestError, match=message):
                engine.submit(prompt)
        with pytest.raises(InvalidRequestError, match="SamplingParams"):
            engine.submit([1], {"n": 1})  # type: ignore[arg-type]
        engine.sleep()
        with pytest.raises(EngineStateError, match="asleep"):
            engine.submit([1])
        engine.wake_up()
        handle = engine.submit([1], long())
        at_rest_after = engine.close
    at_rest_after()
    assert handle.result().completions[0].finish_reason == "abort"
    with pytest.raises(EngineStateError, match="closed"):
        engine.submit([1])


def test_what_is_no_adapter_ends_nobodys_request() -> None:
    with build() as engine:
        handle = engine.submit(PROMPTS[0], long())
        next(iter(handle))
        for source in (({}, 5), ({1: 2}, {}), (3, 4)):
            with pytest.raises(Exception):  # noqa: B017 - whatever it is
                engine.load_adapter("more", source)
        for name in ("more", [3], None):
            with pytest.raises(InvalidRequestError, match="is not known"):
                engine.unload_adapter(name)  # type: ignore[arg-type]
        assert handle.result().error is None
        at_rest(engine)


def test_what_is_refused_between_two_steps_ends_nobodys_request() -> None:
    """As images that the model makes nothing of, or an adapter that they cannot go through, or Ctrl-C while they are read."""

    def refuse(error: type[BaseException]) -> None:
        raise error("no")

    with build() as engine:
        handle = engine.submit(PROMPTS[0], long())
        next(iter(handle))
        for kind in (InvalidRequestError, UnsupportedModelError, KeyboardInterrupt):
            with pytest.raises(kind, match="no"):
                engine._loop.attempt("read images", partial(refuse, kind))
        assert handle.result().error is None
        at_rest(engine)


@pytest.mark.parametrize("call", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_of_a_handle(call: Callable[[Any], Any]) -> None:
    """A copy would lose its request with the handle it was made of."""
    with build() as engine:
        handle = engine.submit(PROMPTS[0], long())
        with pytest.raises(EngineStateError, match=r"^a handle cannot be copied, .*: send what result\(\) returns"):
            call(handle)
        assert len(handle.result().completions[0].token_ids) == 24
        at_rest(engine)


@pytest.mark.parametrize(("dtype", "kind"), [("auto", "aliased"), ("float64", "mirror")])
def test_what_engines_and_handles_show(dtype: str, kind: str) -> None:
    with build(dtype=dtype) as engine:
        handle = engine.submit(PROMPTS[0], long(n=2))
        assert repr(handle) == "RolloutHandle(waiting, 0, 0 tokens)"
        next(iter(handle))
        assert repr(handle).startswith("RolloutHandle(running, ")
        handle.result()
        assert repr(handle) == "RolloutHandle(finished, 24, 24 tokens)"
        assert repr(engine) == f"RolloutEngine(LlamaForCausalLM, {kind}, cpu, weight version 0)"
        engine.update_weights()
        engine.pause()
        engine.sleep()
        shown = rf"RolloutEngine\(LlamaForCausalLM, {kind}, cpu, weight version 1, asleep, paused \d+ s ago by thread MainThread\)"
        assert re.fullmatch(shown, repr(engine))
    assert repr(engine) == f"RolloutEngine(LlamaForCausalLM, {kind}, cpu, weight version 1, closed)"


def test_requests_that_ended_need_no_garbage_collector() -> None:
    def kept() -> int:
        return sum(isinstance(one, Request) for one in gc.get_objects())

    with build() as engine:
        gc.collect()
        gc.disable()
        try:
            before = kept()
            engine.generate_batch(PROMPTS * 2, long(n=2, prompt_logprobs=1))
            engine.score(PROMPTS)
            engine.submit(PROMPTS[0], long()).result()
            engine.submit(PROMPTS[0], long()).abort()
            engine.stats()  # ends what dropped handles held
            assert kept() == before
        finally:
            gc.enable()


def test_a_progress_bar_counts_each_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[float] = []

    class Noted(progress_module.tqdm):  # type: ignore[type-arg]
        def update(self, n: float | None = 1) -> bool | None:
            counts.append(n or 0)
            return super().update(n)

    monkeypatch.setattr(progress_module, "tqdm", Noted)
    with build() as engine:
        engine.generate_batch(PROMPTS, [long(n=2, max_tokens=count) for count in (2, 9, 14, 20)], progress_bar=True)
    assert sum(counts) == 8
