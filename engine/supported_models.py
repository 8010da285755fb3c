"""Which models the engine can run: checks that come before anything is built."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from stoker.engine.layers.experts import knows_interface
from stoker.engine.layers.indexed import keys_kept
from stoker.kernels.errors import UnsupportedModelError

SCALED_BY_LENGTH = ("dynamic", "longrope")  # rotary embeddings that depend on the longest sequence in a batch


def decoder_of(model: Any) -> Any:
    """The base model that text goes through: the text part, of a model that takes images or sound too."""
    decoder = model.get_decoder()
    if not hasattr(decoder, "config"):  # ModernBERT calls its head by that name
        raise UnsupportedModelError(
            f"{type(model).__name__} has no base model besides its head: use model.generate for it"
        )
    return getattr(decoder, "base_model", decoder)


def check_supported(model: nn.Module) -> None:
    """Raise ``UnsupportedModelError`` naming what the engine cannot run, and the remedy."""
    name = type(model).__name__
    if (
        not isinstance(model, PreTrainedModel)
        or not model.can_generate()
        or (not hasattr(model, "lm_head") and not model.get_output_embeddings())
    ):
        # AveragedModel, or one with a value head, say: not unwrapped, as it may compute something else.
        within = next((f"its .{at}" for at, child in model.named_children() if hasattr(child, "generate")), None)
        raise UnsupportedModelError(
            f"{name} is no transformers causal language model: give {within or 'a PreTrainedModel with a head'}"
        )
    decoder = decoder_of(model)
    config: PreTrainedConfig = decoder.config
    if getattr(model.config, "is_encoder_decoder", False) or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder and a decoder: use model.generate for it")
    # Hybrid models do not say so, and are tried.
    if not getattr(model, "_supports_attention_backend", False) and not getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{name} does not route its attention through transformers' AttentionInterface: use model.generate for it"
        )


def check_experts(model: nn.Module, dtype: torch.dtype) -> None:
    """Raise ``UnsupportedModelError`` where torch has no product of experts in the dtype that the engine computes in."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16) and any(map(knows_interface, model.modules())):
        raise UnsupportedModelError(
            f"{type(model).__name__} has experts, and torch has no grouped matmul for them in {dtype}: set "
            "EngineConfig(dtype='float32')"
        )


def check_length(model: PreTrainedModel, max_model_len: int) -> None:
    """Raise ``UnsupportedModelError`` where sequences of that length depend on each other, or see only some of their keys."""
    name, config = type(model).__name__, decoder_of(model).config
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        if (kind := parameters.get("rope_type")) in SCALED_BY_LENGTH:
            limit = config.max_position_embeddings  # for "dynamic"
            if kind == "longrope":
                limit = parameters.get("original_max_position_embeddings") or getattr(
                    config, "original_max_position_embeddings", limit
                )
            if max_model_len > limit:
                raise UnsupportedModelError(
                    f"{name} uses {kind} rotary scaling, where a sequence longer than {limit} changes "
                    f"the numbers of every other one in its batch: set EngineConfig(max_model_len={limit}) or less"
                )
    kept = min((n for n in map(keys_kept, model.modules()) if n is not None), default=max_model_len)
    if max_model_len > kept:
        raise UnsupportedModelError(
            f"{name} has an indexer that keeps {kept} keys for each token, and the engine attends to all keys, which is the same in "
            f"sequences of up to {kept} tokens: set EngineConfig(max_model_len={kept}) or less, or use model.generate for longer ones"
        )
