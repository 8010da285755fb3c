"""Rows of the state tensors of recurrent layers, which keep one state of a whole sequence (Mamba-2, delta rule).

A state is what came of all tokens up to one place, so another sequence can go on from exactly there. Each slot has a row, in
which its request's state moves on with ``computed``. Other rows hold copies of states at the ends of full blocks, by the keys
of the prefix cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLayout:
    """Rows of the state tensors: one for each slot, one that padding reads and writes, one of zeros, then those for copies."""

    num_slots: int
    num_kept: int

    @property
    def padding(self) -> int:
        return self.num_slots

    @property
    def zeros(self) -> int:
        return self.num_slots + 1

    @property
    def num_rows(self) -> int:
        return self.num_slots + 2 + self.num_kept


class StateCache:
    """Which rows hold copies, and what a plan has to copy.

    Copies are asked for while a plan is made. Copies to slots are made before it runs, and copies from slots after it, for later
    plans to use. A new copy takes the place of the least recently used one. A copy's first use does not count: it is mostly a
    conversation's next turn, which keeps a copy of its own; and of several conversations that take turns, the one used longest
    ago is the next to be needed.
    """

    def __init__(self, layout: StateLayout | None, block_size: int) -> None:
        """layout: None where no layer has a state, and there is nothing to do."""
        self.layout, self.block_size = layout, block_size
        self._free = [] if layout is None else list(range(layout.num_rows - 1, layout.zeros, -1))
        self._row_of: OrderedDict[bytes, int] = OrderedDict()  # the one used longest ago first
        self._used: set[bytes] = set()  # those of them that a sequence has begun with
        self._begun: list[tuple[int, int]] = []
        self._kept: list[tuple[int, int]] = []
        self._coming: dict[bytes, int] = {}  # rows that only the plan being made writes

    @property
    def enabled(self) -> bool:
        return self.layout is not None

    def border(self, num_prompt: int) -> int:
        """Where the state of a prompt's sequences is to be kept: the end of its last full block with tokens after it.

        0 where there is none, no state, or no room for copies.
        """
        if self.layout is None or not self.layout.num_kept:
            return 0
        return (num_prompt - 1) // self.block_size * self.block_size

    def known(self, keys: Sequence[bytes]) -> Iterator[int]:
        """After how many of its blocks a sequence's state is known, largest first. keys: of its blocks, in order."""
        return (n for n in range(len(keys), 0, -1) if keys[n - 1] in self._row_of)

    def begin(self, slot: int, keys: Sequence[bytes]) -> None:
        """Have a slot begin with the known state after the blocks with these keys; with no keys, from zeros."""
        if self.layout is None:
            return
        row = self.layout.zeros
        if keys:
            row = self._row_of[keys[-1]]
            if keys[-1] in self._used:
                self._row_of.move_to_end(keys[-1])
            self._used.add(keys[-1])
        self._begun.append((row, slot))

    def keep(self, slot: int, key: bytes) -> None:
        """Keep the state that a slot has after the plan, at the end of the block with this key."""
        if key in self._row_of or key in self._coming:
            return
        if not self._free:
            if not self._row_of:
                return  # all of them are for this plan already
            oldest, row = self._row_of.popitem(last=False)
            self._used.discard(oldest)
            self._free.append(row)
        self._coming[key] = self._free.pop()
        self._kept.append((slot, self._coming[key]))

    def take(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(copies before the plan runs, copies after it), each a list of (from, to)."""
        before, after = self._begun, self._kept
        if before and self.layout is not None:  # clear the padding's state, too, which may have become anything
            before = [*before, (self.layout.zeros, self.layout.padding)]
        self._row_of |= self._coming
        self._begun, self._kept, self._coming = [], [], {}
        return before, after

    def clear(self) -> None:
        """Forget every copy. Slots keep their states."""
        self._free += self._row_of.values()
        self._row_of.clear()
        self._used.clear()

    def check(self) -> None:
        """Prove the books: every row for copies is free once or holds one. Raises AssertionError."""
        rows = [*self._free, *self._row_of.values()]
        there_are = range(0) if self.layout is None else range(self.layout.zeros + 1, self.layout.num_rows)
        assert sorted(rows) == list(there_are), "rows are lost or held twice"
        assert self._used <= self._row_of.keys(), "a copy that is gone is said to be used"
        assert not self._begun and not self._kept and not self._coming, "copies were asked for and not taken"
