"""Patterns that completions have to follow: automata over tokens, side by side on the device, and the state of each slot.

A step masks the logits by the states of its rows, and moves the states on by what it samples. The host has a say only when a
request gets a slot: which automaton it follows, and how far it has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.engine.device import Runtime
from stoker.kernels.reference.constraints import FIRST, FREE, HEADER, ConstraintRows

_ALIGNMENT = 64  # numbers between the beginnings of automata
_LEAST = 1 << 16  # numbers there is room for


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Constraint:
    """An automaton that every completion has to follow to its end. ``table``: int16 [n], as ``ConstraintRows`` has it."""

    table: NDArray[np.int16]
    vocab: int

    def after(self, tokens: Sequence[int]) -> int:
        """The state after these tokens."""
        state = FIRST
        for token in tokens:
            if state >= FIRST:
                row = HEADER + self.vocab + (state - FIRST) * int(self.table[0])
                state = int(self.table[row + int(self.table[HEADER + token])])
        return state


def _nothing() -> None:
    """In place of the constraint of a slot whose state on the device is out of date."""


class Constraints:
    """Where slots' constraints are on the device. Takes no memory before the first one.

    Captured steps remember where automata are, so their memory stays in place, or grows to another power of two. Where it is
    full, automata that no slot follows make way. Constraints are kept alive by requests, not here.
    """

    def __init__(self, runtime: Runtime, num_slots: int) -> None:
        self.rows: ConstraintRows | None = None
        self._runtime = runtime
        self._num_slots = num_slots
        self._of_slot: dict[
            int, Callable[[], Constraint | None]
        ] = {}  # slots whose state on the device may not be ``FREE``
        self._places: WeakKeyDictionary[Constraint, int] = WeakKeyDictionary()
        self._end = 0  # of the last automaton

    def start(self, requests: Iterable[tuple[int, Constraint | None, Sequence[int], int]]) -> None:
        """Begin requests in slots: (slot, constraint, tokens sampled so far, position of the first token that may end it) each."""
        requests = [r for r in requests if r[1] is not None or r[0] in self._of_slot]
        if not requests:
            return
        for slot, constraint, _, _ in requests:
            self._of_slot[slot] = _nothing if constraint is None else ref(constraint)
        try:
            self._start(requests)
        except BaseException:  # no memory, say: the next request in such a slot must not be taken for this one
            self._of_slot.update(dict.fromkeys((slot for slot, *_ in requests), _nothing))
            if self.rows is None:
                self._of_slot.clear()
            raise
        for slot, constraint, _, _ in requests:
            if constraint is None:
                del self._of_slot[slot]

    def _start(self, requests: Sequence[tuple[int, Constraint | None, Sequence[int], int]]) -> None:
        for _, constraint, _, _ in requests:
            if constraint is not None and constraint not in self._places:
                self._place(constraint)
        assert self.rows is not None
        base = np.zeros(self._num_slots + 1, dtype=np.int64)
        for slot, follows in self._of_slot.items():
            if (constraint := follows()) is not None:
                base[slot] = self._places.get(constraint, 0)  # it may have no place after a step that failed
        states = [FREE if c is None else c.after(tokens) for _, c, tokens, _ in requests]
        new = np.array([[slot for slot, *_ in requests], states, [first_end for *_, first_end in requests]])
        based, (slots, now, first_end) = self._runtime.upload(base, new)
        self.rows.base.copy_(based)
        self.rows.states.index_copy_(0, slots, now)
        self.rows.first_end.index_copy_(0, slots, first_end)

    def release(self) -> None:
        """Give the memory back. No request is in a slot."""
        self.rows, self._end = None, 0
        self._of_slot.clear()
        self._places.clear()

    def _place(self, constraint: Constraint) -> None:
        """Put an automaton on the device. Where there is no room behind the others, all that slots follow are written anew.

        Steps launched before have read the old ones by then.
        """
        if self.rows is not None and self._end + len(constraint.table) <= len(self.rows.automata):
            return self._write(self.rows, constraint)
        kept = dict.fromkeys(one for follows in self._of_slot.values() if (one := follows()) is not None)
        wanted = sum(len(one.table) + _ALIGNMENT for one in kept)
        room = max(_LEAST, 2 ** (wanted * 3 // 2).bit_length())
        self._places.clear()
        self._end = 0
        if self.rows is None or room > len(self.rows.automata):
            automata = torch.zeros(room, dtype=torch.int16, device=self._runtime.device)
            if self.rows is None:
                self.rows = self._free_rows(automata)
            else:
                self._runtime.let_go(self.rows.automata)
                self.rows = replace(self.rows, automata=automata)
        for one in kept:
            self._write(self.rows, one)

    def _free_rows(self, automata: Tensor) -> ConstraintRows:
        count = self._num_slots + 1  # one more, for rows whose samples are not kept
        base, states, first_end = (torch.full((count,), n, device=automata.device) for n in (0, FREE, 0))
        return ConstraintRows(automata, base, states, first_end)

    def _write(self, rows: ConstraintRows, constraint: Constraint) -> None:
        (table,) = self._runtime.upload(constraint.table)
        rows.automata[self._end : self._end + len(table)].copy_(table)
        self._places[constraint] = self._end
        self._end = -(-(self._end + len(table)) // _ALIGNMENT) * _ALIGNMENT
