"""An order of tests for a run that may be cut off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

_Item = TypeVar("_Item")


def in_turn(items: Iterable[_Item], group: Callable[[_Item], Hashable]) -> list[_Item]:
    """Wherever the order is cut off, about the same part of every group has come; each group stays in its own order."""
    items = list(items)
    groups = [group(item) for item in items]
    sizes, seen, places = Counter(groups), Counter[Hashable](), list[float]()
    for each in groups:
        places.append((seen[each] + 0.5) / sizes[each])
        seen[each] += 1
    return [items[number] for number in sorted(range(len(items)), key=places.__getitem__)]
