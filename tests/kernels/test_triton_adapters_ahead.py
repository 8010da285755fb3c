"""Adapters ahead of streamed products: which go ahead, and that the result is that of dense products."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from adapted_linears import (
    FIT,
    Streamed,
    adapted,
    compare_only,
    expected,
    pretended_times,  # noqa: F401
    run,
    streamed_products,  # noqa: F401
    table_of,
)
from linears import make_linear
from lora_oracle import NUM_SLOTS
from torch import Tensor
from triton_oracle import DEVICE, assert_close, randn, unwritten_is_nan  # noqa: F401

from stoker.kernels import launch
from stoker.kernels.linear import measured as linear_measured
from stoker.kernels.linear.cuts import Cut
from stoker.kernels.linear.measured import MeasuredLinear
from stoker.kernels.linear.streamed import streamed
from stoker.kernels.lora import ahead as lora_ahead
from stoker.kernels.lora.lora import AHEAD_SHARED, lora
from stoker.kernels.reference.lora import AdapterRows, LoraTable
from stoker.kernels.reference.norm_rotary import Activation


@pytest.mark.parametrize("copied", [True, False])
def test_adapters_ahead_of_a_product(
    copied: bool, times: dict[str, float], products: list[Streamed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the shrink's depth has several splits; of few rows; of one slot; where programs have several
    blocks of columns; and on a chip whose threads ask for tiles."""
    if not copied:
        monkeypatch.setattr(launch, "copies_tiles", lambda device: False)
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=DEVICE))
    times["ahead"] = 1.0
    compare_only(monkeypatch, "ahead")
    half: dict[str, Any] = {"dtype": torch.float16}
    tables: tuple[tuple[LoraTable, dict[str, Any]], ...] = (
        (table_of(ranks=FIT), {}),
        (table_of(64, 128, ranks=FIT), {"options": "b"}),
        (table_of(64, 48, 16, ranks=FIT, depth=2112), {"options": "", "tokens": 40, "depth": 2112}),
        (table_of(64, 64, ranks=FIT), {"options": "b", "tokens": 70, "gated": "silu"}),
        (table_of(64, 64, ranks={1: 8, 2: 16}), {"options": "", "gated": "silu"}),
        (table_of(64, ranks=FIT, depth=4200), {"tokens": 8, "depth": 4200}),
        (table_of(64, 64, ranks=FIT), {"options": "", "tokens": 120, "gated": "silu"}),
        (table_of(32, ranks={1: 64, 3: 8} | dict.fromkeys([2], 24)), {"tokens": 40}),
        (table_of(ranks=FIT, **half), half),
        (table_of(720, 240, ranks=FIT, **half), half | {"tokens": 90, "options": ""}),
    )
    for table, given in tables[:: 1 if copied else 3]:
        linear = MeasuredLinear()
        run(linear, table, **given)
        assert products[-1] == Streamed(AHEAD_SHARED[0], ahead=True) and not any(
            counted.any() for counted in linear._arrived.values()
        )


