"""Engines whose layers may be fused, and their expected results; an activation that nobody knows."""

from __future__ import annotations

import oracle
import torch
from family_fields import VOCAB
from torch import nn
from transformers import PreTrainedModel

from stoker.engine.layers.fused_decoder import FusedDecoderLayer
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

CONFIG = EngineConfig(block_size=4, kv_cache_memory="1MiB", max_num_batched_tokens=16, max_num_seqs=16)
PROMPTS = [
    torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (17, 5, 26)
]


def fused_layers(engine: RolloutEngine) -> list[FusedDecoderLayer]:
    layers = [m for m in engine._binding.shell.module.modules() if isinstance(m, FusedDecoderLayer)]
    assert len(layers) == engine.stats().fused_layers
    return layers


def assert_like_hugging_face(engine: RolloutEngine, model: PreTrainedModel) -> None:
    batch = engine.generate_batch(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
    for prompt, output in zip(PROMPTS, batch, strict=True):
        (completion,) = output.completions
        expected = oracle.greedy_logprobs(model, prompt, completion.token_ids, 12)
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4)


class Trained(nn.Module):
    """SiLU, until it is trained."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(1, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.slope * x)
