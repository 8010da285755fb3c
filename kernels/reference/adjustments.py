"""What changes logits before they are truncated and sampled from, as plain torch: biases, penalties, ids that may not come yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IN_PROMPT, SAMPLED = 1, 2  # what a token of the prompt sets in a slot's counts, and what each sampled one adds


@dataclass(frozen=True, slots=True)
class Bias:
    """What is added to the logits of some ids. Each is listed once, but for the last, which may be repeated."""

    ids: Tensor  # int64 [R, B]
    values: Tensor  # fp32 [R, B]; -inf for an id that is never sampled


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of R rows on the tokens that they have seen."""

    seen: Tensor  # int32 [S, V]: SAMPLED as often as the slot's completion has a token, and IN_PROMPT where its prompt has it
    slots: Tensor  # int64 [R]
    repetition: Tensor  # fp32 [R], on all tokens seen; 1 is off
    presence: Tensor  # fp32 [R], on those of the completion
    frequency: Tensor  # fp32 [R], on each occurrence there


@dataclass(frozen=True, slots=True)
class Banned:
    """Ids that may not be sampled before a position. Each is listed once, but for the last, which may be repeated."""

    ids: Tensor  # int64 [R, E]; V where there is none
    until: Tensor  # int64 [R], the first position at which they may come
    positions: Tensor  # int64 [R], of the tokens to be sampled


def adjust(logits: Tensor, bias: Bias | None, penalties: Penalties | None, banned: Banned | None) -> Tensor:
    """The logits with the bias, then the penalties, then without what is banned, fp32 [R, V], apart from what was given.

    logits: [R, V] of any float dtype.
    """
    logits = logits.float()
    if bias is not None:  # not scatter_add, which would add a repeated id's bias more than once
        logits = logits.scatter(1, bias.ids, logits.gather(1, bias.ids) + bias.values)
    if penalties is not None:
        each = (penalties.repetition, penalties.presence, penalties.frequency)
        seen = penalties.seen.index_select(0, penalties.slots)
        logits = penalised(logits, seen, *(column[:, None] for column in each))
    if banned is not None:
        rows, vocab = logits.shape
        listed = torch.zeros(rows, vocab + 1, dtype=torch.bool, device=logits.device)
        listed.scatter_(1, banned.ids, True)  # V falls into the extra column
        logits = logits.masked_fill(listed[:, :vocab] & (banned.positions < banned.until)[:, None], float("-inf"))
    return logits


def penalised(logits: Tensor, seen: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Logits of tokens that were seen so often, with what is then subtracted from them. All of shapes that broadcast.

    Keskar et al. (CTRL, 2019), section 4.1, in the form every library uses: positive logits shrink, negative ones grow.
    """
    counts = seen // SAMPLED
    logits = torch.where(seen > 0, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - frequency * counts - presence * (counts > 0)


def count(seen: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """Count sampled tokens in place. seen: as in ``Penalties``; slots, tokens: int64 [R]. Slots may occur more than once."""
    # Not index_put_, which sorts; integers may be added in any order.
    seen.view(-1).scatter_add_(0, slots * seen.shape[1] + tokens, torch.full_like(tokens, SAMPLED, dtype=torch.int32))
