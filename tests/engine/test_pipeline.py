"""The loop over a device that works by itself: plans are launched before earlier results are read, and steps replayed."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import oracle
import pytest
import torch
from families import make_model
from pretend_device import STATIC, PretendDevice, build, close, params, prompts

from stoker.engine.device import CpuRuntime
from stoker.engine.graphs import GraphStep
from stoker.engine.runner import EagerStep, Pending
from stoker.engine.sampler import PenaltyState
from stoker.kernels.errors import EngineStateError
from stoker.kernels.ops import REFERENCE
from stoker.rollout import RolloutBatch, SamplingParams


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {(4, 16)}),
        ("deepseek_v3", {(4, 12)}),
        ("gemma4", {(4, 16), (4, 24)}),
        ("laguna", {(4, 16), (6, 16)}),
    ],
)
def test_the_memory_of_attention_is_kept_free_of_keys_and_values(
    family: str, sizes: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """sizes: query heads and dimensions of a value, for each of which there is memory that layers of that form share."""
    free = 10**6
    monkeypatch.setattr(PretendDevice, "free_memory", lambda self: free)
    asked = []

    def workspace(*size: int) -> int:
        asked.append(size)
        return 70_000

    for ops, taken in ((STATIC, 0), (replace(STATIC, attention_workspace=workspace), 70_000 * len(sizes))):
        with build(family, ops, kv_cache_memory="auto", max_num_seqs=64) as engine:
            left = 0.3 * free - taken - engine.stats().kv_cache_bytes
            assert 0 <= left < engine.stats().kv_block_bytes
            rows = min(64, int(0.3 * free) // engine.stats().kv_block_bytes)  # more could never run
    assert sorted(asked) == [(rows, 24, 4, *size) for size in sorted(sizes)]


@pytest.mark.parametrize(
    ("family", "layers"), [("qwen3_5", (4, 16, True)), ("falcon_h1", (4, 8, False)), ("lfm2", None)]
)
def test_the_memory_of_recurrences_is_kept_free_of_keys_and_values(
    family: str, layers: tuple[int, int, bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much as one layer takes: they do so one after the other."""
    free = 10**6
    monkeypatch.setattr(PretendDevice, "free_memory", lambda self: free)
    asked = set()

    def workspace(tokens: int, heads: int, key_dim: int, dtype: torch.dtype, *, rule: bool) -> int:
        asked.add((tokens, heads, key_dim, dtype, rule))
        return 70_000

    for ops, taken in ((STATIC, 0), (replace(STATIC, recurrent_workspace=workspace), 70_000 if layers else 0)):
        with build(family, ops, kv_cache_memory="auto", max_num_seqs=8, max_model_len=256) as engine:
            left = 0.3 * free - taken - engine.stats().kv_cache_bytes
            assert 0 <= left < engine.stats().kv_block_bytes
            tokens = engine.config.max_num_batched_tokens
    assert asked == ({(tokens, *layers[:2], torch.float32, layers[2])} if layers else set())


@pytest.mark.parametrize(("free", "most"), [(10**8, 64), (10**7, 64), (3 * 10**6, 32), (6 * 10**5, 1)])
def test_states_leave_keys_and_values_half_of_the_memory(
    free: int, most: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PretendDevice, "free_memory", lambda self: free)
    with build("qwen3_5", kv_cache_memory="auto", max_num_seqs=64) as engine:
        stats = engine.stats()
        assert engine.config.max_num_seqs == engine.core.scheduler.max_num_seqs == most
        if most > 1:
            assert 2 * stats.recurrent_state_bytes <= 0.3 * free and stats.kv_cache_bytes <= 0.3 * free
        several = prompts(5), params(5)
        close(engine.generate_batch(*several), engine.generate_batch(*several))
    assert ("max_num_seqs is" in caplog.text) == (most < 64)


