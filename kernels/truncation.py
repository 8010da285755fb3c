"""Top-k, top-p and min-p in Triton, exact and without a sort: bisection for the smallest logit kept, then one pass.

One program searches a row, over integers that have the same order as its floats. It reads the row at most 32 times for
top-k and 32 for top-p, usually under 20 times each, since it ends when no two tokens lie between the bounds. The row (0.6
MB for 152k fp32) comes from the L2 cache. A row that asks for nothing is not searched. Expected, not measured: compiled for
an H200, a reading issues 5 instructions a token, and 9 to 11 where it adds up mass. At 152k that is 3 and 7 us of one
multiprocessor, and with its waits some 80 and 150 us a search. As many rows as there are multiprocessors run side by side.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch

_SEARCHED, _CHUNK = 8192, 4096  # numbers of a row that a program reads together
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(logits_ptr, row, stride, ids, vocab):
    x = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    return tl.where(x == 0, 0.0, x)  # the two zeros tie


@triton.jit
def _in_order(bits):
    """From the bits of floats, int32 that order as these do, NaN beyond either infinity; and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _order(x):
    return _in_order(x.to(tl.int32, bitcast=True))


@triton.jit
def _above(logits_ptr, row, stride, vocab, bound, top, MASS: tl.constexpr, CHUNK: tl.constexpr):
    """How many tokens are at least ``bound``, a finite number's, and their mass relative to the most likely one's.

    Of each token as little as can be is computed, which is what this costs: the bound becomes a float and no token an
    integer. Threads add up what they read, and each other's sums at the end: at every chunk they would wait for that, and
    not read.
    """
    least = _in_order(bound.to(tl.int32)).to(tl.float32, bitcast=True)
    counts = tl.zeros([CHUNK], tl.float32)
    masses = tl.zeros([CHUNK], tl.float32)
    for start in range(0, vocab, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        kept = x >= least
        counts += kept.to(tl.float32)  # exact, as no vocabulary has 2^24 tokens; an instruction less than of integers
        if MASS:
            masses += tl.where(kept, tl.exp2((x - top) * _LOG2E), 0.0)
    return tl.sum(counts, 0).to(tl.int32), tl.sum(masses, 0)


@triton.jit
def _search(logits_ptr, row, stride, vocab, low, high, top, wanted, MASS: tl.constexpr, CHUNK: tl.constexpr):
    """The largest bound in [low, high] that keeps as many tokens (or, with MASS, as much mass) as wanted, or another
    that keeps the same tokens; low where even that keeps too little."""
    high += 1
    low_count, _ = _above(logits_ptr, row, stride, vocab, low, top, False, CHUNK)
    high_count = 0
    while (high - low > 1) & (low_count - high_count > 1):
        middle = low + ((high - low) >> 1)
        count, mass = _above(logits_ptr, row, stride, vocab, middle, top, MASS, CHUNK)
        if MASS:
            enough = mass >= wanted
        else:
            enough = count >= wanted
        low = tl.where(enough, middle, low)
        low_count = tl.where(enough, count, low_count)
        high = tl.where(enough, high, middle)
        high_count = tl.where(enough, high_count, count)
    return low


@triton.jit
def _thresholds(logits_ptr, stride, vocab, top_k_ptr, top_p_ptr, min_p_ptr, bounds_ptr, tops_ptr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k, p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    some_k = (k > 0) & (k < vocab)
    lowest = -0x80000000 + tl.zeros([], tl.int64)
    bound = lowest
    if some_k | (p < 1.0) | (min_p > 0.0):
        lows, tops = tl.full([CHUNK], float("inf"), tl.float32), tl.full([CHUNK], float("-inf"), tl.float32)
        for start in range(0, vocab, CHUNK):
            ids = start + tl.arange(0, CHUNK)
            x = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
            some = x > float("-inf")  # which no bound need keep: neither NaN nor excluded
            lows = tl.minimum(lows, tl.where(some, x, float("inf")))
            tops = tl.maximum(tops, tl.where(some, x, float("-inf")))
        top = tl.max(tops, 0)
        low, high = _order(tl.min(lows, 0)).to(tl.int64), _order(top).to(tl.int64)
        if some_k:
            bound = _search(logits_ptr, row, stride, vocab, low, high, top, k, False, CHUNK)
            low = tl.maximum(low, bound)
        if p < 1.0:
            _, mass = _above(logits_ptr, row, stride, vocab, low, top, True, CHUNK)
            bound = _search(logits_ptr, row, stride, vocab, low, high, top, p * mass, True, CHUNK)
        tl.store(tops_ptr + row, top)
    tl.store(bounds_ptr + row, bound.to(tl.int32))


@triton.jit
def _apply_thresholds(logits_ptr, stride, vocab, min_p_ptr, bounds_ptr, tops_ptr, out_ptr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = _load(logits_ptr, row, stride, ids, vocab)
    min_p = tl.load(min_p_ptr + row)
    keep = _order(x) >= tl.load(bounds_ptr + row)
    if min_p > 0.0:
        top = tl.load(tops_ptr + row)
        keep &= (tl.exp(x - top) >= min_p) | (x == top)
    keep |= x != x  # a NaN must reach the log-probability, by which it is found
    tl.store(out_ptr + row * vocab + ids, tl.where(keep, x, float("-inf")), mask=ids < vocab)


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """As the reference, with its rule for ties; probabilities differ from its by rounding."""
    logits = launch.in_rows(logits)
    (rows, vocab), stride = logits.shape, logits.stride(0)
    bounds = torch.empty(rows, dtype=torch.int32, device=logits.device)
    tops = torch.empty(rows, dtype=torch.float32, device=logits.device)
    out = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    top_k, top_p, min_p = top_k.contiguous(), top_p.contiguous(), min_p.contiguous()
    searched, chunk = (min(most, triton.next_power_of_2(vocab)) for most in (_SEARCHED, _CHUNK))
    settings = launch.options(logits.device, waits=False)
    _thresholds[rows,](
        logits, stride, vocab, top_k, top_p, min_p, bounds, tops, CHUNK=searched, num_warps=16, **settings
    )
    _apply_thresholds[rows, triton.cdiv(vocab, chunk)](
        logits, stride, vocab, min_p, bounds, tops, out, CHUNK=chunk, num_warps=4, **settings
    )
    return out
