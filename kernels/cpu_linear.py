"""Projections of a decode step on a CPU: by oneDNN where that is faster than MKL.

Measured on AMD EPYC, two threads, up to 128 rows: oneDNN takes 1/1.1 to 1/3 of MKL's time for weights of 2**18 numbers and
more as they lie in memory, and longer for smaller ones. On Intel's processors, which MKL is made for, MKL is kept.
"""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels.reference import linear as reference
from stoker.kernels.reference.lora import AdapterRows, LoraTable
from stoker.kernels.reference.lora_pieces import Sums
from stoker.kernels.reference.norm_rotary import Activation, Norm, act_mul, rms_norm

_LEAST_NUMBERS = 2**18  # of a weight
# oneDNN compiles for each number of rows and never forgets, some 0.6 MB each. So there are only these numbers: up to 4, and
# multiples of 8 up to 128.
_MOST_ROWS, _EXACT_ROWS, _ROWS = 128, 4, 8


def _pays() -> bool:
    """Whether torch has both libraries, and the processor is AMD's."""
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if not (has_mkl and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    try:
        with open("/proc/cpuinfo") as file:
            vendor = next((line for line in file if line.startswith("vendor_id")), "")
    except OSError:
        vendor = platform.processor()
    return "AuthenticAMD" in vendor


_PAYS = _pays()


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
    """As the reference's: ``residual + scale * act(norm(x) @ weight.T + bias)``. x: [T, D]; weight: [N, D]."""
    if not _takes(x, weight):
        return reference.linear(
            x,
            weight,
            bias,
            norm=norm,
            gated=gated,
            residual=residual,
            scale=scale,
            in_place=in_place,
            row_scales=row_scales,
        )
    rows = x.shape[0]
    x = x if norm is None else rms_norm(x, *norm)
    if rows > _EXACT_ROWS and rows % _ROWS:
        x = F.pad(x, (0, 0, 0, -rows % _ROWS))
    out = _product(x, weight, bias)[:rows]
    if gated is not None:
        out = act_mul(out, gated)
    return out if residual is None else torch.add(residual, out, alpha=scale, out=residual if in_place else None)


def adapted(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: LoraTable,
    rows: AdapterRows,
    *,
    gated: Activation | None = None,
    residual: Tensor | None = None,
    in_place: bool = False,
    row_scales: Tensor | None = None,
) -> Tensor:
    """``linear``, then ``lora``.

    Where adapters only add, the product is added to what they add: of a small model, a result and an addition to it take as
    long as the sums of many adapters.
    """
    change = rows.change_of(table)
    plain = residual is None and bias is None and x.dtype == weight.dtype == torch.float32
    if plain and isinstance(change, Sums) and change.b[0].dtype == x.dtype and not _takes(x, weight):
        out = change.of(x).view(len(x), -1).addmm_(x, weight.t())
    else:
        out = linear(x, weight, bias, residual=residual, in_place=in_place, row_scales=row_scales)
        if change is not None:
            change(x, out)
    return out if gated is None else act_mul(out, gated)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def _takes(x: Tensor, weight: Tensor) -> bool:
    return (
        _PAYS
        and 0 < x.shape[0] <= _MOST_ROWS
        and weight.numel() >= _LEAST_NUMBERS
        and x.dtype == weight.dtype == torch.float32
        and weight.is_contiguous()
        and bool(torch.backends.mkldnn.enabled)
    )
