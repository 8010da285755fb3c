"""A projection of some dozens of rows by a streamed weight, and the choice of what multiplies."""

from __future__ import annotations

import contextvars
import itertools
import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from linears import expected_linear, make_linear, pretend_times
from torch import Tensor
from triton_oracle import (
    DEVICE,
    DTYPES,
    assert_close,
    assert_early_starts_change_nothing,
    randn,
    unwritten_is_nan,  # noqa: F401
)

from stoker.kernels import launch, linear_measured, linear_streamed, ops
from stoker.kernels.linear_cuts import Cut, cuts_to_try, fetched_ahead, pipeline
from stoker.kernels.linear_measured import MeasuredLinear
from stoker.kernels.linear_streamed import describable, streamed
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


# -- what multiplies --------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Times to be found, by the beginnings of names; "torch" takes 5 and any other 9. The calls that were timed run."""
    times = {"torch": 5.0}
    pretend_times(monkeypatch, times)
    return times


OPTIONS = ["nb", "r", "boes"]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("fastest", "dtype"),
    [(name, torch.float16) for name in ("torch", "streamed", "skinny")] + [("streamed", torch.float32)],
    ids=str,
)
def test_the_fastest_multiplies_and_the_result_is_the_same(
    fastest: str,
    dtype: torch.dtype,
    options: str,
    measured: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(linear_measured._ERROR, torch.float32, 1e-5)
    linear, arguments = MeasuredLinear(), make_linear(7, 38, 304, options, dtype)
    measured[fastest] = 1.0
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, Tensor)}
    for _ in range(2):
        assert_close(linear(**arguments), expected_linear(**arguments), dtype)
    assert all(torch.equal(arguments[name], tensor) for name, tensor in before.items())
    ((what, who),) = linear.chosen.items()
    assert what.startswith("16 x 38 x 304") and who.startswith(fastest) and not caplog.records


def test_what_has_been_measured_is_not_measured_again(measured: dict[str, float]) -> None:
    linear, seen = MeasuredLinear(), []
    cases = [(7, "n"), (16, "n"), (17, "n"), (7, "r"), (7, "n"), (128, "n")]
    for tokens, options in cases:
        linear(**make_linear(tokens, 22, 64, options, torch.float16))
        seen.append(len(linear.chosen))
    assert seen == [1, 1, 2, 3, 3, 4]


