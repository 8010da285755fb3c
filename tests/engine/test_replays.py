"""Captured steps, replayed as operations on the tensors they were captured with, give what eager ones do.

Through everything that leaves graphs where they are: other rows, weights changed in place, sleep, tight memory, adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import hybrids
import pytest
import torch
from adapted import BIASES, EXPERTS, expected_tokens, lora, peft_model, shake, tokens
from emulated_engine import GRAPHED, on_cuda, unasked
from families import make_model
from peft import get_peft_model
from pretend_device import build, params, prompts
from transformers import PreTrainedModel
from windowed import poisoned

from stoker.engine.device import CpuRuntime
from stoker.kernels.ops import REFERENCE
from stoker.kernels.triton_ops import TRITON
from stoker.rollout import RolloutBatch, RolloutEngine, SamplingParams

STATES = ["qwen3_5", "bamba", "lfm2"]
WINDOWED = ["gemma3", "cohere2", "gpt_oss", "llama4", "qwen3_moe"]
IN_FP8 = ["llama, fp8", "qwen3_moe, fp8"]
TIGHT = ["llama", "gemma3", "gpt_oss", "qwen3_moe", "bamba"]


def sampled(batch: RolloutBatch) -> list[list[tuple[list[int], str | None]]]:
    batch.raise_for_errors()
    return [[(c.token_ids, c.finish_reason) for c in output.completions] for output in batch]


def graphs_of(engine: RolloutEngine) -> dict[Any, Any]:
    graphs: dict[Any, Any] = engine.core.runner._graphs  # type: ignore[attr-defined]
    assert graphs and all(graph is not None for graph in graphs.values()), "a capture failed"
    return dict(graphs)


def grow(engine: RolloutEngine) -> None:
    with torch.no_grad():
        for p in engine._binding.source.module.parameters():
            p.mul_(1.01)
    engine.update_weights()


def model_of(family: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """And the settings of its engine: weights in fp8 are rounded anew after the update, in place."""
    name = family.removesuffix(", fp8")
    make = hybrids.make_model if name in STATES else make_model
    return make(name), {} if name == family else {"quantization": "fp8"}


def turns(engine: RolloutEngine) -> Iterator[list[Any]]:
    for turn in range(4):
        penalised = {} if turn == 3 else {"repetition_penalty": 1.0, "presence_penalty": 0.0}
        settings = [replace(p, max_tokens=min(p.max_tokens, 10), **penalised) for p in params(9 + turn % 2)]
        given = [p[:20] for p in prompts(9 + turn % 2)], settings
        yield sampled(engine.generate_batch(*given))
        if turn == 0:
            grow(engine)
        elif turn == 1:
            engine.sleep()
            engine.wake_up()


@cache
def eagerly(family: str) -> tuple[list[Any], int]:
    """What eager steps give at every turn, and the memory in which not all requests fit at once."""
    model, settings = model_of(family)
    with build(model, runtime=CpuRuntime, **settings) as engine:
        states = engine._kv.state_bytes(engine._kv.shapes, engine._kv.state_layout)
        blocks = 18 if engine.core.scheduler.tables.windowed else 40
        return list(turns(engine)), states + blocks * engine.stats().kv_block_bytes


@pytest.mark.parametrize(
    ("family", "tight"),
    [
        # Those of each kind that are not tried in tight memory, where as much is looked at and more.
        *((f, False) for f in ("llama", "deepseek_v3", *WINDOWED, *STATES, *IN_FP8) if f == "llama" or f not in TIGHT),
        *((f, True) for f in TIGHT),
    ],
)
def test_replays_give_what_eager_steps_do(family: str, tight: bool) -> None:
    """For other rows, after an update in place, a sleep that leaves NaN, and beside rows with penalties."""
    expected, few = eagerly(family)
    model, settings = model_of(family)
    with on_cuda(model, **settings | ({"kv_cache_memory": few} if tight else {})) as (engine, device):
        graphs: dict[Any, Any] = {}
        for turn, found in enumerate(turns(engine)):
            assert found == expected[turn]
            if turn == 2:
                device.waits.clear()  # of what came between rollouts
            kept, graphs = graphs, graphs_of(engine)
            assert kept.items() <= graphs.items(), "captured again"
        assert not unasked(device)
        windowed = family.removesuffix(", fp8") in WINDOWED
        assert engine.core.scheduler.tables.windowed == windowed
        # Windows give blocks up as they go, and take none that others wait for.
        assert not tight or windowed or engine.stats().num_preemptions


def test_replays_count_tokens_where_penalties_look_for_them() -> None:
    """Also after a sleep, which gives the counts' memory back, while the cache comes back where it was."""
    given = (
        prompts(3),
        [SamplingParams(seed=i, max_tokens=12, ignore_eos=True, frequency_penalty=2.0) for i in range(3)],
    )
    with build(runtime=CpuRuntime) as plain:
        expected = sampled(plain.generate_batch(*given))
    with on_cuda() as (engine, _):
        for _ in range(3):
            assert sampled(engine.generate_batch(*given)) == expected
            assert graphs_of(engine) and engine._kv.stable_addresses
            engine.sleep()
            engine.wake_up()


