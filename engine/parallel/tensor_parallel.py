"""Several ranks run one model together: each has a share of every layer's heads and widths, and a share of the vocabulary.

All of them run the same requests, step by step. A layer's branch begins with a whole hidden state, and ends with a sum over the
ranks ("Megatron-LM", Shoeybi et al., 2019). Logits are put together from every rank's share, so that all ranks sample from the same
bits, and plan the same next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.kernels.collectives import all_gather


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This rank's place among those that run a model together. group: of these ranks, and used for nothing else."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``, in its place; the same bits on all ranks."""
        dist.all_reduce(x, group=self.group)
        return x

    def shares(self, length: int) -> list[int]:
        """How many of ``length`` things each rank has: as many as any other, or one more."""
        return [length // self.size + (rank < length % self.size) for rank in range(self.size)]

    def share(self, length: int) -> slice:
        """Which of ``length`` things this rank has."""
        ends = list(accumulate(self.shares(length), initial=0))
        return slice(ends[self.rank], ends[self.rank + 1])

    def side_by_side(self, x: Tensor, length: int) -> Tensor:
        """Every rank's columns next to each other. x: [T, its share of ``length``]; returns [T, length], the same on all ranks."""
        widths = self.shares(length)
        wide = x.new_empty(self.size, len(x), widths[0])
        mine = x.contiguous() if x.shape[1] == widths[0] else torch.nn.functional.pad(x, (0, widths[0] - x.shape[1]))
        all_gather(wide.view(-1), mine.view(-1), group=self.group)
        return torch.cat([of_rank[:, :width] for of_rank, width in zip(wide, widths, strict=True)], dim=1)
