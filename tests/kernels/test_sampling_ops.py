"""Counter-based noise, sampling, truncation and log-probabilities of tokens, as the operations they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from chances import assert_follows
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from stoker.kernels.cpu import sampling as cpu_sampling
from stoker.kernels.ops import CPU
from stoker.kernels.reference import sampling
from stoker.kernels.reference.sampling import (
    SAMPLE_BLOCK,
    gumbel_noise,
    philox,
    sample,
    score_tokens,
    token_logprobs,
    truncate,
)

INF = float("inf")

# Random123's tests/kat_vectors: rounds, counter, key, output.
KNOWN_ANSWERS = """
7 00000000 00000000 00000000 00000000 00000000 00000000 5f6fb709 0d893f64 4f121f81 4f730a48
7 ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 5207ddc2 45165e59 4d8ee751 8c52f662
7 243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 4dfccaba 190a87f0 c47362ba b6b5242a
10 00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8
10 ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd
10 243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1
"""


def draw(logits: Tensor, count: int, temperature: float = 1.0, seed: int = 0) -> Tensor:
    """``count`` tokens of one row of logits, each at another position."""
    tokens = []
    for start in range(0, count, 4096):
        rows = min(4096, count - start)
        numbers = torch.full((rows,), seed), torch.arange(start, start + rows), torch.zeros(rows, dtype=torch.long)
        noise = gumbel_noise(*numbers, logits.shape[-1])
        drawn, _ = sample(logits.expand(rows, -1), torch.full((rows,), 1 / temperature), None, noise)
        tokens.append(drawn)
    return torch.cat(tokens)


# -- noise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", KNOWN_ANSWERS.strip().splitlines())
def test_philox_known_answers(line: str) -> None:
    rounds, *words = line.split()
    numbers = [int(word, 16) for word in words]
    counter, key, answer = numbers[:4], numbers[4:6], numbers[6:]
    for shape in ((), (1,), (3, 2)):
        out = philox(
            *(torch.tensor(t).view(-1, *[1] * len(shape)).expand(-1, *shape) for t in (key, counter)), int(rounds)
        )
        assert out.shape == (4, *shape)
        assert all(out.reshape(4, -1)[:, i].tolist() == answer for i in range(max(1, math.prod(shape))))


def test_seven_rounds_unless_asked() -> None:
    zero = torch.zeros(4, 1, dtype=torch.long)
    assert torch.equal(philox(zero[:2], zero), philox(zero[:2], zero, 7))


def test_noise_is_minus_log_of_minus_log_of_the_words() -> None:
    """Number i of a row is word i % 4 of the counter (i // 4, position, sample, 0) under the seed's two halves."""
    seed, position, index = 0x1234_5678_9ABC_DEF0, 77, 3
    noise = gumbel_noise(*(torch.tensor([n]) for n in (seed, position, index)), 2 * SAMPLE_BLOCK + 1)
    assert noise.dtype == torch.float32 and noise.shape == (1, SAMPLE_BLOCK + 3)
    key = torch.tensor([[0x9ABCDEF0], [0x12345678]])
    words = [
        philox(key, torch.tensor([[i // 4], [position], [index], [0]]))[i % 4].item() for i in range(noise.shape[1])
    ]
    uniform = (torch.tensor(words, dtype=torch.float64) + 0.5) / 2**32
    wanted = -torch.log(-torch.log1p(-uniform))
    torch.testing.assert_close(noise[0].double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 200, 2**32 - 100, 2**32 - 1])
def test_noise_is_finite_whatever_the_word(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "philox", lambda key, counter: torch.full_like(counter, word))
    one = torch.ones(1, dtype=torch.long)
    noise = gumbel_noise(one, one, one, 5)
    assert noise.isfinite().all()


def test_noise_follows_gumbels_distribution() -> None:
    rows = torch.arange(64)
    noise = gumbel_noise(rows, rows * 0 + 5, rows * 0, (4096 - SAMPLE_BLOCK) * SAMPLE_BLOCK).double().flatten()
    assert len(noise) == 64 * 4096
    cells = torch.exp(-torch.exp(-noise)).mul(100).long()  # its distribution function, so uniform
    assert_follows(cells.bincount(minlength=100), torch.full((100,), 0.01))
    # The upper tail decides who wins: there too.
    tail = (-(-torch.exp(-noise)).expm1()).mul(2**12)  # P(more than this), times 4096
    cells = tail[tail < 1].mul(8).long()
    assert_follows(cells.bincount(minlength=8), torch.full((8,), 1 / 8))
    assert abs(len(cells) - 64) < 4 * 8


# -- sample ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
@pytest.mark.parametrize(
    "vocab", [1, 2, 5, SAMPLE_BLOCK - 1, SAMPLE_BLOCK, SAMPLE_BLOCK + 1, 3 * SAMPLE_BLOCK + 7, 1000]
)
def test_tokens_follow_the_softmax(vocab: int, temperature: float) -> None:
    logits = torch.randn(vocab) * 2
    tokens = draw(logits, 16384, temperature, seed=vocab)
    assert_follows(tokens.bincount(minlength=vocab), (logits.double() / temperature).softmax(0))


def test_excluded_tokens_are_never_drawn() -> None:
    logits = torch.randn(600)
    logits[torch.rand(600) < 0.7] = -INF
    logits[SAMPLE_BLOCK : 2 * SAMPLE_BLOCK] = -INF  # a whole block of them
    logits[0] = logits[-1] = -INF
    tokens = draw(logits, 16384)
    assert_follows(tokens.bincount(minlength=600), logits.double().softmax(0))
    for only in (0, 1, SAMPLE_BLOCK, 599):
        alone = torch.full((600,), -INF)
        alone[only] = -50.0
        assert draw(alone, 512).eq(only).all()


def test_an_excluded_token_is_not_drawn_by_the_largest_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "philox", lambda key, counter: torch.full_like(counter, 2**32 - 1))
    logits = torch.full((600,), -INF)
    logits[300] = 0.0
    assert draw(logits, 4).eq(300).all()


def test_a_peaked_row_and_a_shifted_one() -> None:
    peaked = torch.zeros(300)
    peaked[200] = 80.0
    assert draw(peaked, 512).eq(200).all()
    logits = torch.randn(300)
    near = draw(logits, 4096).eq(draw(logits + 64, 4096)).float().mean()
    assert near > 0.999, "only where rounding decides"


def test_draws_are_independent() -> None:
    """Over pairs that differ in one of seed, sample and position, by one or in a high bit, tokens are uncorrelated."""
    count, vocab = 4096, 6
    logits = torch.zeros(count, vocab)
    zero, at = torch.zeros(count, dtype=torch.long), torch.arange(count) * 3

    def tokens(seed: Tensor, position: Tensor, index: Tensor) -> Tensor:
        return sample(logits, torch.ones(count), None, gumbel_noise(seed, position, index, vocab))[0]

    for base in ((zero, at, zero), (at, zero, zero), (zero, zero, at)):
        first = tokens(*base)
        for axis, step in product(range(3), (1, 2, 2**20, 2**32, 2**61)):
            if axis and step > 2**20:
                continue  # positions and samples are small numbers
            moved = [t + step if i == axis else t for i, t in enumerate(base)]
            pairs = (first * vocab + tokens(*moved)).bincount(minlength=vocab**2)
            assert_follows(pairs, torch.full((vocab**2,), vocab**-2.0))


def test_position_and_sample_are_not_the_same_thing() -> None:
    seed, a, b = torch.zeros(64, dtype=torch.long), torch.arange(64), torch.arange(64) + 64
    assert not gumbel_noise(seed, a, b, 1000).eq(gumbel_noise(seed, b, a, 1000)).any()


def test_a_row_does_not_depend_on_its_batch() -> None:
    rows, vocab = 23, 3 * SAMPLE_BLOCK + 50
    numbers = torch.randint(2**62, (rows,)), torch.randint(1000, (rows,)), torch.randint(8, (rows,))
    noise = gumbel_noise(*numbers, vocab)
    logits, inverse, greedy = torch.randn(rows, vocab) * 3, torch.rand(rows) + 0.5, torch.rand(rows) < 0.3
    tokens, logprobs = sample(logits, inverse, greedy, noise)
    for i in range(rows):
        row = slice(i, i + 1)
        alone = gumbel_noise(*(n[row] for n in numbers), vocab)
        assert torch.equal(alone, noise[row])
        token, logprob = sample(logits[row], inverse[row], *((greedy[row], None) if greedy[i] else (None, alone)))
        assert torch.equal(token, tokens[row]) and torch.equal(logprob, logprobs[row])
    order = torch.randperm(rows)
    padded = [torch.cat((t[order], torch.zeros_like(t[:5]))) for t in (logits, inverse, greedy)]
    again = sample(*padded, gumbel_noise(*(torch.cat((n[order], n[:5])) for n in numbers), vocab))
    assert torch.equal(again[0][:rows], tokens[order]) and torch.equal(again[1][:rows], logprobs[order])


def test_greedy_rows_take_the_most_likely_token() -> None:
    logits = torch.randn(64, 500)
    greedy = torch.arange(64) % 2 == 0
    at = torch.arange(64)
    tokens, logprobs = sample(logits, torch.ones(64), greedy, gumbel_noise(at, at, at, 500))
    assert torch.equal(tokens[greedy], logits.argmax(-1)[greedy])
    assert tokens[~greedy].ne(logits.argmax(-1)[~greedy]).any()
    wanted = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("vocab", [7, SAMPLE_BLOCK, 151_936])
def test_logprobs_are_those_of_the_log_softmax(vocab: int) -> None:
    logits = torch.randn(6, vocab) * 6
    logits[:, 1::3] = -INF
    inverse = torch.tensor([0.2, 0.5, 1.0, 1.0, 2.0, 3.0])
    at = torch.arange(6)
    tokens, logprobs = sample(logits, inverse, None, gumbel_noise(at, at, at, vocab))
    full = (logits.double() * inverse.double()[:, None]).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), full.gather(1, tokens[:, None])[:, 0], rtol=0, atol=1e-5)
    given = torch.randint(vocab // 3, (6,)) * 3
    wanted = full.gather(1, given[:, None])[:, 0]
    torch.testing.assert_close(token_logprobs(logits, inverse, given).double(), wanted, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5, 0])
def test_scores_are_those_of_the_whole_distribution(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several parts of the rows, with tokens that cannot be, and in a row of its own, NaN."""
    monkeypatch.setattr(sampling, "_CACHED", 2 * 50)
    logits = torch.randn(rows, 50) * 6
    logits[:, 1::3] = -INF
    logits[2:3, 4] = math.nan
    inverse, given = torch.rand(rows) + 0.5, 3 * torch.arange(rows)
    before = logits.clone()
    logprobs, entropy, ranks = score_tokens(logits, inverse, given)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    full = (logits.double() * inverse.double()[:, None]).log_softmax(-1)
    options = {"rtol": 1e-6, "atol": 1e-5, "equal_nan": True}
    torch.testing.assert_close(logprobs.double(), full.gather(1, given[:, None])[:, 0], **options)
    probs = full.exp()
    torch.testing.assert_close(entropy.double(), -torch.where(probs == 0, 0.0, probs * full).sum(-1), **options)
    assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [row == 2 for row in range(rows)]
    assert torch.equal(ranks, (logits > logits.gather(1, given[:, None])).sum(-1) + 1)


# -- truncate ----------------------------------------------------------------------------------------------------


def warped(logits: Tensor, k: int, p: float, min_p: float) -> Tensor:
    scores = logits[None].clone()
    ids = torch.zeros(1, 0, dtype=torch.long)
    warpers = []
    if k > 0:
        warpers.append(TopKLogitsWarper(k))
    if p < 1:
        warpers.append(TopPLogitsWarper(p))
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    for warper in warpers:
        scores = warper(ids, scores)
    return scores[0]


by_each = pytest.mark.parametrize("truncate", [truncate, CPU.truncate], ids=["reference", "cpu"])
Truncate = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@by_each
@pytest.mark.parametrize("vocab", [10, 1000])
def test_truncation_keeps_what_transformers_keeps(vocab: int, truncate: Truncate) -> None:
    """Every combination in one batch, a row each."""
    settings = list(product([0, 1, 3, 8, 5000], [1.0, 0.95, 0.5, 0.05, 1e-6], [0.0, 0.01, 0.2, 1.0]))
    top_k, top_p, min_p = zip(*settings, strict=True)
    logits, inverse = torch.randn(len(settings), vocab) * 3, torch.rand(len(settings)) + 0.5
    logits[::3, ::4] = -INF  # excluded before
    out = truncate(logits, inverse, torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p))
    scaled = logits * inverse[:, None]
    wanted = torch.stack([warped(row, *setting) for row, setting in zip(scaled, settings, strict=True)])
    assert torch.equal(out, wanted)
    assert out.isfinite().any(-1).all()


@by_each
def test_tokens_tied_with_the_last_of_top_k_stay(truncate: Truncate) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0, 2.0]])
    out = truncate(logits, torch.ones(1), torch.tensor([2]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert torch.equal(out, warped(logits[0], 2, 1.0, 0.0)[None])
    assert out.isfinite().tolist() == [[False, True, True, True, False, True]]


@by_each
def test_a_row_that_asks_for_nothing_is_untouched_by_its_neighbours(truncate: Truncate) -> None:
    logits = torch.randn(3, 700)
    cut = torch.tensor([0, 1, 0]), torch.tensor([1.0, 0.1, 1.0]), torch.tensor([0.0, 0.5, 0.0])
    out = truncate(logits, torch.ones(3), *cut)
    assert torch.equal(out[::2], logits[::2]) and out[1].isfinite().sum() == 1


@pytest.mark.parametrize("spread", [0.1, 2.0, 8.0, 100.0])
@pytest.mark.parametrize(("few", "bins", "ordered"), [(256, 1024, 1024), (16, 8, 4)])
def test_on_a_cpu_a_row_is_truncated_as_it_is_alone(
    few: int, bins: int, ordered: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of the most likely tokens its neighbours have the operation look at, and however it then finds the last."""
    for name, value in (("_FEW", few), ("_BINS", bins), ("_SORTED", ordered)):
        monkeypatch.setattr(cpu_sampling, name, value)
    settings = list(product([0, 4, 5, 100, 319], [1.0, 0.99, 0.7, 1e-6], [0.0, 0.05]))
    cut = [torch.rand(len(settings)) + 0.5, *map(torch.tensor, zip(*settings, strict=True))]
    logits = torch.randn(len(settings), 320) * spread
    logits[::7] = spread  # all alike
    out = CPU.truncate(logits, *cut)
    assert torch.equal(out, truncate(logits, *cut))
    assert torch.equal(
        out, torch.cat([CPU.truncate(*row) for row in zip(*(t.split(1) for t in (logits, *cut)), strict=True)])
    )


def test_on_a_cpu_nothing_is_taken_from_a_row_that_is_not_a_number() -> None:
    logits = torch.randn(3, 130)
    logits[1, 7], logits[2] = math.nan, -INF
    cut = torch.ones(3), torch.tensor([2, 0, 2]), torch.tensor([0.9, 0.9, 0.9]), torch.tensor([0.1, 0.1, 0.1])
    out = CPU.truncate(logits, *cut)
    assert torch.equal(out[0], truncate(logits[:1], *(column[:1] for column in cut))[0])
    assert out[1, 7].isnan() and out[2].eq(-INF).all()
