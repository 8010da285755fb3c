"""Adapters of a live PEFT model that are trained, chosen, added and deleted while an engine lives: it follows."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import oracle
import peft
import pytest
import torch
from adapted import (
    CONFIG,
    GREEDY,
    PROMPTS,
    assert_kernels_find,
    assert_like_peft,
    expected_tokens,
    greedy_tokens,
    lora,
    peft_model,
    shake,
    tokens,
    two_adapters,
)
from families import make_model
from packaging.version import Version
from peft import get_peft_model
from peft.utils.hotswap import prepare_model_for_compiled_hotswap
from torch import nn
from transformers.integrations.peft import MIN_PEFT_VERSION

from stoker.rollout import LIVE, InvalidRequestError, RolloutEngine


@pytest.mark.parametrize("dtype", ["auto", "float64"])
def test_what_many_adapters_become_is_seen_at_once(dtype: str) -> None:
    """Whether announced, or not, or more changed after it was announced: copies of them are never old."""
    model = two_adapters()
    model.add_adapter("third", lora(r=2))
    shake(model, seed=3)
    choices = ["third", "other", "default", "third", "default", "other"]
    with RolloutEngine(model, config=replace(CONFIG, dtype=dtype)) as engine:
        for change in range(5):
            assert_like_peft(engine, model, choices, [*PROMPTS, *PROMPTS[:2]])
            shake(model, seed=4 + change)
            if change % 2:
                engine.update_weights()
            if change == 3:
                shake(model, seed=20)


def test_names_come_in_the_order_of_the_model_and_then_of_loading() -> None:
    """The same in every process, whatever the names hash to."""
    names = [f"adapter{number}" for number in range(8)]
    model = peft_model(target_modules=["q_proj"])
    for name in names:
        model.add_adapter(name, lora(target_modules=["q_proj"]))
    with RolloutEngine(model, config=CONFIG) as engine:
        assert engine.adapters == ("default", *names)
        engine.load_adapter("a", model)
        assert engine.adapters == ("default", *names, "a")


def test_live_is_what_the_model_would_run_now() -> None:
    model = two_adapters()
    with RolloutEngine(model, config=CONFIG) as engine:
        assert tokens(engine) == expected_tokens(model, "default")
        model.set_adapter("other")
        assert tokens(engine, adapter=LIVE) == expected_tokens(model, "other")
        with model.disable_adapter():
            assert tokens(engine) == expected_tokens(model, None)
        assert tokens(engine, adapter="default") == expected_tokens(model, "default")
        handle = engine.submit(PROMPTS[0], GREEDY, adapter=None)
        engine.wait([handle], share=0)  # so that it is under way, and no submission looks at the weights
        model.set_adapter("default")
        live = engine.submit(PROMPTS[0], GREEDY)
        assert handle.result().completions[0].token_ids == expected_tokens(model, None)[0]
        assert live.result().completions[0].token_ids == expected_tokens(model, "default")[0]


@pytest.mark.parametrize("tell", [True, False])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}])
def test_an_update_in_place_is_seen(tell: bool, options: dict[str, Any]) -> None:
    model = peft_model(**options)
    with RolloutEngine(model, config=CONFIG) as engine:
        before = tokens(engine)
        shake(model, seed=3)
        if tell:
            engine.update_weights()
        assert tokens(engine) == expected_tokens(model) != before
        assert engine.weight_version == 1
        assert engine.stats().prefix_cache_hit_tokens == 0


def test_an_optimizer_step_is_seen() -> None:
    model = peft_model().train()
    with RolloutEngine(model, config=CONFIG) as engine:
        before = tokens(engine)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.3)
        ids = torch.tensor([PROMPTS[2]])
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        assert tokens(engine) == expected_tokens(model.eval()) != before


@pytest.mark.parametrize("scales", ["floats", "tensors"])
@pytest.mark.parametrize("tell", [True, False])
def test_a_scale_set_by_hand_is_seen(scales: str, tell: bool) -> None:
    """Tensors, as for adapters that are swapped under ``torch.compile``, are written to in place."""
    model = peft_model()
    if scales == "tensors":
        prepare_model_for_compiled_hotswap(model)
    with RolloutEngine(model, config=CONFIG) as engine:
        before = tokens(engine)
        for module in model.modules():
            if hasattr(module, "scale_layer"):
                module.scale_layer(5.0)
        if tell:
            engine.update_weights()
        assert tokens(engine) == expected_tokens(model) != before


def test_a_scale_of_experts_and_one_among_several_are_seen() -> None:
    experts = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    model = peft_model("qwen3_moe", **experts)
    several = peft_model("qwen3_moe", seed=2, **experts)
    several.add_adapter("other", lora(**experts))
    shake(several, seed=3)
    several.base_model.set_adapter(["default", "other"])
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.load_adapter("both", several)
        for changed, name in ((model, "default"), (several, "both")):
            before = tokens(engine, adapter=name)
            for module in changed.modules():
                if hasattr(module, "scale_layer"):
                    module.scaling["default"] *= 5.0
            assert tokens(engine, adapter=name) == greedy_tokens(changed) != before


def _of(model: Any, adapter: str) -> list[tuple[Any, Any]]:
    """Its A and B, layer by layer."""
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    return [(layer.lora_A[adapter], layer.lora_B[adapter]) for layer in layers if adapter in layer.lora_A]


def _have_memory_elsewhere(model: Any) -> None:
    for linear in chain(*_of(model, "other")):
        linear.weight.data = linear.weight.data.flip(0).mul(1.5)


def _be_other_parameters(model: Any) -> None:
    for linear in chain(*_of(model, "other")):
        linear.weight = nn.Parameter(linear.weight.detach().flip(1).contiguous())


def _lie_column_by_column(model: Any) -> None:
    for linear in chain(*_of(model, "other")):
        linear.weight.data = linear.weight.data.flip(0).T.contiguous().T


def _be_scaled(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "lora_A") and "other" in module.scaling:
            module.scaling["other"] *= -2.0


def _have_another_rank(model: Any) -> None:
    model.delete_adapter("other")
    model.add_adapter("other", lora(r=8, target_modules=["k_proj", "up_proj", "q_proj"]))
    shake(model, seed=11)


def _be_over_other_layers(model: Any) -> None:
    model.delete_adapter("other")
    model.add_adapter("other", lora(r=7, target_modules=["gate_proj", "o_proj"]))
    shake(model, seed=11)


def _get_magnitudes(model: Any) -> None:
    model.delete_adapter("other")
    model.add_adapter("other", lora(r=7, target_modules=["k_proj", "up_proj"], use_dora=True))
    shake(model, seed=11)


@pytest.mark.parametrize("tell", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        partial(shake, seed=11),
        _have_memory_elsewhere,
        _be_other_parameters,
        _lie_column_by_column,
        _be_scaled,
        _have_another_rank,
        _be_over_other_layers,
        _get_magnitudes,
    ],
    ids=lambda change: getattr(change, "__name__", "numbers").strip("_"),
)
@torch.no_grad()
def test_an_adapter_that_changes_while_another_has_its_slot_comes_back_as_it_is_now(change: Any, tell: bool) -> None:
    model = two_adapters()
    with RolloutEngine(model, config=replace(CONFIG, max_loras=1)) as engine:

        def check(name: str) -> list[list[int]]:
            found = tokens(engine, adapter=name)
            assert found == expected_tokens(model, name)
            assert_kernels_find(engine, 1, (linear.weight for linear in chain(*_of(model, name))))
            return found

        before = [check(name) for name in ("other", "default", "other", "default")]
        assert before[:2] == before[2:]
        change(model)
        if tell:
            engine.update_weights()
        assert check("other") != before[0]
        check("default")
        check("other")


@torch.no_grad()
def test_a_captured_step_holds_while_adapters_that_are_alike_take_turns_in_a_slot() -> None:
    others = {
        "alike": peft_model(seed=2),
        "column by column": peft_model(seed=3),
        "wide": peft_model(seed=4, r=9),
        "over other layers": peft_model(seed=5, target_modules=["k_proj"]),
    }
    for module in others["column by column"].modules():
        if hasattr(module, "lora_A"):
            module.lora_A["default"].weight.data = module.lora_A["default"].weight.data.T.contiguous().T
    with RolloutEngine(peft_model(), config=replace(CONFIG, max_loras=1)) as engine:
        for name, other in others.items():
            engine.load_adapter(name, other)
        layers, layouts = engine._binding.shell.lora, []
        for name in ["default", "alike", "default", *others]:
            tokens(engine, adapter=name)
            layouts.append(layers.layout)
        assert engine._binding.shell.lora is layers
        alike, *unlike = sorted(set(layouts))
        assert layouts == [alike] * 4 + unlike and len(unlike) == 3


@pytest.mark.parametrize("tell", [True, False])
@torch.no_grad()
def test_magnitudes_are_of_the_base_as_it_is_when_their_adapter_comes_back(tell: bool) -> None:
    model = two_adapters()
    _get_magnitudes(model)
    with RolloutEngine(model, config=replace(CONFIG, max_loras=1)) as engine:
        before = [tokens(engine, adapter=name) for name in ("other", "default", "other", "default")]
        for layer in model.get_decoder().layers:
            layer.mlp.up_proj.base_layer.weight.mul_(torch.rand(layer.mlp.up_proj.out_features, 1) + 0.5)
        if tell:
            engine.update_weights()
        assert tokens(engine, adapter="other") == expected_tokens(model, "other") != before[0]


@pytest.mark.parametrize("tell", [True, False])
@torch.no_grad()
def test_magnitudes_of_one_among_several_are_of_the_base_as_it_is(tell: bool) -> None:
    """Though not all that are active at once have any."""
    model = two_adapters()
    _get_magnitudes(model)
    model.base_model.set_adapter(["default", "other"])
    with RolloutEngine(model, config=CONFIG) as engine:
        before = tokens(engine)
        for layer in model.get_decoder().layers:
            layer.mlp.up_proj.base_layer.weight.mul_(torch.rand(layer.mlp.up_proj.out_features, 1) + 0.5)
        if tell:
            engine.update_weights()
        assert tokens(engine) == greedy_tokens(model) != before


def test_nothing_is_kept_of_an_adapter_that_lies_elsewhere_now() -> None:
    model = two_adapters()
    with RolloutEngine(model, config=replace(CONFIG, max_loras=1)) as engine:
        tokens(engine, adapter="other")
        tokens(engine, adapter="default")
        held = [weakref.ref(t) for t in engine._binding.adapters.weights["other"].tensors()]
        _have_memory_elsewhere(model)
        engine.update_weights()
        gc.collect()
        assert not [ref for ref in held if ref() is not None]


def test_adapters_come_and_go() -> None:
    model = peft_model()
    with RolloutEngine(model, config=CONFIG) as engine:
        assert tokens(engine) == expected_tokens(model)
        model.add_adapter("other", lora())
        shake(model, seed=5)
        assert_like_peft(engine, model, ["other", None, "default", "other"])
        model.delete_adapter("other")
        model.add_adapter("other", lora(r=2, target_modules=["up_proj"]))
        shake(model, seed=6)
        assert_like_peft(engine, model, ["other", None, "default", "other"])
        model.delete_adapter("other")
        with pytest.raises(InvalidRequestError, match=r"adapter='other' is not known: there are 'default'"):
            tokens(engine, adapter="other")
        assert tokens(engine) == expected_tokens(model)


def test_a_plain_model_that_gets_an_adapter_and_loses_it() -> None:
    model = make_model("llama")
    with RolloutEngine(model, config=CONFIG) as engine:
        bare = tokens(engine)
        adapted = get_peft_model(model, lora()).eval()
        shake(adapted)
        assert tokens(engine) == expected_tokens(adapted) != bare
        assert tokens(engine, adapter=None) == bare
        adapted.unload()
        assert tokens(engine) == bare


def test_what_a_model_gets_or_loses_beside_a_request_is_live_for_the_next() -> None:
    """Which does not look at all of the model: what it gets, the engine does not know yet, and says so."""
    model = make_model("llama")
    with RolloutEngine(model, config=CONFIG) as engine:
        bare = tokens(engine)
        running = engine.submit(PROMPTS[0], GREEDY)
        adapted = get_peft_model(model, lora()).eval()
        shake(adapted)
        with pytest.raises(InvalidRequestError, match="adapter='default' is not known: there are none"):
            engine.submit(PROMPTS[1], GREEDY)
        assert running.result().completions[0].token_ids == bare[0]
        assert tokens(engine) == expected_tokens(adapted) != bare
        running = engine.submit(PROMPTS[0], GREEDY)
        adapted.unload()
        assert engine.submit(PROMPTS[1], GREEDY).result().completions[0].token_ids == bare[1]
        assert running.done


@pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION), reason="transformers adds adapters of a later PEFT alone"
)
def test_an_adapter_added_by_transformers() -> None:
    model = make_model("llama")
    model.add_adapter(lora())
    shake(model)
    with RolloutEngine(model, config=CONFIG) as engine:
        assert tokens(engine) == greedy_tokens(model) != tokens(engine, adapter=None)


def test_trained_tokens_of_one_adapter_below_lora_of_another() -> None:
    """Over a head that is tied to the embedding, one of them active or both."""
    model = peft_model("qwen3", target_modules=["lm_head", "q_proj"])
    model.add_adapter("other", lora(target_modules=["q_proj"], trainable_token_indices=[1, 5, 9, 7]))
    model.set_adapter("default")  # which is active where the other has no tokens
    shake(model, seed=2)
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_like_peft(engine, model, ["default", None, "other", "other"])
        for names in (["default", "other"], ["other", "default"]):
            model.base_model.set_adapter(names)
            (scored,) = engine.score([PROMPTS[0]])
            expected = oracle.logprobs(model, PROMPTS[0][:1], PROMPTS[0][1:]).float()
            torch.testing.assert_close(scored.logprobs, expected, atol=1e-4, rtol=0)
            assert tokens(engine) == greedy_tokens(model)
