"""A projection of some dozens of rows for a GPU, as fast as the weight can be read.

Every byte of the weight is read once, by about as many programs as there are multiprocessors: where it has fewer tiles of
rows, its depth is split among several. Each leaves its sum in memory (L2, in truth), and the last to come adds them up in
order, so that the result does not depend on who that was (split-K; the order is that of Osama et al., "Stream-K", 2023).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.launch import await_turn_with_weight
from stoker.kernels.linear import store_outputs, sum_over, weight_rows
from stoker.kernels.norm_rotary import rms_norm
from stoker.kernels.reference.norm_rotary import Activation, Norm

MOST_ROWS = 128
_COLUMNS = 128
_STAGES = 4


@triton.jit(do_not_specialize=["tokens", "splits"])
def _streamed_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    row_scales_ptr,
    partial_ptr,
    arrived_ptr,
    x_stride,
    weight_stride,
    residual_stride,
    tokens,
    width,
    depth,
    splits,
    split_depth,
    eps,
    scale,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One split of ``BLOCK_N`` rows of the weight, for all tokens.

    partial: fp32 [tile, split, M * (N + 1)], where each of several splits leaves its sums, and those of squares behind them.
    arrived: int32, how many splits of a tile are there; 0 before and after.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    full_width = 2 * width if GATED is not None else width
    rows = tl.arange(0, BLOCK_M)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_at = weight_rows(columns, width, GATED)
    begin = split * split_depth
    await_turn_with_weight(
        weight_ptr + begin, weight_at, weight_stride, full_width, depth - begin, STAGES * BLOCK_K, DEPENDENT
    )
    inside = (rows < tokens)[:, None]
    total, squares = sum_over(
        x_ptr + rows.to(tl.int64)[:, None] * x_stride,
        weight_ptr + weight_at.to(tl.int64)[None, :] * weight_stride,
        norm_ptr,
        inside,
        (columns < full_width)[None, :],
        begin,
        min(begin + split_depth, depth),
        NORM,
        OFFSET,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    arrived = splits - 1
    within = rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    behind = BLOCK_M * BLOCK_N + rows
    if splits > 1:
        mine = partial_ptr + (tile * splits + split) * (BLOCK_M * (BLOCK_N + 1))
        tl.store(mine + within, total, mask=inside)
        if NORM:
            tl.store(mine + behind, squares)
        tl.debug_barrier()  # of all threads, before one of them says so to other programs
        arrived = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel")
    if arrived == splits - 1:
        if splits > 1:
            tl.debug_barrier()
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            squares = tl.zeros((BLOCK_M,), tl.float32)
            for number in range(splits):
                theirs = partial_ptr + (tile * splits + number) * (BLOCK_M * (BLOCK_N + 1))
                total += tl.load(theirs + within, mask=inside, other=0.0, cache_modifier=".cg")
                if NORM:
                    squares += tl.load(theirs + behind, cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
        if NORM:
            total *= tl.rsqrt(squares / depth + eps)[:, None]
        store_outputs(
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
            BIAS,
            RESIDUAL,
            GATED,
            SCALED,
            BLOCK_M,
            BLOCK_N,
        )


def tiles_of(width: int) -> int:
    """How many counters a product needs with a weight of ``width`` rows."""
    return int(triton.cdiv(width, _COLUMNS))


def splits_to_try(weight: tuple[int, int], itemsize: int, processors: int) -> list[int]:
    """Numbers of splits of a weight [N, D] that give each multiprocessor one program, or two."""
    width, depth = weight
    most = max(1, depth // (512 // itemsize))  # of four steps at the least
    return sorted({max(1, min(programs * processors // tiles_of(width), most)) for programs in (1, 2)})


def streamed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: Norm | None,
    gated: Activation | None,
    residual: Tensor | None,
    scale: float,
    splits: int,
    arrived: Tensor,
    row_scales: Tensor | None = None,
) -> Tensor:
    """As the reference's ``linear``. x: [T, D], T up to ``MOST_ROWS``; weight: [N, D]; the rows of both contiguous.

    splits: of the depth, at most. arrived: int32 zeros, one a tile, of nobody else while this runs.
    """
    if norm is not None and (norm.centred or x.dtype == torch.float16):  # as in ``skinny``
        x, norm = rms_norm(x, *norm), None
    tokens, depth = x.shape
    assert tokens <= MOST_ROWS and x.stride(1) == weight.stride(1) == 1
    full_width = weight.shape[0]
    width = full_width if gated is None else full_width // 2
    block_m, block_k = (64 if tokens <= 64 else MOST_ROWS), 128 // x.dtype.itemsize
    split_depth = triton.cdiv(triton.cdiv(depth, splits), block_k) * block_k
    splits, tiles = triton.cdiv(depth, split_depth), tiles_of(full_width)
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    sums = tiles * splits * block_m * (_COLUMNS + 1)
    partial = torch.empty(sums, dtype=torch.float32, device=x.device) if splits > 1 else out
    norm_weight, eps, offset, *_ = norm or (x, 0.0, False)
    _streamed_kernel[tiles, splits](
        x,
        weight,
        x if bias is None else bias,
        norm_weight,
        x if residual is None else residual,
        out,
        x if row_scales is None else row_scales,
        partial,
        arrived,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        tokens,
        width,
        depth,
        splits,
        split_depth,
        eps,
        scale,
        BIAS=bias is not None,
        NORM=norm is not None,
        OFFSET=offset,
        RESIDUAL=residual is not None,
        GATED=gated,
        SCALED=row_scales is not None,
        BLOCK_M=block_m,
        BLOCK_N=_COLUMNS,
        BLOCK_K=block_k,
        STAGES=_STAGES,
        num_warps=4 if block_m == 64 else 8,
        num_stages=_STAGES,
        **launch.options(x.device),
    )
    return out
