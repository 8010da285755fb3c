"""A projection of some dozens of rows for a GPU, as fast as the weight can be read.

Every byte of the weight is read once, in tiles that the chip copies to shared memory by itself (TMA, from Hopper on), as many
at a time as there is room for. The first tiles come from L2, where they are fetched while the kernel before runs.

All programs run at once where they can. Where less than half of the multiprocessors would have a program, the depth is
split among several (split-K). A split costs time, as programs wait for the slowest and all their sums are read, so there
are no more than needed. Each program leaves its sum in memory (in fact in L2), and the last to arrive adds them up in
order, so the result does not depend on which one was last (the order is that of Osama et al., "Stream-K", 2023).

Where adapters run ahead of it (``lora.ahead``), the weight is read while they do: x was there before. The product waits for its
turn when it has its sums, to which it adds theirs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stoker.kernels import launch
from stoker.kernels.fp8 import as_dtype
from stoker.kernels.launch import await_turn, fetch_ahead, fetch_part_ahead
from stoker.kernels.linear.cuts import FEW, MOST_ROWS, Cut, settings_of, warps
from stoker.kernels.linear.linear import plus_product, store_rows, with_scales_and_bias
from stoker.kernels.norm_rotary import act_times, rms_norm
from stoker.kernels.reference.norm_rotary import Activation, Norm


@triton.jit
def _fetch_scales_and_bias(
    first,
    width,
    bias_ptr,
    row_scales_ptr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    GATED: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Those of some columns of the outputs, [width], are on their way to L2, to be there when the sums are."""
    for part in tl.static_range(1 if GATED is None else 2):
        size = (part + 1) * width
        if BIAS:
            fetch_part_ahead(bias_ptr, part * width + first, size, COLUMNS, DEPENDENT)
        if SCALED:
            fetch_part_ahead(row_scales_ptr, part * width + first, size, COLUMNS, DEPENDENT)


