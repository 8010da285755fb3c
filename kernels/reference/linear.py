"""A projection with what stands before and after it in a decoder layer, as plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from stoker.kernels.reference.norm_rotary import rms_norm, silu_mul


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """``act(norm(x) @ weight.T + bias) + residual``, where norm, act and residual are each optional.

    x: [T, D]; weight: [N, D]; bias: [N]; norm: weight [D] and epsilon of an RMS norm over ``x``; gated: SwiGLU over the
    halves of the result, which is then [T, N / 2]; residual: as the result. Returns [T, N] in the dtype of ``x``.
    """
    out = F.linear(x if norm is None else rms_norm(x, *norm), weight, bias)
    if gated:
        out = silu_mul(out)
    return out if residual is None else out.add_(residual)
