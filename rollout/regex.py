"""A regular expression, as Python's ``re`` reads it, as an automaton over the bytes of UTF-8.

The parser is Python's own, and so are the characters that a class or a case-insensitive letter stands for: ``re`` is asked
for them. From its tree a nondeterministic automaton is made (Thompson, "Regular expression search algorithm", CACM 1968),
from that a deterministic one by the construction of subsets, both over classes of characters that nothing in the pattern
tells apart; in the end each step over a character becomes steps over its bytes. What such an automaton cannot do is refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.kernels.errors import InvalidRequestError
from stoker.rollout.user_values import shown

DEAD, START = 0, 1
MOST_STATES = 30_000  # two bytes hold a state's number
_MOST_CHARACTERS = 10 * MOST_STATES  # which Python's parser takes seconds for
_MOST_WORK = 10_000_000  # states that are looked at while subsets are made
_ROUNDS = 256
_CHARACTERS = sys.maxunicode + 1
_SURROGATES = range(0xD800, 0xE000)
_ANCHORS = {"AT_BEGINNING": "^", "AT_BEGINNING_STRING": r"\A", "AT_END": "$", "AT_END_STRING": r"\Z"}
_REFUSED = {
    "ASSERT": "a look-around",
    "ASSERT_NOT": "a look-around",
    "FAILURE": "a look-around",
    "GROUPREF": "a back-reference",
    "GROUPREF_IGNORE": "a back-reference",
    "GROUPREF_EXISTS": "a condition on a group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repeat",
}


@dataclass(frozen=True, slots=True, eq=False)
class ByteAutomaton:
    """Reads bytes from state ``START`` on. In ``DEAD`` the pattern can no longer match; it leads nowhere else."""

    following: NDArray[np.int32]  # [S, 256], the state after each byte
    accepting: NDArray[np.bool_]  # [S], whether what was read matches the pattern


def byte_automaton(pattern: str) -> ByteAutomaton:
    """The automaton of all texts that ``re.fullmatch(pattern, text)`` matches.

    Raises ``InvalidRequestError`` for what is no pattern, what an automaton cannot do, and what takes too many states.
    """
    nodes = check(pattern)
    following, accepting, class_of = _over_classes(pattern, nodes)
    return _over_bytes(pattern, following, accepting, class_of)


@lru_cache(maxsize=16)
def check(pattern: str) -> _Nodes:
    """The pattern as a nondeterministic automaton. Raises as ``byte_automaton``, but for what only that finds out."""
    if len(pattern) > _MOST_CHARACTERS:
        raise InvalidRequestError(
            f"regex={shown(pattern)} has {len(pattern)} characters, and at most {_MOST_CHARACTERS} are read: give a shorter one"
        )
    parser: Any = re._parser  # type: ignore[attr-defined]
    try:
        re.compile(pattern)
        tree = parser.parse(pattern)
        nodes = _Nodes(pattern)
        nodes.end = nodes.sequence(tree, nodes.new(), tree.state.flags, first=True, last=True)
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidRequestError(f"regex={shown(pattern)} is no regular expression: {error}") from error
    return nodes


def _too_large(pattern: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"regex={shown(pattern)} takes more than {MOST_STATES} states: repeat less often, without bounds (* and +), or narrower "
        r"classes, as [a-z] or (?a:\w) for \w"
    )


# -- from the tree to a nondeterministic automaton -----------------------------------------------------------------------


class _Nodes:
    """Nodes by number, 0 the first: those reached from each by reading nothing, and by reading a character of a set."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.empty: list[list[int]] = []
        self.edges: list[list[tuple[int, int]]] = []  # set, node
        self.sets: dict[tuple[int, ...], int] = {}  # where runs of characters begin and end, in turn; numbered
        self.end = 0

    def new(self) -> int:
        if len(self.empty) > 4 * MOST_STATES:
            raise _too_large(self.pattern)
        self.empty.append([])
        self.edges.append([])
        return len(self.empty) - 1

    def sequence(self, items: Any, at: int, flags: int, *, first: bool, last: bool) -> int:
        """The node after ``items``. first, last: whether the pattern's ends are there, where anchors say nothing new."""
        solid = [place for place, (op, _) in enumerate(items) if str(op) != "AT"]
        begin, end = (solid[0], solid[-1]) if solid else (len(items), 0)
        for place, (op, argument) in enumerate(items):
            at = self._item(op, argument, at, flags, first=first and place <= begin, last=last and place >= end)
        return at

    def _item(self, op: Any, argument: Any, at: int, flags: int, *, first: bool, last: bool) -> int:
        name = str(op)
        if name in _REFUSED:
            raise self._refused(_REFUSED[name])
        if name == "AT":
            anchor = _ANCHORS.get(str(argument))
            if anchor is None:
                raise self._refused("a word boundary")
            if not (first if "BEGINNING" in str(argument) else last):
                raise self._refused(f"{anchor} elsewhere than at its ends, which match the whole text in any case")
            return at
        if name == "BRANCH":
            end = self.new()
            for branch in argument[1]:
                self.empty[self.sequence(branch, at, flags, first=first, last=last)].append(end)
            return end
        if name == "SUBPATTERN":
            _, added, removed, items = argument
            if added & (re.ASCII | re.UNICODE):  # one takes the place of the other
                flags &= ~(re.ASCII | re.UNICODE)
            return self.sequence(items, at, (flags | added) & ~removed, first=first, last=last)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, items = argument
            return self._repeat(least, most, items, at, flags)
        end = self.new()
        members = _members(name, _frozen(argument), flags & (re.IGNORECASE | re.DOTALL | re.ASCII))
        self.edges[at].append((self.sets.setdefault(members, len(self.sets)), end))
        return end

    def _repeat(self, least: int, most: Any, items: Any, at: int, flags: int) -> int:
        if items.getwidth()[1] == 0:  # nothing, however often
            least, most = 1, 1
        for _ in range(least):
            at = self.sequence(items, at, flags, first=False, last=False)
        end = self.new()
        self.empty[at].append(end)
        if str(most) == "MAXREPEAT":
            self.empty[self.sequence(items, end, flags, first=False, last=False)].append(end)
            return end
        for _ in range(most - least):
            at = self.sequence(items, at, flags, first=False, last=False)
            self.empty[at].append(end)
        return end

    def _refused(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"regex={shown(self.pattern)} has {what}, which cannot be followed token by token: write it without"
        )


