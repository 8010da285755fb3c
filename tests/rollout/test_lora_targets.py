"""What adapters may be over besides the layers' linears: biases, embeddings, the head, experts, and each other."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from adapted import (
    BIASES,
    CONFIG,
    EXPERTS,
    GREEDY,
    PROMPTS,
    assert_like_peft,
    expected_tokens,
    greedy_tokens,
    lora,
    peft_model,
    shake,
    state_dict,
    tokens,
    two_adapters,
)
from families import make_model
from peft import PeftModel

from stoker.rollout import LIVE, RolloutEngine, UnsupportedModelError

OF_LAYERS = ["per_layer_model_projection", "embed_tokens_per_layer"]
LLAMA4_EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]

VARIETIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"bias": "all"}),
    ("llama", {"bias": "lora_only"}),
    ("gpt_neox", {"bias": "all", "target_modules": ["query_key_value"]}),
    ("starcoder2", {"bias": "all", "target_modules": ["q_proj", "c_fc"]}),
    ("llama", {"lora_bias": True}),
    ("mistral", {"target_modules": ["embed_tokens", "q_proj"]}),
    ("qwen3", {"target_modules": ["embed_tokens", "v_proj"], "use_rslora": True}),
    ("qwen3", {"target_modules": ["embed_tokens", "v_proj"], "ensure_weight_tying": True, "r": 5}),
    ("qwen3", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True}),
    ("gemma3", {"target_modules": ["embed_tokens"]}),
    ("gemma3", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    ("qwen3", {"target_modules": ["lm_head", "q_proj"]}),
    ("mistral", {"trainable_token_indices": [1, 5, 9]}),
    ("gemma3", {"trainable_token_indices": {"embed_tokens": [7, 3]}}),
    ("mistral", {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [60]}}),
    ("qwen3", {"trainable_token_indices": [5, 3, 90], "use_dora": True}),
    ("qwen3", {"target_modules": ["v_proj"], "trainable_token_indices": {"lm_head": [5, 3]}}),  # of a tied head alone
    # Of a tied head below LoRA: PEFT has both over one module only so.
    ("qwen3", {"target_modules": ["lm_head", "q_proj"], "trainable_token_indices": [1, 5, 9, 7], "lora_bias": True}),
    ("mistral", {"modules_to_save": ["norm"], "target_modules": ["v_proj"]}),  # and whatever else ends so
    ("mistral", {"trainable_token_indices": {"tokens": [7, 3]}}),
    ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    ("mixtral", {"target_modules": [], "target_parameters": EXPERTS[1:], "use_rslora": True}),
    ("gpt_oss", {"target_modules": ["o_proj"], "target_parameters": EXPERTS[:1]}),
    ("gpt_oss", {"target_modules": [], "target_parameters": EXPERTS}),
    ("gpt_oss", {"target_modules": ["o_proj"], "target_parameters": BIASES[1:], "use_rslora": True}),
    (
        "gpt_oss",
        {
            "target_modules": [],
            "target_parameters": [*BIASES, *EXPERTS],
            "rank_pattern": {"gate_up_proj_bias": 3, "experts.down_proj": 5},
        },
    ),
    ("glm4_moe", {"target_modules": ["o_proj"], "target_parameters": EXPERTS}),
    ("llama4", {"target_modules": ["o_proj"], "target_parameters": LLAMA4_EXPERTS}),
    ("llama4", {"target_modules": [], "target_parameters": LLAMA4_EXPERTS[1:], "r": 7}),
    ("gemma4", {"target_modules": "all-linear"}),
    ("gemma4", {"target_modules": [*OF_LAYERS, "k_proj"], "use_dora": True}),
    ("deepseek_v3", {"target_modules": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"], "use_dora": True}),
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
    (
        "qwen3_moe",
        {"target_modules": ["o_proj"], "target_parameters": ["mlp.gate.weight"], "alpha_pattern": {"gate.weight": 40}},
    ),
    # The latter two have indexers, which choose every key whatever is over them: in fused layers, and in such as are not.
    *((family, {"target_modules": "all-linear"}) for family in ("olmoe", "deepseek_v32", "axk2")),
    ("deepseek_v32", {"target_modules": ["o_proj"], "modules_to_save": ["k_norm"]}),
    ("axk2", {"target_modules": ["o_proj"], "modules_to_save": ["indexer"]}),
    ("gpt_oss", {"target_modules": ["q_proj"], "bias": "all"}),
    ("mistral", {"target_modules": ["q_proj", "embed_tokens"], "init_lora_weights": "mica"}),
    (
        "llama",
        {
            "target_modules": ["v_proj"],
            "target_parameters": ["q_proj.weight", "mlp.up_proj.weight"],
            "rank_pattern": {"q_proj.weight": 3},
            "alpha_pattern": {"q_proj": 40, "up_proj.weight": 20},  # the first is over no linear here
        },
    ),
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
        assert_like_peft(engine, model, ["folder", None, "default", "model"], others={"folder": other, "model": other})
        names = ["tensors", "model", "folder", LIVE, None]
        batch = engine.generate_batch([p for p in PROMPTS for _ in names], GREEDY, adapter=names * len(PROMPTS))
        found = [[o.completions[0].token_ids for o in list(batch)[i::5]] for i in range(5)]
        assert found[0] == found[1] == found[2] != found[3] != found[4]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"bias": "all", "lora_bias": True}),
        ("qwen3", {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}),
        ("mistral", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 3]}),
        ("qwen3_moe", {"target_modules": [], "target_parameters": [*EXPERTS, "mlp.gate.weight"]}),
        ("gpt_oss", {"target_modules": [], "target_parameters": [EXPERTS[0], *BIASES]}),
    ],
    ids=str,
)
def test_updates_in_place_are_seen_and_nothing_is_written(family: str, options: dict[str, Any]) -> None:
    model, other = (peft_model(family, seed=s, **options) for s in (1, 2))
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.load_adapter("other", other)
        before = tokens(engine), tokens(engine, adapter="other")
        lora_layers = engine._binding.shell.lora
        layout = lora_layers.layout
        shake(model, seed=3)
        shake(other, seed=4)
        both = [*model.named_parameters(), *other.named_parameters()]
        copies = [t.clone() for _, t in both]
        assert tokens(engine) == expected_tokens(model) != before[0]
        assert tokens(engine, adapter="other") == expected_tokens(other) != before[1]
        assert engine.update_weights() == engine.weight_version and lora_layers.layout == layout
        assert all(torch.equal(t, copy) for (_, t), copy in zip(both, copies, strict=True))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"modules_to_save": ["lm_head"], "lora_bias": True}),
        ("qwen3", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
        ("qwen3_moe", {"target_modules": [], "target_parameters": [*EXPERTS[:1], "mlp.gate.weight"]}),
    ],
    ids=str,
)
def test_over_a_mirror_in_bfloat16(family: str, options: dict[str, Any]) -> None:
    """Adapters stay in the trainer's dtype."""
    model = peft_model(family, **options)
    with RolloutEngine(model, config=replace(CONFIG, dtype="bfloat16")) as engine:
        adapted, base = (engine.score(PROMPTS[:3], adapter=name) for name in ("default", None))
    expected = torch.cat([oracle.logprobs(model, p[:1], p[1:]).float() for p in PROMPTS[:3]])
    found, without = (torch.cat([score.logprobs for score in scores]) for scores in (adapted, base))
    error = (found - expected).abs().median()
    assert error < 0.1 and 3 * error < (without - expected).abs().median()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"use_dora": True, "modules_to_save": ["lm_head"]}),
        ("qwen2", {"bias": "all", "target_modules": ["embed_tokens", "q_proj"]}),
        ("mistral", {"trainable_token_indices": [1, 5, 9]}),
        ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": [*EXPERTS, "mlp.gate.weight"]}),
    ],
    ids=str,
)
def test_over_a_mirror_in_a_wider_dtype(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Adapters go with the base: what the engine runs is the trainer's model as ``float()`` would make it."""
    model, other = (peft_model(family, seed=s, **options).bfloat16() for s in (1, 7))
    other.save_pretrained(tmp_path, save_embedding_layers=False)
    names = ["default", "theirs", "saved", None]
    with RolloutEngine(model, config=replace(CONFIG, dtype="float32", max_loras=2)) as engine:
        engine.load_adapter("theirs", other)
        engine.load_adapter("saved", tmp_path)
        saved = copy.deepcopy(other).float()
        for change in (None, engine.update_weights, lambda: engine.weight_version, lambda: engine.sleep(level=2)):
            if change is not None:
                for of in (model, other):
                    shake(of, seed=engine.weight_version + 3)
                change()
                engine.wake_up()
            others = {"theirs": copy.deepcopy(other).float(), "saved": saved}
            assert_like_peft(engine, copy.deepcopy(model).float(), names, others=others)
            assert engine.verify_weights().ok


def test_other_tokens_and_another_embedding_are_seen() -> None:
    """Also by an adapter that came with a copy of the embedding it was trained on."""
    model, other = peft_model(trainable_token_indices=[5, 3]), peft_model(target_modules=["embed_tokens"], seed=2)
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.load_adapter("other", (state_dict(other), other.peft_config["default"]))
        before = tokens(engine)
        model.base_model.model.model.embed_tokens.token_adapter.token_indices["default"] = [7, 8]
        assert tokens(engine) == expected_tokens(model) != before
        with torch.no_grad():
            for base in (model.get_input_embeddings().token_adapter, other.get_input_embeddings()):
                base.base_layer.weight.mul_(0.5)
        assert tokens(engine) == expected_tokens(model)
        assert tokens(engine, adapter="other") == expected_tokens(other)


def test_without_its_adapter_a_model_has_the_biases_it_trained() -> None:
    """They are the base's own, where PEFT has them; an adapter that is loaded brings others for its rows."""
    model, other = (peft_model(bias="all", seed=s) for s in (1, 2))
    with RolloutEngine(model, config=CONFIG) as engine:
        engine.load_adapter("other", other)
        untrained = [oracle.greedy(make_model("llama"), p, GREEDY.max_tokens) for p in PROMPTS]
        assert tokens(engine, adapter=None) == expected_tokens(model, None) != untrained
        shake(model, seed=3)
        assert tokens(engine, adapter="other") == expected_tokens(other)
        assert tokens(engine, adapter=None) == expected_tokens(model, None)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "options"), VARIETIES, ids=str)
