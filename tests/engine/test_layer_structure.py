"""What is found out about the parts of a layer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import make_model
from fused import Trained
from torch import nn
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel, LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from stoker.engine.layers.layer_structure import mlp_of, norm_of, structure_of
from stoker.engine.layers.moe_structure import parts_of
from stoker.engine.step_context import cache_name


def test_a_layer_with_a_tensor_that_nobody_knows_stays_as_it_is() -> None:
    """Where the probe runs, a factor may be 1."""
    layer = make_model("gemma4").model.layers[0]
    assert structure_of(layer) is not None
    layer.register_buffer("gain", torch.ones(1))
    assert structure_of(layer) is None


def _numbers_of_experts(block: Any, *names: str) -> None:
    for name in names:
        block.register_buffer(name, torch.zeros(len(block.experts.down_proj)))


def _scales(block: Any, *names: str) -> None:
    for name in names:
        block.register_buffer(name, torch.ones(48))


def _sizes(block: Any, experts: int, rows: int, depth: int) -> None:
    block.experts.down_proj = nn.Parameter(torch.ones(experts, 48, 32))
    block.gate.weight = nn.Parameter(torch.ones(rows, depth))


@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block, "shared_expert_gate", nn.Linear(48, 1)),  # whose bias may be zero as yet
        lambda block: setattr(block, "shared_expert_gate", nn.Linear(48, 2, bias=False)),
        lambda block: setattr(block, "another_gate", nn.Linear(48, 1, bias=False)),
        lambda block: setattr(block, "another_mlp", copy.deepcopy(block.shared_expert)),
        lambda block: delattr(block, "shared_expert"),
        lambda block: _numbers_of_experts(block, "one", "two", "three", "four"),
        lambda block: _scales(block, "one", "two"),
        lambda block: block.register_buffer("another", torch.ones(7)),
        lambda block: _sizes(block, 48, 48, 48),  # no place is left beside the logits that routers are tried with
        lambda block: _sizes(block, 4, 5, 48),
        lambda block: _sizes(block, 4, 4, 47),
    ],
)
def test_a_mixture_of_other_parts_stays_as_it_is(change: Callable[[Any], object]) -> None:
    block = make_model("qwen3_5_moe").model.layers[0].mlp
    _numbers_of_experts(block, "bias", "correction", "gain")
    _scales(block, "scale")
    parts = parts_of(block)
    assert parts is not None and parts.biases == ("bias", "correction", "gain") and parts.scale == "scale"
    assert parts.shared_gate == "shared_expert_gate" and parts.shared is not None
    for name in parts.biases:
        delattr(block, name)
    del block.scale
    assert parts_of(block) is not None
    change(block)
    assert parts_of(block) is None


def test_a_forward_is_given_the_cache_as_it_calls_it() -> None:
    def from_elsewhere(self: Any, hidden_states: torch.Tensor, past_key_values: Any = None, **_: Any) -> None: ...

    assert cache_name(from_elsewhere) == "past_key_values"
    for forward in (LlamaModel.forward, LlamaDecoderLayer.forward):
        assert cache_name(forward) in inspect.signature(forward).parameters


@pytest.mark.parametrize("device", ["cpu", "meta"])  # another one than that of what is tried
def test_an_activation_with_numbers_of_its_own_is_none_that_is_known(device: str) -> None:
    layer = make_model("llama").model.layers[0]
    assert mlp_of(layer, "mlp").act == "silu"
    layer.mlp.act_fn = Trained(device)
    branch = mlp_of(layer, "mlp")
    assert branch.act is None and not branch.inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "offset", "centred"),
    [
        (LlamaRMSNorm, False, False),
        (Olmo2RMSNorm, False, False),
        (Gemma3RMSNorm, True, False),
        (Gemma4RMSNorm, False, False),
        (Cohere2LayerNorm, False, True),
        (nn.LayerNorm, False, True),
        (NemotronLayerNorm1P, True, True),
        (nn.Identity, None, False),
    ],
)
def test_the_convention_of_a_norm_is_found(kind: Any, offset: bool | None, centred: bool, dtype: torch.dtype) -> None:
    module = kind(48, eps=1e-4).to(dtype).requires_grad_(False)
    for parameter in module.parameters():
        parameter.add_(0.25 * torch.randn_like(parameter))
    norm = norm_of(module)
    if offset is None:
        assert norm is None
    else:
        assert norm is not None and norm.weight is module.weight and norm[1:4] == (1e-4, offset, centred)
        assert norm.bias is getattr(module, "bias", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("module", "eps", "centred"),
    [
        (Llama4TextL2Norm(1e-4), 1e-4, False),
        (Gemma4RMSNorm(0, 1e-4, with_scale=False), 1e-4, False),
        (OlmoLayerNorm(24), 1e-5, True),
        (nn.LayerNorm(24, eps=1e-3, elementwise_affine=False), 1e-3, True),
    ],
)
def test_a_norm_without_a_weight_is_one_of_ones_where_its_width_is_known(
    module: Any, eps: float, centred: bool, dtype: torch.dtype
) -> None:
    like = torch.zeros(2, dtype=dtype)
    assert norm_of(module) is None
    norm = norm_of(module, 24, like)
    assert norm is not None and torch.equal(norm.weight, like.new_ones(24)) and norm[1:] == (eps, False, centred, None)


class OtherEpsilon(nn.Module):
    """Than it says, or than is usual of one that says none."""

    def __init__(self, said: float | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24), requires_grad=False)
        vars(self).update({} if said is None else {"eps": said})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, (24,), self.weight, eps=3e-5)


@pytest.mark.parametrize(("said", "found"), [(3e-5, True), (1e-5, False), (None, False)])
def test_the_epsilon_of_a_norm_is_tried(said: float | None, found: bool) -> None:
    assert (norm_of(OtherEpsilon(said)) is not None) == found
