"""Normalisation, rotary embedding and gated activation, as plain torch.

Mostly in fp32 on a CPU, where ``type_as`` changes nothing, in a third of the microsecond that ``to`` takes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class Norm(NamedTuple):
    """An RMS norm's weight and settings. With ``centred``, a LayerNorm's: the RMS norm of the input minus its mean.

    offset: the factor is 1 + weight, as in Gemma, instead of the weight, as in Llama. The result is cast back to the
    input's dtype before it is multiplied by the weight; with ``offset`` or ``centred``, after everything.
    """

    weight: Tensor  # [D]
    eps: float
    offset: bool = False
    centred: bool = False
    bias: Tensor | None = None  # [D], of one that is centred


class QKNorm(NamedTuple):
    """The norms of query and key heads, each as ``Norm``."""

    query: Tensor  # [D]
    key: Tensor  # [D]
    eps: float
    offset: bool = False
    values: bool = False  # whether value heads have one too, by a factor of 1 (Gemma 4)
    last: bool = False  # after the rotation, and not before it (Hunyuan)


def _inverse_rms(x: Tensor, wide: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean of x^2 + eps) over the last dimension. x: [..., D]; wide: in fp32; returns fp32 [..., 1].

    fp32 takes few operations: on a CPU each costs a microsecond, and a mean takes several times as long as a norm. Other
    dtypes are computed as transformers does, to the bit.
    """
    if x.dtype != torch.float32:
        return torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return torch.addcmul(_scalar(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()


@lru_cache(maxsize=64)
def _scalar(value: float, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32, device=device)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: bool = False,
    centred: bool = False,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, 2019), or LayerNorm (Ba et al., 2016), accumulated
    in fp32; plus ``residual``.

    x: [..., D]; weight to bias: see ``Norm``; residual: as ``x``; scale: [1], of the sum. The result has the dtype of ``x``.
    """
    wide = x.float()
    if centred:
        factor = weight.float() + 1.0 if offset else weight.float()
        out = F.layer_norm(wide, weight.shape, factor, None if bias is None else bias.float(), eps).to(x.dtype)
    elif x.dtype == torch.float32:
        out = (wide * _inverse_rms(x, wide, eps)).mul_(weight + 1.0 if offset else weight)
    else:
        normed = wide * _inverse_rms(x, wide, eps)
        out = (normed * (1.0 + weight.float()) if offset else weight * normed.to(x.dtype)).to(x.dtype)
    if residual is not None:
        out.add_(residual)
    return out if scale is None else out.mul_(scale)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary position embedding (Su et al., 2021).

    x: [T, H, D]; cos, sin: [T, R], of the dtype of ``x`` or fp32, with R <= D: only the first R dimensions of a head are
    rotated. A pair is i and i + R / 2, or 2 * i and 2 * i + 1 where ``interleaved``; its angle is the tables' i either way.
    """
    rotated = cos.shape[-1]
    part = x if rotated == x.shape[-1] else x[..., :rotated]
    if interleaved:
        cos, sin = (t[..., : rotated // 2].repeat_interleave(2, dim=-1) for t in (cos, sin))
        turned = torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(-2)
    else:
        a, b = part.chunk(2, dim=-1)
        turned = torch.cat((-b, a), dim=-1)
    out = torch.addcmul(part * cos.unsqueeze(1), turned, sin.unsqueeze(1)).type_as(x)
    return out if part is x else torch.cat((out, x[..., rotated:]), dim=-1)


def qk_norm_rotary(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    norm: QKNorm | None,
    cos_sin: tuple[Tensor, Tensor] | None,
    interleaved: bool = False,
    factor: Tensor | None = None,
    grouped: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """From projected heads to what attention takes: query and key, optionally normalised by head and rotated.

    qkv: [T, heads + 2 * kv_heads, D], or [T, heads + kv_heads, D] where keys and values have one projection; cos_sin:
    [T, R] each; interleaved: see ``rotary``; factor: of queries, fp32 [T, 1]; grouped: each key head, and then its value
    head, comes right after the queries that read it (GPT-NeoX), instead of after all queries. Returns query [T, heads, D],
    key and value [T, kv_heads, D].
    """
    if grouped:
        groups = qkv.view(qkv.shape[0], kv_heads, -1, qkv.shape[2])
        qkv = torch.cat([groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]], dim=1)
    both, value = qkv[:, : heads + kv_heads], qkv[:, qkv.shape[1] - kv_heads :]
    if norm is not None and norm.values:
        wide = value.float()
        value = (wide * _inverse_rms(value, wide, norm.eps)).to(qkv.dtype)
    if norm is not None and not norm.last:
        both = _normed_heads(both, heads, norm)
    if cos_sin is not None:
        both = rotary(both, *cos_sin, interleaved)
    if norm is not None and norm.last:
        both = _normed_heads(both, heads, norm)
    query, key = both.split_with_sizes((heads, both.shape[1] - heads), dim=1)
    if factor is not None:
        query = (query * factor[:, :, None]).type_as(qkv)
    return query, key, value


def _normed_heads(both: Tensor, heads: int, norm: QKNorm) -> Tensor:
    """Query and key heads normed, [T, heads + kv_heads, D]."""
    wide = both.float()
    normed = wide * _inverse_rms(both, wide, norm.eps)
    out = normed if norm.offset else normed.type_as(both)
    parts = out.split_with_sizes((heads, both.shape[1] - heads), dim=1)
    for part, weight in zip(parts, (norm.query, norm.key), strict=True):
        part.mul_(1.0 + weight.float() if norm.offset else weight)
    return out.type_as(both)


def latent_heads(
    query: Tensor,
    key_value: Tensor,
    key_rotary: Tensor,
    cos_sin: tuple[Tensor, Tensor] | None,
    interleaved: bool = False,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """From the heads of latent attention (DeepSeek-AI, 2024) to what attention takes: the last numbers of a head are rotated.

    query: [T, H, N + R]; key_value: [T, H, N + V]; key_rotary: [T, R], of the keys of all heads; cos_sin: [T, R] each, or None for
    no rotation (Kimi Linear); interleaved: see ``rotary``; factor: of queries, fp32 [T, 1]. Returns query and key [T, H, N + R],
    value [T, H, V].
    """
    heads, plain = query.shape[1], query.shape[2] - key_rotary.shape[1]
    both = torch.cat((query[..., plain:], key_rotary[:, None]), dim=1)
    both = both if cos_sin is None else rotary(both, *cos_sin, interleaved)
    query = torch.cat((query[..., :plain], both[:, :heads]), dim=-1)
    if factor is not None:
        query = (query * factor[:, :, None]).to(key_value.dtype)
    key = torch.cat((key_value[..., :plain], both[:, heads:].expand(-1, heads, -1)), dim=-1)
    return query, key, key_value[..., plain:]


def act_mul(gate_up: Tensor, act: Activation, scale: float = 1.0, up: Tensor | None = None) -> Tensor:
    """SwiGLU's and GeGLU's ``act(scale * gate) * up`` (Shazeer, 2020). gate_up: [T, 2 * I], the gate first; returns [T, I].

    act: "gelu_tanh" is GELU's approximation by a tanh (Hendrycks and Gimpel, 2016), as in Gemma; up: [T, I], where it comes
    from elsewhere and ``gate_up`` is the gate alone, [T, I].
    """
    gate, up = gate_up.chunk(2, dim=-1) if up is None else (gate_up, up)
    return ACTIVATIONS[act](gate if scale == 1.0 else gate * scale).mul_(up)
