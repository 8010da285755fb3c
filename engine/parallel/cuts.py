"""Which part of a matrix a rank has, and which of the adapters over it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stoker.kernels.reference.adapter_weights import LoraWeights

Span = tuple[int, int]


class Cut(NamedTuple):
    """Which rows of a matrix a rank has, in order, and which columns; None: all of them."""

    rows: tuple[Span, ...] | None = None
    columns: Span | None = None

    def size(self, whole: torch.Size) -> torch.Size:
        rows = whole[-2] if self.rows is None else sum(high - low for low, high in self.rows)
        columns = whole[-1] if self.columns is None else self.columns[1] - self.columns[0]
        return torch.Size((*whole[:-2], rows, columns))

    def copy(self, whole: Tensor, part: Tensor) -> None:
        """Write the rank's part of a matrix, or of one for each expert."""
        low, high = self.columns or (0, whole.shape[-1])
        row = 0
        for first, end in self.rows or ((0, whole.shape[-2]),):
            part[..., row : row + end - first, :].copy_(whole[..., first:end, low:high])
            row += end - first

    def of_adapter(self, weights: LoraWeights, *, once: bool) -> LoraWeights:
        """The part of a linear's adapter that goes with the rank's part of its weight. once: whether this rank adds biases to sums.

        Its matrices are views of the adapter's, unless ``copies``.
        """
        a, b, shift = weights.a, weights.b, weights.shift
        if self.columns is not None:
            # Copied, as kernels read rows that lie one after the other faster.
            a, shift = a[:, slice(*self.columns)].contiguous(), shift if once else None
        if self.rows is not None:
            b, shift = self._rows(b), None if shift is None else self._rows(shift)
        return weights._replace(a=a, b=b, shift=shift)

    @property
    def copies(self) -> bool:
        """Whether ``of_adapter`` copies a matrix."""
        return self.columns is not None or (self.rows is not None and len(self.rows) > 1)

    def _rows(self, t: Tensor) -> Tensor:
        assert self.rows is not None
        parts = [t[low:high] for low, high in self.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
