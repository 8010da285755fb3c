"""``verify_weights``: what the engine runs on against what the trainer holds, name by name."""

from __future__ import annotations

import torch
from families import make_model
from mirrored import SMALL, copies, engine_on

from stoker.rollout import EngineConfig, RolloutEngine


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
        assert engine.verify_weights().missing == ("more",)


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
