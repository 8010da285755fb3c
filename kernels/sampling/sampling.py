"""Sampling and scoring in Triton: a grid of rows by splits of the vocabulary, then one short program a row.

Split boundaries depend on the vocabulary alone and no sum crosses rows, so a row's result does not depend on its batch.
Logits are read once, in their own dtype. Sums are in fp32, in the same order for sampling and for scoring. Of many rows it is
instructions that take the time: those that a program of few logits needs for its sums are more than those for each logit. So a
program is one warp, with many of them, which hands few sums from thread to thread and waits for no other.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.launch import await_turn
from stoker.kernels.reference.sampling import SAMPLE_BLOCK

# Grids have rows first, where there may be 2^31 programs: 8192 rows of a window of 8, or a large chunk of scores, are more
# than the 65,535 of the other dimensions.
# 8 blocks a split: one row of 152k logits makes 149 programs, one for each multiprocessor of a large GPU.
_BLOCKS = 8
SPLIT = _BLOCKS * SAMPLE_BLOCK
_MOST_EACH = 16  # splits of a program
_QUADS = 64
# Arguments whose alignment follows from the number of rows: a kernel specialised on it would be compiled again in the middle
# of a rollout.
_WORK = ["best_ptr", "best_id_ptr", "top_ptr", "top_id_ptr"]
_SCORES = ["entropies_ptr", "logprobs_ptr", "entropy_ptr"]


def _launch(device: torch.device, *, waits: bool = True) -> dict[str, Any]:
    """Without fused multiply-adds the same arithmetic gives the same bits in each kernel that holds it."""
    return {"num_warps": 4} | launch.options(device, waits=waits, fused=False)


@triton.jit
def _exp(x):
    """exp of fp32 x, 0 where that is not a normal number. ``tl.exp`` takes twice the instructions, for the others."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _log_parts(exponent, f):
    """log(2^exponent (1 + f)), f in [sqrt(1/2) - 1, sqrt(2) - 1], to a few ulp: 2 artanh(f / (2 + f)) by its series."""
    s = tl.div_rn(f, f + 2.0)
    square = s * s
    tail = square * (1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7 + square * (1.0 / 9))))
    return exponent.to(tl.float32) * 0.6931471805599453 + (2.0 * s + 2.0 * s * tail)


@triton.jit
def _split_float(x):
    """x = 2^exponent (1 + f) of positive, normal fp32 x."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23  # the bits of sqrt(1/2)
    return exponent, (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _log(x):
    """log of fp32 x >= 0 or NaN. The hardware's is exact to 2^-22 only, absolutely: too coarse for a likely token."""
    exponent, f = _split_float(x)
    return tl.where(x > 0, _log_parts(exponent, f), tl.where(x == 0, float("-inf"), x))


@triton.jit
def _logsumexp(x, axis: tl.constexpr):
    """Over one axis of fp32 x; -inf of nothing but -inf, NaN where there is one."""
    top = tl.max(x, axis)
    top = tl.where(top == float("-inf"), 0.0, top)
    return top + _log(tl.sum(_exp(x - tl.expand_dims(top, axis)), axis))


@triton.jit
def _noise_kernel(seed_ptr, position_ptr, sample_ptr, out_ptr, count, QUADS: tl.constexpr, DEPENDENT: tl.constexpr):
    await_turn(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    quad = tl.program_id(1) * QUADS + tl.arange(0, QUADS)
    zero = tl.zeros([QUADS], tl.uint32)
    position = zero + tl.load(position_ptr + row).to(tl.uint32)
    sample_index = zero + tl.load(sample_ptr + row).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(seed_ptr + row), quad.to(tl.uint32), position, sample_index, zero, n_rounds=7)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    uniform = (words.to(tl.float32) + 0.5) * (2.0**-32 - 2.0**-56)
    exponent, f = _split_float(1.0 - uniform)
    exponential = -_log_parts(exponent, tl.where(exponent == 0, -uniform, f))  # where 1 - u is near 1, u says it better
    lane = tl.program_id(1) * QUADS * 4 + tl.arange(0, QUADS * 4)
    tl.store(out_ptr + row * count + lane, -_log(exponential), mask=lane < count)


