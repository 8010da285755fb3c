"""A router's kernels and their reference, against a loop in fp64 that chooses expert by expert.

Without a CUDA device kernels are interpreted, in fp32 and fp16; with one the same cases run compiled, in bf16 too.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from routers import (
    CASES,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GPT_OSS,
    IN_GROUPS,
    LFM2,
    LLAMA4,
    MIXTRAL,
    OLMOE,
    QWEN3,
    assert_in_order,
    by_expert,
    expected_route,
    make_router,
)
from torch import Tensor
from triton_oracle import (
    DEVICE,
    DTYPES,
    TOLERANCE,
    assert_close,
    assert_early_starts_change_nothing,
    randn,
    unwritten_is_nan,  # noqa: F401
)

from stoker.kernels.experts import routing as triton_routing
from stoker.kernels.ops import REFERENCE, Ops
from stoker.kernels.reference.moe import Gate
from stoker.kernels.reference.routing import Choice, Routing
from stoker.kernels.triton_ops import DETERMINISTIC, TRITON

OPS = {"reference": REFERENCE, "triton": TRITON, "deterministic": DETERMINISTIC}
all_ops = pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
kernels = pytest.mark.parametrize("ops", [TRITON, DETERMINISTIC], ids=["triton", "deterministic"])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@dtypes
@all_ops
@pytest.mark.parametrize("case", CASES, ids=str)
def test_route(case: tuple[int, int, int, bool, bool, bool, Choice], ops: Ops, dtype: torch.dtype) -> None:
    arguments, choice = make_router(*case, dtype), case[-1]
    routing = ops.route(**arguments)
    ranks, expected = expected_route(**arguments)
    assert routing.weights.dtype == (torch.float32 if choice.wide_weights else dtype)
    if ops is not REFERENCE:
        assert_in_order(routing, case[1])
    taken = torch.zeros_like(ranks, dtype=torch.bool).scatter_(1, routing.ids, True)
    assert bool((taken.sum(1) == choice.per_token).all())
    # Where a rounding lies between two experts, either will do; that is seldom.
    other = (taken != (expected > 0)).any(1)
    margin = torch.where(taken, ranks, float("inf")).amin(1) - torch.where(taken, float("-inf"), ranks).amax(1)
    assert int(other.sum()) <= (0 if dtype == torch.float32 else len(other) // 8)
    assert bool((margin[other] > -4 * torch.finfo(dtype).eps * (1 + ranks[taken].abs().max())).all())
    errors = (by_expert(routing, case[1]) - expected).abs()[~other]
    assert float(errors.max() / expected.max()) <= TOLERANCE[dtype]


@dtypes
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_take_the_experts_that_the_reference_takes(
    case: tuple[int, int, int, bool, bool, bool, Choice], dtype: torch.dtype
) -> None:
    arguments = make_router(*case, dtype)
    mine, wanted = (ops.route(**arguments).ids.sort(dim=1).values for ops in (TRITON, REFERENCE))
    # A sum in another order may be rounded to the neighbour of a half-precision number.
    assert int((mine != wanted).any(1).sum()) <= (0 if dtype == torch.float32 else len(mine) // 8)


@kernels
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize(
    ("score", "near", "far"),
    [("softmax", 1.0, 2.0**-12), ("chosen", 1.0, 2.0**-12), ("sigmoid", 1.0, 2.0**-12), ("sigmoid", 4.0, 2.0**-8)],
)
def test_what_is_rounded_to_the_same_number_ranks_the_same(
    score: Any, near: float, far: float, tokens: int, ops: Ops
) -> None:
    """Logits, and a sigmoid's scores, in fp16; in a router that computes in fp32 the larger is taken."""
    x, weight = (torch.zeros(n, 48, dtype=torch.float16, device=DEVICE) for n in (tokens, 4))
    x[:, 0], x[:, 1], weight[:, 0] = near, far, 1.0
    weight[3, 1] = 1.0
    for wide in (False, True):
        choice = Choice(per_token=1, score=score, wide_logits=wide)
        ids, weights, _ = ops.route(x, weight, None, None, None, choice)
        assert set(ids.flatten().tolist()) == {3 if wide else 0}
        wanted = {"softmax": 0.25, "chosen": 1.0, "sigmoid": torch.tensor(near).sigmoid().item()}[score]
        assert weights.dtype == torch.float16 and weights.float().sub(wanted).abs().max() < 1e-3


