"""What adapters do to a projection, added by the product itself: against dense products, PEFT, and the operations one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from linears import GATED, expected_norm, make_linear, pretend_times
from lora_oracle import NUM_SLOTS, dense, make_table
from torch import Tensor
from transformers.activations import ACT2FN
from triton_oracle import (
    DEVICE,
    DTYPES,
    assert_close,
    assert_early_starts_change_nothing,
    randn,
    unwritten_is_nan,  # noqa: F401
)

from stoker.kernels import linear_measured
from stoker.kernels.linear_measured import MeasuredLinear
from stoker.kernels.linear_streamed import Cut, streamed
from stoker.kernels.reference.lora import AdapterRows, LoraTable, LoraWeights
from stoker.kernels.reference.norm_rotary import Norm
from stoker.kernels.triton_ops import TRITON, measured

RANKS = {1: 4, 2: 16, 4: 33}


def expected(arguments: dict[str, Any], table: LoraTable, slots: Tensor) -> Tensor:
    """In fp64: the adapters come after the projection and before all else."""
    x, norm, bias = arguments["x"], arguments["norm"], arguments["bias"]
    x = x.double() if norm is None else expected_norm(x, *norm)
    out = dense(x, F.linear(x, arguments["weight"].double(), None if bias is None else bias.double()), table, slots)
    if arguments["gated"] is not None:
        gate, up = out.chunk(2, -1)
        out = ACT2FN[{"gelu_tanh": "gelu_pytorch_tanh"}.get(arguments["gated"], arguments["gated"])](gate) * up
    return out if arguments["residual"] is None else arguments["scale"] * out + arguments["residual"].double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "widths", "depth", "options", "cut"),
    [
        (20, [128, 64, 64], 304, "nb", Cut(64, 1, 1)),  # as q, k, v
        (33, [64, 32, 32], 304, "n", Cut(32, 2, 1)),
        (70, [130], 600, "rs", Cut(32, 3, 1)),  # as out and down, of which a tile ends beyond the last column
        (128, [72, 72], 96, "ng", Cut(32, 1, 1)),  # as gate and up
        (16, [40, 40], 1040, "bt", Cut(64, 1, 1)),
    ],
)
def test_an_adapted_product(
    tokens: int, widths: list[int], depth: int, options: str, cut: Cut, dtype: torch.dtype
) -> None:
    """With rows that have no adapter, one that has nothing of a linear, and ranks that take several turns."""
    arguments, table = make_linear(tokens, sum(widths), depth, options, dtype), make_table(widths, depth, RANKS, dtype)
    slots, arrived = torch.randint(NUM_SLOTS, (tokens,), device=DEVICE), torch.zeros(64, dtype=torch.int32).to(DEVICE)
    found = streamed(**arguments, cut=cut, arrived=arrived, adapters=(table, AdapterRows(slots)))
    assert_close(found, expected(arguments, table, slots), dtype)
    assert not arrived.any()
    bare = streamed(**arguments, cut=cut, arrived=arrived)
    assert torch.equal(found[slots % NUM_SLOTS == 0], bare[slots % NUM_SLOTS == 0])  # to the bit


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_an_adapted_product_of_adapters_in_fp32(dtype: torch.dtype) -> None:
    """As PEFT makes them over a model in 16 bits."""
    arguments, table = make_linear(40, 72, 304, "", dtype), make_table([72], 304, {1: 8, 3: 16}, torch.float32)
    slots, arrived = torch.randint(4, (40,), device=DEVICE), torch.zeros(64, dtype=torch.int32).to(DEVICE)
    found = streamed(**arguments, cut=Cut(32, 2, 1), arrived=arrived, adapters=(table, AdapterRows(slots)))
    assert_close(found, expected(arguments, table, slots), dtype)


@pytest.mark.parametrize(
    ("tokens", "widths", "options", "cut", "ranks"),
    [
        (40, [64, 32], "n", Cut(32, 1, 1), {slot: 3 + slot % 9 for slot in range(1, 17)}),
        (100, [96, 96], "g", Cut(64, 1, 1), dict.fromkeys((2, 3, 5, 11, 13), 8)),
        (128, [64], "r", Cut(64, 2, 1), {slot: 40 + slot for slot in range(1, 7)}),
    ],
    ids=["some at a time", "one at a time", "some ranks of one at a time"],
)
def test_an_adapted_product_of_many_adapters(
    tokens: int, widths: list[int], options: str, cut: Cut, ranks: dict[int, int]
) -> None:
    """Some of which no token has, in this batch, and slots of no adapter among them."""
    arguments = make_linear(tokens, sum(widths), 304, options, torch.float32)
    table, arrived = make_table(widths, 304, ranks, torch.float32), torch.zeros(64, dtype=torch.int32).to(DEVICE)
    slots = torch.arange(tokens, device=DEVICE) * 5 % (max(ranks) + 1)
    slots[slots == 5] = 0
    found = streamed(**arguments, cut=cut, arrived=arrived, adapters=(table, AdapterRows(slots)))
    assert_close(found, expected(arguments, table, slots), torch.float32)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", ["a", "b"])
def test_an_adapter_of_nan_fails_its_own_tokens_and_no_others(which: str, bad: float) -> None:
    """Zero times NaN is NaN, and all tokens of a tile go through the same product."""
    arguments = make_linear(40, 64, 304, "", torch.float32)
    table, arrived = make_table([64], 304, {1: 4, 2: 8, 4: 16}, torch.float32), torch.zeros(64, dtype=torch.int32)
    slots = torch.arange(40, device=DEVICE) % 5
    given: dict[str, Any] = {
        "cut": Cut(32, 1, 1),
        "arrived": arrived.to(DEVICE),
        "adapters": (table, AdapterRows(slots)),
    }
    before = streamed(**arguments, **given)
    getattr(table.weights[0][2], which)[3] = bad
    after = streamed(**arguments, **given)
    its_own = slots == 2
    assert torch.equal(after[~its_own], before[~its_own])
    assert not after[its_own].isfinite().all(-1).any()


# -- when it is taken ---------------------------------------------------------------------------------------------------


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Times to be found, by the beginnings of names; any other is 9. Weights of any size are measured, of fp32 as well."""
    times = {"torch": 5.0, "in one": 7.0}
    pretend_times(monkeypatch, times)
    monkeypatch.setitem(linear_measured._ERROR, torch.float32, 1e-5)
    return times


