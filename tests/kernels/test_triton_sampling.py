"""Sampling, scoring and truncation in Triton: against fp64, and against the torch reference where bits are promised."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from chances import assert_follows
from torch import Tensor

from stoker.kernels.ops import CPU, REFERENCE, Ops
from stoker.kernels.sampling import sampling, truncation
from stoker.kernels.sampling.sampling import SPLIT
from stoker.kernels.triton_ops import TRITON

INF = float("inf")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABS = [1, 5, 127, 128, 129, 1000, 4099]
CASES = [*product(VOCABS, [torch.float32]), (129, torch.float16), (1000, torch.float16)]
gpu = pytest.mark.gpu
BIG = 151_936


def numbers(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.randint(2**62, (rows,), device=DEVICE) * 2 + 1
    return seed, torch.arange(rows, device=DEVICE) * 7, torch.arange(rows, device=DEVICE) % 3


def ones(rows: int) -> Tensor:
    return torch.ones(rows, device=DEVICE)


def on(*values: list[float] | list[int]) -> list[Tensor]:
    return [torch.tensor(v, device=DEVICE) for v in values]


def fp64_logprobs(logits: Tensor, inverse: Tensor) -> Tensor:
    return (logits.float() * inverse[:, None]).double().log_softmax(-1)


# -- noise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 129, 40_000])
def test_noise_is_that_of_the_reference(vocab: int) -> None:
    at = numbers(3)
    at[0][0] = 2**63 - 1
    mine, reference = TRITON.gumbel_noise(*at, vocab), REFERENCE.gumbel_noise(*at, vocab)
    assert mine.shape == reference.shape and mine.dtype == torch.float32
    # Eight units in the last place of 1, or of the noise where it is larger. Another word would show at once.
    assert ((mine - reference).abs() <= 8 * 2.0**-23 * reference.abs().clamp(min=1)).all()


def test_the_noise_of_many_rows_and_steps_is_a_grid_that_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid has 2^31 - 1 programs along its first dimension, and 65,535 along each other."""
    grids: list[tuple[int, ...]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(sampling, "_noise_kernel", Recorder())
    at = torch.empty(8192 * 8, dtype=torch.long, device="meta")
    out = TRITON.gumbel_noise(at, at, at, BIG)
    ((x, y),) = grids
    assert x < 2**31 and y <= 65_535
    assert x * y * 4 * sampling._QUADS >= out.numel(), "each program writes that many"


def test_many_rows_are_grids_that_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above: sampled at a time, or scored in one chunk."""
    grids: list[tuple[int, ...]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *_, **__: None

    kernels = {sampling: ("_sample_splits", "_sample_rows", "_score_splits", "_score_rows")}
    kernels |= {truncation: ("_thresholds", "_apply_thresholds")}
    for module, names in kernels.items():
        for name in names:
            monkeypatch.setattr(module, name, Recorder())
    rows = 2**17
    logits = torch.empty(rows, BIG, device="meta")
    each, ids = torch.empty(rows, device="meta"), torch.empty(rows, dtype=torch.long, device="meta")
    TRITON.sample(logits, each, None, None)
    TRITON.score_tokens(logits, each, ids)
    TRITON.truncate(logits, each, ids, each, each)
    assert len(grids) == 6 and all(x == rows and all(y <= 65_535 for y in others) for x, *others in grids)


def test_noise_is_exact_in_both_tails() -> None:
    """Over enough words that both tails are met; a large noise is a small exponential variate."""
    at = numbers(2)
    mine = TRITON.gumbel_noise(*at, 128 * 8192)
    reference = REFERENCE.gumbel_noise(*at, 128 * 8192)
    assert mine.max() > 8 and mine.min() < -2
    assert ((mine - reference).abs() <= 8 * 2.0**-23 * reference.abs().clamp(min=1)).all()


def test_noise_of_a_row_does_not_depend_on_its_batch() -> None:
    at = numbers(5)
    noise = TRITON.gumbel_noise(*at, 1000)
    for i in range(5):
        assert torch.equal(TRITON.gumbel_noise(*(n[i : i + 1] for n in at), 1000)[0], noise[i])


# -- sample ------------------------------------------------------------------------------------------------------


def check_sample(vocab: int, dtype: torch.dtype, rows: int = 4) -> None:
    logits = (torch.randn(rows, vocab, device=DEVICE) * 3).to(dtype)
    logits[:, 3::5] = -INF
    inverse = torch.linspace(0.4, 3, rows, device=DEVICE)
    noise = TRITON.gumbel_noise(*numbers(rows), vocab)
    greedy = torch.arange(rows, device=DEVICE) % 3 == 0
    for case in ((None, noise), (greedy, noise), (greedy | True, None), (None, None)):
        tokens, logprobs = TRITON.sample(logits, inverse, *case)
        expected, _ = REFERENCE.sample(logits, inverse, *case)
        assert tokens.dtype == torch.int64 and torch.equal(tokens, expected)
        wanted = fp64_logprobs(logits, inverse).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-6, atol=5e-6)


@pytest.mark.parametrize(("vocab", "dtype"), CASES, ids=str)
def test_tokens_are_those_of_the_reference(vocab: int, dtype: torch.dtype) -> None:
    check_sample(vocab, dtype)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tokens_of_a_large_vocabulary(dtype: torch.dtype) -> None:
    check_sample(BIG, dtype, rows=33)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_however_many_splits_a_program_takes(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which depends on how many rows there are: one at a time, some with one left for the last, or all."""
    vocab, given = 4 * SPLIT + 200, torch.arange(3, device=DEVICE)
    logits, noise = torch.randn(3, vocab, device=DEVICE).to(dtype), TRITON.gumbel_noise(*numbers(3), vocab)
    found = []
    for each in (1, 2, 9):
        monkeypatch.setattr(sampling, "_splits_each", lambda *_, each=each: each)
        results = [*TRITON.sample(logits, ones(3), given == 1, noise), *TRITON.score_tokens(logits, ones(3), given)]
        found.append(torch.stack([result.double() for result in results]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    monkeypatch.undo()
    assert [sampling._splits_each(rows, 126, torch.device("cpu")) for rows in (1, 3, 2**17)] == [
        2,
        4,
        sampling._MOST_EACH,
    ]


def test_tokens_follow_the_softmax() -> None:
    vocab, rows = 200, 20_000 if DEVICE == "cuda" else 100  # few where each takes the interpreter milliseconds
    logits = torch.full((vocab,), -9.0, device=DEVICE)
    logits[[0, 5, 127, 128, 199]] = torch.tensor([1.0, 3.0, 2.0, 3.0, 4.0], device=DEVICE)
    at = torch.arange(rows, device=DEVICE)
    noise = TRITON.gumbel_noise(at * 0 + 3, at, at * 0, vocab)
    tokens, _ = TRITON.sample(logits.expand(rows, -1), ones(rows) / 1.5, None, noise)
    assert_follows(tokens.bincount(minlength=vocab).cpu(), (logits.double() / 1.5).softmax(0).cpu())


def test_greedy_takes_the_first_of_equal_logits_and_a_likely_token_keeps_its_precision() -> None:
    logits = torch.zeros(2, 2 * SPLIT + 9, device=DEVICE)
    logits[0, [200, SPLIT + 5]] = 12.0
    logits[1, SPLIT + 5] = 25.0
    tokens, logprobs = TRITON.sample(logits, ones(2), None, None)
    assert tokens.tolist() == [200, SPLIT + 5]
    wanted = fp64_logprobs(logits, ones(2)).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), wanted, rtol=0, atol=2e-6)


def test_excluded_tokens_are_never_drawn() -> None:
    for only in (0, SPLIT - 1, SPLIT + 75):
        logits = torch.full((4, SPLIT + 76), -INF, device=DEVICE)
        logits[:, only] = -50.0
        tokens, logprobs = TRITON.sample(logits, ones(4), None, TRITON.gumbel_noise(*numbers(4), SPLIT + 76))
        assert tokens.eq(only).all() and logprobs.eq(0).all()


@pytest.mark.parametrize("vocab", [5, SPLIT + 300])
@pytest.mark.parametrize("ops", [TRITON, REFERENCE], ids=["triton", "reference"])
def test_rows_of_nan_inf_or_nothing_are_told_by_their_logprob(vocab: int, ops: Ops) -> None:
    logits = torch.randn(6, vocab, device=DEVICE)
    logits[1], logits[2], logits[3, vocab - 1], logits[4, vocab - 1] = float("nan"), -INF, float("nan"), INF
    sick = [False, True, True, True, True, False]
    noise = ops.gumbel_noise(*numbers(6), vocab)
    greedy = torch.arange(6, device=DEVICE) > 9
    for case in ((None, noise), (greedy, noise), (None, None)):
        tokens, logprobs = ops.sample(logits, ones(6), *case)
        assert logprobs.isnan().tolist() == sick
        assert ((tokens >= 0) & (tokens < vocab)).all()
    given = torch.zeros(6, dtype=torch.long, device=DEVICE)
    for op in (ops.token_logprobs, ops.score_tokens):
        out = op(logits, ones(6), given)
        out = out if isinstance(out, Tensor) else out[0] + out[1]
        assert out.isnan().tolist() == sick


@pytest.mark.parametrize("vocab", [129, 2 * SPLIT + 77])
def test_a_row_does_not_depend_on_its_batch(vocab: int) -> None:
    rows = 5
    logits = torch.randn(2 * rows, vocab, device=DEVICE)[::2]  # rows that do not follow each other in memory
    inverse, greedy = torch.linspace(0.4, 3, rows, device=DEVICE), torch.arange(rows, device=DEVICE) == 3
    noise, given = TRITON.gumbel_noise(*numbers(rows), vocab), torch.arange(rows, device=DEVICE)
    together = TRITON.sample(logits, inverse, greedy, noise) + TRITON.score_tokens(logits, inverse, given)
    for i in range(rows):
        row = slice(i, i + 1)
        alone = TRITON.sample(logits[row], inverse[row], greedy[row], noise[row])
        alone += TRITON.score_tokens(logits[row], inverse[row], given[row])
        assert all(torch.equal(a[0], t[i]) for a, t in zip(alone, together, strict=True))


# -- scores ------------------------------------------------------------------------------------------------------


def check_scores(vocab: int, dtype: torch.dtype) -> None:
    rows = 6
    logits = (torch.randn(rows, vocab, device=DEVICE) * 4).to(dtype)
    logits[:, 1::3] = -INF
    logits[1] = 1.0
    logits[2, vocab // 3 * 2 :] += 40
    inverse = torch.tensor([0.3, 0.5, 1, 1, 2, 3], device=DEVICE)
    tokens = torch.randint((vocab + 2) // 3, (rows,), device=DEVICE) * 3
    full = fp64_logprobs(logits, inverse)
    logprob, entropy, rank = TRITON.score_tokens(logits, inverse, tokens)
    chosen = full.gather(1, tokens[:, None])
    torch.testing.assert_close(logprob.double(), chosen[:, 0], rtol=1e-6, atol=5e-6)
    wanted = -torch.where(full == -INF, 0.0, full.exp() * full).sum(-1)
    # The normaliser, here up to 64, is rounded to 2e-6 whenever it is stored: what log-probability and entropy share.
    torch.testing.assert_close(entropy.double(), wanted, rtol=1e-5, atol=5e-6)
    given = logits.gather(1, tokens[:, None])
    assert rank.dtype == torch.int64 and torch.equal(rank, (logits > given).sum(-1) + 1)
    assert torch.equal(REFERENCE.score_tokens(logits, inverse, tokens)[2], rank)
    assert torch.equal(TRITON.token_logprobs(logits, inverse, tokens), logprob)
    sampled, own = TRITON.sample(logits, inverse, None, TRITON.gumbel_noise(*numbers(rows), vocab))
    assert torch.equal(TRITON.token_logprobs(logits, inverse, sampled), own)


@pytest.mark.parametrize(("vocab", "dtype"), CASES, ids=str)
def test_scores_are_those_of_fp64(vocab: int, dtype: torch.dtype) -> None:
    check_scores(vocab, dtype)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_scores_of_a_large_vocabulary(dtype: torch.dtype) -> None:
    check_scores(BIG, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_reference_computes_in_fp32_whatever_the_logits_are(dtype: torch.dtype) -> None:
    logits, inverse = torch.randn(4, 300).to(dtype), torch.rand(4) + 0.5
    noise, given = REFERENCE.gumbel_noise(*(n.cpu() for n in numbers(4)), 300), torch.arange(4)
    cut = inverse, torch.tensor([0, 5, 0, 0]), torch.tensor([1.0, 1.0, 0.5, 1.0]), torch.tensor([0.0, 0.0, 0.0, 0.1])
    for op, rest in (
        (REFERENCE.sample, (inverse, None, noise)),
        (REFERENCE.token_logprobs, (inverse, given)),
        (REFERENCE.score_tokens, (inverse, given)),
        (REFERENCE.truncate, cut),
    ):
        low, high = op(logits, *rest), op(logits.float(), *rest)
        pairs = zip(low, high, strict=True) if isinstance(low, tuple) else [(low, high)]
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def test_columns_of_wider_tensors() -> None:
    """As a scorer's likeliest tokens are, and logits of which some are left out."""

    def apart(x: Tensor) -> Tensor:
        return torch.stack((x, x.flip(0)), dim=-1)[..., 0]

    logits, inverse = torch.randn(6, 300, device=DEVICE), torch.linspace(0.4, 3, 6, device=DEVICE)
    greedy, given = torch.arange(6, device=DEVICE) % 3 == 0, torch.arange(6, device=DEVICE) * 50
    at = numbers(6)
    noise = TRITON.gumbel_noise(*at, 300)
    assert torch.equal(TRITON.gumbel_noise(*map(apart, at), 300), noise)
    cut = inverse, *on([0, 5, 0, 9, 9, 0], [1.0, 1.0, 0.5, 0.9, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.1, 0.1])
    for op, *rest in ((TRITON.score_tokens, inverse, given), (TRITON.sample, inverse, greedy), (TRITON.truncate, *cut)):
        more = (noise,) if op is TRITON.sample else ()
        found, wanted = (op(*map(same, (logits, *rest)), *more) for same in (apart, Tensor.clone))
        assert all(map(torch.equal, found, wanted))


# -- truncate ----------------------------------------------------------------------------------------------------

SETTINGS = list(product([0, 8, 999, 5000], [1.0, 0.9, 1e-6], [0.0, 0.05]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("vocab", "together"), [(1, 512), (1000, 512), (1000, 32)])
def test_truncation_keeps_what_the_reference_keeps(
    vocab: int, together: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every combination in one batch, a row each, which is read in pieces, and of which ever shorter lists are made."""
    monkeypatch.setattr(truncation, "_SEARCHED", together)
    cut = torch.linspace(0.5, 2, len(SETTINGS), device=DEVICE), *on(*map(list, zip(*SETTINGS, strict=True)))
    logits = (torch.randn(len(SETTINGS), vocab, device=DEVICE) * 3).to(dtype)
    logits[::3, 1::4] = -INF
    assert torch.equal(TRITON.truncate(logits, *cut), REFERENCE.truncate(logits, *cut))


def test_a_search_writes_to_nothing_but_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor to what it reads: log-probabilities are of the logits as they were."""
    monkeypatch.setattr(truncation, "_SEARCHED", 32)
    logits = torch.randn(3, 900, device=DEVICE) * 3
    kept, cut = logits.clone(), [ones(3), *on([0, 7, 0], [1.0, 0.7, 1.0], [0.0, 0.0, 0.0])]
    out = TRITON.truncate(logits, *cut)
    assert torch.equal(logits, kept)
    assert torch.equal(out[::2], kept[::2])


def by_rule(logits: Tensor, k: int, p: float, min_p: float) -> Tensor:
    """The rule for ties, token by token in fp64."""
    kept = torch.ones_like(logits, dtype=torch.bool)
    larger = logits[None, :] > logits[:, None]
    if k:
        kept &= larger.sum(-1) < k
    mass = torch.where(kept, (logits.double() - logits.max()).exp(), 0.0)
    if p < 1:
        kept &= (larger * mass).sum(-1) < p * mass.sum()
        kept |= logits == logits.max()
    return kept & (mass >= min_p)


@pytest.mark.parametrize("implementation", ["reference", "triton", "cpu"])
@pytest.mark.parametrize("p", [1.0, 0.61, 1e-30])
def test_equal_logits_share_a_fate(implementation: str, p: float) -> None:
    ops = {"reference": REFERENCE, "triton": TRITON, "cpu": CPU}[implementation]
    device = "cpu" if ops is CPU else DEVICE
    rows = torch.stack(
        (
            torch.randint(-3, 4, (70,)).float(),
            torch.full((70,), 2.0),
            torch.where(torch.arange(70) % 2 == 0, 0.0, -0.0),
            torch.cat((torch.tensor([90.0]), torch.zeros(69))),
            torch.cat((torch.full((35,), -3e38), torch.full((35,), 3e38))),
            torch.arange(70) * 2.0**-149,
        )
    )
    min_ps = [0.0, 0.1, 0.0, 0.0, 0.1] if p == 0.61 else [0.1, 0.0, 0.1, 0.0, 0.0]
    for k, min_p in zip([0, 1, 30, 69, 2**40], min_ps, strict=True):
        count = len(rows)
        cut = (column.to(device) for column in on([1.0] * count, [k] * count, [p] * count, [min_p] * count))
        out = ops.truncate(rows.to(device), *cut).cpu()
        wanted = torch.stack([by_rule(row, k, p, min_p) for row in rows])
        assert torch.equal(out != -INF, wanted), (k, min_p)
        assert torch.equal(out[wanted], rows[wanted])


def test_rows_that_ask_for_nothing_and_rows_without_a_number() -> None:
    logits = torch.randn(5, 300, device=DEVICE)
    logits[1:3, 4] = float("nan")
    logits[2, 5] = -float("nan")
    logits[3] = -INF
    cut = on([1.0] * 5, [0, 3, 3, 3, 3], [1.0, 0.5, 1.0, 0.5, 0.5], [0.0, 0.1, 0.0, 0.1, 0.1])
    out = TRITON.truncate(logits, *cut)
    assert torch.equal(out[0], logits[0]) and torch.equal(out[4], REFERENCE.truncate(logits, *cut)[4])
    assert out[1:3].isnan().any(-1).all() and out[3].eq(-INF).all()
    assert out[2, 4:6].isnan().all()


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_truncation_of_a_large_vocabulary(dtype: torch.dtype) -> None:
    """Against fp64, where only tokens whose cumulative mass is within rounding of p may differ."""
    cut = on([1.0] * 5, [0, 50, 0, 0, 1000], [1.0, 1.0, 0.9, 1.0, 0.95], [0.0, 0.0, 0.0, 0.05, 0.0])
    logits = (torch.randn(5, BIG, device=DEVICE) * 3).to(dtype)
    kept = TRITON.truncate(logits, *cut) != -INF
    values = logits.double()
    assert kept[0].all()
    assert torch.equal(kept[1], values[1] >= values[1].topk(50).values[-1])
    assert torch.equal(kept[3], (values[3] - values[3].max()).exp() >= 0.05)
    for row, p in ((2, 0.9), (4, 0.95)):
        mass = (values[row] - values[row].max()).exp()
        if row == 4:
            mass = mass.where(values[row] >= values[row].topk(1000).values[-1], 0.0)
        mass /= mass.sum()
        last = values[row][kept[row]].min()
        assert torch.equal(kept[row], values[row] >= last)
        assert mass[values[row] > last].sum() < p + 1e-5 and mass[kept[row]].sum() > p - 1e-5
