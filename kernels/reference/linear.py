"""A projection together with the norm, activation and residual around it, as plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels.reference.fp8 import dequantise_rows
from stoker.kernels.reference.norm_rotary import Activation, Norm, act_mul, rms_norm


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: Activation | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
    in_place: bool = False,
    row_scales: Tensor | None = None,
) -> Tensor:
    """``residual + scale * act(norm(x) @ weight.T + bias)``, where norm, act and residual are each optional.

    x: [T, D]; weight: [N, D]; bias: [N]; norm: over ``x``; gated: ``act_mul`` over the halves of the result,
    which is then [T, N / 2]; residual: as the result; scale: of what is added to it; in_place: nobody reads the residual
    afterwards, so the result may take its place; row_scales: fp32 [N], of a weight in fp8 (``quantise_rows``). Returns
    [T, N] in the dtype of ``x``.
    """
    x = x if norm is None else rms_norm(x, *norm)
    if row_scales is not None:
        weight = dequantise_rows(weight, row_scales, x.dtype)
    if residual is not None and in_place and gated is None and bias is None and residual.dtype == torch.float32:
        return residual.addmm_(x, weight.t(), alpha=scale)  # the same in one operation; others round before they add
    out = F.linear(x, weight, bias)
    if gated is not None:
        out = act_mul(out, gated)
    return out if residual is None else torch.add(residual, out, alpha=scale, out=residual if in_place else None)
