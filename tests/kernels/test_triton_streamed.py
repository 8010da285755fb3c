"""A projection of some dozens of rows by a streamed weight, and the cuts of the weight that are tried."""

from __future__ import annotations

import contextvars
import itertools
from functools import partial
from typing import Any

import pytest
import torch
import triton
from linears import expected_linear, make_linear
from torch import Tensor
from triton_oracle import (
    DEVICE,
    DTYPES,
    assert_close,
    assert_early_starts_change_nothing,
    randn,
    unwritten_is_nan,  # noqa: F401
)

from stoker.kernels import launch
from stoker.kernels.linear import streamed as linear_streamed
from stoker.kernels.linear.cuts import Cut, cuts_to_try, fetched_ahead, pipeline
from stoker.kernels.linear.streamed import describable, streamed
from stoker.kernels.reference.norm_rotary import Norm
from stoker.kernels.triton_ops import DETERMINISTIC, TRITON


def streamed_as_asked(arguments: dict[str, Any], cut: Cut) -> Tensor:
    arrived = torch.zeros(-(-len(arguments["weight"]) // cut.rows), dtype=torch.int32, device=DEVICE)
    out = streamed(**arguments, cut=cut, arrived=arrived)
    assert not arrived.any(), "the next product counts on"
    return out


# As q, k, v; out; gate and up; with sizes that divide no tile; all at once; for few tokens and more. Splits that cannot be
# had are fewer.
CASES = [
    (5, 130, 304, "bn", Cut(64, 2, 1)),
    (17, 37, 600, "r", Cut(64, 3, 1)),
    (64, 140, 96, "ng", Cut(32, 1, 2)),
    (33, 262, 400, "bosg", Cut(32, 1, 1)),
    (20, 262, 400, "bosg", Cut(64, 1, 3)),
    (65, 36, 304, "rt", Cut(32, 1, 1)),
    (65, 36, 304, "o", Cut(32, 9, 1)),
    (128, 200, 136, "s", Cut(64, 1, 2)),
    (33, 130, 304, "cb", Cut(128, 2, 1)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_streamed(case: tuple[int, int, int, str, Cut], dtype: torch.dtype) -> None:
    *sizes, cut = case
    arguments = make_linear(*sizes, dtype)  # type: ignore[arg-type]
    assert_close(streamed_as_asked(arguments, cut), expected_linear(**arguments), dtype)


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[6]], ids=str)
def test_a_chip_that_copies_no_tiles_by_itself(
    case: tuple[int, int, int, str, Cut], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one before Hopper, whose threads ask for them."""
    *sizes, cut = case
    arguments = make_linear(*sizes, torch.float16)  # type: ignore[arg-type]
    monkeypatch.setattr(launch, "copies_tiles", lambda device: False)
    monkeypatch.setattr(linear_streamed, "TensorDescriptor", None)  # which the host makes

    def run() -> Tensor:
        # Where the chip does copy tiles, as from Hopper on, what a kernel describes itself takes memory.
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=DEVICE))
        return streamed_as_asked(arguments, cut)

    assert_close(contextvars.copy_context().run(run), expected_linear(**arguments), torch.float16)


def test_rows_that_lie_where_no_tile_can_be_read_from() -> None:
    """Of x they are copied first; of a weight nothing is."""
    arguments = make_linear(9, 40, 64, "", torch.float16)
    wanted = streamed_as_asked(arguments, Cut(64, 1, 1))
    for apart, begin in ((67, 0), (72, 1)):
        lying = randn(9, apart, dtype=torch.float16)[:, begin : begin + 64].copy_(arguments["x"])
        assert not describable(lying) and torch.equal(
            streamed_as_asked(arguments | {"x": lying}, Cut(64, 1, 1)), wanted
        )
    weight = arguments["weight"]
    assert describable(weight) and describable(weight[:, 8:56]) and describable(randn(9, 80)[:, :64])
    assert not any(describable(w) for w in (weight[:, 1:57], weight[:, :60], weight.t().contiguous().t()))


def test_a_large_activation_does_not_overflow_before_its_norm() -> None:
    arguments = make_linear(6, 24, 64, "n", torch.float16)
    arguments["norm"][0][3], arguments["x"][:, 3] = 4.0, 60000.0
    assert_close(streamed_as_asked(arguments, Cut(64, 1, 1)), expected_linear(**arguments), torch.float16)


def test_more_splits_are_other_sums_and_the_same_splits_the_same_bits() -> None:
    arguments = make_linear(9, 130, 800, "", torch.float32)
    once, again, other = (streamed_as_asked(arguments, Cut(64, splits, 1)) for splits in (5, 5, 1))
    assert torch.equal(once, again) and not torch.equal(once, other)


def test_partial_sums_are_in_fp32_whatever_the_default_is() -> None:
    arguments = make_linear(9, 130, 800, "", torch.float32)

    def products() -> list[Tensor]:
        return [streamed_as_asked(arguments, Cut(64, 5, 1)), DETERMINISTIC.linear(**arguments)]

    expected, before = products(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        assert all(map(torch.equal, products(), expected))
    finally:
        torch.set_default_dtype(before)


def test_sums_of_splits_are_added_before_they_are_rounded() -> None:
    """Of two splits that nearly cancel, whose difference is lost where each has 16 bits."""
    arguments = make_linear(9, 64, 1024, "", torch.float16)
    arguments["x"].fill_(1)
    arguments["weight"].fill_(1)[:, 512:] = -1
    arguments["weight"][:, 0] += 1 / 16
    assert streamed_as_asked(arguments, Cut(64, 2, 1)).eq(1 / 16).all()


@pytest.mark.gpu
def test_the_last_program_adds_up_in_order_whoever_it_is() -> None:
    arguments = make_linear(64, 2048, 8192, "r", torch.bfloat16)
    first = streamed_as_asked(arguments, Cut(64, 4, 1))
    assert all(torch.equal(streamed_as_asked(arguments, Cut(64, 4, 1)), first) for _ in range(200))


@pytest.mark.gpu
def test_streamed_kernels_that_come_up_early_see_all_that_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads what the one before wrote, and counts in the same counters."""
    up, down = (randn(*size, dtype=torch.bfloat16, scale=0.02) for size in ((6144, 1024), (1024, 3072)))
    start, arrived = randn(40, 1024, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int32, device=DEVICE)
    norm = Norm(torch.ones(1024, dtype=torch.bfloat16, device=DEVICE), 1e-6)

    multiply = partial(streamed, bias=None, scale=1.0, arrived=arrived)

    def chain() -> Tensor:
        x = start
        for number in range(50):
            given, to_do = (x, norm) if number % 2 else (TRITON.rms_norm(x, *norm), None)
            wide = multiply(given, up, norm=to_do, gated="silu", residual=None, cut=Cut(32, 1, 1))
            x = multiply(wide, down, norm=None, gated=None, residual=x, cut=Cut(32, 4, 1))
        return x

    assert_early_starts_change_nothing(chain, monkeypatch)


def test_a_cut_fills_the_chip_and_its_splits_are_no_more_than_that_takes() -> None:
    shapes = itertools.product(
        (1, 32, 64, 128), (64, 2048, 3584, 16384, 128256), (48, 2048, 18944), (False, True), (1, 132), (False, True)
    )
    for tokens, width, depth, gated, processors, narrow in shapes:
        cuts = cuts_to_try(tokens, (width, depth), 2, gated, processors, narrow=narrow)
        assert 1 <= len(cuts) <= 5
        for cut in cuts:
            tiles = -(-width // ((2 if gated else 1) * cut.rows))
            programs = tiles * cut.splits
            assert cut.splits == 1 or (not gated and tiles <= processors and depth // cut.splits >= 512)
            assert cut.splits == 1 or programs <= processors or (narrow and programs <= 2 * processors)
            assert programs <= processors * cut.rooms or cut == cuts[-1]
            assert tokens * cut.rows * cut.splits <= 3 * 2**13 or cut.splits == 1
            block_m, rows = max(16, tokens), (2 if gated else 1) * cut.rows
            for itemsizes, (shared, rooms) in itertools.product(((2, 2), (2, 1)), ((228, 3), (164, 2), (100, 1))):
                columns, stages = pipeline(block_m, rows, cut, itemsizes, shared * 1024)
                taken = columns * (2 * block_m + rows * itemsizes[1]) * stages
                ahead = fetched_ahead(rows * itemsizes[1], cut.rooms, depth)
                assert ahead * rows * itemsizes[1] * cut.rooms <= 2**16 and ahead & (ahead - 1) == 0
                assert ahead >= depth or 2 * ahead * rows * itemsizes[1] * cut.rooms > 2**16
                assert 2 <= stages <= 8 and taken * min(cut.rooms, rooms) <= (shared - 1) * 1024
    assert cuts_to_try(64, (2048, 8192), 2, False, 132) == [Cut(32, 2, 1), Cut(64, 3, 1), Cut(64, 4, 1)]
    assert cuts_to_try(64, (3584, 18944), 2, False, 132, narrow=True) == [
        Cut(32, 1, 1),
        Cut(64, 2, 1),
        Cut(64, 4, 2),
        Cut(128, 3, 1),
    ]
    assert cuts_to_try(16, (2048, 8192), 2, False, 132) == [Cut(64, 3, 1), Cut(64, 4, 1)]
    assert cuts_to_try(64, (128256, 2048), 2, False, 132) == [Cut(128, 1, 2)]
