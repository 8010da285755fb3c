"""The oracle of weights in fp8: a copy of a model whose weights were rounded by logarithms and torch's cast."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stoker.rollout import RolloutEngine


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
    fp8 = engine._binding.rounded
    assert fp8 is not None
    return {*fp8.by_name}
