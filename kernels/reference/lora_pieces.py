"""Three ways in which the tokens of a step go through their adapters' matrices: together, one by one, or slot by slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from stoker.kernels.reference.lora_stacks import Part, Stack


class Pieces(Protocol):
    """How the tokens of a step go through the stacks."""

    def through(self, stack: Stack) -> Callable[[Tensor, Tensor], None]:
        """A function that changes an output in place: (x [T, D], out [T, N])."""


@dataclass(frozen=True, slots=True)
class Together:
    """P pieces in one product. All have the same number of tokens, each of one slot. Any token fills the gaps."""

    count: int  # P, the first of the stack
    rows: slice | None  # the tokens, where they lie piece by piece; None: all, or those of ``gather``
    gather: Tensor | None = None  # int64 [P * W], tokens
    places: Tensor | None = None  # int64 [T], where ``gather`` has each token
    nothing: int | None = None  # the place of tokens without an adapter

    def through(self, stack: Stack) -> Callable[[Tensor, Tensor], None]:
        return partial(self._change, *stack.first(self.count))

    def _change(self, a: Tensor, parts: Sequence[Part], x: Tensor, out: Tensor) -> None:
        if self.gather is not None:
            x = x.index_select(0, self.gather)
        elif self.rows is not None:
            x, out = x[self.rows], out[self.rows]
        hidden = torch.bmm(x.type_as(a).view(self.count, -1, a.shape[1]), a)
        for part in parts:
            mine = hidden if part.ranks is None else hidden[..., part.ranks]
            target = out if part.columns is None else out[:, part.columns]
            if self.gather is None and part.columns is None and part.plain and part.b.dtype == out.dtype:
                target.view(self.count, -1, target.shape[1]).baddbmm_(mine, part.b)
            else:  # columns of a wider matrix among them, for which baddbmm_ runs piece by piece
                before = None if part.gain is None else self._forth(target)
                target.add_(self._back(part.change(torch.bmm(mine, part.b), before)))

    def _forth(self, out: Tensor) -> Tensor:
        out = out if self.gather is None else out.index_select(0, self.gather)
        return out.view(self.count, -1, out.shape[1])

    def _back(self, delta: Tensor) -> Tensor:
        delta = delta.flatten(0, 1)
        if self.places is None:
            return delta
        if self.nothing is not None:
            delta[self.nothing].zero_()
        return delta.index_select(0, self.places)


class Bags:
    """Each token by itself, in any order: sums of its adapter's rows, weighed by the token's numbers."""

    def __init__(self, slots: Tensor, places: Mapping[int, int]) -> None:
        """slots: of all tokens, int64 [T]; places: of each but 0 in the stacks."""
        self._slots = slots.tolist()
        numbers = [places[slot] for slot in self._slots if slot]
        self.places = torch.tensor(numbers, dtype=torch.int32, device=slots.device)  # int32 [t]
        # int64 [t], those with an adapter; None: all
        self.tokens = None if all(self._slots) else slots.nonzero().flatten()
        self._bags: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}

    def _of(self, *sums: int) -> tuple[Tensor, Tensor, Tensor]:
        """The rows to add up, and where each sum begins. sums: how many rows, in order, each part of an output is a sum of.

        Returns the rows of the tokens that have an adapter, int32 [t * rows]; where the rows of each sum begin, and the last
        end, [t * parts + 1]; and the same for all tokens, [T * parts + 1], some of which have no rows.
        """
        if sums not in self._bags:
            span = torch.arange(sum(sums), dtype=torch.int32, device=self.places.device)
            rows = (self.places[:, None] * len(span) + span).flatten()
            if len({*sums}) == 1:
                starts = torch.arange(0, len(rows) + 1, sums[0], dtype=torch.int32, device=rows.device)
            else:
                starts = self._starts(sums * len(self.places))
            of_all = starts
            if self.tokens is not None:
                nothing = (0,) * len(sums)
                of_all = self._starts(n for slot in self._slots for n in (sums if slot else nothing))
            self._bags[sums] = rows, starts, of_all
        return self._bags[sums]

    def _starts(self, counts: Iterable[int]) -> Tensor:
        """Where sums of so many rows each begin, and the last one ends."""
        return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=self.places.device)

    def through(self, stack: Stack) -> Callable[[Tensor, Tensor], None]:
        rows, starts, _ = self._of(stack.a.shape[1])
        parts = [(part, part.b.flatten(0, 1), *self._of(*part.sums)) for part in stack.for_sums]
        shrink = stack.a.flatten(0, 1), rows, starts
        if len(parts) == 1 and parts[0][0].plain:
            _, b, rows, _, of_all = parts[0]
            return Sums(shrink, (b, rows, of_all), self.tokens)
        return partial(self._change, shrink, parts)

    def _change(
        self,
        a: tuple[Tensor, Tensor, Tensor],
        parts: Sequence[tuple[Part, Tensor, Tensor, Tensor, Tensor]],
        x: Tensor,
        out: Tensor,
    ) -> None:
        x = x if self.tokens is None else x.index_select(0, self.tokens)
        hidden = _sums(*a, x.type_as(a[0]))
        for part, b, rows, starts, of_all in parts:
            mine = hidden if part.ranks is None else hidden[:, part.ranks]
            target = out if part.columns is None else out[:, part.columns]
            if part.plain:
                sums = _sums(b, rows, of_all, mine)
                target.add_(sums if len(part.sums) == 1 else sums.view(target.shape))
                continue
            before = target if self.tokens is None else target.index_select(0, self.tokens)
            gain, shift = (None if v is None else v[self.places, 0] for v in (part.gain, part.shift))
            delta = change(_sums(b, rows, starts, mine).view(before.shape), before, part.bias, gain, shift)
            if self.tokens is None:
                target.add_(delta)
            else:
                target.index_copy_(0, self.tokens, before.add_(delta))


@dataclass(frozen=True, slots=True)
class Sums:
    """What matrices alone add, in one part: known without the output.

    Of a small model, calls from Python and views take as long as a fifth of the sums, so there are as few as can be.
    """

    a: tuple[Tensor, Tensor, Tensor]  # a matrix, and what ``Bags`` says of its rows
    b: tuple[Tensor, Tensor, Tensor]
    tokens: Tensor | None  # as of ``Bags``

    def of(self, x: Tensor) -> Tensor:
        """x: [T, D]. Returns [T * parts, N / parts], in the matrices' dtype."""
        matrix, rows, starts = self.a
        x = x if self.tokens is None else x.index_select(0, self.tokens)
        x = x if x.dtype == matrix.dtype else x.type_as(matrix)
        hidden = torch._embedding_bag_forward_only(matrix, rows, starts, False, 0, False, x.reshape(-1), True)[0]
        matrix, rows, starts = self.b
        sums: Tensor = torch._embedding_bag_forward_only(matrix, rows, starts, False, 0, False, hidden.view(-1), True)[
            0
        ]
        return sums

    def __call__(self, x: Tensor, out: Tensor) -> None:
        out.add_(self.of(x).view_as(out))


