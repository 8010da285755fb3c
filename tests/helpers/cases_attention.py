"""Paged rows for attention tests, and their attention in float64. Unwritten memory is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from paged_rows import TOLERANCE
from torch import Tensor
from triton_oracle import unwatched

from stoker.kernels.attention.paged import attend
from stoker.kernels.reference.attention import movable
from stoker.kernels.reference.attention_plan import Visibility

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on a CPU, kernels are interpreted
GPU_ONLY = [pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]  # the interpreter's bf16 arithmetic is wrong
PLAIN: dict[str, Any] = {"visibility": Visibility()}


@dataclass(frozen=True)
class Heads:
    """latent: values are the first value_dim numbers of the keys, as DeepSeek keeps them."""

    kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    latent: bool = False

    @property
    def name(self) -> str:
        return f"{self.kv_heads}x{self.group}-{self.key_dim}-{self.value_dim}{'-latent' * self.latent}"


@dataclass(frozen=True)
class Row:
    """keys: of its last query, its own included; the first ``shared`` are those of row ``parent``, block for block."""

    keys: int
    queries: int = 1
    parent: int = 0
    shared: int = 0


class Paged:
    """Static buffers larger than the batch. Rows have room and keys for ``later`` more steps, not yet written."""

    def __init__(
        self,
        heads: Heads,
        rows: list[Row],
        dtype: torch.dtype = torch.float32,
        *,
        padded: int = 2,
        later: int = 0,
        block_size: int = 16,
        spare_rows: int = 3,
        kept: torch.dtype | None = None,
    ) -> None:
        """kept: the dtype of the caches, where it is another; keys and values are rounded to it."""
        self.heads, self.rows, self.block_size, self.padded = heads, rows, block_size, padded
        self.device, self.dtype = DEVICE, dtype
        total = [row.keys + later for row in rows]
        blocks = [-(-n // block_size) for n in total]
        own = [b - row.shared // block_size for b, row in zip(blocks, rows, strict=True)]
        count = sum(own) + 2
        fresh = (torch.randperm(sum(own)) + 2).split(own)
        # Block 0 is the null block; block 1 is nobody's, and stands where a table names no block of its row.
        table = torch.ones(len(rows) + padded + spare_rows, max(blocks) + 2, dtype=torch.long)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for number, row in enumerate(rows):
            common = row.shared // block_size
            table[number, :common] = table[row.parent, :common]
            table[number, common : blocks[number]] = fresh[number]
            key = torch.randn(total[number], heads.kv_heads, heads.key_dim, dtype=dtype)
            value = torch.randn(total[number], heads.kv_heads, heads.value_dim, dtype=dtype)
            if common:
                key[: row.shared] = self.keys[row.parent][: row.shared]
                value[: row.shared] = self.values[row.parent][: row.shared]
            key, value = key.to(kept or dtype).to(dtype), value.to(kept or dtype).to(dtype)
            self.keys.append(key)
            self.values.append(key[..., : heads.value_dim] if heads.latent else value)
        table[len(rows) :, 0] = 0
        nan = float("nan")
        self.key_cache = torch.full((count, block_size, heads.kv_heads, heads.key_dim), nan, dtype=dtype)
        self.value_cache = torch.full((count, block_size, heads.kv_heads, heads.value_dim), nan, dtype=dtype)
        self.key_cache, self.value_cache = (t.to(DEVICE, kept or dtype) for t in (self.key_cache, self.value_cache))
        if heads.latent:
            self.value_cache = self.key_cache[..., : heads.value_dim]
        self.key_cache[0, 0] = self.value_cache[0, 0] = 0.0  # all that padding reads
        self.static_table = table.to(DEVICE)
        self.static_lens = torch.ones(len(table), dtype=torch.long, device=DEVICE)
        self.workspace: dict[str, Any] = {}
        self.size = len(rows) + padded
        self.table, self.seq_lens = self.static_table[: self.size], self.static_lens[: self.size]
        self.seq_lens[: len(rows)] = torch.tensor([row.keys for row in rows], device=DEVICE)
        for number, row in enumerate(rows):
            self.write(number, 0, row.keys)

    def slots(self, row: int, start: int, end: int) -> Tensor:
        at = torch.arange(start, end, device=DEVICE)
        return self.table[row, at // self.block_size] * self.block_size + at % self.block_size

    def write(self, row: int, start: int, end: int) -> None:
        slots = self.slots(row, start, end)
        where = (slots // self.block_size, slots % self.block_size)
        movable(self.key_cache)[where] = movable(self.keys[row][start:end].to(self.key_cache))
        movable(self.value_cache)[where] = movable(self.values[row][start:end].to(self.value_cache))

    def advance(self, step: int) -> None:
        """Every row's next key is there, and its length counts it."""
        for number, row in enumerate(self.rows):
            self.write(number, row.keys + step - 1, row.keys + step)
        self.seq_lens[: len(self.rows)] += 1

    def plan_of_windows(self, ops: Any, visibility: Visibility, **options: Any) -> Any:
        """For layers that see so much, in a table of their own: it names nobody's block for what no query sees any more, and
        the other table for everything."""
        own, none = self.static_table.clone(), torch.ones_like(self.static_table)
        for number, row in enumerate(self.rows):
            own[number, : visibility.first(row.keys - row.queries) // self.block_size] = 1
        return self.plan(ops, none[: self.size], window_tables=own[: self.size], **options)

    def plan(self, ops: Any, table: Tensor | None = None, **options: Any) -> Any:
        lens = ([row.queries for row in self.rows], [row.keys for row in self.rows])
        return ops.plan_attention(
            *lens,
            self.table if table is None else table,
            self.seq_lens,
            block_size=self.block_size,
            token_bytes=2**20,
            workspace=self.workspace,
            **options,
        )

    def query(self) -> Tensor:
        """As a model gives it: heads before tokens, seen the other way round. With padded tokens."""
        tokens = sum(row.queries for row in self.rows)
        tokens = self.size if tokens == len(self.rows) else tokens + 3
        heads = self.heads.kv_heads * self.heads.group
        return torch.randn(heads, tokens, self.heads.key_dim, dtype=self.dtype).to(DEVICE).transpose(0, 1)

    @unwatched
    def dense(
        self, query: Tensor, step: int = 0, spans: Sequence[tuple[int, int]] = (), **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of every real token, float64 [T, Hq, Dv] and [T, Hq], by a softmax over all it sees."""
        places = [
            (number, position)
            for number, row in enumerate(self.rows)
            for position in range(row.keys + step - row.queries, row.keys + step)
        ]
        newest = [position for _, position in places]
        for begin, end in spans:
            newest[begin:end] = newest[end - 1 : end] * (end - begin)
        outs, sums = [], []
        for token, (place, last) in enumerate(zip(places, newest, strict=True)):
            out, total = self._one(query[token].cpu().double(), *place, last, **options)
            outs.append(out)
            sums.append(total)
        return torch.stack(outs), torch.stack(sums)

    def _one(
        self,
        query: Tensor,
        row: int,
        position: int,
        newest: int,
        *,
        scale: float,
        visibility: Visibility,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        first = 0
        if visibility.window is not None:
            first = max(first, position + 1 - visibility.window)
        if visibility.chunk is not None:
            first = max(first, position - position % visibility.chunk)
        key, value = (t[row][first : newest + 1].double() for t in (self.keys, self.values))
        query = query.view(self.heads.kv_heads, self.heads.group, -1)
        scores = torch.einsum("hgd,nhd->hgn", query, key) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        total = scores.logsumexp(-1)
        weights = (scores - total[..., None]).exp()
        if sinks is not None:
            weights = weights * torch.sigmoid(total - sinks.cpu().double().view_as(total))[..., None]
        out = torch.einsum("hgn,nhd->hgd", weights, value)
        return out.flatten(0, 1), total.flatten()


SMALL = Heads(2, 2, 16, 16)
NARROW = Heads(1, 2, 16, 16)


def options_of(case: Paged, feature: dict[str, Any]) -> dict[str, Any]:
    options = {"scale": case.heads.key_dim**-0.5} | feature
    if "sinks" in options:
        heads = case.heads.kv_heads * case.heads.group
        options["sinks"] = torch.linspace(-1, 3, heads, dtype=case.dtype, device=DEVICE)
    return options


def check(
    case: Paged, plan: Any, feature: dict[str, Any], step: int = 0, spans: Sequence[tuple[int, int]] = ()
) -> Tensor:
    """Output and log-sum-exp of all real tokens; the padded ones are finite. Returns the output."""
    query, options = case.query(), options_of(case, feature)
    out, lse = attend(query, case.key_cache, case.value_cache, plan, with_lse=True, **options)
    wanted, wanted_lse = case.dense(query, step, spans, **options)
    count = len(wanted)
    assert out.shape == (*query.shape[:2], case.heads.value_dim) and out.dtype == case.dtype and out.isfinite().all()
    atol = TOLERANCE[case.dtype]
    torch.testing.assert_close(out[:count].cpu().double(), wanted, rtol=0, atol=atol)
    assert lse is not None
    torch.testing.assert_close(lse[:count].cpu().double(), wanted_lse, rtol=1e-6, atol=atol)
    return out


def family(prefix: int, lengths: list[int], parent: int) -> list[Row]:
    """Samples of one prompt; the first of them stands at row ``parent``."""
    return [Row(lengths[0]), *(Row(n, parent=parent, shared=prefix) for n in lengths[1:])]


def units(case: Paged, plan: Any) -> list[tuple[int, int, int]]:
    """(first row, rows, keys shared) of each unit."""
    buffers = plan.lanes[0].buffers
    rows = buffers.unit_rows.tolist()[: case.size]
    return [(first, n, buffers.prefix[first].item()) for first, n in enumerate(rows) if n]
