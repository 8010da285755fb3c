"""From hidden states to log-probabilities of given tokens, a chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    top_k: int  # the most any request asks for

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
        top_k = max(r.scoring.variant.top_k for r, t in zip(plan.requests, plan.scored, strict=True) if t and r.scoring)
        hidden, targets, inverse_temperature = tensors
        return cls(plan.scored, hidden, targets, inverse_temperature, top_k)


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Scores on their way to the host."""

    tokens: list[range]
    columns: tuple[HostCopy, ...]  # as ``TokenScores.columns``, for all requests one after the other

    def read(self) -> list[TokenScores | None]:
        """Wait for the scores of each request; None where nothing of it was scored."""
        columns = [copy.wait() for copy in self.columns]
        scores: list[TokenScores | None] = []
        offset = 0
        for t in self.tokens:
            part = slice(offset, offset + len(t))
            scores.append(TokenScores(t.start, t.stop, *(column[part] for column in columns)) if t else None)
            offset = part.stop
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
            # The logits get no name here, so that they are gone before the next ones are made.
            parts.append(self._chunk(model.logits_of(hidden, rows.hidden[part], adapters), *columns, rows.top_k))
        scores = (torch.cat(column) for column in zip(*parts, strict=True))
        return PendingScores(rows.tokens, tuple(self.runtime.to_host(column) for column in scores))

    def _chunk(self, logits: Tensor, targets: Tensor, inverse: Tensor, top_k: int) -> tuple[Tensor, ...]:
        """logits: [R, V]. Returns columns of ``TokenScores``."""
        logprobs, entropy, ranks = self.ops.score_tokens(logits, inverse, targets)
        ids, values = likeliest(self.ops, logits, inverse, top_k, targets, logprobs)
        return logprobs, entropy, ranks, ids, values
