"""The gates of layers with recurrent states, as plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, gate_first: bool = False, *, sigmoid: bool = False
) -> Tensor:
    """``silu(gate) * rms_norm(x)`` over the last dimension; with ``gate_first``, ``rms_norm(silu(gate) * x)``.

    Computed in fp32, with the norm rounded to the dtype of ``x`` as transformers does. sigmoid: ``sigmoid(gate) * rms_norm(x)``, and
    nothing is rounded on its way (Kimi Linear). x, gate: [T, H, D]; weight: [D], or [H, D], or None for no norm. The result has
    the dtype of ``x``.
    """
    if sigmoid:
        assert weight is not None
        wide = x.float()
        normed = weight.float() * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))
        return (normed * gate.float().sigmoid()).to(x.dtype)
    wide, factor = x.float(), F.silu(gate.float())
    if weight is None:
        return (wide * factor).to(x.dtype)
    if gate_first:
        wide = wide * factor
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (weight * normed if gate_first else weight * normed * factor).to(x.dtype)


def delta_gates(
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    scale: float = 1.0,
    *,
    bound: float | None = None,
    rounded: bool = False,
) -> tuple[Tensor, Tensor]:
    """How fast each head forgets and how much it learns: ``-exp(a_log) softplus(a + dt_bias)`` and ``scale sigmoid(b)``.

    a: [T, H], or [T, H, D] where each row of a head's state forgets by itself; b: [T, H]; a_log: of each head; dt_bias: of each
    number of a token's ``a``. bound: the logarithm is ``bound sigmoid(exp(a_log) (a + dt_bias))`` (Ling 3.0). rounded: exp(a_log) is
    rounded to the dtype of ``a_log``, and the logarithm to that of ``a``. Returns the logarithm of the decay, fp32 in the shape of
    ``a``, and [T, H] in the dtype of ``b``.
    """
    beta, x = b.sigmoid(), a.float() + dt_bias.view(a.shape[1:])
    rate = (a_log.exp().float() if rounded else a_log.float().exp()).view(-1, *(1 for _ in a.shape[2:]))
    decay = F.softplus(x).mul_(-rate) if bound is None else torch.sigmoid(rate * x).mul_(bound)
    return decay.to(a.dtype).float() if rounded else decay, beta if scale == 1.0 else beta * scale