@all_ops
@pytest.mark.parametrize("tokens", [1, 70])
def test_sums_of_half_precision_rank_the_same_where_they_are_rounded(tokens: int, ops: Ops) -> None:
    """A correction that only fp32 has the digits for decides in a router with scores in fp32, and in no other."""
    x, weight = (torch.zeros(n, 48, dtype=torch.float16, device=DEVICE) for n in (tokens, 4))
    correction = torch.full((4,), 4.0, dtype=torch.float16, device=DEVICE)
    x[:, 0], weight[2:, 0] = 1.0, torch.tensor([2.0**-7, 2.0**-6], dtype=torch.float16)  # 4.5020 and 4.5039
    for wide in (False, True):
        choice = Choice(per_token=2, score="sigmoid", wide_scores=wide)
        ids = ops.route(x, weight, None, correction, None, choice).ids
        if wide:
            assert {tuple(row) for row in ids.sort(dim=1).values.tolist()} == {(2, 3)}
        elif ops is not REFERENCE:  # which takes any
            assert {tuple(row) for row in ids.sort(dim=1).values.tolist()} == {(0, 3)}
        of_softmax = ops.route(x, weight, None, correction, None, Choice(per_token=2, score="softmax")).ids
        ids = ops.route(x, weight, None, correction.float(), None, choice).ids
        for of_fp32 in (ids, of_softmax):  # sums that are fp32 in any case
            assert {tuple(row) for row in of_fp32.sort(dim=1).values.tolist()} == {(2, 3)}


@all_ops
def test_a_sigmoid_of_the_chosen_ranks_by_what_it_is_of(ops: Ops) -> None:
    """Which comes to the same number for many."""
    x, weight = torch.full((2, 48), 1.0, device=DEVICE), torch.zeros(4, 48, device=DEVICE)
    weight[:, 0] = torch.tensor([20.0, 30.0, 40.0, 25.0])
    ids, weights, _ = ops.route(x, weight, None, None, None, LLAMA4)
    assert (weights == 1.0).all() and (ids == 2).all()


@all_ops
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("score", ["softmax", "chosen"])
@pytest.mark.parametrize("middle", [-200.0, 200.0])
def test_logits_may_be_far_from_zero(middle: float, score: Any, tokens: int, ops: Ops) -> None:
    """Of which no power of e is a number."""
    x, weight = (torch.zeros(n, 48, device=DEVICE) for n in (tokens, 3))
    x[:, 0], weight[:, 0] = 1.0, middle + torch.tensor([0.5, -1.0, 1.0])
    logits = weight[:, 0].double() if score == "softmax" else weight[::2, 0].double()
    routing = ops.route(x, weight, None, None, None, Choice(per_token=2, score=score))
    expected = logits.softmax(0)[[0, -1]].expand(tokens, -1)
    assert_close(by_expert(routing, 3)[:, ::2].float(), expected, torch.float32)


@all_ops
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("per_token", [3, 6])
def test_an_expert_of_a_group_that_is_left_out_weighs_nothing(per_token: int, tokens: int, ops: Ops) -> None:
    """It may be taken where experts of the other groups have a score of zero: all of these rank the same."""
    x, weight = (torch.zeros(n, 48, device=DEVICE) for n in (tokens, 6))
    x[:, 0], weight[:, 0] = 1.0, torch.tensor([-2.0, -300.0, 0.0, -300.0, -1.0, -300.0])
    choice = Choice(per_token=per_token, score="softmax", groups=3, kept_groups=2, **IN_GROUPS)
    expected = weight[:, 0].double().softmax(0) * torch.tensor([0, 0, 1, 0, 1, 0], device=DEVICE)
    routing = ops.route(x, weight, None, None, None, choice)
    assert_close(by_expert(routing, 6).float(), expected.expand(tokens, -1), torch.float32)


