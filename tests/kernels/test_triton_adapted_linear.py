"""Projections followed by adapters, in each way to multiply: against dense products and PEFT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import oracle
import pytest
import torch
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
from lora_oracle import NUM_SLOTS, make_table
from torch import Tensor
from triton_oracle import (
    DEVICE,
    assert_close,
    assert_early_starts_change_nothing,
    randn,
    unwritten_is_nan,  # noqa: F401
)

from stoker.kernels.linear import measured as linear_measured
from stoker.kernels.linear.cuts import Cut
from stoker.kernels.linear.measured import MeasuredLinear
from stoker.kernels.linear.streamed import streamed
from stoker.kernels.lora.lora import AHEAD_SHARED, SHRINK_SHARED, lora, shrink
from stoker.kernels.reference.adapter_weights import LoraWeights
from stoker.kernels.reference.lora import AdapterRows, LoraTable
from stoker.kernels.reference.norm_rotary import Norm
from stoker.kernels.triton_ops import TRITON, measured

OF_WAY = {
    "after": Streamed(0),
    "around": Streamed(0),
    "beside": Streamed(SHRINK_SHARED),
    "ahead": Streamed(AHEAD_SHARED[0], ahead=True),
}


def test_a_projection_leaves_room_for_the_shrink(
    times: dict[str, float], products: list[Streamed], caplog: pytest.LogCaptureFixture
) -> None:
    times["beside"] = 3.0
    half: dict[str, Any] = {"dtype": torch.float16}
    for table, given in (
        (table_of(), {}),
        (table_of(64, 40), {"options": "b"}),
        (table_of(64, 64), {"options": "", "gated": "silu"}),
        (table_of(64, 128), {"tokens": 128}),
        (table_of(gains=(1,), shifts=(2,), biased=True), {}),
        (table_of(columns=True), {}),
        (table_of(**half), half),
        (table_of(), half),
    ):
        run(MeasuredLinear(), table, **given)
        assert products[-1] == OF_WAY["beside"]
    products.clear()
    run(MeasuredLinear(), table_of(), tokens=4)
    run(MeasuredLinear(), table_of(), tokens=600)
    run(MeasuredLinear(), LoraTable((64,), [None], NUM_SLOTS, DEVICE))
    assert not any(product.room for product in products) and "wrong" not in caplog.text


def test_what_is_measured_with_adapters(
    times: dict[str, float], products: list[Streamed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a product, by the cut that is the fastest without adapters; ahead of one, by the two fastest, which leave more room
    or less. Measured once, and again for adapters of a higher rank; with rows of all adapters, whatever a step's have."""
    measured_with: list[set[int]] = []

    def noted(x: Tensor, out: Tensor, table: LoraTable, rows: AdapterRows, *more: Any, **options: Any) -> Tensor:
        measured_with.append({*rows.slots.tolist()})
        return lora(x, out, table, rows, *more, **options)

    monkeypatch.setattr(linear_measured, "lora", noted)
    cuts = [Cut(32, 1, 1), Cut(64, 1, 1)]  # on any device
    monkeypatch.setattr(linear_measured, "cuts_to_try", lambda *_, **__: cuts)
    few, many = ("streamed, 32 rows in 1 splits", "streamed, 64 rows in 1 splits")
    for taken, of_few, of_many, wanted in (
        ({"after": 5, "beside": 6, "ahead": 7}, 1, 2, None),
        ({"after": 5, "beside": 4, "ahead": 6}, 8, 9, 32),
        ({"after": 5, "beside": 4, "ahead": 6}, 3, 2, 64),
        ({"after": 5, "beside": 4, "ahead": 3}, 3, 2, 64),
    ):
        taken = {"around": 10, **taken}
        times.update({few: of_few, many: of_many, "streamed": 20.0, **taken})
        linear, arguments = MeasuredLinear(), make_linear(40, 128, 304, "", torch.float32)
        table = table_of(128, ranks=FIT)
        slots = torch.zeros(40, dtype=torch.long, device=DEVICE)  # as a step is captured with
        call = partial(adapted, linear, arguments, table, slots)
        measured_with.clear()
        call()
        assert measured_with[0] == {*FIT}
        (way,) = linear._with_adapters.values()
        assert (way and way.args[0].rows) == wanted  # type: ignore[attr-defined]
        order = sorted(taken, key=lambda name: taken[name])
        rows = (32, 64) if of_few < of_many else (64, 32)
        names = {
            "ahead": [f"ahead, {n} rows in 1 splits, {size // 1024} KiB left" for n in rows for size in AHEAD_SHARED]
        }
        said = [f"{full} {taken[name]:.1f} us" for name in order for full in names.get(name, [name])]
        assert linear.chosen["48 x 128 x 304, adapters"] == " < ".join(said)
        products.clear()
        times["beside"] = times["ahead"] = 0.0 if wanted is None else 99.0
        call()
        assert products == [OF_WAY[order[0]]]
        table.put(0, 5, LoraWeights(randn(40, 304), randn(128, 40), 1.0))
        call()
        assert len(linear._with_adapters) == 2
        products.clear()
        call()
        assert any(product.room for product in products) == (wanted is None)


