"""Adapters that are refused, by name: of the live model, of another one, of a file, and choices of them."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from adapted import (
    CONFIG,
    PROMPTS,
    expected_tokens,
    lora,
    peft_model,
    state_dict,
    tokens,
    two_adapters,
)
from families import make_model
from interrupting import InterruptAt
from peft import (
    AdaLoraConfig,
    IA3Config,
    OFTConfig,
    PeftModel,
    PromptTuningConfig,
    TrainableTokensConfig,
    get_peft_model,
)
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig

from stoker.rollout import (
    LIVE,
    InvalidRequestError,
    RolloutEngine,
    SamplingParams,
    UnsupportedModelError,
    shell_builder,
)

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EMBEDDING = "base_model.model.model.embed_tokens"
OF_EMBEDDING = f"{EMBEDDING}.token_adapter.trainable_tokens_delta"
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
HEAD = "base_model.model.lm_head"
TOKENS = "base_model.model.model.norm.token_adapter.trainable_tokens_delta"
ONE = ["q_proj"]


def other_method(config: Any) -> PeftModel:
    return get_peft_model(make_model("llama"), config)


def of_older_peft() -> PeftModel:
    model = peft_model("mixtral", target_modules=[], target_parameters=EXPERTS)
    for module in model.modules():
        vars(module).pop("_param_ndim", None)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: peft_model(alora_invocation_tokens=[1], task_type="CAUSAL_LM"),
            "uses alora_invocation_tokens.*plain LoRA",
        ),
        (lambda: peft_model(layer_replication=[(0, 1), (0, 2)]), r"uses layer_replication.*in the base model"),
        (lambda: peft_model(target_modules=ONE, use_bdlora=BdLoraConfig(ONE, None, 2)), r"uses use_bdlora.*plain LoRA"),
        (lambda: peft_model(use_qalora=True, qalora_group_size=4), r"uses use_qalora.*over the quantised base"),
        (lambda: peft_model(velora_config=VeloraConfig()), r"uses velora_config.*plain LoRA"),
        (lambda: peft_model(kasa_config=KasaConfig()), r"uses kasa_config.*plain LoRA"),
        (lambda: peft_model(monteclora_config=MontecloraConfig()), r"uses monteclora_config.*plain LoRA"),
        (lambda: other_method(IA3Config(target_modules=ONE, feedforward_modules=[])), r"of type IA3.*merge_and_unload"),
        (lambda: other_method(OFTConfig(target_modules=ONE, oft_block_size=4)), r"of type OFT.*merge_and_unload"),
        (
            lambda: other_method(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
            r"of type PROMPT_TUNING: the engine runs LoRA",
        ),
        (lambda: peft_model("mixtral", target_modules=[], target_parameters=EXPERTS, r=65), r"has rank 65"),
        (of_older_peft, r"over a parameter of .*experts, as PEFT before 0.21 has it"),
        # What is not called as a module, or not with one row for each token.
        (
            lambda: peft_model("gemma4", target_modules=ONE, modules_to_save=["per_layer_projection_norm"]),
            r"saves model\.per_layer_projection_norm, which the engine does not run",
        ),
        (
            lambda: peft_model("llama4", target_modules=ONE, modules_to_save=["experts"]),
            r"saves .*experts, which the engine does not run",
        ),
        (
            lambda: peft_model(target_modules=["v_proj"], trainable_token_indices={"q_proj": [3]}),
            r"trains tokens of .*q_proj: .*modules_to_save",
        ),
        # PEFT's head is one without a bias then.
        (
            lambda: peft_model("phi", target_modules=ONE, trainable_token_indices={"lm_head": [3]}),
            r"trains tokens of lm_head: .*modules_to_save",
        ),
        # PEFT's own forward raises: it looks for a bias of what has the tokens.
        (
            lambda: peft_model("qwen3", target_modules=["lm_head"], trainable_token_indices=[3], use_dora=True),
            r"has DoRA over lm_head and trains tokens of it, which PEFT does not run",
        ),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    """Of the model the engine is made of, and of another one."""
    model = make()
    with pytest.raises(UnsupportedModelError, match=message):
        RolloutEngine(torch.nn.DataParallel(model), config=CONFIG)
    with RolloutEngine(make_model(model.config.model_type.removesuffix("_text")), config=CONFIG) as engine:
        with pytest.raises(UnsupportedModelError, match=message):
            engine.load_adapter("a", (model, "default"))
        assert engine.adapters == ()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PromptTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=4), r"of type PROMPT_TUNING"),
        (TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[3]), r"of type TRAINABLE_TOKENS"),
        (AdaLoraConfig(target_modules=ONE, total_step=10), r"of type ADALORA"),
    ],
)
def test_what_is_refused_on_a_part_of_the_model(config: Any, message: str) -> None:
    model = make_model("llama")
    with RolloutEngine(model, config=CONFIG) as engine:
        before, part = tokens(engine), model.model
        model.model = get_peft_model(part, config)
        for call in (engine.update_weights, lambda: tokens(engine), lambda: RolloutEngine(model, config=CONFIG)):
            with pytest.raises(UnsupportedModelError, match=message):
                call()
        model.model = model.model.unload() if hasattr(model.model.base_model, "unload") else part
        assert tokens(engine) == before


def test_active_adapters_that_would_go_by_the_name_of_another() -> None:
    model = two_adapters()
    with RolloutEngine(model, config=CONFIG) as engine:
        model.base_model.set_adapter(["default", "other"])
        both = tokens(engine)
        model.base_model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "default+other")
        with pytest.raises(
            UnsupportedModelError, match=r"\['default', 'other'\] would go by the name 'default\+other', as"
        ):
            tokens(engine)
        assert tokens(engine, adapter="default+other") == expected_tokens(model, "default+other") != both
        model.delete_adapter("default+other")
        model.base_model.set_adapter(["default", "other"])
        assert tokens(engine) == tokens(engine, adapter="default+other") == both


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t, c: t | {f"{EMBEDDING}.base_layer.weight": torch.zeros(128, 48)},
            r"other weights of model.embed_tokens",
        ),
        (lambda t, c: t | {f"{EMBEDDING}.lora_embedding_A": torch.zeros(4, 127)}, r"A \(4, 127\).*for another base"),
        (lambda t, c: t | {f"{Q_PROJ}.lora_B.weight": torch.zeros(63, 4)}, r"B \(63, 4\).*for another base"),
        (
            lambda t, c: t | {f"{Q_PROJ}.lora_B.bias": torch.zeros(3)},
            r"has 3 biases of B for .*q_proj's 64 rows: it is for another base",
        ),
        (
            lambda t, c: t | {f"{Q_PROJ}.base_layer.bias": torch.zeros(3)},
            r"bias of .*q_proj, whose own has another shape",
        ),
        (lambda t, c: t | {"base_model.model.model.norm.bias": torch.zeros(48)}, r"bias of model.norm, whose own"),
        (lambda t, c: setattr(c, "bias", "none") or t, r"has .*bias, which is neither LoRA of a layer nor in modules"),
        (
            lambda t, c: setattr(c, "modules_to_save", ["head"]) or t | {f"{HEAD}.weight": torch.zeros(130, 48)},
            r"saves lm_head with \['weight'\] of another shape than the base",
        ),
        (
            lambda t, c: setattr(c, "modules_to_save", ["head"]) or t | {f"{HEAD}.scale": torch.zeros(130)},
            r"saves lm_head with \['scale'\] of another shape than the base",
        ),
        (lambda t, c: setattr(c, "modules_to_save", ["x"]) or t | {"x.weight": torch.zeros(3)}, r"saves x, which"),
        (lambda t, c: setattr(c, "use_bdlora", True) or t, r"uses use_bdlora"),
        (
            lambda t, c: t | {TOKENS: torch.zeros(2, 48)},
            r"2 tokens of model.norm, and its config 0 trainable_token_ind",
        ),
        (lambda t, c: setattr(c, "arrow_config", True) or t, r"uses arrow_config.*add_weighted_adapter"),
        (
            lambda t, c: setattr(c, "trainable_token_indices", [1, 128]) or t | {OF_EMBEDDING: torch.zeros(2, 48)},
            r"tokens that",
        ),
        (
            lambda t, c: setattr(c, "trainable_token_indices", [1]) or t | {OF_EMBEDDING: torch.zeros(1, 47)},
            r"tokens that",
        ),
        (  # as it is written by hand: PEFT makes none
            lambda t, c: setattr(c, "trainable_token_indices", [1]) or t | {OF_EMBEDDING: torch.zeros(1, 48)},
            r"has LoRA over model.embed_tokens and trains tokens of it, which PEFT does not run: leave it out of one",
        ),
    ],
)
def test_what_is_not_loaded(change: Any, message: str) -> None:
    other = peft_model(target_modules=["embed_tokens", "q_proj"], bias="all", seed=7)
    config = copy.copy(other.peft_config["default"])
    with RolloutEngine(peft_model(), config=CONFIG) as engine:
        with pytest.raises(UnsupportedModelError, match=message):
            engine.load_adapter("a", (change(state_dict(other), config), config))
        assert engine.adapters == ("default",)


def test_an_adapter_of_experts_that_transformers_runs() -> None:
    options = lora(target_modules=ONE, target_parameters=EXPERTS[1:])
    model = get_peft_model(make_model("qwen3_moe", hidden_act="mish"), options)
    with pytest.raises(UnsupportedModelError, match=r"experts.down_proj, which the engine does not run as experts of"):
        RolloutEngine(model, config=CONFIG)


def test_an_adapter_of_experts_that_does_not_fit() -> None:
    other = peft_model("mixtral", target_modules=[], target_parameters=EXPERTS)
    tensors, config = state_dict(other), other.peft_config["default"]
    with RolloutEngine(make_model("mixtral"), config=CONFIG) as engine:
        swapped = {
            n.replace("experts.base_layer.lora_", "experts.lora_"): t for n, t in tensors.items() if ".base_" in n
        }
        with pytest.raises(UnsupportedModelError, match=r"experts.down_proj, whose weight is \(4, 48, 64\)"):
            engine.load_adapter("a", (swapped, config))
        fewer = {n: t[:-1] if "lora_A" in n else t for n, t in tensors.items()}
        with pytest.raises(UnsupportedModelError, match=r"has rank 15 for .*experts, and its config says 4"):
            engine.load_adapter("a", (fewer, config))
    message = r"A \(4, 4, 48\) .*whose weight is \(8, 128, 48\)"
    more = make_model("mixtral", num_local_experts=8)
    with RolloutEngine(more, config=CONFIG) as engine, pytest.raises(UnsupportedModelError, match=message):
        engine.load_adapter("a", (tensors, config))


@pytest.mark.parametrize("fused", [True, False])
def test_attention_that_is_saved_whole_is_refused(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the base's it would run too, and write its keys over those of other requests."""
    if not fused:
        monkeypatch.setattr(shell_builder, "fuse_layers", lambda *_: (0, False))
    with RolloutEngine(make_model("llama"), config=CONFIG) as engine:
        for name in ("self_attn", "layers.1"):
            with pytest.raises(UnsupportedModelError, match=rf"saves model\..*{name}.*, which the engine does not run"):
                engine.load_adapter("a", peft_model(target_modules=["gate_proj"], modules_to_save=[name]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: peft_model(r=65), r"adapter 'default' has rank 65.*max_lora_rank=64"),
        (lambda: peft_model(modules_to_save=["self_attn"]), r"saves model.layers.0.self_attn.*may name"),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(make: Any, message: str) -> None:
    model = make()
    owned = [p.untyped_storage().resizable() for p in model.parameters()]
    with pytest.raises(UnsupportedModelError, match=message):
        RolloutEngine(model, config=CONFIG)
    assert owned == [p.untyped_storage().resizable() for p in model.parameters()]


def test_merged_is_refused_until_it_is_not() -> None:
    model = two_adapters()
    with RolloutEngine(model, config=CONFIG) as engine:
        before = tokens(engine)
        model.merge_adapter(["default"])
        for call in (engine.update_weights, lambda: tokens(engine, adapter=None)):
            with pytest.raises(UnsupportedModelError, match=r"'default' is merged into .*unmerge_adapter"):
                call()
        model.unmerge_adapter()
        assert tokens(engine) == expected_tokens(model)
        assert tokens(engine) == before


def test_merged_in_another_model_is_refused_until_it_is_not() -> None:
    other = peft_model(seed=7)
    with RolloutEngine(make_model("llama"), config=CONFIG) as engine:
        engine.load_adapter("other", other)
        before = tokens(engine, adapter="other")
        other.merge_adapter()
        with pytest.raises(UnsupportedModelError, match=r"'default' is merged into .*unmerge_adapter"):
            tokens(engine, adapter="other")
        other.unmerge_adapter()
        assert tokens(engine, adapter="other") == before


@pytest.mark.parametrize("dtype", ["auto", "float64"])
def test_what_does_not_fit_is_refused_until_it_is_gone(dtype: str) -> None:
    """Looked at again, it is no more than what was there the last time, and as little known to run."""
    model = peft_model()
    with RolloutEngine(model, config=replace(CONFIG, dtype=dtype, max_lora_rank=8)) as engine:
        before = tokens(engine)
        model.add_adapter("large", lora(r=9))
        for call in (engine.update_weights, lambda: tokens(engine), lambda: tokens(engine)):
            with pytest.raises(UnsupportedModelError, match=r"'large' has rank 9 and max_lora_rank=8"):
                call()
        model.delete_adapter("large")
        assert tokens(engine) == before


def test_bad_choices() -> None:
    with RolloutEngine(peft_model(), config=CONFIG) as engine:
        for call in (lambda a: tokens(engine, adapter=a), lambda a: engine.score(PROMPTS, adapter=a)):
            with pytest.raises(InvalidRequestError, match=r"3 adapters for 4 rows"):
                call([None, LIVE, "default"])
            for bad in ("no such", 3, {}, ["default", None, LIVE, "no such"]):
                with pytest.raises(InvalidRequestError, match=r"not known: there are 'default'"):
                    call(bad)
        for bad, why in (
            ("default", r"is the live model's: delete"),
            ("no such", "is not known"),
            (["a"], "is not known"),
        ):
            with pytest.raises(InvalidRequestError, match=why):
                engine.unload_adapter(bad)
        assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks


def test_an_adapter_deleted_from_the_model_while_another_is_loaded() -> None:
    """Its requests fail by name, and none goes on as the base or with what takes its slot."""
    model = two_adapters()
    with RolloutEngine(model, config=CONFIG) as engine:
        handle = engine.submit([5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True), adapter="other")
        engine.wait([handle], share=0, timeout=0)
        state, config = state_dict(model), model.peft_config["default"]
        model.delete_adapter("other")
        engine.load_adapter("new", (state, config))
        error = handle.result().error
        assert error is not None and "adapter 'other' was deleted" in str(error)
        engine.core.scheduler.check()
        assert engine.generate_batch([[5, 6]], SamplingParams(max_tokens=3), adapter="new")[0].error is None


def test_a_refused_load_keeps_the_adapter_of_that_name() -> None:
    plain = make_model("llama")
    model = peft_model()
    state, config = state_dict(model), model.peft_config["default"]
    with RolloutEngine(plain, config=CONFIG) as engine:
        for name in ("a", "b"):
            engine.load_adapter(name, (state, config))
        with pytest.raises(UnsupportedModelError):
            engine.load_adapter("a", ({name: tensor.long() for name, tensor in state.items()}, config))
        for name in ("a", "b"):
            assert engine.generate_batch([[5, 6]], SamplingParams(max_tokens=3), adapter=name)[0].error is None


def test_a_load_is_refused_before_anything_is_changed() -> None:
    """Under the name of several that were active at once, and while an adapter of the model is merged."""
    model = two_adapters()
    given = state_dict(peft_model(seed=5)), peft_model().peft_config["default"]
    other = state_dict(peft_model(seed=6)), peft_model().peft_config["default"]
    with RolloutEngine(model, config=CONFIG) as engine:
        model.base_model.set_adapter(["default", "other"])
        both = tokens(engine)
        with pytest.raises(UnsupportedModelError, match=r"'default\+other' is on the live model already"):
            engine.load_adapter("default+other", given)
        assert tokens(engine) == tokens(engine, adapter="default+other") == both
        for updated in (False, True):
            engine.load_adapter("ref", given)
            expected = tokens(engine, adapter="ref")
            if updated:
                engine.update_weights()
            model.merge_adapter(["default"])
            for name in ("ref", "new"):
                with pytest.raises(UnsupportedModelError, match="merged"):
                    engine.load_adapter(name, other)
            model.unmerge_adapter()
            assert tokens(engine, adapter="ref") == expected
            assert "new" not in engine.adapters
            engine.load_adapter("ref", other)
            assert tokens(engine, adapter="ref") != expected
            engine.unload_adapter("ref")


def test_a_load_that_is_interrupted_anywhere_leaves_adapters_that_run() -> None:
    given = state_dict(peft_model(seed=5)), peft_model().peft_config["default"]
    other = state_dict(peft_model(seed=6)), peft_model().peft_config["default"]
    with RolloutEngine(peft_model(), config=CONFIG) as engine:
        found = []
        for source in (given, other):
            engine.load_adapter("ref", source)
            found.append(tokens(engine, adapter="ref"))
        with InterruptAt() as all_of_it:
            engine.load_adapter("ref", other)
        for event in range(1, all_of_it.count - 2, all_of_it.count // 60):
            engine.load_adapter("ref", given)
            with suppress(KeyboardInterrupt), InterruptAt(event):
                engine.load_adapter("ref", other)
            tokens(engine)  # which looks at what there is
            if "ref" in engine.adapters:
                assert tokens(engine, adapter="ref") in found
            engine.core.scheduler.check()
