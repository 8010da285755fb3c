"""Which modules with experts run on the engine's own operation, and that the trainer's do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import FAMILIES, ROUTED, experts_modules, make_model
from torch import nn

from stoker.engine import experts as interface
from stoker.engine.model import ModelShell
from stoker.kernels.ops import REFERENCE
from stoker.kernels.triton_ops import TRITON


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_of_every_family_that_routes_them_are_taken_over(family: str) -> None:
    model = make_model(family)
    assert interface.take_over_experts(model, TRITON) == ROUTED.get(family, 0)
    assert len(experts_modules(model)) == ROUTED.get(family, 0)


def test_an_activation_that_is_not_known_stays_with_transformers() -> None:
    model = make_model("mixtral")
    module = experts_modules(model)[0]
    module.act_fn = nn.GELU(approximate="tanh")
    assert interface.take_over_experts(model, replace(REFERENCE, experts=None)) == len(experts_modules(model)) - 1
    x, ids, weights = torch.randn(4, 48), torch.tensor([[0, 1]] * 4), torch.rand(4, 2)
    module.config._experts_implementation = "eager"
    expected = module(x, ids, weights)
    module.config._experts_implementation = interface.EXPERTS
    assert torch.allclose(module(x, ids, weights), expected, atol=1e-5)


def test_the_trainer_s_experts_stay_as_they_were() -> None:
    model = make_model("qwen3_moe")
    before = model.config._experts_implementation
    shell = ModelShell(model, 64)
    interface.take_over_experts(shell.module, REFERENCE)
    assert shell.config._experts_implementation == interface.EXPERTS
    assert model.config._experts_implementation == before != interface.EXPERTS
    assert not any(hasattr(m, "stoker_experts") for m in model.modules())
