"""A router of experts for a GPU: its logits, split over their depth, then all that comes after them in one kernel.

For the few tokens of a decode step, one program of that kernel does them all, and sorts the pairs of token and expert by
expert as well. Of experts that rank the same, the first is taken.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.grouping import order_by_group
from stoker.kernels.launch import await_turn, fetch_ahead
from stoker.kernels.linear.linear import sum_over
from stoker.kernels.reference.routing import Choice, Routing

_ROWS = 16  # tokens of a product
_FEW = 64  # tokens for which the logits are split: with more of them the vendor's library has enough to do
_MOST_SPLITS = 8
_TOGETHER = 8192  # numbers that one program ranks: more tokens are done by several
_EACH = 1024  # so many each
_FAR = tl.constexpr(3.0e38)  # above and below any score


@triton.jit(do_not_specialize=["tokens"])
def _logits_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, weight_stride, tokens, experts, depth, split_depth, DEPENDENT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One split of some experts' logits, for some tokens: fp32 [splits, T, E]."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    begin = split * split_depth
    fetch_ahead(weight_ptr + begin, columns, weight_stride, experts, depth - begin, BLOCK_K, DEPENDENT)
    await_turn(DEPENDENT)
    rows = tl.program_id(2).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    real, inside = (rows < tokens)[:, None], (columns < experts)[None, :]
    total, _ = sum_over(
        x_ptr + rows[:, None] * x_stride,
        weight_ptr + columns.to(tl.int64)[None, :] * weight_stride,
        x_ptr,
        real,
        inside,
        begin,
        min(begin + split_depth, depth),
        False,
        False,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    tl.store(out_ptr + (split * tokens + rows)[:, None] * experts + columns[None, :], total, mask=real & inside)


@triton.jit
def _of_the_best_groups(ranked, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr,
                        BEST: tl.constexpr):  # fmt: skip
    """Whether a column is of one of the KEPT groups with the largest sums of their BEST best. ranked: [ROWS, GROUPS * SIZE]."""
    by_group = tl.reshape(ranked, (ROWS, GROUPS, SIZE))
    total = tl.zeros((ROWS, GROUPS), tl.float32)
    for _ in tl.static_range(BEST):
        best, at = tl.max(by_group, axis=2, return_indices=True, return_indices_tie_break_left=True)
        total += best
        by_group = tl.where(tl.arange(0, SIZE)[None, None, :] == at[:, :, None], float("-inf"), by_group)
    kept = tl.zeros((ROWS, GROUPS), tl.int32)
    for _ in tl.static_range(KEPT):
        _best, at = tl.max(total, axis=1, return_indices=True, return_indices_tie_break_left=True)
        taken = tl.arange(0, GROUPS)[None, :] == at[:, None]
        kept = tl.where(taken, 1, kept)
        total = tl.where(taken, float("-inf"), total)
    return tl.reshape(tl.broadcast_to(kept[:, :, None], (ROWS, GROUPS, SIZE)), (ROWS, GROUPS * SIZE)) > 0


@triton.jit(do_not_specialize=["tokens", "split_stride"])
def _route_kernel(
    logits_ptr, like_ptr, bias_ptr, correction_ptr, gain_ptr, ids_ptr, weights_ptr, order_ptr, starts_ptr, tokens,
    row_stride, split_stride, eps, least, scale, EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, SCORE: tl.constexpr,
    WIDE_LOGITS: tl.constexpr, WIDE_SCORES: tl.constexpr, NORMALISE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr, BIAS: tl.constexpr,
    CORRECTION: tl.constexpr, GAIN: tl.constexpr, SPLITS: tl.constexpr, ORDERED: tl.constexpr, ROWS: tl.constexpr,
    PAIRS: tl.constexpr, GROUP_BLOCK: tl.constexpr, SIZE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """ROWS tokens. A group of experts has SIZE columns, of which the first are its experts. like: of the dtype of ``x``."""
    await_turn(DEPENDENT)
    dtype = like_ptr.dtype.element_ty
    EACH: tl.constexpr = EXPERTS // GROUPS
    ROUNDED: tl.constexpr = SCORE != "softmax" and not WIDE_SCORES
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, GROUP_BLOCK * SIZE)
    expert = columns // SIZE * EACH + columns % SIZE
    known = (columns // SIZE < GROUPS) & (columns % SIZE < EACH)
    real = (rows < tokens)[:, None] & known[None, :]
    at = rows.to(tl.int64)[:, None] * row_stride + expert[None, :]
    logits = tl.load(logits_ptr + at, mask=real, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        logits += tl.load(logits_ptr + split * split_stride + at, mask=real, other=0.0).to(tl.float32)
    if BIAS:
        logits += tl.load(bias_ptr + expert, mask=known, other=0.0).to(tl.float32)[None, :]
    if not WIDE_LOGITS:
        logits = logits.to(dtype).to(tl.float32)
    scores = logits
    if SCORE == "softmax":
        scores = tl.exp(logits - tl.max(tl.where(known[None, :], logits, float("-inf")), axis=1)[:, None])
        scores = tl.where(known[None, :], scores, 0.0)
        scores = scores / tl.sum(scores, axis=1)[:, None]
    if SCORE == "sigmoid":
        scores = tl.sigmoid(logits)
        if not WIDE_SCORES:
            scores = scores.to(dtype).to(tl.float32)
    ranked = scores
    if CORRECTION:
        ranked += tl.load(correction_ptr + expert, mask=known, other=0.0).to(tl.float32)[None, :]
        if ROUNDED and correction_ptr.dtype.element_ty == dtype:
            ranked = ranked.to(dtype).to(tl.float32)
    # Whatever the numbers are, NaN too, experts of a token are different ones, and such as there are.
    ranked = tl.where(ranked == ranked, tl.minimum(tl.maximum(ranked, -_FAR), _FAR), _FAR)
    ranked = tl.where(known[None, :], ranked, float("-inf"))
    if GROUPS > 1:
        chosen_from = _of_the_best_groups(ranked, ROWS, GROUP_BLOCK, SIZE, KEPT, BEST)
        left_out = known[None, :] & (chosen_from == 0)
        ranked = tl.where(left_out, 0.0 if SCORE == "softmax" else -_FAR, ranked)
        if SCORE == "softmax" and not CORRECTION:  # it may be taken, as good as one whose score is zero
            scores = tl.where(left_out, 0.0, scores)
    number = tl.arange(0, PAIRS)[None, :]
    ids = tl.zeros((ROWS, PAIRS), tl.int32)
    OF_LOGITS: tl.constexpr = SCORE == "chosen" or SCORE == "chosen_sigmoid"
    weights = tl.full((ROWS, PAIRS), float("-inf") if OF_LOGITS else 0.0, tl.float32)
    place = tl.full((ROWS, GROUP_BLOCK * SIZE), -1, tl.int32)  # of an expert among the token's
    for k in tl.static_range(PER_TOKEN):
        _best, first = tl.max(ranked, axis=1, return_indices=True, return_indices_tie_break_left=True)
        taken = columns[None, :] == first[:, None]
        ids = tl.where(number == k, first[:, None], ids)
        weights = tl.where(number == k, tl.sum(tl.where(taken, scores, 0.0), axis=1)[:, None], weights)
        place = tl.where(taken, k, place)
        ranked = tl.where(taken, float("-inf"), ranked)
    if SCORE == "chosen":
        weights = tl.exp(weights - tl.max(weights, axis=1)[:, None])
        weights = weights / tl.sum(weights, axis=1)[:, None]
    if SCORE == "chosen_sigmoid":
        weights = tl.sigmoid(weights)
    if NORMALISE:
        weights = weights / tl.maximum(tl.sum(weights, axis=1)[:, None] + eps, least, propagate_nan=tl.PropagateNan.ALL)
    weights *= scale
    into = rows.to(tl.int64)[:, None] * PER_TOKEN + number
    written = (rows < tokens)[:, None] & (number < PER_TOKEN)
    ids = ids // SIZE * EACH + ids % SIZE
    if GAIN:
        weights *= tl.load(gain_ptr + ids, mask=written, other=0.0).to(tl.float32)
    tl.store(ids_ptr + into, ids, mask=written)
    tl.store(weights_ptr + into, weights, mask=written)
    if ORDERED:
        pairs = (real & (place >= 0)).to(tl.int32)
        of_expert = tl.sum(pairs, axis=0)
        start = tl.cumsum(of_expert, axis=0) - of_expert
        tl.store(starts_ptr + expert, start, mask=known)
        tl.store(starts_ptr + EXPERTS, tokens * PER_TOKEN)
        place += rows[:, None] * PER_TOKEN
        tl.store(order_ptr + start[None, :] + tl.cumsum(pairs, axis=0) - pairs, place, mask=pairs > 0)


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    gain: Tensor | None,
    choice: Choice,
) -> Routing:
    """As the reference's, with the pairs in order. x: [T, D]; weight: [E, D]; bias, correction, gain: [E]."""
    tokens = x.shape[0]
    if tokens > _FEW:
        given = x, weight, bias
        if choice.wide_logits:
            given = x.float(), weight.float(), None if bias is None else bias.float()
        return _choose(F.linear(*given)[None], x, None, correction, gain, choice, _TOGETHER)
    splits = _MOST_SPLITS * _ROWS // (triton.cdiv(tokens, _ROWS) * _ROWS)
    return _choose(_logits(x, weight, splits), x, bias, correction, gain, choice, _TOGETHER)


