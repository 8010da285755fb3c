"""Projections that adapters come after, and who multiplies then: against dense products and PEFT."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from linears import make_linear, pretend_times
from lora_oracle import NUM_SLOTS, dense, make_table
from torch import Tensor
from triton_oracle import (
    DEVICE,
    assert_close,
    assert_early_starts_change_nothing,
    randn,
    unwritten_is_nan,  # noqa: F401
)

from stoker.kernels import linear_measured
from stoker.kernels.linear_measured import MeasuredLinear
from stoker.kernels.linear_streamed import Cut, streamed
from stoker.kernels.lora import SHRINK_SHARED, lora
from stoker.kernels.reference.lora import AdapterRows, LoraTable, LoraWeights
from stoker.kernels.reference.norm_rotary import Norm
from stoker.kernels.triton_ops import TRITON, measured

RANKS = {1: 4, 2: 16, 4: 33}


def expected(arguments: dict[str, Any], table: LoraTable, slots: Tensor) -> Tensor:
    """In fp64: the adapters come after the projection, and here after the residual."""
    x, bias, residual = (None if t is None else t.double() for t in (arguments[n] for n in ("x", "bias", "residual")))
    assert x is not None
    out = F.linear(x, arguments["weight"].double(), bias)
    return dense(x, out if residual is None else out + residual, table, slots)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Times to be found, by the beginnings of names; any other is 9. Weights of any size are measured, of fp32 as well."""
    times = {"torch": 5.0, "beside": 7.0}
    pretend_times(monkeypatch, times)
    monkeypatch.setitem(linear_measured._ERROR, torch.float32, 1e-5)
    return times


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each streamed product that runs leaves of shared memory."""
    rooms: list[int] = []

    def counted(*arguments: Any, beside: int = 0, **options: Any) -> Tensor:
        rooms.append(beside)
        return streamed(*arguments, beside=beside, **options)

    monkeypatch.setattr(linear_measured, "streamed", counted)
    return rooms


def both(linear: MeasuredLinear, arguments: dict[str, Any], table: LoraTable, slots: Tensor) -> Tensor:
    """The projection, and what adapters do to it."""
    x, weight, bias = (arguments[name] for name in ("x", "weight", "bias"))
    rows = AdapterRows(slots)
    return lora(
        x, linear.adapted(x, weight, bias, table, rows, residual=arguments["residual"]), table, rows, settled=True
    )


def run(
    linear: MeasuredLinear, table: LoraTable, tokens: int = 20, options: str = "r", dtype: torch.dtype = torch.float32
) -> None:
    """The projections of a table's linears, with adapters of it, which are right."""
    arguments = make_linear(tokens, sum(table.widths), 304, options, dtype)
    slots = torch.arange(tokens, device=DEVICE) % (NUM_SLOTS + 1)
    assert_close(both(linear, arguments, table, slots), expected(arguments, table, slots), dtype)


def table_of(*widths: int, **options: Any) -> LoraTable:
    return make_table(widths or (64,), 304, RANKS, options.pop("dtype", torch.float32), **options)


def test_a_projection_leaves_room_for_the_shrink(times: dict[str, float], rooms: list[int]) -> None:
    half: dict[str, Any] = {"dtype": torch.float16}
    for table, given in (
        (table_of(), {}),
        (table_of(64, 40), {"options": "b"}),
        (table_of(64, 128), {"tokens": 128}),
        (table_of(gains=(1,), shifts=(2,), biased=True), {}),
        (table_of(columns=True), {}),
        (table_of(**half), half),
        (table_of(), half),
    ):
        run(MeasuredLinear(), table, **given)
        assert rooms[-1] == SHRINK_SHARED
    rooms.clear()
    run(MeasuredLinear(), table_of(), tokens=4)
    run(MeasuredLinear(), table_of(), tokens=129)
    run(MeasuredLinear(), LoraTable((64,), [None], NUM_SLOTS, DEVICE))
    assert SHRINK_SHARED not in rooms


