"""Weights in fp8: how they are rounded, and products with them, which are those of plain weights with the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linears import expected_linear, make_linear
from torch import Tensor
from triton_oracle import DEVICE, DTYPES, assert_close, randn, unwritten_is_nan  # noqa: F401

from stoker.kernels import fp8
from stoker.kernels.linear import measured as linear_measured
from stoker.kernels.linear.cuts import Cut
from stoker.kernels.linear.measured import MeasuredLinear
from stoker.kernels.linear.streamed import streamed
from stoker.kernels.ops import REFERENCE, Ops
from stoker.kernels.reference.fp8 import FP8, dequantise_rows
from stoker.kernels.triton_ops import DETERMINISTIC, TRITON

TABLES = [REFERENCE, TRITON]
tables = pytest.mark.parametrize("ops", TABLES, ids=["reference", "triton"])
WIDE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def quantised(ops: Ops, weight: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.empty(weight.shape, device=weight.device).to(FP8)
    scales = torch.empty(len(weight), device=weight.device)
    ops.quantise_rows(weight, values, scales)
    return values, scales


def every_number() -> Tensor:
    """Of fp8, but for NaN: fp32 [254]."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    return numbers[numbers.isfinite()].to(DEVICE)


@tables
@pytest.mark.parametrize("factor", [1.0, 2.0**-30, 2.0**60])
def test_numbers_of_fp8_times_a_power_of_two_stay_what_they_are(ops: Ops, factor: float) -> None:
    weight = every_number().repeat(3, 1) * factor
    values, scales = quantised(ops, weight)
    assert torch.equal(dequantise_rows(values, scales, torch.float32), weight)
    assert torch.equal(scales, torch.full_like(scales, factor))


@tables
def test_a_number_becomes_the_nearest_and_a_half_the_even(ops: Ops) -> None:
    """By the distances to all there are, which know nothing of bits."""
    numbers = every_number().unique()  # one zero
    between = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat(
        (between, between * (1 + 2**-20), between * (1 - 2**-20), randn(700, dtype=torch.float32, scale=99.0))
    )
    x = torch.cat((x, numbers[-1:]))  # so that the row's factor is one
    values, scales = quantised(ops, x[None])
    distances = (x[:, None].double() - numbers[None].double()).abs()
    nearest = distances.amin(1)
    found = values[0].float()
    assert torch.equal((x.double() - found.double()).abs(), nearest) and scales.item() == 1.0
    even = values[0].view(torch.uint8)[: len(between)] % 2 == 0
    assert even.all()


@tables
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_factor_is_the_least_that_leaves_nothing_beyond_the_range(ops: Ops, dtype: torch.dtype) -> None:
    weight = torch.cat([randn(40, 1500, dtype=dtype, scale=s) for s in (1e-3, 0.02, 3.0)])
    weight[0] = 0
    weight[1, :2] = torch.tensor([448.0, -1.0])
    weight[2, :2] = torch.tensor([449.0, 1.0])  # more than the largest, and yet nearest to it
    weight[3:5] *= 0
    weight[3, 7], weight[4, 1499] = -7.0, 7.0
    values, scales = quantised(ops, weight)
    most = (weight.double() / scales[:, None]).abs().amax(1)
    assert (most <= 448).all() and (most[1:] > 224).all()
    assert torch.equal(torch.frexp(scales)[0], torch.full_like(scales, 0.5))
    assert scales[1:5].tolist() == [1.0, 2.0, 2.0**-6, 2.0**-6] and not values[0].float().any()
    error = (dequantise_rows(values, scales, torch.float32) - weight.float()).abs()
    assert (error <= (weight.float().abs() * 2**-4).maximum(scales[:, None] * 2**-10)).all()


@tables
def test_a_weight_whose_columns_lie_side_by_side(ops: Ops) -> None:
    weight = randn(1100, 70, dtype=torch.float32).t()
    for a, b in zip(quantised(ops, weight), quantised(REFERENCE, weight.contiguous()), strict=True):
        assert torch.equal(a.float(), b.float())


