"""A projection together with the norm, activation and residual around it, for a GPU.

Below ``FEWEST_FOR_TORCH`` tokens, reading the weight takes the time: one Triton kernel reads every byte of it once, and
does norm, activation and residual on the way. With more tokens it is a matrix product of the vendor's library between
small kernels; for some dozens of tokens, whatever ``measured`` finds to be faster. ``invariant`` gives a row the same bits in any
batch, at the price of a slower product.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.fp8 import as_dtype, dequantise_rows
from stoker.kernels.launch import await_turn, fetch_ahead
from stoker.kernels.norm_rotary import act_mul, act_times, norm_factor, rms_norm
from stoker.kernels.reference.norm_rotary import Activation, Norm

FEWEST_FOR_TORCH = 5  # tokens
MOST_SKINNY = 16


@triton.jit
def weight_rows(columns, size, GATED: tl.constexpr):
    """The weight's row of each column of a tile. Gated: columns alternate between gate and up, which lie ``size`` apart."""
    return (columns % 2) * size + columns // 2 if GATED is not None else columns


@triton.jit
def plus_product(total, x, weight, LEFT: tl.constexpr):
    """``total`` and the product of tiles of x [M, K] and of the weight [N, K]: [M, N], or with LEFT [N, M]."""
    left, right = (weight, tl.trans(x)) if LEFT else (x, tl.trans(weight))
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def with_scales_and_bias(total, weight_at, inside, bias_ptr, row_scales_ptr, BIAS: tl.constexpr, SCALED: tl.constexpr):
    """Sums of some rows of the weight, fp32 [M, N], times their scales, with SCALED, and plus their bias."""
    if SCALED:
        total *= tl.load(row_scales_ptr + weight_at, mask=inside, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias_ptr + weight_at, mask=inside, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def store_rows(
    total,
    rows,
    tokens,
    columns,
    width,
    residual_ptr,
    residual_stride,
    scale,
    out_ptr,
    RESIDUAL: tl.constexpr,
):
    """A tile of the outputs, fp32 [M, N], or with RESIDUAL the sum of that and of ``scale`` times the tile."""
    dtype = out_ptr.dtype.element_ty
    inside = (rows < tokens)[:, None] & (columns < width)[None, :]
    at = rows.to(tl.int64)[:, None]
    if RESIDUAL:
        residual = tl.load(residual_ptr + at * residual_stride + columns[None, :], mask=inside, other=0.0)
        total = (total.to(dtype).to(tl.float32) * scale).to(dtype).to(tl.float32) + residual.to(tl.float32)
    tl.store(out_ptr + at * width + columns[None, :], total, mask=inside)


@triton.jit
def store_outputs(
    total,
    rows,
    tokens,
    tile,
    width,
    bias_ptr,
    residual_ptr,
    residual_stride,
    scale,
    out_ptr,
    row_scales_ptr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Bias, activation, scale and residual of a tile, fp32 [BLOCK_M, BLOCK_N], and its store.

    GATED: activation, or None. SCALED: the rows of the weight have scales.
    """
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < (2 * width if GATED is not None else width)
    weight_at = weight_rows(columns, width, GATED)
    total = with_scales_and_bias(total, weight_at, inside, bias_ptr, row_scales_ptr, BIAS, SCALED)
    if GATED is not None:
        gate, up = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N // 2, 2)))
        total = act_times(gate, up, out_ptr.dtype.element_ty, GATED)
        columns = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    store_rows(total, rows, tokens, columns, width, residual_ptr, residual_stride, scale, out_ptr, RESIDUAL)


@triton.jit
def sum_over(
    x_ptr,
    weight_ptr,
    norm_ptr,
    x_inside,
    weight_inside,
    begin,
    end,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Products over part of the depth, fp32 [BLOCK_M, BLOCK_N], and the sum of the squares of x, fp32 [BLOCK_M].

    With NORM, x is multiplied by the norm's factor; the inverse rms is a factor of the whole sum, once all squares are known.
    So is the scale of a weight's row in fp8, whose numbers are made x's dtype, which holds them exactly.
    """
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(begin, end, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        deep = at < end
        x = tl.load(x_ptr + at[None, :], mask=x_inside & deep[None, :], other=0.0)
        w = as_dtype(tl.load(weight_ptr + at[:, None], mask=weight_inside & deep[:, None], other=0.0), x.dtype)
        if NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            x = (wide * norm_factor(norm_ptr, at, deep, OFFSET)[None, :]).to(x.dtype)
        if x.dtype == tl.float32:  # step by step: in one long sum, small products are lost beside what came before
            step = tl.dot(x, w, input_precision="ieee")
            total = tl.fma(step, tl.full((BLOCK_M, BLOCK_N), 1.0, tl.float32), total)  # which a sum would undo
        else:
            total = tl.dot(x, w, total, input_precision="ieee")
    return total, tl.sum(squares, axis=1)


@triton.jit
def _single_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    row_scales_ptr,
    x_stride,
    weight_stride,
    residual_stride,
    tokens,
    width,
    depth,
    eps,
    scale,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``BLOCK_N`` rows of the weight for one token; products stay in registers and are added up once at the end.

    The inverse rms is a factor of the whole sum, so its squares are added up in the same loop and nothing waits for it.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    full_width = 2 * width if GATED is not None else width
    weight_at = weight_rows(columns, width, GATED)
    fetch_ahead(weight_ptr, weight_at, weight_stride, full_width, depth, 2 * BLOCK_K, DEPENDENT)
    await_turn(DEPENDENT)
    weight_tile = weight_ptr + weight_at.to(tl.int64)[:, None] * weight_stride
    inside = (columns < full_width)[:, None]
    products = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, depth, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        deep = at < depth
        w = tl.load(
            weight_tile + at[None, :], mask=inside & deep[None, :], other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
        x = tl.load(x_ptr + at, mask=deep, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= norm_factor(norm_ptr, at, deep, OFFSET)
        products += w * x[None, :]
    total = tl.sum(products, axis=1)
    if NORM:
        total *= tl.rsqrt(tl.sum(squares, axis=0) / depth + eps)
    store_outputs(
        total[None, :],
        tl.arange(0, 1),
        tokens,
        tl.program_id(0),
        width,
        bias_ptr,
        residual_ptr,
        residual_stride,
        scale,
        out_ptr,
        row_scales_ptr,
        BIAS,
        RESIDUAL,
        GATED,
        SCALED,
        1,
        BLOCK_N,
    )


@triton.jit
def _skinny_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    row_scales_ptr,
    x_stride,
    weight_stride,
    residual_stride,
    tokens,
    width,
    depth,
    eps,
    scale,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As ``_single_kernel`` for up to 16 tokens, the rows of one tensor-core product; the weight comes in stages."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    full_width = 2 * width if GATED is not None else width
    weight_at = weight_rows(columns, width, GATED)
    fetch_ahead(weight_ptr, weight_at, weight_stride, full_width, depth, 4 * BLOCK_K, DEPENDENT)
    await_turn(DEPENDENT)
    rows = tl.arange(0, 16)
    weight_tile = weight_ptr + weight_at.to(tl.int64)[None, :] * weight_stride
    inside = (columns < full_width)[None, :]
    real = (rows < tokens)[:, None]
    x_tile = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    total, squares = sum_over(x_tile, weight_tile, norm_ptr, real, inside, 0, depth, NORM, OFFSET, 16, BLOCK_N, BLOCK_K)
    if NORM:
        total *= tl.rsqrt(squares / depth + eps)[:, None]
    store_outputs(
        total,
        rows,
        tokens,
        tl.program_id(0),
        width,
        bias_ptr,
        residual_ptr,
        residual_stride,
        scale,
        out_ptr,
        row_scales_ptr,
        BIAS,
        RESIDUAL,
        GATED,
        SCALED,
        16,
        BLOCK_N,
    )


def skinny_config(
    tokens: int, weight: tuple[int, int], itemsize: int, processors: int, shared: int
) -> tuple[int, int, int]:
    """(BLOCK_N, BLOCK_K, stages) for a weight [N, D]: tiles as tall as leaves every multiprocessor enough to do.

    shared: bytes of shared memory of a multiprocessor. Some devices have too few for all stages in fp32.
    """
    width, depth = weight
    if tokens == 1:  # 64 fp32 products in the registers of each of 128 threads, 16 bytes of a row at a time
        rows = 8
        while rows > 2 and triton.cdiv(width, rows) < 2 * processors:
            rows //= 2
        return rows, min(8192 // rows, max(int(triton.next_power_of_2(depth)), 16)), 1
    rows, row_bytes = 32 if triton.cdiv(width, 32) >= 2 * processors else 16, 512
    besides = launch.PROGRAM_SHARED + 2048
    if itemsize == 4:  # x with its norm, as compiled code shows
        besides += 16 * row_bytes
    return rows, row_bytes // itemsize, min(5, 1 + (shared - besides) // ((16 + rows) * row_bytes))


def skinny(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: Norm | None,
    gated: Activation | None,
    residual: Tensor | None,
    scale: float,
    row_scales: Tensor | None = None,
) -> Tensor:
    """As the reference's ``linear``. x: [T, D], T up to ``MOST_SKINNY``; weight: [N, D]; the rows of both contiguous."""
    # Before its division by the rms, a large activation times its norm weight may be more than fp16 holds. The mean has to
    # be known before any product.
    if norm is not None and (norm.centred or (x.dtype == torch.float16 and x.shape[0] > 1)):
        x, norm = rms_norm(x, *norm), None
    tokens, depth = x.shape
    full_width = weight.shape[0]
    width = full_width if gated is None else full_width // 2
    device = launch.multiprocessors(x.device), launch.shared_memory(x.device)
    rows, columns, stages = skinny_config(tokens, (full_width, depth), x.dtype.itemsize, *device)
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    norm_weight, eps, offset, *_ = norm or (x, 0.0, False)
    kernel = _single_kernel if tokens == 1 else _skinny_kernel
    kernel[(triton.cdiv(full_width, rows),)](
        x,
        weight,
        x if bias is None else bias,
        norm_weight,
        x if residual is None else residual,
        out,
        x if row_scales is None else row_scales,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        tokens,
        width,
        depth,
        eps,
        scale,
        BIAS=bias is not None,
        NORM=norm is not None,
        OFFSET=offset,
        RESIDUAL=residual is not None,
        GATED=gated,
        SCALED=row_scales is not None,
        BLOCK_N=rows,
        BLOCK_K=columns,
        num_warps=4,
        num_stages=stages,
        **launch.options(x.device),
    )
    return out


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
    if x.shape[0] < FEWEST_FOR_TORCH and all(t is None or t.stride(1) == 1 for t in (x, weight, residual)):
        return skinny(x, weight, bias, norm=norm, gated=gated, residual=residual, scale=scale, row_scales=row_scales)
    if row_scales is not None:
        weight = dequantise_rows(weight, row_scales, x.dtype)
    x = x if norm is None else rms_norm(x, *norm)
    if residual is not None and bias is None and gated is None:
        # Out of place, torch (up to 2.13 at least) copies the residual first: a node more of every captured step.
        return torch.addmm(residual, x, weight.t(), alpha=scale, out=residual if in_place else None)
    out = F.linear(x, weight, bias)
    if gated is not None:
        out = act_mul(out, gated)
    return out if residual is None else torch.add(residual, out, alpha=scale, out=residual if in_place else None)