def _frozen(argument: Any) -> Any:
    return tuple(map(_frozen, argument)) if isinstance(argument, list | tuple) else argument


@cache
def _all_characters() -> str:
    """All that have an encoding."""
    return "".join(chr(c) for c in range(_CHARACTERS) if c not in _SURROGATES)


@lru_cache(maxsize=256)
def _members(name: str, argument: Any, flags: int) -> tuple[int, ...]:
    """Where runs of the characters that one item matches begin and end, in turn."""
    if name == "LITERAL" and not flags & re.IGNORECASE:
        return () if argument in _SURROGATES else (argument, argument + 1)
    parser, constants, compiler = re._parser, re._constants, re._compiler  # type: ignore[attr-defined]
    state = parser.State()
    state.flags = flags if flags & re.ASCII else flags | re.UNICODE
    one = parser.SubPattern(state, [(getattr(constants, name), argument)])
    several = parser.SubPattern(state, [(constants.MAX_REPEAT, (1, constants.MAXREPEAT, one))])
    found: list[int] = []
    for run in compiler.compile(several).finditer(_all_characters()):
        start, end = (at + len(_SURROGATES) * (at >= _SURROGATES.start) for at in (run.start(), run.end() - 1))
        found += [start, end + 1]
        if start < _SURROGATES.start and end >= _SURROGATES.stop:
            found[-1:] = [_SURROGATES.start, _SURROGATES.stop, end + 1]
    return tuple(found)


# -- to a deterministic one ------------------------------------------------------------------------------------------------


def _classes(sets: Sequence[tuple[int, ...]]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """The class of each character, [_CHARACTERS], and which sets have each class, [classes, sets]."""
    bounds = np.unique(np.array([0, _CHARACTERS, *(bound for runs in sets for bound in runs)]))
    inside = [np.searchsorted(np.array(runs, dtype=np.int64), bounds[:-1], side="right") % 2 == 1 for runs in sets]
    within = np.stack(inside, axis=1) if sets else np.zeros((len(bounds) - 1, 0), dtype=np.bool_)
    has, number = np.unique(within, axis=0, return_inverse=True)
    return np.repeat(number.reshape(-1).astype(np.int32), np.diff(bounds)), has


def _over_classes(pattern: str, nodes: _Nodes) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int32]]:
    """The state after each class, [S, classes], which states accept, [S], and the class of each character."""
    class_of, has = _classes(list(nodes.sets))
    classes_of = [np.flatnonzero(column).tolist() for column in has.T]
    closures: dict[int, tuple[int, ...]] = {}

    def closure(node: int) -> tuple[int, ...]:
        """The nodes reached by reading nothing that go on by a character, or are the end."""
        if node not in closures:
            reached, todo = {node}, [node]
            while todo:
                new = [other for other in nodes.empty[todo.pop()] if other not in reached]
                reached.update(new)
                todo += new
            closures[node] = tuple(n for n in reached if nodes.edges[n] or n == nodes.end)
        return closures[node]

    states: dict[frozenset[int], int] = {frozenset(): DEAD, frozenset(closure(0)): START}
    order = list(states)
    rows: list[list[int]] = []
    work = 0
    for state in order:  # which grows
        reached: list[set[int]] = [set() for _ in range(len(has))]
        for node in state:
            for members, target in nodes.edges[node]:
                after = closure(target)
                work += len(after) * len(classes_of[members])
                for number in classes_of[members]:
                    reached[number].update(after)
        row = []
        for after_class in map(frozenset, reached):
            if after_class not in states:
                states[after_class] = len(order)
                order.append(after_class)
            row.append(states[after_class])
        rows.append(row)
        if len(order) > MOST_STATES or work > _MOST_WORK:
            raise _too_large(pattern)
    accepting = np.array([nodes.end in state for state in order])
    return *_merged(np.array(rows, dtype=np.int32), accepting), class_of