def gumbel_noise(seed: Tensor, position: Tensor, sample_index: Tensor, vocab: int) -> Tensor:
    """As the reference. The random words are the same bits; two logarithms of a few ulp each, from additions,
    multiplications and divisions that round alike everywhere, leave the noise within 8 ulp of max(1, its size)."""
    rows, count = seed.shape[0], SAMPLE_BLOCK + triton.cdiv(vocab, SAMPLE_BLOCK)
    out = torch.empty(rows, count, dtype=torch.float32, device=seed.device)
    columns = (t.contiguous() for t in (seed, position, sample_index))
    grid = rows, triton.cdiv(count, 4 * _QUADS)
    _noise_kernel[grid](*columns, out, count, QUADS=_QUADS, **_launch(out.device))
    return out


@triton.jit
def _load_split(logits_ptr, stride, vocab, split, row, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """The logits of a split in fp32 [BLOCKS, BLOCK], -inf beyond the vocabulary."""
    ids = (split * BLOCKS + tl.arange(0, BLOCKS))[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    logits = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab, other=float("-inf"))
    return logits.to(tl.float32)


@triton.jit
def _largest(values):
    """Of [N], with its place: the first of equals. NaN is as little as there is: left in, it is Triton's version that decides."""
    return tl.max(tl.where(values == values, values, float("-inf")), 0, return_indices=True)


@triton.jit(do_not_specialize=["each"], do_not_specialize_on_alignment=["noise_ptr", *_WORK])
def _sample_splits(
    logits_ptr, stride, vocab, inverse_ptr, noise_ptr, noise_stride, masses_ptr, best_ptr, best_id_ptr, top_ptr,
    top_id_ptr, splits, each, GREEDY: tl.constexpr, RANDOM: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Of a row, ``each`` of its splits."""
    await_turn(DEPENDENT)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * each
    inverse = tl.load(inverse_ptr + row)
    for split in range(first, tl.minimum(first + each, splits)):
        at = row * splits + split
        logits = _load_split(logits_ptr, stride, vocab, split, row, BLOCKS, BLOCK)
        mass = _logsumexp(logits * inverse, 1)
        tl.store(masses_ptr + at, _logsumexp(mass, 0))
        if RANDOM:
            blocks = split * BLOCKS + tl.arange(0, BLOCKS)
            noise = tl.load(noise_ptr + row * noise_stride + BLOCK + blocks, mask=blocks * BLOCK < vocab, other=0.0)
            best, where = _largest(mass + noise)
            tl.store(best_ptr + at, best)
            tl.store(best_id_ptr + at, split * BLOCKS + where)
        if GREEDY:
            top, where = _largest(tl.reshape(logits, [BLOCKS * BLOCK]))
            tl.store(top_ptr + at, top)
            tl.store(top_id_ptr + at, split * BLOCKS * BLOCK + where)


@triton.jit
def _best_of(values_ptr, ids_ptr, splits, row, SPLITS: tl.constexpr):
    """The id of the largest value of a row's splits, the first of equals."""
    lanes = tl.arange(0, SPLITS)
    values = tl.load(values_ptr + row * splits + lanes, mask=lanes < splits, other=float("-inf"))
    ids = tl.load(ids_ptr + row * splits + lanes, mask=lanes < splits, other=0)
    _, best = _largest(values)
    return tl.sum(tl.where(lanes == best, ids, 0), 0)


@triton.jit
def _normaliser(masses_ptr, splits, row, SPLITS: tl.constexpr):
    lanes = tl.arange(0, SPLITS)
    masses = tl.load(masses_ptr + row * splits + lanes, mask=lanes < splits, other=float("-inf"))
    return masses, _logsumexp(masses, 0)


@triton.jit(do_not_specialize_on_alignment=["noise_ptr", *_WORK])
def _sample_rows(
    logits_ptr, stride, vocab, inverse_ptr, greedy_ptr, noise_ptr, noise_stride, masses_ptr, best_ptr, best_id_ptr,
    top_ptr, top_id_ptr, tokens_ptr, logprobs_ptr, splits, GREEDY: tl.constexpr, RANDOM: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_turn(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    inverse = tl.load(inverse_ptr + row)
    _, normaliser = _normaliser(masses_ptr, splits, row, SPLITS)
    if RANDOM:
        first = _best_of(best_ptr, best_id_ptr, splits, row, SPLITS) * BLOCK
        lanes = tl.arange(0, BLOCK)
        inside = first + lanes < vocab
        logits = tl.load(logits_ptr + row * stride + first + lanes, mask=inside, other=float("-inf")).to(tl.float32)
        noise = tl.load(noise_ptr + row * noise_stride + lanes)
        _, where = _largest(logits * inverse + noise)
        token = first + where
        if GREEDY:
            token = tl.where(tl.load(greedy_ptr + row), _best_of(top_ptr, top_id_ptr, splits, row, SPLITS), token)
    else:
        token = _best_of(top_ptr, top_id_ptr, splits, row, SPLITS)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    chosen = tl.load(logits_ptr + row * stride + token).to(tl.float32) * inverse
    tl.store(logprobs_ptr + row, chosen - normaliser)


def _splits_each(rows: int, splits: int, device: torch.device) -> int:
    """How many splits a program takes, one after the other: as many as let all programs run at once, as to start one takes time."""
    return min(int(triton.cdiv(rows * splits, 32 * launch.multiprocessors(device))), _MOST_EACH)


def sample(
    logits: Tensor, inverse_temperature: Tensor, greedy: Tensor | None, noise: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As the reference; a row with a NaN, or of nothing but -inf, has log-probability NaN and some valid token.

    The tokens are the reference's, except where two sums tie to rounding. Greedy tokens are always the same: the first of
    equal logits.
    """
    logits = launch.in_rows(logits)
    (rows, vocab), stride = logits.shape, logits.stride(0)
    splits = triton.cdiv(vocab, SPLIT)
    floats = torch.empty(3, rows, splits, dtype=torch.float32, device=logits.device)
    ids = torch.empty(2, rows, splits, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    inverse = inverse_temperature.contiguous()
    random = noise is not None
    modes = {"GREEDY": greedy is not None or not random, "RANDOM": random, "BLOCK": SAMPLE_BLOCK}
    modes |= _launch(logits.device)
    each = _splits_each(rows, splits, logits.device)
    draws, draws_stride = (noise, noise.stride(0)) if noise is not None else (floats, 0)
    work = (floats[0], floats[1], ids[0], floats[2], ids[1])
    _sample_splits[rows, triton.cdiv(splits, each)](
        logits, stride, vocab, inverse, draws, draws_stride, *work, splits, each,
        BLOCKS=_BLOCKS, **modes | {"num_warps": 1},
    )  # fmt: skip
    chosen_greedy = greedy.contiguous() if greedy is not None else tokens
    _sample_rows[rows,](
        logits, stride, vocab, inverse, chosen_greedy, draws, draws_stride, *work, tokens, logprobs, splits,
        SPLITS=triton.next_power_of_2(splits), **modes,
    )  # fmt: skip
    return tokens, logprobs


@triton.jit(do_not_specialize=["each"], do_not_specialize_on_alignment=_SCORES)
def _score_splits(
    logits_ptr, stride, vocab, inverse_ptr, tokens_ptr, masses_ptr, entropies_ptr, larger_ptr, splits, each,
    FULL: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a row, ``each`` of its splits."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * each
    inverse = tl.load(inverse_ptr + row)
    if FULL:
        chosen = tl.load(logits_ptr + row * stride + tl.load(tokens_ptr + row)).to(tl.float32)
    for split in range(first, tl.minimum(first + each, splits)):
        at = row * splits + split
        logits = _load_split(logits_ptr, stride, vocab, split, row, BLOCKS, BLOCK)
        scaled = logits * inverse
        mass = _logsumexp(_logsumexp(scaled, 1), 0)
        tl.store(masses_ptr + at, mass)
        if FULL:
            tl.store(larger_ptr + at, tl.sum(tl.sum((logits > chosen).to(tl.int32), 1), 0))
            surprise = tl.where(scaled == float("-inf"), 0.0, mass - scaled)
            within = tl.sum(tl.sum(tl.where(scaled == float("-inf"), 0.0, _exp(-surprise)) * surprise, 1), 0)
            tl.store(entropies_ptr + at, within)


@triton.jit(do_not_specialize_on_alignment=_SCORES)
def _score_rows(
    logits_ptr, stride, inverse_ptr, tokens_ptr, masses_ptr, entropies_ptr, larger_ptr, logprobs_ptr, entropy_ptr,
    rank_ptr, splits, FULL: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    masses, normaliser = _normaliser(masses_ptr, splits, row, SPLITS)
    chosen = tl.load(logits_ptr + row * stride + tl.load(tokens_ptr + row)).to(tl.float32) * tl.load(inverse_ptr + row)
    tl.store(logprobs_ptr + row, chosen - normaliser)
    if FULL:
        lanes = tl.arange(0, SPLITS)
        inside = lanes < splits
        within = tl.load(entropies_ptr + row * splits + lanes, mask=inside, other=0.0)
        # The entropy of choosing a split, and of choosing within it: sums of terms that are not negative.
        surprise = tl.where(masses == float("-inf"), 0.0, normaliser - masses)
        weight = tl.where(masses == float("-inf"), 0.0, _exp(-surprise))
        entropy = tl.sum(weight * (surprise + within), 0)
        tl.store(entropy_ptr + row, tl.where(normaliser == float("-inf"), float("nan"), entropy))
        larger = tl.load(larger_ptr + row * splits + lanes, mask=inside, other=0)
        tl.store(rank_ptr + row, tl.sum(larger, 0).to(tl.int64) + 1)


def _score(logits: Tensor, inverse_temperature: Tensor, tokens: Tensor, full: bool) -> tuple[Tensor, Tensor, Tensor]:
    logits = launch.in_rows(logits)
    (rows, vocab), stride = logits.shape, logits.stride(0)
    splits = triton.cdiv(vocab, SPLIT)
    masses, entropies = torch.empty(2, rows, splits, dtype=torch.float32, device=logits.device)
    larger = torch.empty(rows, splits, dtype=torch.int32, device=logits.device)
    logprobs, entropy = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    rank = torch.empty(rows, dtype=torch.int64, device=logits.device)
    inverse, tokens = inverse_temperature.contiguous(), tokens.contiguous()
    work = (masses, entropies, larger)
    settings = {"FULL": full} | _launch(logits.device, waits=False)
    each = _splits_each(rows, splits, logits.device)
    _score_splits[rows, triton.cdiv(splits, each)](
        logits, stride, vocab, inverse, tokens, *work, splits, each,
        BLOCKS=_BLOCKS, BLOCK=SAMPLE_BLOCK, **settings | {"num_warps": 1},
    )  # fmt: skip
    _score_rows[rows,](
        logits, stride, inverse, tokens, *work, logprobs, entropy, rank, splits,
        SPLITS=triton.next_power_of_2(splits), **settings,
    )  # fmt: skip
    return logprobs, entropy, rank


def token_logprobs(logits: Tensor, inverse_temperature: Tensor, tokens: Tensor) -> Tensor:
    """As the reference; the normaliser is summed as in ``sample``, so that a token just sampled scores the same."""
    return _score(logits, inverse_temperature, tokens, full=False)[0]


def score_tokens(logits: Tensor, inverse_temperature: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference; the log-probability is that of ``token_logprobs``."""
    return _score(logits, inverse_temperature, tokens, full=True)
