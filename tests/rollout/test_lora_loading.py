"""Adapters that are loaded, from other models, tensors and folders, and what becomes of them while requests run."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import oracle
import pytest
import torch
from adapted import (
    CONFIG,
    GREEDY,
    PROMPTS,
    expected_tokens,
    lora,
    peft_model,
    shake,
    state_dict,
    tokens,
    two_adapters,
)
from families import make_model
from peft import get_peft_model

from stoker.engine.adapters.lora import LoraLayers
from stoker.rollout import (
    EngineStateError,
    InvalidRequestError,
    RolloutEngine,
    UnsupportedModelError,
)
from stoker.rollout.adapters import Adapters

LOADED: list[dict[str, Any]] = [
    {},
    {"use_dora": True, "use_rslora": True},
    {  # patterns of whole names, the first of which is of none
        "use_rslora": True,
        "rank_pattern": {"layers.1.self_attn.q_proj": 9, "down_proj": 2},
        "alpha_pattern": {"roj": 99, r"layers\.0\..*|v_proj": 31},
    },
    {"modules_to_save": ["lm_head", "embed_tokens"]},
    {"family": "gpt2", "target_modules": ["c_attn", "c_proj", "c_fc"], "use_dora": True},
]


@pytest.mark.parametrize("options", LOADED)
@pytest.mark.parametrize("how", ["live", "named", "tensors", "folder"])
def test_a_loaded_adapter_is_the_one_it_was(how: str, options: dict[str, Any], tmp_path: Path) -> None:
    other = peft_model(seed=7, **options)
    own = {"family": "gpt2", "target_modules": ["c_attn"]} if "family" in options else {}
    if how == "folder":
        other.save_pretrained(tmp_path)
    source = {
        "live": other,
        "named": (other, "default"),
        "tensors": (state_dict(other), other.peft_config["default"]),
        "folder": tmp_path,
    }[how]
    with RolloutEngine(peft_model(**own), config=CONFIG) as engine:
        mine = tokens(engine)
        engine.load_adapter("other", source)
        assert engine.adapters == ("default", "other")
        assert tokens(engine, adapter="other") == expected_tokens(other) != mine
        assert tokens(engine) == mine


@pytest.mark.parametrize(
    "options", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"], "trainable_token_indices": [3, 17]}]
)
def test_nothing_holds_what_was_unloaded(options: dict[str, Any]) -> None:
    other = peft_model(seed=7, **options)
    with RolloutEngine(make_model("llama"), config=CONFIG) as engine:
        engine.load_adapter("other", (state_dict(other), other.peft_config["default"]))
        assert tokens(engine, adapter="other") == expected_tokens(other)
        held = [weakref.ref(t) for t in engine._binding.adapters.weights["other"].tensors()]
        engine.unload_adapter("other")
        gc.collect()
        assert not [ref for ref in held if ref() is not None]
        assert tokens(engine) == expected_tokens(other, None)


def test_loaded_while_the_models_own_adapter_is_off() -> None:
    """What the model was like meanwhile is not what it is like again."""
    model = peft_model()
    with RolloutEngine(model, config=CONFIG) as engine:
        mine = tokens(engine)
        with model.disable_adapter():
            engine.load_adapter("other", peft_model(seed=7))
        assert tokens(engine) == mine == expected_tokens(model)


def test_another_models_adapter_is_live_and_a_copy_is_not() -> None:
    other = peft_model(seed=7)
    with RolloutEngine(make_model("llama"), config=CONFIG) as engine:
        engine.load_adapter("live", other)
        engine.load_adapter("copy", (state_dict(other), other.peft_config["default"]))
        before = expected_tokens(other)
        assert tokens(engine, adapter="live") == tokens(engine, adapter="copy") == before
        assert engine.weight_version == 0
        shake(other, seed=8)
        assert tokens(engine, adapter="live") == expected_tokens(other) != before
        assert tokens(engine, adapter="copy") == before
        assert engine.weight_version == 1
        assert tokens(engine) == expected_tokens(other, None)


def test_reloaded_under_the_same_name() -> None:
    """No prefix of the one before serves it, though the weight version is the same."""
    first, second = peft_model(seed=7), peft_model(seed=8)
    with RolloutEngine(make_model("llama"), config=CONFIG) as engine:
        for model, copied in ((first, True), (second, True), (first, False), (second, True)):
            engine.load_adapter("a", (state_dict(model), model.peft_config["default"]) if copied else model)
            assert tokens(engine, adapter="a") == expected_tokens(model)
            assert engine.stats().prefix_cache_hit_tokens == 0
        assert engine.weight_version == 0
        engine.unload_adapter("a")
        assert engine.adapters == ()
        with pytest.raises(InvalidRequestError, match="not known: there are none"):
            tokens(engine, adapter="a")


@pytest.mark.parametrize("tell", [False, True])
def test_a_copy_stays_in_its_slot_where_the_base_has_other_parameters(tell: bool) -> None:
    """The engine makes another shell of them, whose slots are empty at first."""
    base, other = make_model("llama"), peft_model(seed=7)
    with RolloutEngine(base, config=CONFIG) as engine:
        engine.load_adapter("other", (state_dict(other), other.peft_config["default"]))
        assert tokens(engine, adapter="other") == expected_tokens(other)
        base.model.norm.weight = torch.nn.Parameter(base.model.norm.weight.detach().clone())
        if tell:
            engine.update_weights()
        assert tokens(engine, adapter="other") == expected_tokens(other)


@pytest.mark.parametrize("tell", [False, True])
def test_a_copy_keeps_its_biases_where_those_of_the_base_change(tell: bool) -> None:
    """In a slot is the difference between them."""
    base, other = make_model("qwen2"), peft_model("qwen2", seed=7, bias="all")
    with RolloutEngine(base, config=CONFIG) as engine:
        engine.load_adapter("other", (state_dict(other), other.peft_config["default"]))
        bare, adapted = tokens(engine, adapter=None), expected_tokens(other)
        assert tokens(engine, adapter="other") == adapted
        with torch.no_grad():
            for layer in base.model.layers:
                layer.self_attn.v_proj.bias += 2
        if tell:
            engine.update_weights()
        assert tokens(engine, adapter="other") == adapted
        assert tokens(engine, adapter=None) != bare


@pytest.mark.parametrize("call", ["load", "unload"])
def test_a_change_that_is_cut_off_in_the_middle_is_made_good(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next call: weights of the adapter are others already, or gone, and its name is not yet."""
    before, after = (peft_model(seed=seed) for seed in (7, 8))
    given = {of: (state_dict(of), of.peft_config["default"]) for of in (before, after)}

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with RolloutEngine(make_model("llama"), config=CONFIG) as engine:
        engine.load_adapter("other", given[before])
        assert tokens(engine, adapter="other") == expected_tokens(before)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Adapters, "_forget", interrupt)
            engine.load_adapter("other", given[after]) if call == "load" else engine.unload_adapter("other")
        if call == "load":
            assert tokens(engine, adapter="other") == expected_tokens(after)
        else:
            with pytest.raises(InvalidRequestError, match="adapter='other' is not known"):
                engine.submit(PROMPTS[0], GREEDY, adapter="other")


