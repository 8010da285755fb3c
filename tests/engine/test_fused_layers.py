"""Which layers are replaced by their fused form, that they follow the weights, and what keeps a layer as it is."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from families import make_model, randomise
from family_fields import FAMILIES
from fused import CONFIG, PROMPTS, assert_like_hugging_face, fused_layers
from hybrid_fields import HYBRIDS
from launches import Launches, named
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention, Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaAttention

from stoker.engine.layers import fused_model as fused_model_module
from stoker.engine.layers.fused_model import FusedModel
from stoker.rollout import RolloutEngine, SamplingParams, binding

# Layers that keep a mixture of experts, in the models of ``families.py``.
OWN_MLP = {
    "qwen3_moe": [0, 2],
    "mixtral": [0, 1, 2],
    "olmoe": [0, 1, 2],
    "gpt_oss": [0, 1, 2],
    "glm4_moe": [1, 2],
    "afmoe": [1, 2, 3],
    "laguna": [1, 2],
    "deepseek_v2": [1, 2],
    "deepseek_v3": [1, 2],
    "llama4": [1, 2],
    "llama4+images": [1, 2],
    "qwen3_next": [0, 1, 2],
    "qwen3_5_moe": [0, 1, 2],
    "lfm2_moe": [1, 2],
    "granitemoehybrid": [0, 1, 2],
    "nemotron_h": [2],
    "lara_mini": [0, 1, 2, 3],
    "kimi_linear": [1, 2],
    "jamba": [1],
    "bailing_hybrid": [1, 2],
}

# Of Gemma 4: without inputs of layers and keys of others, and with experts beside the MLP.
DENSE = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
# Of Falcon-H1, each of them another number.
MULTIPLIERS = {
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.7,
    "mlp_multipliers": [0.6, 1.4],
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.5, 1.1, 0.75, 1.3, 0.65],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.85,
    "attention_bias": True,
    "projectors_bias": True,
}


def fused_model(engine: RolloutEngine) -> FusedModel | None:
    """What runs in place of the model's own forward."""
    owner = getattr(engine._binding.shell.hidden, "__self__", None)
    return owner if isinstance(owner, FusedModel) else None


@pytest.mark.filterwarnings("error::FutureWarning")  # of what transformers is to lose
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_the_families_that_are_fused(family: str) -> None:
    with RolloutEngine(make_model(family), config=CONFIG) as engine:
        layers = fused_layers(engine)
        assert len(layers) == engine.stats().num_layers
        assert [layer.index for layer in layers if not layer.complete] == OWN_MLP.get(family, [])
        assert fused_model(engine) is not None


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_fused_layers_follow_the_weights(family: str) -> None:
    """Every parameter in place, to numbers that no probe has seen."""
    model = make_model(family)
    with RolloutEngine(model, config=CONFIG) as engine:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            randomise(model)
        engine.update_weights()
        assert fused_layers(engine)
        assert_like_hugging_face(engine, model)


def test_every_rotary_embedding_of_a_model_is_followed() -> None:
    model = make_model("gemma3")
    with RolloutEngine(model, config=CONFIG) as engine:
        for name, buffer in model.model.rotary_emb.named_buffers():
            if not name.endswith("original_inv_freq"):
                buffer.mul_(0.5 if name.startswith("full") else 0.7)
                engine.update_weights()
                assert_like_hugging_face(engine, model)


