"""Tells in a few passes of C whether named tensors are such as fitted before, but for their numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter, eq
from typing import Any

import torch
from torch import Tensor

_traits = attrgetter("dtype", "shape", "device", "layout")


class Form:
    """All but the numbers of tensors that are given, and of those whose place they take.

    A trainer gives the same ones step after step, and to judge each anew asks Python some ten times about it, while the device
    waits. Holds no tensor.
    """

    def __init__(self, given: Mapping[str, Tensor], targets: Mapping[str, Tensor], optional: Collection[str]) -> None:
        self._lists, self._optional = list(_lists(given, targets)), optional

    def same(self, given: Mapping[str, Any], targets: Mapping[str, Tensor], optional: Collection[str]) -> bool:
        """Whether these are like them, each in the memory that it was in."""
        return optional == self._optional and all(map(eq, _lists(given, targets), self._lists))


def _lists(given: Mapping[str, Any], targets: Mapping[str, Tensor]) -> Iterator[list[Any]]:
    """What a form consists of. Of what is given, each list can be asked for where those before it are what they were."""
    yield list(map(id, targets.values()))  # of one that is tied, the same
    for tensors in (targets, given):
        values = list(tensors.values())
        yield list(tensors)
        yield list(map(type, values))
        yield list(map(_traits, values))
        yield list(map(Tensor.data_ptr, values))
        yield list(map(torch.UntypedStorage.data_ptr, map(Tensor.untyped_storage, values)))
