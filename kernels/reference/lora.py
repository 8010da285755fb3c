"""Low-rank adapters over a projection's output, as plain torch (Hu et al. 2021, arXiv:2106.09685).

Each token has a slot. A slot holds one adapter; slot 0 holds none. An adapter's matrices stay where they are: a table keeps
the tensors themselves, and their addresses for kernels. A few tokens of many adapters use copies that lie side by side
(``lora_stacks``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stoker.kernels.host_memory import to_device
from stoker.kernels.reference.adapter_weights import LoraWeights
from stoker.kernels.reference.lora_pieces import Pieces, change
from stoker.kernels.reference.lora_stacks import Stacks
from stoker.kernels.reference.norm_rotary import Activation, act_mul


@dataclass(frozen=True)
class AdapterRows:
    """The adapter slot of each of T tokens, for one window of steps, in which no adapter changes."""

    slots: Tensor  # int64 [T]
    _pieces: dict[Stacks, tuple[int, Pieces | None]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    # For each table: the version of its stacks, and the function that changes an output as of that version.
    _ready: dict[LoraTable, tuple[int, Callable[[Tensor, Tensor], None] | None]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    # By number of slots and height of a tile: what kernels made of these rows on the device. For one step, as a captured step
    # makes it itself.
    of_step: dict[tuple[int, int], Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def select(self, index: Tensor) -> AdapterRows:
        """The rows for the tokens at ``index``, int64 [R]."""
        return AdapterRows(self.slots.index_select(0, index))

    @cached_property
    def by_slot(self) -> tuple[slice | Tensor, list[tuple[int, int, int]]]:
        """The tokens that have an adapter, sorted by slot, and (slot, start, end) of each slot among them.

        Slots are in the order of their first tokens, so tokens that are sorted already keep their order. For a CPU: it reads
        the slots.
        """
        found: dict[int, list[int]] = {}
        for token, slot in enumerate(self.slots.tolist()):
            if slot:
                found.setdefault(slot, []).append(token)
        ends = list(accumulate(map(len, found.values())))
        spans = [(slot, end - len(mine), end) for (slot, mine), end in zip(found.items(), ends, strict=True)]
        order = list(chain.from_iterable(found.values()))
        first = order[0] if order else 0
        as_they_lie = order == list(range(first, first + len(order)))
        return slice(first, first + len(order)) if as_they_lie else torch.tensor(order, device=self.slots.device), spans

    def through(self, stacks: Stacks) -> Pieces | None:
        """How these tokens go through the stacks: the same for all tables of a step and all steps of a window.

        None where no token has an adapter. For a CPU.
        """
        version, pieces = self._pieces.get(stacks, (None, None))
        if version != stacks.version:
            pieces = stacks.pieces(self.slots, *self.by_slot) if self.by_slot[1] else None
            self._pieces[stacks] = stacks.version, pieces
        return pieces

    def change_of(self, table: LoraTable) -> Callable[[Tensor, Tensor], None] | None:
        """What changes an output; None: nothing does. It is looked up once, not at every step. For a CPU."""
        version, change = self._ready.get(table, (None, None))
        if version != table.stacks.version:
            pieces = self.through(table.stacks)
            stack = table.stacks.of(table)
            change = None if pieces is None or not stack.parts else pieces.through(stack)
            self._ready[table] = table.stacks.version, change
        return change

    def adapt(self, x: Tensor, out: Tensor, table: LoraTable) -> None:
        """As ``lora``. For a CPU."""
        change = self.change_of(table)
        if change is not None:
            change(x, out)


# Addresses of a, b, gain and shift, rank, the bits of an fp64 scale, and the strides of a and b.
POINTER_FIELDS = 10
_ROW = struct.Struct("5qd4q")


class PointerBlock:
    """The rows of addresses of several tables, which are copied to the device together. They never move."""

    def __init__(self, tables: Sequence[LoraTable]) -> None:
        """tables: none of them has a block yet."""
        sizes = [len(t.widths) * t.entries * POINTER_FIELDS for t in tables]
        with torch.inference_mode(False):  # or they could not be written to outside of the caller's
            self._host = torch.zeros(sum(sizes), dtype=torch.long, device="cpu")
            self._rows = self._host.to(tables[0].device)  # itself, on a CPU
        self.changed = False
        parts = zip(tables, torch.split(self._host, sizes), torch.split(self._rows, sizes), strict=True)
        for table, host, rows in parts:
            shape = (len(table.widths), table.entries, POINTER_FIELDS)
            array: Any = host.numpy()
            table.block, table.rows_on_host, table.rows = self, memoryview(array).cast("B"), rows.view(shape)

    def upload(self) -> None:
        if self.changed and self._rows is not self._host:
            self._rows.copy_(self._host.pin_memory(), non_blocking=True)  # pinned anew: the one before may be under way
        self.changed = False


class KernelRows(NamedTuple):
    """What kernels find weights by: addresses, and how the weights lie there. Valid until they move."""

    packed: bytes  # POINTER_FIELDS, or as many for each expert
    rank: int
    strided: bool  # whether a matrix does not lie row after row
    aligned: bool  # whether 16 bytes at a time can be read of matrices that do


def kernel_rows(weights: LoraWeights) -> KernelRows:
    """The addresses of weights that ``LoraTable.put`` takes."""
    a, b, scale, gain, shift = weights
    rank, of_experts = a.shape[-2], a.dim() == 3
    first_a, first_b = (a[0], b[0]) if of_experts else (a, b)
    strided = not (first_a.is_contiguous() and first_b.is_contiguous())
    aligned = rank % 8 == 0 and _is_aligned(a) and _is_aligned(b)
    numbers = rank, scale, *first_a.stride(), *first_b.stride()
    at = [0 if t is None else t.data_ptr() for t in (a, b, gain, shift)]
    traits = rank, strided, aligned
    if not of_experts:
        return KernelRows(_ROW.pack(*at, *numbers), *traits)
    steps = [0 if t is None else t.stride(0) * t.element_size() for t in (a, b, gain, shift)]
    by_expert = ((start + expert * step for start, step in zip(at, steps, strict=True)) for expert in range(len(a)))
    return KernelRows(b"".join(_ROW.pack(*first, *numbers) for first in by_expert), *traits)


def _is_aligned(matrix: Tensor) -> bool:
    """Whether each expert's matrix begins at a multiple of 16 bytes."""
    each = matrix.stride(0) if matrix.dim() == 3 else 0
    return matrix.data_ptr() % 16 == 0 and each * matrix.element_size() % 16 == 0


