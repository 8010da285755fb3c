"""The scales and states that bitsandbytes keeps beside quantised weights. In 4 bits, sharding leaves the scales whole."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_PARTS = ("absmax", "offset")  # scales in a state; if these are quantised themselves, ``state2`` has their scales


def state_of(module: nn.Module) -> Any:
    """The ``QuantState`` of a module's weight in 4 bits; None for other weights.

    A sharded weight has lost it, together with its class; then the module has it.
    """
    state = getattr(module._parameters.get("weight"), "quant_state", None)
    return getattr(module, "quant_state", None) if state is None else state


def is_packed(weight: Tensor) -> bool:
    """Whether a whole weight is in 4 bits, several of which are packed into a number of some dtype."""
    return getattr(weight, "quant_state", None) is not None


def is_laid_out_for_cpu(state: Any) -> bool:
    return getattr(state, "packing_format_for_cpu", False)


def scales_of(state: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The scales of a weight in 4 bits, by the names under which bitsandbytes saves most of them."""
    while state is not None:
        yield from ((prefix + part, t) for part in _PARTS if isinstance(t := getattr(state, part, None), Tensor))
        state, prefix = getattr(state, "state2", None), f"{prefix}nested_"  # CPUs' own layouts have no such attribute


def with_scales(state: Any, prefix: str, scales: Mapping[str, Tensor], device: torch.device) -> Any:
    """The same state with other tensors for its scales, by their names in ``scales_of``, and its tables on the device."""
    state = copy.copy(state)
    state.code = state.code.to(device)
    for part in _PARTS:
        if prefix + part in scales:
            setattr(state, part, scales[prefix + part])
    if (nested := getattr(state, "state2", None)) is not None:
        state.state2 = with_scales(nested, f"{prefix}nested_", scales, device)
    return state


def give_state(weight: Any, state: Any) -> None:
    weight.quant_state = state


def has_eight_bits(module: nn.Module) -> bool:
    kinds = type(module).__mro__  # FSDP2 puts a class of its own in front
    return any(kind.__name__ == "Linear8bitLt" for kind in kinds)
