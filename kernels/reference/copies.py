"""Copies of many tensors into others, cast on the way, as plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Write each source to its target, cast to the target's dtype, those of like kind together.

    Of like shapes, and any dtypes, strides and devices. What autograd has saved of a target is known to be written to.
    """
    kinds: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        to, came = kinds.setdefault((target.dtype, source.dtype, source.device), ([], []))
        to.append(target)
        came.append(source)
    with torch.no_grad():
        for to, came in kinds.values():
            torch._foreach_copy_(to, came)


def prepare_copies(
    targets: Sequence[Tensor], sources: Sequence[Tensor]
) -> Callable[[Sequence[Tensor], Sequence[Tensor]], None]:
    """A function that does what ``copy_each`` does, for any tensors in the same places, of the same dtypes and layouts."""
    return copy_each
