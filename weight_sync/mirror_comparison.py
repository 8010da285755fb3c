"""Compares a mirror with what the trainer holds, by checksums of whole tensors and of the parts that ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.kernels.collectives import all_gather
from stoker.weight_sync.checksum import checksums
from stoker.weight_sync.gather import Gatherer
from stoker.weight_sync.held import Held, Shards, by_group
from stoker.weight_sync.mirror import Mirror
from stoker.weight_sync.rank_agreement import Parts, agree, lost, parts_of, telling


def compare(
    read: Callable[[], Held], mirror: Mirror, parts: Parts, gather_bytes: int, alike: Sequence[str] = ()
) -> tuple[int, list[str]]:
    """(number of tensors compared, names of those that differ from the trainer's in the mirror's dtypes).

    read: returns what this rank holds. parts: as all ranks know them, even one that cannot read its own. Ranks exchange checksums
    of their parts, so all of them call this together. alike: as for ``agree``.
    """
    passing, consumer, device = mirror.passing, mirror.consumer, mirror.device
    dtypes = {name: t.dtype for name, t in mirror.tensors.items()}  # also of tied ones, which may be untied by now
    with ExitStack() as memory:
        with telling(parts, device):
            held = read()
            whole = {n: t for n, t in (held.full | _tied_since(held, mirror)).items() if n in mirror.tensors}
            reshaped = [name for name, tensor in whole.items() if tensor.shape != mirror.tensors[name].shape]
            whole = {name: tensor for name, tensor in whole.items() if name not in reshaped}
            names = [name for name in whole if name not in passing]
            theirs = checksums([whole[n] for n in names], device, [dtypes[n] for n in names])
            ours = checksums([mirror.tensors[name] for name in names], device)
            wrong = [n for n, a, b in zip(names, theirs, ours, strict=True) if a != b] + reshaped
            # Any others came after the engine was built.
            shards = [s for s in held.shards if mirror.tensors.keys() >= {*s.names}]
            kept = by_group(part for part in (s.of(lambda n: n not in passing) for s in shards) if part.names)
            comparisons = [Comparison(*of_group, device, dtypes) for of_group in kept.items()]
            in_order = [s for of_group in by_group(shards).values() for s in of_group]
            gathering = Gatherer(mirror, gather_bytes).prepare(memory, in_order, kept=False)
        agree(parts_of(shards), device, alike=alike)
        for comparison in comparisons:
            comparison.exchange()
        with telling(parts, device):
            found: set[str] = set()
            if consumer is not None and passing:
                gathering(lambda part: found.update(consumer.mismatches(part)))
                through = {name: tensor for name, tensor in whole.items() if name in passing}
                names += through
                for part in mirror.let_through(through):
                    wrong += consumer.mismatches(part)
            found.update(*(comparison.differing(mirror.tensors) for comparison in comparisons))
        agree(parts_of(shards), device)
    count = len(names) + len(reshaped) + sum(len(s.names) for s in shards)
    return count, wrong + [name for s in shards for name in s.names if name in found]


def _tied_since(held: Held, mirror: Mirror) -> dict[str, Tensor]:
    """The trainer's tensors that are tied now, under names that had tensors of their own when the mirror was made."""
    pairs = ((other, first) for other, first in held.aliases.items() if first in held.full)
    return {n: held.full[first] for n, first in pairs if mirror.tensors.get(n) is not mirror.tensors.get(first)}


class Comparison:
    """Compares the shards of one group. Its ranks call ``exchange`` together; the rest each does by itself."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        shards: Sequence[Shards],
        device: torch.device,
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        """dtypes: those in the mirror, in which parts are compared."""
        self._group, self._shards, self._device = group, shards, device
        rank = dist.get_rank(group)
        width = max(len(pieces) for s in shards for pieces in s.pieces)
        held = [(i, c, piece) for i, s in enumerate(shards) for c, piece in enumerate(s.pieces[rank])]
        parts = [shards[i].local[piece.start : piece.start + piece.rows] for i, _, piece in held]
        numbers = checksums(parts, device, [dtypes[piece.name] for *_, piece in held])
        table = torch.zeros(len(shards), width, dtype=torch.int64, device="cpu")
        for (i, column, _), number in zip(held, numbers, strict=True):
            table[i, column] = number
        self._mine = table.to(device)
        self._theirs = self._mine.new_empty(group.size(), *table.shape)

    def exchange(self) -> None:
        try:
            all_gather(self._theirs.view(-1), self._mine.view(-1), group=self._group)
        except RuntimeError as error:
            raise lost(self._group, "comparing weights", error) from error

    def differing(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """The names of those that differ in the mirror's ``tensors``."""
        table = self._theirs.cpu()
        pieces = [
            (r, i, c, p)
            for i, s in enumerate(self._shards)
            for r, of_rank in enumerate(s.pieces)
            for c, p in enumerate(of_rank)
        ]
        ours = checksums([p.view(tensors[p.name]) for *_, p in pieces], self._device)
        return {p.name for (r, i, c, p), number in zip(pieces, ours, strict=True) if table[r, i, c] != number}