def test_captured_steps_run_them_too(family: str, options: dict[str, Any]) -> None:
    model, changed = peft_model(family, **options), peft_model(family, seed=2, **options)
    before, after = ((expected_tokens(m), expected_tokens(m, None)) for m in (model, changed))
    rows = ["default", None, None, "default"]
    with RolloutEngine(model.cuda(), config=CONFIG) as engine:
        for expected in (before, before, after, after):
            rows = [*rows[1:], rows[0]]  # a replay has other rows than what was captured
            if expected is after:
                with torch.no_grad():
                    for mine, new in zip(model.parameters(), changed.parameters(), strict=True):
                        mine.copy_(new)
            found = tokens(engine, adapter=rows)
            assert found == [expected[name is None][row] for row, name in enumerate(rows)]
        graphs = engine.core.runner._graphs
        assert graphs and all(graph is not None for graph in graphs.values())


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
            assert found[-1] == greedy_tokens(model)
            score = engine.score([PROMPTS[0] + found[-1][0]], start=len(PROMPTS[0]))[0].logprobs
            expected = oracle.logprobs(model, PROMPTS[0], found[-1][0]).float()
            torch.testing.assert_close(score, expected, atol=1e-4, rtol=0)
            with model.disable_adapter():
                assert tokens(engine) == greedy_tokens(model)
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
        assert {t.data_ptr() for t in engine._binding.adapters.weights["other+default"].tensors()} == ours
        shake(model, seed=5)
        model.base_model.set_adapter(["other", "default"])
        assert tokens(engine) == greedy_tokens(model) != before
        model.set_adapter("other")
        model.delete_adapter("default")
        assert tokens(engine) == greedy_tokens(model)
        assert engine.adapters == ("other",)


