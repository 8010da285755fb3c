"""The mixers of fused layers: attention, or what is in its place, between the projections before and after it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.engine.layers.layer_structure import head_dim_of, norm_of
from stoker.engine.layers.linears import Linears, matrix_of
from stoker.engine.layers.probe import clipping_of
from stoker.kernels.ops import Ops
from stoker.kernels.reference.norm_rotary import Norm, QKNorm

# Names of the norms of queries, keys and values, as far as a model has them.
_HEAD_NORMS = (
    ("q_norm", "k_norm", "v_norm"),
    ("q_layernorm", "k_layernorm"),
    ("query_layernorm", "key_layernorm"),
    ("qk_norm", "qk_norm"),
)
_OF_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "kv_a_layernorm", "q_a_layernorm")
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
# Takes the projection of a layer's input, [T, N], ``Rotary.tables`` and the step's context; returns [T, M], still to be projected.
Mixer = Callable[[Tensor, Any, Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Norms of queries and keys, rotary embedding, attention, and a gate on each head, or on each number."""

    ops: Ops
    layer: int
    head_dim: int
    heads: int
    kv_heads: int  # 0: keys and values are those of another layer
    gated: bool  # whether the projection has a gate behind each query head
    gate_width: int  # of a gate behind all heads; 0: there is none
    head_norm: QKNorm | None  # of each query and key head
    whole_norms: tuple[Norm, Norm] | None  # of all query heads together, and of all key heads
    options: Mapping[str, Any]  # other arguments that the original gives to attention
    clipping: Any = None  # the configuration whose ``clip_qkv`` bounds queries, keys and values
    grouped: bool = False  # as for ``Ops.qk_norm_rotary_write``
    rotary: bool = True
    interleaved: bool = False
    tempered: bool = False  # queries are multiplied by a factor that depends on their position
    gate_act: Callable[[Tensor], Tensor] = torch.sigmoid

    def __call__(self, qkv: Tensor, tables: tuple[Tensor, ...] | None, context: Any) -> Tensor:
        """qkv: [T, (heads + 2 * kv_heads) * head_dim]; wider with a gate, narrower where keys and values have one projection.

        Returns [T, heads * value dim].
        """
        gate = None
        if self.gate_width:
            qkv, gate = torch.split(qkv, [qkv.shape[1] - self.gate_width, self.gate_width], dim=1)
            gate = gate.view(qkv.shape[0], self.heads, -1)
        if self.whole_norms is not None:
            qkv = self._normed(qkv, *self.whole_norms)
        if self.clipping is not None:
            qkv = qkv.clamp_(-self.clipping.clip_qkv, self.clipping.clip_qkv)
        by_head = qkv.view(qkv.shape[0], -1, self.head_dim)
        if self.gated:
            query, rest = torch.split(by_head, [2 * self.heads, 2 * self.kv_heads], dim=1)
            by_head, gate = torch.cat((query[:, ::2], rest), dim=1), query[:, 1::2]
        cos, sin, factor = [*(tables or ()), None, None, None][:3]
        out: Tensor = context.attend_projected(
            self.layer,
            by_head,
            self.heads,
            self.kv_heads,
            self.head_norm,
            (cos, sin) if self.rotary else None,
            interleaved=self.interleaved,
            factor=factor if self.tempered else None,
            grouped=self.grouped,
            **self.options,
        )
        return out.flatten(1) if gate is None else (out * self.gate_act(gate)).flatten(1)

    def _normed(self, qkv: Tensor, query_norm: Norm, key_norm: Norm) -> Tensor:
        widths = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        query, key, value = torch.split(qkv, widths, dim=1)
        return torch.cat((self.ops.rms_norm(query, *query_norm), self.ops.rms_norm(key, *key_norm), value), dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Attention whose queries, keys and values are projected from short latent vectors (DeepSeek-AI, 2024)."""

    layer: int
    # Of queries or their latent vector, of keys' and values' latent vector, of the part of keys that is rotated.
    widths: tuple[int, ...]
    head_dim: int
    query: Linears | None
    query_norm: Norm | None
    key_value: Linears
    key_value_norm: Norm
    options: Mapping[str, Any]  # what the original asks of attention besides query, key and value
    interleaved: bool = False
    tempered: bool = False

    def __call__(self, projected: Tensor, tables: Any, context: Any) -> Tensor:
        """projected: [T, N], in the order of ``widths``; returns [T, heads * value dim]."""
        query, latent, key_rotary = torch.split(projected, list(self.widths), dim=1)
        if self.query is not None:
            query = self.query(query, norm=self.query_norm)
        query = query.view(query.shape[0], -1, self.head_dim)
        key_value = self.key_value(latent, norm=self.key_value_norm).view(*query.shape[:2], -1)
        cos, sin, factor = [*tables, None][:3]
        rotation = {"interleaved": self.interleaved, "factor": factor if self.tempered else None}
        heads = query, key_value, key_rotary
        out: Tensor = context.attend_latent(self.layer, *heads, (cos, sin), **rotation, **self.options)
        return out.flatten(1)


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


def mixers_of(
    module: Any,
    ops: Ops,
    inputs: Sequence[Any],
    inner: Sequence[Linears],
    out: Any,
    asked: Sequence[Mapping[str, Any]],
    *,
    tables: Sequence[Tensor],
    takes_keys: bool,
) -> Iterator[Mixer]:
    """The mixers that a layer's attention, or what is in its place, may be. A probe tells which of them it is.

    inputs: the linears that read its input; inner: those between; out: the one that makes its output; asked: the arguments of
    each call of attention when the layer ran; tables: of ``Rotary``, if any; takes_keys: whether it attends to another layer's
    keys.
    """
    widths, out_width = [matrix_of(linear).shape[0] for linear in inputs], matrix_of(out).shape[1]
    if hasattr(module, "conv"):
        if sum(widths) == 3 * out_width:
            yield ShortConvolution(layer=module.layer_idx, module=module)
    elif all(hasattr(module, name) for name in _OF_MAMBA2):
        yield from _mamba2(module, ops)
    elif hasattr(module, "conv1d"):
        yield from _delta_net(module, ops, widths)
    elif len(asked) == 1 and not _has_computed_sinks(module, asked[0]):
        factors = (False, True)[: max(len(tables) - 1, 1)]
        if not inner:
            matrices = [matrix_of(linear) for linear in inputs]
            yield from _attention(module, ops, matrices, out_width, asked[0], factors, bool(tables), takes_keys)
        elif len(tables) > 1:
            yield from _latent(module, widths, inner, asked[0], factors)


def _mamba2(module: Any, ops: Ops) -> Iterator[Mixer]:
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


def _delta_net(module: Any, ops: Ops, widths: Sequence[int]) -> Iterator[Mixer]:
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


def _norm_of_output(module: Any) -> Any:
    return getattr(module, "norm", getattr(module, "o_norm", None))


def _has_computed_sinks(module: Any, options: Mapping[str, Any]) -> bool:
    """Whether attention's sinks are computed, and no parameter of the module."""
    return options["sinks"] is not None and not any(options["sinks"] is p for p in module.parameters())


def _attention(
    module: Any,
    ops: Ops,
    matrices: Sequence[Tensor],
    out_width: int,
    options: Mapping[str, Any],
    factors: Sequence[bool],
    has_rotary: bool,
    takes_keys: bool,
) -> Iterator[Mixer]:
    if (dim := head_dim_of(module)) is None or (norms := _head_norms(module, dim, matrices[0])) is None:
        return
    head_norm, whole_norms = norms
    widths = [matrix.shape[0] for matrix in matrices]
    heads, gate_width = out_width // dim, widths.pop() if len(widths) == 4 else 0
    gated = len(widths) == 3 and widths[0] == 2 * heads * dim
    kv_heads = sum(widths) // dim - heads * (1 + gated)
    if len(widths) != 2:  # else keys are values
        kv_heads //= 2
    if (kv_heads == 0) != takes_keys:
        return
    attention = Attention(
        ops=ops,
        layer=module.layer_idx,
        head_dim=dim,
        heads=heads,
        kv_heads=kv_heads,
        gated=gated,
        gate_width=gate_width,
        head_norm=head_norm,
        whole_norms=whole_norms,
        options={**options, "scale": options["scale"] * getattr(module, "key_multiplier", 1.0)},
        clipping=clipping_of(module),
    )
    rotations = (*(((True, False), (True, True)) if has_rotary else ()), (False, False))
    orders = (False, True)[: 2 if len(widths) == 1 else 1]
    acts = (torch.sigmoid, _softplus)[: 2 if gate_width else 1]
    norms_of = (head_norm,) if head_norm is None else (head_norm, head_norm._replace(last=True))
    for (rotary, interleaved), tempered, grouped, act, norm in itertools.product(
        rotations, factors, orders, acts, norms_of
    ):
        how = {"rotary": rotary, "interleaved": interleaved, "tempered": tempered, "grouped": grouped}
        yield replace(attention, **how, gate_act=act, head_norm=norm)


def _head_norms(module: Any, dim: int, like: Tensor) -> tuple[QKNorm | None, tuple[Norm, Norm] | None] | None:
    """(norm of each query and key head, norms of all query heads and of all key heads together), each or both None.

    None where the module has other norms. like: a weight of the module.
    """
    names = next((n for n in _HEAD_NORMS if isinstance(getattr(module, n[0], None), nn.Module)), ())
    found = [norm_of(getattr(module, name), dim, like) for name in names if hasattr(module, name)]
    norms = [norm for norm in found if norm is not None]
    if len(norms) < len(found) or any(norm.centred for norm in norms) or len({norm[1:3] for norm in norms}) > 1:
        return None
    if not norms:
        return None, None
    query, key = norms[0], norms[min(1, len(norms) - 1)]
    if (of_values := len(norms) > 2) and hasattr(module.v_norm, "weight"):
        return None
    if query.weight.numel() == dim:
        return QKNorm(query.weight, *key[:3], of_values), None
    return None if of_values else (None, (query, key))


def _softplus(x: Tensor) -> Tensor:
    return F.softplus(x.float()).to(x.dtype)


def _latent(
    module: Any,
    widths: Sequence[int],
    inner: Sequence[Linears],
    options: Mapping[str, Any],
    factors: Sequence[bool],
) -> Iterator[Mixer]:
    *query, key_value = inner
    if not all(hasattr(module, name) for name in _OF_LATENT[: 4 if query else 3]):
        return
    rotated = module.qk_rope_head_dim
    query_norm = norm_of(module.q_a_layernorm) if query else None
    key_value_norm = norm_of(module.kv_a_layernorm)
    if key_value_norm is None or (query and query_norm is None):
        return
    for interleaved, tempered in itertools.product((True, False), factors):
        yield LatentAttention(
            layer=module.layer_idx,
            widths=(widths[0], widths[1] - rotated, rotated),
            head_dim=module.qk_nope_head_dim + rotated,
            query=query[0] if query else None,
            query_norm=query_norm,
            key_value=key_value,
            key_value_norm=key_value_norm,
            options=options,
            interleaved=interleaved,
            tempered=tempered,
        )