def test_with_more_rows_than_a_product_streams_they_may_be_around_it(times: dict[str, float]) -> None:
    """Measured, too: with and without activation and residual, also where adapters do more than add."""
    for taken, chosen in ((2.0, True), (7.0, False)):
        times.update({"after": 5.0, "around": taken})
        for table, options, gated in (
            (table_of(ranks=FIT), "r", None),
            (table_of(64, 64), "b", "silu"),
            (table_of(gains=(1,), shifts=(2,), biased=True), "", None),
        ):
            linear = MeasuredLinear()
            run(linear, table, tokens=130, options=options, gated=gated)  # type: ignore[arg-type]
            ((way,), (said,)) = linear._with_adapters.values(), linear.chosen.values()
            assert (way == linear._around) == chosen
            order = ["after 5.0 us", f"around {taken:.1f} us"]
            assert said == " < ".join(order[:: -1 if chosen else 1])


@pytest.mark.parametrize("way", ["after", "around"])
def test_the_sum_takes_the_residuals_place(
    way: str, times: dict[str, float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once measured, of which a residual is not the place; also where each way has run before, as on a device that compiles them."""

    def by_time(calls: Mapping[str, Callable[[], Tensor]], *more: Any) -> tuple[list[str], str]:
        for call in calls.values():
            call()
        return linear_measured_by_time(calls, *more)

    linear_measured_by_time = linear_measured.by_time
    monkeypatch.setattr(linear_measured, "by_time", by_time)
    times[way] = 1.0
    for tokens in (20, 130):
        linear, table, arguments = MeasuredLinear(), table_of(), make_linear(tokens, 64, 304, "r", torch.float32)
        slots, residual = torch.arange(tokens, device=DEVICE) % (NUM_SLOTS + 1), arguments["residual"]
        wanted = expected(arguments, table, slots)
        given = arguments["x"], arguments["weight"], None, table, AdapterRows(slots)
        found = linear.adapted(*given, residual=residual, in_place=True)
        assert_close(found, wanted, torch.float32)
        assert found.data_ptr() == residual.data_ptr()
        assert list(linear.chosen.values())[-1].startswith(f"{way} 1.0 us")
    assert "wrong" not in caplog.text


def test_what_was_shrunk_before_is_not_shrunk_again() -> None:
    table, x, out = table_of(64, 64), randn(20, 304), randn(20, 128)
    rows, acts = AdapterRows(torch.arange(20, device=DEVICE) % (NUM_SLOTS + 1)), (None, "silu")
    for act in acts:
        nothing = shrink(x, table, rows, act).zero_()
        found = lora(x, out.clone(), table, rows, act, shrunk=nothing)
        torch.testing.assert_close(found, out if act is None else TRITON.act_mul(out, act))


def test_an_adapter_with_a_gain_is_another_kind_of_table() -> None:
    """Which steps are captured for: what went ahead goes so no more."""
    table = table_of(ranks=FIT)
    before = table.traits
    table.put(0, 1, LoraWeights(randn(8, 304), randn(64, 8), 1.0, shift=randn(64)))
    assert table.traits != before
    after = table.traits
    table.put(0, 1, None)
    assert table.traits == after


@pytest.mark.parametrize("fault", ["wrong", "fails"])
@pytest.mark.parametrize("way", ["beside", "ahead"])
def test_one_that_is_wrong_then_is_not_used(
    way: str,
    fault: str,
    times: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*arguments: Any, beside: int = 0, added: Any = None, **options: Any) -> Tensor:
        is_it = Streamed(beside, added is not None) == OF_WAY[way]
        if is_it and fault == "fails":
            raise torch.OutOfMemoryError("no memory left")
        return streamed(*arguments, beside=beside, added=added, **options) + 1.0 * is_it

    monkeypatch.setattr(linear_measured, "streamed", broken)
    times[way] = 1.0
    linear, table = MeasuredLinear(), table_of(ranks=FIT)
    run(linear, table)
    run(linear, table)
    name = f"ahead, 64 rows in 1 splits, {AHEAD_SHARED[0] // 1024} KiB left" if way == "ahead" else way
    says = f"{name} is wrong for 20 rows of [64, 304], and not used" if fault == "wrong" else "no memory left"
    assert caplog.text.count(says) == 1


def test_nothing_is_measured_while_a_step_is_captured(
    times: dict[str, float], products: list[Streamed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_measured, "is_capturing", lambda device: True)
    linear = MeasuredLinear()
    run(linear, table_of())
    assert not (products or linear.chosen)


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends to be a device")
@pytest.mark.parametrize("way", ["beside", "around", "ahead"])
def test_an_engine_whose_products_leave_room_has_the_log_probabilities_of_peft(
    way: str, times: dict[str, float], products: list[Streamed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with either adapter and with none, in steps that are captured and replayed."""
    pytest.importorskip("peft")
    compare_only(monkeypatch, way)
    from adapted import lora as lora_config
    from adapted import running, shake, with_lora
    from families import make_model
    from pretend_device import build

    from stoker.rollout import SamplingParams

    times[way] = 1.0
    model = with_lora(make_model("llama", num_hidden_layers=1), r=8)
    model.add_adapter("other", lora_config(r=16, lora_alpha=2, target_modules=["k_proj", "up_proj", "down_proj"]))
    shake(model, seed=2)
    names = ["default", "other", None, "default", None, "other"]
    prompts = [[5 + i, 6, 7] for i in range(len(names))]
    with build(model, ops=replace(measured(), shared_from=None), decode_window=1) as engine:
        settings = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)
        batch = engine.generate_batch(prompts, settings, adapter=names)
        assert products.count(OF_WAY[way]) > 4 and engine.core.runner.has_graphs
    for output, name in zip(batch, names, strict=True):
        (c,) = output.completions
        with running(model, name):
            wanted = oracle.logprobs(model, output.prompt_token_ids, c.token_ids)
        torch.testing.assert_close(torch.tensor(c.logprobs).double(), wanted, rtol=0, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends to be a device")
def test_an_adapter_with_biases_comes_into_the_slot_of_one_without(
    times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps that were captured for the other, which serve both."""
    pytest.importorskip("peft")
    compare_only(monkeypatch, "beside")
    from adapted import running, state_dict, with_lora
    from families import make_model
    from pretend_device import build

    from stoker.rollout import SamplingParams

    sizes: dict[str, Any] = {"num_hidden_layers": 1, "attention_bias": True}
    models = {
        name: with_lora(make_model("llama", **sizes), r=4, bias=bias)
        for name, bias in (("plain", "none"), ("biased", "lora_only"))
    }
    settings = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with build(make_model("llama", **sizes), ops=measured(), decode_window=1, max_loras=1) as engine:
        for name, model in models.items():
            engine.load_adapter(name, (state_dict(model), model.peft_config["default"]))
        layouts = []
        for name in ("plain", "biased", "plain"):
            batch = engine.generate_batch([[5 + i, 6, 7] for i in range(5)], settings, adapter=name)
            layouts.append(engine._binding.shell.lora.layout)
            for output in batch:
                (c,) = output.completions
                with running(models[name], "default"):
                    wanted = oracle.logprobs(models[name], output.prompt_token_ids, c.token_ids)
                torch.testing.assert_close(torch.tensor(c.logprobs).double(), wanted, rtol=0, atol=1e-4)
    assert len(set(layouts)) == 1


# -- on a device --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["beside", "around", "ahead"])
@pytest.mark.parametrize("tokens", [16, 40, 128])
def test_what_begins_beside_the_kernel_before_sees_all_that_was_written(
    tokens: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shrink, or a product that adapters run ahead of, reads x before the other has ended, which came after what wrote x."""
    dtype = torch.bfloat16
    norm = Norm(torch.ones(1024, dtype=dtype, device=DEVICE), 1e-6)
    first, second = (randn(*size, dtype=dtype, scale=1 / 32) for size in ((6144, 1024), (1024, 3072)))
    ranks = dict.fromkeys(range(1, 17), 16) if way == "ahead" else {1: 16, 2: 8, 4: 64}
    gate_up, down = (make_table(w, d, ranks, dtype) for w, d in (([3072, 3072], 1024), ([1024], 3072)))
    start, slots = randn(tokens, 1024, dtype=dtype), torch.randint(max(ranks) + 1, (tokens,), device=DEVICE)
    linear = MeasuredLinear()

    def project(cut: Cut, *given: Any, residual: Tensor | None = None) -> Tensor:
        adapted = linear_measured._Adapted(*given, {"residual": residual, "row_scales": None})
        ways = {
            "ahead": partial(linear._ahead, cut, AHEAD_SHARED[0]),
            "beside": partial(linear._beside, cut),
            "around": linear._around,
        }
        return ways[way](adapted)

    def chain() -> Tensor:
        x, rows = start, AdapterRows(slots)
        for _ in range(30):
            normed = TRITON.rms_norm(x, *norm)
            wide = project(Cut(32 if way == "ahead" else 64, 1, 1), normed, first, None, gate_up, rows, "silu")
            x = project(Cut(32, 4, 1), wide, second, None, down, rows, None, residual=x)
            x = TRITON.rms_norm(x, *norm)
        return x

    assert_early_starts_change_nothing(chain, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_on_a_device_it_is_as_dense_products(dtype: torch.dtype) -> None:
    """Of the sizes of a model of a billion parameters; captured, for other tokens and other adapters."""
    ranks = {1: 16, 2: 8} if dtype == torch.float32 else dict.fromkeys(range(1, 17), 16)
    linear, slots = MeasuredLinear(), torch.randint(len(ranks) + 1, (64,), device=DEVICE)
    for widths, depth, options in (([2048, 512, 512], 2048, ""), ([8192, 8192], 2048, ""), ([2048], 8192, "r")):
        arguments = make_linear(64, sum(widths), depth, options, torch.bfloat16)
        table = make_table(widths, depth, ranks, dtype)
        adapted(linear, arguments, table, slots)
        chosen = next(found for name, found in linear.chosen.items() if name.endswith("adapters"))
        assert "ahead" in chosen
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = adapted(linear, arguments, table, slots)
        for _ in range(3):
            slots.copy_(torch.randint(len(ranks) + 1, (64,)))
            arguments["x"].normal_()
            table.put(
                0, 1, LoraWeights(randn(16, depth, dtype=dtype, scale=0.02), randn(widths[0], 16, dtype=dtype), 0.5)
            )
            assert table.pointers.is_cuda  # and up to date
            graph.replay()
            assert_close(found, expected(arguments, table, slots), torch.bfloat16)
