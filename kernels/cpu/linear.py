"""Projections of a decode step on a CPU: by oneDNN where that is faster than MKL.

Of two matrices oneDNN packs the right one anew at each call. So the weight, which is large, is on the left, and the result lies
column by column: what reads it next takes it like that, or it is turned round. Measured on AMD EPYC, two threads, weights of
2**16 numbers and more, 5 to 128 rows: this takes 0.6 to 0.97 of oneDNN's time with the weight on the right, and 0.3 to 0.7 of
MKL's. Of two to four short rows MKL is the fastest, with the weight on the left as well. On Intel's processors, which MKL is
made for, MKL is kept.
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

_LEAST_NUMBERS, _LEAST_OF_ONE_ROW = 2**16, 2**18  # of a weight
_LEAST_PRODUCTS = 2**20  # of numbers, where there are more than a few rows
_FEW, _SHORT = 4, 3072  # rows, and how many numbers these have together if they are short
# oneDNN compiles for each number of rows, as fast as for the next multiple of 16, and keeps some 0.5 MB each. So there are only
# these, beside the few.
_ROWS, _MOST_ROWS = 16, 128
# Rows and numbers of a result that is turned round: of more rows, that takes longer than packing the weight, and of more
# numbers, logits for example, there is no memory for both.
_MOST_TURNED = 64, 2**18


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
    x = x if norm is None else rms_norm(x, *norm)
    out = _product(x, weight, bias, by_columns=gated is not None or residual is not None or _turned(x, weight))
    if gated is not None:
        out = act_mul(out, gated)
    if residual is None:
        return out.contiguous() if gated is None else out  # down projections take either layout
    return torch.add(residual, out, alpha=scale, out=residual if in_place else None)


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
    elif gated is not None and residual is None and not isinstance(change, Sums) and _takes(x, weight):
        out = _product(x, weight, bias, by_columns=True)  # the matrices' products go into either layout
        if change is not None:
            change(x, out)
    else:
        out = linear(x, weight, bias, residual=residual, in_place=in_place, row_scales=row_scales)
        if change is not None:
            change(x, out)
    return out if gated is None else act_mul(out, gated)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, *, by_columns: bool) -> Tensor:
    """``x @ weight.T + bias``, [T, N]. by_columns: it may lie like that in memory, as ``x`` may."""
    rows, depth = x.shape
    few = rows <= _FEW
    if not few and (missing := -rows % _ROWS):
        x = F.pad(x.t(), (0, missing)).t() if x.stride(0) == 1 else F.pad(x, (0, 0, 0, missing))
    if not by_columns or rows == 1 or (few and rows * depth > _SHORT):
        return _onednn(x.contiguous(), weight, bias)[:rows]
    out = torch.mm(weight, x.t()).t() if few else _onednn(weight, x, None).t()[:rows]
    return out if bias is None else out.add_(bias)


def _turned(x: Tensor, weight: Tensor) -> bool:
    """Whether a result that lies by columns is to be turned round."""
    rows, numbers = _MOST_TURNED
    return len(x) <= rows and len(x) * len(weight) <= numbers


def _onednn(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """``left @ right.T + bias``."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return out


def _takes(x: Tensor, weight: Tensor) -> bool:
    rows, numbers = x.shape[0], weight.numel()
    enough = numbers >= _LEAST_OF_ONE_ROW if rows == 1 else numbers >= _LEAST_NUMBERS
    return (
        _PAYS
        and 0 < rows <= _MOST_ROWS
        and enough
        and (rows <= _FEW or rows * numbers >= _LEAST_PRODUCTS)
        and x.dtype == weight.dtype == torch.float32
        and weight.is_contiguous()
        and bool(torch.backends.mkldnn.enabled)
    )
