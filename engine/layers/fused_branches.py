"""The branches of a fused decoder layer: a mixer or an MLP, between its linears; or a module of the original layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from stoker.engine.layers.fused_mixers import Mixer
from stoker.engine.layers.fused_moe import is_mixture, mixture_of
from stoker.engine.layers.linears import Linears
from stoker.kernels.ops import Ops
from stoker.kernels.reference.norm_rotary import Activation, Norm


class LayerInputs(NamedTuple):
    """What a layer gets besides hidden states."""

    tables: tuple[Tensor, ...] | None = None  # of ``Rotary``
    context: Any = None
    per_layer: Tensor | None = None  # [T, P], of a model that gives each layer an input of its own


_NOTHING = LayerInputs()


@dataclass(frozen=True, slots=True)
class NormBefore:
    """A norm before a branch, or before all branches of a block."""

    norm: Norm
    module: Any  # the original's
    ops: Ops

    @property
    def adapted(self) -> bool:
        """Whether adapters bring a weight or a bias of their own for it."""
        return bool(self.module._forward_hooks)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, D]."""
        out: Tensor = self.module(x) if self.adapted else self.ops.rms_norm(x, *self.norm)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerBranch:
    """Linears, then attention or what is in its place (or just an activation), then another linear."""

    inputs: Linears
    mixer: Mixer
    inner: tuple[Linears, ...]  # of the mixer
    out: Linears
    scale: float
    in_scale: float
    norm: NormBefore | None  # of its own, in place of the block's
    post_norm: Norm | None

    norms_itself: ClassVar[bool] = False

    @property
    def linears(self) -> tuple[Linears, ...]:
        return self.inputs, *self.inner, self.out

    def __call__(self, x: Tensor, norm: Norm | None = None, given: LayerInputs = _NOTHING, **add: Any) -> Tensor:
        """add: ``residual`` and what belongs to it, as for ``Ops.linear``."""
        return self.out(self.mixer(self.inputs(x, norm=norm), given.tables, given.context), **add)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpBranch:
    """Gate and up as one product, activation, down."""

    gate_up: Linears
    act: Activation
    gate_scale: float
    per_layer: bool  # the first linear makes only the gate, and what it gates is the layer's own input
    down: Linears
    scale: float
    norm: NormBefore | None
    post_norm: Norm | None

    in_scale: ClassVar[float] = 1.0
    norms_itself: ClassVar[bool] = False

    @property
    def linears(self) -> tuple[Linears, ...]:
        return self.gate_up, self.down

    def __call__(self, x: Tensor, norm: Norm | None = None, given: LayerInputs = _NOTHING, **add: Any) -> Tensor:
        if self.gate_scale == 1.0 and not self.per_layer:
            return self.down(self.gate_up(x, norm=norm, gated=self.act), **add)
        up = given.per_layer if self.per_layer else None
        gated = self.gate_up.ops.act_mul(self.gate_up(x, norm=norm), self.act, self.gate_scale, up)
        return self.down(gated, **add)


@dataclass(frozen=True, slots=True)
class OriginalBranch:
    """A module of the original layer, or experts with the router before them."""

    module: Any
    router: Any
    scale: float
    norm: NormBefore | None
    post_norm: Norm | None

    in_scale: ClassVar[float] = 1.0
    linears: ClassVar[tuple[Linears, ...]] = ()

    @property
    def norms_itself(self) -> bool:
        """Whether it norms its input itself: a router reads the input without its norm."""
        return self.router is not None

    @property
    def runs_on_ops(self) -> bool:
        """Whether all of it runs on the engine's operations, as long as no adapter is over its router."""
        return is_mixture(self.module)

    def __call__(
        self,
        x: Tensor,
        norm: Norm | None,
        given: LayerInputs,
        *,
        residual: Tensor | None = None,
        scale: float = 1.0,
        in_place: bool = False,
    ) -> Tensor:
        assert norm is None
        normed = self.norm(x) if self.norm is not None and self.norms_itself else x
        if (mixture := mixture_of(self.module)) is not None:
            return mixture(x, normed, residual=residual, scale=scale, in_place=in_place)[0]
        if self.router is not None:
            _, weights, chosen = self.router(x)
            out = self.module(normed, chosen, weights)
        else:
            out = self.module(x[None])
        out = (out[0] if isinstance(out, tuple) else out).view(x.shape)  # some return what their router saw, too
        return out if residual is None else torch.add(residual, out, alpha=scale, out=residual if in_place else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """``layer_structure.Block`` with what runs. Not a module, so that reading it is cheap and no parameter is renamed."""

    norm: NormBefore | None
    branches: tuple[MixerBranch | MlpBranch | OriginalBranch, ...]
    post_norm: Norm | None
    norm_is_read: bool = field(
        init=False
    )  # whether its result is needed: more than one linear, which could do it itself, reads it

    def __post_init__(self) -> None:
        readers = [branch for branch in self.branches if branch.norm is None]
        is_read = len(readers) > 1 or any(isinstance(b, OriginalBranch) or b.in_scale != 1.0 for b in readers)
        object.__setattr__(self, "norm_is_read", is_read)
