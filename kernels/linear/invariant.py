"""A projection whose rows have the same bits alone and in any batch, for a GPU.

The weight's shape alone decides the tiles of the product and the order of its sums. The small kernels around it do not
depend on the batch anyway (He et al., "Defeating nondeterminism in LLM inference", 2025).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.launch import await_turn, fetch_ahead
from stoker.kernels.linear.linear import store_outputs, sum_over, weight_rows
from stoker.kernels.norm_rotary import rms_norm
from stoker.kernels.reference.norm_rotary import Activation, Norm

# Programs that fill the GPUs this is made for, one a multiprocessor or so. A constant: segments, and with them the bits of
# a sum, must not differ from one GPU to another.
_FILLED = 128


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """How to multiply by a weight: the same for every number of tokens.

    The depth is cut into ``segments``, whose sums are added in order. Either one program does all segments, or each has its
    own program and a second kernel adds them up. The arithmetic, and so every bit of the result, is the same.
    """

    block_m: int
    block_n: int
    block_k: int
    segments: int
    depth: int  # of a segment, a multiple of block_k


def matmul_config(width: int, depth: int, dtype: torch.dtype) -> MatmulConfig:
    """The configuration for a weight [width, depth]. It must not depend on the tokens."""
    block_k = 128 // dtype.itemsize
    columns = triton.cdiv(width, 128)
    segments = max(1, min(2 * _FILLED // columns, depth // (4 * block_k), 8))
    return MatmulConfig(64, 128, block_k, segments, triton.cdiv(triton.cdiv(depth, segments), block_k) * block_k)


@triton.jit(do_not_specialize=["tokens"])
def _matmul_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    row_scales_ptr,
    partial_ptr,
    x_stride,
    weight_stride,
    residual_stride,
    tokens,
    width,
    depth,
    segment_depth,
    scale,
    SEGMENTS: tl.constexpr,
    PARALLEL: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One tile of the result, or with ``PARALLEL`` one segment of one, which goes to ``partial`` [SEGMENTS, T, N]."""
    full_width = 2 * width if GATED is not None else width
    tiles_m = tl.cdiv(tokens, BLOCK_M)
    tiles_n = tl.cdiv(full_width, BLOCK_N)
    # Programs that run at the same time take GROUP tiles of rows by few tiles of columns: both are then in cache.
    group = tl.program_id(0) // (GROUP * tiles_n)
    height = min(tiles_m - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * tiles_n)
    tile_m, tile_n = group * GROUP + within % height, within // height

    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_at = weight_rows(columns, width, GATED)
    first = tl.program_id(1) * segment_depth  # 0 where one program does all segments
    fetch_ahead(weight_ptr + first, weight_at, weight_stride, full_width, depth - first, STAGES * BLOCK_K, DEPENDENT)
    await_turn(DEPENDENT)
    x_tile = x_ptr + rows[:, None] * x_stride
    weight_tile = weight_ptr + weight_at.to(tl.int64)[None, :] * weight_stride
    x_inside = (rows < tokens)[:, None]
    weight_inside = (columns < full_width)[None, :]
    if PARALLEL:
        total, _ = sum_over(
            x_tile,
            weight_tile,
            x_ptr,
            x_inside,
            weight_inside,
            first,
            min(first + segment_depth, depth),
            False,
            False,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        at = (tl.program_id(1) * tokens + rows)[:, None] * full_width + columns[None, :]
        tl.store(partial_ptr + at, total, mask=x_inside & weight_inside)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for number in range(SEGMENTS):
            begin = number * segment_depth
            segment, _ = sum_over(
                x_tile,
                weight_tile,
                x_ptr,
                x_inside,
                weight_inside,
                begin,
                min(begin + segment_depth, depth),
                False,
                False,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
            total += segment
        store_outputs(
            total,
            rows,
            tokens,
            tile_n,
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
            BLOCK_M,
            BLOCK_N,
        )


@triton.jit(do_not_specialize=["tokens"])
def _add_segments_kernel(
    partial_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    row_scales_ptr,
    residual_stride,
    tokens,
    width,
    scale,
    SEGMENTS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One token and ``BLOCK_N`` columns: the segments in order, as a program that does them all would add them."""
    await_turn(DEPENDENT)
    full_width = 2 * width if GATED is not None else width
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((1, BLOCK_N), tl.float32)
    for number in range(SEGMENTS):
        at = (number * tokens + rows)[:, None] * full_width + columns
        total += tl.load(partial_ptr + at, mask=columns < full_width, other=0.0)
    store_outputs(
        total,
        rows,
        tokens,
        tl.program_id(1),
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
    """As the reference's ``linear``, never in place. x: [T, D]; weight: [N, D]; the rows of both contiguous."""
    config = matmul_config(weight.shape[0], weight.shape[1], x.dtype)
    return _matmul(rms_norm(x, *norm) if norm else x, weight, bias, gated, residual, scale, row_scales, config)


def _matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gated: Activation | None,
    residual: Tensor | None,
    scale: float,
    row_scales: Tensor | None,
    c: MatmulConfig,
) -> Tensor:
    assert x.stride(1) == 1 and weight.stride(1) == 1 and (residual is None or residual.stride(1) == 1)
    tokens, depth = x.shape
    full_width = weight.shape[0]
    width = full_width if gated is None else full_width // 2
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(tokens, c.block_m) * triton.cdiv(full_width, c.block_n)
    parallel = c.segments > 1 and tiles < _FILLED
    sums = c.segments, tokens, full_width
    partial = torch.empty(sums, dtype=torch.float32, device=x.device) if parallel else out
    settings = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "GATED": gated}
    # Unfused, as two kernels have to round alike: what does a segment, and adds what it made, or what another one made.
    settings |= {"SCALED": row_scales is not None} | launch.options(x.device, fused=False)
    bias_or_x, residual_or_x, scales_or_x = (x if t is None else t for t in (bias, residual, row_scales))
    residual_stride = 0 if residual is None else residual.stride(0)
    _matmul_kernel[(tiles, c.segments if parallel else 1)](
        x,
        weight,
        bias_or_x,
        residual_or_x,
        out,
        scales_or_x,
        partial,
        x.stride(0),
        weight.stride(0),
        residual_stride,
        tokens,
        width,
        depth,
        c.depth,
        scale,
        SEGMENTS=c.segments,
        PARALLEL=parallel,
        **settings,
        BLOCK_M=c.block_m,
        BLOCK_N=c.block_n,
        BLOCK_K=c.block_k,
        GROUP=8,
        STAGES=4,
        num_warps=4,
        num_stages=4,
    )
    if parallel:
        block = 512
        _add_segments_kernel[(tokens, triton.cdiv(full_width, block))](
            partial,
            bias_or_x,
            residual_or_x,
            out,
            scales_or_x,
            residual_stride,
            tokens,
            width,
            scale,
            SEGMENTS=c.segments,
            **settings,
            BLOCK_N=block,
            num_warps=4,
        )
    return out