@triton.jit(do_not_specialize=["tokens"])
def _streamed_kernel(
    x,
    weight,
    weight_ptr,
    bias_ptr,
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
    split_depth,
    scale,
    COPIED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    LEFT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    LATE: tl.constexpr,
):
    """One split of ``BLOCK_N`` columns of the outputs, for all tokens. x, weight: [T, D] and [N, D], with COPIED descriptors
    of these, by which the chip copies tiles; else threads ask for them, 16 bytes at a time.

    AHEAD: how much of the split's depth is on its way to L2 before the kernel's turn comes.
    partial: fp32 [tile, split, M * N], where each of several splits leaves its sums.
    arrived: int32, how many splits of a tile are there; 0 before and after.
    LATE: of each tile, the program that has the sums of all splits waits for its turn with these. The residual is then
    ``lora.ahead``'s, if GATED for gate and up.
    """
    full_width = width if GATED is None else 2 * width
    if not COPIED:
        x = tl.make_tensor_descriptor(x, [tokens, depth], [x_stride, 1], [BLOCK_M, BLOCK_K])
        weight = tl.make_tensor_descriptor(weight, [full_width, depth], [weight_stride, 1], [BLOCK_N, BLOCK_K])
    split, tile = tl.program_id(0), tl.program_id(1)
    first = tile * BLOCK_N
    begin = split * split_depth
    total = tl.zeros((BLOCK_N, BLOCK_M) if LEFT else (BLOCK_M, BLOCK_N), tl.float32)
    up = total
    its_rows = first + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    _fetch_scales_and_bias(first, width, bias_ptr, row_scales_ptr, BIAS, SCALED, GATED, BLOCK_N, DEPENDENT)
    if not LATE:
        fetch_ahead(weight_ptr + begin, its_rows, weight_stride, full_width, depth - begin, AHEAD, DEPENDENT)
        if GATED is not None:
            fetch_ahead(
                weight_ptr + begin, width + its_rows, weight_stride, full_width, depth - begin, AHEAD, DEPENDENT
            )
        await_turn(DEPENDENT)
    if RESIDUAL:  # which is wanted last, and which the weights of some kernels have driven from cache
        fetch_ahead(residual_ptr + first, rows, residual_stride, tokens, width - first, BLOCK_N, DEPENDENT)
    for at in range(begin, min(begin + split_depth, depth), BLOCK_K):
        some = x.load([0, at])
        total = plus_product(total, some, as_dtype(weight.load([first, at]), some.dtype), LEFT)
        if GATED is not None:
            up = plus_product(up, some, as_dtype(weight.load([width + first, at]), some.dtype), LEFT)
    if LEFT:
        total = tl.trans(total)
        up = tl.trans(up)
    last = True
    if SPLITS > 1:
        inside = (rows < tokens)[:, None]
        tile_ptr = partial_ptr + tile * (SPLITS * BLOCK_M * BLOCK_N)
        tile_ptr += rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(tile_ptr + split * (BLOCK_M * BLOCK_N), total, mask=inside)
        tl.debug_barrier()  # of all threads, before one of them says so to other programs
        last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            tl.debug_barrier()
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for number in tl.static_range(SPLITS):
                theirs = tile_ptr + number * (BLOCK_M * BLOCK_N)
                total += tl.load(theirs, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
        columns = first + tl.arange(0, BLOCK_N)
        real = columns < width
        total = with_scales_and_bias(total, columns, real, bias_ptr, row_scales_ptr, BIAS, SCALED)
        if GATED is not None:
            up = with_scales_and_bias(up, width + columns, real, bias_ptr, row_scales_ptr, BIAS, SCALED)
        if LATE:
            await_turn(DEPENDENT)
        if LATE and GATED is not None:
            added_ptr = residual_ptr + rows[:, None] * residual_stride + columns[None, :]
            known = (rows < tokens)[:, None] & real[None, :]
            total += tl.load(added_ptr, mask=known, other=0.0).to(tl.float32)
            up += tl.load(added_ptr + width, mask=known, other=0.0).to(tl.float32)
        if GATED is not None:
            total = act_times(total, up, out_ptr.dtype.element_ty, GATED)
        store_rows(total, rows, tokens, columns, width, residual_ptr, residual_stride, scale, out_ptr, RESIDUAL)


def describable(matrix: Tensor) -> bool:
    """Whether the chip can read tiles of a matrix by itself: each row is contiguous, in whole pieces of 16 bytes."""
    bytes_ = matrix.data_ptr() | matrix.itemsize * matrix.stride(0) | matrix.itemsize * matrix.shape[1]
    return matrix.stride(1) == 1 and bytes_ % 16 == 0


def sums_of_splits(x: Tensor, weight: Tensor, cut: Cut, *, gated: bool, beside: int) -> Tensor | None:
    """Memory for ``streamed``, fp32, where several programs share the depth of a tile. x: [T, D]; weight: [N, D]."""
    block_m, _, _, tiles, splits, _, _ = settings_of(x, weight, gated, cut, beside)
    if splits == 1:
        return None
    return torch.empty(tiles * splits * block_m * cut.rows, dtype=torch.float32, device=x.device)


def streamed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: Norm | None,
    gated: Activation | None,
    residual: Tensor | None,
    scale: float,
    cut: Cut,
    arrived: Tensor,
    row_scales: Tensor | None = None,
    beside: int = 0,
    added: Tensor | None = None,
    sums: Tensor | None = None,
) -> Tensor:
    """As the reference's ``linear``. x: [T, D], T up to ``MOST_ROWS``; weight: [N, D], ``describable``.

    cut: of one split, if gated. arrived: int32 zeros, one for each tile of several splits; nobody else uses them meanwhile.
    beside: bytes of a multiprocessor's shared memory that are left to other kernels.
    added: [T, N], to add to the product, of gate and up before the activation: what ``lora.ahead`` made of the same x just now.
    sums: what ``sums_of_splits`` gave before that was launched; needed with ``added``.
    """
    late = added is not None
    assert not late or (norm is None and residual is None and describable(x)), "x was made by the last launch"
    if norm is not None:  # for every tile again it would be more work than the product
        x = rms_norm(x, *norm)
    if not describable(x):
        x = x.clone(memory_format=torch.contiguous_format)
    tokens, depth = x.shape
    assert tokens <= MOST_ROWS and describable(x) and describable(weight) and (gated is None or cut.splits == 1)
    width = weight.shape[0] if gated is None else weight.shape[0] // 2
    weight_rows = cut.rows if gated is None else 2 * cut.rows
    block_m, block_k, stages, tiles, splits, split_depth, ahead = settings_of(x, weight, gated is not None, cut, beside)
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if sums is None:
        assert not late or splits == 1, (
            "what is allocated now may still be read by the launches that it does not wait for"
        )
        sums = sums_of_splits(x, weight, cut, gated=gated is not None, beside=beside)
    copied = launch.copies_tiles(x.device)
    residual = residual if added is None else added
    _streamed_kernel[splits, tiles](
        TensorDescriptor.from_tensor(x, [block_m, block_k]) if copied else x,
        TensorDescriptor.from_tensor(weight, [cut.rows, block_k]) if copied else weight,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        x if row_scales is None else row_scales,
        out if sums is None else sums,
        arrived,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        tokens,
        width,
        depth,
        split_depth,
        scale,
        COPIED=copied,
        BIAS=bias is not None,
        RESIDUAL=residual is not None and not (added is not None and gated),
        GATED=gated,
        SCALED=row_scales is not None,
        LEFT=tokens <= FEW,
        SPLITS=splits,
        BLOCK_M=block_m,
        BLOCK_N=cut.rows,
        BLOCK_K=block_k,
        AHEAD=ahead,
        LATE=late,
        num_warps=warps(block_m, weight_rows, late),
        num_stages=stages,
        **launch.options(x.device),
    )
    return out
