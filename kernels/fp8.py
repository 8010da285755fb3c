"""The Triton kernels that round weights to fp8 by rows, and convert them back."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.launch import await_turn
from stoker.kernels.reference.fp8 import FP8_MAX, LEAST_EXPONENT, MOST_FRACTION

_FP8_MAX = tl.constexpr(FP8_MAX)
_MOST_FRACTION = tl.constexpr(MOST_FRACTION)
_LEAST_EXPONENT = tl.constexpr(LEAST_EXPONENT)
_LEAST_NORMAL = tl.constexpr(2.0**-6)
_STEP_BELOW = tl.constexpr(1.5 * 2.0**14)  # next to it, fp32 numbers are as far apart as the least of fp8: 2**-9


@triton.jit
def _as_fp8(x):
    """fp32 numbers rounded to the nearest of fp8's, halves to even, so that their cast is exact; NaN beyond its range."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF).to(tl.float32, bitcast=True)
    below = (x + _STEP_BELOW) - _STEP_BELOW
    rounded = tl.where(tl.abs(x) < _LEAST_NORMAL, below, normal)
    nan = tl.full(x.shape, 0x7FF00000, tl.int32).to(tl.float32, bitcast=True)  # with fp8's bits in front
    return tl.where(tl.abs(x) <= _FP8_MAX, rounded, nan).to(tl.float8e4nv)


@triton.jit
def as_dtype(x, DTYPE: tl.constexpr):
    """Numbers, of fp8 maybe, in a dtype that holds these exactly. By way of fp32, as a cast of fp8 to bf16 is compiled to one that
    takes number by number an instruction of which a multiprocessor does 16 at a time: fewer bytes than memory gives it.
    """
    if x.dtype == tl.float8e4nv and tl.bfloat16 == DTYPE:
        return x.to(tl.float32).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def _quantise_kernel(
    weight_ptr,
    values_ptr,
    scales_ptr,
    weight_row,
    weight_column,
    depth,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row, which it reads twice."""
    await_turn(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    weight = weight_ptr + row * weight_row
    most = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, depth, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(weight + at.to(tl.int64) * weight_column, mask=at < depth, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.where(x == x, tl.abs(x), 0.0))
    bits = tl.max(most, axis=0).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > _MOST_FRACTION).to(tl.int32)
    exponent = tl.maximum(exponent, _LEAST_EXPONENT)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    for start in range(0, depth, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(weight + at.to(tl.int64) * weight_column, mask=at < depth, other=0.0).to(tl.float32)
        tl.store(values_ptr + row * depth + at, _as_fp8(x * inverse), mask=at < depth)
    tl.store(scales_ptr + row, ((exponent + 127) << 23).to(tl.float32, bitcast=True))


@triton.jit
def _dequantise_kernel(values_ptr, scales_ptr, out_ptr, depth, DEPENDENT: tl.constexpr, BLOCK: tl.constexpr):
    """``BLOCK`` numbers of a row."""
    await_turn(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values_ptr + row * depth + at, mask=at < depth, other=0.0).to(tl.float32)
    x *= tl.load(scales_ptr + row)
    tl.store(out_ptr + row * depth + at, x.to(out_ptr.dtype.element_ty), mask=at < depth)


def quantise_rows(weight: Tensor, values: Tensor, scales: Tensor) -> None:
    """As the reference's. weight: [N, D], of any strides; values: fp8 [N, D], contiguous; scales: fp32 [N]."""
    assert values.is_contiguous() and values.shape == weight.shape
    _quantise_kernel[(weight.shape[0],)](
        weight,
        values,
        scales,
        weight.stride(0),
        weight.stride(1),
        weight.shape[1],
        BLOCK=1024,
        num_warps=4,
        **launch.options(weight.device),
    )


def dequantise_rows(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """As the reference's. values: fp8 [N, D], contiguous; scales: fp32 [N]; returns [N, D]."""
    assert values.is_contiguous()
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    block = 4096
    _dequantise_kernel[(values.shape[0], triton.cdiv(values.shape[1], block))](
        values, scales, out, values.shape[1], BLOCK=block, num_warps=8, **launch.options(values.device)
    )
    return out