def test_there_is_a_choice_only_for_some_dozens_of_rows_of_a_large_weight(
    measured: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = MeasuredLinear()
    for tokens, dtype in ((4, torch.float16), (129, torch.float16), (7, torch.float32)):
        linear(**make_linear(tokens, 38, 64, "n", dtype))
    turned = make_linear(7, 38, 64, "n", torch.float16)
    turned["weight"] = turned["weight"].t().contiguous().t()
    assert_close(linear(**turned), expected_linear(**turned), torch.float16)
    monkeypatch.setattr(linear_measured, "_LEAST_BYTES", 38 * 64 * 2 + 1)
    linear(**make_linear(7, 38, 64, "n", torch.float16))
    assert not linear.chosen
    monkeypatch.setattr(linear_measured, "_LEAST_BYTES", 38 * 64 * 2)
    linear(**make_linear(7, 38, 64, "n", torch.float16))
    assert linear.chosen


def test_nothing_is_measured_while_a_step_is_captured(
    measured: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, arguments = MeasuredLinear(), make_linear(7, 38, 304, "", torch.float16)
    monkeypatch.setattr(linear_measured, "is_capturing", lambda device: True)
    assert_close(linear(**arguments), expected_linear(**arguments), torch.float16)
    assert not linear.chosen
    monkeypatch.undo()


@pytest.mark.parametrize("wrong", [float("nan"), 0.5])
def test_what_is_wrong_is_not_used(
    wrong: float, measured: dict[str, float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any, **options: Any) -> Tensor:
        out = streamed(*arguments, **options)
        out[-1, -1] += wrong * out.abs().max()
        return out

    measured["streamed"] = 1.0
    monkeypatch.setattr(linear_measured, "streamed", broken)
    linear, arguments = MeasuredLinear(), make_linear(20, 38, 304, "n", torch.float16)
    assert_close(linear(**arguments), expected_linear(**arguments), torch.float16)
    assert [who.startswith("torch 5.0 us") for who in linear.chosen.values()] == [True]
    assert all("is wrong for 20 rows of [38, 304]" in r.getMessage() for r in caplog.records) and caplog.records


@pytest.mark.parametrize("where", ["streamed", "microseconds"])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory left"), AttributeError("_sleep"), ValueError("ptxas")]
)
def test_what_fails_is_not_used(
    error: Exception,
    where: str,
    measured: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    measured["streamed"] = 1.0
    monkeypatch.setattr(linear_measured, where, fail)
    linear, arguments = MeasuredLinear(), make_linear(20, 38, 304, "r", torch.float16)
    for _ in range(2):
        assert_close(linear(**arguments), expected_linear(**arguments), torch.float16)
    assert list(linear.chosen.values()) == ["torch"]
    assert [r.levelno for r in caplog.records] == [logging.WARNING] and str(error) in caplog.text


def test_nothing_is_concluded_from_what_is_not_finite(
    measured: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    """Every way would look wrong."""
    linear, arguments = MeasuredLinear(), make_linear(20, 38, 64, "", torch.float16)
    arguments["weight"][0, 0] = float("nan")
    assert linear(**arguments).isnan().any()
    assert list(linear.chosen.values()) == ["torch"] and "the product is not finite" in caplog.text


def test_times_are_medians_of_what_a_call_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def takes(*times: float) -> Callable[..., Tensor]:
        each = itertools.cycle(times)

        def run(*_: Any) -> Tensor:
            nonlocal now
            now += next(each)
            return torch.zeros(1)

        return run

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) / 1e3  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", takes(5000), raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=64))
    monkeypatch.setattr(linear_measured, "rms_norm", takes(2.0))
    monkeypatch.setattr(Tensor, "sum", takes(30.0))
    found = linear_measured.microseconds(
        {"long": takes(9.0, 9.0, 9.0, 100.0), "short": takes(4.0)}, torch.device("cpu")
    )
    assert found == {"long": pytest.approx(9.0), "short": pytest.approx(4.0)}


def test_times_are_the_devices_where_the_host_takes_longer_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls whose launches cost the host more than they take: it is ahead of the device all the same."""
    host = device = 0.0

    def launches(micros: float, count: int = 1) -> Callable[..., Tensor]:
        def run(*_: Any) -> Tensor:
            nonlocal host, device
            for _ in range(count):
                host += 60.0
                device = max(host, device) + micros / count
            return torch.zeros(1)

        return run

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.record = lambda: setattr(self, "at", max(host, device))

        def synchronize(self) -> None:
            nonlocal host
            host = max(host, device)

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at) / 1e3

    def sleep(cycles: int) -> None:
        launches(cycles / 2000)()  # at 2 GHz

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", sleep, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=64))
    monkeypatch.setattr(linear_measured, "rms_norm", launches(2.0))
    monkeypatch.setattr(Tensor, "sum", launches(30.0))
    times = {"torch": 12.0, "skinny": 7.0, "streamed, 1": 8.0, "streamed, 2": 6.0, "norm, 1": 9.0, "norm, 2": 10.0}
    calls = {name: launches(micros, 3 if "norm" in name else 2) for name, micros in times.items()}
    found = linear_measured.microseconds(calls, torch.device("cpu"))
    assert found == {name: pytest.approx(micros) for name, micros in times.items()}


def test_each_engine_measures_for_itself_and_a_deterministic_one_never() -> None:
    cuda = torch.device("cuda")
    one, other = (ops.ops_for(cuda, [(64, 64, torch.bfloat16)]) for _ in range(2))
    assert isinstance(one.linear, MeasuredLinear) and one.linear is not other.linear
    assert ops.ops_for(cuda, deterministic=True).linear is DETERMINISTIC.linear
    assert ops.ops_for(torch.device("cpu")).linear is ops.CPU.linear


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("tokens", [16, 128])
def test_on_a_device_the_fastest_is_found_among_right_ones(tokens: int, caplog: pytest.LogCaptureFixture) -> None:
    linear = MeasuredLinear()
    for width, depth, options in ((3072, 2048, "n"), (2048, 2048, "r"), (16384, 2048, "ng"), (2048, 8192, "r")):
        arguments = make_linear(tokens, width, depth, options, torch.bfloat16)
        assert_close(linear(**arguments), expected_linear(**arguments), torch.bfloat16)
    assert len(linear.chosen) == 4 and not [r for r in caplog.records if r.name == "stoker"]
    calls = {name: lambda name=name: torch.cuda._sleep(20000 if name == "long" else 1000) for name in ("long", "short")}
    found = linear_measured.microseconds(calls, DEVICE)
    assert found["long"] > found["short"] > 0