def adapted(table: LoraTable, tokens: int = 20, options: str = "r", dtype: torch.dtype = torch.float32) -> bool:
    """Whether the product of ``table``'s linears adds adapters; if so, rightly."""
    depth = 304
    arguments = make_linear(tokens, sum(table.widths), depth, options, dtype) | {"norm": None}
    given = {name: arguments[name] for name in ("gated", "residual", "scale")}
    slots = torch.arange(tokens, device=DEVICE) % (NUM_SLOTS + 1)
    x, weight, bias = arguments["x"], arguments["weight"], arguments["bias"]
    found = MeasuredLinear().adapted(x, weight, bias, table, AdapterRows(slots), **given)
    if found is not None:
        assert_close(found, expected(arguments, table, slots), dtype)
    return found is not None


def table_of(*widths: int, **options: Any) -> LoraTable:
    return make_table(widths or (64,), 304, RANKS, options.pop("dtype", torch.float32), **options)


def test_a_product_adds_what_only_adds(times: dict[str, float]) -> None:
    assert adapted(table_of()) and adapted(table_of(64, 64), options="g") and adapted(table_of(64, 128), tokens=128)
    assert adapted(table_of(dtype=torch.float16), dtype=torch.float16) and adapted(table_of(), dtype=torch.float16)
    assert not any(adapted(table_of(**{what: (1,)})) for what in ("gains", "shifts"))
    assert not adapted(table_of(columns=True))
    assert not adapted(table_of(dtype=torch.float16), dtype=torch.float32)
    assert not adapted(make_table((64,), 304, {1: 65}, torch.float32))
    assert not adapted(table_of(64, 40)), "a tile of two linears"
    assert not adapted(table_of(128), options="g"), "gate and up in one linear, whose halves no table knows"
    assert not adapted(LoraTable((64,), [None], NUM_SLOTS, DEVICE)) and not adapted(table_of(), tokens=4)
    assert not adapted(table_of(), tokens=129)


