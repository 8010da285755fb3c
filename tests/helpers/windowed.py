"""Engines on models whose layers have a window. All free memory is NaN."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import oracle
import pytest
import torch
from families import draw, make_model
from hybrid_fields import HYBRIDS

from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

FAMILIES = ["gemma3", "gpt_oss", "llama4", "cohere2", "gemma4", "gemma4+experts", "mistral", "starcoder2", "lfm3"]
# Of Gemma 4, where a layer that sees all keys keeps as much as two with a window (as E2B), and one of these as two of it (31B).
_FIELDS: dict[str, dict[str, Any]] = {
    "gemma4": {"global_head_dim": 32},
    "gemma4+experts": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
}


@cache
def model_of(family: str) -> Any:
    return make_model(family, **_FIELDS.get(family, {}))


def engine_of(family: str, blocks: int | None = None, device: str = "cpu", **fields: Any) -> RolloutEngine:
    """blocks: so much memory as so many blocks of all layers take."""
    model = model_of(family) if device == "cpu" else copy.deepcopy(model_of(family)).to(device)
    config = {"block_size": 4, "kv_cache_memory": "1MiB", "max_num_seqs": 8} | fields
    if blocks is not None:
        with RolloutEngine(model, config=EngineConfig(**config)) as probe:
            stats = probe.stats()
            config["kv_cache_memory"] = blocks * stats.kv_block_bytes + stats.recurrent_state_bytes
    return RolloutEngine(model, config=EngineConfig(**config))


@contextmanager
def poisoned(engine: RolloutEngine) -> Iterator[None]:
    """Before every step all memory that is free, and has no content, is NaN: who reads what was given up gives NaN."""
    plan = engine.core.scheduler.plan

    def poisoning() -> Any:
        empty = torch.tensor(engine.core.scheduler.tables.pool.empty_pages, device=engine.runtime.device)
        pages = engine._kv.num_blocks
        for kept in (kept for pair in engine._kv.layers for kept in pair if len(kept) % pages == 0 and len(empty)):
            kept.unflatten(0, (pages, -1)).index_fill_(0, empty, torch.nan)
        return plan()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine.core.scheduler), "plan", lambda _: poisoning())
        yield


def check(family: str, prompts: list[list[int]], batch: Any, temperature: float = 1.0) -> None:
    batch.raise_for_errors()
    for given, output in zip(prompts, batch, strict=True):
        for c in output.completions:
            wanted = oracle.logprobs(model_of(family), given, c.token_ids, temperature)
            torch.testing.assert_close(torch.tensor(c.logprobs).double(), wanted, rtol=0, atol=1e-4)


def check_on_poisoned_memory(family: str, blocks: int | None, device: str = "cpu") -> None:
    """Groups, prompts in chunks, preemption, cached prefixes, a next turn, scores; by captured steps too, where there are."""
    prompts = [draw(1, 45), draw(2, 3), draw(3, 20), draw(1, 45)[:30] + draw(4, 5)]
    params = SamplingParams(n=4, max_tokens=24, seed=0, ignore_eos=True)
    settings = {"max_num_batched_tokens": 16, "decode_window": 4}
    with engine_of(family, blocks, device, **settings) as engine, poisoned(engine):
        assert engine.core.scheduler.tables.windowed
        first = engine.generate_batch(prompts, params)
        check(family, prompts, first)
        turns = [given + output.completions[0].token_ids + [7, 8] for given, output in zip(prompts, first, strict=True)]
        second = engine.generate_batch(turns, SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
        check(family, turns, second)
        if blocks is None:
            # A state is kept at the end of the last full block of a prompt.
            ends = [
                (len(p) - 1) // 4 * 4 if family in HYBRIDS else len(t) - 7 for p, t in zip(prompts, turns, strict=True)
            ]
            assert all(output.cached_tokens >= end for end, output in zip(ends, second, strict=True))
        else:
            assert engine.stats().num_preemptions > 0
        for given, scores in zip(turns, engine.score(turns, start=2), strict=True):
            wanted = oracle.logprobs(model_of(family), given[:2], given[2:])
            torch.testing.assert_close(scores.logprobs.double(), wanted, rtol=0, atol=1e-4)
        engine.core.scheduler.check()
        assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks
        assert engine.core.runner.has_graphs == (device == "cuda")
