"""Which modules with experts run on the engine's own operation, that the trainer's do not, and how routers are read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from families import experts_modules, make_model, randomise
from family_fields import FAMILIES, ROUTED
from fused import CONFIG, Trained, assert_like_hugging_face
from launches import Launches, named
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from stoker.engine.layers import experts as interface
from stoker.engine.layers import fused_branches, fused_moe
from stoker.engine.layers.moe_structure import parts_of
from stoker.engine.layers.router_probe import probes
from stoker.engine.model import ModelShell
from stoker.kernels.ops import REFERENCE
from stoker.kernels.reference.norm_rotary import Norm
from stoker.kernels.reference.routing import Choice
from stoker.kernels.triton_ops import TRITON
from stoker.rollout import RolloutEngine, binding


def taken_over(model: nn.Module) -> int:
    """How many modules with experts run on the engine's operation."""
    return sum(map(interface.is_taken_over, experts_modules(model)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_of_every_family_that_routes_them_are_taken_over(family: str) -> None:
    model = make_model(family)
    interface.take_over_experts(model, TRITON)
    assert taken_over(model) == len(experts_modules(model)) == ROUTED.get(family, 0)


@pytest.mark.parametrize("act", [nn.Mish(), Trained()])
def test_an_activation_that_is_not_known_stays_with_transformers(act: nn.Module) -> None:
    model = make_model("mixtral")
    module = experts_modules(model)[0]
    module.act_fn = act
    interface.take_over_experts(model, replace(REFERENCE, experts=None))
    assert taken_over(model) == len(experts_modules(model)) - 1
    x, ids, weights = torch.randn(4, 48), torch.tensor([[0, 1]] * 4), torch.rand(4, 2)
    module.config._experts_implementation = "eager"
    expected = module(x, ids, weights)
    module.config._experts_implementation = interface.EXPERTS
    assert torch.allclose(module(x, ids, weights), expected, atol=1e-5)


def test_experts_that_do_not_know_the_interface_run_their_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Step 3.7's, which have all that those have that do."""

    class Plain(Qwen3MoeExperts):
        forward = inspect.unwrap(Qwen3MoeExperts.forward)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            del self.has_gate

    monkeypatch.setattr(modeling_qwen3_moe, "Qwen3MoeExperts", Plain)
    model = make_model("qwen3_moe")
    with RolloutEngine(model, config=CONFIG) as engine:
        assert engine.stats().fused_layers == 3
        assert_like_hugging_face(engine, model)


def test_the_trainer_s_experts_stay_as_they_were() -> None:
    model = make_model("qwen3_moe")
    before = model.config._experts_implementation
    shell = ModelShell(model, 64)
    interface.take_over_experts(shell.module, REFERENCE)
    assert shell.config._experts_implementation == interface.EXPERTS
    assert model.config._experts_implementation == before != interface.EXPERTS
    assert not any(hasattr(m, "stoker_experts") for m in model.modules())


_MIXTRAL = Choice(per_token=2, score="softmax", normalise=True)
_GPT_OSS = Choice(per_token=2, score="chosen")
_DEEPSEEK_V2 = Choice(per_token=2, score="softmax", scale=1.7, groups=3)
_DEEPSEEK_V3 = Choice(
    per_token=2, score="sigmoid", normalise=True, eps=1e-20, scale=1.7, groups=4, kept_groups=2, best_of_group=2
)
# How the routers of families choose, how many there are, and what they compute in fp32 in a model of another dtype.
CHOICES: dict[str, tuple[Choice, int, tuple[str, ...]]] = {
    "qwen3_moe": (_MIXTRAL, 2, ()),
    "mixtral": (_MIXTRAL, 3, ("wide_weights",)),
    "olmoe": (Choice(per_token=3, score="softmax"), 3, ()),
    "gpt_oss": (_GPT_OSS, 3, ()),
    "deepseek_v2": (_DEEPSEEK_V2, 2, ("wide_logits", "wide_weights")),
    "deepseek_v3": (_DEEPSEEK_V3, 2, ("wide_logits", "wide_weights")),
    "glm4_moe": (_DEEPSEEK_V3, 2, ("wide_logits", "wide_weights")),
    "qwen3_next": (_MIXTRAL, 3, ()),
    "qwen3_5_moe": (_MIXTRAL, 3, ()),
    "lfm2_moe": (Choice(per_token=2, score="sigmoid", normalise=True, eps=1e-6), 2, ()),
    "granitemoehybrid": (_GPT_OSS, 3, ()),
    "nemotron_h": (
        replace(_DEEPSEEK_V3, groups=1, kept_groups=1, best_of_group=1, scale=1.0),
        1,
        ("wide_logits", "wide_weights"),
    ),
    "llama4": (Choice(per_token=1, score="chosen_sigmoid"), 2, ()),
    "afmoe": (
        Choice(per_token=2, score="sigmoid", normalise=True, eps=1e-20, scale=1.7),
        3,
        ("wide_scores", "wide_weights"),
    ),
    "laguna": (Choice(per_token=2, score="sigmoid", normalise=True), 2, ("wide_scores",)),
    "gemma4+experts": (_MIXTRAL, 4, ("wide_weights",)),
    "mistral_large4+images": (
        replace(_DEEPSEEK_V3, score="softmax", eps=0.0),
        3,
        ("wide_logits", "wide_weights"),
    ),
}
WITH_SHARED = {
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "llama4",
    "nemotron_h",
    "afmoe",
    "laguna",
    "mistral_large4+images",
}
GATED = {"qwen3_next", "qwen3_5_moe"}
# Bias of the logits, correction of the ranks, or gain of the weights.
BIASED = {
    "afmoe": 1,
    "laguna": 1,
    "gpt_oss": 0,
    "deepseek_v3": 1,
    "glm4_moe": 1,
    "lfm2_moe": 1,
    "nemotron_h": 1,
    "gemma4+experts": 2,
}


@pytest.fixture
def mixtures(monkeypatch: pytest.MonkeyPatch) -> list[fused_moe.FusedMoe]:
    """Those that are put in service."""
    found: list[fused_moe.FusedMoe] = []
    agrees = fused_moe._agrees

    def noted(mixture: fused_moe.FusedMoe) -> bool:
        agreed = agrees(mixture)
        found.extend([mixture] * agreed)
        return agreed

    monkeypatch.setattr(fused_moe, "_agrees", noted)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", CHOICES)
def test_how_the_routers_of_families_choose(
    family: str, dtype: torch.dtype, mixtures: list[fused_moe.FusedMoe]
) -> None:
    choice, count, wide = CHOICES[family]
    if dtype != torch.float32:
        choice = replace(choice, **dict.fromkeys(wide, True))
    with RolloutEngine(make_model(family).to(dtype), config=CONFIG):
        assert [mixture.choice for mixture in mixtures] == [choice] * count
    for mixture in mixtures:
        assert (mixture.shared is not None) == (family in WITH_SHARED)
        assert (mixture.shared_gate is not None) == (family in GATED)
        biased = [tensor is not None for tensor in mixture.biases]
        assert biased == [BIASED.get(family) == place for place in range(3)]
        assert (mixture.norm is not None) == (family == "gemma4+experts")


@pytest.mark.parametrize("family", ["gemma4", "llama"])
def test_other_models_have_no_such_blocks(family: str, mixtures: list[fused_moe.FusedMoe]) -> None:
    with RolloutEngine(make_model(family), config=CONFIG):
        assert not mixtures


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_how_many_groups_are_chosen_from_may_be_no_divisor(family: str, mixtures: list[fused_moe.FusedMoe]) -> None:
    """As of DeepSeek V2: three of eight."""
    model = make_model(family, n_routed_experts=16, num_experts_per_tok=5, n_group=8, topk_group=3)
    with RolloutEngine(model, config=CONFIG) as engine:
        assert {(m.choice.groups, m.choice.kept_groups) for m in mixtures} == {(8, 3)}
        assert_like_hugging_face(engine, model)


@pytest.mark.parametrize("family", CHOICES)
def test_routers_follow_the_weights(family: str, mixtures: list[fused_moe.FusedMoe]) -> None:
    """Every parameter and buffer in place, of layers that are not fused, too."""
    model = make_model(family)
    with RolloutEngine(model, config=CONFIG) as engine:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            randomise(model)
        engine.update_weights()
        assert_like_hugging_face(engine, model)
        assert len(mixtures) == CHOICES[family][1]


def test_what_a_router_is_tried_on_is_made_on_the_host_whatever_the_default_is() -> None:
    block = make_model("glm4_moe").model.layers[1].mlp
    parts = parts_of(block)
    assert parts is not None
    expected = list(probes(block, parts, None))
    with torch.device("meta"):
        found = list(probes(block, parts, None))
    for (x, given), (wanted, values) in zip(found, expected, strict=True):
        assert torch.equal(x, wanted) and all(torch.equal(given[name], values[name]) for name in values)


@pytest.mark.parametrize("replaced", ["correction", "weight"])
def test_a_router_s_tensors_may_be_replaced(replaced: str) -> None:
    model = make_model("glm4_moe")
    with RolloutEngine(model, config=CONFIG) as engine, torch.no_grad():
        for layer in model.model.layers[1:]:
            gate = layer.mlp.gate
            if replaced == "weight":
                gate.weight = nn.Parameter(gate.weight.flip(0))
            else:
                gate.e_score_correction_bias = gate.e_score_correction_bias.flip(0)
        engine.update_weights()
        assert_like_hugging_face(engine, model)


def _of_a_gate(change: Callable[[Any, tuple[Tensor, ...]], tuple[Tensor, ...]]) -> Callable[[PreTrainedModel], Any]:
    def install(model: PreTrainedModel) -> Any:
        return type(model.model.layers[2].mlp.gate), change

    return install


def _other_experts(gate: Any, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    logits, weights, ids = out
    return logits, weights, (ids + 1) % gate.num_experts


def _capped(gate: Any, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    logits, weights, ids = out
    return logits, weights.clamp(max=0.6), ids


@pytest.mark.parametrize("change", [_other_experts, _capped])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_a_router_that_does_something_else_stays(
    family: str, change: Any, mixtures: list[fused_moe.FusedMoe], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family)
    kind = type(model.model.layers[2].mlp.gate)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, hidden_states: change(self, forward(self, hidden_states)))
    with RolloutEngine(model, config=CONFIG) as engine:
        assert not mixtures
        assert_like_hugging_face(engine, model)


@pytest.mark.parametrize(
    ("family", "path", "change"),
    [
        ("llama4", "feed_forward.router", lambda forward, x: (0.9 * forward(x)[0], None)),
        ("llama4", "feed_forward.router", lambda forward, x: (forward(x)[0].square().sqrt().flip(1), None)),
        ("llama4", "feed_forward.experts", lambda forward, x: 1.1 * forward(x)),
        ("gemma4+experts", "router", lambda forward, x: forward(x.abs())),
        ("gemma4+experts", "router", lambda forward, x: (None, forward(x)[1].clamp(max=0.6), forward(x)[2])),
        ("gpt_oss", "mlp", lambda forward, x: (forward(x)[0], None)),
        ("gpt_oss", "mlp", lambda forward, x: ((out := forward(x))[0], out[1].mean())),  # a loss, say
        ("gpt_oss", "mlp", lambda forward, x: ((out := forward(x))[0], out[1][:1])),
        ("gpt_oss", "mlp", lambda forward, x: [*forward(x)]),
    ],
)
def test_what_stands_otherwise_and_does_something_else_stays(
    family: str, path: str, change: Any, mixtures: list[fused_moe.FusedMoe], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family)
    kind = type(model.model.layers[1].get_submodule(path))
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: change(partial(forward, self), x))
    with RolloutEngine(model, config=CONFIG) as engine:
        assert not mixtures
        assert_like_hugging_face(engine, model)


def test_experts_of_sizes_that_the_operation_does_not_take_stay(mixtures: list[fused_moe.FusedMoe]) -> None:
    """Rows of a weight that are no multiple of 16 bytes, as of torch's grouped product."""
    model = make_model("llama4", intermediate_size=66)
    with RolloutEngine(model, config=CONFIG) as engine:
        assert not mixtures
        assert_like_hugging_face(engine, model)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "deepseek_v3"])
