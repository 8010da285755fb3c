"""The device and dtype of an engine that a TRL trainer uses, whose model FSDP or DeepSpeed may move or cast when training begins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from stoker.integrations.mixed_precision import as_the_forward
from stoker.rollout import EngineConfig
from stoker.weight_sync.naming import named_tensors, unwrap
from stoker.weight_sync.shards import is_sharded

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_auto(trainer: Any, model: nn.Module, config: EngineConfig) -> EngineConfig:
    """The config with "auto" replaced by the device and dtype that the model will have, if they are not those it has now.

    Under FSDP and DeepSpeed transformers' Trainer leaves a model on the host until it trains. DeepSpeed then casts it;
    accelerate's FSDP makes its parameters fp32 under mixed precision, while the forward goes on in the dtype they had. On a GPU, a
    model that was loaded in fp32 is sampled in the dtype of mixed precision (``as_the_forward``).
    """
    if getattr(unwrap(model), "quantization_method", None) is not None:
        return config
    parameters = [t for _, t, _ in named_tensors(model) if isinstance(t, nn.Parameter)]
    own = {p.dtype for p in parameters}
    if is_sharded(model):
        return as_the_forward(config, trainer.accelerator, own)
    device = trainer.accelerator.device
    if config.device == "auto" and all(p.device.type != device.type for p in parameters):
        config = replace(config, device=device)
    state = trainer.accelerator.state
    if config.dtype == "auto" and getattr(state, "deepspeed_plugin", None) is not None:
        settings = state.deepspeed_plugin.deepspeed_config
        cast = [dtype for name, dtype in _DTYPES.items() if settings.get(name, {}).get("enabled") is True]
        return replace(config, dtype=cast[0]) if cast else config
    config = as_the_forward(config, trainer.accelerator, own)
    if config.dtype == "auto" and getattr(state, "fsdp_plugin", None) is not None and len(own) == 1:
        return replace(config, dtype=own.pop())
    return config
