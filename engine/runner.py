"""Runs a batch: model and sampler, for each step of its window. Its results are read later, when somebody asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stoker.engine.batch import Batch
from stoker.engine.cache.kv_cache import KVCache
from stoker.engine.device import HostCopy, Runtime
from stoker.engine.model import ModelShell
from stoker.engine.plan import Sampled
from stoker.engine.sampler import Sampler, SamplerOutput
from stoker.engine.scorer import PendingScores, Scorer
from stoker.engine.step_context import StepContext
from stoker.kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class Pending:
    """What a launched batch samples, on its way to the host: tokens, log-probabilities, then top ids and values."""

    copies: tuple[HostCopy, ...]  # [num_steps, rows] or [num_steps, rows, K] each; none where nothing is sampled
    scores: PendingScores | None = None

    def read(self) -> Sampled:
        """Wait for the batch to be done."""
        scores = None if self.scores is None else self.scores.read()
        if not self.copies:
            return Sampled([], [], None, scores)
        tokens, logprobs, *top = (copy.wait().transpose(0, 1).tolist() for copy in self.copies)
        if not top:
            return Sampled(tokens, logprobs, None, scores)
        rows = zip(*top, strict=True)
        found = [[dict(zip(i, v, strict=True)) for i, v in zip(ids, values, strict=True)] for ids, values in rows]
        return Sampled(tokens, logprobs, found, scores)


class Runner(Protocol):
    """Launches a batch. Batches run in the order they were launched in."""

    @property
    def model(self) -> ModelShell: ...

    @property
    def sampler(self) -> Sampler: ...

    @property
    def kv(self) -> KVCache: ...

    def __call__(self, batch: Batch) -> Pending: ...

    def bind(self, model: ModelShell) -> None:
        """Run this model from now on."""

    @property
    def has_graphs(self) -> bool:
        """Whether any step is captured, and remembers addresses."""

    def release_graphs(self) -> None:
        """Drop what was captured or copied for speed: tensors it reads are about to go, or its memory is needed."""


class EagerStep:
    """One call runs all steps of a batch's window, op by op."""

    def __init__(
        self, model: ModelShell, sampler: Sampler, scorer: Scorer, kv: KVCache, ops: Ops, runtime: Runtime
    ) -> None:
        self.model = model
        self.sampler = sampler
        self.scorer = scorer
        self.kv = kv
        self.ops = ops
        self.runtime = runtime

    def bind(self, model: ModelShell) -> None:
        self.model = model

    @property
    def has_graphs(self) -> bool:
        return False

    def release_graphs(self) -> None:
        self.model.lora.stacks.release()

    def __call__(self, batch: Batch) -> Pending:
        outputs: list[SamplerOutput] = []
        scores: PendingScores | None = None
        with torch.inference_mode(), torch.autocast(self.model.device.type, enabled=False):
            # The position sampled for is the one after the row's last token.
            noise = self.sampler.noise(batch.sampling, batch.seq_lens, batch.num_steps)
            for step in range(batch.num_steps):
                if step:
                    batch.advance(self.ops, outputs[-1].tokens)
                hidden = self._hidden(batch)
                if batch.scoring is not None:
                    scores = self.scorer(self.model, hidden, batch.scoring, batch.adapters)
                if not batch.any_sampled:
                    return Pending((), scores)
                outputs.append(self._sample(batch, hidden, noise[step]))
            batch.sampled.index_copy_(0, batch.sampling.slots, outputs[-1].tokens)
            results = map(torch.stack, zip(*(out.columns for out in outputs), strict=True))
            return Pending(tuple(self.runtime.to_host(t[:, : batch.num_rows]) for t in results), scores)

    def step(self, batch: Batch, noise: Tensor | None) -> SamplerOutput:
        """One step of the batch, without moving it on; what is sampled is kept nowhere."""
        return self._sample(batch, self._hidden(batch), noise)

    def _hidden(self, batch: Batch) -> Tensor:
        kv = self.kv
        # Rows that ended within their window have position 0.
        rotary = None if batch.rope_deltas is None else (batch.positions + batch.rope_deltas).clamp_(min=0)
        context = StepContext(
            self.ops,
            kv.layers,
            batch.attention,
            batch.slots,
            batch.window_slots,
            kv.states,
            batch.state_rows,
            batch.images,
            rotary,
        )
        self.model.lora.rows = batch.adapters
        return self.model.hidden(batch.token_ids, batch.positions, context)

    def _sample(self, batch: Batch, hidden: Tensor, noise: Tensor | None) -> SamplerOutput:
        last = None if batch.decode else batch.last_token
        logits = self.model.logits_of(hidden, last, batch.adapters)
        return self.sampler(logits, batch.sampling, batch.seq_lens, noise)
