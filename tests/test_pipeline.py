"""The loop of a device that works by itself: plans launched ahead of what was read, and decode steps replayed.

A CPU that claims to be such a device runs it here. A replay calls what was captured again, with the tensors it was
captured with: whatever a step takes from the host, or from a tensor that is not static, is then stale and shows.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import VOCAB, make_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stoker.engine.device import CpuRuntime, CudaRuntime
from stoker.engine.graphs import GraphStep
from stoker.engine.runner import EagerStep, Pending
from stoker.engine.sampler import PenaltyState
from stoker.kernels import linear
from stoker.kernels.errors import EngineStateError, InvalidConfigError, UnsupportedModelError
from stoker.kernels.ops import REFERENCE, Ops, ops_for
from stoker.kernels.reference import attention
from stoker.kernels.triton_ops import DETERMINISTIC, TRITON
from stoker.rollout import EngineConfig, RolloutBatch, RolloutEngine, SamplingParams, binding
from stoker.rollout import engine as engine_module


@dataclass(frozen=True)
class _StaticPlan:
    """Decode rows over the whole width of their tables; nothing in it but static tensors."""

    block_tables: Tensor
    seq_lens: Tensor

    def next_step(self) -> None:
        pass


def plan_attention(
    query_lens: Sequence[int], key_lens: Sequence[int], block_tables: Tensor, seq_lens: Tensor, **options: Any
) -> Any:
    if all(n == 1 for n in query_lens):
        return _StaticPlan(block_tables, seq_lens)
    return attention.plan_attention(query_lens, key_lens, block_tables, seq_lens, **options)


def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: Any, **options: Any) -> Tensor:
    if not isinstance(plan, _StaticPlan):
        return attention.paged_attention(query, key_cache, value_cache, plan, **options)
    rows, width = plan.block_tables.shape[0], plan.block_tables.shape[1] * key_cache.shape[1]
    last = plan.seq_lens[:, None] - 1
    at = torch.arange(width)
    group = query.shape[1] // key_cache.shape[2]
    key, value = (
        cache[plan.block_tables].view(rows, width, *cache.shape[2:]).masked_fill((at > last)[:, :, None, None], 0)
        for cache in (key_cache, value_cache)
    )
    key, value = (t.transpose(1, 2).repeat_interleave(group, dim=1) for t in (key, value))
    hidden = options["visibility"].hidden(last, at)[:, None, None]
    scores = (query[:, :, None] @ key.transpose(-1, -2)) * options["scale"]
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value)[:, :, 0]


STATIC = replace(REFERENCE, plan_attention=plan_attention, paged_attention=paged_attention, static_plans=True)


@dataclass(frozen=True)
class PretendDevice(CpuRuntime):
    ahead: int = 1
    graphs: bool = True

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            with torch.inference_mode():
                body()

        return replay


@contextmanager
def build(
    family: str = "llama",
    ops: Ops = STATIC,
    runtime: type[CpuRuntime] = PretendDevice,
    num_layers: int | None = None,
    **fields: Any,
) -> Iterator[RolloutEngine]:
    settings = {"block_size": 4, "kv_cache_memory": "4MiB", "max_num_seqs": 12, "max_model_len": 96, "decode_window": 4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "runtime_for", runtime)
        patch.setattr(binding, "ops_for", lambda *_, **__: ops)
        model = make_model(family) if num_layers is None else make_model(family, num_hidden_layers=num_layers)
        with RolloutEngine(model, config=EngineConfig(**(settings | fields))) as engine:
            yield engine


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def params(count: int) -> list[SamplingParams]:
    """Every way of sampling, and lengths that differ."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0},
        {"top_k": 5, "top_p": 0.9},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"stop_token_ids": list(range(0, VOCAB, 3)), "min_tokens": 5},
        {"stop_token_ids": list(range(0, VOCAB, 5)), "logprobs": 3},
        {"logprobs_mode": "raw", "temperature": 0.7},
        {"n": 3, "stop_token_ids": [1, 2, 3, 4, 5, 6, 7]},
    ]
    return [
        SamplingParams(**kinds[i % len(kinds)], max_tokens=6 + (i * 7) % 23, seed=i, ignore_eos=i % 2 == 0)
        for i in range(count)
    ]