@pytest.mark.filterwarnings("ignore")
def test_several_at_once_over_experts_and_a_router() -> None:
    options = {"target_modules": ["v_proj"], "target_parameters": [*EXPERTS, "mlp.gate.weight"]}
    model = peft_model("qwen3_moe", **options)
    model.add_adapter("other", lora(r=3, **options))
    shake(model, seed=2)
    with RolloutEngine(model, config=CONFIG) as engine:
        alone = tokens(engine, adapter="default"), tokens(engine, adapter="other")
        model.base_model.set_adapter(["default", "other"])
        both = tokens(engine, adapter=[LIVE, None, "other", LIVE])
        expected = greedy_tokens(model)
        assert [both[0], both[3]] == [expected[0], expected[3]]
        assert both[2] == alone[1][2] and both[0] not in (alone[0][0], alone[1][0])


@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [2, 5, 9]}])
def test_an_adapter_that_saves_a_module_beside_one_that_does_not(options: dict[str, Any]) -> None:
    """The module knows of the one alone. And a slot that held both forgets the second."""
    model = peft_model(target_modules=["q_proj"], **options)
    model.add_adapter("other", lora(target_modules=["q_proj"]))
    shake(model, seed=2)
    with RolloutEngine(model, config=replace(CONFIG, max_loras=1)) as engine:
        for names in (["default", "other"], ["default"], ["other"], ["other", "default"]):
            model.base_model.set_adapter(names)
            assert tokens(engine) == greedy_tokens(model)