@dataclass(eq=False)
class LoraTable:
    """The adapters, by slot, of linears that read the same input and whose outputs lie side by side.

    widths: outputs of each linear. biases: theirs, which DoRA does not scale. experts: how many pairs of matrices a slot
    has; a row for one of these experts has a slot of its own (``expert_slots``). stacks: shared by all tables of a model.
    """

    widths: Sequence[int]
    biases: Sequence[Tensor | None]
    num_slots: int
    device: torch.device
    experts: int = 1
    stacks: Stacks = field(default_factory=Stacks)
    weights: list[dict[int, LoraWeights]] = field(init=False)
    block: PointerBlock | None = None  # its own, unless tables were put into one before they were used
    # The bytes of int64 [linears, entries, POINTER_FIELDS]; as a write to a tensor would be an operation for each linear.
    rows_on_host: memoryview = field(init=False)
    rows: Tensor = field(init=False)  # the same on the device
    max_rank: int = 0
    strided: bool = False  # whether any matrix does not lie row after row
    aligned: bool = True  # whether 16 bytes at a time can be read of all matrices that do
    only_matrices: bool = True  # whether no slot ever had a gain or a shift
    _columns: dict[int, tuple[list[int], Tensor]] = field(default_factory=dict)  # with the addresses of biases

    def __post_init__(self) -> None:
        self.weights = [{} for _ in self.widths]

    @property
    def entries(self) -> int:
        return self.num_slots * self.experts + 1

    @property
    def is_behind(self) -> bool:
        """Whether the table on the device is out of date, so that ``pointers`` would copy it again."""
        return self.block is None or self.block.changed

    @property
    def pointers(self) -> Tensor:
        """The table for kernels, int64 [linears, entries, POINTER_FIELDS]."""
        self._own_block().upload()
        return self.rows

    def _own_block(self) -> PointerBlock:
        return self.block or PointerBlock([self])

    def put(self, linear: int, slot: int, weights: LoraWeights | None, rows: KernelRows | None = None) -> None:
        """Set what a slot does to one of the linears; None: nothing. rows: the weights' ``kernel_rows``, if known."""
        assert 0 < slot <= self.num_slots
        self.stacks.forget()
        block, nbytes = self._own_block(), self.experts * _ROW.size
        if weights is None:
            if self.weights[linear].pop(slot, None) is None:
                return
            packed = bytes(nbytes)
        else:
            self.weights[linear][slot] = weights
            packed, rank, strided, aligned = rows or kernel_rows(weights)
            self.max_rank = max(self.max_rank, rank)
            self.strided |= strided
            self.aligned &= aligned
            self.only_matrices &= weights.gain is None and weights.shift is None
        start = linear * self.entries * _ROW.size + (slot - 1) * nbytes + _ROW.size
        place = self.rows_on_host[start : start + nbytes]
        if place != packed:
            place[:] = packed
            block.changed = True

    def entry(self, linear: int, slot: int) -> LoraWeights | None:
        """What a row's slot does; of experts, that is one of ``expert_slots``."""
        weights = self.weights[linear].get((slot - 1) // self.experts + 1)
        return None if weights is None else weights.of((slot - 1) % self.experts)

    def columns(self, block: int) -> Tensor:
        """The columns of each linear, for kernels with tiles of ``block`` columns.

        int64 [linears, 4]: first tile, offset, width, address of the bias.
        """
        addresses = [0 if bias is None else bias.data_ptr() for bias in self.biases]
        known = self._columns.get(block)
        if known is None or known[0] != addresses:  # those of a mirror that has slept lie elsewhere
            tile = offset = 0
            entries = []
            for width, address in zip(self.widths, addresses, strict=True):
                entries.append([tile, offset, width, address])
                tile, offset = tile + -(-width // block), offset + width
            known = self._columns[block] = addresses, to_device(torch.tensor(entries, device="cpu"), self.device)
        return known[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrices, one for all."""
        for by_slot in self.weights:
            for weights in by_slot.values():
                if weights.rank:
                    return weights.a.dtype
        return torch.float32

    @property
    def traits(self) -> tuple[object, ...]:
        """What a captured step depends on in this table. All but the last can only change once, or grow."""
        return self.max_rank, self.strided, self.aligned, self.only_matrices, self.dtype, self.empty

    @property
    def empty(self) -> bool:
        return not any(self.weights)


def expert_slots(slots: Tensor, experts: Tensor, num_experts: int) -> Tensor:
    """The slot, in a table of experts, of rows that go through one expert each. slots, experts: int64 [P]."""
    return torch.where(slots > 0, (slots - 1) * num_experts + experts + 1, 0)


def lora(
    x: Tensor,
    out: Tensor,
    table: LoraTable,
    rows: AdapterRows,
    gated: Activation | None = None,
    *,
    settled: bool = False,
) -> Tensor:
    """Apply each token's adapter to ``out``, the projection of ``x``, in place; returns ``out``.

    x: [T, D]; out: [T, N], the widths of the table side by side. Tokens of slot 0, or of a slot without an entry in the
    table, stay as they are. Products are in the adapter's dtype, as PEFT's are. gated: returns ``act_mul`` of the result
    for all tokens instead, and nobody reads ``out`` any more. settled: ``x`` was there before the launch of the last
    kernel, which made ``out`` from it.
    """
    if table.experts == 1:
        rows.adapt(x, out, table)
    else:
        _apply(x, lambda x, a: x.to(a.dtype) @ a.T, out, table, rows)
    return out if gated is None else act_mul(out, gated)


def lora_embedding(token_ids: Tensor, out: Tensor, table: LoraTable, rows: AdapterRows) -> Tensor:
    """``lora`` for an embedding, where ``x`` is 1 at a token's id and 0 elsewhere. token_ids: int64 [T]; out: [T, N]."""
    return _apply(token_ids, lambda ids, a: a[:, ids].T, out, table, rows)


def _apply(
    source: Tensor, shrink: Callable[[Tensor, Tensor], Tensor], out: Tensor, table: LoraTable, rows: AdapterRows
) -> Tensor:
    """Apply adapters. shrink: computes the ranks' inputs, [t, r], from some rows of the source and a matrix ``a``."""
    tokens, spans = rows.by_slot
    mine = source[tokens]
    column = 0
    for linear, (width, bias) in enumerate(zip(table.widths, table.biases, strict=True)):
        part = out[:, column : column + width]
        column += width
        found = [(table.entry(linear, slot), start, end) for slot, start, end in spans]
        if all(weights is None for weights, _, _ in found):
            continue
        before = part[tokens]  # a view where they lie side by side
        for weights, start, end in found:
            if weights is not None:
                _, b, scale, gain, shift = weights
                here = before[start:end]
                here.add_(change(shrink(mine[start:end], weights.a) @ b.T * scale, here, bias, gain, shift))
        if not isinstance(tokens, slice):
            part[tokens] = before
    return out
