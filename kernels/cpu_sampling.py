"""Sampling's passes over logits on a CPU, where they cost more than a small model's step.

Top-k, top-p and min-p come from the most likely tokens of each row, and not from a vocabulary in order. Penalties are computed
for what a request has seen, which is next to nothing of a vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stoker.kernels.reference.adjustments import Banned, Bias, Penalties, penalised
from stoker.kernels.reference.sampling import rows_within

_PART, _FEW = (
    64,
    256,
)  # of how much of a row torch finds the largest, 1 / 64; and how many of them are all that most rows keep
_BINS, _SORTED = 1024, 1024  # where one keeps more
_NOTHING = float("-inf")
_CACHED = 1 << 18  # fp32 numbers of a tensor of logits for each thread, from which sampling makes several others


def rows_together(vocab: int) -> int:
    """How many rows are sampled together: more of them do not stay in the caches, and take new pages of memory at each step."""
    return rows_within(_CACHED, vocab)


def truncate(logits: Tensor, inverse_temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """As the reference's ``truncate``; a row's result does not depend on the others."""
    logits = logits.float() * inverse_temperature[:, None]
    vocab = logits.shape[1]
    part = min(vocab, max(_FEW, vocab // _PART))
    k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    wanted = torch.where(k <= part, k, torch.where(top_p < 1, min(vocab, _FEW), 1))
    values = logits.topk(int(wanted.max())).values
    drop, found = _outside(logits, values, k, top_p, min_p)
    for row in found.logical_not().nonzero()[:, 0].tolist():
        weights = (logits[row] - values[row, 0]).exp_()
        least = _least_kept(logits[row], weights, int(k[row]), float(top_p[row]))
        drop[row] = (logits[row] < least).logical_or_(weights < min_p[row])
    return logits.masked_fill_(drop, _NOTHING)


def _least_kept(logits: Tensor, weights: Tensor, k: int, top_p: float) -> float:
    """The smallest of some logits that top-k and then top-p leave, where that is one of many. weights: their exponentials."""
    least = logits.kthvalue(len(logits) - k + 1).values if k < len(logits) else torch.tensor(_NOTHING)
    kept = (logits >= least) & (logits > _NOTHING)
    numbers, weights = (logits, weights) if kept.all() else (logits[kept], weights[kept])
    weights = weights.double()
    wanted = top_p * float(weights.sum()) if top_p < 1 else math.inf
    beyond = 0.0  # the weight of what is larger than all that are left
    while len(numbers) > _SORTED and (low := float(numbers.min())) < (high := float(numbers.max())):
        # In bins of rising numbers: what is looked for is in the one by which the weight of those from it on is enough.
        bins = numbers.double().sub_(low).mul_((_BINS - 1) / (high - low)).long()
        above = torch.bincount(bins, weights, _BINS).flip(0).cumsum_(0).add_(beyond)
        at = min(int((above < wanted).sum()), _BINS - 1)
        beyond = float(above[at - 1]) if at else beyond
        inside = bins == _BINS - 1 - at
        numbers, weights = numbers[inside], weights[inside]
    numbers, order = numbers.sort(descending=True)
    weights = weights[order]
    inside = beyond + weights.cumsum(0) - weights < wanted
    return float(numbers[max(int(inside.sum()), 1) - 1])


def _outside(logits: Tensor, values: Tensor, k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """What to exclude, bool [R, V], and whether ``values``, the largest of each row in falling order, were enough, bool [R]."""
    count, vocab = values.shape[1], logits.shape[1]
    kth = values.gather(1, k.clamp(max=count)[:, None] - 1)
    kth = torch.where((k < vocab)[:, None], kth, _NOTHING)
    drop = logits < kth
    found = (k <= count) | (k == vocab)
    by_mass, by_ratio = bool((top_p < 1).any()), bool((min_p > 0).any())
    if not by_mass and not by_ratio:
        return drop, found
    largest = values[:, :1]
    weights = (logits.masked_fill(drop, _NOTHING) - largest).exp_()  # the largest has 1
    if by_mass:
        sorted_weights = (values.masked_fill(values < kth, _NOTHING) - largest).exp_()
        mass = sorted_weights.cumsum(1).sub_(sorted_weights)  # of the more likely tokens
        inside = mass < top_p[:, None] * weights.sum(1, keepdim=True)
        last = inside.sum(1, keepdim=True).clamp(min=1) - 1
        drop |= logits < torch.where((top_p < 1)[:, None], values.gather(1, last), _NOTHING)
        found &= (top_p >= 1) | (k <= count) | ~inside[:, -1] | (count == vocab)
    if by_ratio:
        drop |= weights < min_p[:, None]
    return drop, found


def adjust(logits: Tensor, bias: Bias | None, penalties: Penalties | None, banned: Banned | None) -> Tensor:
    """As the reference."""
    out = logits.to(torch.float32, copy=True)
    if bias is not None:
        out.scatter_(1, bias.ids, out.gather(1, bias.ids) + bias.values)
    if penalties is not None:
        each = (penalties.repetition, penalties.presence, penalties.frequency)
        seen = penalties.seen.index_select(0, penalties.slots)
        at = seen.nonzero(as_tuple=True)
        out[at] = penalised(out[at], seen[at], *(column[at[0]] for column in each))
    if banned is not None:
        early = banned.positions < banned.until
        rows, places = ((banned.ids < out.shape[1]) & early[:, None]).nonzero(as_tuple=True)
        out[rows, banned.ids[rows, places]] = _NOTHING
    return out
