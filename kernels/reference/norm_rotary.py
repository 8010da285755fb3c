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
    part = x[..., :rotated]
    a, b = part.chunk(2, dim=-1)
    out = part * cos.unsqueeze(1) + torch.cat((-b, a), dim=-1) * sin.unsqueeze(1)
    return out if rotated == x.shape[-1] else torch.cat((out, x[..., rotated:]), dim=-1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's ``silu(gate) * up`` (Shazeer, 2020). gate_up: [T, 2 * I], the gate first; returns [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