def _sums(matrix: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """The S sums of rows of a matrix, [S, N]. rows: int32 [n]; starts: of each sum among them, and n, [S + 1]; weights: n."""
    return torch.embedding_bag(matrix, rows, starts, False, 0, False, weights.reshape(-1), True)[0]


@dataclass(frozen=True, slots=True)
class OneByOne:
    """Slot after slot: the tokens of each slot in products of their own."""

    tokens: slice | Tensor | None  # int64 [t], side by side by slot; None: all as they lie
    places: Sequence[int]  # of each slot in the stacks
    counts: Sequence[int]  # of its tokens

    def through(self, stack: Stack) -> Callable[[Tensor, Tensor], None]:
        pieces = [stack.piece(place) for place in self.places]
        if self.tokens is None and len(pieces) == 1:
            return partial(_change, *pieces[0])
        return partial(self._change_each, pieces)

    def _change_each(self, pieces: Sequence[tuple[Tensor, Sequence[Part]]], x: Tensor, out: Tensor) -> None:
        before = out
        if self.tokens is not None:
            x, before = x[self.tokens], out[self.tokens]  # views where they lie side by side
        each = zip(pieces, x.split_with_sizes(self.counts), before.split_with_sizes(self.counts), strict=True)
        for piece, mine, target in each:
            _change(*piece, mine, target)
        if isinstance(self.tokens, Tensor):
            out.index_copy_(0, self.tokens, before)


def _change(a: Tensor, parts: Sequence[Part], x: Tensor, out: Tensor) -> None:
    """Apply one piece. a: [D, r of all linears]; x: [t, D]; out: [t, N]."""
    hidden = torch.mm(x.type_as(a), a)
    for part in parts:
        mine = hidden if part.ranks is None else hidden[:, part.ranks]
        target = out if part.columns is None else out[:, part.columns]
        if part.plain and part.b.dtype == out.dtype:
            target.addmm_(mine, part.b)
        else:
            target.add_(part.change(torch.mm(mine, part.b), target))


def together(
    pieces: tuple[int, ...], width: int, tokens: slice | Tensor, spans: Sequence[tuple[int, int, int]], slots: Tensor
) -> Together:
    """Make ``Together`` of pieces. pieces: the slot of each. width: their tokens."""
    adapted, total, size = spans[-1][2], len(slots), width * len(pieces)
    full = adapted == size
    in_order = pieces == tuple(slot for slot, start, end in spans for _ in range(start, end, width))
    if full and in_order and isinstance(tokens, slice):
        return Together(len(pieces), None if adapted == total else tokens)
    if full and adapted < total:
        width, size = width + 1, size + len(pieces)  # a place is needed that is of no token
    free: dict[int, list[int]] = {}
    for place, slot in enumerate(pieces):
        free.setdefault(slot, []).extend(range(place * width, (place + 1) * width))
    numbers = list(range(tokens.start, tokens.stop)) if isinstance(tokens, slice) else tokens.tolist()
    taken = [place for slot, start, end in spans for place in free[slot][: end - start]]
    nothing = None if adapted == total else min(set(range(size)).difference(taken))
    gather, places = numbers[:1] * size, [nothing or 0] * total
    for token, place in zip(numbers, taken, strict=True):
        gather[place], places[token] = token, place
    of_pieces, of_tokens = (torch.tensor(values, device=slots.device) for values in (gather, places))
    return Together(len(pieces), None, of_pieces, of_tokens, nothing)


def change(delta: Tensor, out: Tensor | None, bias: Tensor | None, gain: Tensor | None, shift: Tensor | None) -> Tensor:
    """What an adapter adds to the output. delta: what its matrices make of the input; the rest as in ``LoraWeights``."""
    if gain is not None:
        assert out is not None
        delta = (gain - 1) * (out if bias is None else out - bias) + gain * delta
    return delta if shift is None else delta + shift