def test_whether_a_product_adds_adapters_is_measured_again_when_there_are_many(times: dict[str, float]) -> None:
    """Also if they are fewer again, as steps are captured for that."""
    linear, arguments = MeasuredLinear(), make_linear(20, 64, 304, "", torch.float32)
    table = make_table((64,), 304, dict.fromkeys(range(1, 5), 2), torch.float32)
    given = arguments["x"], arguments["weight"], None, table, AdapterRows(torch.zeros(20, dtype=torch.long).to(DEVICE))
    assert linear.adapted(*given) is not None
    few, times["in one"] = table.traits, 99.0
    assert linear.adapted(*given) is not None, "as was measured"
    table.put(0, 5, LoraWeights(randn(2, 304), randn(64, 2), 1.0))
    assert table.traits != few and linear.adapted(*given) is None
    table.put(0, 5, None)
    assert table.traits != few and linear.adapted(*given) is None
    before = table.traits
    table.put(0, 1, LoraWeights(randn(2, 304), randn(64, 2), 1.0, shift=randn(64)))
    times["in one"] = 1.0
    assert table.traits != before and linear.adapted(*given) is None, "which no product adds"


def test_a_product_adds_adapters_where_that_is_faster(times: dict[str, float]) -> None:
    """By the cut that is the fastest without them."""
    few, many = ("streamed, 32 rows in 1 splits", "streamed, 64 rows in 1 splits")
    for apart, in_one, of_few, of_many, wanted in ((5, 6, 1, 2, None), (5, 4, 8, 9, 32), (5, 4, 3, 2, 64)):
        times.update({"apart": apart, few: of_few, many: of_many, "streamed": 20.0, "in one": in_one})
        linear, arguments, table = MeasuredLinear(), make_linear(40, 128, 304, "", torch.float32), table_of(128)
        slots = torch.zeros(40, dtype=torch.long, device=DEVICE)  # as a step is captured with
        for _ in range(2):
            found = linear.adapted(arguments["x"], arguments["weight"], None, table, AdapterRows(slots))
        assert (found is None) == (wanted is None)
        assert [cut and cut.rows for cut in linear._products.values()] == [wanted]
        both = [f"in one {in_one:.1f} us", f"apart {apart:.1f} us"]
        assert linear.chosen["48 x 128 x 304, adapters"] == " < ".join(both if wanted else both[::-1])