def test_states_take_what_they_need_of_memory_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little is free: that says how much an "auto" cache may take."""
    monkeypatch.setattr(PretendDevice, "free_memory", lambda self: 10**5)
    with build("qwen3_5", kv_cache_memory="8MiB", max_num_seqs=64) as engine:
        assert engine.config.max_num_seqs == engine.core.scheduler.max_num_seqs == 64


def test_what_torch_holds_and_nobody_uses_is_free_for_states(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10**5]
    monkeypatch.setattr(PretendDevice, "free_memory", lambda self: free[0])
    monkeypatch.setattr(PretendDevice, "release_memory", lambda self: free.insert(0, 10**8))
    with build("qwen3_5", kv_cache_memory="auto", max_num_seqs=64) as engine:
        assert engine.config.max_num_seqs == 64


@cache
def one_step_at_a_time(family: str) -> tuple[RolloutBatch, int]:
    """What 15 requests give, for 12 of which there are rows, and the memory in which some of them are preempted."""
    with build(family, runtime=CpuRuntime) as plain:
        expected = plain.generate_batch(prompts(15), params(15))
        few = 16 if plain.core.scheduler.tables.windowed else 40  # blocks
        return expected, few * plain.stats().kv_block_bytes + plain.stats().recurrent_state_bytes


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "deepseek_v3", "qwen3_5", "falcon_h1"])
@pytest.mark.parametrize("memory", ["4MiB", None])
def test_launched_ahead_and_replayed_gives_what_one_step_at_a_time_gives(family: str, memory: str | None) -> None:
    expected, tight = one_step_at_a_time(family)
    with build(family, kv_cache_memory=memory or tight, max_num_batched_tokens=24) as engine:
        assert isinstance(engine.core.runner, GraphStep)
        for _ in range(2):
            close(engine.generate_batch(prompts(15), params(15)), expected)
            engine.core.scheduler.check()
            assert not engine.core.has_work
        assert (engine.stats().num_preemptions > 0) == (memory is None)
        assert engine.core.runner._graphs and all(engine.core.runner._graphs.values())


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_plan_that_outlives_its_requests_is_in_nobody_s_way(ahead: int) -> None:
    """The last requests end by a stop token, which is known one plan late: that plan still runs when they are through."""
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompt = [3, 1, 4, 1, 5]
    with build(runtime=lambda device: PretendDevice(device, ahead=ahead)) as engine:  # type: ignore[arg-type]
        free = engine.stats().num_free_kv_blocks
        (output,) = engine.generate_batch([prompt], greedy)
        tokens = output.completions[0].token_ids
        at = next(i for i in range(4, 30) if tokens[i] not in tokens[:i])
        until = replace(greedy, stop_token_ids=[tokens[at]])

        def roll_out() -> None:
            (found,) = engine.generate_batch([prompt], until)
            assert found.completions[0].token_ids == tokens[: at + 1]
            assert found.completions[0].finish_reason == "stop"
            assert engine.core._launched, "nothing outlived the request: the test shows nothing"
            assert engine.stats().num_free_kv_blocks == free

        roll_out()
        assert engine.verify_weights().ok
        roll_out()
        assert engine.update_weights() == 1
        roll_out()
        for level in (1, 2):
            engine.sleep(level)
            assert not engine.core._launched, "it runs on memory that was given back"
            engine.wake_up()
            roll_out()
        with engine.sleeping():
            pass
        roll_out()
        engine.pause("wait")
        engine.resume()
        handle = engine.submit(prompt, until)
        roll_out()
        assert handle.result().completions[0].token_ids == tokens[: at + 1]
        roll_out()


def test_nothing_runs_during_a_pause() -> None:
    with build(ops=REFERENCE, runtime=lambda device: PretendDevice(device, ahead=2)) as engine:  # type: ignore[arg-type]
        handle = engine.submit(prompts(1)[0], SamplingParams(max_tokens=40, ignore_eos=True))
        with pytest.raises(TimeoutError):
            handle.result(timeout=0)
        assert engine.core._launched, "nothing was launched ahead: the test shows nothing"
        engine.pause()
        assert not engine.core._launched
        engine.resume()
        assert len(handle.result().completions[0].token_ids) == 40


def test_what_was_launched_before_weights_changed_is_of_the_weights_before() -> None:
    """Also where another call notices them, with nobody having paused."""
    prompt, model = prompts(1)[0], make_model("llama")
    with build(model, ops=REFERENCE, runtime=lambda device: PretendDevice(device, ahead=2)) as engine:  # type: ignore[arg-type]
        handle = engine.submit(prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        with pytest.raises(TimeoutError):
            handle.result(timeout=0)
        assert engine.core._launched, "nothing was launched ahead: the test shows nothing"
        before = copy.deepcopy(model)
        with torch.no_grad():
            model.lm_head.weight.neg_()
        engine.generate_batch([[5, 4, 3]], SamplingParams(max_tokens=2))
        (completion,) = handle.result().completions
        at = completion.weight_versions.index(1)
        assert completion.weight_versions == [0] * at + [1] * (40 - at) and at > 0
        for of, first, last in ((before, 0, at), (model, at, 40)):
            given, sampled = prompt + completion.token_ids[:first], completion.token_ids[first:last]
            expected = oracle.logprobs(of, given, sampled).float()
            torch.testing.assert_close(torch.tensor(completion.logprobs[first:last]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_ahead_without_graphs(ahead: int) -> None:
    several = (prompts(20), params(20))
    with build(ops=REFERENCE, runtime=CpuRuntime) as plain:
        expected = plain.generate_batch(*several)
    with build(ops=REFERENCE, runtime=lambda device: PretendDevice(device, ahead=ahead)) as engine:  # type: ignore[arg-type]
        assert not isinstance(engine.core.runner, GraphStep)  # the reference's plans hold what they saw on the host
        close(engine.generate_batch(*several), expected)


def test_whoever_steps_may_do_so_in_inference_mode() -> None:
    """What is made then, static outputs and penalties' counts, is written to outside of it too."""
    several = (prompts(6), params(6))
    with build(runtime=CpuRuntime) as plain:
        expected = plain.generate_batch(*several)
    with build() as engine:
        with torch.inference_mode():
            for handle in [engine.submit(*each) for each in zip(*several, strict=True)]:
                handle.result()
        close(engine.generate_batch(*several), expected)