def test_a_load_that_fails_at_its_end_has_changed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (peft_model(seed=seed) for seed in (7, 8))
    with RolloutEngine(make_model("llama"), config=CONFIG) as engine:
        engine.load_adapter("a", (state_dict(first), first.peft_config["default"]))
        for source in ((state_dict(second), second.peft_config["default"]), second):
            for name in ("a", "b"):
                with monkeypatch.context() as patch, pytest.raises(MemoryError):
                    patch.setattr(LoraLayers, "know", Mock(side_effect=MemoryError))
                    engine.load_adapter(name, source)
            assert tokens(engine, adapter="a") == expected_tokens(first)
            assert engine.adapters == ("a",)


@pytest.mark.parametrize("copied", [True, False])
def test_an_adapter_that_the_model_gets_under_the_name_of_a_loaded_one(copied: bool) -> None:
    model, other = peft_model(), peft_model(seed=7)
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.load_adapter("x", (state_dict(other), other.peft_config["default"]) if copied else other)
        assert tokens(engine, adapter="x") == expected_tokens(other)
        model.add_adapter("x", lora(r=2))
        shake(model, seed=3)
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match=r"'x' is on the model, and was loaded too: unload_adapter"):
                tokens(engine, adapter="x")
        engine.unload_adapter("x")
        assert tokens(engine, adapter="x") == expected_tokens(model, "x")


