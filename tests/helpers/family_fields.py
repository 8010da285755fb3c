"""The configurations of tiny models of every supported family, and of models the engine must refuse.

``families`` builds the models. Every mechanism of a family is switched on, with a value that changes the result within a few
tokens: sliding windows and attention chunks shorter than the test sequences, partial rotary, softcaps, sinks, multipliers,
router biases.
"""

from __future__ import annotations

from typing import Any

VOCAB = 128
WINDOW = 12  # sliding window, and attention chunk, of every family that has one
_SLIDING_FULL = ["sliding_attention", "full_attention", "sliding_attention"]

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    # The embeddings' standard deviation: small, or the token dominates the residual stream and tied weights repeat it.
    "initializer_range": 0.3,
}


def rope(theta: float = 1000.0, **extra: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **extra}


YARN = rope(rope_type="yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=64)
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}

# Fields besides COMMON. hidden_size / num_attention_heads is 12 where no head_dim is given.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "num_hidden_layers": 2,  # most tests are of this one
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"sliding_window": WINDOW, "head_dim": 16},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"head_dim": 16, "attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "phi3": {
        "sliding_window": WINDOW,
        "hidden_size": 64,
        "original_max_position_embeddings": 256,
        "rope_parameters": rope(partial_rotary_factor=0.75),
    },
    "gemma2": {
        "attn_implementation": "eager",  # transformers below 5.18 defaults to sdpa, which ignores the softcap
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
    },
    "gemma3": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
        "layer_types": _SLIDING_FULL,
        "rope_parameters": {
            "sliding_attention": rope(100.0),
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
        },
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
    },
    "olmo2": {},
    "glm4": {"head_dim": 16, "attention_bias": True, "rope_parameters": rope(partial_rotary_factor=0.5)},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.7,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.4,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    },
    "cohere2": {
        "hidden_size": 64,
        "sliding_window": WINDOW,
        "layer_types": _SLIDING_FULL,
        "logit_scale": 1.5,
        "tie_word_embeddings": True,
    },
    "smollm3": {
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "starcoder2": {"sliding_window": WINDOW, "use_bias": True, "tie_word_embeddings": True, "initializer_range": 0.15},
    "exaone4": {"sliding_window": WINDOW, "layer_types": _SLIDING_FULL},
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": YARN
        | {"mscale": 1.0, "mscale_all_dim": 0.8, "llama_4_scaling_beta": 0.5}
        | {"original_max_position_embeddings": 36, "max_position_embeddings": 256},
    },
    "seed_oss": {"head_dim": 16, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    "qwen3_moe": {
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False, "clip_qkv": 1.0},
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.0,
        "rope_parameters": YARN | {"truncate": False},
    },
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 1,
        "routed_scaling_factor": 1.7,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "attention_bias": True,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
    },
    "glm4_moe": {
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "rope_parameters": rope(partial_rotary_factor=0.5),
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
    },
    "afmoe": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "head_dim": 16,
        "sliding_window": WINDOW,
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "route_scale": 1.7,
    },
    "apertus": {"rope_parameters": rope()},
    "hunyuan_v1_dense": {"head_dim": 16, "attention_bias": True},
    "laguna": {
        "num_attention_heads_per_layer": [4, 6, 4],
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "gpt_neox": {"hidden_size": 64, "rope_parameters": rope(partial_rotary_factor=0.25)},
    "phi": {"hidden_size": 64, "rope_parameters": rope(partial_rotary_factor=0.5)},
    "olmo": {"clip_qkv": 1.0},
    "gpt2": {"tie_word_embeddings": True},
    "llama4": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size_mlp": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "moe_layers": [1, 2],
        "no_rope_layers": [1, 0, 1, 1],
        "attention_chunk_size": WINDOW,
        "attn_temperature_tuning": True,
        "floor_scale": 5,
        "attn_scale": 0.4,
    },
    "gemma4": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "global_head_dim": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": 15.0,
    },
    # Text that goes through models of images, by the family of what it goes through there.
    "gemma3+images": {"vision_config": VISION | {"num_hidden_layers": 1}, "mm_tokens_per_image": 4},
    "gemma4+images": {"vision_config": VISION | {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}},
    "mistral+images": {"vision_config": VISION | {"num_hidden_layers": 1, "head_dim": 8}},
    "qwen3+images": {
        "head_dim": 16,
        "rope_parameters": rope(mrope_section=[4, 2, 2]),
        "vision_config": VISION | {"depth": 2, "num_heads": 4, "out_hidden_size": 48, "deepstack_visual_indexes": [0]},
    },
    "llama4+images": {
        "vision_config": VISION
        | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "num_hidden_layers": 1}
    },
}

# Other models of families above, for what those have not.
OTHERS: dict[str, dict[str, Any]] = {
    "gemma4+experts": FAMILIES["gemma4"]
    | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
}

# How many layers of a family's model have experts that go through transformers' interface.
ROUTED = {
    "qwen3_moe": 2,
    "mixtral": 3,
    "olmoe": 3,
    "gpt_oss": 3,
    "deepseek_v2": 2,
    "deepseek_v3": 2,
    "glm4_moe": 2,
    "afmoe": 3,
    "laguna": 2,
}
