"""Normalisation, rotary embedding and gated activation, as plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, 2019), accumulated in fp32.

    x: [..., D]; weight: [D]. The result has the dtype of ``x``; the weight multiplies after the cast back, as
    transformers' Llama does.
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the half-split convention (Su et al., 2021).

    x: [T, H, D]; cos, sin: [T, R] with R <= D: only the first R dimensions of a head are rotated.
    """
    rotated = cos.shape[-1]
    part = x if rotated == x.shape[-1] else x[..., :rotated]
    a, b = part.chunk(2, dim=-1)
    out = torch.addcmul(part * cos.unsqueeze(1), torch.cat((-b, a), dim=-1), sin.unsqueeze(1))
    return out if part is x else torch.cat((out, x[..., rotated:]), dim=-1)


def qk_norm_rotary(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    norm: tuple[Tensor, Tensor, float] | None,
    cos_sin: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """From projected heads to what attention takes: query and key normalised by head and rotated, either or neither.

    qkv: [T, heads + 2 * kv_heads, D]; norm: query weight [D], key weight [D] and epsilon; cos_sin: [T, R] each.
    Returns query [T, heads, D], key and value [T, kv_heads, D].
    """
    both = qkv[:, : heads + kv_heads]
    if norm is not None:
        query_weight, key_weight, eps = norm
        wide = both.float()
        both = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(both.dtype)
        both[:, :heads].mul_(query_weight)
        both[:, heads:].mul_(key_weight)
    if cos_sin is not None:
        both = rotary(both, *cos_sin)
    return both[:, :heads], both[:, heads:], qkv[:, heads + kv_heads :]


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's ``silu(gate) * up`` (Shazeer, 2020). gate_up: [T, 2 * I], the gate first; returns [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
