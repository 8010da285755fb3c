"""What a LoRA adapter consists of: the weights it adds to each module of a model, and those it puts in their place.

Plain data, the same whether the adapter comes from a live model, another one or a file. ``lora`` applies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from torch import Tensor


class LoraWeights(NamedTuple):
    """What an adapter does to one linear: ``y + scale * b @ (a @ x)``. Of experts there is one such pair, and shift, each.

    gain: DoRA's magnitude over the norm of each adapted row (arXiv:2402.09353), which multiplies the result but its bias.
    shift: added in the end.
    """

    a: Tensor  # [r, D], or [E, r, D]; r may be 0
    b: Tensor  # [N, r], or [E, N, r]
    scale: float
    gain: Tensor | None = None  # fp32 [N]
    shift: Tensor | None = None  # fp32 [N], or [E, N]

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    def of(self, expert: int) -> LoraWeights:
        if self.a.dim() == 2:
            return self
        shift = None if self.shift is None else self.shift[expert]
        return self._replace(a=self.a[expert], b=self.b[expert], shift=shift)


class TokenRows(NamedTuple):
    """Trained rows of an embedding's weight, by token."""

    ids: tuple[int, ...]
    rows: Tensor  # [n, D]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterWeights:
    """One adapter, its tensors wherever they are. Names are those of the base model's modules."""

    linears: dict[str, LoraWeights] = field(default_factory=dict)  # of an embedding: a [r, V], b [D, r]
    magnitudes: dict[str, Tensor] = field(default_factory=dict)  # of linears and embeddings with DoRA, [N]
    offsets: dict[str, Tensor] = field(default_factory=dict)  # bias of b, [N]
    biases: dict[str, Tensor] = field(default_factory=dict)  # in place of a module's own, [N]
    # By the name of the 3-D parameter; or of a table of biases [E, N], of which a is [r, N] and b is [E, r].
    experts: dict[str, LoraWeights] = field(default_factory=dict)
    tokens: dict[str, TokenRows] = field(default_factory=dict)  # of an embedding or a head, in place of its own
    saved: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # state of modules that are replaced whole
    bases: dict[str, Tensor] = field(default_factory=dict)  # weights of the base that were saved with the adapter
    then: AdapterWeights | None = None  # another one on top

    def map(self, change: Callable[[Tensor], Tensor]) -> AdapterWeights:
        """The same with each tensor replaced by what ``change`` makes of it."""
        return replace(self, **{f.name: _mapped(getattr(self, f.name), change) for f in fields(self)})

    def where(self, keep: Callable[[str], bool]) -> AdapterWeights:
        """The same for only the modules whose names are kept. ``then`` keeps all."""
        parts: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, part in parts.items():
            if isinstance(part, dict):
                parts[name] = {key: value for key, value in part.items() if keep(key)}
        return replace(self, **parts)

    def tensors(self) -> Iterator[Tensor]:
        return (tensor for _, tensor in self.named_tensors())

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for part in fields(self):
            yield from _named(part.name, getattr(self, part.name))

    def matrices(self) -> Iterator[Tensor]:
        """A and B of linears and experts."""
        return (matrix for part in (self.linears, self.experts) for w in part.values() for matrix in (w.a, w.b))

    @property
    def links(self) -> Iterator[AdapterWeights]:
        """This adapter, and those applied on top of it, in that order."""
        yield self
        if self.then is not None:
            yield from self.then.links

    @property
    def max_rank(self) -> int:
        weights = (w for link in self.links for w in (*link.linears.values(), *link.experts.values()))
        return max((w.rank for w in weights), default=0)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, AdapterWeights):
        return value.map(change)
    if isinstance(value, Mapping):
        return {key: _mapped(v, change) for key, v in value.items()}
    if isinstance(value, LoraWeights | TokenRows):
        return type(value)(*(_mapped(v, change) for v in value))
    return value


def _named(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, AdapterWeights):
        yield from ((f"{name}.{key}", tensor) for key, tensor in value.named_tensors())
    elif isinstance(value, Mapping | LoraWeights | TokenRows):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _named(f"{name}.{key}", inner)
