"""Engines with weights in fp8, and their oracle: a copy of a model whose weights were rounded by logarithms and torch's cast."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import oracle
import torch
from families import make_model
from hybrids import make_model as make_hybrid
from mirrored import PARAMS, PROMPT, SMALL
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stoker.rollout import EngineConfig, RolloutEngine

if TYPE_CHECKING:
    from peft import PeftModel

HYBRIDS = {"qwen3_5", "qwen3_5_moe", "falcon_h1", "nemotron_h", "lfm2_moe", "lfm3", "kimi_linear"}


def nearest(weight: Tensor) -> Tensor:
    """weight: [..., N, D], rounded."""
    most = weight.detach().double().abs().amax(-1, keepdim=True)
    scale = torch.exp2((most / 448).log2().ceil())
    return (weight.detach().double() / scale).float().to(torch.float8_e4m3fn).double() * scale


@torch.no_grad()
def rounded(model: PreTrainedModel, names: Iterable[str]) -> PreTrainedModel:
    """A copy of the model with these weights rounded, by the rows of their products."""
    other = copy.deepcopy(model)
    for name in names:
        weight, module = other.get_parameter(name), other.get_submodule(name.rpartition(".")[0])
        by_column = isinstance(module, Conv1D) or (weight.dim() == 3 and module.is_transposed)
        weight.copy_(nearest(weight.mT).mT if by_column else nearest(weight))
    return other


@torch.no_grad()
def rounded_base(model: PeftModel, names: Iterable[str]) -> PeftModel:
    """The same of an adapted model, the linears of whose base have these weights."""
    other = copy.deepcopy(model)
    for name in names:
        linear = other.get_base_model().get_submodule(name.removesuffix(".weight"))
        weight = getattr(linear, "base_layer", linear).weight
        weight.copy_(nearest(weight))
    return other


def names_of(engine: RolloutEngine) -> set[str]:
    """Of the weights that an engine rounds."""
    fp8 = engine._binding.derived
    assert fp8 is not None
    return {*fp8.by_name}


def make(family: str, **options: Any) -> PreTrainedModel:
    return make_hybrid(family) if family in HYBRIDS else make_model(family, **options)


def in_fp8(model: nn.Module, **fields: Any) -> RolloutEngine:
    return RolloutEngine(model, config=EngineConfig(**{"quantization": "fp8", **SMALL, **fields}))


def assert_rounded(engine: RolloutEngine, model: PreTrainedModel, prompts: Iterable[list[int]] = (PROMPT,)) -> None:
    """What is sampled and what is scored."""
    other = rounded(model, names_of(engine))
    batch = engine.generate_batch(list(prompts), PARAMS)
    for output, scores in zip(batch, engine.score(batch), strict=True):
        (c,) = output.completions
        expected = oracle.logprobs(other, output.prompt_token_ids, c.token_ids)
        for found in (torch.tensor(c.logprobs), scores.logprobs):
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
        plain = oracle.logprobs(model, output.prompt_token_ids, c.token_ids)
        assert (plain - expected).abs().max() > 1e-3, "what is rounded would not show"