def test_an_adapter_over_the_copy_that_another_has_saved() -> None:
    """To "all-linear" the head that the first adapter has saved is a linear, and so is the one it was copied from."""
    model = peft_model(target_modules=["q_proj"], modules_to_save=["lm_head"])
    model.add_adapter("other", lora(target_modules="all-linear"))
    shake(model, seed=2)
    with RolloutEngine(model, config=CONFIG) as engine:
        for names in (["default"], ["other"]):
            model.base_model.set_adapter(names)
            assert tokens(engine) == greedy_tokens(model)
        model.base_model.set_adapter(["other", "default"])
        with pytest.raises(UnsupportedModelError, match="lm_head is saved whole by the adapter 'default', and 'other'"):
            tokens(engine)
        model.set_adapter("default")
        assert_like_peft(engine, model, ["default", "other", None, "other"])


def test_layers_that_run_different_adapters_are_refused() -> None:
    """Where the live one is asked for, or an update takes it: by name they are there, whatever a thread is switching on or off."""
    model = two_adapters()
    with RolloutEngine(model, config=CONFIG) as engine:
        before, by_name = tokens(engine), [tokens(engine, adapter=name) for name in ("default", "other", None)]
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
        assert [tokens(engine, adapter=name) for name in ("default", "other", None)] == by_name
        with pytest.raises(UnsupportedModelError, match="and other layers"):
            tokens(engine)
        with pytest.raises(UnsupportedModelError, match="and other layers"):
            engine.update_weights()
        layer.enable_adapters(True)
        engine.update_weights()
        assert tokens(engine) == before


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"use_dora": True, "target_modules": "all-linear"}),
        ("qwen3_moe", {"target_modules": [], "target_parameters": ["mlp.gate.weight"]}),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["autocast", "default dtype"])
def test_what_is_derived_of_an_adapter_does_not_depend_on_the_callers_settings(
    family: str, options: dict[str, Any], how: str
) -> None:
    model = peft_model(family, **options)
    with RolloutEngine(model, config=CONFIG) as engine:
        expected = engine.score(PROMPTS)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16 if how == "default dtype" else before)
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"),
            RolloutEngine(model, config=CONFIG) as engine,
        ):
            found = engine.score(PROMPTS)
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(found, expected, strict=True))
