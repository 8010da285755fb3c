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
from peft import PeftModel

from stoker.rollout import LIVE, RolloutEngine, UnsupportedModelError

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

VARIETIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"bias": "all"}),
    ("llama", {"bias": "lora_only"}),
    ("gpt_neox", {"bias": "all", "target_modules": ["query_key_value"]}),
    ("starcoder2", {"bias": "all", "target_modules": ["q_proj", "c_fc"]}),
    ("llama", {"lora_bias": True}),
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
    ("glm4_moe", {"target_modules": ["o_proj"], "target_parameters": EXPERTS}),
    ("deepseek_v2", {"target_modules": ["kv_b_proj", "shared_experts.down_proj"]}),
    (
        "qwen3_moe",
        {
            "target_modules": [],
            "target_parameters": EXPERTS,
            "rank_pattern": {"experts.down_proj": 3},
            "alpha_pattern": {"gate_up_proj": 40},
        },
    ),
    ("llama", {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight", "mlp.up_proj.weight"]}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "options"), VARIETIES, ids=str)
def test_like_peft(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The live model's, another model's, and one from a folder in one batch with rows of the base."""
    model, other = peft_model(family, **options), peft_model(family, seed=2, **options)
    other.save_pretrained(tmp_path)
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.load_adapter("folder", tmp_path)
        engine.load_adapter("model", other)
        engine.load_adapter("tensors", (state_dict(other), other.peft_config["default"]))
        others = dict.fromkeys(("folder", "model", "tensors"), other)
        assert_like_peft(engine, model, ["folder", None, "default", "model"], others=others)
        theirs = tokens(engine, adapter="tensors")
        assert theirs == tokens(engine, adapter="model") == tokens(engine, adapter="folder")
        assert theirs != tokens(engine) != tokens(engine, adapter=None)


# -- several at once ---------------------------------------------------------------------------------------------------


def three_adapters() -> PeftModel:
    """Two with DoRA, which does not commute, over some of the same layers."""
    model = peft_model(target_modules=["embed_tokens", "q_proj", "gate_proj"], use_dora=True)
    model.add_adapter("other", lora(target_modules=["q_proj", "gate_proj", "lm_head"], use_dora=True, r=2))
    model.add_adapter("third", lora(target_modules=["embed_tokens", "q_proj", "v_proj"]))
    shake(model, seed=4)
    return model


@pytest.mark.filterwarnings("ignore")
def test_several_adapters_at_once_are_what_peft_makes_of_them() -> None:
    model = three_adapters()
    with RolloutEngine(model, config=CONFIG) as engine:
        before = tokens(engine)
        found = []
        for names in (["default", "other"], ["other", "default"], ["third", "other", "default"]):
            model.base_model.set_adapter(names)
            found.append(tokens(engine))
            assert found[-1] == [oracle.greedy(model, p, GREEDY.max_tokens) for p in PROMPTS]
            score = engine.score([PROMPTS[0] + found[-1][0]], start=len(PROMPTS[0]))[0].logprobs
            expected = oracle.logprobs(model, PROMPTS[0], found[-1][0]).float()
            torch.testing.assert_close(score, expected, atol=1e-4, rtol=0)
            with model.disable_adapter():
                assert tokens(engine) == [oracle.greedy(model, p, GREEDY.max_tokens) for p in PROMPTS]
        assert len({str(t) for t in [before, *found]}) == 4
        sums = {"default+other", "other+default", "third+other+default"}
        assert set(engine.adapters) == {"default", "other", "third"} | sums
        model.set_adapter("default")
        assert tokens(engine, adapter=LIVE) == before
        mixed = tokens(engine, adapter=["default+other", None, "other", "third+other+default"])
        assert mixed[0] == found[0][0] and mixed[3] == found[2][3]
        assert mixed[1:3] == [expected_tokens(model, None)[1], expected_tokens(model, "other")[2]]


def test_several_at_once_move_no_byte_and_follow_the_trainer() -> None:
    model = two_adapters()
    model.base_model.set_adapter(["other", "default"])
    with RolloutEngine(model, config=CONFIG) as engine:
        before = tokens(engine)
        ours = {t.data_ptr() for n, t in model.named_parameters() if "lora_" in n}
        assert {t.data_ptr() for t in engine._binding.adapters["other+default"].tensors()} == ours
        shake(model, seed=5)
        model.base_model.set_adapter(["other", "default"])
        assert tokens(engine) == [oracle.greedy(model, p, GREEDY.max_tokens) for p in PROMPTS] != before
        model.set_adapter("other")
        model.delete_adapter("default")
        assert tokens(engine) == [oracle.greedy(model, p, GREEDY.max_tokens) for p in PROMPTS]
        assert engine.adapters == ("other",)


def test_layers_that_run_different_adapters_are_refused() -> None:
    model = two_adapters()
    with RolloutEngine(model, config=CONFIG) as engine:
        before = tokens(engine)
        layer = model.base_model.model.model.layers[1].self_attn.q_proj
        layer.set_adapter("other")
        with pytest.raises(UnsupportedModelError, match=r"q_proj runs the adapters .*set_adapter on the model"):
            tokens(engine)
        layer.set_adapter("default")
        layer.enable_adapters(False)
        with pytest.raises(
            UnsupportedModelError, match=r"q_proj runs the adapters \[\], and other layers \['default'\]"
        ):
            tokens(engine)
        layer.enable_adapters(True)
        assert tokens(engine) == before
