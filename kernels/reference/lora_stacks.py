"""Matrices of many adapters side by side, so that a few tokens of each go through one product, not one for each adapter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from stoker.kernels.reference.lora import LoraTable

# Up to so many tokens of an adapter, and from so many adapters on, one product over a stack beats one for each adapter.
_TOKENS = 16
_SLOTS = 3


class Pieces(NamedTuple):
    """Tokens that have an adapter, in P pieces of W tokens of one slot each. What a piece lacks is filled with any token."""

    tokens: slice | Tensor  # int64 [t]
    gather: Tensor | None  # int64 [P * W], tokens; None where that is ``tokens``, a slice
    places: Tensor | None  # int64 [t], where ``gather`` has each of ``tokens``; None where it is ``tokens``


class Stack(NamedTuple):
    """What each of P pieces does to those linears of a table that any of them changes; zeros fill ranks up to one r."""

    a: Tensor  # [P, D, L * r]
    widths: list[int]  # of all linears of the table
    # Of each: its number in the table, b [P, r, N] scaled, gain and shift [P, 1, N].
    linears: list[tuple[int, Tensor, Tensor | None, Tensor | None]]


class Stacks:
    """Copies of the matrices of the adapters that run, for all tables of a model; right until an adapter changes.

    They stay while the same adapters run, and are made anew where there are others, or where most of them are gone.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Whoever is using them goes on with what there was."""
        self._slots: tuple[int, ...] = ()  # of each piece
        self._made: dict[LoraTable, Stack | None] = {}

    def pieces(
        self, tokens: slice | Tensor, spans: Sequence[tuple[int, int, int]]
    ) -> tuple[Pieces, tuple[int, ...], dict[LoraTable, Stack | None]] | None:
        """How tokens go through the stacks, with the slots and the stacks of those pieces.

        tokens, spans: ``AdapterRows.by_slot``. None where there are too few adapters, or too many tokens of each.
        """
        counts = {slot: end - start for slot, start, end in spans}
        total = sum(counts.values())
        if len(spans) < _SLOTS or total > _TOKENS * len(spans):
            return None
        width = -(-total // len(spans))  # of the mean, so that there are less than twice as many pieces as slots
        slots = tuple(chain.from_iterable([s] * -(-n // width) for s, n in counts.items()))
        known, made = self._slots, self._made
        among = Counter(known)
        if counts.keys() <= among.keys():
            wider = max(-(-n // among[s]) for s, n in counts.items())
            if len(known) <= 2 * len(slots) and len(known) * wider <= 2 * len(slots) * width:
                return _pieces(known, wider, tokens, spans), known, made
        self._slots, self._made = slots, {}
        return _pieces(slots, width, tokens, spans), slots, self._made


def _pieces(
    slots: tuple[int, ...], width: int, tokens: slice | Tensor, spans: Sequence[tuple[int, int, int]]
) -> Pieces:
    size = width * len(slots)
    in_order = [s for s, start, end in spans for _ in range(start, end, width)] == list(slots)
    if in_order and spans[-1][2] == size:
        return Pieces(tokens, None if isinstance(tokens, slice) else tokens, None)
    tokens = torch.arange(tokens.start, tokens.stop) if isinstance(tokens, slice) else tokens
    free: dict[int, list[int]] = {}
    for place, slot in enumerate(slots):
        free.setdefault(slot, []).extend(range(place * width, (place + 1) * width))
    places = torch.tensor([p for s, start, end in spans for p in free[s][: end - start]])
    gather = tokens[:1].repeat(size).index_copy_(0, places, tokens)
    return Pieces(tokens, gather, places)


def stack(table: LoraTable, slots: Sequence[int]) -> Stack | None:
    """None where no slot changes anything."""
    found = [[by_slot.get(slot) for slot in slots] for by_slot in table.weights]
    known = [weights for entries in found for weights in entries if weights is not None]
    if not known:
        return None
    rank, dtype = max(weights.rank for weights in known), table.dtype
    shrinks, linears = [], []
    for linear, (width, entries) in enumerate(zip(table.widths, found, strict=True)):
        if all(weights is None for weights in entries):
            continue
        nothing = known[0]._replace(
            a=known[0].a[:0], b=known[0].b.new_empty(width, 0), scale=1.0, gain=None, shift=None
        )
        each = [weights or nothing for weights in entries]
        shrinks.append([_padded(w.a, (0, 0, 0, rank - w.rank), dtype) for w in each])
        b = torch.stack([_padded(w.b, (0, rank - w.rank), dtype) for w in each])
        b *= torch.tensor([w.scale for w in each], dtype=dtype)[:, None, None]
        gain = _vectors([w.gain for w in each], torch.ones(width))
        shift = _vectors([w.shift for w in each], torch.zeros(width))
        linears.append((linear, b.mT.contiguous(), gain, shift))
    a = torch.stack([a for of_piece in zip(*shrinks, strict=True) for a in of_piece])
    # Few rows by a matrix that lies as it is read are several times as fast as by a transposed one.
    return Stack(a.view(len(slots), -1, a.shape[-1]).mT.contiguous(), list(table.widths), linears)


def _padded(matrix: Tensor, sides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return F.pad(matrix, sides).to(dtype) if any(sides) else matrix


def _vectors(vectors: Sequence[Tensor | None], neutral: Tensor) -> Tensor | None:
    if all(v is None for v in vectors):
        return None
    return torch.stack([neutral if v is None else v for v in vectors])[:, None]


def apply_stack(x: Tensor, out: Tensor, biases: Sequence[Tensor | None], stack: Stack, pieces: Pieces) -> None:
    """x: [T, D]; out: [T, N], changed in place; biases: of each linear."""
    count, depth, _ = stack.a.shape
    if pieces.gather is not None:
        x, before = x.index_select(0, pieces.gather), out.index_select(0, pieces.gather)
    elif pieces.tokens == slice(0, len(x)):
        before = out
    else:
        x, before = x[pieces.tokens], out[pieces.tokens]
    before = before.view(count, -1, before.shape[1])
    hidden = torch.bmm(x.to(stack.a.dtype).view(count, -1, depth), stack.a)
    shrunk, parts = hidden.chunk(len(stack.linears), -1), before.split_with_sizes(stack.widths, -1)
    for mine, (linear, b, gain, shift) in zip(shrunk, stack.linears, strict=True):
        adapt(mine, parts[linear], biases[linear], b, 1.0, gain, shift)
    if isinstance(pieces.tokens, Tensor):
        after = before.flatten(0, 1)
        out.index_copy_(0, pieces.tokens, after if pieces.places is None else after.index_select(0, pieces.places))


def adapt(
    hidden: Tensor,
    out: Tensor,
    bias: Tensor | None,
    b: Tensor,
    scale: float,
    gain: Tensor | None,
    shift: Tensor | None,
) -> None:
    """One adapter over one linear, in place, or each of a stack. hidden: [..., t, r], the input times ``a``; b: [..., r, N]."""
    if gain is None and shift is None and b.dtype == out.dtype:
        if out.dim() == 2:
            out.addmm_(hidden, b, alpha=scale)
        elif out.is_contiguous():
            out.baddbmm_(hidden, b, alpha=scale)
        else:  # columns of a wider matrix, for which baddbmm_ runs piece by piece
            out.add_(torch.bmm(hidden, b), alpha=scale)
        return
    delta = hidden @ b * scale
    if gain is not None:
        delta = (gain - 1) * (out if bias is None else out - bias) + gain * delta
    if shift is not None:
        delta = delta + shift
    out.copy_(out + delta)
