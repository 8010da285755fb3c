"""The mixers of fused layers: attention, or what is in its place, between the projections before and after it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.engine.layers.fused_recurrent import recurrent_mixers
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
# Takes the projection of a layer's input, [T, N], ``Rotary.tables`` and the step's context; returns [T, M], still to be projected.
Mixer = Callable[[Tensor, Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Pointwise:
    """A function of each number, in place of attention: what is between an MLP's projections where it has no gate."""

    act: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, *_: Any) -> Tensor:
        return self.act(x)


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

    @property
    def _widths(self) -> list[int]:
        """Of queries, keys and values."""
        return [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]

    def _normed(self, qkv: Tensor, query_norm: Norm, key_norm: Norm) -> Tensor:
        query, key, value = torch.split(qkv, self._widths, dim=1)
        return torch.cat((self.ops.rms_norm(query, *query_norm), self.ops.rms_norm(key, *key_norm), value), dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Attention whose queries, keys and values are projected from short latent vectors (DeepSeek-AI, 2024)."""

    layer: int
    # Of queries or their latent vector, of keys' and values' latent vector, of the part of keys that all heads share, which is
    # the rotated one; and of a gate on each head, if there is one.
    widths: tuple[int, ...]
    head_dim: int
    query: Linears | None
    query_norm: Norm | None
    key_value: Linears
    key_value_norm: Norm
    options: Mapping[str, Any]  # what the original asks of attention besides query, key and value
    rotary: bool = True
    interleaved: bool = False
    tempered: bool = False

    def __call__(self, projected: Tensor, tables: Any, context: Any) -> Tensor:
        """projected: [T, N], in the order of ``widths``; returns [T, heads * value dim]."""
        query, latent, key_rotary, *gate = torch.split(projected, list(self.widths), dim=1)
        if self.query is not None:
            query = self.query(query, norm=self.query_norm)
        query = query.view(query.shape[0], -1, self.head_dim)
        key_value = self.key_value(latent, norm=self.key_value_norm).view(*query.shape[:2], -1)
        cos, sin, factor = [*(tables or ()), None, None, None][:3]
        rotation = {"interleaved": self.interleaved, "factor": factor if self.tempered else None}
        heads, cos_sin = (query, key_value, key_rotary), (cos, sin) if self.rotary else None
        out: Tensor = context.attend_latent(self.layer, *heads, cos_sin, **rotation, **self.options)
        if gate:
            out = out * gate[0].sigmoid().unsqueeze(-1)
        return out.flatten(1)


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
    if (with_states := recurrent_mixers(module, ops, widths, inner, out_width)) is not None:
        yield from with_states
    elif len(asked) == 1 and not _has_computed_sinks(module, asked[0]):
        factors = (False, True)[: max(len(tables) - 1, 1)]
        if not inner:
            matrices = [matrix_of(linear) for linear in inputs]
            yield from _attention(module, ops, matrices, out_width, asked[0], factors, bool(tables), takes_keys)
        else:
            yield from _latent(module, widths, inner, asked[0], factors, bool(tables))


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
    has_rotary: bool,
) -> Iterator[Mixer]:
    *query, key_value = inner
    if not all(hasattr(module, name) for name in _OF_LATENT[: 4 if query else 3]):
        return
    rotated = module.qk_rope_head_dim
    query_norm = norm_of(module.q_a_layernorm) if query else None
    key_value_norm = norm_of(module.kv_a_layernorm)
    if key_value_norm is None or (query and query_norm is None):
        return
    rotations = (*(((True, True), (True, False)) if has_rotary else ()), (False, False))
    for (rotary, interleaved), tempered in itertools.product(rotations, factors):
        yield LatentAttention(
            layer=module.layer_idx,
            widths=(widths[0], widths[1] - rotated, rotated, *widths[2:]),
            head_dim=module.qk_nope_head_dim + rotated,
            query=query[0] if query else None,
            query_norm=query_norm,
            key_value=key_value,
            key_value_norm=key_value_norm,
            options=options,
            rotary=rotary,
            interleaved=interleaved,
            tempered=tempered,
        )
