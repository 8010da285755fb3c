"""What a trainer holds on one rank: whole tensors, and parts of tensors of which other ranks hold the rest. See ``shards``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple
from weakref import ReferenceType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stoker.weight_sync.bitsandbytes_state import is_laid_out_for_cpu
from stoker.weight_sync.dtensor_layout import FLAT, Box


class Piece(NamedTuple):
    """Rows of a rank's part from ``start`` on, and the box of a tensor, seen in ``shape`` (empty: its own), that they fill."""

    name: str
    start: int
    box: Box
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.box[0][1] - self.box[0][0]

    @property
    def row_numel(self) -> int:
        return math.prod(high - low for low, high in self.box[1:])

    def within(self, low: int, high: int) -> Piece | None:
        """What of this piece lies in rows ``low`` to ``high`` of the rank's part."""
        first, last = max(low, self.start), min(high, self.start + self.rows)
        if first >= last or not self.row_numel:
            return None
        begin = self.box[0][0] - self.start
        return Piece(self.name, first, ((begin + first, begin + last), *self.box[1:]), self.shape)

    def view(self, full: Tensor) -> Tensor:
        target = full.view(self.shape) if self.shape else full
        for dim, (low, high) in enumerate(self.box):
            target = target.narrow(dim, low, high - low)
        return target


@dataclass(frozen=True)
class Shards:
    """Tensors whose parts are gathered together: ``local`` [rows, ...] is this rank's, ``pieces`` are by group rank.

    device: where the trainer computes with them; ``local`` may be kept in host memory. read: gives ``local`` where it is
    now. Nothing else is held of it: a trainer that moves its parts gets their memory back.
    """

    names: tuple[str, ...]
    group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype
    read: Callable[[], Tensor]
    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def local(self) -> Tensor:
        return self.read()

    def of(self, wanted: Callable[[str], bool]) -> Shards:
        """The same with only the tensors whose names are wanted."""
        if all(map(wanted, self.names)):
            return self
        pieces = tuple(tuple(p for p in of_rank if wanted(p.name)) for of_rank in self.pieces)
        return replace(self, names=tuple(filter(wanted, self.names)), pieces=pieces)

    @cached_property
    def rows(self) -> int:
        """The most rows that a rank has."""
        return max((p.start + p.rows for pieces in self.pieces for p in pieces), default=0)

    @cached_property
    def even(self) -> bool:
        """Whether it is one flattened tensor, of which every rank has equally many elements, in the order of the ranks."""
        boxes = [((i * self.rows, (i + 1) * self.rows),) for i in range(len(self.pieces))]
        return all(len(p) == 1 and p[0][1:] == (0, box, FLAT) for p, box in zip(self.pieces, boxes, strict=True))

    @cached_property
    def row_numel(self) -> int:
        """The most elements in a row of any rank."""
        return max((p.row_numel for pieces in self.pieces for p in pieces), default=0)


@dataclass
class Held:
    """All that a trainer holds on this rank. full: its own whole tensors. shapes, dtypes: of all tensors, as if whole."""

    full: dict[str, Tensor] = field(default_factory=dict)
    whole: dict[str, DTensor] = field(default_factory=dict)  # those of ``full`` that are, and may be elsewhere later
    shards: list[Shards] = field(default_factory=list)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)  # a tied tensor's other names, to its first
    parameters: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)  # buffers that no checkpoint has
    adapters: set[str] = field(default_factory=set)  # tensors of adapters, of which only sharded ones are read
    homes: dict[str, ReferenceType[nn.Module]] = field(default_factory=dict)  # the modules that have these
    states: dict[str, Any] = field(default_factory=dict)  # of each weight in 4 bits; its scales are whole tensors
    scales: set[str] = field(default_factory=set)  # names of these scales: the weight's, then their own

    @property
    def names(self) -> set[str]:
        return self.shapes.keys() | self.aliases.keys()

    @property
    def spoilt(self) -> list[str]:
        """Sharded weights that a forward has laid out anew for a CPU, as their states say: the parts do not follow that."""
        return [n for n, state in self.states.items() if n not in self.full and is_laid_out_for_cpu(state)]

    @property
    def beside(self) -> set[str]:
        """Names of tensors that are not the plain model's."""
        return self.adapters | self.scales

    def numbers(self, dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor, torch.dtype]]:
        """All tensors here with the dtype they are to have, without packed weights, whose bits are no numbers."""
        yield from ((name, tensor, dtypes[name]) for name, tensor in self.full.items() if name not in self.states)
        for s in self.shards:
            if self.states.keys().isdisjoint(s.names):
                name = s.names[0] if len(s.names) == 1 else f"a tensor among {s.names[0]} to {s.names[-1]}"
                yield from ((name, s.local, dtype) for dtype in {dtypes[n] for n in s.names})
            else:
                pieces = (p for p in s.pieces[dist.get_rank(s.group)] if p.name not in self.states)
                yield from ((p.name, s.local[p.start : p.start + p.rows], dtypes[p.name]) for p in pieces)

    def of(self, wanted: Callable[[str], bool]) -> Held:
        """The same with only the tensors whose names are wanted. What is sharded over one rank is whole."""
        shards = [s for s in (s.of(wanted) for s in self.shards) if s.names]
        full = {name: tensor for name, tensor in self.full.items() if wanted(name)}
        names = full.keys() | {name for s in shards for name in s.names}
        return Held(
            full=full,
            shards=shards,
            shapes={name: shape for name, shape in self.shapes.items() if name in names},
            dtypes={name: dtype for name, dtype in self.dtypes.items() if name in names},
            aliases={other: first for other, first in self.aliases.items() if first in names},
            parameters=self.parameters & names,
            homes={name: home for name, home in self.homes.items() if name in names},
        )

    def without_parts(self) -> Held:
        """The same without what DTensors consist of, which a trainer may replace; ``with_parts`` finds it again."""
        return replace(self, full={n: t for n, t in self.full.items() if n not in self.whole}) if self.whole else self

    def with_parts(self) -> Held:
        """The same with what DTensors consist of now."""
        return replace(self, full=self.full | {n: part_of(t) for n, t in self.whole.items()}) if self.whole else self

    def add(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shapes[name], self.dtypes[name] = torch.Size(shape), dtype


def by_group(shards: Iterable[Shards]) -> dict[dist.ProcessGroup, list[Shards]]:
    """The shards of each group. Groups come in the order of their first shard, which is the same on all ranks."""
    found: dict[dist.ProcessGroup, list[Shards]] = {}
    for one in shards:
        found.setdefault(one.group, []).append(one)
    return found


def part_of(tensor: DTensor) -> Tensor:
    """What a rank holds of it, as ``to_local`` gives it, without what that takes for autograd."""
    return tensor._local_tensor.detach()
