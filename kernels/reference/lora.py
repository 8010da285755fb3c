"""Low-rank adapters over a projection's output, as plain torch (Hu et al. 2021, arXiv:2106.09685).

Each token has a slot; a slot holds one adapter, slot 0 none. An adapter's matrices stay where they are: a table holds the
tensors themselves, and their addresses for kernels.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class LoraWeights(NamedTuple):
    """What an adapter does to one linear: ``y + scale * b @ (a @ x)``.

    gain: DoRA's magnitude over the norm of each adapted row (arXiv:2402.09353), which multiplies the result but its bias.
    """

    a: Tensor  # [r, D]
    b: Tensor  # [N, r]
    scale: float
    gain: Tensor | None = None  # fp32 [N]


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """One adapter, its tensors wherever they are. Names are those of the base model's modules.

    magnitudes: of linears with DoRA, [N]; saved: state of modules that are replaced whole (PEFT's ``modules_to_save``).
    """

    linears: dict[str, LoraWeights]
    magnitudes: dict[str, Tensor] = field(default_factory=dict)
    saved: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def to(self, device: torch.device) -> AdapterWeights:
        """Itself where all of it is on the device, else a copy there."""
        if all(t.device == device for t in self.tensors()):
            return self
        return AdapterWeights(
            {path: w._replace(a=w.a.to(device), b=w.b.to(device)) for path, w in self.linears.items()},
            {path: t.to(device) for path, t in self.magnitudes.items()},
            {path: {n: t.to(device) for n, t in state.items()} for path, state in self.saved.items()},
        )

    def tensors(self) -> Iterator[Tensor]:
        for weights in self.linears.values():
            yield from (weights.a, weights.b)
        yield from self.magnitudes.values()
        for state in self.saved.values():
            yield from state.values()

    @property
    def max_rank(self) -> int:
        return max((w.a.shape[0] for w in self.linears.values()), default=0)


@dataclass(frozen=True)
class AdapterRows:
    """The adapter slot of each of T tokens."""

    slots: Tensor  # int64 [T]

    def select(self, index: Tensor) -> AdapterRows:
        """Of the tokens at ``index``, int64 [R]."""
        return AdapterRows(self.slots.index_select(0, index))

    @cached_property
    def by_slot(self) -> tuple[slice | Tensor, list[tuple[int, int, int]]]:
        """The tokens that have an adapter, those of one slot side by side, and (slot, start, end) of each slot among them.

        Reads the slots, so it is for a CPU.
        """
        slots, order = self.slots.sort(stable=True)
        present, counts = torch.unique_consecutive(slots, return_counts=True)
        ends = counts.cumsum(0).tolist()
        spans = [(s, end - n, end) for s, end, n in zip(present.tolist(), ends, counts.tolist(), strict=True)]
        without = spans[0][2] if spans and spans[0][0] == 0 else 0
        tokens: slice | Tensor = order[without:]
        if len(order) > without and bool((order[without:].diff() == 1).all()):
            tokens = slice(int(order[without]), int(order[-1]) + 1)
        return tokens, [(s, start - without, end - without) for s, start, end in spans if s]


POINTER_FIELDS = 5  # addresses of a, b and gain, rank, and the bits of an fp64 scale


@dataclass(eq=False)
class LoraTable:
    """The adapters of linears that read the same input and whose outputs lie side by side, by slot.

    widths: outputs of each linear; biases: theirs, which DoRA leaves as they are.
    """

    widths: Sequence[int]
    biases: Sequence[Tensor | None]
    num_slots: int
    device: torch.device
    weights: list[dict[int, LoraWeights]] = field(init=False)
    pointers: Tensor = field(init=False)  # int64 [linears, num_slots + 1, POINTER_FIELDS]; it never moves
    max_rank: int = 0
    _written: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # rows of ``pointers``
    _columns: Tensor | None = None

    def __post_init__(self) -> None:
        self.weights = [{} for _ in self.widths]
        size = (len(self.widths), self.num_slots + 1, POINTER_FIELDS)
        with torch.inference_mode(False):  # or it could not be written to outside of the caller's
            self.pointers = torch.zeros(size, dtype=torch.long, device=self.device)

    def put(self, linear: int, slot: int, weights: LoraWeights | None) -> None:
        """Set what a slot does to one of the linears; None: nothing."""
        assert 0 < slot <= self.num_slots
        if weights is None:
            if self.weights[linear].pop(slot, None) is not None:
                self.pointers[linear, slot] = 0
                self._written.pop((linear, slot), None)
            return
        self.weights[linear][slot] = weights
        self.max_rank = max(self.max_rank, weights.a.shape[0])
        gain = 0 if weights.gain is None else weights.gain.data_ptr()
        (scale,) = struct.unpack("q", struct.pack("d", weights.scale))
        row = [weights.a.data_ptr(), weights.b.data_ptr(), gain, weights.a.shape[0], scale]
        if self._written.get((linear, slot)) != row:  # a small copy for each, so only where something moved
            self.pointers[linear, slot] = torch.tensor(row)
            self._written[linear, slot] = row

    def columns(self, block: int) -> Tensor:
        """For kernels whose tiles have ``block`` columns, int64 [linears, 4]: first tile, offset, width, bias address."""
        if self._columns is None:
            tile = offset = 0
            entries = []
            for width, bias in zip(self.widths, self.biases, strict=True):
                entries.append([tile, offset, width, 0 if bias is None else bias.data_ptr()])
                tile, offset = tile + -(-width // block), offset + width
            self._columns = torch.tensor(entries, device=self.device)
        return self._columns

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrices, which is one for all."""
        return next((w.a.dtype for by_slot in self.weights for w in by_slot.values()), torch.float32)

    @property
    def empty(self) -> bool:
        return not any(self.weights)


def lora(x: Tensor, out: Tensor, table: LoraTable, rows: AdapterRows) -> Tensor:
    """Apply each token's adapter to the projection of ``x`` in ``out``, which is changed in place and returned.

    x: [T, D]; out: [T, N], the widths of the table side by side. Tokens of slot 0, or of one that has nothing in the
    table, stay as they are. Products are of the adapter's dtype, as PEFT's are.
    """
    tokens, spans = rows.by_slot
    mine = x[tokens]
    column = 0
    for width, bias, by_slot in zip(table.widths, table.biases, table.weights, strict=True):
        part = out[:, column : column + width]
        column += width
        if not any(slot in by_slot for slot, _, _ in spans):
            continue
        before = part[tokens]  # a view where they lie side by side
        for slot, start, end in spans:
            if slot in by_slot:
                _adapt(mine[start:end], before[start:end], bias, by_slot[slot])
        if not isinstance(tokens, slice):
            part[tokens] = before
    return out


def _adapt(x: Tensor, out: Tensor, bias: Tensor | None, weights: LoraWeights) -> None:
    """One adapter over one linear, in place."""
    a, b, scale, gain = weights
    if gain is None and a.dtype == out.dtype:
        out.addmm_(x @ a.T, b.T, alpha=scale)
        return
    delta = (x.to(a.dtype) @ a.T) @ b.T * scale
    if gain is not None:
        delta = (gain - 1) * (out if bias is None else out - bias) + gain * delta
    out.copy_(out + delta)
