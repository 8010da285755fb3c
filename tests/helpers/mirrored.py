"""Engines with weights of their own, and what these are compared with."""

from __future__ import annotations

import oracle
import torch
from family_fields import VOCAB
from torch import nn
from transformers import PreTrainedModel

from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

SMALL = {"kv_cache_memory": "1MiB", "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}
PROMPT = [7, 3, 99, 14, 5, 62, 8, 31, 4, 4, 90, 17]
PARAMS = SamplingParams(max_tokens=8, seed=1)


def engine_on(model: nn.Module, dtype: str = "float64", **fields) -> RolloutEngine:
    return RolloutEngine(model, config=EngineConfig(dtype=dtype, **SMALL, **fields))


def assert_matches(engine: RolloutEngine, model: PreTrainedModel, atol: float = 1e-4) -> set[int]:
    (c,) = engine.generate_batch([PROMPT], PARAMS)[0].completions
    expected = oracle.logprobs(model, PROMPT, c.token_ids)
    torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=atol)
    return set(c.weight_versions)


def step(model: PreTrainedModel, **fields) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **fields)
    ids = torch.randint(1, VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.zero_grad()


def copies(engine: RolloutEngine) -> dict[str, torch.Tensor]:
    return engine._binding.source.mirror.tensors
