"""From logits to tokens and log-probabilities. Each row may have other sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.engine.device import Runtime
from stoker.kernels.ops import Ops
from stoker.kernels.reference.adjustments import IN_PROMPT, SAMPLED, Banned, Bias, Penalties
from stoker.kernels.reference.constraints import ConstraintRows

LOGPROBS_MODES = ("scaled", "raw", "processed")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRows:
    """Sampling parameters of R rows, on the device; and on the host, which of them any row uses."""

    inverse_temperature: Tensor  # fp32 [R]; 1 where greedy
    greedy: Tensor  # bool [R]
    top_k: Tensor  # int64 [R]
    top_p: Tensor  # fp32 [R]
    min_p: Tensor  # fp32 [R]
    repetition: Tensor  # fp32 [R]
    presence: Tensor  # fp32 [R]
    frequency: Tensor  # fp32 [R]
    seed: Tensor  # int64 [R]
    sample_index: Tensor  # int64 [R]
    first_stop: Tensor  # int64 [R]: position of the first token that may be a stop id (min_tokens)
    stop_ids: Tensor  # int64 [R, S], padded with the vocabulary size
    biased: Tensor  # int64 [R, B], ids whose logits get ``bias`` added; padded with one of them, if there is any
    bias: Tensor  # fp32 [R, B]; -inf for ids that are never sampled, 0 in rows without any
    mode: Tensor  # int64 [R], index into LOGPROBS_MODES
    slots: Tensor  # int64 [R], rows of the penalty state; the spare one behind all others where no sample is kept
    any_random: bool
    any_greedy: bool
    any_truncated: bool
    any_penalised: bool
    any_min_tokens: bool
    any_biased: bool
    modes: tuple[int, ...]  # the distinct modes among the rows
    top_logprobs: int  # the most any row asks for
    constraints: ConstraintRows | None = None  # None where no row has one

    def part(self, rows: slice) -> SamplingRows:
        """Some of the rows. The flags stay those of all."""
        columns: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        columns |= {name: of[rows] for name, of in columns.items() if isinstance(of, Tensor)}
        return SamplingRows(**columns)


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    tokens: Tensor  # int64 [R]
    logprobs: Tensor  # fp32 [R]
    top_ids: Tensor | None = None  # int64 [R, K]
    top_logprobs: Tensor | None = None  # fp32 [R, K]

    @property
    def columns(self) -> list[Tensor]:
        """The tensors that are not None."""
        return [t for t in (self.tokens, self.logprobs, self.top_ids, self.top_logprobs) if t is not None]


class PenaltyState:
    """Which tokens a slot's prompt has, and how often its completion has each. Made when a request first needs it.

    Memory: 4 bytes a slot and vocabulary entry. A spare slot takes what padded rows sample.
    """

    def __init__(self, ops: Ops, num_slots: int, vocab: int, device: torch.device) -> None:
        self.ops = ops
        self.seen = torch.zeros(num_slots + 1, vocab, dtype=torch.int32, device=device)  # as ``Penalties`` says

    def start(self, slot: int, prompt: Tensor, output: Tensor) -> None:
        """Begin a request in a slot. prompt, output: ids it has so far, int64."""
        seen = self.seen[slot].zero_().index_fill_(0, prompt, IN_PROMPT)
        # Not bincount, which waits for the device to learn the largest id.
        seen.scatter_add_(0, output, torch.full_like(output, SAMPLED, dtype=torch.int32))

    def add(self, slots: Tensor, tokens: Tensor) -> None:
        """Count what was sampled. slots, tokens: int64 [R]."""
        self.ops.count(self.seen, slots, tokens)


class Sampler:
    """Samples a step's tokens. It has no state but the token counts for penalties."""

    def __init__(self, ops: Ops, runtime: Runtime, num_slots: int, vocab: int) -> None:
        self.ops = ops
        self.runtime = runtime
        self._shape = (num_slots, vocab, runtime.device)
        self.penalties: PenaltyState | None = None

    def start_penalties(self, slot: int, prompt: list[int], output: list[int]) -> None:
        self.penalties = self.penalties or PenaltyState(self.ops, *self._shape)
        ids = (np.array(tokens, dtype=np.int64) for tokens in (prompt, output))
        self.penalties.start(slot, *self.runtime.upload(*ids))

    def noise(self, rows: SamplingRows, positions: Tensor, num_steps: int) -> list[Tensor | None]:
        """The random numbers of each step of a window. They do not depend on what is sampled in it.

        positions: int64 [R], of the tokens that the first step samples.
        """
        if not rows.any_random:
            return [None] * num_steps
        at = positions[None]
        if num_steps > 1:
            at = at + torch.arange(num_steps, device=positions.device)[:, None]
        seed, sample_index = rows.seed.expand_as(at), rows.sample_index.expand_as(at)
        drawn = self.ops.gumbel_noise(seed.flatten(), at.flatten(), sample_index.flatten(), self._shape[1])
        return list(drawn.view(num_steps, len(positions), -1))

    def __call__(self, logits: Tensor, rows: SamplingRows, positions: Tensor, noise: Tensor | None) -> SamplerOutput:
        """logits: [R, V] of any float dtype; positions: int64 [R], of the tokens to be sampled; noise: of the step."""
        count = len(logits)
        together = count if self.ops.rows_together is None else self.ops.rows_together(logits.shape[1])
        if together >= count:
            return self._sample(logits, rows, positions, noise)
        parts = []
        for first in range(0, count, together):
            at = slice(first, first + together)
            own_noise = None if noise is None else noise[at]
            parts.append(self._sample(logits[at], rows.part(at), positions[at], own_noise).columns)
        return SamplerOutput(*map(torch.cat, zip(*parts, strict=True)))

    def _sample(self, logits: Tensor, rows: SamplingRows, positions: Tensor, noise: Tensor | None) -> SamplerOutput:
        inverse = rows.inverse_temperature
        # Every tensor here costs a kernel in every step, so make only what some row asks for.
        one = torch.ones_like(inverse) if rows.any_truncated or rows.modes != (0,) else inverse
        processed, processed_inverse = logits, inverse
        if rows.any_biased or rows.any_penalised or rows.any_min_tokens:
            processed = self.adjusted(logits, rows, positions)
        if rows.constraints is not None:
            processed = self.ops.constrain(processed, rows.constraints, rows.slots, positions)
        if rows.any_truncated:
            processed = self.ops.truncate(processed, inverse, rows.top_k, rows.top_p, rows.min_p)
            processed_inverse = one
        tokens, own_logprobs = self.ops.sample(
            processed,
            processed_inverse,
            rows.greedy if rows.any_greedy else None,
            noise,
        )
        if rows.any_penalised:
            assert self.penalties is not None
            self.penalties.add(rows.slots, tokens)
        if rows.constraints is not None:
            self.ops.follow(tokens, rows.constraints, rows.slots, logits.shape[1])

        # Each mode is a softmax over these logits at this inverse temperature; "processed" is what was sampled from.
        bases = ((logits, inverse), (logits, one), (processed, processed_inverse))
        as_sampled = 0 if processed is logits else 2
        logprobs = own_logprobs
        for mode in rows.modes:
            if mode not in (as_sampled, 2):
                logprobs = torch.where(rows.mode == mode, self.ops.token_logprobs(*bases[mode], tokens), logprobs)
        if not rows.top_logprobs:
            return SamplerOutput(tokens, logprobs)
        ids, values = likeliest(self.ops, *bases[rows.modes[0]], rows.top_logprobs, tokens, logprobs)
        for mode in rows.modes[1:]:
            own = (rows.mode == mode)[:, None]
            own_ids, own_values = likeliest(self.ops, *bases[mode], rows.top_logprobs, tokens, logprobs)
            ids, values = torch.where(own, own_ids, ids), torch.where(own, own_values, values)
        return SamplerOutput(tokens, logprobs, ids, values)

    def adjusted(self, logits: Tensor, rows: SamplingRows, positions: Tensor) -> Tensor:
        """The logits with every row's bias and penalties, and without what may not come yet, fp32 [R, V]."""
        penalties = None
        if rows.any_penalised:
            assert self.penalties is not None
            penalties = Penalties(self.penalties.seen, rows.slots, rows.repetition, rows.presence, rows.frequency)
        return self.ops.adjust(
            logits,
            Bias(rows.biased, rows.bias) if rows.any_biased else None,
            penalties,
            Banned(rows.stop_ids, rows.first_stop, positions) if rows.any_min_tokens else None,
        )


def likeliest(
    ops: Ops, logits: Tensor, inverse_temperature: Tensor, count: int, tokens: Tensor, logprobs: Tensor
) -> tuple[Tensor, Tensor]:
    """The likeliest tokens, int64 [R, count], and their log-probabilities, fp32. logits: [R, V] of any float dtype.

    tokens, logprobs: one of each row, and what was said of it, as is said of it here then: kernels differ in the last bits.
    """
    values, ids = logits.topk(count, dim=-1)
    values = values.float()
    if count:  # from the differences to the first one, which needs nothing as large as the logits
        first = ops.token_logprobs(logits, inverse_temperature, ids[:, 0])
        values = first[:, None] + (values - values[:, :1]) * inverse_temperature[:, None]
        values = torch.where(ids == tokens[:, None], logprobs[:, None], values)
    return ids, values
