"""A plan as arrays: its rows and tokens, and how many of each there are with padding."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Self

import numpy as np
from numpy.typing import NDArray

from stoker.engine.plan import Plan
from stoker.engine.request import Request


def bucket(n: int, limit: int) -> int:
    """The padded size for ``n``: 1, 2, 4, then steps of 8 to 64, of 16 to 256, of 32 beyond; never above ``limit``."""
    for size in (1, 2, 4):
        if n <= size:
            return min(size, limit)
    step = 8 if n <= 64 else 16 if n <= 256 else 32
    return min(-(-n // step) * step, limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanArrays:
    """The rows and tokens of a plan, int64, on the host."""

    rows: int  # with padding, as tokens are
    tokens: int
    decode: bool  # every row computes one token, so that rows and tokens are the same
    slots: NDArray[np.int64]  # [rows]; padding has the spare slot behind all others
    new: NDArray[np.int64]  # of each request: tokens it computes,
    lengths: NDArray[np.int64]  # keys that the last of them sees,
    last: NDArray[np.int64]  # and keys seen in the last step before its length ends
    token_ids: NDArray[np.int64]  # of each token, -1 where it is still being sampled
    positions: NDArray[np.int64]
    row_of: NDArray[np.int64]
    adapters: NDArray[np.int64] | None  # the slot of its adapter; None where no request has one

    @classmethod
    def of(cls, plan: Plan, max_rows: int, max_tokens: int) -> Self:
        requests, count = plan.requests, len(plan.requests)
        rows = bucket(count, max_rows)
        computed, new = np.array(plan.starts), np.array(plan.num_new)
        lengths, width = computed + new, int(new.sum())
        if decode := count == width:
            tokens = rows
            known = [r.tokens[c] if c < len(r.tokens) else -1 for r, c in zip(requests, plan.starts, strict=True)]
            token_ids, positions, row_of = np.array(known), computed, np.arange(count)
        else:
            tokens = bucket(width, max_tokens)
            spans = (_known(r, c, n) for r, c, n in zip(requests, plan.starts, plan.num_new, strict=True))
            token_ids = np.fromiter(chain.from_iterable(spans), dtype=np.int64, count=width)
            row_of = np.repeat(np.arange(count), new)
            positions = np.arange(width) - np.repeat(new.cumsum() - new, new) + np.repeat(computed, new)
        adapters = None
        if any(r.adapter for r in requests):
            adapters = np.array([r.adapter.slot if r.adapter else 0 for r in requests])[row_of]
        return cls(
            rows=rows,
            tokens=tokens,
            decode=decode,
            slots=np.array([r.slot for r in requests] + [max_rows] * (rows - count)),
            new=new,
            lengths=lengths,
            last=lengths + np.maximum(plan.num_samples, 1) - 1,
            token_ids=token_ids,
            positions=positions,
            row_of=row_of,
            adapters=adapters,
        )


def _known(request: Request, start: int, count: int) -> list[int]:
    """Tokens of a request from ``start``, -1 for one that is still being sampled."""
    tokens = request.tokens[start : start + count]
    return tokens if len(tokens) == count else [*tokens, -1]