@all_ops
@pytest.mark.parametrize("tokens", [3, 70])
def test_a_router_and_its_input_may_lie_in_any_way(tokens: int, ops: Ops) -> None:
    """Columns first, or as parts of something wider."""
    arguments = make_router(tokens, 24, 48, True, True, False, DEEPSEEK_V3, torch.float32)
    wanted = ops.route(**arguments)
    for change in (lambda t: t.t().contiguous().t(), lambda t: torch.cat((t, t), 1)[:, : t.shape[1]]):
        found = ops.route(**arguments | {name: change(arguments[name]) for name in ("x", "weight")})
        assert torch.equal(found.ids, wanted.ids)
        assert_close(found.weights, wanted.weights.double(), torch.float32)


@all_ops
@pytest.mark.parametrize("tokens", [3, 70])
def test_a_router_s_weight_may_have_more_digits_than_its_input(tokens: int, ops: Ops) -> None:
    arguments = make_router(tokens, 24, 80, False, True, False, DEEPSEEK_V3, torch.float32)
    arguments["x"] = arguments["x"].half()
    expected = expected_route(**arguments)[1]
    assert_close(by_expert(ops.route(**arguments), 24).float(), expected, torch.float32)


@all_ops
@pytest.mark.parametrize("tokens", [1, 70])
def test_no_sigmoid_chooses_from_a_group_that_is_left_out(tokens: int, ops: Ops) -> None:
    """Whatever the corrections are: also where the next best is of another group."""
    x, weight = torch.randn(tokens, 48, device=DEVICE), torch.zeros(4, 48, device=DEVICE)
    correction = torch.tensor([-1.0, -4.0, -2.0, -3.0], device=DEVICE)
    choice = Choice(per_token=2, score="sigmoid", groups=2, kept_groups=1, **IN_GROUPS)
    routing = ops.route(x, weight, None, correction, None, choice)
    assert torch.equal(routing.ids.sort(dim=1).values, torch.tensor([0, 1], device=DEVICE).expand(tokens, -1))
    assert routing.weights.eq(0.5).all()


@kernels
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("choice", [OLMOE, GPT_OSS, DEEPSEEK_V3])
def test_of_experts_that_rank_the_same_the_first_are_taken(choice: Choice, tokens: int, ops: Ops) -> None:
    x, weight = randn(tokens, 48), randn(1, 48).expand(24, 48).contiguous()
    routing = ops.route(x, weight, None, None, None, choice)
    assert torch.equal(routing.ids, torch.arange(choice.per_token, device=DEVICE).expand(tokens, -1))
    assert_in_order(routing, 24)


@kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("choice", [MIXTRAL, GPT_OSS, LLAMA4, DEEPSEEK_V2, DEEPSEEK_V3])
def test_what_is_no_number_harms_no_other_token(choice: Choice, value: float, ops: Ops) -> None:
    """Ids stay within the experts and differ, or else what follows would write where it must not."""
    experts = 15 if choice is DEEPSEEK_V2 else 24
    x, weight = randn(3, 48), randn(experts, 48)
    good = ops.route(x, weight, None, None, None, choice)
    x[1] = value
    routing = ops.route(x, weight, None, None, None, choice)
    assert all(len(set(row)) == choice.per_token for row in routing.ids.tolist())
    assert int(routing.ids.min()) >= 0 and int(routing.ids.max()) < experts
    assert_in_order(routing, experts)
    assert torch.equal(routing.ids[::2], good.ids[::2]) and torch.equal(routing.weights[::2], good.weights[::2])
    weight[:, 0] = value  # of all of them, and none of the others' ids is lost
    routing = ops.route(randn(3, 48), weight, None, None, None, choice)
    assert all(len(set(row)) == choice.per_token for row in routing.ids.tolist())
    assert_in_order(routing, experts)


