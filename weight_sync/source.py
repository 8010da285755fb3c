"""Where the engine's weights come from, decided by what the trainer holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stoker.kernels.errors import UnsupportedModelError
from stoker.weight_sync.aliased import AliasedSource


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel and ``torch.compile``."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def source_for(model: nn.Module) -> AliasedSource:
    """The source for a live model. Resolve it anew whenever the trainer may have wrapped or replaced its model.

    Raises ``UnsupportedModelError`` where the parameters cannot be borrowed as they are.
    """
    module = unwrap(model)
    what: Any = type(module).__name__
    if hasattr(module, "peft_config") or getattr(module, "_hf_peft_config_loaded", False):
        raise UnsupportedModelError(
            f"{what} carries PEFT adapters, which the engine does not run yet: give the base model, or merge the adapter"
        )
    if getattr(module, "quantization_method", None) is not None:
        raise UnsupportedModelError(f"{what} is quantised ({module.quantization_method}), which is not supported yet")
    if (
        isinstance(module, torch.distributed.fsdp.FullyShardedDataParallel)
        if torch.distributed.is_available()
        else False
    ):
        raise UnsupportedModelError(f"{what} is sharded by FSDP, which is not supported yet")
    parameters = dict(module.named_parameters())
    if not parameters:
        raise UnsupportedModelError(f"{what} has no parameters")
    for name, parameter in parameters.items():
        if parameter.is_meta or parameter.numel() == 0:
            raise UnsupportedModelError(
                f"parameter {name} of {what} holds no data here (meta, offloaded or ZeRO-3): sharded and offloaded "
                "parameters are not supported yet, give a model with full parameters"
            )
        if type(parameter.data) is not torch.Tensor:
            raise UnsupportedModelError(
                f"parameter {name} of {what} is a {type(parameter.data).__name__}: sharded and quantised parameters are "
                "not supported yet, give a model with full parameters"
            )
    kinds = {(str(p.dtype), str(p.device)) for p in parameters.values() if p.is_floating_point()}
    if len(kinds) > 1:
        raise UnsupportedModelError(
            f"{what} mixes dtypes or devices: {sorted(kinds)}. Bring its parameters to one dtype on one device"
        )
    return AliasedSource(module)