def test_a_block_that_does_something_else_stays(
    family: str, mixtures: list[fused_moe.FusedMoe], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family)
    kind = type(model.model.layers[2].mlp)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, hidden_states: 1.01 * forward(self, hidden_states))
    with RolloutEngine(model, config=CONFIG) as engine:
        assert not mixtures
        assert_like_hugging_face(engine, model)


def test_a_block_with_more_in_it_stays(mixtures: list[fused_moe.FusedMoe], monkeypatch: pytest.MonkeyPatch) -> None:
    """Though on the day it is looked at that does nothing."""
    model = make_model("qwen3_moe")
    kind = type(model.model.layers[2].mlp)
    create, forward = kind.__init__, kind.forward

    def with_scale(self: Any, config: Any) -> None:
        create(self, config)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))

    monkeypatch.setattr(kind, "__init__", with_scale)
    monkeypatch.setattr(kind, "forward", lambda self, hidden_states: self.scale * forward(self, hidden_states))
    model = make_model("qwen3_moe")
    with torch.no_grad():
        for layer in (0, 2):
            model.model.layers[layer].mlp.scale.fill_(1.0)
        with RolloutEngine(model, config=CONFIG) as engine:
            assert not mixtures
            model.model.layers[2].mlp.scale.normal_()
            engine.update_weights()
            assert_like_hugging_face(engine, model)