def test_a_window_is_launched_before_the_one_before_it_is_read() -> None:
    with build() as engine:
        core, under_way = engine.core, []
        original = type(core)._launch

        def launch(self: Any, plan: Any) -> Any:
            under_way.append(len(self._launched))
            return original(self, plan)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(core), "_launch", launch)
            engine.generate_batch([[1, 2, 3]], SamplingParams(max_tokens=20, ignore_eos=True, seed=1))
        assert under_way == [0] + [1] * (len(under_way) - 1) and len(under_way) > 3


def test_an_interrupt_drops_what_is_under_way() -> None:
    with build() as engine:
        with pytest.MonkeyPatch.context() as patch:
            calls = iter(range(100))

            def interrupted(self: Any, *arguments: Any) -> None:
                if next(calls) == 3:
                    raise KeyboardInterrupt
                original(self, *arguments)

            original = PenaltyState.add
            patch.setattr(PenaltyState, "add", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.generate_batch(prompts(8), SamplingParams(seed=1, max_tokens=20, repetition_penalty=1.2))
        engine.core.scheduler.check()
        assert not engine.core.has_work and engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks
        several = (prompts(6), params(6))
        with build(runtime=CpuRuntime) as plain:
            close(engine.generate_batch(*several), plain.generate_batch(*several))


@pytest.mark.parametrize("where", ["launch", "read"])
def test_a_device_that_fails_is_told_with_the_step_and_ends_every_request(where: str) -> None:
    def fail(*_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with build(use_graphs=False) as engine:
        handle = engine.submit([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True))
        next(iter(handle))
        with pytest.MonkeyPatch.context() as patch:
            owner, name = (EagerStep, "__call__") if where == "launch" else (Pending, "read")
            patch.setattr(owner, name, fail)
            with pytest.raises(
                EngineStateError, match=r"failed at or before step \d+, of 1 rows and 1 tokens: CUDA error.*anew"
            ):
                handle.result()
        assert handle.result().completions[0].finish_reason == "abort"
