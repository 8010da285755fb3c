"""Copies of the running adapters' matrices, side by side, so that a step needs few products for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from stoker.kernels.reference.adapter_weights import LoraWeights
from stoker.kernels.reference.lora_pieces import Bags, OneByOne, Pieces, change, together

if TYPE_CHECKING:
    from stoker.kernels.reference.lora import LoraTable

# Up to so many tokens of an adapter, on average, each token's own sums beat a product over all pieces.
_FEW = 4
# Up to so many one product over all pieces beats one for each adapter.
_TOKENS = 32
# Reading the matrices of a piece takes as long as so many tokens of it.
_PIECE = 8
# Pieces that are held are moved together once they cost a step so many times what it needs: moving costs a few steps.
_WASTE = 1.25
# Up to so many numbers, zeros among them cost less than a product for each linear.
_BLOCK_DIAGONAL = 65536

_VECTORS = {"gain": 1.0, "shift": 0.0}  # and what does nothing


class Part:
    """What the pieces of a stack do to one linear, or to all linears of the table together."""

    def __init__(
        self,
        ranks: slice | None,
        columns: slice | None,
        b: Tensor,
        gain: Tensor | None,
        shift: Tensor | None,
        bias: Tensor | None,
        sums: tuple[int, ...] = (),
    ) -> None:
        self.ranks = ranks  # columns of what the shrink gives; None: all of them
        self.columns = columns  # of the output; None: all of them
        self.b = b  # [P, r, N], scaled; of several linears block-diagonal
        self.gain, self.shift = gain, shift  # [P, 1, N]
        self.bias = bias  # [N], of the base; there where there is a gain
        self.plain = gain is None and shift is None
        self.sums = sums or (b.shape[-2],)  # how many rows of ``b``, in order, are summed for each part of the output

    def of(self, place: int | slice) -> Part:
        """What some of the pieces do."""
        gain, shift = (None if t is None else t[place] for t in (self.gain, self.shift))
        return Part(self.ranks, self.columns, self.b[place], gain, shift, self.bias)

    def change(self, delta: Tensor, out: Tensor | None) -> Tensor:
        """As ``change``, of what the matrices make of the input. out: [..., t, N], needed where there is a gain."""
        return change(delta, out, self.bias, self.gain, self.shift)


class Stack:
    """Copies of what each of P pieces does to the linears of one table. Later pieces reuse their memory."""

    def __init__(self) -> None:
        self.version = -1  # of ``Stacks``, that this holds
        self.parts: list[Part] = []  # none where no piece changes anything
        self.for_sums: list[Part] = []  # the same, in fewer parts that only sums of rows can be taken of
        self.a: Tensor  # [P, D, r of all linears]
        self._pieces: dict[int, tuple[Tensor, list[Part]]] = {}  # by place, those that were asked for
        self._held: tuple[int, ...] = ()  # the slot of each place that is right
        self._generation = -1
        self._layout: object = None

    def bring(self, table: LoraTable, slots: tuple[int, ...], generation: int) -> None:
        """Hold the matrices of these slots, one at each place; only those that are not there are copied."""
        known = [weights for by_slot in table.weights for slot in set(slots) if (weights := by_slot.get(slot))]
        linears = [n for n, by_slot in enumerate(table.weights) if not by_slot.keys().isdisjoint(slots)]
        rank = max((1, *(weights.rank for weights in known)))  # biases alone have none, which no product takes
        layout = linears, rank, table.dtype
        if not known:
            self.parts, self.for_sums, self._layout = [], [], None
            return
        if layout != self._layout or len(slots) > len(self._a):
            self._allocate(table, linears, rank, len(slots), max(known, key=lambda w: w.rank))
            self._layout, self._held = layout, ()
        elif generation != self._generation:
            self._held = ()
        self._generation = generation
        held, self._held = self._held, ()  # of one that is broken off in the middle nothing is right
        sources = [held.index(slot) if slot in held else place for place, slot in enumerate(slots)]
        if sources != list(range(len(slots))):
            order = torch.tensor(sources, device=self._a.device)
            for copies in (self._a, *self._b):
                copies[: len(slots)] = copies.index_select(0, order)
        for places in _runs(place for place, slot in enumerate(slots) if slot not in held):
            for index, linear in enumerate(linears):
                entries = [table.weights[linear].get(slot) for slot in slots[places]]
                ranks = slice(index * rank, (index + 1) * rank)
                _write(self._a[places, :, ranks], [b[places] for b in self._b_of[index]], entries)
        self._held = slots
        self._view(table, slots, linears, rank)

    def _allocate(self, table: LoraTable, linears: Sequence[int], rank: int, count: int, like: LoraWeights) -> None:
        count = 1 << (count - 1).bit_length()  # twice as much when there is not enough
        starts = [0, *accumulate(table.widths)]
        total, depth = starts[-1], like.a.shape[1]
        self._whole = count * rank * total <= _BLOCK_DIAGONAL or len(table.widths) == 1
        # The width of the most parts of the output that are all as wide as each other, none of which ends within a linear.
        self._width = next(w for w in starts[1:] if {*starts}.issuperset(range(0, total + w, w)))
        self._below = self._width < total and (self._whole or len({*table.widths}) == 1)

        def zeros(*shape: int) -> Tensor:
            with torch.inference_mode(False):  # or they could not be written to outside of the caller's
                return torch.zeros(count, *shape, dtype=table.dtype, device=like.a.device)

        # Few rows by a matrix that lies as it is read are several times as fast as by a transposed one.
        self._a = zeros(depth, len(linears) * rank)
        self._b: list[Tensor] = []
        self._b_of: list[list[Tensor]] = [[] for _ in linears]
        # Zeros between linears are less than a product for each. Sums take rows without any.
        for width in (*[total] * self._whole, *[self._width] * self._below):
            self._b.append(zeros(len(linears) * rank, width))
            for index, (linear, copies) in enumerate(zip(linears, self._b_of, strict=True)):
                first = starts[linear] % width
                ranks = slice(index * rank, (index + 1) * rank)
                copies.append(self._b[-1][:, ranks, first : first + table.widths[linear]])
        if not self._b:
            self._b = [zeros(rank, table.widths[linear]) for linear in linears]
            self._b_of = [[b] for b in self._b]

    def _view(self, table: LoraTable, slots: Sequence[int], linears: Sequence[int], rank: int) -> None:
        count = len(slots)
        self.a = self._a[:count]
        everything = range(len(table.widths))
        if self._whole:
            self.parts = [_part(table, everything, slots, self._b[0][:count], None, None)]
        else:
            self.parts = []
            for index, (linear, (b,)) in enumerate(zip(linears, self._b_of, strict=True)):
                ranks = None if len(linears) == 1 else slice(index * rank, (index + 1) * rank)
                self.parts.append(_part(table, [linear], slots, b[:count], ranks, _columns(table, linear)))
        self.for_sums = self.parts
        if self._below:
            starts = [0, *accumulate(table.widths)]
            counts = Counter(starts[linear] // self._width for linear in linears)
            sums = tuple(rank * counts[part] for part in range(starts[-1] // self._width))
            self.for_sums = [_part(table, everything, slots, self._b[-1][:count], None, None, sums)]
        self._pieces = {}

    def first(self, count: int) -> tuple[Tensor, list[Part]]:
        """The first ``count`` pieces: a [count, D, r of all linears] and their parts."""
        if count == len(self.a):
            return self.a, self.parts
        return self.a[:count], [part.of(slice(count)) for part in self.parts]

    def piece(self, place: int) -> tuple[Tensor, list[Part]]:
        """One of the pieces: a [D, r of all linears] and its parts."""
        if place not in self._pieces:
            self._pieces[place] = self.a[place], [part.of(place) for part in self.parts]
        return self._pieces[place]


def _part(
    table: LoraTable,
    linears: Sequence[int],
    slots: Sequence[int],
    b: Tensor,
    ranks: slice | None,
    columns: slice | None,
    sums: tuple[int, ...] = (),
) -> Part:
    gain, shift = (_vectors(table, linears, slots, kind) for kind in _VECTORS)
    bias = None
    if gain is not None and any(table.biases[n] is not None for n in linears):
        biases = [(table.biases[n], table.widths[n]) for n in linears]
        bias = torch.cat([gain.new_zeros(width) if b is None else b for b, width in biases])
    return Part(ranks, columns, b, gain, shift, bias, sums)


def _columns(table: LoraTable, linear: int) -> slice:
    start = sum(table.widths[:linear])
    return slice(start, start + table.widths[linear])


def _runs(places: Iterable[int]) -> Iterator[slice]:
    """Runs of places that stand side by side."""
    start = end = 0
    for place in places:
        if place != end and end > start:
            yield slice(start, end)
        start, end = start if place == end and end > start else place, place + 1
    if end > start:
        yield slice(start, end)


def _write(a: Tensor, copies: Sequence[Tensor], entries: Sequence[LoraWeights | None]) -> None:
    """Write what some slots do to one linear. a: [P, D, r]; copies: of b, [P, r, N]. Zeros fill what an adapter lacks."""
    (_, depth, rank), (b, *others) = a.shape, copies
    nothing = a.new_zeros(rank, depth), b.new_zeros(b.shape[2], rank)
    matrices = [nothing if w is None else _padded(w.a, w.b, rank - w.rank) for w in entries]
    for target, sources in zip((a, b), zip(*matrices, strict=True), strict=True):
        target.copy_(torch.stack(sources).mT)
    b *= torch.tensor([1.0 if w is None else w.scale for w in entries], dtype=b.dtype, device=b.device)[:, None, None]
    for other in others:
        other.copy_(b)


def _padded(a: Tensor, b: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    return (F.pad(a, (0, 0, 0, ranks)), F.pad(b, (0, ranks))) if ranks else (a, b)


def _vectors(table: LoraTable, linears: Sequence[int], slots: Sequence[int], kind: str) -> Tensor | None:
    """The gains or shifts of some linears side by side, [P, 1, N]; None where there are none."""
    found = (getattr(table.weights[n].get(slot), kind, None) for n in linears for slot in slots)
    like = next((vector for vector in found if vector is not None), None)
    if like is None:
        return None
    offsets = [0, *accumulate(table.widths[n] for n in linears)]
    vectors: Tensor = like.new_full((len(slots), 1, offsets[-1]), _VECTORS[kind])
    for row, slot in zip(vectors, slots, strict=True):
        for linear, start, end in zip(linears, offsets, offsets[1:], strict=False):
            vector = getattr(table.weights[linear].get(slot), kind, None)
            if vector is not None:
                row[0, start:end] = vector
    return vectors


class Stacks:
    """Copies of the running adapters' matrices, for all tables of a model. They are valid until an adapter changes.

    They stay while the same adapters run. Those of other adapters are added beside them. When too many belong to no running
    adapter, the rest is moved together.
    """

    def __init__(self) -> None:
        self.version = 0
        self.release()

    def forget(self) -> None:
        """Treat all copies as out of date: they are made again before they are used."""
        self.version += 1
        self._generation = self.version
        self._slots: tuple[int, ...] = ()  # of each piece

    def release(self) -> None:
        """Give the memory back."""
        self.forget()
        self._made: dict[LoraTable, Stack] = {}

    def of(self, table: LoraTable) -> Stack:
        stack = self._made.get(table)
        if stack is None:
            stack = self._made[table] = Stack()
        if stack.version != self.version:
            stack.bring(table, self._slots, self._generation)
            stack.version = self.version
        return stack

    def pieces(self, slots: Tensor, tokens: slice | Tensor, spans: Sequence[tuple[int, int, int]]) -> Pieces:
        """How tokens go through the stacks, as long as these have this version. Of ``AdapterRows``: slots, by_slot."""
        counts = {slot: end - start for slot, start, end in spans}
        adapted = sum(counts.values())
        few = adapted <= _FEW * len(counts)
        if len(counts) == 1 or few or adapted > _TOKENS * len(counts):
            self._hold(Counter(self._slots) | Counter(counts.keys()))
            if len(counts) > 1 and few:
                return Bags(slots, {slot: self._slots.index(slot) for slot in counts})
            as_they_lie = isinstance(tokens, slice) and adapted == len(slots)
            places = [self._slots.index(slot) for slot in counts]
            return OneByOne(None if as_they_lie else tokens, places, list(counts.values()))
        widths = {*counts.values(), -(-adapted // len(counts))}
        cost, width = min((_cost(_of_width(counts, width).total(), width), width) for width in widths)
        of_held = min(self._of_held(counts), default=None)
        if of_held is None or of_held[0] > _WASTE * cost:
            self._hold(_of_width(counts, width))
            return together(self._slots, width, tokens, spans, slots)
        _, count, width = of_held
        return together(self._slots[:count], width, tokens, spans, slots)

    def _of_held(self, counts: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
        """(cost, number of pieces, their width), where the first of those that are held would do."""
        held: Counter[int] = Counter()
        for count, slot in enumerate(self._slots, 1):
            held[slot] += 1
            if counts.keys() <= held.keys():
                width = max(-(-n // held[slot]) for slot, n in counts.items())
                yield _cost(count, width), count, width

    def _hold(self, wanted: Counter[int]) -> None:
        """Hold as many pieces of each slot as wanted: first one of each, where possible in its old place, then the others.

        So the first pieces are enough when each slot has as many tokens.
        """
        if wanted == Counter(self._slots):
            return
        each = list(dict.fromkeys(slot for slot in (*self._slots, *wanted) if slot in wanted))
        self._slots = (*each, *(wanted - Counter(each)).elements())
        self.version += 1


def _of_width(counts: Mapping[int, int], width: int) -> Counter[int]:
    """How many pieces of so many tokens each slot fills."""
    return Counter({slot: -(-n // width) for slot, n in counts.items()})


def _cost(pieces: int, width: int) -> int:
    return pieces * (width + _PIECE)
