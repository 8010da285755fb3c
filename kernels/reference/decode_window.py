"""Moves decode rows on from one step of a decode window to the next, as plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Record:
    """Where the samples of R rows are kept on the device, step by step."""

    step: Tensor  # int64 [R], which step of its window it is: one number, but for each row its own
    tokens: Tensor  # int64 [W, R], by step
    logprobs: Tensor  # fp32 [W, R]
    newest: Tensor  # int64 [S], tokens by slot
    slots: Tensor  # int64 [R]; whose token is of no use share one


def advance(
    tokens: Tensor,
    stop_ids: Tensor,
    first_stop: Tensor,
    block_tables: Tensor,
    block_size: int,
    *,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    last_lens: Tensor,
    window_tables: Tensor | None = None,
    window_slots: Tensor | None = None,
    logprobs: Tensor | None = None,
    record: Record | None = None,
) -> None:
    """Make each of R decode rows' sampled token its next input: ``token_ids`` and all after it are changed in place.

    A row that has reached its length or sampled a stop id is over: it shrinks to one key, writes to the null block, and
    samples tokens that nobody reads.

    tokens: int64 [R], sampled; stop_ids: int64 [R, S]; first_stop: int64 [R], position of the first token that may be one;
    block_tables: int64 [R, M]; token_ids, positions: int64 [R], inputs; slots: int64 [R], where their keys go; seq_lens:
    int64 [R], keys they see; last_lens: int64 [R], keys a row sees in its last step, 0 where it is over; window_tables and
    window_slots: as ``block_tables`` and ``slots``, where layers with a window have blocks of their own. record: where
    tokens and their ``logprobs``, fp32 [R], are kept too; it then moves to its next step.
    """
    if record is not None:
        assert logprobs is not None
        record.tokens.index_copy_(0, record.step[:1], tokens[None])
        record.logprobs.index_copy_(0, record.step[:1], logprobs[None])
        record.newest.index_copy_(0, record.slots, tokens)
        record.step.add_(1)
    token_ids.copy_(tokens)
    stopped = (tokens[:, None] == stop_ids).any(1)
    stopped.logical_and_(seq_lens >= first_stop)
    over = (seq_lens.add_(1) > last_lens).logical_or_(stopped)
    seq_lens.masked_fill_(over, 1)
    last_lens.masked_fill_(over, 0)
    torch.sub(seq_lens, 1, out=positions)
    for table, where in ((block_tables, slots), (window_tables, window_slots)):
        if table is not None and where is not None:
            block = table.gather(1, (positions // block_size)[:, None])[:, 0]
            where.copy_(block * block_size + positions % block_size)
            where.masked_fill_(over, 0)
