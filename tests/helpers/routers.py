"""Routers of mixtures of experts: the choices that models make, random routers, and a loop in fp64 as their oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton_oracle import DEVICE, randn, unwatched

from stoker.kernels.reference.routing import Choice, Routing

MIXTRAL = Choice(per_token=2, score="softmax", normalise=True, wide_weights=True)


QWEN3 = Choice(per_token=8, score="softmax", normalise=True)


OLMOE = Choice(per_token=3, score="softmax")


GPT_OSS = Choice(per_token=4, score="chosen")


LLAMA4 = Choice(per_token=1, score="chosen_sigmoid")


GEMMA4 = Choice(per_token=3, score="softmax", normalise=True, wide_weights=True)


LFM2 = Choice(per_token=2, score="sigmoid", normalise=True, eps=1e-6)


IN_GROUPS = {"wide_logits": True, "wide_weights": True}


AFMOE = Choice(per_token=2, score="sigmoid", normalise=True, scale=1.7, wide_scores=True, wide_weights=True)


ERNIE = Choice(per_token=2, score="softmax", normalise=True, least=0.5, wide_logits=True)  # a sum is often less


DEEPSEEK_V2 = Choice(per_token=3, score="softmax", scale=16.0, groups=5, kept_groups=2, **IN_GROUPS)


DEEPSEEK_V3 = Choice(
    per_token=4,
    score="sigmoid",
    normalise=True,
    eps=1e-20,
    scale=2.5,
    groups=4,
    kept_groups=2,
    best_of_group=2,
    **IN_GROUPS,
)


CASES = [
    # tokens, experts, depth, bias, correction, gain
    (1, 4, 48, False, False, False, MIXTRAL),
    (5, 40, 600, False, False, False, QWEN3),  # splits, of which the last is shorter
    (3, 8, 48, False, False, False, Choice(per_token=8, score="softmax")),  # all experts
    (70, 6, 48, False, False, False, OLMOE),  # more tokens than have their logits split
    (20, 32, 96, True, False, False, GPT_OSS),
    (70, 6, 48, True, False, False, Choice(per_token=1, score="chosen")),
    (9, 8, 48, False, True, False, LFM2),
    (4, 15, 80, False, False, False, DEEPSEEK_V2),  # groups of no power of two
    (18, 24, 80, False, True, False, DEEPSEEK_V3),
    (70, 24, 80, True, True, False, DEEPSEEK_V3),
    (1, 16, 48, False, False, False, LLAMA4),
    (70, 5, 48, True, False, False, replace(LLAMA4, per_token=2)),
    (6, 24, 80, False, False, True, GEMMA4),
    (70, 6, 48, False, True, True, LFM2),
    (5, 8, 48, False, True, False, AFMOE),
    (70, 24, 80, False, True, False, AFMOE),
    (6, 24, 80, False, True, False, ERNIE),
    (20, 6, 48, True, False, False, replace(GPT_OSS, per_token=3)),  # no power of two
    (70, 5, 48, False, False, False, replace(LLAMA4, per_token=3, normalise=True)),
]


def make_router(
    tokens: int, experts: int, depth: int, bias: bool, correction: bool, gain: bool, choice: Choice, dtype: torch.dtype
) -> dict[str, Any]:
    return {
        "x": randn(tokens, depth, dtype=dtype),
        "weight": randn(experts, depth, dtype=dtype, scale=3 * depth**-0.5),
        "bias": randn(experts, dtype=dtype) if bias else None,
        "correction": randn(experts, scale=0.2) if correction else None,
        "gain": 0.5 + torch.rand(experts).to(DEVICE, dtype) if gain else None,
        "choice": choice,
    }


@unwatched
def expected_route(
    x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, gain: Tensor | None, choice: Choice
) -> tuple[Tensor, Tensor]:
    """What every expert ranks by, less than anything for those of other groups, and weights of those that are chosen."""
    logits = x.double() @ weight.double().T
    logits = logits if bias is None else logits + bias.double()
    logits = logits if choice.wide_logits else logits.to(x.dtype).double()
    every = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}.get(choice.score, logits)
    if choice.score == "sigmoid" and not (choice.wide_logits or choice.wide_scores):
        every = every.to(x.dtype).double()
    ranks = every if correction is None else every + correction.double()
    weights = torch.zeros_like(every)
    for row in range(len(x)):
        groups = ranks[row].view(choice.groups, -1)
        best = [sum(sorted(group.tolist())[-choice.best_of_group :]) for group in groups]
        for group in sorted(range(choice.groups), key=lambda g: -best[g])[choice.kept_groups :]:
            groups[group] = float("-inf")
        chosen = sorted(range(len(weight)), key=lambda e: (-float(ranks[row, e]), e))[: choice.per_token]
        mine = every[row, chosen]
        if choice.score == "chosen":
            mine = mine.softmax(-1)
        if choice.score == "chosen_sigmoid":
            mine = mine.sigmoid()
        if choice.normalise:
            mine = mine / max(mine.sum() + choice.eps, choice.least)
        weights[row, chosen] = choice.scale * mine * (1.0 if gain is None else gain.double()[chosen])
    return ranks, weights


def by_expert(routing: Routing, experts: int) -> Tensor:
    assert routing.ids.dtype == torch.int64 and 0 <= int(routing.ids.min()) <= int(routing.ids.max()) < experts
    weights = torch.zeros(len(routing.ids), experts, dtype=torch.float64, device=DEVICE)
    return weights.scatter_(1, routing.ids, routing.weights.double())


def assert_in_order(routing: Routing, experts: int) -> None:
    assert routing.groups is not None
    order, starts = routing.groups
    ids, pairs = routing.ids.flatten().sort(stable=True)
    assert torch.equal(order.long(), pairs)
    wanted = torch.searchsorted(ids, torch.arange(experts + 1, device=DEVICE))
    assert torch.equal(starts.long(), wanted)
