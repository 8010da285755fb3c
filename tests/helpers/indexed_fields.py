"""The configurations of tiny models whose layers have indexers, which choose the keys that each query attends to.

They keep ``KEPT`` keys, and by default the models take no more positions. So what all families are tested with is within that.
"""

from __future__ import annotations

from typing import Any

from family_fields import VISION, WINDOW, YARN, rope

KEPT = 64

_INDEXED: dict[str, Any] = {
    "attn_implementation": "eager",
    "max_position_embeddings": KEPT,
    "index_topk": KEPT,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "num_key_value_heads": 4,
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
}
_WITH_QUERIES = _INDEXED | {"q_lora_rank": 24}
_OF_WINDOWS = {  # of dots3_note's layers with one
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 20,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 20,
    "swa_qk_nope_head_dim": 12,
    "swa_v_head_dim": 16,
}

# Fields besides COMMON, as in FAMILIES.
INDEXED: dict[str, dict[str, Any]] = {
    "deepseek_v32": _WITH_QUERIES
    | {"attention_bias": True, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
    # Its third layer takes what the second one's indexer chose.
    "glm_moe_dsa": _WITH_QUERIES | {"num_hidden_layers": 4, "index_topk_freq": 2, "rope_parameters": rope()},
    "axk2": _WITH_QUERIES | {"gated_norm_rank": 8},
    "hy_v4": _WITH_QUERIES
    | {"indexer_types": ["full", "shared", "full"], "learnable_sink_init": 0.5, "swiglu_limit": 1.0},
    "dots3_note": _WITH_QUERIES
    | _OF_WINDOWS
    | {
        "num_hidden_layers": 4,
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        "head_dim": 24,
        "sliding_window": WINDOW,
        "shared_experts_intermediate_size": 32,
    },
    "minimax_m3_vl": _INDEXED
    | {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rotary_dim": 8,
        "intermediate_size": 32,
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 32,
        "num_local_experts": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "index_block_size": 8,
        "index_topk_blocks": KEPT // 8,
        "swiglu_limit": 1.0,
    },
    # Its last two layers attend to keys that are projected from the first two's latent vectors.
    "mistral_large4+images": _INDEXED
    | {
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
        "kv_source_layers": [0, 1, 0, 1],
        "indexer_types": ["full", "full", "shared", "full"],
        "rope_parameters": YARN | {"attention_factor": 1.0},
        "vision_config": VISION | {"num_hidden_layers": 1, "head_dim": 8},
    },
}
