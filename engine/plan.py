"""``Plan``, what the scheduler wants computed in a step, and ``Sampled``, what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.engine.request import Request
from stoker.engine.request_scores import TokenScores


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, or ``num_steps`` decode steps in a row when every request computes one token."""

    requests: list[Request]
    starts: list[int]  # tokens each has computed before
    num_new: list[int]  # tokens each computes (in the first step)
    num_samples: list[int]  # sampled tokens each keeps: 0 while its prompt is not complete, at most num_steps
    scored: list[range]  # given tokens each scores
    num_steps: int
    admitted: list[Request]  # those that got a slot since the last plan
    # KV blocks to copy first, of layers that see all keys and of those with a window: (from, to).
    copies: list[tuple[int, int]]
    window_copies: list[tuple[int, int]]
    # Rows of states to copy first, and after the plan has run: (from, to).
    begun_states: list[tuple[int, int]]
    kept_states: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a plan's steps sampled, on the host: [requests][num_steps]. Ignore what is beyond ``num_samples``."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    top: list[list[dict[int, float]]] | None = None
    scores: list[TokenScores | None] | None = None  # of each request
