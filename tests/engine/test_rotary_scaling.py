"""Rotary embeddings that depend on the longest sequence of a batch: the engine's sequences are short, the trainer's may not be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from families import draw, make_model
from transformers import PreTrainedModel

from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

LIMIT = 64
CONFIG = EngineConfig(kv_cache_memory="1MiB", max_model_len=LIMIT, max_num_batched_tokens=16, block_size=4)
_LONG = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": LIMIT}
KINDS: dict[str, dict[str, Any]] = {"dynamic": {"factor": 4.0}, "longrope": {"factor": 4.0} | _LONG}


def make(kind: str, family: str = "llama") -> PreTrainedModel:
    scaled = {"rope_type": kind, "rope_theta": 1000.0} | KINDS[kind]
    if family == "gemma3":
        plain = {"rope_type": "default", "rope_theta": 100.0}
        return make_model(
            family,
            max_position_embeddings=LIMIT,
            rope_parameters={"sliding_attention": plain, "full_attention": scaled},
        )
    return make_model(family, max_position_embeddings=LIMIT, rope_parameters=scaled)


def buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name}


@torch.no_grad()
def run_long(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The trainer's own forward of more tokens than the unscaled positions; returns what it leaves behind."""
    before = buffers(model)
    model(torch.arange(1, LIMIT + 40)[None], use_cache=False)
    after = buffers(model)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    return after


def check(engine: RolloutEngine, model: PreTrainedModel) -> None:
    left = buffers(model)
    batch = engine.generate_batch([list(range(1, 50)), [5, 3, 2]], SamplingParams(max_tokens=8, seed=1))
    batch.raise_for_errors()
    assert engine.verify_weights().ok
    assert all(torch.equal(buffer, left[name]) for name, buffer in buffers(model).items())  # none was written to
    for output in batch:
        (c,) = output.completions
        expected = oracle.logprobs(model, output.prompt_token_ids, c.token_ids)
        torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["auto", "float64"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_sequence_of_the_trainers_changes_no_rollout(kind: str, family: str, dtype: str) -> None:
    """Before the engine is built, and after; float64 has a copy of the weights."""
    alone = make(kind, family)
    try:
        run_long(alone)
        oracle.logprobs(alone, [5, 3, 2], [1])  # a short one in between
        run_long(alone)
    except UnboundLocalError:  # layers of several kinds under longrope, in 5.17
        pytest.skip("this transformers cannot run two such sequences, without an engine either")
    model = make(kind, family)
    run_long(model)
    with RolloutEngine(model, config=replace(CONFIG, dtype=dtype)) as engine:
        check(engine, model)
        run_long(model)
        check(engine, model)
        run_long(model)
        engine.update_weights()
        check(engine, model)


def test_dynamic_scaling_goes_by_the_positions_of_the_model_alone() -> None:
    scaled = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    model = make_model("llama", max_position_embeddings=LIMIT, rope_parameters=scaled)
    with RolloutEngine(model, config=CONFIG) as engine:
        check(engine, model)


@pytest.mark.parametrize(("family", "fields"), [("ministral3", {}), ("llama4", {"floor_scale": 37})])
def test_a_factor_that_only_the_last_positions_have(family: str, fields: dict[str, Any]) -> None:
    """It is 1 before the 36th, and sequences are hardly longer."""
    model = make_model(family, **fields)
    tokens = draw(seed=1, length=40)
    with RolloutEngine(model, config=replace(CONFIG, max_model_len=40)) as engine:
        (scores,) = engine.score([tokens])
        assert engine.stats().fused_layers == engine.stats().num_layers
    expected = oracle.logprobs(model, tokens[:1], tokens[1:])
    torch.testing.assert_close(scores.logprobs.double(), expected, rtol=0, atol=1e-4)
