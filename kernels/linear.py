"""A projection with what stands before and after it in a decoder layer, for a GPU.

Up to ``_SKINNY`` tokens it is bound by the reading of the weight: one Triton kernel reads every byte of it once and does
norm, activation and residual on the way. With more tokens it is a matrix product of the vendor's library between small
kernels. ``linear_invariant`` gives a row the same bits whatever stands beside it, for the price of a slower product.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.norm_rotary import rms_norm, silu_mul, silu_times

_SKINNY = 4
_CPU_MULTIPROCESSORS = 132  # the interpreter plays the GPU these kernels are made for


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def weight_rows(columns, size, GATED: tl.constexpr):
    """The weight's row of each column of a tile. Gated: columns alternate between gate and up, which lie ``size`` apart."""
    return (columns % 2) * size + columns // 2 if GATED else columns


@triton.jit
def _total(products, inverse, bias, GATED: tl.constexpr, BLOCK_N: tl.constexpr, dtype: tl.constexpr):
    """The outputs of a skinny tile for one token, in fp32. products: [BLOCK_N, BLOCK_K]; inverse: 1 / rms, or 1."""
    out = tl.sum(products, axis=1) * inverse + bias
    if GATED:
        gate, up = tl.split(tl.reshape(out, (BLOCK_N // 2, 2)))
        out = silu_times(gate, up, dtype)
    return out


@triton.jit
def _store(out, token: tl.constexpr, columns, width, residual_ptr, residual_stride, out_ptr, RESIDUAL: tl.constexpr):
    inside = columns < width
    if RESIDUAL:
        residual = tl.load(residual_ptr + token * residual_stride + columns, mask=inside, other=0.0)
        out = out.to(out_ptr.dtype.element_ty).to(tl.float32) + residual.to(tl.float32)
    tl.store(out_ptr + token * width + columns, out, mask=inside)


@triton.jit
def _skinny_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    x_stride,
    weight_stride,
    residual_stride,
    width,
    depth,
    eps,
    TOKENS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``BLOCK_N`` rows of the weight for up to four tokens; products stay in registers and are added up once at the end.

    The inverse rms is a factor of the whole sum, so its squares are added up in the same loop and nothing waits for it.
    """
    dtype = out_ptr.dtype.element_ty
    tile = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = weight_rows(tile, width, GATED).to(tl.int64)
    inside = (tile < (2 * width if GATED else width))[:, None]
    tile_ptr = weight_ptr + rows[:, None] * weight_stride
    products0 = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares0 = tl.zeros((BLOCK_K,), tl.float32)
    if TOKENS > 1:
        products1, squares1 = products0, squares0
    if TOKENS > 2:
        products2, squares2 = products0, squares0
    if TOKENS > 3:
        products3, squares3 = products0, squares0
    for start in range(0, depth, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        deep = at < depth
        w = tl.load(tile_ptr + at[None, :], mask=inside & deep[None, :], other=0.0, eviction_policy="evict_first").to(
            tl.float32
        )
        if NORM:
            factor = tl.load(norm_ptr + at, mask=deep, other=0.0).to(tl.float32)
        else:
            factor = 1.0
        x = tl.load(x_ptr + at, mask=deep, other=0.0).to(tl.float32)
        products0 += w * (x * factor)[None, :]
        squares0 += x * x
        if TOKENS > 1:
            x = tl.load(x_ptr + x_stride + at, mask=deep, other=0.0).to(tl.float32)
            products1 += w * (x * factor)[None, :]
            squares1 += x * x
        if TOKENS > 2:
            x = tl.load(x_ptr + 2 * x_stride + at, mask=deep, other=0.0).to(tl.float32)
            products2 += w * (x * factor)[None, :]
            squares2 += x * x
        if TOKENS > 3:
            x = tl.load(x_ptr + 3 * x_stride + at, mask=deep, other=0.0).to(tl.float32)
            products3 += w * (x * factor)[None, :]
            squares3 += x * x

    if BIAS:
        bias = tl.load(bias_ptr + rows, mask=tile < (2 * width if GATED else width), other=0.0).to(tl.float32)
    else:
        bias = 0.0
    columns = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2) if GATED else tile
    inverse = tl.rsqrt(tl.sum(squares0, axis=0) / depth + eps) if NORM else 1.0
    out = _total(products0, inverse, bias, GATED, BLOCK_N, dtype)
    _store(out, 0, columns, width, residual_ptr, residual_stride, out_ptr, RESIDUAL)
    if TOKENS > 1:
        inverse = tl.rsqrt(tl.sum(squares1, axis=0) / depth + eps) if NORM else 1.0
        out = _total(products1, inverse, bias, GATED, BLOCK_N, dtype)
        _store(out, 1, columns, width, residual_ptr, residual_stride, out_ptr, RESIDUAL)
    if TOKENS > 2:
        inverse = tl.rsqrt(tl.sum(squares2, axis=0) / depth + eps) if NORM else 1.0
        out = _total(products2, inverse, bias, GATED, BLOCK_N, dtype)
        _store(out, 2, columns, width, residual_ptr, residual_stride, out_ptr, RESIDUAL)
    if TOKENS > 3:
        inverse = tl.rsqrt(tl.sum(squares3, axis=0) / depth + eps) if NORM else 1.0
        out = _total(products3, inverse, bias, GATED, BLOCK_N, dtype)
        _store(out, 3, columns, width, residual_ptr, residual_stride, out_ptr, RESIDUAL)


def skinny_config(tokens: int, width: int, depth: int, processors: int) -> tuple[int, int]:
    """(BLOCK_N, BLOCK_K) of the skinny kernel for a weight [width, depth].

    A tile is what the registers of 128 threads hold of products; it is as tall as leaves every multiprocessor two.
    """
    elements = 8192 if tokens <= 2 else 4096
    rows = 8
    while rows > 2 and triton.cdiv(width, rows) < 2 * processors:
        rows //= 2
    return rows, min(elements // rows, max(triton.next_power_of_2(depth), 16))


def _skinny(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    residual: Tensor | None,
    gated: bool,
) -> Tensor:
    tokens, depth = x.shape
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    rows, columns = skinny_config(tokens, weight.shape[0], depth, multiprocessors(x.device))
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    norm_weight, eps = norm or (x, 0.0)
    _skinny_kernel[(triton.cdiv(weight.shape[0], rows),)](
        x,
        weight,
        x if bias is None else bias,
        norm_weight,
        x if residual is None else residual,
        out,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        width,
        depth,
        eps,
        TOKENS=tokens,
        BIAS=bias is not None,
        NORM=norm is not None,
        RESIDUAL=residual is not None,
        GATED=gated,
        BLOCK_N=rows,
        BLOCK_K=columns,
        num_warps=4,
    )
    return out


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """As the reference's: ``act(norm(x) @ weight.T + bias) + residual``. x: [T, D]; weight: [N, D], its rows contiguous."""
    if x.shape[0] <= _SKINNY and x.stride(1) == 1:
        return _skinny(x, weight, bias, norm, residual, gated)
    if norm is not None:
        x = rms_norm(x, *norm)
    if residual is not None and bias is None and not gated:
        return torch.addmm(residual, x, weight.t())
    out = F.linear(x, weight, bias)
    if gated:
        out = silu_mul(out)
    return out if residual is None else out.add_(residual)
