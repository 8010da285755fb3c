"""Which experts a token goes to in a mixture-of-experts layer, and how much of each it takes, as plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How a router's logits become the experts of a token and their weights.

    Each logit becomes a score. The experts with the best score plus correction are chosen, and their scores, without the
    correction, are the weights. Kinds of score:

    - "softmax": of all logits, as in Mixtral. "sigmoid": of each logit, as in DeepSeek-V3.
    - "chosen", "chosen_sigmoid": experts are ranked by their logits; the weights are a softmax of those chosen, as in gpt-oss,
      or a sigmoid of each, as in Llama 4.

    Where experts are in several groups, as in DeepSeek-V3, only ``kept_groups`` of them are chosen from: those with the
    largest sums of their ``best_of_group`` best.
    """

    per_token: int
    score: Literal["softmax", "sigmoid", "chosen", "chosen_sigmoid"]
    normalise: bool = False  # the weights by their sum, plus ``eps``
    eps: float = 0.0
    least: float = 0.0  # the least that such a sum is taken for
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    best_of_group: int = 1
    # In fp32, whatever the model's dtype: logits, and so scores; scores alone; the resulting weights.
    wide_logits: bool = False
    wide_scores: bool = False
    wide_weights: bool = False


class Routing(NamedTuple):
    """A router's result, as ``experts`` takes it."""

    ids: Tensor  # int64 [T, K], those of a token all different
    weights: Tensor  # [T, K]
    groups: tuple[Tensor, Tensor] | None = None  # pairs in the order of their experts, where that was found on the way


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    gain: Tensor | None,
    choice: Choice,
) -> Routing:
    """Choose each token's experts and their weights.

    x: [T, D]; weight: [E, D]; bias, of the logits: [E]; correction, of what is ranked: [E]; gain, of the weights: [E].

    Of experts that rank the same, whichever ``torch.topk`` takes.
    """
    if choice.wide_logits:
        logits = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    else:
        logits = F.linear(x, weight, bias)
    return choose(logits, correction, gain, choice, x.dtype)


def choose(
    logits: Tensor, correction: Tensor | None, gain: Tensor | None, choice: Choice, dtype: torch.dtype
) -> Routing:
    """``route`` from the logits on, [T, E]. dtype: of ``x``."""
    scores = logits
    if choice.score == "softmax":
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
    elif choice.score == "sigmoid":
        scores = (logits.float() if choice.wide_scores else logits).sigmoid()
    ranked = scores if correction is None else scores + correction
    if choice.groups > 1:
        by_group = ranked.view(len(ranked), choice.groups, -1)
        best = by_group.topk(choice.best_of_group, dim=-1).values.sum(-1).topk(choice.kept_groups, dim=-1).indices
        left_out = torch.ones(by_group.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, best, False)
        least = 0.0 if choice.score == "softmax" else float("-inf")
        ranked = by_group.masked_fill(left_out[..., None], least).flatten(1)
    weights, ids = ranked.topk(choice.per_token, dim=-1)
    if correction is not None:
        weights = scores.gather(1, ids)
    if choice.score == "chosen":
        weights = torch.softmax(weights, dim=-1, dtype=torch.float32)
    elif choice.score == "chosen_sigmoid":
        weights = weights.float().sigmoid()
    if choice.normalise:
        total = weights.sum(-1, keepdim=True)
        total = total + choice.eps if choice.eps else total
        weights = weights / (total.clamp(min=choice.least) if choice.least else total)
    if choice.scale != 1.0:
        weights = weights * choice.scale
    if gain is not None:
        weights = weights * gain[ids]
    return Routing(ids, weights.to(torch.float32 if choice.wide_weights else dtype))