def test_layers_that_are_given_no_rotary_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a model that gives others one, as Lara does."""
    embed, attend = Gemma3RotaryEmbedding.forward, Gemma3Attention.forward

    def embed_local(self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str) -> Any:
        return embed(self, x, position_ids, layer_type) if layer_type == "sliding_attention" else None

    def attend_unturned(self: Any, hidden_states: torch.Tensor, position_embeddings: Any, **given: Any) -> Any:
        one = hidden_states.new_ones(1, 1, self.head_dim)
        return attend(self, hidden_states, position_embeddings=position_embeddings or (one, 0 * one), **given)

    monkeypatch.setattr(Gemma3RotaryEmbedding, "forward", embed_local)
    monkeypatch.setattr(Gemma3Attention, "forward", attend_unturned)
    model = make_model("gemma3")
    with RolloutEngine(model, config=CONFIG) as engine:
        assert len(fused_layers(engine)) == engine.stats().num_layers and fused_model(engine) is not None
        assert_like_hugging_face(engine, model)


@pytest.mark.parametrize(("name", "value", "kept"), [("_POSITIONS", 10, True), ("_KEPT_BYTES", 1000, False)])
def test_rotary_embeddings_are_kept_in_pieces_or_where_they_are_large_not_at_all(
    name: str, value: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_model_module, name, value)
    model = make_model("gemma3")
    with RolloutEngine(model, config=CONFIG) as engine:
        plain = fused_model(engine)
        assert plain is not None and (plain.kept is not None) == kept
        assert_like_hugging_face(engine, model)
        for kind, tables in (plain.kept or {}).items():
            every = torch.arange(len(tables[0]))[None]
            wanted = model.model.rotary_emb(torch.zeros(1), position_ids=every, layer_type=kind)
            assert len(every[0]) >= engine.max_model_len
            assert all(torch.equal(table, whole[0]) for table, whole in zip(tables, wanted, strict=True))


def test_a_softcap_on_the_logits_is_seen_where_they_are_small() -> None:
    model = make_model("gemma2", final_logit_softcapping=40.0)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.01)  # the embeddings too: they are tied
        with RolloutEngine(model, config=CONFIG) as engine:
            assert fused_model(engine) is not None
            model.lm_head.weight.mul_(1e4)
            engine.update_weights()
            assert_like_hugging_face(engine, model)


@pytest.mark.parametrize(
    ("family", "fields", "fused", "complete"),
    [
        ("gemma2", {"hidden_activation": "gelu"}, True, True),
        ("gemma2", {"hidden_activation": "relu"}, True, False),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}, True, True),
        ("llama", {"hidden_act": "quick_gelu"}, True, False),
        ("gemma3", {"attention_bias": True, "attn_logit_softcapping": 3.0}, True, True),
        ("olmoe", {"clip_qkv": None}, True, False),
        ("olmoe", {"clip_qkv": 100.0}, True, False),
        ("olmo", {"clip_qkv": None}, True, True),
        ("llama", {"clip_qkv": 100.0}, False, False),  # at which it does not clip, and that no number reaches
        ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "relu"}, True, True),
        (
            "gpt_neox",
            {"hidden_act": "gelu_new", "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
            True,
            True,
        ),
        ("starcoder2", {"use_bias": False, "hidden_act": "gelu"}, True, True),
        ("starcoder2", {"hidden_act": "quick_gelu"}, True, False),
        ("phi", {"hidden_act": "gelu_new"}, True, True),
        ("phi", {"qk_layernorm": True}, False, False),  # norms of heads that are LayerNorms
        ("cohere2", {"attention_bias": True, "hidden_act": "gelu"}, True, True),
        ("gpt2", {"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True}, True, True),
        ("granite", {"residual_multiplier": 1.0, "logits_scaling": 1.0, "embedding_multiplier": 1.0}, True, True),
        ("glm4", {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_bias": False}, True, True),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, True, True),
        ("lfm2", {"conv_bias": False, "conv_L_cache": 4}, True, True),
        ("lfm2_moe", {"num_dense_layers": 3}, True, True),
        ("falcon_h1", MULTIPLIERS, True, True),
        ("falcon_h1", MULTIPLIERS | {"mamba_rms_norm": False, "mamba_proj_bias": True}, True, True),
        ("falcon_h1", {"mamba_norm_before_gate": False, "mamba_n_groups": 4}, True, True),
        ("bamba", {"mamba_proj_bias": True, "mlp_bias": True, "mamba_n_groups": 1}, True, True),
        ("bamba", {"mamba_conv_bias": False}, True, True),
        ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "nope"}, True, True),
        ("gemma4", DENSE, True, True),
        ("gemma4", DENSE | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}, True, True),
        ("gemma4", DENSE | EXPERTS, True, False),
        ("gemma4", {"use_double_wide_mlp": True, "attention_bias": True, "hidden_activation": "gelu"}, True, True),
        ("gemma4+images", {"tie_word_embeddings": True}, True, True),
        ("llama4", {"moe_layers": [], "attention_bias": True}, True, True),
        ("llama4", {"moe_layers": [], "use_qk_norm": False}, True, True),
        ("llama4", {"moe_layers": [], "attn_temperature_tuning": False}, True, True),
        ("deepseek_v2", {"first_k_dense_replace": 3, "q_lora_rank": 24, "attention_bias": True}, True, True),
        (
            "deepseek_v2",
            {"first_k_dense_replace": 3, "attention_bias": True},
            False,
            False,
        ),  # of two that are one, one has
        ("deepseek_v3", {"first_k_dense_replace": 3, "rope_interleave": False}, True, True),
        ("deepseek_v3", {"first_k_dense_replace": 3, "q_lora_rank": None, "attention_bias": False}, True, True),
        ("nemotron_h", {"layers_block_type": ["mamba", "mlp", "attention", "mlp"], "use_bias": True}, True, True),
    ],
)
def test_variants(family: str, fields: dict[str, Any], fused: bool, complete: bool) -> None:
    model = make_model(family, **fields)
    with RolloutEngine(model, config=CONFIG) as engine:
        layers = fused_layers(engine)
        assert len(layers) == (engine.stats().num_layers if fused else 0)
        assert all(layer.complete == complete for layer in layers)
        assert_like_hugging_face(engine, model)


def test_steps_within_limits_are_those_of_the_forward_that_trains() -> None:
    """Which transformers' own decode steps leave unlimited."""
    model = make_model("bamba", time_step_limit=(0.3, 0.9))
    with RolloutEngine(model, config=CONFIG) as engine:
        assert len(fused_layers(engine)) == engine.stats().num_layers
        for output in engine.generate_batch(PROMPTS, SamplingParams(temperature=0, max_tokens=12)):
            (completion,) = output.completions
            expected = oracle.logprobs(model, output.prompt_token_ids, completion.token_ids).double()
            torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "lfm2", "granitemoehybrid"])
