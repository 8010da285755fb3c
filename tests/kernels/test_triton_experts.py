"""The experts' kernels and their reference, against a loop in fp64 and against Hugging Face's own modules.

Without a CUDA device kernels are interpreted, in fp32 and fp16; with one the same cases run compiled, in bf16 too.
"""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from families import experts_modules, make_model
from family_fields import ROUTED
from torch import Tensor
from triton_oracle import DEVICE, DTYPES, assert_close, randn, unwatched, unwritten_is_nan  # noqa: F401

from stoker.engine.layers import experts as interface
from stoker.kernels import grouping
from stoker.kernels.experts import moe as triton_moe
from stoker.kernels.ops import REFERENCE, Ops
from stoker.kernels.reference.adapter_weights import LoraWeights
from stoker.kernels.reference.fp8 import FP8, dequantise_rows
from stoker.kernels.reference.lora import LoraTable
from stoker.kernels.reference.moe import ExpertAdapters, Gate
from stoker.kernels.triton_ops import DETERMINISTIC, TRITON

GPT_OSS = Gate(interleaved=True, alpha=1.702, limit=1.5, offset=1.0)
GEGLU = Gate(act="gelu_tanh")
UNGATED = Gate(gated=False)
GATES = {"c": GPT_OSS, "g": GEGLU, "u": UNGATED}
OPS = {"reference": REFERENCE, "triton": TRITON, "deterministic": DETERMINISTIC}
all_ops = pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def make_experts(
    tokens: int, per_token: int, experts: int, depth: int, width: int, options: str, dtype: torch.dtype
) -> dict[str, Any]:
    """options: letters of bias, transposed weights, clamped and interleaved gate, or GELU, or ungated, weighed inputs, and only
    one expert that is chosen."""
    gate = next((known for letter, known in GATES.items() if letter in options), Gate())
    full_width = 2 * width if gate.gated else width
    chosen = torch.rand(tokens, experts)
    if "o" in options:
        chosen[:, experts - 1] = 2.0
    gate_up = randn(experts, full_width, depth, dtype=dtype, scale=2 * depth**-0.5)
    down = randn(experts, depth, width, dtype=dtype, scale=2 * width**-0.5)
    if "t" in options:
        gate_up, down = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (gate_up, down))
    bias = "b" in options
    return {
        "x": randn(tokens, depth, dtype=dtype),
        "expert_ids": chosen.topk(per_token).indices.to(DEVICE),
        "expert_weights": torch.rand(tokens, per_token).to(DEVICE, dtype),
        "gate_up": gate_up,
        "down": down,
        "gate_up_bias": randn(experts, full_width, dtype=dtype) if bias else None,
        "down_bias": randn(experts, depth, dtype=dtype) if bias else None,
        "gate": gate,
        "weigh_input": "w" in options,
    }


@unwatched
def expected_experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate: Gate,
    weigh_input: bool,
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, k in itertools.product(range(len(x)), range(expert_ids.shape[1])):
        expert = int(expert_ids[token, k])
        weight = expert_weights[token, k].double()
        hidden = gate_up[expert].double() @ x[token].double() * (weight if weigh_input else 1.0)
        if gate_up_bias is not None:
            hidden += gate_up_bias[expert].double()
        g, u = (hidden[::2], hidden[1::2]) if gate.interleaved else hidden.chunk(2)
        if gate is GPT_OSS:
            g, u = g.clamp(max=1.5), u.clamp(-1.5, 1.5)
            hidden = g * torch.sigmoid(1.702 * g) * (u + 1)
        elif gate is UNGATED:
            hidden = hidden.clamp(min=0) ** 2
        else:
            hidden = (F.gelu(g, approximate="tanh") if gate is GEGLU else F.silu(g)) * u
        hidden = down[expert].double() @ hidden
        if down_bias is not None:
            hidden += down_bias[expert].double()
        out[token] += hidden if weigh_input else weight * hidden
    return out


CASES = [
    (1, 2, 6, 48, 32, ""),
    (3, 1, 5, 48, 80, "b"),
    (40, 3, 6, 48, 32, "b"),  # several tiles for an expert
    (5, 2, 4, 80, 48, "btc"),  # gpt-oss
    (9, 2, 70, 48, 32, "t"),  # experts without tokens, and more than a power of two of them
    (20, 1, 3, 32, 16, "o"),
    (7, 1, 4, 48, 80, "tw"),  # Llama 4
    (6, 2, 4, 48, 40, "wb"),
    (12, 2, 5, 48, 32, "g"),  # Gemma 4
    (9, 3, 5, 48, 80, "ub"),  # Nemotron-H
    (4, 2, 3, 48, 32, "ut"),
    (2, 8, 8, 96, 48, ""),
]


