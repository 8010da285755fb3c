"""Every causal language model that transformers has: its log-probabilities are those of its own forward, or it is refused.

Models are as small as their configurations let them be by names that most of them share; what cannot be built so is left out.
``families.py`` has those whose every mechanism is switched on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from stoker.engine.layers import fused_layers
from stoker.engine.layers.fused_moe import is_mixture
from stoker.kernels.errors import UnsupportedModelError
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

_LAYERS, _EXPERTS = 2, 4
_OF_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_SIZES: dict[str, int | float | bool | None] = {
    **dict.fromkeys(_OF_LAYERS, _LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _EXPERTS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    "vocab_size": 128,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 20,
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    "rotary_dim": 8,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_DELTA_RULE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_INDEXER = {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 2}
_SWA = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "q_lora_rank": 16, "kv_lora_rank": 16}
_INKLING = {
    **{f"swa_{name}": size for name, size in _SWA.items() if "lora" not in name},
    "sliding_window_size": 20,
    "rel_extent": 32,
    "unpadded_vocab_size": 128,
}
_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_MAMBA = {"layers_block_type": ["mamba", "hybrid", "mamba"], "num_hidden_layers": 3}
# For types that need names of their own, or would be large without.
_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"), _INDEXER),
    **dict.fromkeys(("inkling_text", "inkling2_text"), _INKLING),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _DELTA_RULE),
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "cpmant": {"dim_ff": 64, "dim_head": 16},
    "ctrl": {"dff": 64},
    "deepseek_v4": _INDEXER | {"num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 16},
    "dots1": {"n_routed_experts": _EXPERTS, "n_shared_experts": 1},
    "dots3_note_text": _INDEXER
    | {f"swa_{name}": size for name, size in _SWA.items()}
    | {"n_group": 2, "head_dim": 32, "swa_num_key_value_heads": 4, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16},
    "gemma3n_text": {
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.5] + [0.0] * 5,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 20},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "zero_expert_num": 2, "moe_topk": 2},
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 8,
        "index_topk_blocks": 8,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe"],
        "num_hidden_layers": 3,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 32,
    },
    "phi4_multimodal": {
        "vision_config": _TOWER | {"image_size": 28, "crop_size": 28, "patch_size": 14},
        "audio_config": _TOWER
        | {"num_blocks": 1, "ext_pw_out_channel": 32, "nemo_conv_channels": 32, "depthwise_separable_out_channel": 32},
    },
    "qwen4_exp_text": _DELTA_RULE
    | {f"indexer_{n}": s for n, s in {"n_heads": 2, "kv_heads": 1, "head_dim": 16, "budget": 64}.items()}
    | {"indexer_compress_ratio": 4, "hc_lowrank": 8},
    "roc_bert": {
        "is_decoder": True,
        **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size"), 32),
        **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim"), 16),
    },
    "zamba": _MAMBA | {"num_key_value_heads": 4},
    "zamba2": _MAMBA | {"mamba_d_state": 16},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
_LEFT_TO_THE_CLASS = ([], ["bos_token_id", "eos_token_id"], ["head_dim"], ["head_dim", "num_key_value_heads"])
_INTERNAL = re.compile("PackedPositions|MaskRule|ShapeProbe|StepContext|stoker_")  # names that say nothing to a user
_MOST_PARAMETERS = 2 * 10**6
PROMPTS = [[5, 9, 2, 77, 31, 8] * 5, [100, 3, 4, 3], [64, 65, 66] * 6]
CONFIG = EngineConfig(kv_cache_memory="128MiB", max_num_seqs=4, max_model_len=64, max_num_batched_tokens=16)


def small(kind: str) -> PreTrainedModel | None:
    """A random model of that type with at most two million parameters; None where these names do not make one."""
    config_class = CONFIG_MAPPING[kind]
    for left in _LEFT_TO_THE_CLASS:
        try:
            default = config_class()
            names = {*vars(default), *getattr(config_class, "attribute_map", {})}.difference(left)
            fields: dict[str, Any] = {name: size for name, size in _SIZES.items() if name in names}
            if "kv_lora_rank" in names:  # heads that have keys of their own
                fields["num_key_value_heads"] = fields["num_attention_heads"]
            types = {name: list(vars(default)[name]) for name in ("layer_types", "mlp_layer_types")
                     if isinstance(vars(default).get(name), list)}  # fmt: skip
            kinds = types.get("layer_types", [])
            layers = next(n for n in range(_LAYERS, 99) if {*kinds[:n]} == {*kinds})  # for one of each
            fields |= dict.fromkeys(fields.keys() & _OF_LAYERS, layers)
            fields |= {name: kinds[:layers] for name, kinds in types.items()} | _OWN.get(kind, {})
            config = config_class(**fields)
            with torch.device("meta"):
                count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
            if count > _MOST_PARAMETERS:
                return None
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        except Exception:  # of any kind: a type may want anything
            continue
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms and biases, off their defaults
                    parameter += 0.1 * torch.randn_like(parameter)
        return model
    return None


@contextmanager
def taken_over(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RolloutEngine, tuple[int, int]]]:
    """An engine; how many layers are fused, and how many mixtures of experts are on its operations with their routers."""
    mixtures: list[int] = []
    with monkeypatch.context() as patch:
        take_over = fused_layers.take_over_mixtures

        def counted(module: nn.Module, *args: Any) -> None:
            take_over(module, *args)
            mixtures.append(sum(map(is_mixture, module.modules())))

        patch.setattr(fused_layers, "take_over_mixtures", counted)
        with RolloutEngine(model, config=CONFIG) as engine:
            yield engine, (engine.stats().fused_layers, sum(mixtures))


@torch.no_grad()
def error(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> tuple[float, bool, tuple[int, int]]:
    """The largest difference of a log-probability that the engine gives, sampled or scored, from the model's own; whether
    all layers are fused; and what is taken over."""
    with taken_over(model, monkeypatch) as (engine, taken):
        batch = engine.generate_batch(PROMPTS, SamplingParams(max_tokens=6, seed=1, ignore_eos=True))
        sequences = [output.prompt_token_ids + output.completions[0].token_ids for output in batch]
        scores, stats = engine.score(sequences), engine.stats()
    worst = 0.0
    for output, ids, score in zip(batch, sequences, scores, strict=True):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        sampled = torch.tensor(output.completions[0].logprobs)
        worst = max(worst, (score.logprobs - expected).abs().max().item())
        worst = max(worst, (sampled - expected[-len(sampled) :]).abs().max().item())
    return worst, stats.fused_layers == stats.num_layers, taken


def test_every_architecture_is_right_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with a cause and a remedy. And in half precision the same of it is taken over."""
    found: dict[str, list[str]] = {"right": [], "refused": [], "wrong": [], "fused": [], "unclear": []}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if (model := small(kind)) is None:
            continue
        try:
            off, fused, of_fp32 = error(model, monkeypatch)
        except UnsupportedModelError as refused:
            found["refused"].append(kind)
            if _INTERNAL.search(str(refused)) or "use model.generate for " not in str(refused):
                found["unclear"].append(f"{kind}: {refused}")
        except Exception as unknown:
            found["wrong"].append(f"{kind}: {unknown!r}")
        else:
            found["right" if off <= 1e-4 else "wrong"].append(kind if off <= 1e-4 else f"{kind}: {off}")
            found["fused"] += [kind] * fused
            with taken_over(model.bfloat16(), monkeypatch) as (_, of_bf16):
                pass
            if of_bf16 != of_fp32:
                found["wrong"].append(f"{kind}: {of_fp32} taken over in fp32, {of_bf16} in bf16")
    assert not found["wrong"] and not found["unclear"], found
    assert len(found["right"]) >= 90 and len(found["fused"]) >= 70, found
    wanted = {"hunyuan_v1_moe", "hyperclovax", "vaultgemma", "minicpm3", "nanochat"}
    assert wanted <= {*found["fused"]}, found
