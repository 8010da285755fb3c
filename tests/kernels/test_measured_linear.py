"""Products of some dozens of rows by a large weight: the way that is taken is the fastest that was measured, and right."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from linears import expected_linear, make_linear, pretend_times
from torch import Tensor
from triton_oracle import DEVICE, assert_close, unwritten_is_nan  # noqa: F401

from stoker.kernels import launch, ops
from stoker.kernels.linear import measured as linear_measured
from stoker.kernels.linear.measured import MeasuredLinear, run_at_once
from stoker.kernels.linear.streamed import streamed
from stoker.kernels.triton_ops import DETERMINISTIC


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Times to be found, by the beginnings of names; "torch" takes 5 and any other 9."""
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


class Clocks:
    """A device that does one thing after the other, as the host has told it; both take microseconds for each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host, self.device, self.slept = 0.0, 0.0, list[float]()
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep, raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=64))
        monkeypatch.setattr(linear_measured, "rms_norm", lambda *_: self.does(60, 2))
        monkeypatch.setattr(Tensor, "sum", lambda *_: self.does(60, 30))

    def does(self, on_host: float, *on_device: float) -> None:
        for each in on_device:
            self.host += on_host
            self.device = max(self.device, self.host) + each

    def sleep(self, cycles: int) -> None:
        self.slept.append(cycles)
        self.does(60, cycles / 2000)  # at 2 GHz

    def event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        made = SimpleNamespace(synchronize=lambda: None)
        made.record = lambda: setattr(made, "at", max(self.device, self.host))
        made.query = lambda: made.at <= self.host
        made.elapsed_time = lambda other: 1e-3 * (other.at - made.at)
        return made


def test_times_are_medians_of_what_a_call_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    long = itertools.cycle([9.0, 9.0, 9.0, 100.0])
    calls = {"long": lambda: clocks.does(1, next(long)), "short": partial(clocks.does, 1, 4.0)}
    assert linear_measured.microseconds(calls, torch.device("cpu")) == pytest.approx({"long": 9.0, "short": 4.0})
    assert len(clocks.slept) == 7


@pytest.mark.parametrize(("on_host", "slept"), [(60, 1), (2000, 8)])
def test_times_are_the_devices_where_the_host_takes_longer_to_launch(
    on_host: float, slept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either the host is ahead of the device all the same, or the device sleeps longer until it is."""
    clocks = Clocks(monkeypatch)
    times = {"torch": 12.0, "skinny": 7.0, "streamed, 1": 8.0, "streamed, 2": 6.0, "norm, 1": 9.0, "norm, 2": 10.0}
    calls = {name: partial(clocks.does, on_host, us / 2, us / 2) for name, us in times.items()}
    assert linear_measured.microseconds(calls, torch.device("cpu")) == pytest.approx(times)
    assert clocks.slept[-1] == slept * clocks.slept[0] and clocks.slept.count(clocks.slept[-1]) == 7


def test_a_host_slower_than_any_sleep_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    found = linear_measured.microseconds({"one": partial(clocks.does, 1e6, 5.0)}, torch.device("cpu"))
    assert found["one"] > 5 and len(clocks.slept) == 11


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


@pytest.mark.parametrize("inference", [True, False])
def test_what_has_to_be_compiled_is_compiled_at_once(inference: bool) -> None:
    """Each call waits for the others; an error of one, which by itself will show again, is not that of all."""
    together, found = threading.Barrier(3, timeout=20), []

    def call(fails: bool) -> None:
        together.wait()
        found.append(torch.is_inference_mode_enabled())
        if fails:
            raise RuntimeError("does not compile")

    with torch.inference_mode(inference):
        run_at_once([partial(call, fails) for fails in (False, True, False)], torch.device("cpu"))
    assert found == [inference] * 3
    run_at_once([], torch.device("cpu"))


def test_threads_that_compile_load_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one may get what another one loaded (Triton before 3.7)."""
    loading, most, last = [0], [0], [""]

    def load(source: str, metadata: int) -> str:
        loading[0] += 1
        most[0], last[0] = max(most[0], loading[0]), source
        time.sleep(0.002)
        loading[0] -= 1
        return f"{last[0]} {metadata}"

    driver = SimpleNamespace(launcher_cls=load)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    launch.load_one_at_a_time.__wrapped__()
    with ThreadPoolExecutor(8) as threads:
        names = [f"kernel {n}" for n in range(16)]
        assert list(threads.map(driver.launcher_cls, names, range(16))) == [f"{n} {i}" for i, n in enumerate(names)]
    assert most == [1]
