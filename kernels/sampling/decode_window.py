"""What changes from one step of a decode window to the next, in one kernel. Some twenty of torch's would take a tenth of a
small model's step."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.launch import await_turn
from stoker.kernels.reference.decode_window import Record


# How the log-probabilities are aligned follows from the number of rows: a kernel specialised on it would be compiled again,
# and that while a step is captured.
@triton.jit(do_not_specialize_on_alignment=["logprobs_ptr"])
def _advance_kernel(
    tokens_ptr, stop_ids_ptr, first_stop_ptr, table_ptr, token_ids_ptr, positions_ptr, slots_ptr, seq_lens_ptr,
    last_lens_ptr, window_table_ptr, window_slots_ptr, logprobs_ptr, step_ptr, all_tokens_ptr, all_logprobs_ptr,
    newest_ptr, kept_slots_ptr, stops_stride, table_stride, stops, BLOCK_SIZE: tl.constexpr, STOPS: tl.constexpr,
    WINDOWED: tl.constexpr, RECORD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_turn(DEPENDENT)
    row = tl.program_id(0)
    token = tl.load(tokens_ptr + row)
    at = tl.arange(0, STOPS)
    stop_ids = tl.load(stop_ids_ptr + row.to(tl.int64) * stops_stride + at, mask=at < stops, other=-1)
    length = tl.load(seq_lens_ptr + row)
    last = tl.load(last_lens_ptr + row)
    stopped = (tl.max((stop_ids == token).to(tl.int32), 0) > 0) & (length >= tl.load(first_stop_ptr + row))
    over = stopped | (length + 1 > last)
    length = tl.where(over, 1, length + 1)
    position = length - 1
    entry = row.to(tl.int64) * table_stride + position // BLOCK_SIZE
    block = tl.load(table_ptr + entry)
    tl.store(token_ids_ptr + row, token)
    tl.store(seq_lens_ptr + row, length)
    tl.store(last_lens_ptr + row, tl.where(over, 0, last))
    tl.store(positions_ptr + row, position)
    tl.store(slots_ptr + row, tl.where(over, 0, block * BLOCK_SIZE + position % BLOCK_SIZE))
    if WINDOWED:
        block = tl.load(window_table_ptr + entry)
        tl.store(window_slots_ptr + row, tl.where(over, 0, block * BLOCK_SIZE + position % BLOCK_SIZE))
    if RECORD:
        step = tl.load(step_ptr + row)
        at = step * tl.num_programs(0) + row
        tl.store(all_tokens_ptr + at, token)
        tl.store(all_logprobs_ptr + at, tl.load(logprobs_ptr + row))
        tl.store(newest_ptr + tl.load(kept_slots_ptr + row), token)
        tl.store(step_ptr + row, step + 1)


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
    """As the reference; one-dimensional tensors are contiguous, and so are the rows of the others and a record's tensors.
    Both tables have the same strides."""
    kept = (
        (tokens,) * 5 if record is None else (record.step, record.tokens, record.logprobs, record.newest, record.slots)
    )
    _advance_kernel[tokens.shape](
        tokens,
        stop_ids,
        first_stop,
        block_tables,
        token_ids,
        positions,
        slots,
        seq_lens,
        last_lens,
        block_tables if window_tables is None else window_tables,
        slots if window_slots is None else window_slots,
        tokens if logprobs is None else logprobs,
        *kept,
        stop_ids.stride(0),
        block_tables.stride(0),
        stop_ids.shape[1],
        BLOCK_SIZE=block_size,
        WINDOWED=window_tables is not None,
        RECORD=record is not None,
        STOPS=triton.next_power_of_2(stop_ids.shape[1]),
        num_warps=1,
        **launch.options(tokens.device),
    )
