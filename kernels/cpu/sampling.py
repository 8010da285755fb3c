"""Sampling's passes over logits on a CPU, where they cost more than a small model's step.

Top-k, top-p and min-p come from the most likely tokens of each row, and not from a vocabulary in order. Penalties are computed
for what a request has seen, which is next to nothing of a vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stoker.kernels.reference.adjustments import Banned, Bias, Penalties, penalised
from stoker.kernels.reference.sampling import logsumexp, rows_within

_PART = 64  # torch finds the largest 64th of a vocabulary without sorting all of it
_FEW = 256  # among so many is all that most rows keep; where it is not, bins narrow it down, until a sort is short
_BINS, _SORTED = 1024, 1024
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
    wanted = int(torch.where(k <= part, k, torch.where(top_p < 1, _FEW, 1)).max())
    values, ids = logits.topk(min(wanted + 1, vocab))
    least, found = _least_among(logits, values, k, top_p)
    for row in found.logical_not().nonzero()[:, 0].tolist():
        least[row] = _least_of_many(logits[row], int(k[row]), float(top_p[row]))
    least = torch.maximum(least, values[:, 0] + min_p.log())[:, None]
    if vocab == values.shape[1] or bool((values[:, -1:] < least).all()):  # all that stays is among these
        return logits.fill_(_NOTHING).scatter_(1, ids, values.masked_fill_(values < least, _NOTHING))
    return logits.masked_fill_(logits < least, _NOTHING)


def _least_among(logits: Tensor, values: Tensor, k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest logit that top-k and top-p leave, fp32 [R], and whether ``values`` were enough to find it, bool [R].

    values: the largest logits of each row, in falling order.
    """
    count, vocab = values.shape[1], logits.shape[1]
    kth = values.gather(1, k.clamp(max=count)[:, None] - 1)[:, 0]
    least = torch.where(k < vocab, kth, _NOTHING)
    by_mass = top_p < 1
    found = (k <= count) | (k == vocab)
    if bool(by_mass.any()):
        kept = values.masked_fill(values < least[:, None], _NOTHING)
        of_kept = by_mass & (k < vocab)
        mass = kept.logsumexp(1)
        if bool((by_mass & ~of_kept).any()):
            mass = torch.where(of_kept, mass, logsumexp(logits))
        probs = (kept - mass[:, None]).exp_()
        inside = probs.cumsum(1).sub_(probs) < top_p[:, None]  # by the mass of the more likely tokens
        last = inside.sum(1, keepdim=True).clamp(min=1) - 1
        least = torch.where(by_mass, torch.maximum(least, values.gather(1, last)[:, 0]), least)
        # Beyond the last of these there may be more of top-p, and equals of the last of top-k.
        found &= ~by_mass | (count == vocab) | torch.where(of_kept, kth > values[:, -1], ~inside[:, -1])
    return least, found


def _least_of_many(logits: Tensor, k: int, top_p: float) -> float:
    """The smallest logit of a row that top-k and then top-p leave, where that is one of many."""
    least = logits.kthvalue(len(logits) - k + 1).values if k < len(logits) else torch.tensor(_NOTHING)
    kept = (logits >= least) & (logits > _NOTHING)
    if not kept.any():
        return _NOTHING
    numbers, weights = logits, logits.softmax(0).double()
    if not kept.all():
        numbers, weights = numbers[kept], weights[kept]
    wanted = top_p * float(weights.sum()) if top_p < 1 else math.inf
    beyond = 0.0  # the weight of what is larger than all that are left
    while len(numbers) > _SORTED and (low := float(numbers.min())) < (high := float(numbers.max())):
        # In bins of rising numbers: what is looked for is in the one by which the weight of those from it on is enough.
        bins = numbers.double().sub_(low).mul_((_BINS - 1) / (high - low)).int()
        above = torch.bincount(bins, weights, _BINS).flip(0).cumsum_(0).add_(beyond)
        at = min(int((above < wanted).sum()), _BINS - 1)
        beyond = float(above[at - 1]) if at else beyond
        (inside,) = (bins == _BINS - 1 - at).nonzero(as_tuple=True)
        numbers, weights = numbers[inside], weights[inside]
    numbers, order = numbers.sort(descending=True)
    weights = weights[order]
    inside = beyond + weights.cumsum(0) - weights < wanted
    return float(numbers[max(int(inside.sum()), 1) - 1])


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