@dtypes
@all_ops
@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts(case: tuple[int, int, int, int, int, str], ops: Ops, dtype: torch.dtype) -> None:
    arguments = make_experts(*case, dtype)
    assert_close(ops.experts(**arguments), expected_experts(**arguments), dtype)


@dtypes
@all_ops
@pytest.mark.parametrize("case", [CASES[2], CASES[3], CASES[6], CASES[9]], ids=str)
def test_experts_with_weights_in_fp8(case: tuple[int, int, int, int, int, str], ops: Ops, dtype: torch.dtype) -> None:
    """As with plain weights that have the same numbers."""
    arguments = make_experts(*case, dtype)
    plain, narrow, scales = dict(arguments), dict(arguments), []
    for name in ("gate_up", "down"):
        weight = arguments[name]
        values, factors = torch.empty(weight.shape, device=DEVICE).to(FP8), torch.empty(weight.shape[:2], device=DEVICE)
        for of_expert in zip(weight, values, factors, strict=True):
            REFERENCE.quantise_rows(*of_expert)
        scales.append(factors)
        narrow[name], plain[name] = values, dequantise_rows(values, factors, dtype)
    out = ops.experts(**narrow, scales=tuple(scales))
    assert_close(out, expected_experts(**plain), dtype)
    if DEVICE.type == "cpu":
        assert torch.equal(out, ops.experts(**plain))


@dtypes
@all_ops
@pytest.mark.parametrize("added", ["s", "sg", "r", "rp", "srp", "sgr", "rw", "rwp"])
def test_what_is_added_to_the_experts(added: str, ops: Ops, dtype: torch.dtype) -> None:
    """added: letters of the output of a shared expert, its gate, a residual, whether that is columns of a wider tensor, and
    whether the result takes its place."""
    tokens, depth = 5, 1040  # more than one program's
    arguments = make_experts(tokens, 2, 4, depth, 32, "", dtype)
    expected = expected_experts(**arguments)
    extra: dict[str, Any] = {}
    if "s" in added:
        extra["shared"] = shared = randn(tokens, 2 * depth, dtype=dtype)[:, :depth]
        if "g" in added:
            extra["shared_gate"] = randn(1, depth, dtype=dtype, scale=2 * depth**-0.5)
            expected += shared.double() * (arguments["x"].double() @ extra["shared_gate"].double().T).sigmoid()
        else:
            expected += shared.double()
    if "r" in added:
        wide = randn(tokens, 2 * depth if "w" in added else depth, dtype=dtype)
        beside = wide[:, depth:].clone()
        extra |= {"residual": wide[:, :depth], "scale": 0.3, "in_place": "p" in added}
        expected = extra["residual"].double() + 0.3 * expected
    out = ops.experts(**arguments, **extra)
    assert_close(out, expected, dtype)
    if "r" in added:
        assert torch.equal(wide[:, depth:], beside)
        if "w" not in added:
            assert (out.data_ptr() == wide.data_ptr()) == ("p" in added)


@pytest.mark.parametrize("ops", [TRITON, DETERMINISTIC], ids=["triton", "deterministic"])
def test_pairs_that_the_router_has_put_in_order(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = make_experts(9, 2, 6, 48, 32, "b", torch.float32)
    groups = grouping.order_by_group(arguments["expert_ids"], 6)
    expected = ops.experts(**arguments)
    monkeypatch.delattr(triton_moe, "order_by_group")
    assert torch.equal(ops.experts(**arguments, groups=groups), expected)


@all_ops
@pytest.mark.parametrize("options", ["", "btc", "tw", "g", "u"])
def test_adapters_of_experts(options: str, ops: Ops) -> None:
    """Adapters of some tokens, of different ranks, two of them one after the other, are other weights."""
    experts, depth, width = 6, 48, 32
    arguments = make_experts(9, 2, experts, depth, width, options, torch.float32)
    slots = torch.tensor([0, 2, 1, 1, 0, 3, 2, 2, 1], device=DEVICE)
    expected = expected_experts(**arguments)
    tables: dict[str, list[LoraTable]] = {}
    adapted = {slot: dict(arguments) for slot in (1, 2)}
    for name, rows, columns in (("gate_up", arguments["gate_up"].shape[1], depth), ("down", depth, width)):
        tables[name] = [LoraTable([rows], [None], 4, DEVICE, experts) for _ in range(2)]
        for slot, rank, links in ((1, 3, 1), (2, 7, 2)):
            for table in tables[name][:links]:
                weights = LoraWeights(randn(experts, rank, columns, scale=0.2), randn(experts, rows, rank), 0.3)
                table.put(0, slot, weights)
                adapted[slot][name] = adapted[slot][name] + 0.3 * weights.b @ weights.a
    for slot in adapted:
        expected[slots == slot] = expected_experts(**adapted[slot])[slots == slot]
    out = ops.experts(**arguments, adapters=ExpertAdapters(tables["gate_up"], tables["down"], slots))
    assert_close(out, expected, torch.float32)


@pytest.mark.parametrize("options", ["b", "btc", "tw"])
def test_sizes_that_divide_no_tile(options: str) -> None:
    arguments = make_experts(7, 3, 5, 50, 37, options, torch.float32)
    assert_close(TRITON.experts(**arguments), expected_experts(**arguments), torch.float32)


@all_ops
def test_what_experts_are_given_may_lie_in_any_way(ops: Ops) -> None:
    """Columns first, or as parts of something wider."""
    arguments = make_experts(7, 3, 5, 48, 32, "b", torch.float32)
    expected = expected_experts(**arguments)
    for change in (lambda t: t.t().contiguous().t(), lambda t: torch.cat((t, t), 1)[:, : t.shape[1]]):
        given = {name: change(arguments[name]) for name in ("x", "expert_ids", "expert_weights")}
        assert_close(ops.experts(**arguments | given), expected, torch.float32)


@all_ops
@pytest.mark.parametrize("options", ["btc", "u"])
def test_a_bound_hides_no_nan(options: str, ops: Ops) -> None:
    arguments = make_experts(3, 2, 4, 48, 32, options, torch.float32)
    good = ops.experts(**arguments)
    arguments["x"][1] = float("nan")
    out = ops.experts(**arguments)
    assert bool(out[1].isnan().all()) and torch.equal(out[::2], good[::2])


def test_expert_ids_in_more_than_one_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "_MAX_SCAN", 16)
    arguments = make_experts(30, 2, 5, 32, 16, "", torch.float32)
    assert_close(TRITON.experts(**arguments), expected_experts(**arguments), torch.float32)


