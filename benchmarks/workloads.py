"""The models and the requests that every engine of a run gets, all of them seeded.

``rollout`` counts its workloads: (i) and (ii) are GRPO groups, (iii) decode at fixed batch and context (``sweeps``), (iv)
prefill alone and (vii) a whole cycle of wake, update, rollout and sleep (both ``phases``). ``README.md`` has the others.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """An architecture with random weights (normal, std 0.02): speed depends on shapes, not on what was learned."""

    name: str
    model_class: type[PreTrainedModel]
    config: Any

    def build(self, device: str, dtype: torch.dtype) -> PreTrainedModel:
        torch.manual_seed(0)
        with torch.device(device):
            model = self.model_class._from_config(self.config, dtype=dtype, attn_implementation="sdpa")
        model.eval().requires_grad_(False)
        # What `generate` would otherwise take from here: transformers' own top_k is 50, and no request may stop early.
        model.generation_config.update(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)
        model.generation_config.eos_token_id = None
        return model


def dtype_of(device: str) -> torch.dtype:
    """What models run in there."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def random_prompts(spec: ModelSpec, rows: int, tokens: int, seed: str) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, spec.config.vocab_size) for _ in range(tokens)] for _ in range(rows)]


@torch.no_grad()
def train(model: torch.nn.Module) -> None:
    """Stands in for an optimizer step: every weight changes a little, in place."""
    for parameter in model.parameters():
        parameter.mul_(1.001)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Groups of samples, as GRPO asks for them, with lengths fixed in advance instead of left to the sampler.

    ``median`` and ``sigma`` shape a lognormal clipped to [1, cap]; the lengths are drawn once, from ``seed``, and stay
    the same in every repeat and for every engine. Prompts are drawn afresh for each repeat, so that no prefix cache
    carries work from one repeat to the next.
    """

    name: str
    prompts: int
    samples: int
    prompt_tokens: tuple[int, int]
    median: int
    sigma: float
    cap: int
    slots: int  # sequences an engine may run at a time
    seed: int = 0

    @property
    def lengths(self) -> list[int]:
        """Completion tokens n_i of each of the ``prompts * samples`` requests, in their order."""
        rng = random.Random(self.seed)
        draws = (rng.lognormvariate(math.log(self.median), self.sigma) for _ in range(self.prompts * self.samples))
        return [max(1, min(self.cap, round(draw))) for draw in draws]

    def draw(self, vocab_size: int, repeat: int) -> list[list[int]]:
        """Prompt token ids of one repeat, one row a request; the samples of a prompt are consecutive equal rows."""
        shape, tokens = random.Random(self.seed), random.Random(f"{self.seed}/{repeat}")
        rows = []
        for _ in range(self.prompts):
            count = shape.randint(*self.prompt_tokens)
            rows.append([tokens.randrange(1, vocab_size) for _ in range(count)])
        return [row for row in rows for _ in range(self.samples)]

    @property
    def max_len(self) -> int:
        return self.prompt_tokens[1] + self.cap

    def describe(self) -> dict[str, Any]:
        lengths = self.lengths
        return {
            "name": self.name,
            "prompts": self.prompts,
            "samples": self.samples,
            "slots": self.slots,
            "prompt_tokens": list(self.prompt_tokens),
            "cap": self.cap,
            "completion_tokens": sum(lengths),
            "median_length": statistics.median(lengths),
            "longest": max(lengths),
            "static_batch_use": sum(lengths) / static_tokens(lengths, self.slots),
        }


def static_tokens(lengths: Sequence[int], slots: int) -> int:
    """Tokens that static batches of ``slots`` consecutive requests compute: each runs to its longest request."""
    batches = [lengths[i : i + slots] for i in range(0, len(lengths), slots)]
    return sum(len(batch) * max(batch) for batch in batches)


def fifo_steps(lengths: Sequence[int], slots: int) -> int:
    """Decode steps that ``slots`` slots take for requests served in their order."""
    free_at = [0] * slots
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length)
    return max(free_at)


TOY = ModelSpec(
    name="qwen3-toy",
    model_class=Qwen3ForCausalLM,
    config=Qwen3Config(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    ),
)
# Hybrids: of four layers, three are gated delta nets with a state of their own for each sequence.
TOY_HYBRID = ModelSpec(
    name="qwen3.5-toy",
    model_class=Qwen3_5ForCausalLM,
    config=Qwen3_5TextConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    ),
)
SMALL = ModelSpec(
    name="llama-30m",
    model_class=LlamaForCausalLM,
    config=LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    ),
)
SMALL_WIDE = ModelSpec(  # with as many tokens as large models have
    name="llama-30m-128k",
    model_class=LlamaForCausalLM,
    config=LlamaConfig.from_dict(SMALL.config.to_dict() | {"vocab_size": 128256}),
)
MEDIUM = ModelSpec(
    name="llama-90m",
    model_class=LlamaForCausalLM,
    config=LlamaConfig(
        vocab_size=16384,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=6,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    ),
)
LLAMA_1B = ModelSpec(
    name="llama-3.2-1b",
    model_class=LlamaForCausalLM,
    config=LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        bos_token_id=None,
        eos_token_id=None,
    ),
)
LLAMA_8B = ModelSpec(
    name="llama-3.1-8b",
    model_class=LlamaForCausalLM,
    config=LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        rope_parameters=LLAMA_1B.config.rope_parameters | {"factor": 8.0},
        bos_token_id=None,
        eos_token_id=None,
    ),
)
HYBRID_2B = ModelSpec(
    name="qwen3.5-2b",
    model_class=Qwen3_5ForCausalLM,
    config=Qwen3_5TextConfig(
        vocab_size=248320,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=262144,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        bos_token_id=None,
        eos_token_id=None,
    ),
)
QWEN_7B = ModelSpec(
    name="qwen2.5-7b",
    model_class=Qwen2ForCausalLM,
    config=Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        bos_token_id=None,
        eos_token_id=None,
    ),
)
