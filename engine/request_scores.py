"""The scores of given tokens that a request asks for: which of them each plan computes, and which have arrived.

The score of token ``i`` comes from the hidden state at position ``i - 1``, which exists only in the step that computes that
position. So a request with scores cannot skip positions it still needs: from the prefix cache it takes only what comes before
its first scored token, and blocks whose tokens another request has scored, or is scoring right now.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Variant:
    """The softmax under which tokens are scored, and how many of the most likely ones are noted."""

    temperature: float
    top_k: int


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of the tokens ``first`` to ``end`` of a sequence (N of them), on the host."""

    first: int
    end: int
    logprobs: Tensor  # fp32 [N]
    entropy: Tensor  # fp32 [N], nats
    ranks: Tensor  # int64 [N], from 1
    top_ids: Tensor  # int64 [N, K]
    top_logprobs: Tensor  # fp32 [N, K]

    @classmethod
    def unknown(cls, first: int, end: int, top_k: int) -> TokenScores:
        n = end - first
        unknown = partial(torch.full, fill_value=math.nan, dtype=torch.float32, device="cpu")
        zeros = partial(torch.zeros, dtype=torch.long, device="cpu")
        return cls(first, end, unknown((n,)), unknown((n,)), zeros(n), zeros(n, top_k), unknown((n, top_k)))

    @property
    def has_nan(self) -> bool:
        return bool(self.logprobs.isnan().any())

    def columns(self) -> tuple[Tensor, ...]:
        return self.logprobs, self.entropy, self.ranks, self.top_ids, self.top_logprobs

    def copy(self, source: TokenScores, first: int, end: int) -> None:
        """Take the scores of the tokens ``first`` to ``end`` from ``source``, which may know more likely tokens."""
        for mine, theirs in zip(self.columns(), source.columns(), strict=True):
            part = theirs[first - source.first : end - source.first]
            mine[first - self.first : end - self.first] = part[:, : mine.shape[1]] if mine.dim() == 2 else part


@dataclass(eq=False, slots=True)
class Scoring:
    """The scores of a request's tokens ``first`` to ``end``. Each is computed once, whatever happens to the request.

    Some may be borrowed: another request's plans compute them. They arrive no later than the results of the plan in which the
    borrowing request began.
    """

    variant: Variant
    first: int
    end: int
    scores: TokenScores = field(init=False)
    next: int = field(init=False)  # the first token whose score no plan computes
    arrived: int = 0  # how many have arrived, or are borrowed
    borrowed: list[tuple[Scoring, int, int]] = field(default_factory=list)  # (lender, from token, to token)

    def __post_init__(self) -> None:
        self.scores = TokenScores.unknown(self.first, self.end, self.variant.top_k)
        self.next = self.first

    @property
    def launched(self) -> bool:
        return self.next >= self.end

    @property
    def complete(self) -> bool:
        return self.arrived >= self.end - self.first and not self.borrowed

    def claim(self, computed: int) -> range:
        """The tokens to score in a plan that takes the request to ``computed`` tokens."""
        tokens = range(self.next, max(self.next, min(computed + 1, self.end)))
        self.next = tokens.stop
        return tokens

    def restart(self) -> None:
        """Compute them all again. None may be on its way."""
        assert self.arrived == self.next - self.first
        self.next, self.arrived = self.first, 0
        self.borrowed.clear()

    def take(self, scores: TokenScores | None) -> None:
        """Take the scores that a plan computed; None where it was to score none."""
        if scores is not None:
            self.scores.copy(scores, scores.first, scores.end)
            self.arrived += scores.end - scores.first
        if self.arrived >= self.end - self.first:
            self.settle()

    def settle(self) -> None:
        """Copy the borrowed scores, which have arrived."""
        borrowed, self.borrowed = self.borrowed, []  # first: after a preemption, lenders may form a cycle
        for lender, first, end in borrowed:
            lender.settle()
            self.scores.copy(lender.scores, first, end)

    def borrow(self, lender: Scoring | None, upto: int, whole: bool = False) -> bool:
        """Have a lender's plans score the tokens up to ``upto``; False where they do not.

        Unless ``whole``, the last token is left over, as every request has to compute something.
        """
        end = min(upto, self.end if whole else self.end - 1)
        if end > self.next:
            if lender is None or not lender.first <= self.next < end <= lender.next:
                return False
            self.borrowed.append((lender, self.next, end))
            self.arrived += end - self.next
            self.next = end
        return True