@kernels
@pytest.mark.parametrize("choice", [GPT_OSS, LLAMA4, LFM2, DEEPSEEK_V3])
def test_an_expert_whose_weights_are_no_numbers_is_chosen(choice: Choice, ops: Ops) -> None:
    """As ``topk`` does: a token that passed it by would hide that the model is broken."""
    weight = randn(24, 48)
    weight[5] = torch.nan
    routing = ops.route(randn(3, 48), weight, None, None, None, choice)
    assert (routing.ids == 5).any(1).all()
    assert routing.weights[routing.ids == 5].isnan().all()


@pytest.mark.parametrize("tokens", [3, 20])
def test_one_program_or_several_choose_the_same(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = make_router(tokens, 24, 80, False, True, True, DEEPSEEK_V3, torch.float32)
    together = TRITON.route(**arguments)
    monkeypatch.setattr(triton_routing, "_TOGETHER", 32)
    monkeypatch.setattr(triton_routing, "_EACH", 64)
    apart = TRITON.route(**arguments)
    assert torch.equal(together.ids, apart.ids) and torch.equal(together.weights, apart.weights)
    for one, other in zip(together.groups or (), apart.groups or (), strict=True):
        assert torch.equal(one, other)


@dtypes
@pytest.mark.parametrize("choice", [QWEN3, GPT_OSS, DEEPSEEK_V3])
def test_a_token_has_the_same_bits_among_any_others(choice: Choice, dtype: torch.dtype) -> None:
    arguments = make_router(70, 24, 600, True, False, False, choice, dtype)

    def run(rows: slice) -> Routing:
        return DETERMINISTIC.route(**arguments | {"x": arguments["x"][rows]})

    together = run(slice(None))
    for tokens in (1, 3, 17):
        alone = run(slice(5, 5 + tokens))
        assert torch.equal(alone.ids, together.ids[5 : 5 + tokens])
        assert torch.equal(alone.weights, together.weights[5 : 5 + tokens])


def test_only_the_fast_router_follows_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another number of splits adds in another order."""

    def splits(ops: Ops) -> set[int]:
        seen = set()
        real = triton_routing._choose
        monkeypatch.setattr(
            triton_routing, "_choose", lambda logits, *rest: seen.add(len(logits)) or real(logits, *rest)
        )
        for tokens in (1, 40, 70):
            ops.route(**make_router(tokens, 8, 4000, False, False, False, OLMOE, torch.float32))
        monkeypatch.undo()
        return seen

    assert len(splits(DETERMINISTIC)) == 1
    assert len(splits(TRITON)) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "deterministic"])
@pytest.mark.parametrize("tokens", [4, 200])
def test_nothing_waits_for_the_device_and_a_capture_serves_other_tokens(name: str, tokens: int) -> None:
    ops, case = OPS[name], (tokens, 128, 2048, False, False, False, QWEN3)
    static = make_router(*case, torch.bfloat16)
    ops.route(**static)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.route(**static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.route(**static)
    for _ in range(3):
        static["x"].copy_(make_router(*case, torch.bfloat16)["x"])
        graph.replay()
        wanted = ops.route(**static)
        for one, other in itertools.chain(
            zip(captured[:2], wanted[:2], strict=True), zip(captured.groups or (), wanted.groups or (), strict=True)
        ):
            assert torch.equal(one, other)  # type: ignore[arg-type]
        assert_in_order(captured, 128)


@pytest.mark.gpu
def test_early_starts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, router and experts, each of which reads what the one before wrote."""
    arguments = make_router(4, 64, 512, False, True, False, LFM2, torch.bfloat16)
    norm = randn(512, dtype=torch.bfloat16)
    gate_up, down = (randn(64, *size, dtype=torch.bfloat16, scale=0.1) for size in ((256, 512), (512, 128)))

    def chain() -> Tensor:
        x = arguments["x"]
        for _ in range(8):
            normed = TRITON.rms_norm(x, norm, 1e-6)
            ids, weights, groups = TRITON.route(**arguments | {"x": normed})
            options = {"gate": Gate(), "groups": groups, "residual": x}
            x = TRITON.experts(normed, ids, weights, gate_up, down, **options)
        return x

    assert_early_starts_change_nothing(chain, monkeypatch)
