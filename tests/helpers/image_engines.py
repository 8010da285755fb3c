"""Small engines on models with images, prompts of all kinds, and what completions are compared with."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel
from vision import (
    Prompt,
    greedy_logprobs,
    logprobs,
    make_model,
    make_prompt,
    token_ids,
)

from stoker.rollout import (
    EngineConfig,
    RolloutBatch,
    RolloutEngine,
    SamplingParams,
)

BLOCK = 4
SETTINGS = {"kv_cache_memory": "4MiB", "block_size": BLOCK, "max_model_len": 128, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=10)
EXACT = {"rtol": 0, "atol": 1e-4}
TEXT = [7, 30, 9, 9, 81, 16, 5]
# Images of several shapes at the beginning, between texts and at the end; one alone and two together.
LAYOUTS = [(5, (2, 3), 4, (1, 2), 6), ((2, 2), 7), (3, (1, 3)), (9, (3, 4), 2)]
# Positions of one dimension and of three, features for several layers, states, and a window.
SOME = ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "mistral3"]
# And layers of their own: embeddings for each layer, a language model with a head, images in a batch.
MORE = [*SOME, "gemma4", "llama4", "idefics3"]


@cache
def model_of(kind: str) -> PreTrainedModel:
    return make_model(kind)


def engine_of(model: PreTrainedModel, **fields: Any) -> RolloutEngine:
    return RolloutEngine(model, config=EngineConfig(**SETTINGS | fields))


def mixed(kind: str) -> list[Prompt | list[int]]:
    """Prompts with images, and between them some without."""
    first, *others = [make_prompt(kind, layout) for layout in LAYOUTS]
    return [first, TEXT, *others, [3, 4]]


def check(
    model: PreTrainedModel, prompts: list[Any], batch: RolloutBatch, temperature: float = 1.0, greedy: int | None = None
) -> None:
    """greedy: the completions are to be those that ``generate`` gives, of at most so many tokens."""
    batch.raise_for_errors()
    for prompt, output in zip(prompts, batch, strict=True):
        assert output.prompt_token_ids == token_ids(prompt)
        for completion in output.completions:
            if greedy is None:
                expected = logprobs(model, prompt, completion.token_ids, temperature)
            else:
                expected = greedy_logprobs(model, prompt, completion.token_ids, greedy)
            torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, **EXACT)


def tokens(batch: RolloutBatch) -> list[list[int]]:
    return [completion.token_ids for output in batch for completion in output.completions]


@torch.no_grad()
def nudge(model: Any, where: str) -> None:
    """Other weights, of what makes embeddings of images or of what reads them."""
    text = {id(p) for p in model.get_decoder().parameters()} | {id(model.get_output_embeddings().weight)}
    found = [p for p in model.parameters() if (id(p) in text) == (where == "text")]
    assert found
    for parameter in found:
        parameter.mul_(1.2)
