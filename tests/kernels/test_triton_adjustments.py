"""Biases, penalties and banned ids: each implementation has the reference's bits. The rule is checked in the sampler's tests."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from stoker.kernels.ops import CPU, REFERENCE, Ops
from stoker.kernels.reference.adjustments import IN_PROMPT, SAMPLED, Banned, Bias, Penalties
from stoker.kernels.sampling import adjustments
from stoker.kernels.triton_ops import TRITON

INF = float("inf")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, SLOTS, VOCAB = 5, 7, 301
by_each = pytest.mark.parametrize("ops", [TRITON, CPU], ids=["triton", "cpu"])


@pytest.fixture(autouse=True)
def read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adjustments, "_CHUNK", 64)


def on(device: str, *values: list[float] | list[int]) -> list[Tensor]:
    return [torch.tensor(v, device=device) for v in values]


def some_bias(device: str) -> Bias:
    """Lists of more ids than are read together, some of them filled up; the last row has none."""
    ids = torch.stack([torch.randperm(VOCAB)[:100] for _ in range(ROWS)])
    values = torch.randn(ROWS, 100) * 4
    ids[2, 30:], values[2, 30:] = ids[2, 29], values[2, 29]
    ids[3, 65:], values[3, 65:] = ids[3, 64], values[3, 64]
    values[1, 3], ids[-1], values[-1] = -INF, 0, 0.0
    return Bias(ids.to(device), values.to(device))


def some_penalties(device: str) -> Penalties:
    seen = torch.randint(3, (SLOTS, VOCAB)) * SAMPLED + torch.randint(2, (SLOTS, VOCAB)) * IN_PROMPT
    seen[:, ::2] = 0
    each = on(device, [6, 0, 3, 3, 1], [1.7, 1.0, 0.6, 1.0, 1.0], [0.0, 0.8, -0.5, 0.0, 0.0], [0.0, 0.3, 0.7, 1.1, 0.0])
    return Penalties(seen.int().to(device), *each)


def some_banned(device: str) -> Banned:
    """Of some rows there is none yet, or no more; and of one the id that no token has. Row 1's is biased, too."""
    ids = torch.tensor([[4, VOCAB, VOCAB], [9, 7, 300], [0, 1, 2], [VOCAB] * 3, [5, 5, 5]])
    return Banned(ids.to(device), *on(device, [50, 50, 40, 50, 50], [49, 40, 40, 0, 60]))


def some_logits(device: str, dtype: torch.dtype) -> Tensor:
    logits = torch.randn(ROWS, VOCAB) * 5
    logits[0, ::7], logits[2, ::5], logits[3, 11] = -INF, -0.0, float("nan")
    return logits.to(device, dtype)


@by_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("asked", [each for each in product([False, True], repeat=3) if any(each)], ids=str)
def test_bits_are_the_references(ops: Ops, dtype: torch.dtype, asked: tuple[bool, bool, bool]) -> None:
    device = "cpu" if ops is CPU else DEVICE
    makers: tuple[Callable[[str], Bias | Penalties | Banned], ...] = (some_bias, some_penalties, some_banned)
    given = [make(device) if wanted else None for make, wanted in zip(makers, asked, strict=True)]
    if (bias := given[0]) is not None and (banned := given[2]) is not None:
        bias.ids[1, bias.ids[1] == 7] = bias.ids[1, 0].item()  # type: ignore[union-attr]
        bias.ids[1, 0], bias.values[1, 0] = 7, 2.0  # type: ignore[union-attr]
        assert 7 in banned.ids[1]  # type: ignore[union-attr]
    logits = some_logits(device, dtype)
    kept = logits.clone()
    out, wanted = ops.adjust(logits, *given), REFERENCE.adjust(logits, *given)  # type: ignore[arg-type]
    assert out.dtype == torch.float32 and torch.equal(out.nan_to_num(7e9), wanted.nan_to_num(7e9))
    assert not torch.equal(out.nan_to_num(7e9), logits.float().nan_to_num(7e9))
    assert torch.equal(logits.nan_to_num(9), kept.nan_to_num(9)), "log-probabilities are of the logits as they were"
    assert out.data_ptr() != logits.data_ptr()


@by_each
def test_logits_that_are_some_columns_of_more(ops: Ops) -> None:
    device = "cpu" if ops is CPU else DEVICE
    logits, bias = torch.randn(ROWS, 2 * VOCAB, device=device), some_bias(device)
    for part in (logits[:, :VOCAB], logits[:, ::2]):
        assert torch.equal(ops.adjust(part, bias, None, None), REFERENCE.adjust(part.contiguous(), bias, None, None))


@by_each
def test_sampled_tokens_are_counted_and_those_of_padding_in_one_slot(ops: Ops) -> None:
    device = "cpu" if ops is CPU else DEVICE
    seen = torch.zeros(SLOTS, VOCAB, dtype=torch.int32, device=device)
    seen[2, 5] = IN_PROMPT
    slots, tokens = on(device, [2, 4, 6, 6, 6], [5, 300, 9, 9, 1])
    ops.count(seen, slots, tokens)
    ops.count(seen, slots, tokens)
    assert seen[2, 5] == 2 * SAMPLED + IN_PROMPT and seen[4, 300] == 2 * SAMPLED
    assert seen[6, 9] == 4 * SAMPLED and seen[6, 1] == 2 * SAMPLED
    assert seen.sum() == 10 * SAMPLED + IN_PROMPT
