"""From hidden states to log-probabilities of given tokens, a chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.engine.device import HostCopy, Runtime
from stoker.engine.model import ModelShell
from stoker.engine.plan import Plan
from stoker.engine.request_scores import TokenScores
from stoker.engine.sampler import likeliest
from stoker.kernels.ops import Ops
from stoker.kernels.reference.lora import AdapterRows


@dataclass(frozen=True, slots=True)
class ScoreRows:
    """The tokens that a batch scores, N of them over all its requests."""

    tokens: list[range]  # of each request, positions in its sequence
    hidden: Tensor  # int64 [N], the packed token whose hidden state predicts it
    targets: Tensor  # int64 [N]
    inverse_temperature: Tensor  # fp32 [N]
    top_k: list[int]  # of each request, how many of the likeliest tokens it asks for

    @staticmethod
    def arrays(plan: Plan) -> tuple[NDArray[Any], ...]:
        """``hidden``, ``targets`` and ``inverse_temperature`` of a plan, on the host; nothing where it scores nothing."""
        if not any(plan.scored):
            return ()
        hidden: list[int] = []
        targets: list[int] = []
        inverse: list[float] = []
        offset = 0
        for request, start, count, tokens in zip(plan.requests, plan.starts, plan.num_new, plan.scored, strict=True):
            if tokens:
                assert request.scoring is not None and start < tokens.start and tokens.stop <= start + count + 1
                first = offset + tokens.start - 1 - start
                hidden += range(first, first + len(tokens))
                targets += request.tokens[tokens.start : tokens.stop]
                inverse += [1.0 / request.scoring.variant.temperature] * len(tokens)
            offset += count
        return np.array(hidden), np.array(targets), np.array(inverse, dtype=np.float32)

    @classmethod
    def of(cls, plan: Plan, tensors: Sequence[Tensor]) -> ScoreRows | None:
        """None where the plan scores nothing. tensors: ``arrays``, on the device."""
        if not tensors:
            return None
        top_k = [0 if r.scoring is None else r.scoring.variant.top_k for r in plan.requests]
        hidden, targets, inverse_temperature = tensors
        return cls(plan.scored, hidden, targets, inverse_temperature, top_k)

    def alike(self, start: int, end: int) -> Iterator[tuple[slice, int]]:
        """Parts of the rows ``start`` to ``end``, counted from ``start``, that ask for equally many of the likeliest tokens."""
        first = 0
        scored = ((tokens, top_k) for tokens, top_k in zip(self.tokens, self.top_k, strict=True) if tokens)
        for top_k, of in groupby(scored, key=lambda one: one[1]):
            last = first + sum(len(tokens) for tokens, _ in of)
            if max(first, start) < min(last, end):
                yield slice(max(first, start) - start, min(last, end) - start), top_k
            first = last


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Scores on their way to the host."""

    tokens: list[range]
    top_k: list[int]
    columns: tuple[HostCopy, ...]  # as ``TokenScores.columns``, for all requests one after the other, the last two flat

    def read(self) -> list[TokenScores | None]:
        """Wait for the scores of each request; None where nothing of it was scored."""
        *each, ids, values = [copy.wait() for copy in self.columns]
        scores: list[TokenScores | None] = []
        row = cell = 0
        for t, top_k in zip(self.tokens, self.top_k, strict=True):
            rows, cells = slice(row, row + len(t)), slice(cell, cell + len(t) * top_k)
            likeliest = (column[cells].view(len(t), top_k) for column in (ids, values))
            scores.append(TokenScores(t.start, t.stop, *(c[rows] for c in each), *likeliest) if t else None)
            row, cell = rows.stop, cells.stop
        return scores


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores at most ``chunk`` rows at a time: [T, V] logits of a long batch would be larger than the model."""

    ops: Ops
    runtime: Runtime
    chunk: int

    def __call__(
        self, model: ModelShell, hidden: Tensor, rows: ScoreRows, adapters: AdapterRows | None
    ) -> PendingScores:
        """hidden: [T, D], of the batch's tokens."""
        parts = []
        for start in range(0, len(rows.targets), self.chunk):
            part = slice(start, start + self.chunk)
            columns = rows.targets[part], rows.inverse_temperature[part]
            alike = rows.alike(start, start + len(columns[0]))
            # The logits get no name here, so that they are gone before the next ones are made.
            parts.append(self._chunk(model.logits_of(hidden, rows.hidden[part], adapters), *columns, alike))
        scores = (torch.cat(column) for column in zip(*parts, strict=True))
        return PendingScores(rows.tokens, rows.top_k, tuple(self.runtime.to_host(column) for column in scores))

    def _chunk(
        self, logits: Tensor, targets: Tensor, inverse: Tensor, alike: Iterable[tuple[slice, int]]
    ) -> tuple[Tensor, ...]:
        """logits: [R, V]. Returns columns as ``PendingScores`` has them."""
        logprobs, entropy, ranks = self.ops.score_tokens(logits, inverse, targets)
        # Not as many in all rows as the one that asks for most: one that asks for all has few rows.
        tops = [likeliest(self.ops, logits[a], inverse[a], top_k, targets[a], logprobs[a]) for a, top_k in alike]
        ids, values = (torch.cat([column.flatten() for column in both]) for both in zip(*tops, strict=True))
        return logprobs, entropy, ranks, ids, values
