"""Weights in fp8 (e4m3), with a scale for each row that is a power of two, as plain torch.

Such a scale costs no precision: a scaled row still has as few significant bits as fp8, so 16 bits hold it exactly. A
product by such a weight is thus the product by a plain weight with rounded numbers, however it is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8, FP8_MAX = torch.float8_e4m3fn, 448.0  # Micikevicius et al. 2022, arXiv:2209.05433
MOST_FRACTION = 0x600000  # bits of it in fp32 where a number is 1.75 times a power of two, as 448 is
LEAST_EXPONENT = -100  # keeps a factor and its inverse plain numbers
_ROWS_BYTES = 2**24  # that are rounded at a time


def quantise_rows(weight: Tensor, values: Tensor, scales: Tensor) -> None:
    """Write ``weight``, rounded, as ``values * scales[:, None]``. A row's scale is the least for which fp8 holds all its numbers.

    weight: [N, D] of any floating dtype; values: fp8 [N, D]; scales: fp32 [N], powers of two.
    """
    step = max(1, _ROWS_BYTES // max(1, 4 * weight.shape[1]))
    for rows, to, of_rows in zip(*(torch.split(t, step) for t in (weight, values, scales)), strict=True):
        wide = rows.float()
        bits = wide.abs().nan_to_num_(0.0, torch.inf).amax(1).view(torch.int32)
        exponents = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > MOST_FRACTION).int()
        of_rows.copy_(torch.ldexp(torch.ones_like(of_rows), exponents.clamp_(min=LEAST_EXPONENT)))
        wide = wide / of_rows[:, None]
        to.copy_(wide.masked_fill_(wide.isinf(), torch.nan))  # there is no Inf in fp8, and torch's cast may saturate


def dequantise_rows(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """``values * scales[..., None]`` in ``dtype``. values: fp8 [..., N, D]; scales: fp32 [..., N]; returns [..., N, D]."""
    return (values.float() * scales[..., None]).to(dtype)