def test_it_does_where_both_take_less_time_so(
    times: dict[str, float], rooms: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the cut that is the fastest without adapters. Measured once, and again for adapters of a higher rank."""
    cuts = [Cut(32, 1, 1), Cut(64, 1, 1)]  # on any device
    monkeypatch.setattr(linear_measured, "cuts_to_try", lambda *_, **__: cuts)
    few, many = ("streamed, 32 rows in 1 splits", "streamed, 64 rows in 1 splits")
    for after, beside, of_few, of_many, wanted in ((5, 6, 1, 2, None), (5, 4, 8, 9, 32), (5, 4, 3, 2, 64)):
        times.update({"after": after, few: of_few, many: of_many, "streamed": 20.0, "beside": beside})
        linear, arguments, table = MeasuredLinear(), make_linear(40, 128, 304, "", torch.float32), table_of(128)
        slots = torch.zeros(40, dtype=torch.long, device=DEVICE)  # as a step is captured with
        call = partial(linear.adapted, arguments["x"], arguments["weight"], None, table, AdapterRows(slots))
        call()
        assert [cut and cut.rows for cut in linear._beside.values()] == [wanted]
        both = [f"beside {beside:.1f} us", f"after {after:.1f} us"]
        assert linear.chosen["48 x 128 x 304, adapters"] == " < ".join(both if wanted else both[::-1])
        del rooms[:]
        times["beside"] = 0.0 if wanted is None else 99.0
        call()
        assert rooms == [SHRINK_SHARED if wanted else 0], "as was measured"
        table.put(0, 5, LoraWeights(randn(40, 304), randn(128, 40), 1.0))
        call()
        assert len(linear._beside) == 2
        del rooms[:]
        call()
        assert (SHRINK_SHARED in rooms) == (wanted is None)


@pytest.mark.parametrize("fault", ["wrong", "fails"])
def test_one_that_is_wrong_then_is_not_used(
    fault: str, times: dict[str, float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any, beside: int = 0, **options: Any) -> Tensor:
        if beside and fault == "fails":
            raise torch.OutOfMemoryError("no memory left")
        return streamed(*arguments, **options) + 1.0 * bool(beside)

    monkeypatch.setattr(linear_measured, "streamed", broken)
    linear = MeasuredLinear()
    run(linear, table_of())
    run(linear, table_of())
    says = "beside is wrong for 20 rows of [64, 304], and not used" if fault == "wrong" else "no memory left"
    assert caplog.text.count(says) == 1


def test_nothing_is_measured_while_a_step_is_captured(
    times: dict[str, float], rooms: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_measured, "is_capturing", lambda device: True)
    linear = MeasuredLinear()
    run(linear, table_of())
    assert not (rooms or linear.chosen)


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends to be a device")
def test_an_engine_whose_products_leave_room_has_the_log_probabilities_of_peft(
    times: dict[str, float], rooms: list[int]
) -> None:
    """Rows with either adapter and with none, in steps that are captured and replayed."""
    pytest.importorskip("peft")
    from adapted import running, two_adapters
    from pretend_device import build

    from stoker.rollout import SamplingParams

    model = two_adapters()
    names = ["default", "other", None, "default", None, "other"]
    prompts = [[5 + i, 6, 7] for i in range(len(names))]
    with build(model, ops=replace(measured(), shared_from=None), decode_window=1, num_layers=1) as engine:
        settings = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)
        batch = engine.generate_batch(prompts, settings, adapter=names)
        assert rooms.count(SHRINK_SHARED) > 4 and engine.core.runner.has_graphs
    for output, name in zip(batch, names, strict=True):
        (c,) = output.completions
        with running(model, name):
            wanted = oracle.logprobs(model, output.prompt_token_ids, c.token_ids)
        torch.testing.assert_close(torch.tensor(c.logprobs).double(), wanted, rtol=0, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends to be a device")
def test_an_adapter_with_biases_comes_into_the_slot_of_one_without(times: dict[str, float]) -> None:
    """Of steps that were captured for the other, which serve both."""
    pytest.importorskip("peft")
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
@pytest.mark.parametrize("tokens", [16, 40, 128])
def test_a_shrink_that_begins_beside_the_product_sees_all_that_was_written(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads x before the product has ended, which came after what wrote x."""
    dtype = torch.bfloat16
    norm = Norm(torch.ones(1024, dtype=dtype, device=DEVICE), 1e-6)
    first, second = (randn(*size, dtype=dtype, scale=1 / 32) for size in ((6144, 1024), (1024, 3072)))
    gate_up, down = (make_table(w, d, {1: 16, 2: 8, 4: 64}, dtype) for w, d in (([3072, 3072], 1024), ([1024], 3072)))
    start, slots = randn(tokens, 1024, dtype=dtype), torch.randint(NUM_SLOTS, (tokens,), device=DEVICE)
    arrived = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    options: dict[str, Any] = {"bias": None, "norm": None, "gated": None, "scale": 1.0, "arrived": arrived}
    options["beside"] = SHRINK_SHARED

    def chain() -> Tensor:
        x, rows = start, AdapterRows(slots)
        for _ in range(30):
            normed = TRITON.rms_norm(x, *norm)
            wide = streamed(normed, first, residual=None, cut=Cut(64, 1, 1), **options)
            wide = lora(normed, wide, gate_up, rows, "silu", settled=True)
            x = streamed(wide, second, residual=x, cut=Cut(32, 4, 1), **options)
            x = lora(wide, x, down, rows, settled=True)
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
        both(linear, arguments, table, slots)
        assert any(name.endswith("adapters") for name in linear.chosen)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = both(linear, arguments, table, slots)
        for _ in range(3):
            slots.copy_(torch.randint(len(ranks) + 1, (64,)))
            arguments["x"].normal_()
            table.put(
                0, 1, LoraWeights(randn(16, depth, dtype=dtype, scale=0.02), randn(widths[0], 16, dtype=dtype), 0.5)
            )
            assert table.pointers.is_cuda  # and up to date
            graph.replay()
            assert_close(found, expected(arguments, table, slots), torch.bfloat16)
