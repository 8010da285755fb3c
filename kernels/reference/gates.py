"""The gates of layers with recurrent states, as plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, gate_first: bool = False) -> Tensor:
    """``silu(gate) * rms_norm(x)`` over the last dimension; with ``gate_first``, ``rms_norm(silu(gate) * x)``.

    Computed in fp32, with the norm rounded to the dtype of ``x`` as transformers does. x, gate: [T, H, D]; weight: [D],
    or [H, D], or None for no norm. The result has the dtype of ``x``.
    """
    wide, factor = x.float(), F.silu(gate.float())
    if weight is None:
        return (wide * factor).to(x.dtype)
    if gate_first:
        wide = wide * factor
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (weight * normed if gate_first else weight * normed * factor).to(x.dtype)


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """How fast each head forgets and how much it learns: ``-exp(a_log) softplus(a + dt_bias)`` and ``scale sigmoid(b)``.

    a, b: [T, H]; a_log, dt_bias: [H]. Returns the logarithm of the decay, fp32 [T, H], and [T, H] in the dtype of ``b``.
    """
    beta = b.sigmoid()
    return F.softplus(a.float() + dt_bias).mul_(-a_log.float().exp()), beta if scale == 1.0 else beta * scale