def route_invariant(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    gain: Tensor | None,
    choice: Choice,
) -> Routing:
    """``route`` with a token's sums always in one order, so that its result is the same in any batch."""
    return _choose(_logits(x, weight, _MOST_SPLITS), x, bias, correction, gain, choice, 0)


def _logits(x: Tensor, weight: Tensor, splits: int) -> Tensor:
    """Parts of the logits, to be added up: fp32 [splits, T, E]. splits: the most parts."""
    if x.dtype != weight.dtype:
        x, weight = x.float(), weight.float()
    x, weight = map(launch.in_rows, (x, weight))
    (tokens, depth), experts = x.shape, weight.shape[0]
    block = 512 // x.dtype.itemsize
    split_depth = triton.cdiv(triton.cdiv(depth, block), splits) * block
    splits = triton.cdiv(depth, split_depth)
    out = torch.empty(splits, tokens, experts, dtype=torch.float32, device=x.device)
    _logits_kernel[(triton.cdiv(experts, 16), splits, triton.cdiv(tokens, _ROWS))](
        x, weight, out, x.stride(0), weight.stride(0), tokens, experts, depth, split_depth, BLOCK_M=_ROWS, BLOCK_N=16,
        BLOCK_K=block, num_warps=4, num_stages=4, **launch.options(x.device),
    )  # fmt: skip
    return out


