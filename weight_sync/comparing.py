"""Whether a mirror has what ranks hold in parts, told by checksums of these parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.weight_sync.agreement import lost
from stoker.weight_sync.checksum import checksums
from stoker.weight_sync.gather import all_gather
from stoker.weight_sync.shards import Shards


class Comparison:
    """Of the shards of one group: ``exchange`` is what its ranks do together, and all else each by itself."""

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
        """The names of those that the mirror's ``tensors`` have otherwise."""
        table = self._theirs.cpu()
        pieces = [
            (r, i, c, p)
            for i, s in enumerate(self._shards)
            for r, of_rank in enumerate(s.pieces)
            for c, p in enumerate(of_rank)
        ]
        ours = checksums([p.view(tensors[p.name]) for *_, p in pieces], self._device)
        return {p.name for (r, i, c, p), number in zip(pieces, ours, strict=True) if table[r, i, c] != number}