def test_sleep_leaves_what_graphs_remember_and_gives_it_back_with_them() -> None:
    with on_cuda() as (engine, _):
        engine.generate_batch(prompts(2), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        set_aside = engine.core.inputs._workspace
        set_aside["by attention"] = torch.zeros(4)
        engine.sleep()
        assert graphs_of(engine) and set_aside
        engine.wake_up()
        engine.sleep(level=2)
        assert not engine.core.runner.has_graphs and not set_aside


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"bias": "all"}),
        ("gemma3", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
        ("mistral", {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [60]}}),
        ("gpt_oss", {"target_modules": [], "target_parameters": [*BIASES, *EXPERTS]}),
        ("qwen3_moe", {"target_modules": ["o_proj"], "target_parameters": ["mlp.gate.weight"]}),
        ("qwen3", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}),
    ],
    ids=str,
)
def test_replays_have_the_adapters_of_their_rows(family: str, options: dict[str, Any]) -> None:
    """Whichever these are, with the numbers that they have by then."""
    model, changed, other = (peft_model(family, seed=seed, **options) for seed in (1, 2, 3))
    before, after, others = ((expected_tokens(m), expected_tokens(m, None)) for m in (model, changed, other))
    rows = ["default", None, None, "default"]
    with on_cuda(model) as (engine, _):
        for turn, expected in enumerate((before, before, after, after, after)):
            rows = [*rows[1:], rows[0]]
            if turn == 2:
                with torch.no_grad():
                    for mine, new in zip(model.parameters(), changed.parameters(), strict=True):
                        mine.copy_(new)
            elif turn == 3:
                engine.load_adapter("other", other)
                assert [tokens(engine, adapter="other") for _ in range(2)] == [others[0]] * 2
            elif turn == 4:
                engine.sleep()
                engine.wake_up()
            assert tokens(engine, adapter=rows) == [expected[name is None][row] for row, name in enumerate(rows)]
        graphs_of(engine)


def test_steps_are_captured_anew_where_lists_of_ids_are_sent_from_elsewhere() -> None:
    """A longer list moves them all, and rows with few ids are sent as many as before."""
    few = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with build(runtime=CpuRuntime) as plain, on_cuda() as (engine, _):
        for count in (40, 100, 3):
            for given in (replace(few, suppress_token_ids=range(count)), few):
                texts = prompts(count)[-3:]
                assert sampled(engine.generate_batch(texts, given)) == sampled(plain.generate_batch(texts, given))
        graphs_of(engine)


def test_launches_of_kernels_serve_other_rows_and_blocks() -> None:
    """Of a layer with a window too, whose blocks are given up, on memory where all that is free is NaN."""
    sizes = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    settings = {"decode_window": 2, "block_size": 2, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    given = [[p[:n] for p, n in zip(prompts(3), (3, 9, 14), strict=True)], [p[:4] for p in prompts(2)]]
    wanted = [SamplingParams(seed=i, max_tokens=5 + 2 * i, ignore_eos=True, temperature=i % 2) for i in range(3)]
    with build(make_model("gemma3", **sizes), ops=REFERENCE, runtime=CpuRuntime, **settings) as plain:
        expected = [sampled(plain.generate_batch(texts, wanted[: len(texts)])) for texts in given]
    model = make_model("gemma3", **sizes)
    with (
        on_cuda(model, TRITON, **settings) as (engine, _),
        poisoned(engine),
    ):
        for texts, tokens_of_them in zip([*given, given[0]], [*expected, expected[0]], strict=True):
            assert sampled(engine.generate_batch(texts, wanted[: len(texts)])) == tokens_of_them
            graphs_of(engine)
            engine.sleep()
            engine.wake_up()
        assert engine.core.runner.has_graphs


def test_launches_of_kernels_serve_other_adapters() -> None:
    """Rows are put in the order of theirs within the step: a replay has others than what was captured."""
    model = get_peft_model(make_model("llama", num_hidden_layers=1), lora(target_modules=["down_proj"])).eval()
    shake(model)
    given, greedy = [[5, 6, 7], [8, 9, 1]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    turns = [["default", None], [None, "default"]]
    settings = {"decode_window": 2, "max_num_seqs": 2}
    with build(model, ops=REFERENCE, runtime=CpuRuntime, **settings) as plain:
        expected = [sampled(plain.generate_batch(given, greedy, adapter=adapters)) for adapters in turns]
    assert expected[0][0] != expected[1][0] and expected[0][1] != expected[1][1], "the adapter changes something"
    with on_cuda(model, TRITON, **settings) as (engine, _):
        assert [sampled(engine.generate_batch(given, greedy, adapter=adapters)) for adapters in turns] == expected
        assert len(graphs_of(engine)) == 1


def test_a_step_that_looks_at_the_host_shows() -> None:
    """At a number that changes, or by waiting for one of the device."""
    scale, greedy = [1.0], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def linear(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return GRAPHED.linear(x * scale[0], *args, **options)

    def waiting(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return GRAPHED.linear(x * bool(x[0, 0] == x[0, 0]), *args, **options)

    def seen(engine: RolloutEngine) -> Any:
        scale[0] = 1.0
        engine.generate_batch([[1, 2, 3]], greedy)
        scale[0] = -1.0
        engine.update_weights()
        return sampled(engine.generate_batch([[1, 2, 3]], greedy))

    with build(ops=replace(GRAPHED, linear=linear), runtime=CpuRuntime) as engine:
        found = seen(engine)
    with on_cuda(ops=replace(GRAPHED, linear=linear)) as (engine, _):
        assert seen(engine) != found
    with on_cuda(ops=replace(GRAPHED, linear=waiting)) as (engine, _):
        engine.generate_batch([[1, 2, 3]], greedy)
        assert set(engine.core.runner._graphs.values()) == {None}  # type: ignore[attr-defined]
