"""Sampling as plain torch: counter-based noise, Gumbel-max, truncation, log-probabilities of given tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

SAMPLE_BLOCK = 128
_MASK32 = 0xFFFFFFFF
# Philox4x32 with 7 rounds, the fewest that pass BigCrush (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
# SC 2011, table 2). The constants are the paper's.
_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LEAST = torch.finfo(torch.float32).min
_CACHED = 1 << 16  # fp32 numbers of each operand that stay in the cache of a core


def philox(key: Tensor, counter: Tensor, rounds: int = _ROUNDS) -> Tensor:
    """Random 32-bit words. key: int64 [2, ...]; counter: int64 [4, ...], words that broadcast; returns int64 [4, ...]."""
    c0, c1, c2, c3 = counter.unbind()
    k0, k1 = key.unbind()
    for _ in range(rounds):
        # In int64 the products wrap; their low and middle words, all that is kept, are exact.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (second >> 32).bitwise_and_(_MASK32).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (first >> 32).bitwise_and_(_MASK32).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = second.bitwise_and_(_MASK32), first.bitwise_and_(_MASK32)
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return torch.stack((c0, c1, c2, c3))


def gumbel_noise(seed: Tensor, position: Tensor, sample_index: Tensor, vocab: int) -> Tensor:
    """The standard Gumbel variates that ``sample`` takes, a pure function of (seed, sample, position, index).

    seed: int64 [R], 63 bits used; position, sample_index: int64 [R]. Returns fp32 [R, SAMPLE_BLOCK + blocks]: for the
    tokens of a block, then for the blocks of the vocabulary.
    """
    count = SAMPLE_BLOCK + -(-vocab // SAMPLE_BLOCK)
    quads = -(-count // 4)
    key = torch.stack((seed & _MASK32, (seed >> 32) & _MASK32))[:, :, None]
    counter = torch.zeros(4, seed.shape[0], quads, dtype=torch.long, device=seed.device)
    counter[0] = torch.arange(quads, device=seed.device)
    counter[1] = position[:, None]
    counter[2] = sample_index[:, None]
    words = philox(key, counter)  # word j of quad q is number 4 q + j
    # The largest words round up to 2^32: scaled by the float before 2^-32, so that no uniform is 1, no noise infinite.
    uniform = words.permute(1, 2, 0).flatten(1)[:, :count].float().add_(0.5).mul_(2.0**-32 - 2.0**-56)
    # The exponential variate -log(1 - u) decides by its small values, and there it keeps full relative precision.
    return torch.log1p(uniform.neg_()).neg_().log_().neg_()


def sample(
    logits: Tensor, inverse_temperature: Tensor, greedy: Tensor | None, noise: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token a row from softmax(logits / temperature), and its log-probability under it.

    Gumbel-max in two stages, which is exact: first a block of ``SAMPLE_BLOCK`` tokens by the block's log-sum-exp (needed
    for the normaliser anyway), then a token within it. This takes V / 128 + 128 random numbers a row and not V.

    logits: [R, V] of any float dtype, computed with in fp32, -inf where a token is excluded; inverse_temperature: fp32
    [R]; greedy: bool [R], rows that take the argmax, None where no row does; noise: of ``gumbel_noise``, None where
    every row is greedy. Returns (int64 [R], fp32 [R]).
    """
    rows, vocab = logits.shape
    scaled = logits.float() * inverse_temperature[:, None]
    blocks = -(-vocab // SAMPLE_BLOCK)
    missing = blocks * SAMPLE_BLOCK - vocab  # mostly none, and then a copy of all logits would be a seventh of the work
    padded = F.pad(scaled, (0, missing), value=float("-inf")) if missing else scaled
    padded = padded.view(rows, blocks, SAMPLE_BLOCK)
    mass = logsumexp(padded)
    normaliser = logsumexp(mass) if blocks > 1 else mass[:, 0]
    tokens = logits.argmax(-1) if greedy is not None or noise is None else None
    if noise is not None:
        inside, offset = padded[:, 0], None
        if blocks > 1:
            block = (mass + noise[:, SAMPLE_BLOCK:]).argmax(-1)
            inside = padded.gather(1, block[:, None, None].expand(rows, 1, SAMPLE_BLOCK))[:, 0]
            offset = block * SAMPLE_BLOCK
        drawn = (inside + noise[:, :SAMPLE_BLOCK]).argmax(-1)
        drawn = drawn if offset is None else drawn + offset
        tokens = drawn if tokens is None or greedy is None else torch.where(greedy, tokens, drawn)
    assert tokens is not None
    return tokens, scaled.gather(1, tokens[:, None])[:, 0] - normaliser


def token_logprobs(logits: Tensor, inverse_temperature: Tensor, tokens: Tensor) -> Tensor:
    """``log_softmax(logits / temperature)[token]``. logits: [R, V] of any float dtype; tokens: int64 [R]; fp32 [R]."""

    def some(logits: Tensor, inverse: Tensor, tokens: Tensor) -> Tensor:
        # A row that holds Inf is to come out as NaN, by which it is noticed; minus the logsumexp it would be -Inf.
        return (logits.float() * inverse[:, None]).log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    return torch.cat([some(*part) for part in _parts(logits, inverse_temperature, tokens)])


def score_tokens(logits: Tensor, inverse_temperature: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What softmax(logits / temperature) says of given tokens: log-probability, entropy in nats, and rank from 1.

    logits: [R, V] of any float dtype, summed in fp32; inverse_temperature: fp32 [R]; tokens: int64 [R]. The rank is one
    more than the number of tokens with a larger logit. Returns fp32 [R], fp32 [R], int64 [R].
    """

    def some(logits: Tensor, inverse: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_probs = (logits.float() * inverse[:, None]).log_softmax(-1)
        chosen = log_probs.gather(1, tokens[:, None])[:, 0]
        rank = (logits > logits.gather(1, tokens[:, None])).sum(-1) + 1
        probs = log_probs.exp()
        entropy = -probs.mul_(log_probs.clamp_(min=_LEAST)).sum(-1)  # 0 * -inf is to be 0, and NaN to stay
        return chosen, entropy, rank

    logprobs, entropy, rank = zip(*(some(*part) for part in _parts(logits, inverse_temperature, tokens)), strict=True)
    return torch.cat(logprobs), torch.cat(entropy), torch.cat(rank)


def logsumexp(x: Tensor) -> Tensor:
    """``x.logsumexp(-1)``; NaN where there is an Inf.

    Exponentials that underflow take a CPU up to 35 times as long, but in a softmax, which computes them otherwise.
    """
    largest = x.amax(-1)
    return torch.where(largest == float("-inf"), largest, largest - x.log_softmax(-1).amax(-1))


def rows_within(numbers: int, vocab: int) -> int:
    """How many rows hold that many numbers for each thread; one a thread at least, which is how torch divides most work."""
    threads = torch.get_num_threads()
    return max(threads, numbers * threads // vocab)


def _parts(logits: Tensor, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows in parts that a CPU's caches hold with what an operation makes of them: the work is reading memory."""
    rows = rows_within(_CACHED, logits.shape[1])
    for start in range(0, max(len(logits), 1), rows):
        yield tuple(tensor[start : start + rows] for tensor in (logits, *columns))


def truncate(logits: Tensor, inverse_temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """``logits / temperature`` with -inf for tokens outside top-k, then top-p, then min-p, each applied to what the one before left.

    logits: [R, V] of any float dtype; inverse_temperature: fp32 [R]; top_k: int64 [R], 0 is off; top_p, min_p: fp32 [R], off
    at 1 and 0. Returns fp32 [R, V]. Tokens with equal logits are kept or excluded together, so the order of sorting
    does not matter. Top-k keeps the tokens with fewer than k larger ones; top-p those whose more likely tokens have less
    than p of the mass; min-p those with at least min_p of the largest probability. The most likely token always stays, and
    so does NaN.
    """
    vocab = logits.shape[-1]
    values, order = (logits.float() * inverse_temperature[:, None]).sort(dim=-1, descending=True, stable=True)
    k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)[:, None]
    values = values.masked_fill(values < values.gather(1, k - 1), float("-inf"))
    probs = values.softmax(-1)
    inside = probs.cumsum(-1) - probs < top_p[:, None]  # by the mass of the more likely tokens
    last = torch.where(top_p < 1.0, inside.sum(-1), vocab).clamp(min=1)[:, None] - 1
    drop = values < values.gather(1, last)
    drop |= probs < min_p[:, None] * probs[:, :1]
    values = values.masked_fill(drop, float("-inf"))
    return torch.empty_like(values).scatter_(1, order, values)
