"""A small engine and long requests, for the tests of requests that live longer than a call."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from families import make_model

from stoker.rollout import Completion, EngineConfig, RolloutEngine, SamplingParams

PROMPTS = [[5, 6, 7, 8, 9], [11, 3], [5, 6, 7, 8, 9, 2, 2, 1], [40] * 13]


def build(family: str = "llama", **fields: Any) -> RolloutEngine:
    settings = {"block_size": 4, "kv_cache_memory": "2MiB", "max_num_seqs": 8, "max_model_len": 128, "decode_window": 2}
    return RolloutEngine(make_model(family), config=EngineConfig(**(settings | fields)))


def long(seed: int = 1, **fields: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 24, "ignore_eos": True, "seed": seed} | fields))


def nudge(engine: RolloutEngine) -> None:
    with torch.no_grad():
        for p in engine._binding.source.module.parameters():
            p.mul_(1.3)


def check_logprobs(engine: RolloutEngine, prompt: list[int], completion: Completion, first: int = 0) -> None:
    """Those from ``first`` on are of the weights as they are now, over everything before."""
    expected = oracle.logprobs(engine._binding.source.module, prompt, completion.token_ids)[first:]
    torch.testing.assert_close(torch.tensor(completion.logprobs)[first:].double(), expected, rtol=0, atol=1e-4)


def same(outputs: Any, expected: Any) -> bool:
    """The same completions, up to the rounding of another batch."""

    def flat(outputs: Any) -> list[Completion]:
        return [c for o in outputs for c in o.completions]

    return len(flat(outputs)) == len(flat(expected)) and all(
        (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        and a.logprobs == pytest.approx(b.logprobs, abs=2e-5)
        for a, b in zip(flat(outputs), flat(expected), strict=True)
    )


def at_rest(engine: RolloutEngine) -> None:
    engine.core.scheduler.check()
    assert not engine.core.has_work
    assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks
