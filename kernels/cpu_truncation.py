"""Top-k, top-p and min-p on a CPU, from the most likely tokens of each row: to sort a whole vocabulary takes longer than a small
model's step."""

from __future__ import annotations

import torch
from torch import Tensor

_PART, _FEW = 64, 64  # torch finds the largest of a 64th of a row without sorting it, or 64 of a small one
_NOTHING = float("-inf")


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """As the reference's ``truncate``; a row's result does not depend on the others.

    Rows that keep more than a part of the vocabulary are sorted by numpy, which takes a fifth of torch's time for values alone.
    """
    logits = logits.float()
    vocab = logits.shape[1]
    part = min(vocab, max(_FEW, vocab // _PART))
    k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    wanted = torch.where(k <= part, k, torch.where(top_p < 1, part, 1))
    values = logits.topk(int(wanted.max())).values
    drop, found = _outside(logits, values, k, top_p, min_p)
    if rows := found.logical_not().nonzero()[:, 0].tolist():
        values = logits[rows]
        values.numpy().sort(axis=1)  # in place
        drop[rows] = _outside(logits[rows], values.flip(1), k[rows], top_p[rows], min_p[rows])[0]
    return logits.masked_fill(drop, _NOTHING)


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
