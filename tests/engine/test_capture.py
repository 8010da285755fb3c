"""Decode steps as graphs: when they are captured, and when graphs are dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import pytest
import torch
import vision
from adapted import peft_model
from pretend_device import STATIC, PretendDevice, build, close, params, prompts
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stoker.engine import graphs
from stoker.engine.device import CpuRuntime
from stoker.kernels.ops import Ops
from stoker.rollout import SamplingParams


@dataclass(frozen=True)
class Counting(PretendDevice):
    captures: ClassVar[list[int]] = []

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        self.captures.append(1)
        return super().capture(body)


def test_a_bucket_is_captured_once_and_never_for_mixed_batches() -> None:
    captured = Counting.captures
    captured.clear()
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


def test_of_too_many_graphs_the_one_that_was_not_replayed_for_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", 3)
    Counting.captures.clear()
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with build(runtime=Counting) as engine:

        def captures_of(rows: int) -> int:
            before = len(Counting.captures)
            engine.generate_batch(prompts(rows), greedy).raise_for_errors()
            return len(Counting.captures) - before

        assert [captures_of(rows) for rows in (1, 2, 4)] == [1, 1, 1]
        assert captures_of(1) == 0
        assert captures_of(8) == 1  # in the place of two rows'
        assert [captures_of(rows) for rows in (4, 1, 8)] == [0, 0, 0]
        assert [captures_of(rows) for rows in (2, 4)] == [1, 1]
        assert len(engine.core.runner._graphs) == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_5", "llava"])
def test_steps_after_images_are_replayed(kind: str) -> None:
    """With rotary positions of their own, by graphs of their own; what computes a placeholder runs eagerly."""
    captured = Counting.captures
    model, ids = vision.make_model(kind), [5, 6, 7]
    layouts = [(3, (2, 3), 2), (4, (1, 2), 1), (2, (3, 2), (1, 2), 5)]
    given = [[*(vision.make_prompt(kind, layout, seed) for layout in layouts), ids] for seed in range(2)]
    greedy = SamplingParams(temperature=0, max_tokens=14, suppress_token_ids=[vision.IMAGE, vision.VIDEO])
    with build(model, runtime=Counting) as engine:
        engine.generate_batch([ids, [3], [4, 4], [9]], greedy)
        captured.clear()
        batches = [engine.generate_batch(mine, greedy) for mine in given]
        assert len(captured) == (0 if kind == "llava" else 1)
        assert all(graph is not None for graph in engine.core.runner._graphs.values())  # type: ignore[attr-defined]
    for mine, batch in zip(given, batches, strict=True):
        for prompt, output in zip(mine, batch, strict=True):
            (c,) = output.completions
            expected = vision.logprobs(model, prompt, c.token_ids)
            torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava"])
def test_steps_with_one_token_of_an_image_are_not_replayed(kind: str) -> None:
    """They look like decode steps, and have embeddings or positions of their own."""
    model, prompt = vision.make_model(kind), vision.make_prompt(kind, (4, (1, 2), 2, (1, 2), 3))
    greedy = SamplingParams(temperature=0, max_tokens=60, suppress_token_ids=[vision.IMAGE, vision.VIDEO])
    with build(model, runtime=Counting, max_num_seqs=3, max_num_batched_tokens=3) as engine:
        others = [engine.submit(ids, greedy) for ids in ([5, 6], [7])]
        engine.wait(others, share=0)
        (c,) = engine.generate_batch([prompt], replace(greedy, max_tokens=6))[0].completions
        assert not any(handle.done for handle in others), "beside which one token of the prompt goes in a step"
    expected = vision.logprobs(model, prompt, c.token_ids)
    torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)


def test_a_step_is_captured_anew_for_twice_as_many_stop_ids_and_not_for_each_one_more() -> None:
    seen = []
    with build(runtime=Counting) as engine:
        for count in (1, 2, 3, 4, 5, 6, 7, 8):
            Counting.captures.clear()
            params = SamplingParams(temperature=0, max_tokens=6, stop_token_ids=range(60, 60 + count), min_tokens=6)
            for _ in range(2):
                engine.generate_batch(prompts(2), params).raise_for_errors()
            seen.append(len(Counting.captures))
    assert seen == [1, 1, 1, 0, 1, 0, 0, 0]


def test_steps_of_rows_that_never_began_alike_look_for_none_that_do() -> None:
    told: list[bool] = []

    def plan_attention(query_lens: list[int], *args: Any, shared: bool, **options: Any) -> Any:
        if set(query_lens) == {1}:
            told.append(shared)
        return STATIC.plan_attention(query_lens, *args, **options)

    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    alone, group = [[i] * 14 for i in (1, 2, 3)], [[5] * 4 + [i] for i in (1, 2)]
    with build(ops=replace(STATIC, plan_attention=plan_attention, shared_from=10)) as engine:
        for prompts in (alone, group, [[1, 2], [1, 3]], alone[:1]):
            engine.generate_batch(prompts, greedy)
        assert set(told) == {False}
        for prompts in (alone + alone[-1:], alone):  # once some did, or there would be two graphs of everything
            told.clear()
            engine.generate_batch(prompts, greedy)
            assert set(told) == {True}
        keys = list(engine.core.runner._graphs)  # type: ignore[attr-defined]
        assert {(key[1], key[2]) for key in keys} == {(False, 4), (False, 2), (False, 1), (True, 4)}


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
        for prompt, settings in (
            # A step that samples nothing, for the prompt that another sample waits to share, and no window of the settings yet.
            ([1, 2], {"n": 2, "max_tokens": 1}),
            # One token with the prompt, and a window of decode steps, after which it is captured.
            ([1, 2, 3], {"max_tokens": 1 + window, "min_p": 0.1}),
            ([1, 2, 3], {"max_tokens": 1 + window, "logprobs": 2}),
        ):
            engine.generate_batch([prompt], SamplingParams(ignore_eos=True, **settings))  # type: ignore[arg-type]
            *_, graph = engine.core.runner._graphs.values()  # type: ignore[attr-defined]
            graph.step.zero_()
            operations.seen.clear()
            graph.replay()
            assert ("advance",) in operations.seen
            assert operations.seen <= captured[-1]
    assert len(captured) == 3


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


def test_graphs_of_adapters_as_they_were_are_dropped_and_those_of_the_base_stay() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with build(peft_model(r=4)) as engine:
        engine.load_adapter("other", peft_model(r=16))
        seen: list[set[Any]] = []
        for adapter in (None, "default", "other"):
            engine.generate_batch(prompts(2), greedy, adapter=adapter)
            seen.append(set(engine.core.runner._graphs))  # type: ignore[attr-defined]
        assert [len(keys) for keys in seen] == [1, 2, 2] and seen[1] & seen[2] == seen[0]


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