@tables
def test_numbers_that_are_none_spoil_themselves_and_no_other_row(ops: Ops) -> None:
    weight = randn(4, 1030, dtype=torch.float32)
    weight[0, 1029], weight[2, 3] = torch.nan, torch.inf
    values, scales = quantised(ops, weight)
    plain = dequantise_rows(values, scales, torch.float32)
    assert plain[0].isnan().nonzero().tolist() == [[1029]] and plain[2].isnan().nonzero().tolist() == [[3]]
    others = quantised(ops, weight[[1, 3]])
    assert torch.equal(values[[1, 3]].float(), others[0].float()) and torch.equal(scales[[1, 3]], others[1])


@dtypes
def test_the_kernel_that_makes_numbers_plain(dtype: torch.dtype) -> None:
    values, scales = quantised(REFERENCE, randn(5, 4100, dtype=torch.float32))
    assert torch.equal(fp8.dequantise_rows(values, scales, dtype), dequantise_rows(values, scales, dtype))


# -- products ---------------------------------------------------------------------------------------------------------

LINEARS = [
    # One token; some; as many as torch multiplies; with all that stands before and after.
    (1, 36, 300, "r"),
    (1, 70, 96, "ng"),
    (3, 37, 129, "br"),
    (4, 62, 64, "bnrg"),
    (4, 62, 64, "boes"),
    (9, 37, 300, "r"),
    (17, 66, 80, "bots"),
    (70, 140, 96, "cb"),
]


def narrow(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments with a weight in fp8, and with a plain one that has its numbers."""
    values, scales = quantised(
        REFERENCE,
        arguments["weight"] * torch.linspace(0.1, 9, len(arguments["weight"]))[:, None].to(arguments["weight"]),
    )
    plain = dequantise_rows(values, scales, arguments["x"].dtype)
    return arguments | {"weight": values, "row_scales": scales}, arguments | {"weight": plain}


@dtypes
@pytest.mark.parametrize("ops", [*TABLES, DETERMINISTIC], ids=["reference", "triton", "deterministic"])
@pytest.mark.parametrize("case", LINEARS, ids=str)
def test_linear(case: tuple[int, int, int, str], ops: Ops, dtype: torch.dtype) -> None:
    in_fp8, plain = narrow(make_linear(*case, dtype))
    assert_close(ops.linear(**in_fp8), expected_linear(**plain), dtype)
    if DEVICE.type == "cpu":  # compiled, threads hold other numbers, and sums have another order
        assert torch.equal(ops.linear(**in_fp8), ops.linear(**plain))


@dtypes
@pytest.mark.parametrize(
    "case",
    [(5, 130, 304, "bn", Cut(64, 2, 1)), (33, 262, 400, "bosg", Cut(32, 1, 1)), (65, 36, 304, "r", Cut(32, 2, 1))],
    ids=str,
)
def test_streamed(case: tuple[int, int, int, str, Cut], dtype: torch.dtype) -> None:
    *sizes, cut = case
    arrived = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    in_fp8, plain = (
        streamed(**arguments, cut=cut, arrived=arrived)
        for arguments in narrow(make_linear(*sizes, dtype))  # type: ignore[arg-type]
    )
    assert torch.equal(in_fp8, plain) or DEVICE.type == "cuda"
    assert_close(in_fp8, plain.double(), dtype)


@pytest.mark.parametrize("fastest", ["streamed", "skinny", "in tiles", "torch"])
def test_what_is_measured_and_chosen(fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a small weight, and of more rows than a plain one is streamed for."""

    def microseconds(calls: dict[str, Any], device: torch.device) -> dict[str, float]:
        return {name: 1.0 if name.startswith(fastest) else 2.0 for name in calls}

    monkeypatch.setattr(linear_measured, "microseconds", microseconds)
    in_fp8, plain = narrow(make_linear(140 if fastest == "in tiles" else 9, 40, 96, "n", WIDE))
    linear = MeasuredLinear()
    out = linear(**in_fp8)
    (found,) = linear.chosen.values()
    assert found.startswith(fastest)
    assert_close(out, expected_linear(**plain), WIDE)
    monkeypatch.setattr(linear_measured, "microseconds", lambda *_: pytest.fail("measured before"))
    assert torch.equal(linear(**in_fp8), out)


def test_so_many_rows_that_a_plain_copy_of_the_weight_costs_little() -> None:
    in_fp8, _ = narrow(make_linear(1025, 8, 16, "", torch.float16))
    linear = MeasuredLinear()
    linear(**in_fp8)
    assert not linear.chosen