def _choose(
    logits: Tensor,
    x: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    gain: Tensor | None,
    choice: Choice,
    together: int,
) -> Routing:
    """Choose from logits, [splits, T, E]. together: up to how many numbers one program ranks all tokens."""
    splits, tokens, experts = logits.shape
    size, groups = (triton.next_power_of_2(n) for n in (experts // choice.groups, choice.groups))
    rows = triton.next_power_of_2(tokens)
    ordered = rows * groups * size <= together
    if not ordered:
        rows = max(_EACH // (groups * size), 1) if together else 1
    pairs, device = tokens * choice.per_token, x.device
    ids = torch.empty(tokens, choice.per_token, dtype=torch.int64, device=device)
    weights = torch.empty(ids.shape, dtype=torch.float32 if choice.wide_weights else x.dtype, device=device)
    order = torch.empty(pairs, dtype=torch.int32, device=device) if ordered else ids
    starts = torch.empty(experts + 1, dtype=torch.int32, device=device) if ordered else ids
    _route_kernel[(triton.cdiv(tokens, rows),)](
        logits, x, *(logits if t is None else t for t in (bias, correction, gain)), ids, weights, order, starts,
        tokens, experts, tokens * experts, choice.eps, choice.least, choice.scale, EXPERTS=experts,
        PER_TOKEN=choice.per_token, SCORE=choice.score, WIDE_LOGITS=choice.wide_logits,
        WIDE_SCORES=choice.wide_logits or choice.wide_scores, NORMALISE=choice.normalise,
        GROUPS=choice.groups, KEPT=choice.kept_groups, BEST=choice.best_of_group, BIAS=bias is not None,
        CORRECTION=correction is not None, GAIN=gain is not None, SPLITS=splits, ORDERED=ordered, ROWS=rows,
        PAIRS=triton.next_power_of_2(choice.per_token), GROUP_BLOCK=groups, SIZE=size,
        num_warps=min(max(rows * groups * size // 512, 1), 16), **launch.options(device),
    )  # fmt: skip
    return Routing(ids, weights, (order, starts) if ordered else order_by_group(ids, experts))
