"""The static, padded tensors a step reads, and the message that carries them to the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.engine.device import Runtime
from stoker.engine.request import Request
from stoker.engine.sampler import SamplingRows
from stoker.engine.scheduler import Plan
from stoker.kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tensors: views of the static buffers, T tokens and R rows, padded to a bucket.

    Padded tokens write to the null block and padded rows sample tokens nobody reads.
    """

    num_rows: int  # real rows
    num_steps: int
    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T], where each token's key and value go
    last_token: Tensor  # int64 [R], index of each row's last token
    seq_lens: Tensor  # int64 [R], keys the row's last token sees
    last_lens: Tensor  # int64 [R], keys it sees in the last step before its length ends
    block_tables: Tensor  # int64 [R, M]
    block_size: int
    attention: Any  # the plan made by Ops.plan_attention
    sampling: SamplingRows

    def advance(self, tokens: Tensor) -> None:
        """On to the next step of a decode window: each row's sampled token is its input. tokens: int64 [R].

        A row that has reached its length stays where it is, writes to the null block, and samples what nobody reads.
        """
        self.token_ids.copy_(tokens)
        over = self.seq_lens.add_(1) > self.last_lens
        torch.minimum(self.seq_lens, self.last_lens, out=self.seq_lens)
        torch.sub(self.seq_lens, 1, out=self.positions)
        block = self.block_tables.gather(1, (self.positions // self.block_size)[:, None])[:, 0]
        torch.add(block * self.block_size, self.positions % self.block_size, out=self.slots)
        self.slots.masked_fill_(over, 0)
        self.attention.next_step()


def bucket(n: int, limit: int) -> int:
    """The padded size for ``n``: 1, 2, 4, then steps of 8 to 64, of 16 to 256, of 32 beyond; never above ``limit``."""
    for size in (1, 2, 4):
        if n <= size:
            return min(size, limit)
    step = 8 if n <= 64 else 16 if n <= 256 else 32
    return min(-(-n // step) * step, limit)


class StepInputs:
    """Host rows by slot, written when a request is admitted, and static device buffers, filled at every plan."""

    _FIELDS = (
        ("temperature", np.float32),
        ("greedy", np.bool_),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("seed", np.int64),
        ("sample_index", np.int64),
        ("first_stop", np.int64),
        ("mode", np.int64),
    )

    def __init__(
        self,
        ops: Ops,
        runtime: Runtime,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_blocks: int,
        block_size: int,
        token_bytes: int,
        vocab: int,
    ) -> None:
        self.ops = ops
        self.runtime = runtime
        self.max_rows = max_num_seqs
        self.max_tokens = max(max_num_batched_tokens, max_num_seqs)
        self.block_size = block_size
        self.token_bytes = token_bytes
        self.vocab = vocab
        # One row more than there are slots: the padding, greedy and without any request's ids.
        self._host: dict[str, NDArray[Any]] = {
            name: np.zeros(max_num_seqs + 1, dtype=kind) for name, kind in self._FIELDS
        }
        for name in ("temperature", "top_p", "repetition"):
            self._host[name][:] = 1
        self._host["greedy"][:] = True
        self._stop_ids: list[tuple[int, ...]] = [()] * (max_num_seqs + 1)
        self._tables = np.zeros((max_num_seqs + 1, max_blocks), dtype=np.int64)

        def static(*size: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=runtime.device)

        self._token_ids, self._positions, self._slots = (static(self.max_tokens) for _ in range(3))
        self._last_token, self._seq_lens, self._last_lens, self._slot_rows = (static(max_num_seqs) for _ in range(4))
        self._block_tables = static(max_num_seqs, max_blocks)
        self._rows = {
            name: static(max_num_seqs, dtype=torch.from_numpy(column).dtype) for name, column in self._host.items()
        }

    def fill(self, plan: Plan) -> Batch:
        """Write a plan's requests into the static buffers."""
        requests, num_new = plan.requests, plan.num_new
        for request in plan.admitted:
            self._write_slot(request)
        for request in requests:
            if request.first_new_block < len(request.block_ids):
                fresh = slice(request.first_new_block, len(request.block_ids))
                self._tables[request.slot, fresh] = request.block_ids[fresh]
                request.first_new_block = len(request.block_ids)

        count = len(requests)
        rows = bucket(count, self.max_rows)
        padding = rows - count
        pad_slot = self.max_rows
        slots = np.array([r.slot for r in requests] + [pad_slot] * padding)
        computed = np.array([r.computed for r in requests])
        new = np.array(num_new)
        lengths = computed + new
        last = lengths + np.minimum(plan.num_steps, [r.remaining for r in requests]) - 1
        columns = int(-(-last.max() // self.block_size))
        tables = self._tables[slots, :columns]

        decode = count == new.sum()
        if decode:  # every row one token: rows and tokens are the same thing
            tokens = rows
            token_ids = np.array([r.tokens[c] for r, c in zip(requests, computed.tolist(), strict=True)])
            positions, row_of = computed, np.arange(count)
        else:
            width = int(new.sum())
            tokens = bucket(width, self.max_tokens)
            spans = (r.tokens[r.computed : r.computed + n] for r, n in zip(requests, num_new, strict=True))
            token_ids = np.fromiter(chain.from_iterable(spans), dtype=np.int64, count=width)
            row_of = np.repeat(np.arange(count), new)
            positions = np.arange(width) - np.repeat(new.cumsum() - new, new) + np.repeat(computed, new)
        where = tables[row_of, positions // self.block_size] * self.block_size + positions % self.block_size

        def put(static: Tensor, values: NDArray[Any], size: int) -> Tensor:
            padded = np.zeros(size, dtype=np.int64)
            padded[: len(values)] = values
            self.runtime.to_device(torch.from_numpy(padded), static[:size])
            return static[:size]

        # A row's seq_len counts the keys of its last token; padded rows see the one key they write to the null block.
        seq_lens = put(self._seq_lens, np.concatenate((lengths, np.ones(padding, dtype=np.int64))), rows)
        block_tables = self._block_tables[:rows, :columns]
        self.runtime.to_device(torch.from_numpy(tables), block_tables)
        batch_positions = put(self._positions, positions, tokens)
        attention = self.ops.plan_attention(
            num_new,
            lengths.tolist(),
            block_tables,
            seq_lens,
            block_size=self.block_size,
            token_bytes=self.token_bytes,
            num_steps=plan.num_steps,
        )
        complete = [r.computed + n == r.total for r, n in zip(requests, num_new, strict=True)]
        return Batch(
            num_rows=count,
            num_steps=plan.num_steps,
            token_ids=put(self._token_ids, token_ids, tokens),
            positions=batch_positions,
            slots=put(self._slots, where, tokens),
            last_token=put(self._last_token, np.arange(rows) if decode else new.cumsum() - 1, rows),
            seq_lens=seq_lens,
            last_lens=put(self._last_lens, np.concatenate((last, np.ones(padding, dtype=np.int64))), rows),
            block_tables=block_tables,
            block_size=self.block_size,
            attention=attention,
            sampling=self._sampling(requests, complete, slots, rows, put),
        )

    def _write_slot(self, request: Request) -> None:
        spec, slot, host = request.spec, request.slot, self._host
        host["temperature"][slot] = spec.temperature or 1.0
        host["greedy"][slot] = spec.temperature == 0.0
        host["top_k"][slot], host["top_p"][slot], host["min_p"][slot] = spec.top_k, spec.top_p, spec.min_p
        host["repetition"][slot] = spec.repetition_penalty
        host["presence"][slot], host["frequency"][slot] = spec.presence_penalty, spec.frequency_penalty
        host["seed"][slot], host["sample_index"][slot] = spec.seed, request.sample_index
        host["first_stop"][slot] = request.num_prompt + spec.min_tokens
        host["mode"][slot] = spec.logprobs_mode
        self._stop_ids[slot] = tuple(spec.stop_ids)
        self._tables[slot] = 0

    def _sampling(
        self, requests: Sequence[Request], complete: Sequence[bool], slots: NDArray[Any], rows: int, put: Any
    ) -> SamplingRows:
        columns = {}
        for name, column in self._host.items():
            static = self._rows[name][:rows]
            self.runtime.to_device(torch.from_numpy(column[slots]), static)
            columns[name] = static
        specs = [r.spec for r in requests]
        any_min_tokens = any(s.min_tokens > r.num_output for r, s in zip(requests, specs, strict=True))
        stops = [self._stop_ids[s] for s in slots] if any_min_tokens else []
        width = max(map(len, stops), default=0)
        stop_ids = torch.tensor([[*s, *[self.vocab] * (width - len(s))] for s in stops], dtype=torch.long)
        keep = np.array([slot if done else self.max_rows for slot, done in zip(slots.tolist(), complete, strict=False)])
        kept = np.full(rows, self.max_rows)
        kept[: len(keep)] = keep
        return SamplingRows(
            **columns,
            stop_ids=stop_ids.to(self.runtime.device),
            slots=put(self._slot_rows, kept, rows),
            any_random=any(s.temperature > 0 for s in specs),
            any_greedy=any(s.temperature == 0 for s in specs),
            any_truncated=any(s.truncated for s in specs),
            any_penalised=any(s.penalised for s in specs),
            any_min_tokens=any_min_tokens,
            modes=tuple(sorted({s.logprobs_mode for s in specs})),
            top_logprobs=max(s.top_logprobs for s in specs),
        )
