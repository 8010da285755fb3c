"""Tells in a few passes of C whether named tensors are such as fitted before, but for their numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter, eq
from typing import Any

from torch import Tensor

from stoker.weight_sync.module_tree import layout_of

# What is asked of each tensor besides its layout, in an order in which each can be asked for where those before it are what
# they were. Of one at the same address, another storage changes nothing: what it overlaps is what it overlapped.
_TRAITS = (type, attrgetter("layout"), attrgetter("device"), attrgetter("dtype"), attrgetter("shape"), Tensor.data_ptr)
_Ask = Callable[[Any], Any]


class Form:
    """All but the numbers of tensors that are given, and of those whose place they take.

    A trainer gives the same ones step after step, and to judge each anew asks Python some ten times about it, while the device
    waits. Holds no tensor. places: of the targets, as ``WeightSource.places``. copy: how the one is copied to the other, as
    ``Ops.prepare_copies`` tells, once it is known.
    """

    def __init__(
        self,
        given: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        optional: Collection[str],
        places: object = None,
    ) -> None:
        self.places = places
        self.copy: Callable[[Sequence[Tensor], Sequence[Tensor]], None] | None = None
        self._given, self._targets = _traits(given), _traits(targets)
        self._ids, self._optional = list(map(id, targets.values())), optional  # of one that is tied, the same

    def same(self, given: Mapping[str, Any], targets: Mapping[str, Tensor], optional: Collection[str]) -> bool:
        """Whether these are like them, each in the memory that it was in."""
        same = optional == self._optional and list(map(id, targets.values())) == self._ids
        return same and _have(targets, *self._targets) and self.fits(given)

    def fits(self, given: Mapping[str, Any]) -> bool:
        """Whether these are like those that were given, where the targets are known to be what they were."""
        return _have(given, *self._given)


def _traits(tensors: Mapping[str, Tensor]) -> tuple[list[str], list[tuple[_Ask, list[Any]]]]:
    """Names; and what was asked of the tensors, with the answers."""
    asked: tuple[_Ask, ...] = (*_TRAITS, layout_of(tensors.values()))
    return list(tensors), [(ask, list(map(ask, tensors.values()))) for ask in asked]


def _have(tensors: Mapping[str, Any], names: list[str], traits: Sequence[tuple[_Ask, list[Any]]]) -> bool:
    """Whether tensors have these. No answer is kept while others are asked for: of hundreds, Python would collect garbage."""
    values = list(tensors.values())
    return list(tensors) == names and all(all(map(eq, map(ask, values), answers)) for ask, answers in traits)