def results(batch: RolloutBatch) -> list[Any]:
    batch.raise_for_errors()
    fields = ("token_ids", "finish_reason", "stop_reason", "weight_versions")
    return [[[getattr(c, f) for f in fields] for c in output.completions] for output in batch]


def close(a: RolloutBatch, b: RolloutBatch) -> None:
    assert results(a) == results(b)
    for one, other in zip(a, b, strict=True):
        for c, d in zip(one.completions, other.completions, strict=True):
            torch.testing.assert_close(torch.tensor(c.logprobs), torch.tensor(d.logprobs), rtol=0, atol=2e-5)
            for x, y in zip(c.top_logprobs or [], d.top_logprobs or [], strict=True):
                assert x == pytest.approx(y, abs=2e-5)


@pytest.mark.parametrize(("family", "heads", "value_dim"), [("llama", 4, 16), ("deepseek_v3", 4, 12)])
def test_the_memory_of_attention_is_kept_free_of_keys_and_values(
    family: str, heads: int, value_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 10**6
    monkeypatch.setattr(PretendDevice, "free_memory", lambda self: free)
    asked = []

    def workspace(*size: int) -> int:
        asked.append(size)
        return 70_000

    for ops, taken in ((STATIC, 0), (replace(STATIC, attention_workspace=workspace), 70_000)):
        with build(family, ops, kv_cache_memory="auto", max_num_seqs=64) as engine:
            left = 0.3 * free - taken - engine.stats().kv_cache_bytes
            assert 0 <= left < engine.stats().kv_block_bytes
    assert asked == [(64, 24, 4, heads, value_dim)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "olmo2", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("memory", ["4MiB", None])
def test_launched_ahead_and_replayed_gives_what_one_step_at_a_time_gives(family: str, memory: str | None) -> None:
    several = (prompts(25), params(25))
    with build(family, runtime=CpuRuntime) as plain:
        expected = plain.generate_batch(*several)
        tight = 40 * plain.stats().kv_block_bytes  # requests are preempted
    with build(family, kv_cache_memory=memory or tight, max_num_batched_tokens=24) as engine:
        assert isinstance(engine.core.runner, GraphStep)
        for _ in range(2):
            close(engine.generate_batch(*several), expected)
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


def test_a_bucket_is_captured_once_and_never_for_mixed_batches() -> None:
    captured: list[int] = []

    @dataclass(frozen=True)
    class Counting(PretendDevice):
        def capture(self, body: Callable[[], None]) -> Callable[[], None]:
            captured.append(1)
            return super().capture(body)

    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with build(runtime=Counting) as engine:
        for _ in range(3):
            engine.generate_batch(prompts(4), greedy)
        assert len(captured) == 1  # four rows
        engine.generate_batch(prompts(2), greedy)
        assert len(captured) == 2
        engine.update_weights()
        engine.generate_batch(prompts(4), greedy)
        assert len(captured) == 2  # the weights are where they were


def test_a_step_that_cannot_be_captured_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    @dataclass(frozen=True)
    class Refusing(PretendDevice):
        def capture(self, body: Callable[[], None]) -> Callable[[], None]:
            raise torch.OutOfMemoryError("no memory left")

    several = (prompts(6), params(6))
    with build(runtime=CpuRuntime) as plain:
        expected = plain.generate_batch(*several)
    with build(runtime=Refusing) as engine:
        for _ in range(2):
            close(engine.generate_batch(*several), expected)
        warnings = [r.getMessage() for r in caplog.records if "without a CUDA graph" in r.getMessage()]
        assert len(warnings) == len(engine.core.runner._graphs) == len(set(map(str, engine.core.runner._graphs)))  # type: ignore[attr-defined]


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, noted: Callable[[str], Callable[..., None]]) -> None:
    """As much of ``torch.cuda`` as a capture calls."""
    stream, streams = SimpleNamespace(wait_stream=lambda other: None), iter(range(1))
    graph = SimpleNamespace(capture_begin=noted("begin"), capture_end=noted("end"), replay=noted("replay"))
    for name, value in {
        "graph_pool_handle": object,
        "CUDAGraph": lambda: graph,
        "current_stream": lambda device: stream,
        "Stream": lambda device: next(streams) or stream,  # one, for it may be a stream that somebody uses
        "stream": lambda chosen: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", noted("clear"), raising=False)


@pytest.mark.parametrize("error", [None, RuntimeError("not while capturing")])
def test_a_capture_leaves_nothing_of_cublas_or_of_inference_mode(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch keeps from a capture would be written to, or given back, long after it."""
    done: list[tuple[str, bool]] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda *_, **__: done.append((name, torch.is_inference_mode_enabled()))

    def body() -> None:
        noted("body")()
        if error is not None:
            raise error

    pretend_cuda(monkeypatch, noted)
    with torch.inference_mode(), nullcontext() if error is None else pytest.raises(RuntimeError, match="capturing"):
        runtime = CudaRuntime(torch.device("cuda"))
        runtime.capture(body)
        runtime.capture(noted("body"))
    if error is None:
        assert done[5:] == done[:5]
    assert done[:5] == [("clear", True), ("begin", False), ("body", True), ("end", True), ("clear", True)]


@pytest.mark.parametrize("error", [None, RuntimeError("not while capturing")])
def test_no_garbage_is_collected_inside_a_capture(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finalisers, of a KV cache that is unmapped above all, may synchronise, and no capture survives that."""
    done: list[str] = []

    class Cycle:
        def __init__(self) -> None:
            self.own = self
            weakref.finalize(self, done.append, "finalised").atexit = False

    def body() -> None:
        Cycle()
        kept = [[i] for i in range(1000)]  # any of them could start a collection
        done.append(f"body {len(kept)}")
        if error is not None:
            raise error

    pretend_cuda(monkeypatch, lambda name: lambda *_, **__: done.append(name))
    runtime, threshold = CudaRuntime(torch.device("cuda")), gc.get_threshold()
    for enabled in (False, True):
        done.clear()
        try:
            gc.set_threshold(10)
            (gc.enable if enabled else gc.disable)()
            with nullcontext() if error is None else pytest.raises(RuntimeError, match="capturing"):
                runtime.capture(body)
            assert gc.isenabled() == enabled
        finally:
            gc.set_threshold(*threshold)
            gc.enable()
        gc.collect()
        assert done[:3] == ["clear", "begin", "body 1000"] and done.index("finalised") > done.index("end")


@pytest.mark.parametrize("known", [False, True], ids=["as torch 2.11", "as later ones"])
@pytest.mark.parametrize("where", ["begin", "body", "end"])
def test_a_capture_that_cannot_be_ended_is_over_for_the_allocator_too(
    where: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its share of the pool is given back, by torch or here, or the pool would stay for ever."""

    def failing(name: str) -> Callable[..., None]:
        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError(name)

        return fail if name in ("end", where) else lambda *_, **__: None

    def end_allocation(*args: Any) -> None:
        done.append(("end", *args))
        if known:
            raise RuntimeError("not currently recording")

    def body() -> None:
        if where == "body":
            raise RuntimeError("body")

    done: list[Any] = []
    pretend_cuda(monkeypatch, failing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocation, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *args: done.append(("release", *args)), raising=False)
    pools = iter([(0, 7), (0, 8)])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    runtime = CudaRuntime(torch.device("cuda"))
    with pytest.raises(RuntimeError, match=f"^{where}$"):
        runtime.capture(body)
    # What still takes the capture to be under way looks at its graph, and lets no other one have its pool.
    assert len(runtime._abandoned) == (not known) and runtime._pool == ([(0, 7)] if known else [])
    assert done == [("end", 3, (0, 7))] + ([] if known else [("release", 3, (0, 7))])


class _Operations(TorchDispatchMode):
    """Torch's operations by name and dtypes, and those of the table by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [str(t.dtype) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self.seen.add((str(func), *given))
        return func(*args, **(kwargs or {}))

    def noted(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.seen.add((name,))
            return operation(*args, **options)

        return call


@pytest.mark.parametrize("window", [1, 4])
def test_nothing_runs_for_the_first_time_when_it_is_captured(window: int) -> None:
    """Code that is loaded during a capture may end it."""
    captured: list[set[tuple[str, ...]]] = []  # and the operations before it

    class Device(PretendDevice):
        def capture(self, body: Callable[[], None]) -> Callable[[], None]:
            captured.append(set(operations.seen))
            return super().capture(body)

    operations = _Operations()
    noted = {
        f.name: operations.noted(f.name, getattr(STATIC, f.name))
        for f in fields(Ops)
        if callable(getattr(STATIC, f.name))
    }
    with build(ops=replace(STATIC, **noted), runtime=Device, decode_window=window) as engine, operations:
        for settings in ({}, {"logprobs": 2}):
            # One token with the prompt, and a window of decode steps, after which it is captured.
            engine.generate_batch([[1, 2, 3]], SamplingParams(max_tokens=1 + window, ignore_eos=True, **settings))
            *_, graph = engine.core.runner._graphs.values()  # type: ignore[attr-defined]
            graph.step.zero_()
            operations.seen.clear()
            graph.replay()
            assert ("advance",) in operations.seen
            assert operations.seen <= captured[-1]
    assert len(captured) == 2


def test_graphs_are_forgotten_with_the_tensors_they_read() -> None:
    with build() as engine:
        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        before = engine.generate_batch(prompts(4), greedy)
        engine.sleep()
        assert not engine.core.runner._graphs  # type: ignore[attr-defined]
        engine.wake_up()
        close(engine.generate_batch(prompts(4), greedy), before)
        model = engine._binding.source.module
        with torch.no_grad():
            for p in model.parameters():
                p.data = p.data.clone() * 1.5  # elsewhere, and other numbers
        engine.update_weights()
        assert not engine.core.runner._graphs  # type: ignore[attr-defined]
        with build(runtime=CpuRuntime) as plain, torch.no_grad():
            for mine, theirs in zip(plain._binding.source.module.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs)
            expected = plain.generate_batch(prompts(4), greedy)
        after = engine.generate_batch(prompts(4), greedy)
        assert [c.token_ids for o in after for c in o.completions] == [
            c.token_ids for o in expected for c in o.completions
        ]


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


def test_given_tokens_are_scored_whatever_was_captured() -> None:
    """Sequences of two tokens are scored in batches that look like decode steps."""
    pairs = [[i, i + 1] for i in range(1, 9)]
    greedy = SamplingParams(max_tokens=6, temperature=0, prompt_logprobs=1)
    with build(runtime=CpuRuntime) as plain:
        expected, batch = plain.score(pairs), plain.generate_batch(prompts(9), greedy)
    with build(max_num_batched_tokens=24) as engine:
        for _ in range(2):
            for one, other in zip(engine.score(pairs), expected, strict=True):
                torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=2e-5)
            again = engine.generate_batch(prompts(9), greedy)
            close(again, batch)
            for one, other in zip(again, batch, strict=True):
                assert one.prompt_logprobs is not None and other.prompt_logprobs is not None
                torch.testing.assert_close(
                    one.prompt_logprobs.logprobs, other.prompt_logprobs.logprobs, rtol=0, atol=2e-5
                )
        assert engine.core.runner._graphs


# -- the kernels of a CUDA device, in Triton's interpreter ---------------------------------------------------------------


def bits(batch: RolloutBatch) -> list[Any]:
    batch.raise_for_errors()
    return [[(c.token_ids, c.logprobs) for c in output.completions] for output in batch]


def few(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    return [p[:11] for p in prompts(count)], [
        SamplingParams(seed=i, max_tokens=5, ignore_eos=True) for i in range(count)
    ]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_with_the_kernels_of_a_gpu_the_tokens_are_those_of_the_torch_operations(family: str) -> None:
    with build(family, runtime=CpuRuntime, num_layers=1) as plain:
        expected = plain.generate_batch(*few(5))
    with build(family, ops=TRITON, num_layers=1) as engine:
        assert engine.stats().fused_layers == engine.stats().num_layers
        close(engine.generate_batch(*few(5)), expected)


def test_what_goes_to_the_device_is_made_on_the_host_whatever_a_trainer_s_default_is() -> None:
    prompts = [[1, 2, 3]]
    settings = SamplingParams(n=2, seed=1, max_tokens=2, repetition_penalty=1.2, top_k=5, logprobs=2, ignore_eos=True)
    with build(ops=TRITON, num_layers=1, block_size=2) as engine:
        expected, scores = bits(engine.generate_batch(prompts, settings)), engine.score(prompts, top_k=2)
        engine.update_weights()
        torch.set_default_device("meta")
        try:
            found, again = bits(engine.generate_batch(prompts, settings)), engine.score(prompts, top_k=2)
        finally:
            torch.set_default_device(None)
        assert found == expected
        for one, other in zip(again, scores, strict=True):
            for name in ("token_ids", "logprobs", "ranks", "top_ids"):
                assert torch.equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("ops", [DETERMINISTIC, TRITON], ids=["deterministic", "not"])
def test_deterministic_bits_do_not_depend_on_the_batch(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "multiprocessors", lambda device: 1)  # taller tiles: the interpreter is slow
    several, settings = few(4)
    with build("qwen3", ops=ops, num_layers=1, max_num_batched_tokens=8) as engine:  # prompts in chunks
        together = bits(engine.generate_batch(several, settings))
        hit = bits(engine.generate_batch(several, settings))
        engine.update_weights()
        scored = engine.score(
            [p + t[0][0] for p, t in zip(several, together, strict=True)], start=[len(p) for p in several]
        )
    with build("qwen3", ops=ops, num_layers=1, enable_prefix_caching=False) as engine:
        alone = [bits(engine.generate_batch([p], [s]))[0] for p, s in zip(several[:2], settings[:2], strict=True)]
    rescored = [[(t[0][0], s.logprobs.tolist())] for t, s in zip(together, scored, strict=True)]
    same = (together[:2] == alone, together == hit, together == rescored)
    assert same == (True, True, True) if ops is DETERMINISTIC else not all(same)
    assert [[c[0] for c in row] for row in together[:2]] == [[c[0] for c in row] for row in alone]


def test_deterministic_bits_survive_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed a second time, now as a prompt, gives the bits of the first."""
    monkeypatch.setattr(linear, "multiprocessors", lambda device: 1)
    several, settings = few(4)
    settings = [replace(s, max_tokens=9) for s in settings]
    with build("qwen3", ops=DETERMINISTIC, num_layers=1) as engine:
        undisturbed = bits(engine.generate_batch(several, settings))
        block_bytes = engine.stats().kv_block_bytes
    with build("qwen3", ops=DETERMINISTIC, num_layers=1, kv_cache_memory=12 * block_bytes) as engine:
        assert bits(engine.generate_batch(several, settings)) == undisturbed
        assert engine.stats().num_preemptions > 0


def test_a_gemma_is_deterministic_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms after the projections, GeGLU, and softcaps."""
    monkeypatch.setattr(linear, "multiprocessors", lambda device: 1)
    several, settings = few(3)
    with build("gemma2", ops=DETERMINISTIC, num_layers=1, max_num_batched_tokens=8) as engine:
        together = bits(engine.generate_batch(several, settings))
        assert together[1] == bits(engine.generate_batch(several[1:2], settings[1:2]))[0]
    with build("gemma2", runtime=CpuRuntime, num_layers=1) as plain:
        expected = plain.generate_batch(several, settings)
    assert [[c[0] for c in row] for row in together] == [[c.token_ids for c in o.completions] for o in expected]


def test_deterministic_is_refused_where_it_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfigError, match="deterministic=True needs CUDA kernels, and the model is on cpu"):
        RolloutEngine(make_model("llama"), config=EngineConfig(deterministic=True))
    monkeypatch.setattr(binding, "ops_for", lambda *_, **__: DETERMINISTIC)
    # No layer of the one is fused, and of the other's layers all but the experts.
    for family, name in (("cohere2", "Cohere2ForCausalLM"), ("mixtral", "MixtralForCausalLM")):
        with pytest.raises(UnsupportedModelError, match=f"{name} has layers that run their own matmuls"):
            RolloutEngine(make_model(family), config=EngineConfig(deterministic=True))


def test_a_layer_that_the_kernels_cannot_run_has_torch_attention(caplog: pytest.LogCaptureFixture) -> None:
    cuda = torch.device("cuda")
    assert ops_for(cuda, [(64, 64, torch.bfloat16), (576, 512, torch.float16)]) is TRITON
    assert ops_for(cuda, [(64, 64, torch.bfloat16)], deterministic=True) is DETERMINISTIC
    table = ops_for(cuda, [(64, 64, torch.bfloat16), (1024, 64, torch.bfloat16)])
    assert (
        table.paged_attention is REFERENCE.paged_attention and table.linear is TRITON.linear and not table.static_plans
    )
    assert len(caplog.records) == 1 and "1024" in caplog.text and "slow" in caplog.text
    with pytest.raises(InvalidConfigError, match=r"deterministic=True cannot be had: .*float64"):
        ops_for(cuda, [(64, 64, torch.float64)], deterministic=True)


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
