"""Adapters of a live PEFT model that are trained, chosen, added and deleted while an engine lives: it follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from adapted import (
    CONFIG,
    GREEDY,
    PROMPTS,
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