def test_load_and_unload_while_requests_run() -> None:
    model, other = peft_model(), peft_model(seed=8)
    tensors, config = state_dict(other), other.peft_config["default"]
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.load_adapter("a", (tensors, config))
        handles = [engine.submit(p, GREEDY, adapter=a) for p in PROMPTS for a in ("a", "default")]
        engine.core.step()
        for call in (lambda: engine.unload_adapter("a"), lambda: engine.load_adapter("a", (tensors, config))):
            with pytest.raises(EngineStateError, match=r"adapter 'a' cannot be .* while 4 requests use it"):
                call()
        with pytest.raises(UnsupportedModelError, match="cannot be loaded from no/such"):
            engine.load_adapter("b", "no/such")
        engine.load_adapter("b", (tensors, config))
        engine.unload_adapter("b")
        found = [h.result().completions[0].token_ids for h in handles]
        assert found[::2] == expected_tokens(other) and found[1::2] == expected_tokens(model)
        engine.unload_adapter("a")


@pytest.mark.parametrize(
    ("settings", "tensors"),
    [
        ([], {}),
        ({}, {}),
        ({"r": "four"}, {}),
        ({"lora_alpha": None}, {}),
        ({"lora_alpha": float("nan")}, {}),
        ({"alpha_pattern": {"q_proj": float("inf")}}, {}),
        ({"rank_pattern": {"(": 4}}, {}),
        ({}, {5: torch.zeros(2)}),
        ({}, {"meta": torch.zeros(2, device="meta")}),
        ({}, {"fp4": torch.empty(2, dtype=torch.float4_e2m1fn_x2)}),
        ({}, {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.tensor(1.0)}),
    ],
)
def test_what_is_no_adapter_is_refused_in_words(settings: Any, tensors: dict[Any, Any], tmp_path: Path) -> None:
    other = peft_model(seed=8)
    other.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps(whole | settings if settings else settings))
    with RolloutEngine(make_model("llama"), config=CONFIG) as engine:
        if not tensors:
            with pytest.raises(UnsupportedModelError, match=r"adapter 'a' cannot be loaded from"):
                engine.load_adapter("a", tmp_path)
        config = (whole | settings if settings else whole) if tensors or settings else settings
        with pytest.raises(UnsupportedModelError, match=r"adapter 'a' cannot be read: .*Give the tensors"):
            engine.load_adapter("a", (state_dict(other) | tensors, config))
        assert engine.adapters == ()
        engine.load_adapter("a", (state_dict(other), whole))
        assert tokens(engine, adapter="a") == expected_tokens(other)


@pytest.mark.parametrize("dtype", ["auto", "float64"])
@pytest.mark.parametrize("level", [2, 3])
def test_loaded_while_the_weights_sleep(level: int, dtype: str) -> None:
    """Magnitudes in a slot are made of the base's weights, which may not be there."""
    model, first, second = make_model("llama"), peft_model(use_dora=True), peft_model(seed=8, use_dora=True)
    with RolloutEngine(model, config=replace(CONFIG, dtype=dtype)) as engine:
        engine.load_adapter("live", first)
        engine.load_adapter("copy", (state_dict(first), first.peft_config["default"]))
        assert tokens(engine, adapter="live") == tokens(engine, adapter="copy") == expected_tokens(first)
        engine.sleep(level)
        shake(first, seed=9)
        engine.load_adapter("second", second)
        engine.unload_adapter("copy")
        engine.wake_up()
        for name, of in (("live", first), ("second", second)):
            assert tokens(engine, adapter=name) == expected_tokens(of)


