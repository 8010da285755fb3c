"""Rows whose tokens an automaton constrains, as plain torch: which tokens may come next, and the state after one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Numbers in an automaton's table. A token leads to REFUSED where it may not come. FREE and MAY_END lead to themselves by any
# token: a row without a constraint is in FREE, one that has ended is in either, in MAY_END where it could have gone on.
REFUSED, FREE, MAY_END, FIRST = range(4)
HEADER = 8


@dataclass(frozen=True, slots=True)
class ConstraintRows:
    """The automata that S slots follow, and the state of each slot.

    An automaton is a run of numbers: C, how many classes of tokens there are, padded to ``HEADER`` numbers; the class of each
    of the V tokens; and for each state from ``FIRST`` on, the state that a token of each of the C classes leads to.
    """

    automata: Tensor  # int16 [N], one behind the other
    base: Tensor  # int64 [S], where the slot's begins; wherever there is one for a slot that has none
    states: Tensor  # int64 [S]
    first_end: Tensor  # int64 [S], position of the first token that may end the text where it could go on


def constrain(logits: Tensor, rows: ConstraintRows, slots: Tensor, positions: Tensor) -> Tensor:
    """The logits, fp32 [R, V], with -inf for tokens that a row's automaton does not allow in its state. NaN stays.

    logits: [R, V] of any float dtype; slots: int64 [R]; positions: int64 [R], of the tokens to be sampled.
    """
    tokens = torch.arange(logits.shape[1], device=logits.device)
    following, free = _following(rows, slots, tokens.expand(len(slots), -1), logits.shape[1])
    early = (following == MAY_END) & (positions < rows.first_end[slots])[:, None]
    taken = free[:, None] | ((following != REFUSED) & ~early)
    logits = logits.float()
    return logits.masked_fill(~taken & ~logits.isnan(), float("-inf"))


def follow(tokens: Tensor, rows: ConstraintRows, slots: Tensor, vocab: int) -> None:
    """Move the state of each slot on by its token, int64 [R], in place. Slots that occur more than once are in ``FREE``."""
    following, free = _following(rows, slots, tokens[:, None], vocab)
    rows.states.index_copy_(0, slots, torch.where(free, rows.states[slots], following[:, 0]))


def _following(rows: ConstraintRows, slots: Tensor, tokens: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """(state after each token, int64 [R, n]; whether the row is free, bool [R]). tokens: [R, n]."""
    base, states = rows.base[slots], rows.states[slots]
    free = states < FIRST
    kinds = rows.automata[(base + HEADER)[:, None] + tokens].long()
    at = base + HEADER + vocab + (states - FIRST).clamp(min=0) * rows.automata[base]
    return rows.automata[at[:, None] + kinds].long(), free
