"""Adapters over parts of a block with experts, which runs on few operations without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from adapted import CONFIG, assert_like_peft, peft_model

from stoker.kernels.errors import UnsupportedModelError
from stoker.kernels.ops import CPU, REFERENCE
from stoker.rollout import RolloutEngine, binding

SAVED = [
    ("qwen3_moe", {"target_modules": ["q_proj"], "modules_to_save": ["mlp.gate"]}, 0),
    ("qwen3_moe", {"target_modules": [], "target_parameters": ["mlp.gate.weight"]}, 0),
    ("qwen3_5_moe", {"target_modules": ["in_proj_z"], "modules_to_save": ["shared_expert"]}, 1),
    ("qwen3_5_moe", {"target_modules": ["shared_expert.gate_proj", "shared_expert_gate"]}, 1),
    ("qwen3_5_moe", {"target_modules": "all-linear"}, 1),
    ("mixtral", {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}, 0),
    ("deepseek_v2", {"target_modules": ["o_proj", "shared_experts.down_proj"]}, 1),
    ("glm4_moe", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}, 1),
    ("llama4", {"target_modules": ["shared_expert.up_proj"], "target_parameters": ["experts.gate_up_proj"]}, 1),
    ("llama4", {"target_modules": ["q_proj"], "modules_to_save": ["feed_forward.router"]}, 0),
    ("nemotron_h", {"target_modules": ["shared_experts.up_proj"], "target_parameters": ["experts.up_proj"]}, 1),
    ("nemotron_h", {"target_modules": [], "target_parameters": ["experts.down_proj", "mixer.gate.weight"]}, 0),
    ("gemma4+experts", {"target_modules": ["router.proj"], "target_parameters": ["experts.down_proj"]}, 0),
    ("gemma4+experts", {"target_modules": ["mlp.up_proj"], "target_parameters": ["experts.gate_up_proj"]}, 1),
    ("gemma4+experts", {"target_modules": ["q_proj"], "modules_to_save": ["router"]}, 0),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "options", "routed"), SAVED, ids=str)
def test_adapters_over_parts_of_a_block(
    family: str, options: dict[str, Any], routed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """routed: whether the block still runs on few operations, as without the adapter it does."""
    calls = []

    def noted(*args: Any) -> Any:
        calls.append(args)
        return CPU.route(*args)

    monkeypatch.setattr(binding, "ops_for", lambda *_, **__: replace(CPU, route=noted))
    model = peft_model(family, **options)
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_like_peft(engine, model, ["default", None, "default", None])
        calls.clear()
        assert_like_peft(engine, model, ["default"] * 4)
        assert bool(calls) == bool(routed)
        assert_like_peft(engine, model, [None] * 4)
        assert calls


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "options", "routed"), [SAVED[1], SAVED[5], SAVED[7]], ids=str)
def test_deterministic_mode_takes_no_adapters_over_a_block(
    family: str, options: dict[str, Any], routed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "ops_for", lambda *_, **__: REFERENCE)  # what it would run on is not to be had here
    config = replace(CONFIG, deterministic=True)
    RolloutEngine(peft_model(family, target_modules=["q_proj"]), config=config).close()
    with pytest.raises(UnsupportedModelError, match=r"changes .*mlp.*not with deterministic=True"):
        RolloutEngine(peft_model(family, **options), config=config)