def test_loaded_while_a_mirror_sleeps_in_which_no_adapter_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Magnitudes of one that has a slot are not made of weights which are not there; until they are made, all sleeps."""
    first, second = peft_model(use_dora=True), peft_model(seed=8, use_dora=True)
    with RolloutEngine(first, config=replace(CONFIG, dtype="bfloat16")) as engine:
        before, base = (engine.score(PROMPTS[:1], adapter=name)[0].logprobs for name in ("default", None))
        engine.sleep(level=2)
        engine.load_adapter("second", second)
        with monkeypatch.context() as patch, pytest.raises(EngineStateError, match="no memory for the adapters"):
            patch.setattr(LoraLayers, "prepare", Mock(side_effect=MemoryError))
            engine.wake_up()
        engine.wake_up(["kv_cache"])
        assert engine.is_sleeping
        engine.wake_up()
        after, found = (engine.score(PROMPTS[:1], adapter=name)[0].logprobs for name in ("default", "second"))
    assert torch.equal(after, before)
    expected = oracle.logprobs(second, PROMPTS[0][:1], PROMPTS[0][1:]).float()
    error = (found - expected).abs().median()
    assert error < 0.1 and 3 * error < (base - expected).abs().median()


def test_an_adapter_deleted_while_requests_use_it() -> None:
    model = two_adapters()
    with RolloutEngine(model, config=CONFIG) as engine:
        kept, lost = (engine.submit(PROMPTS[0], GREEDY, adapter=a) for a in ("default", "other"))
        engine.core.step()
        engine.pause()
        model.delete_adapter("other")
        engine.update_weights()
        engine.resume()
        assert kept.result().completions[0].token_ids == expected_tokens(model)[0]
        assert "deleted from the model" in str(lost.result().error)


def without(tensors: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {n: t for n, t in tensors.items() if part not in n}


def switched_off(model: Any) -> Any:
    model.base_model.disable_adapter_layers()
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t, c: ({n: t[n].new_full(t[n].shape, torch.nan) for n in t}, c), r"'a' has NaN or Inf in base_model"),
        (lambda t, c: (without(t, "layers.0.self_attn.q_proj.lora_A"), c), r"only one of A and B for model.layers.0"),
        (lambda t, c: ({n.replace("layers.0", "layers.9"): t[n] for n in t}, c), r"layers.9.*for another base"),
        (lambda t, c: ({n: t[n][:, :-1] if "_A" in n else t[n] for n in t}, c), r"A \(4, 47\).*for another base"),
        (
            lambda t, c: ({f"{n.removesuffix('.weight')}.{a}.weight": t[n] for n in t for a in "xy"}, c),
            r"lora_A\.y\.weight, and the same of another adapter",
        ),
        (lambda t, c: (t, lora(r=8)), r"rank 4 for .* its config says 8"),
        (lambda t, c: (t, lora(r=2)), r"rank 4 for .* its config says 2"),  # of experts it may be a multiple
        (lambda t, c: (t, lora(use_dora=True)), r"use_dora and the magnitudes"),
        (lambda t, c: (t, lora(init_lora_weights="pissa")), r"made by pissa, which changes the base"),
        (
            lambda t, c: (t | {"base_model.model.lm_head.weight": torch.zeros(128, 48)}, c),
            r"neither LoRA .* nor in modules",
        ),
        (lambda t, c: ({}, c), r"'a' is empty"),
        (lambda t, c: t, r"give a PeftModel, \(PeftModel, adapter name\)"),
        (lambda t, c: switched_off(peft_model()), r"the model has none that is active: name one"),
        (lambda t, c: (peft_model(), "no such"), r"the model has \['default'\], and no 'no such'"),
        (lambda t, c: peft_model("qwen3"), r"for another base"),
        (lambda t, c: peft_model(r=65), r"rank 65"),
    ],
)
def test_what_is_not_loaded(make: Any, message: str) -> None:
    other = peft_model(seed=7)
    with RolloutEngine(peft_model(), config=CONFIG) as engine:
        before = tokens(engine)
        with pytest.raises(UnsupportedModelError, match=message):
            engine.load_adapter("a", make(state_dict(other), other.peft_config["default"]))
        assert engine.adapters == ("default",)
        assert tokens(engine) == before
        with pytest.raises(UnsupportedModelError, match="'default' is on the live model already"):
            engine.load_adapter("default", other)
        with pytest.raises(InvalidRequestError, match="'default' is the live model's: delete_adapter"):
            engine.unload_adapter("default")


def test_an_adapter_that_has_changed_the_base_it_was_made_of() -> None:
    """It is for that base: of another model it is taken over the same weights alone."""
    first = get_peft_model(make_model("llama"), lora(init_lora_weights="pissa")).eval()
    other = copy.deepcopy(first)
    shake(other, seed=8)
    with RolloutEngine(make_model("llama"), config=CONFIG) as engine:
        before = tokens(engine)
        with pytest.raises(
            UnsupportedModelError, match=r"made by pissa, which changes the base.*q_proj\.weight here is"
        ):
            engine.load_adapter("other", other)
        assert engine.adapters == () and tokens(engine) == before
    with RolloutEngine(first, config=CONFIG) as engine:
        engine.load_adapter("other", other)
        assert tokens(engine, adapter="other") == expected_tokens(other) != tokens(engine) == expected_tokens(first)
