"""``verify_weights``: what the engine runs on against what the trainer holds, name by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from adapted import CONFIG, lora, peft_model, shake, tokens
from families import make_model
from mirrored import SMALL, copies, engine_on
from torch import nn

from stoker.rollout import EngineConfig, RolloutEngine, adapter_sources, adapters


def test_verification_names_exactly_what_differs():
    model = make_model("llama")
    name = "model.layers.1.mlp.gate_proj.weight"
    with engine_on(model, "bfloat16") as engine:
        report = engine.verify_weights()
        assert (
            report.ok
            and report.source == "mirror"
            and report.checked == len(model.state_dict()) + len(dict(model.named_buffers()))
        )
        mine = copies(engine)[name]
        kept = mine.clone()
        mine.copy_(mine.flip(0))  # the same values in another order
        assert engine.verify_weights().mismatched == (name,)
        mine.copy_(kept)
        assert engine.verify_weights().ok
        model.get_parameter("lm_head.weight").data[5, 7] += 1
        assert engine.verify_weights().mismatched == ("lm_head.weight",)
        engine.update_weights()
        assert engine.verify_weights().ok
        model.register_buffer("more", torch.zeros(1))
        report = engine.verify_weights()
        assert report.missing == ("more",) and not report.mismatched and not report.ok


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_tensors_that_are_tied_untied_or_of_another_shape_since(quantization: Any) -> None:
    """An update of such a mirror is refused; what it lacks is told by name."""
    tied, plain = make_model("qwen3"), make_model("llama")
    head, gate = "lm_head.weight", "model.layers.0.mlp.gate_proj.weight"
    with (
        engine_on(tied, "bfloat16", quantization=quantization) as of_tied,
        engine_on(plain, "bfloat16", quantization=quantization) as of_plain,
    ):
        tied.lm_head.weight = nn.Parameter(1 + tied.lm_head.weight.detach())
        assert of_tied.verify_weights().mismatched == (head,)
        plain.lm_head.weight = plain.model.embed_tokens.weight
        assert of_plain.verify_weights().mismatched == (head,)
        first, second = (layer.mlp.gate_proj for layer in plain.model.layers[:2])
        first.weight = second.weight
        assert of_plain.verify_weights().mismatched == (head, gate)
        first.weight = nn.Parameter(torch.zeros(3, 5))
        assert of_plain.verify_weights().mismatched == (head, gate)


def test_verification_of_borrowed_tensors_looks_at_where_they_lie():
    model = make_model("llama")
    with RolloutEngine(model, config=EngineConfig(**SMALL)) as engine:
        report = engine.verify_weights()
        assert report.ok and report.source == "aliased"
        model.model.layers[0].mlp.up_proj.weight.data.mul_(2)
        assert engine.verify_weights().ok, "there is only one of each"
        norm = model.model.norm.weight
        norm.data = norm.data.clone()
        gate = model.model.layers[0].mlp.gate_proj.weight
        gate.data = gate.data.clone()
        wrong = ("model.layers.0.mlp.gate_proj.weight",)
        assert engine.verify_weights().mismatched == wrong, "a fused weight does not follow; the parameter itself does"
        head = engine._binding.shell.module.lm_head
        head._parameters["weight"] = head.weight.detach().clone()
        assert engine.verify_weights().mismatched == ("lm_head.weight", *wrong)
        model.lm_head.register_buffer("more", torch.zeros(1))
        del model.model.norm._parameters["weight"]
        report = engine.verify_weights()
        assert report.missing == ("lm_head.more",) and report.extra == ("model.norm.weight",)
        assert report.mismatched == ("lm_head.weight", *wrong)
        assert not replace(report, mismatched=(), missing=()).ok


def test_adapters_of_other_models_are_compared_with_these():
    """Those that are read where they are differ where they lie elsewhere by now, are more or are fewer."""
    other = peft_model(seed=7)
    layer = "model.layers.1.self_attn.q_proj"
    with RolloutEngine(make_model("llama"), config=CONFIG) as engine:
        alone = engine.verify_weights().checked
        engine.load_adapter("theirs", other)
        report = engine.verify_weights()
        assert report.ok and report.checked == alone + sum("lora_" in name for name, _ in other.named_parameters())
        matrix = other.get_submodule(f"base_model.model.{layer}").lora_B["default"].weight
        matrix.data = 2 * matrix.data
        assert engine.verify_weights().mismatched == (f"theirs: {layer}.lora_B.default.weight",)
        tokens(engine, adapter="theirs")
        assert engine.verify_weights().ok
        other.delete_adapter("default")
        other.add_adapter("default", lora(target_modules=["q_proj"]))
        report = engine.verify_weights()
        assert {f"theirs: {layer}.lora_{m}.default.weight" for m in "AB"} < set(report.mismatched)
        assert any("down_proj" in name for name in report.mismatched), "the engine still has it"
        engine.update_weights()
        assert engine.verify_weights().ok
        engine.unload_adapter("theirs")
        assert engine.verify_weights().checked == alone


@pytest.mark.parametrize("options", [{}, {"use_dora": True, "modules_to_save": ["lm_head"]}])
def test_what_slots_hold_copies_of_is_compared(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """As where a trainer's adapters lie on another device than the engine."""
    for module in (adapters, adapter_sources):
        monkeypatch.setattr(module, "lies_on", lambda adapter, device: False)
    model, other = peft_model(**options), peft_model(seed=7, **options)
    model.add_adapter("second", lora(**options))
    trained = [
        {n.removeprefix("base_model.model.") for n, _ in of.named_parameters() if "lora_" in n or "to_save" in n}
        for of in (model, other)
    ]
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.load_adapter("theirs", other)
        for adapter in ("default", "second", "theirs"):
            tokens(engine, adapter=adapter)
        report = engine.verify_weights()
        assert report.ok and report.checked == engine._binding.source.mismatches([])[0] + sum(map(len, trained))
        for prefix, of, names in zip(("", "theirs: "), (model, other), trained, strict=True):
            shake(of, seed=9)
            assert set(engine.verify_weights().mismatched) == {prefix + name for name in names}
            engine.update_weights()
            assert engine.verify_weights().ok
        tokens(engine)
        model.add_adapter("third", lora(**options))  # which no slot can have yet
        assert engine.verify_weights().ok
