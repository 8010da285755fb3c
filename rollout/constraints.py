"""Turns regular expressions into automata over a tokenizer's tokens: made once on the host, then followed on the device."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from stoker.engine.constraints import Constraint
from stoker.kernels.errors import InvalidRequestError
from stoker.kernels.reference.constraints import FIRST, FREE, HEADER, MAY_END, REFUSED
from stoker.rollout.regex import DEAD, START, ByteAutomaton, byte_automaton, distinct
from stoker.rollout.token_texts import Texts, TokenTexts
from stoker.rollout.user_values import shown

MOST_BYTES = 64 << 20  # of one pattern's table
MOST_TOGETHER = 512 << 20  # of the tables of all patterns that requests have, or that were used last
_Functions = tuple[NDArray[np.int32], NDArray[np.int16]]


@dataclass(slots=True)
class ConstraintMaker:
    """Makes constraints for one tokenizer and vocabulary. Those used last are kept, as far as there is room."""

    tokenizer: Any
    vocab: int
    _texts: tuple[int, TokenTexts] | None = None  # with how many tokens the tokenizer had
    _made: WeakValueDictionary[object, Constraint] = field(default_factory=WeakValueDictionary)  # all in existence
    _last: OrderedDict[object, Constraint] = field(default_factory=OrderedDict)
    _lock: Any = field(default_factory=Lock)

    def __call__(self, regex: str, ends: frozenset[int], excluded: frozenset[int]) -> Constraint:
        """The constraint whose completions match ``regex`` and end with one of the ids ``ends``, which occur nowhere else.

        excluded: ids that are never sampled. Raises ``InvalidRequestError``.
        """
        if self.tokenizer is None:
            raise InvalidRequestError("regex needs a tokenizer: RolloutEngine(model, tokenizer=...)")
        ends = ends - excluded
        if not ends:
            raise InvalidRequestError(
                "regex needs an id that ends the completion once its text matches: leave ignore_eos out, or give "
                "stop_token_ids"
            )
        with self._lock:
            key = (regex, ends, excluded, len(self.tokenizer))
            if (found := self._made.get(key)) is None:
                found = self._make(regex, ends, excluded)
                self._make_room(regex, found.table.nbytes)
                self._made[key] = found
            self._last[key] = found
            self._last.move_to_end(key)
            return found

    def _make_room(self, regex: str, wanted: int) -> None:
        """Forget patterns, the least recently used first, until there is room for ``wanted`` bytes more."""
        while self._bytes() + wanted > MOST_TOGETHER and self._last:
            self._last.popitem(last=False)
        if self._bytes() + wanted > MOST_TOGETHER:
            gc.collect()  # finished requests may still hold some
        if self._bytes() + wanted > MOST_TOGETHER:
            raise InvalidRequestError(
                f"regex={shown(regex)}: its table of {wanted / 2**20:.1f} MiB and those of the other patterns of requests are more "
                f"than {MOST_TOGETHER >> 20} MiB together: give fewer different patterns at a time, or smaller ones"
            )

    def _bytes(self) -> int:
        return sum(one.table.nbytes for one in self._made.values())

    def _make(self, regex: str, ends: frozenset[int], excluded: frozenset[int]) -> Constraint:
        if self._texts is None or self._texts[0] != len(self.tokenizer):
            self._texts = len(self.tokenizer), TokenTexts(self.tokenizer, self.vocab)
        table = token_automaton(regex, byte_automaton(regex), self._texts[1], ends, excluded)
        return Constraint(table, self.vocab)


def token_automaton(
    regex: str, automaton: ByteAutomaton, texts: TokenTexts, ends: Collection[int], excluded: Collection[int]
) -> NDArray[np.int16]:
    """The table of a ``Constraint``.

    A token moves each state to another one, as its bytes do one after the other. Tokens that move all states alike, as most
    share that with others, form a class. Tokens after which no match is possible any more are refused.
    """
    vocab = len(texts.later.length)
    text = texts.later.length > 0
    text[[*ends, *excluded]] = False
    of_byte, columns = distinct(automaton.following.T)
    steps = columns.astype(np.int16)  # [kinds of bytes, S]
    functions_of, functions = _functions(regex, steps, of_byte, texts.later, text)
    at_first = _states_at_first(steps, of_byte, texts.first, text)

    is_end = np.zeros(vocab, dtype=np.bool_)
    is_end[list(ends)] = True
    class_of, classes = distinct(np.stack((functions_of, at_first, is_end), axis=1).astype(np.int32))
    # Row 0 is the state before the first token, the others those of the automaton.
    table = np.concatenate((classes[None, :, 1], functions[classes[:, 0], 1:].T)).astype(np.int16)
    accepting = automaton.accepting.copy()
    accepting[0] = accepting[START]
    return _packed(regex, table, accepting, class_of, classes[:, 2] != 0)


def _functions(
    regex: str, steps: NDArray[np.int16], of_byte: NDArray[np.int32], texts: Texts, text: NDArray[np.bool_]
) -> _Functions:
    """(the number of each token's function of the states, [V]; these functions, [F, S]). The first leads only to ``DEAD``."""
    functions = list(np.stack((np.full(steps.shape[1], DEAD), np.arange(steps.shape[1]))).astype(np.int16))
    numbers = {function.tobytes(): number for number, function in enumerate(functions)}
    function_of = text.astype(np.int32)
    left, at = np.flatnonzero(text), 0
    while len(left):
        kind = of_byte[texts.data[texts.start[left] + at]]
        pairs, same = np.unique(function_of[left].astype(np.int64) * len(steps) + kind, return_inverse=True)
        found = []
        for before, by in zip(*np.divmod(pairs, len(steps)), strict=True):
            function = steps[by][functions[before]]
            found.append(numbers.setdefault(function.tobytes(), len(functions)))
            if found[-1] == len(functions):
                functions.append(function)
                if len(functions) * function.nbytes > MOST_BYTES:
                    raise _too_large(regex)
        function_of[left] = np.array(found, dtype=np.int32)[same.reshape(-1)]
        at += 1
        left = left[(function_of[left] != 0) & (texts.length[left] > at)]
    return function_of, np.stack(functions)


def _states_at_first(
    steps: NDArray[np.int16], of_byte: NDArray[np.int32], texts: Texts, text: NDArray[np.bool_]
) -> NDArray[np.int16]:
    """The state after each token where it is the first, [V]."""
    state = np.where(text, START, DEAD).astype(np.int16)
    left, at = np.flatnonzero((state != DEAD) & (texts.length > 0)), 0
    while len(left):
        state[left] = steps[of_byte[texts.data[texts.start[left] + at]], state[left]]
        at += 1
        left = left[(state[left] != DEAD) & (texts.length[left] > at)]
    return state


def _packed(
    regex: str,
    table: NDArray[np.int16],
    accepting: NDArray[np.bool_],
    class_of: NDArray[np.int32],
    ends: NDArray[np.bool_],
) -> NDArray[np.int16]:
    """The table of ``ConstraintRows``, with only those states that a completion can be in."""
    after: list[list[int]] = [np.unique(row[row != DEAD]).tolist() for row in table]
    before: list[list[int]] = [[] for _ in after]
    for state, targets in enumerate(after):
        for target in targets:
            before[target].append(state)
    can_be = _reached(after, [0])
    can_end = _reached(before, np.flatnonzero(accepting).tolist())
    kept = sorted(can_be & can_end)
    if 0 not in kept:
        raise InvalidRequestError(
            f"regex={shown(regex)} is matched by no sequence of tokens that may be sampled: write one that is, or suppress fewer"
        )
    number = np.full(len(table), REFUSED, dtype=np.int16)
    number[kept] = np.arange(FIRST, FIRST + len(kept))
    number[DEAD] = REFUSED  # it has the number of the state before the first token, to which no token leads
    table, accepting = number[table[kept]], accepting[kept]
    goes_on = (table != REFUSED).any(1)
    table[:, ends] = np.where(accepting, np.where(goes_on, MAY_END, FREE), REFUSED)[:, None]
    merged, columns = distinct(table.T)
    if max(columns.shape) > np.iinfo(np.int16).max or 2 * columns.size > MOST_BYTES:
        raise _too_large(regex)
    header = [len(columns)] + [0] * (HEADER - 1)
    return np.concatenate([np.array(part).reshape(-1) for part in (header, merged[class_of], columns.T)]).astype(
        np.int16
    )


def _reached(edges: list[list[int]], start: list[int]) -> set[int]:
    found, todo = set(start), list(start)
    while todo:
        new = [state for state in edges[todo.pop()] if state not in found]
        found.update(new)
        todo += new
    return found


def _too_large(regex: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"regex={shown(regex)} takes a table of more than {MOST_BYTES >> 20} MiB over this vocabulary: repeat less often, without "
        "bounds (* and +), or give fewer alternatives"
    )