def test_there_are_always_tiles_enough_and_never_far_too_many() -> None:
    for pairs, experts, rows in itertools.product((1, 7, 64, 200), (1, 5, 64), (16, 64)):
        most = grouping.most_tiles(pairs, experts, rows)
        # The worst there is: experts with one pair each, and all that is left with one of them.
        lone = min(pairs, experts) - 1
        assert lone + -(-(pairs - lone) // rows) <= most <= pairs // rows + experts


@dtypes
@pytest.mark.parametrize("options", ["", "btc", "tw"])
def test_a_token_has_the_same_bits_among_any_others(options: str, dtype: torch.dtype) -> None:
    arguments = make_experts(64, 2, 5, 48, 32, options, dtype)

    def run(rows: slice) -> Tensor:
        return DETERMINISTIC.experts(
            **arguments | {k: arguments[k][rows] for k in ("x", "expert_ids", "expert_weights")}
        )

    together = run(slice(None))
    for tokens in (1, 3, 17):
        assert torch.equal(run(slice(5, 5 + tokens)), together[5 : 5 + tokens])


def test_only_the_fast_experts_follow_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of another shape may add in another order, though not in the interpreter."""

    def tiles(ops: Ops) -> set[tuple[int, ...]]:
        seen = set()
        kernel = MagicMock()  # of any grid
        kernel.__getitem__.return_value = lambda *_, BLOCK_M, BLOCK_N, **__: seen.add((BLOCK_M, BLOCK_N))
        monkeypatch.setattr(triton_moe, "_grouped_kernel", kernel)
        for tokens in (1, 40, 600):
            ops.experts(**make_experts(tokens, 2, 4, 16, 16, "", torch.float32))
        return seen

    assert len(tiles(DETERMINISTIC)) == 1
    assert len(tiles(TRITON)) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "deterministic"])
def test_nothing_waits_for_the_device_and_a_capture_serves_other_tokens(name: str) -> None:
    ops, dtype = OPS[name], torch.bfloat16
    static = make_experts(32, 4, 16, 256, 128, "", dtype)
    ops.experts(**static)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.experts(**static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.experts(**static)
    for _ in range(3):
        other = make_experts(32, 4, 16, 256, 128, "", dtype)
        for key in ("x", "expert_ids", "expert_weights"):
            static[key].copy_(other[key])
        graph.replay()
        assert_close(captured, expected_experts(**static), dtype)


@pytest.mark.parametrize("family", ROUTED)
@pytest.mark.parametrize("ops", [REFERENCE, TRITON], ids=["reference", "triton"])
def test_a_module_gives_what_hugging_face_gives(family: str, ops: Ops) -> None:
    model = make_model(family).to(DEVICE).double()
    module = experts_modules(model)[0]
    hidden = model.config.hidden_size
    x = randn(6, hidden)
    scores = torch.randn(6, module.num_experts, device=DEVICE).softmax(-1)
    weights, ids = scores.topk(3)
    module.config._experts_implementation = "eager"
    expected = module(x.double(), ids, weights.double())
    model.float()
    interface.take_over_experts(model, ops)
    module.config._experts_implementation = interface.EXPERTS
    with torch.no_grad():
        assert_close(module(x, ids, weights), expected.detach(), torch.float32)