def test_adapters_ahead_of_a_product_of_several_splits(
    times: dict[str, float], products: list[Streamed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where there are more multiprocessors than tiles: sums are exchanged before the product's turn."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 8)
    times["ahead"] = 1.0
    compare_only(monkeypatch, "ahead")
    for tokens, options in ((20, "br"), (40, "")):
        linear = MeasuredLinear()
        for _ in range(2):
            run(linear, table_of(ranks=FIT, depth=2112), tokens=tokens, options=options, depth=2112)
        fastest = next(found for name, found in linear.chosen.items() if name.endswith("adapters"))
        assert fastest.startswith("ahead") and " 1 splits" not in fastest and products[-1].ahead
        assert len(linear._arrived) > 1 and not any(counted.any() for counted in linear._arrived.values())


def test_ways_that_threads_launch_at_once_count_their_splits_apart(
    times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that adapters run ahead of counts before its turn, perhaps while a product that another thread launched still does."""
    counted: dict[int, set[str]] = {}

    def noted(*arguments: Any, cut: Cut, arrived: Tensor, beside: int = 0, added: Any = None, **options: Any) -> Tensor:
        counted.setdefault(arrived.data_ptr(), set()).add("in turn" if added is None else f"{cut} {beside}")
        return streamed(*arguments, cut=cut, arrived=arrived, beside=beside, added=added, **options)

    monkeypatch.setattr(linear_measured, "streamed", noted)
    linear = MeasuredLinear()
    run(linear, table_of(ranks=FIT))
    assert len(counted) >= 1 + len(AHEAD_SHARED) and all(len(ways) == 1 for ways in counted.values())


def test_a_row_without_an_adapter_is_as_a_product_by_itself_leaves_it(
    times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    times["ahead"] = times["streamed"] = 1.0
    compare_only(monkeypatch, "ahead")
    for options, gated in (("", None), ("br", None), ("b", "silu")):
        arguments, table = (
            make_linear(40, 64, 304, options, torch.float16),
            table_of(32, 32, ranks=FIT, dtype=torch.float16),
        )
        slots, linear = torch.arange(40, device=DEVICE) % (NUM_SLOTS + 1), MeasuredLinear()
        found = adapted(linear, arguments, table, slots, gated)
        given = {name: arguments[name] for name in ("x", "weight", "bias", "residual")}
        alone = linear(**given, gated=gated)
        assert torch.equal(found[slots == 0], alone[slots == 0]) and not torch.equal(found, alone)


def test_a_residual_whose_rows_lie_apart(
    times: dict[str, float], products: list[Streamed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of programs with one block of columns, and, without many multiprocessors, of ones with several."""
    times["ahead"] = 1.0
    compare_only(monkeypatch, "ahead")
    for width in (64, 128):
        arguments, table = make_linear(20, width, 304, "r", torch.float32), table_of(width, ranks=FIT)
        arguments["residual"] = randn(20, width + 24)[:, 8:-16]
        slots = torch.arange(20, device=DEVICE) % (NUM_SLOTS + 1)
        found = adapted(MeasuredLinear(), arguments, table, slots)
        assert_close(found, expected(arguments, table, slots), torch.float32)
        assert products[-1].ahead


def test_sums_of_parts_of_the_depth_are_added_before_they_are_rounded(
    times: dict[str, float], products: list[Streamed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without a product: of two parts that nearly cancel."""
    times["ahead"] = 1.0
    compare_only(monkeypatch, "ahead")
    arguments = make_linear(20, 64, 1024, "", torch.float16)
    arguments["x"].fill_(1)
    arguments["weight"].zero_()
    table = table_of(ranks={1: 8}, depth=1024, dtype=torch.float16)
    weights = table.entry(0, 1)
    assert weights is not None
    weights.a.fill_(1)[:, 512:] = -1
    weights.a[:, 0] += 1 / 16
    weights.b.fill_(1)
    found = adapted(MeasuredLinear(), arguments, table, torch.ones(20, dtype=torch.long, device=DEVICE))
    assert (found - 0.5 * weights.scale).abs().max() < 1e-3 and products[-1].ahead


def test_adapters_in_fp32_ahead_of_a_product_in_16_bits(
    times: dict[str, float], products: list[Streamed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT's own default over a bf16 base, which the interpreter does not compute in."""
    monkeypatch.setattr(lora_ahead, "_ROUNDED", (torch.float16,))
    times["ahead"] = 1.0
    compare_only(monkeypatch, "ahead")
    tables: tuple[tuple[LoraTable, dict[str, Any]], ...] = (
        (table_of(ranks=FIT), {}),
        (table_of(64, 64, ranks=FIT), {"options": "b", "tokens": 70, "gated": "silu"}),
        (table_of(ranks=FIT, depth=4200), {"tokens": 8, "depth": 4200}),
    )
    for table, given in tables:
        run(MeasuredLinear(), table, dtype=torch.float16, **given)
        assert products[-1].ahead
    arguments, slots = make_linear(20, 64, 304, "", torch.float16), torch.arange(20, device=DEVICE) % (NUM_SLOTS + 1)
    table, linear = table_of(ranks=FIT), MeasuredLinear()
    before = adapted(linear, arguments, table, slots)
    weights = table.entry(0, 2)
    assert weights is not None
    for value in (1e5, float("inf")):  # the former is more than the product's dtype holds
        weights.b[3, 5] = value
        found = adapted(linear, arguments, table, slots)
        assert not found[slots == 2].isfinite().all(1).any() and torch.equal(found[slots != 2], before[slots != 2])


def test_what_does_not_go_ahead(times: dict[str, float], products: list[Streamed]) -> None:
    """Gains and shifts, matrices that lie in columns, or of another dtype, too many ranks, widths that are no multiples of 16."""
    times["ahead"] = 1.0
    for table, given in (
        (table_of(ranks=FIT, gains=(1,)), {}),
        (table_of(ranks=FIT, shifts=(2,)), {}),
        (table_of(ranks=FIT, columns=True), {}),
        (table_of(ranks=FIT), {"dtype": torch.float16}),
        (table_of(ranks={1: 12}), {}),
        (table_of(ranks={1: 128}), {}),
        (table_of(40, 24, ranks=FIT), {"options": ""}),
    ):
        run(MeasuredLinear(), table, **given)
    assert products and not any(product.ahead for product in products)
    linear = MeasuredLinear()
    for table, goes in ((table_of(ranks=FIT), True), (table_of(40, 24, ranks=FIT), False)):
        run(linear, table, options="")
        assert products[-1].ahead == goes, "also after one that does, of a weight of the same size"


@pytest.mark.parametrize(("options", "gated"), [("", None), ("r", None), ("", "silu")])
def test_the_scales_of_a_weight_in_fp8_are_not_its_adapters(
    options: str,
    gated: Activation | None,
    times: dict[str, float],
    products: list[Streamed],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times["ahead"] = 1.0
    compare_only(monkeypatch, "ahead")
    arguments = make_linear(40, 64, 304, options, torch.float16)
    table = table_of(32, 32, ranks=FIT, dtype=torch.float16)
    slots, scales = torch.arange(40, device=DEVICE) % (NUM_SLOTS + 1), torch.rand(64, device=DEVICE) + 0.5
    rounded = (8 * arguments["weight"]).to(torch.float8_e4m3fn)
    given = arguments["x"], rounded, None, table, AdapterRows(slots)
    residual = arguments["residual"]
    found = MeasuredLinear().adapted(*given, row_scales=scales, gated=gated, residual=residual)
    arguments["weight"] = rounded.double() * scales[:, None]
    assert_close(found, expected(arguments, table, slots, gated), torch.float16)
    assert products[-1].ahead


def test_an_adapter_that_is_not_finite_is_its_own_tokens_alone(
    times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    times["ahead"] = 1.0
    compare_only(monkeypatch, "ahead")
    for tokens, widths, gated in ((20, (64,), None), (70, (64,), None), (40, (32, 32), "silu")):
        linear = MeasuredLinear()
        for value in (float("nan"), float("inf")):
            for matrix in ("a", "b"):
                table, arguments = (
                    table_of(*widths, ranks=FIT),
                    make_linear(tokens, sum(widths), 304, "", torch.float32),
                )
                slots = torch.arange(tokens, device=DEVICE) % (NUM_SLOTS + 1)
                before = adapted(linear, arguments, table, slots, gated)
                weights = table.entry(0, 2)
                assert weights is not None
                getattr(weights, matrix)[3, 5] = value
                found = adapted(linear, arguments, table, slots, gated)
                own = slots == 2
                assert not found[own].isfinite().all(1).any()
                assert torch.equal(found[~own], before[~own]) or (found - before)[~own].abs().max() < 1e-4
        assert len(linear._with_adapters) == 1


def test_a_shrink_leaves_shared_memory_to_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is told once of each function; without bindings, or of what was interpreted, nothing is."""
    told: list[tuple[int, str, int]] = []
    driver = SimpleNamespace(
        CUfunction=int,
        CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT="carve-out"),
        cuFuncSetAttribute=lambda *what: told.append(what),
    )
    monkeypatch.setattr(launch, "_ROOMY", set())
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    launch.leave_room(SimpleNamespace(function=3))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    for function in (3, 5, 5, 7, 5):
        launch.leave_room(SimpleNamespace(function=function))
    launch.leave_room(None)
    assert told == [(5, "carve-out", 100), (7, "carve-out", 100)]


@pytest.mark.gpu
def test_a_driver_takes_it() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    before, known = set(launch._ROOMY), driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    table = table_of(ranks={1: 8, 2: 24, 4: 40})
    x, slots = randn(20, 304), torch.arange(20, device=DEVICE) % (NUM_SLOTS + 1)
    lora(x, randn(20, 64), table, AdapterRows(slots), deterministic=True)
    for function in launch._ROOMY - before or launch._ROOMY:
        assert driver.cuFuncGetAttribute(known, driver.CUfunction(function)) == (driver.CUresult.CUDA_SUCCESS, 100)