def _merged(following: NDArray[np.int32], accepting: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Without states that do as an earlier one does, class for class, as far as some rounds from the ends on find them."""
    for _ in range(_ROUNDS):
        own = np.arange(len(following), dtype=np.int32)[:, None]
        own[DEAD] = -1
        # A state that only loops does as any other that only loops and accepts alike.
        rows = np.concatenate((accepting[:, None], np.where(following == own, -1, following)), axis=1)
        number, others = distinct(rows)
        if len(others) == len(rows):
            break
        if number[START] == DEAD:  # it matches nothing
            return np.zeros_like(following[:2]), accepting[:2]
        kept = np.unique(number, return_index=True)[1]
        following, accepting = number[following[kept]], accepting[kept]
    return following, accepting


def distinct(rows: NDArray[Any]) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """The number of each row among those that differ, in the order they first come in, and these."""
    rows = np.ascontiguousarray(rows)
    numbers: dict[bytes, int] = {}
    texts: Any = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).reshape(-1).tolist()
    number = [numbers.setdefault(text, len(numbers)) for text in texts]
    others = np.frombuffer(b"".join(numbers), dtype=rows.dtype).reshape(-1, rows.shape[1])
    return np.array(number, dtype=np.int32), others


# -- over bytes ------------------------------------------------------------------------------------------------------------


def _over_bytes(
    pattern: str, following: NDArray[np.int32], accepting: NDArray[np.bool_], class_of: NDArray[np.int32]
) -> ByteAutomaton:
    """Each state of ``following`` [S, classes] and, between the bytes of a character, one for what may still come."""
    dead = following.shape[1]  # a class of its own for what is no character
    following = np.concatenate((following, np.full((len(following), 1), DEAD, dtype=np.int32)), axis=1)
    class_of = class_of.copy()
    class_of[_SURROGATES.start : _SURROGATES.stop] = dead
    found: list[NDArray[np.int32]] = []  # rows of states between bytes, 64 continuations each
    count = len(following)

    def level(lower: NDArray[np.int32], groups: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
        """States before a last, second last or third last byte, by kind, [S, kinds + 1], a dead one behind them; the
        kind of each group, [n]; the number of that behind them. lower: states after the byte; groups: their kinds, [n, 64].
        """
        nonlocal count
        kind_of, kinds = distinct(groups)
        if len(lower) * len(kinds) > 20 * MOST_STATES:
            raise _too_large(pattern)
        state_of, rows = distinct(lower[:, kinds].reshape(-1, 64))
        is_dead = (rows == DEAD).all(1)
        number = np.where(is_dead, DEAD, count + np.cumsum(~is_dead) - 1).astype(np.int32)
        found.append(rows[~is_dead])
        count += len(found[-1])
        if count > MOST_STATES:
            raise _too_large(pattern)
        states = number[state_of].reshape(len(lower), len(kinds))
        return np.pad(states, ((0, 0), (0, 1))), kind_of, len(kinds)

    longer = np.where(np.arange(_CHARACTERS) < 128, dead, class_of).astype(np.int32)
    last, of_block, none = level(
        following, longer.reshape(-1, 64)
    )  # blocks: of 64 characters, alike but for the last byte
    thirds = of_block.reshape(-1, 64).copy()
    thirds[0, :32] = none  # fewer bytes would do
    second, of_third, none = level(last, thirds)
    fourths = np.full((5, 64), none, dtype=np.int32)
    fourths.reshape(-1)[16 : 16 + 256] = of_third[16:]
    third, of_fourth, _ = level(second, fourths)

    table = np.zeros((count, 256), dtype=np.int32)
    table[: len(following), :128] = following[:, class_of[:128]]
    table[: len(following), 0xC2:0xE0] = last[:, of_block[2:32]]
    table[: len(following), 0xE0:0xF0] = second[:, of_third[:16]]
    table[: len(following), 0xF0:0xF5] = third[:, of_fourth]
    at = len(following)
    for rows in found:
        table[at : at + len(rows), 0x80:0xC0] = rows
        at += len(rows)
    return ByteAutomaton(table, np.concatenate((accepting, np.zeros(count - len(accepting), dtype=np.bool_))))
