"""The scales that bitsandbytes keeps beside weights in 4 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

_PARTS = ("absmax", "offset")  # of a state; the scales may be quantised once more, and its ``state2`` has those of that


def is_packed(weight: Tensor) -> bool:
    """Whether a whole weight is in 4 bits, several of them in a number of whatever dtype."""
    return getattr(weight, "quant_state", None) is not None


def scales_of(state: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """What the numbers of a weight depend on besides its bytes, by the names that bitsandbytes saves most of it under."""
    while state is not None:
        yield from ((prefix + part, t) for part in _PARTS if isinstance(t := getattr(state, part, None), Tensor))
        state, prefix = getattr(state, "state2", None), f"{prefix}nested_"  # CPUs' own layouts have no such attribute