@pytest.mark.parametrize("fault", ["wrong", "fails"])
def test_a_product_that_adds_adapters_wrongly_is_not_used(
    fault: str, times: dict[str, float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any, adapters: Any = None, **options: Any) -> Tensor:
        if adapters is not None and fault == "fails":
            raise torch.OutOfMemoryError("no memory left")
        return streamed(*arguments, **options)

    monkeypatch.setattr(linear_measured, "streamed", broken)
    assert not adapted(table_of())
    says = "is wrong for 20 rows of [64, 304], and not used" if fault == "wrong" else "no memory left"
    assert says in caplog.text


def test_no_product_is_measured_while_a_step_is_captured(
    times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_measured, "is_capturing", lambda device: True)
    assert not adapted(table_of())


def test_an_engine_whose_products_add_adapters_has_the_log_probabilities_of_peft(
    times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with either adapter and with none, in steps that are captured and replayed."""
    pytest.importorskip("peft")
    from adapted import running, two_adapters
    from pretend_device import build

    from stoker.rollout import SamplingParams

    model, products = two_adapters(), []

    def counted(*arguments: Any, adapters: Any = None, **options: Any) -> Tensor:
        products.append(adapters is not None)
        return streamed(*arguments, adapters=adapters, **options)

    monkeypatch.setattr(linear_measured, "streamed", counted)
    names = ["default", "other", None, "default", None, "other"]
    prompts = [[5 + i, 6, 7] for i in range(len(names))]
    with build(model, ops=replace(measured(), shared_from=None), decode_window=1, num_layers=1) as engine:
        settings = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)
        batch = engine.generate_batch(prompts, settings, adapter=names)
        assert sum(products) > 4 and engine.core.runner.has_graphs
    for output, name in zip(batch, names, strict=True):
        (c,) = output.completions
        with running(model, name):
            wanted = oracle.logprobs(model, output.prompt_token_ids, c.token_ids)
        torch.testing.assert_close(torch.tensor(c.logprobs).double(), wanted, rtol=0, atol=1e-4)


def test_an_adapter_with_biases_comes_into_the_slot_of_one_without(times: dict[str, float]) -> None:
    """Of steps that were captured with products that add the other."""
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
    assert layouts[0] != layouts[1] == layouts[2], "for which steps are captured anew, or not"


# -- on a device --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 40, 128])
def test_a_product_that_begins_beside_the_shrink_sees_all_that_was_written(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads x before the kernel before it has ended, which is the one after that which wrote x."""
    dtype = torch.bfloat16
    norm = Norm(torch.ones(1024, dtype=dtype, device=DEVICE), 1e-6)
    first, second = (randn(*size, dtype=dtype, scale=1 / 32) for size in ((6144, 1024), (1024, 3072)))
    gate_up, down = (make_table(w, d, {1: 16, 2: 8, 4: 64}, dtype) for w, d in (([3072, 3072], 1024), ([1024], 3072)))
    start, slots = randn(tokens, 1024, dtype=dtype), torch.randint(NUM_SLOTS, (tokens,), device=DEVICE)
    arrived = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    options: dict[str, Any] = {"bias": None, "norm": None, "scale": 1.0, "arrived": arrived}

    def chain() -> Tensor:
        x = start
        for _ in range(30):
            rows = AdapterRows(slots)
            normed = TRITON.rms_norm(x, *norm)
            wide = streamed(
                normed, first, gated=GATED["g"], residual=None, cut=Cut(64, 1, 1), adapters=(gate_up, rows), **options
            )
            x = streamed(wide, second, gated=None, residual=x, cut=Cut(32, 4, 1), adapters=(down, rows), **options)
            x = TRITON.rms_norm(x, *norm)
        return x

    assert_early_starts_change_nothing(chain, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_on_a_device_it_is_as_the_operations_one_by_one(dtype: torch.dtype, times: dict[str, float]) -> None:
    """Of the sizes of a model of a billion parameters; captured, for other tokens and other adapters."""
    ranks = {1: 16, 2: 8} if dtype == torch.float32 else dict.fromkeys(range(1, 17), 16)
    linear, slots = MeasuredLinear(), torch.randint(len(ranks) + 1, (64,), device=DEVICE)
    for widths, depth, options in (([2048, 512, 512], 2048, ""), ([8192, 8192], 2048, "g"), ([2048], 8192, "r")):
        arguments = make_linear(64, sum(widths), depth, options, torch.bfloat16) | {"norm": None}
        table = make_table(widths, depth, ranks, dtype)
        given = [arguments[name] for name in ("x", "weight", "bias")]
        rest = {name: arguments[name] for name in ("gated", "residual", "scale")}
        assert linear.adapted(*given, table, AdapterRows(slots), **rest) is not None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = linear.adapted(*given, table, AdapterRows(slots), **rest)
        assert found is not None
        for _ in range(3):
            slots.copy_(torch.randint(len(ranks) + 1, (64,)))
            arguments["x"].normal_()
            table.put(
                0, 1, LoraWeights(randn(16, depth, dtype=dtype, scale=0.02), randn(widths[0], 16, dtype=dtype), 0.5)
            )
            assert table.pointers.is_cuda  # and up to date
            graph.replay()
            assert_close(found, expected(arguments, table, slots), torch.bfloat16)
