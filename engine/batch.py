"""``Batch``: a step's tensors, on their way to the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stoker.engine.sampler import SamplingRows
from stoker.engine.scorer import ScoreRows
from stoker.engine.step_context import ImageRows
from stoker.kernels.ops import Ops
from stoker.kernels.reference.decode_window import Record
from stoker.kernels.reference.lora import AdapterRows
from stoker.kernels.reference.recurrent import StateRows


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tensors: views of the static buffers, T tokens and R rows, padded to a bucket.

    Padded tokens write to the null block, and padded rows sample tokens that nobody reads. Where plans are static, batches of
    decode steps with equal numbers of rows are the same tensors.
    """

    num_rows: int  # real rows
    num_steps: int
    decode: bool  # every row computes one token, so that rows and tokens are the same
    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T], where each token's key and value go
    last_token: Tensor  # int64 [R], index of each row's last token
    seq_lens: Tensor  # int64 [R], keys the row's last token sees
    last_lens: Tensor  # int64 [R], keys it sees in the last step before its length ends
    window_slots: Tensor  # as ``slots``, for layers with a window, which may have blocks of their own
    block_tables: Tensor  # int64 [R, M]
    window_tables: Tensor | None  # as ``block_tables``, for such blocks
    block_size: int
    attention: Any  # the plan made by Ops.plan_attention
    shared: bool  # whether attention reads the common beginning of neighbouring rows once for all
    sampling: SamplingRows
    scoring: ScoreRows | None  # None where nothing is scored
    any_sampled: bool  # whether any row samples a token that is kept
    adapters: AdapterRows | None  # None where no token has one
    sampled: Tensor  # int64 [max_num_seqs + 1], the newest token by slot, for plans made before it is read
    state_rows: StateRows  # where the states of recurrent layers are
    images: ImageRows | None  # None where no token is an image's
    rope_deltas: Tensor | None  # rotary positions minus places, int64 [T] or [3, T]; None where they are the same

    @property
    def has_images(self) -> bool:
        """Whether a token belongs to an image, or lies among an image's. Such steps are rare."""
        return self.images is not None or (self.rope_deltas is not None and self.rope_deltas.dim() > 1)

    def advance(self, ops: Ops, tokens: Tensor, logprobs: Tensor | None = None, record: Record | None = None) -> None:
        """Move on to the next step of a decode window, whose input is each row's sampled token.

        tokens: int64 [R]; record: where they are noted, with ``logprobs``, fp32 [R].
        """
        ops.advance(
            tokens,
            self.sampling.stop_ids,
            self.sampling.first_stop,
            self.block_tables,
            self.block_size,
            token_ids=self.token_ids,
            positions=self.positions,
            slots=self.slots,
            seq_lens=self.seq_lens,
            last_lens=self.last_lens,
            window_tables=self.window_tables,
            window_slots=self.window_slots,
            logprobs=logprobs,
            record=record,
        )
        self.attention.next_step()


class _NoAttention:
    """In place of ``Ops.plan_attention``'s plan, where no layer attends."""

    def next_step(self) -> None:
        pass


NO_ATTENTION = _NoAttention()
