"""From logits to tokens and log-probabilities. Each row may have other sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stoker.engine.device import Runtime
from stoker.kernels.ops import Ops
from stoker.kernels.reference.constraints import ConstraintRows

LOGPROBS_MODES = ("scaled", "raw", "processed")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRows:
    """Sampling parameters of R rows, on the device; and on the host, which of them any row uses."""

    temperature: Tensor  # fp32 [R]; 1 where greedy
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


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    tokens: Tensor  # int64 [R]
    logprobs: Tensor  # fp32 [R]
    top_ids: Tensor | None  # int64 [R, K]
    top_logprobs: Tensor | None  # fp32 [R, K]

    @property
    def columns(self) -> list[Tensor]:
        """The tensors that are not None."""
        return [t for t in (self.tokens, self.logprobs, self.top_ids, self.top_logprobs) if t is not None]


class PenaltyState:
    """Which tokens a slot's prompt has, and how often its completion has each. Made when a request first needs it.

    Memory: 5 bytes a slot and vocabulary entry. A spare slot takes what padded rows sample.
    """

    def __init__(self, num_slots: int, vocab: int, device: torch.device) -> None:
        self.in_prompt = torch.zeros(num_slots + 1, vocab, dtype=torch.bool, device=device)
        self.counts = torch.zeros(num_slots + 1, vocab, dtype=torch.int32, device=device)

    def start(self, slot: int, prompt: Tensor, output: Tensor) -> None:
        """Begin a request in a slot. prompt, output: ids it has so far, int64."""
        self.in_prompt[slot].zero_().index_fill_(0, prompt, True)
        # Not bincount, which waits for the device to learn the largest id.
        self.counts[slot].zero_().scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def add(self, slots: Tensor, tokens: Tensor) -> None:
        """Count what was sampled. slots, tokens: int64 [R]."""
        # Not index_put_, which sorts. Only the spare slot occurs more than once, and integers may be added in any order.
        places = slots * self.counts.shape[1] + tokens
        self.counts.view(-1).scatter_add_(0, places, torch.ones_like(tokens, dtype=torch.int32))

    def apply(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """The logits with every row's penalties, fp32 [R, V]. logits: fp32 [R, V]."""
        counts = self.counts.index_select(0, rows.slots)
        seen = self.in_prompt.index_select(0, rows.slots) | (counts > 0)
        repetition = rows.repetition[:, None]
        # Keskar et al. (CTRL, 2019), section 4.1, in the form every library uses: positive logits shrink, negative grow.
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        return logits - rows.frequency[:, None] * counts - rows.presence[:, None] * (counts > 0)


class Sampler:
    """Samples a step's tokens. It has no state but the token counts for penalties."""

    def __init__(self, ops: Ops, runtime: Runtime, num_slots: int, vocab: int) -> None:
        self.ops = ops
        self.runtime = runtime
        self._shape = (num_slots, vocab, runtime.device)
        self.penalties: PenaltyState | None = None

    def start_penalties(self, slot: int, prompt: list[int], output: list[int]) -> None:
        self.penalties = self.penalties or PenaltyState(*self._shape)
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
        masked = rows.any_min_tokens or rows.any_biased or rows.constraints is not None
        if rows.any_penalised or masked or rows.any_truncated or rows.top_logprobs:
            logits = logits.float()  # the operations that follow compute in fp32 in any case
        inverse = rows.temperature.reciprocal()
        # Every tensor here costs a kernel in every step, so make only what some row asks for.
        one = torch.ones_like(inverse) if rows.any_truncated or rows.modes != (0,) else inverse
        processed, processed_inverse = logits, inverse
        if rows.any_biased:
            # Not scatter_add, which would add the padding too.
            processed = processed.scatter(1, rows.biased, processed.gather(1, rows.biased) + rows.bias)
        if rows.any_penalised:
            assert self.penalties is not None
            processed = self.penalties.apply(processed, rows)
        if rows.any_min_tokens:
            processed = _without(processed, rows.stop_ids, (positions < rows.first_stop)[:, None])
        if rows.constraints is not None:
            processed = self.ops.constrain(processed, rows.constraints, rows.slots, positions)
        if rows.any_truncated:
            processed = self.ops.truncate(processed * inverse[:, None], rows.top_k, rows.top_p, rows.min_p)
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
            return SamplerOutput(tokens, logprobs, None, None)
        basis = torch.empty_like(logits)
        for mode in rows.modes:
            source, scale = bases[mode]
            basis = torch.where((rows.mode == mode)[:, None], source * scale[:, None], basis)
        values, ids = basis.topk(rows.top_logprobs, dim=-1)
        return SamplerOutput(tokens, logprobs, ids, values - basis.logsumexp(-1, keepdim=True))


def _without(logits: Tensor, ids: Tensor, where: Tensor) -> Tensor:
    """Logits under which these ids cannot be sampled, in rows where that is so. ids: int64 [R, S]; where: bool [R, 1]."""
    vocab = logits.shape[-1]
    banned = torch.zeros(logits.shape[0], vocab + 1, dtype=torch.bool, device=logits.device)
    banned.scatter_(1, ids, True)  # the padding id falls into the extra column
    return logits.masked_fill(banned[:, :vocab] & where, float("-inf"))
