"""Projections followed by adapters, in every way to multiply, and the dense products in fp64 they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from linears import make_linear, pretend_times
from lora_oracle import NUM_SLOTS, dense, make_table
from torch import Tensor
from triton_oracle import DEVICE, assert_close

from stoker.kernels.linear import measured as linear_measured
from stoker.kernels.linear.measured import MeasuredLinear
from stoker.kernels.linear.streamed import streamed
from stoker.kernels.lora.lora import AHEAD_SHARED
from stoker.kernels.reference.lora import AdapterRows, LoraTable
from stoker.kernels.reference.norm_rotary import Activation

RANKS = {1: 4, 2: 16, 4: 33}
Calls = Mapping[str, Callable[[], Tensor]]
FIT = {1: 8, 2: 16, 4: 32}  # ahead of products


def expected(arguments: dict[str, Any], table: LoraTable, slots: Tensor, gated: Activation | None = None) -> Tensor:
    """In fp64: the adapters come after the projection, and here after the residual."""
    x, bias, residual = (None if t is None else t.double() for t in (arguments[n] for n in ("x", "bias", "residual")))
    assert x is not None
    out = F.linear(x, arguments["weight"].double(), bias)
    out = dense(x, out if residual is None else out + residual, table, slots)
    return out if gated is None else F.silu(out[:, : out.shape[1] // 2]) * out[:, out.shape[1] // 2 :]


@pytest.fixture(name="times")
def pretended_times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Times to be found, by the beginnings of names; any other is 9. Weights of any size are measured, of fp32 as well."""
    times = {"torch": 5.0, "beside": 7.0}
    pretend_times(monkeypatch, times)
    monkeypatch.setitem(linear_measured._ERROR, torch.float32, 1e-5)
    return times


def compare_only(monkeypatch: pytest.MonkeyPatch, *beginnings: str) -> None:
    """Of what is measured only the first way, streamed products, and ways whose names begin so, which run once to be compared.

    All of these have to be right. Of ways that differ in the memory that they leave, only those that leave the least.
    """
    by_time, most = linear_measured.by_time, f"{AHEAD_SHARED[1] // 1024} KiB left"

    def by_time_of_few(calls: Calls, first: str, expected: Tensor, weight: Tensor, timed: Calls) -> Any:
        begin = "streamed", *beginnings
        few = {n: c for n, c in calls.items() if n == first or (n.startswith(begin) and not n.endswith(most))}
        try:
            order, found = by_time(few, first, expected, weight, {first: lambda: expected} | dict(timed))
        except Exception as error:  # which else is logged, as one that is wrong is, and another way taken
            pytest.fail(f"not measured: {error!r}")
        if few.keys() - set(order):
            pytest.fail(f"wrong: {few.keys() - set(order)}")
        return order, found

    monkeypatch.setattr(linear_measured, "by_time", by_time_of_few)


class Streamed(NamedTuple):
    room: int  # of shared memory that it leaves
    ahead: bool = False  # whether adapters ran ahead of it


@pytest.fixture(name="products")
def streamed_products(monkeypatch: pytest.MonkeyPatch) -> list[Streamed]:
    """The streamed products that run."""
    products: list[Streamed] = []

    def counted(*arguments: Any, beside: int = 0, added: Any = None, **options: Any) -> Tensor:
        products.append(Streamed(beside, added is not None))
        return streamed(*arguments, beside=beside, added=added, **options)

    monkeypatch.setattr(linear_measured, "streamed", counted)
    return products


def adapted(
    linear: MeasuredLinear,
    arguments: dict[str, Any],
    table: LoraTable,
    slots: Tensor,
    gated: Activation | None = None,
) -> Tensor:
    """The projection, and what adapters do to it."""
    x, weight, bias, residual = (arguments[name] for name in ("x", "weight", "bias", "residual"))
    return linear.adapted(x, weight, bias, table, AdapterRows(slots), gated=gated, residual=residual)


def run(
    linear: MeasuredLinear,
    table: LoraTable,
    tokens: int = 20,
    options: str = "r",
    dtype: torch.dtype = torch.float32,
    depth: int = 304,
    gated: Activation | None = None,
) -> None:
    """The projections of a table's linears, with adapters of it, which are right."""
    arguments = make_linear(tokens, sum(table.widths), depth, options, dtype)
    slots = torch.arange(tokens, device=DEVICE) % (NUM_SLOTS + 1)
    assert_close(adapted(linear, arguments, table, slots, gated), expected(arguments, table, slots, gated), dtype)


def table_of(*widths: int, **options: Any) -> LoraTable:
    ranks, depth = options.pop("ranks", RANKS), options.pop("depth", 304)
    return make_table(widths or (64,), depth, ranks, options.pop("dtype", torch.float32), **options)