def test_a_layer_that_does_something_else_stays_as_it_is(
    family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a class that says nothing of it, as one from a model's own repository might."""
    model = make_model(family)
    layer = type(model.model.layers[2])
    forward = layer.forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        index = next(m.layer_idx for m in self.modules() if hasattr(m, "layer_idx"))
        return out * 1.01 if index == 2 else out

    monkeypatch.setattr(layer, "forward", scaled)
    caplog.set_level("INFO")
    with RolloutEngine(model, config=CONFIG) as engine:
        assert [fused.index for fused in fused_layers(engine)] == [0, 1]
        assert "1 of 3 layers run as the model's own code" in caplog.text
        assert fused_model(engine) is None
        assert_like_hugging_face(engine, model)


def test_what_keys_are_taken_of_stays_as_it_is_with_what_takes_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of Gemma 4's layers the third takes the keys of the first, and the fourth those of the second."""
    model = make_model("gemma4")
    layer = type(model.model.layers[2])
    forward = layer.forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        return out * 1.01 if self.layer_idx == 2 else out

    monkeypatch.setattr(layer, "forward", scaled)
    caplog.set_level("INFO")
    with RolloutEngine(model, config=CONFIG) as engine:
        assert [fused.index for fused in fused_layers(engine)] == [1, 3]
        assert "2 of 4 layers run as the model's own code" in caplog.text
        assert_like_hugging_face(engine, model)


def test_placeholders_that_are_taken_for_padding() -> None:
    """By Gemma 4, with images or without."""
    model = make_model("gemma4+images")
    model.config.image_token_id, model.config.video_token_id = PROMPTS[0][3], PROMPTS[2][20]
    with RolloutEngine(model, config=CONFIG) as engine:
        assert fused_model(engine) is not None
        assert_like_hugging_face(engine, model)


class Projection(nn.Linear):
    """Of another class, as of a model's own repository."""


@pytest.mark.parametrize("names", [("v_proj",), ("k_proj", "v_proj"), ("k_proj",)])
def test_projections_that_are_something_else_are_not_taken_for_keys_or_for_none(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = LlamaAttention.__init__

    def other(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        for linear in map(self.get_submodule, names):
            linear.__class__ = Projection

    monkeypatch.setattr(LlamaAttention, "__init__", other)
    model = make_model("llama")
    with RolloutEngine(model, config=CONFIG) as engine:
        assert not fused_layers(engine)
        assert_like_hugging_face(engine, model)


@pytest.mark.parametrize("family", ["llama4", "gpt_oss", "gemma4", "deepseek_v2", "gpt2"])
def test_under_the_model_s_own_forward_fused_layers_take_what_it_gives(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotary embeddings in its own form, positions, and inputs of each layer."""
    monkeypatch.setattr(FusedModel, "agrees", lambda self: False)
    model = make_model(family)
    with RolloutEngine(model, config=CONFIG) as engine:
        assert len(fused_layers(engine)) == engine.stats().num_layers and fused_model(engine) is None
        assert_like_hugging_face(engine, model)


ATTENTION = ["linear", "qk_norm_rotary_write", "paged_attention", "linear"]
GELU_MLP = ["linear", "aten.gelu.default", "linear"]


@pytest.mark.parametrize(
    ("family", "layer"),
    [
        ("llama", [*ATTENTION, "linear", "linear"]),
        ("starcoder2", [*ATTENTION, *GELU_MLP]),
        ("gpt2", [*ATTENTION, *GELU_MLP]),
        ("gpt_neox", ["rms_norm", *ATTENTION, *GELU_MLP]),  # the MLP's, before attention is added
        ("phi", ["rms_norm", *ATTENTION, *GELU_MLP]),  # of both
        ("olmo", ["linear", "aten.clamp_.default", *ATTENTION[1:], "linear", "linear"]),
    ],
)
def test_a_layer_is_these_operations_and_nothing_else(
    family: str, layer: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    monkeypatch.setattr(binding, "ops_for", lambda *_, **__: named(launched))
    with RolloutEngine(make_model(family, num_hidden_layers=1), config=CONFIG) as engine:
        (fused,) = fused_layers(engine)
        run, seen = fused.hidden, []

        def hidden(*args: Any, **options: Any) -> torch.Tensor:
            launched.clear()
            with Launches(launched):
                out = run(*args, **options)
            seen.append(launched.copy())
            return out

        monkeypatch.setattr(fused, "hidden", hidden)
        engine.generate_batch(PROMPTS, SamplingParams(max_tokens=3))
    assert seen[-1] == layer


@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        "gemma3",
        "gemma4",
        "olmo2",
        "glm4",
        "granite",
        "phi3",
        "cohere2",
        "starcoder2",
        "gpt_neox",
        "phi",
        "olmo",
        "deepseek_v3",
        "ministral3",
        "lfm2",
        "bamba",
        "falcon_h1",
        "nemotron_h",
    ],
)
def test_in_bf16_the_probes_pass(family: str) -> None:
    model = make_model(family).bfloat16()
    with RolloutEngine(model, config=CONFIG) as engine:
        assert len(fused_layers(engine)) == engine.stats().num_layers
        assert fused_model(engine) is not None
