"""The mixers of fused layers that keep a state for each sequence, between the projections before and after them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.engine.layers.layer_structure import norm_of
from stoker.engine.layers.linears import Linears
from stoker.kernels.ops import Ops
from stoker.kernels.reference.norm_rotary import Norm

_NORMS_OF_STEPS = ("dt_layernorm", "b_layernorm", "c_layernorm")  # of Jamba and Falcon-Mamba
_OF_MAMBA2 = (
    "A_log",
    "D",
    "dt_bias",
    "ssm_state_size",
    "n_groups",
    "num_heads",
    "head_dim",
    "conv_dim",
    "time_step_limit",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Convolution, gated delta rule and gated norm (Yang et al., 2024)."""

    ops: Ops
    layer: int
    module: Any  # the original, for its parameters
    norm: Norm
    beta_scale: float
    by_key_head: bool  # whether the projections come in their order for each key head, or once for all

    def __call__(self, projected: Tensor, tables: Any, context: Any) -> Tensor:
        """projected: [T, N], in order query, key, value, gate, beta, decay; returns [T, heads * value dim]."""
        m, tokens = self.module, projected.shape[0]
        qkv, gate, b, a = (self._in_order if self.by_key_head else self._split)(projected)
        qkv = context.convolve(self.layer, qkv, m.conv1d.weight.squeeze(1), m.conv1d.bias, activation="silu")
        query, key, value = torch.split(qkv, [m.key_dim, m.key_dim, m.value_dim], dim=1)
        query, key = (t.view(tokens, m.num_k_heads, m.head_k_dim) for t in (query, key))
        value, gate = (t.view(tokens, m.num_v_heads, m.head_v_dim) for t in (value, gate))
        decay, beta = self.ops.delta_gates(a, b, m.A_log, m.dt_bias, self.beta_scale)
        out = context.delta_rule(self.layer, query, key, value, decay, beta, normalise=True)
        return self.ops.gated_rms_norm(out, gate, self.norm.weight, self.norm.eps).flatten(1)

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        m = self.module
        widths = [2 * m.key_dim + m.value_dim, m.value_dim, m.num_v_heads, m.num_v_heads]
        return torch.split(projected, widths, dim=1)

    def _in_order(self, projected: Tensor) -> tuple[Tensor, ...]:
        m, heads = self.module, self.module.num_k_heads
        last, width, each = projected.shape[1] - 2 * m.num_v_heads, m.value_dim // heads, m.num_v_heads // heads
        wide = projected[:, :last].view(-1, heads, last // heads)
        gates = projected[:, last:].view(-1, heads, 2 * each)
        *qkv, gate = torch.split(wide, [m.head_k_dim, m.head_k_dim, width, width], dim=2)
        b, a = torch.split(gates, each, dim=2)
        return torch.cat([t.flatten(1) for t in qkv], dim=1), gate.flatten(1), b.flatten(1), a.flatten(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDelta:
    """Convolution, the delta rule with a decay for each row of a state, and gated norm (Kimi Team, 2025)."""

    ops: Ops
    layer: int
    module: Any  # the original, for its parameters
    norm: Norm
    # Of query, key and value together, beta, and the decay and the gate, or latent vectors that these two are made of.
    widths: tuple[int, ...]
    decay: Linears | None
    gate: Linears | None
    bound: float | None  # of the decay's logarithm
    rounded: bool  # whether it has the dtype of the layer's numbers

    def __call__(self, projected: Tensor, tables: Any, context: Any) -> Tensor:
        """projected: [T, N], in the order of ``widths``; returns [T, heads * dim]."""
        m = self.module
        qkv, b, a, gate = torch.split(projected, list(self.widths), dim=1)
        qkv = context.convolve(self.layer, qkv, m.conv1d.weight.squeeze(1), m.conv1d.bias, activation="silu")
        a = a if self.decay is None else self.decay(a)
        gate = gate if self.gate is None else self.gate(gate)
        query, key, value, a, gate = (t.view(t.shape[0], b.shape[1], -1) for t in (*qkv.chunk(3, dim=1), a, gate))
        forget = m.forget_gate
        decay, beta = self.ops.delta_gates(a, b, forget.A_log, forget.dt_bias, bound=self.bound, rounded=self.rounded)
        out = context.delta_rule(self.layer, query, key, value, decay, beta, normalise=True)
        return self.ops.gated_rms_norm(out, gate, self.norm.weight, self.norm.eps, sigmoid=True).flatten(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution:
    """A convolution between two gates, of LFM2."""

    layer: int
    module: Any  # the original, for its parameters

    def __call__(self, projected: Tensor, tables: Any, context: Any) -> Tensor:
        """projected: [T, 3 * D], in order first gate, second gate, input; returns [T, D]."""
        conv = self.module.conv
        before, after, x = projected.chunk(3, dim=1)
        out: Tensor = context.convolve(
            self.layer, x, conv.weight.squeeze(1), conv.bias, activation=None, gates=(before, after)
        )
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Convolution, selective scan and gated norm (Dao and Gu, 2024)."""

    ops: Ops
    layer: int
    module: Any  # the original, for its parameters
    norm: tuple[Tensor, float] | None  # weight and epsilon; None: there is a gate alone
    groups: int  # that are normed each by itself
    gate_first: bool

    def __call__(self, projected: Tensor, tables: Any, context: Any) -> Tensor:
        """projected: [T, N], in order gate, input, B, C, step; returns [T, heads * dim]."""
        m, dtype, tokens = self.module, projected.dtype, projected.shape[0]
        if (scales := getattr(m, "mup_vector", None)) is not None:  # Falcon-H1's
            projected = projected * scales[0]
        gate, x, dt = torch.split(projected, [m.intermediate_size, m.conv_dim, m.num_heads], dim=1)
        x = context.convolve(self.layer, x, m.conv1d.weight.squeeze(1), m.conv1d.bias, activation="silu")
        of_groups = (m.conv_dim - m.intermediate_size) // 2
        x, b, c = torch.split(x, [m.intermediate_size, of_groups, of_groups], dim=1)
        b, c = (t.view(tokens, m.n_groups, m.ssm_state_size) for t in (b, c))
        x = x.view(tokens, m.num_heads, m.head_dim)
        options = {"dt_bias": m.dt_bias, "dt_limit": m.time_step_limit, "a_log": True}
        out = context.scan(self.layer, x, dt, m.A_log, b, c, m.D, **options)
        weight, eps = (None, 0.0) if self.norm is None else self.norm
        gate, out = (t.view(tokens, self.groups, -1) for t in (gate, out.flatten(1)))
        weight = None if weight is None else weight.view(self.groups, -1)
        return self.ops.gated_rms_norm(out, gate, weight, eps, self.gate_first).flatten(1).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """Convolution, selective scan with a step for each channel, and gate (Gu and Dao, 2023)."""

    ops: Ops
    layer: int
    module: Any  # the original, for its parameters
    of_step: Callable[[Tensor], Tensor]  # makes the step's latent vector, B and C
    norms: tuple[Norm, ...]  # of these three (Jamba, Falcon-Mamba), or none

    def __call__(self, projected: Tensor, tables: Any, context: Any) -> Tensor:
        """projected: [T, N], in order input, gate; returns [T, channels]."""
        m, (x, gate) = self.module, projected.chunk(2, dim=1)
        x = context.convolve(self.layer, x, m.conv1d.weight.squeeze(1), m.conv1d.bias, activation="silu")
        parts = torch.split(self.of_step(x), [m.time_step_rank, m.ssm_state_size, m.ssm_state_size], dim=1)
        if self.norms:
            parts = tuple(self.ops.rms_norm(part, *norm) for part, norm in zip(parts, self.norms, strict=True))
        dt, b, c = F.linear(parts[0], m.dt_proj.weight), *parts[1:]
        x, dt, b, c, gate = (t.unsqueeze(1) for t in (x, dt, b, c, gate))
        bias, skip = (None if t is None else t[None] for t in (m.dt_proj.bias, m.D))
        options = {"dt_bias": bias, "dt_limit": (0.0, float("inf")), "a_log": True}
        out = context.scan(self.layer, x, dt, m.A_log[None], b, c, skip, **options)
        return self.ops.gated_rms_norm(out, gate, None, 0.0).squeeze(1)


def recurrent_mixers(
    module: Any, ops: Ops, widths: Sequence[int], inner: Sequence[Linears], out_width: int
) -> Iterator[DeltaNet | KimiDelta | ShortConvolution | Mamba2 | Mamba] | None:
    """The mixers that a layer's module with states may be; None where it has none.

    widths: of the linears that read its input; inner: those between; out_width: of what the one that makes its output reads.
    """
    if hasattr(module, "conv"):
        short = ShortConvolution(layer=module.layer_idx, module=module)
        return iter([short] if sum(widths) == 3 * out_width else [])
    if all(hasattr(module, name) for name in _OF_MAMBA2):
        return _mamba2(module, ops)
    if hasattr(module, "x_proj"):
        return _mamba(module, ops, inner)
    if hasattr(module, "conv1d"):
        return (
            _kimi_delta(module, ops, widths, inner)
            if hasattr(module, "forget_gate")
            else _delta_net(module, ops, widths)
        )
    return None


def _mamba2(module: Any, ops: Ops) -> Iterator[Mamba2]:
    if module.activation not in ("silu", "swish"):
        return
    norm = _norm_of_output(module)
    weight = getattr(norm, "weight", None)
    ways: Iterable[tuple[bool, int]] = [(True, 1)]
    if weight is not None:
        ways = itertools.product((True, False), dict.fromkeys((module.n_groups, 1)))
    for gate_first, groups in ways:
        yield Mamba2(
            ops=ops,
            layer=module.layer_idx,
            module=module,
            norm=None if weight is None else (weight, float(norm.variance_epsilon)),
            groups=groups,
            gate_first=gate_first,
        )


def _mamba(module: Any, ops: Ops, inner: Sequence[Linears]) -> Iterator[Mamba]:
    if module.activation not in ("silu", "swish") or len(inner) != 1:
        return
    like, widths = module.dt_proj.weight, (module.time_step_rank, module.ssm_state_size, module.ssm_state_size)
    found = [
        _norm_of_part(getattr(module, name), like.new_ones(width))
        for name, width in zip(_NORMS_OF_STEPS, widths, strict=True)
        if hasattr(module, name)
    ]
    norms = tuple(norm for norm in found if norm is not None)
    if len(norms) == len(found) and len(found) in (0, len(_NORMS_OF_STEPS)):
        yield Mamba(ops=ops, layer=module.layer_idx, module=module, of_step=inner[0], norms=norms)


def _norm_of_part(norm: Any, ones: Tensor) -> Norm | None:
    """ones: of Falcon-Mamba's, which has a weight of another size, and does not read it."""
    return norm_of(norm) if list(norm.parameters()) else Norm(ones, float(norm.eps))


def _delta_net(module: Any, ops: Ops, widths: Sequence[int]) -> Iterator[DeltaNet]:
    if (norm := _norm_of_output(module)) is None:
        return
    for scale in (1.0, 2.0):
        yield DeltaNet(
            ops=ops,
            layer=module.layer_idx,
            module=module,
            norm=Norm(norm.weight, float(norm.variance_epsilon)),
            beta_scale=scale,
            by_key_head=len(widths) == 2,
        )


def _kimi_delta(module: Any, ops: Ops, widths: Sequence[int], inner: Sequence[Linears]) -> Iterator[KimiDelta]:
    forget, norm = module.forget_gate, module.o_norm
    like = next(linear.weight for linear in forget.children())
    made = forget(like.new_zeros(1, 1, module.hidden_size))
    bounds = (getattr(forget, name, None) for name in ("lower_bound", "gate_lower_bound"))
    for bound in dict.fromkeys((None, *bounds)):
        yield KimiDelta(
            ops=ops,
            layer=module.layer_idx,
            module=module,
            norm=Norm(norm.weight, float(norm.variance_epsilon)),
            widths=(sum(widths[:3]), *widths[3:]),
            decay=inner[0] if inner else None,
            gate=inner[1] if inner else None,
            bound=bound,
            rounded=made.dtype == like.dtype,
        )


def _norm_of_output(module: Any) -> Any:
    return getattr(module, "norm", getattr(module, "o_norm", None))
