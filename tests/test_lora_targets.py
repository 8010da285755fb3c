"""What adapters may be over besides the layers' linears: biases, embeddings, the head, experts, and each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from adapted import (
    CONFIG,
    GREEDY,
    PROMPTS,
    assert_like_peft,
    expected_tokens,
    lora,
    peft_model,
    shake,
    state_dict,
    tokens,
    two_adapters,
)
from families import make_model
from peft import LoraConfig, PeftModel, get_peft_model

from stoker.rollout import LIVE, RolloutEngine, UnsupportedModelError

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

VARIETIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"bias": "all"}),
    ("llama", {"bias": "lora_only"}),
    ("gpt_neox", {"bias": "all", "target_modules": ["query_key_value"]}),
    ("starcoder2", {"bias": "all", "target_modules": ["q_proj", "c_fc"]}),
    ("llama", {"lora_bias": True}),
    ("mistral", {"lora_bias": True, "use_dora": True}),
    ("mistral", {"target_modules": ["embed_tokens", "q_proj"]}),
    ("qwen3", {"target_modules": ["embed_tokens", "v_proj"], "use_rslora": True}),
    ("qwen3", {"target_modules": ["embed_tokens", "v_proj"], "ensure_weight_tying": True, "r": 5}),
    ("gemma3", {"target_modules": ["embed_tokens"]}),
    ("gemma3", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    ("qwen3", {"target_modules": ["lm_head", "q_proj"]}),
    ("mistral", {"trainable_token_indices": [1, 5, 9]}),
    ("gemma3", {"trainable_token_indices": {"embed_tokens": [7, 3]}}),
    ("mistral", {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [60]}}),
    ("qwen3", {"trainable_token_indices": [5, 3, 90], "use_dora": True}),
    ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    ("mixtral", {"target_modules": [], "target_parameters": EXPERTS[1:], "use_rslora": True}),
    ("gpt_oss", {"target_modules": ["o_proj"], "target_parameters": EXPERTS[:1]}),
    ("gpt_oss", {"target_modules": [], "target_parameters": EXPERTS}),
    ("glm4_moe", {"target_modules": ["shared_experts.up_proj"], "target_parameters": EXPERTS}),
    ("deepseek_v3", {"target_modules": ["kv_b_proj", "shared_experts.down_proj"]}),
    (
        "qwen3_moe",
        {"target_parameters": EXPERTS, "rank_pattern": {"experts.down_proj": 3}, "alpha_pattern": {"gate_up_proj": 40}},
    ),
    ("llama", {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight", "mlp.up_proj.weight"]}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "options"), VARIETIES, ids=str)
def test_like_peft(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """As the live model's, as another model's, and from its folder, beside rows of the base in the same batch."""
    model = peft_model(family, **options)
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_like_peft(engine, model, ["default", None, "default", None])
        assert tokens(engine) == expected_tokens(model)
    other = peft_model(family, seed=2, **options)
    other.save_pretrained(tmp_path)
    bare = peft_model(family, target_modules=["o_proj" if family != "gpt_neox" else "dense"])
    with RolloutEngine(bare, config=CONFIG) as engine:
        engine.load_adapter("folder", tmp_path)
        engine.load_adapter("model", other)
        engine.load_adapter("tensors", (state_dict(other), other.peft_config["default"]))
        assert_like_peft(engine, other, ["folder", "model", "tensors", "folder"], theirs="default")
        assert tokens(engine, adapter=None) == expected_tokens(bare, None) != tokens(engine, adapter="folder")
        mixed = tokens(engine, adapter=["folder", None, "default", "model"])
        expected = expected_tokens(other), expected_tokens(bare, None), expected_tokens(bare), expected_tokens(other)
        assert mixed == [of[row] for row, of in enumerate(expected)]
