"""The configurations of tiny models with layers that keep a state of whole sequences. See ``family_fields``."""

from __future__ import annotations

from typing import Any

from family_fields import VISION, WINDOW, rope

DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}

# Delta attention whose states forget row by row, and latent attention.
_KIMI = {
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}

# Families some of whose layers keep a state of the whole sequence.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA_RULE | EXPERTS,
    "qwen3_5": DELTA_RULE,
    "qwen3_5_moe": DELTA_RULE | EXPERTS,
    "olmo_hybrid": DELTA_RULE | {"linear_num_key_heads": 4, "linear_allow_neg_eigval": True},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "lfm3": {
        "num_hidden_layers": 6,
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention", "sliding_attention", "conv"],
        "head_dim": 16,
        "sliding_window": WINDOW,
    },
    "bamba": _MAMBA | {"attn_layer_indices": [1], "attn_rotary_emb": 8},
    "falcon_h1": _MAMBA | {"num_hidden_layers": 2, "mamba_d_ssm": 96, "head_dim": 16},
    "granitemoehybrid": _MAMBA
    | {
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "position_embedding_type": "rope",
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.5,
    },
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "attention", "moe", "mamba"],
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 24,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "n_groups": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "lara_mini": DELTA_RULE
    | EXPERTS
    | {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "sliding_attention", "full_attention", "linear_attention"],
        "sliding_window": WINDOW,
    },
    "kimi_linear": _KIMI,
    "bailing_hybrid": _KIMI
    | {
        "head_dim": 16,
        "short_conv_kernel_size": 3,
        "kda_lower_bound": -2.0,
        "rope_parameters": rope(),
        "num_mtp_layers": 0,
    },
    "jamba": {
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 6,
        "mamba_dt_rank": 5,
    },
    "mamba": {"state_size": 6, "time_step_rank": 5},
    "falcon_mamba": {"state_size": 6, "time_step_rank": 5},
    "mamba2": {"num_heads": 4, "head_dim": 24, "n_groups": 2, "state_size": 8, "chunk_size": 8},
    "qwen3_5+images": {  # text that goes through a model of images
        "rope_parameters": rope(partial_rotary_factor=0.5, mrope_section=[2, 1, 1]),
        "vision_config": VISION | {"depth": 1, "num_heads": 4, "out_hidden_size": 48},
    },
}

# Those of them in which no layer attends.
WITHOUT_ATTENTION = {"mamba", "falcon_mamba", "mamba2"}

# Families with a state that the engine does not know.
REFUSED: dict[str, dict[str, Any]] = {
    "minimax": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {},
    "zamba": {  # a state for each of a layer's heads, which are scanned one after the other
        "num_hidden_layers": 2,
        "layers_block_type": ["mamba", "mamba"],
        "num_key_value_heads": 4,
        "mamba_dt_rank": 5,
    },
}
