"""What a rank has of things that several share: of heads and widths, and of small tensors that belong to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stoker.engine.layers.fused_branches import MixerBranch
from stoker.engine.layers.fused_mixers import Mixer
from stoker.engine.layers.linears import Linears
from stoker.engine.parallel.cuts import Span
from stoker.engine.parallel.tensor_parallel import TensorParallel
from stoker.kernels.errors import UnsupportedModelError

Remade = list[Callable[[], object]]  # each makes a small part anew


class CutBranch(NamedTuple):
    """A branch with this rank's part of its mixer, and where its linears are to be cut.

    by_rows: (linears, rows of all of them one after the other); by_columns: (a linear whose results are added up, its columns).
    """

    branch: MixerBranch
    by_rows: Sequence[tuple[Linears, Sequence[Span]]]
    by_columns: Sequence[tuple[Linears, Span]]

    @classmethod
    def of(
        cls,
        branch: MixerBranch,
        mixer: Mixer,
        rows: Rows,
        columns: Span,
        inner: Sequence[tuple[Linears, Sequence[Span]]] = (),
        summed: Sequence[tuple[Linears, Span]] = (),
    ) -> CutBranch:
        """With another mixer. rows: of the linears before it; columns: of the one after. inner, summed: by rows and by columns."""
        return cls(
            replace(branch, mixer=mixer), ((branch.inputs, rows.spans), *inner), (*summed, (branch.out, columns))
        )


class PartOf:
    """A module of which some attributes are a rank's part."""

    def __init__(self, whole: Any, **parts: Any) -> None:
        vars(self).update(parts, _whole=whole)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


class Rows:
    """Spans of rows that lie one after the other."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.end = 0

    def take(self, width: int, *spans: Span) -> None:
        """Of the next ``width`` rows take these spans."""
        for low, high in spans:
            if low == high:
                continue
            start = self.end + low
            if self.spans and self.spans[-1][1] == start:
                start = self.spans.pop()[0]
            self.spans.append((start, self.end + high))
        self.end += width

    def take_units(self, count: int, unit: int, mine: Span) -> None:
        """Of the next ``count * unit`` rows take those of some units."""
        self.take(count * unit, scaled(mine, unit))


def scaled(span: Span, unit: int) -> Span:
    return span[0] * unit, span[1] * unit


def within(span: Span, start: int, length: int) -> Span:
    """The part of a span that is in another one, counted from there."""
    low, high = (min(max(end - start, 0), length) for end in span)
    return low, high


def part_of(whole: Tensor, spans: Sequence[Span], remade: Remade) -> Tensor:
    """Those rows of a small tensor that is always there. A view where they are in one piece, which changes as the whole does."""
    parts = [whole.detach()[low:high] for low, high in spans]
    if len(parts) == 1:
        return parts[0]
    copy = torch.cat(parts)

    def make() -> None:
        torch.cat(parts, out=copy)

    remade.append(make)
    return copy


def share(count: int, what: str, parallel: TensorParallel) -> Span:
    if count % parallel.size:
        raise refused(f"the {what}, {count}, cannot be shared by {parallel.size} ranks")
    each = count // parallel.size
    return parallel.rank * each, (parallel.rank + 1) * each


def share_keys(count: int, what: str, parallel: TensorParallel) -> Span:
    """As ``share``, of what serves several heads. Where there are fewer than ranks, several ranks have the same one."""
    if count % parallel.size and parallel.size % count:
        raise refused(f"the {what}, {count}, cannot be shared by {parallel.size} ranks")
    first = parallel.rank * count // parallel.size
    return first, first + max(1, count // parallel.size)


def refused(why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"tensor_parallel_size cannot be had for this model: {why}. Leave it at 1")