@pytest.mark.parametrize(
    ("family", "operations"),
    [
        ("qwen3_moe", ["route", "experts"]),
        ("gpt_oss", ["route", "experts"]),
        ("deepseek_v3", ["linear", "linear", "route", "experts"]),
        ("qwen3_5_moe", ["linear", "linear", "route", "experts"]),
        ("llama4", ["linear", "linear", "route", "experts"]),
        ("nemotron_h", ["linear", "aten.relu.default", "aten.square_.default", "linear", "route", "experts"]),
    ],
)
def test_a_block_is_these_operations_and_nothing_else(
    family: str, operations: list[str], mixtures: list[fused_moe.FusedMoe], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    monkeypatch.setattr(binding, "ops_for", lambda *_, **__: named(launched))
    with RolloutEngine(make_model(family), config=CONFIG), torch.inference_mode():
        mixture, x = mixtures[0], torch.randn(1, 3, 48)
        launched.clear()
        with Launches(launched):
            mixture.forward(x)
        assert launched == operations
        if family in ("qwen3_moe", "qwen3_5_moe"):  # in a fused layer the residual is added on the way
            own = fused_branches.OriginalBranch(mixture.original.__self__, None, 1.0, None, None)
            residual = torch.randn(3, 48)
            launched.clear()
            with Launches(launched):
                own(x[0], None, None, residual=residual, in_place=True)
            assert launched == operations


def test_a_router_beside_other_modules_and_its_experts_are_operations(
    mixtures: list[fused_moe.FusedMoe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Gemma 4: a norm before each of them, and a norm after that adds to what the MLP gives."""
    launched: list[str] = []
    monkeypatch.setattr(binding, "ops_for", lambda *_, **__: named(launched))
    with RolloutEngine(make_model("gemma4+experts"), config=CONFIG), torch.inference_mode():
        norm, x = Norm(torch.ones(48), 1e-6), torch.randn(3, 48)
        before = fused_branches.NormBefore(norm, torch.nn.Identity(), mixtures[0].ops)
        own = fused_branches.OriginalBranch(mixtures[0].experts, mixtures[0].original.__self__, 1.0, before, norm)
        launched.clear()
        with Launches(launched):
            own(x, None, None)
        assert own.runs_on_ops and launched == ["rms_norm", "rms_norm", "route", "experts"]
