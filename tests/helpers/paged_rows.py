"""Sequences of random keys and values in a paged cache, and their attention in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton_oracle import unwatched

from stoker.kernels.ops import REFERENCE, Ops
from stoker.kernels.reference import attention_plan
from stoker.kernels.reference.attention import write_kv
from stoker.kernels.reference.attention_plan import Visibility

# For values of about one and scores of up to ten, each a few times rounded.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@unwatched
def naive(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    *,
    scale: float,
    visibility: Visibility,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    newest: int | None = None,
) -> Tensor:
    """One token. query: [Hq, Dk]; keys: [L, Hkv, Dk]; values: [L, Hkv, Dv]; returns float64 [Hq, Dv].

    newest: the last key it sees, if that is not its own.
    """
    heads = query.double().unflatten(0, (keys.shape[1], -1))  # [Hkv, group, Dk]
    seen = [
        p
        for p in range((position if newest is None else newest) + 1)
        if (visibility.window is None or position - p < visibility.window)
        and (visibility.chunk is None or position // visibility.chunk <= p // visibility.chunk)
    ]
    keys, values = (t[seen].double().transpose(0, 1) for t in (keys, values))  # [Hkv, seen, D]
    scores = (heads @ keys.mT).flatten(0, 1) * scale  # [Hq, seen]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.exp()
    total = weights.sum(1) + (0 if sinks is None else sinks.double().exp())
    return (weights.unflatten(0, heads.shape[:2]) @ values).flatten(0, 1) / total[:, None]


@dataclass(frozen=True)
class Shape:
    kv_heads: int = 2
    group: int = 2
    key_dim: int = 8
    value_dim: int = 8
    block_size: int = 4
    dtype: torch.dtype = torch.float32


class Rows:
    """Sequences of random keys and values, and a paged cache in which every slot that was not written holds NaN."""

    def __init__(self, shape: Shape, history: list[int], new: list[int], num_steps: int, padded_rows: int) -> None:
        self.shape, self.history, self.new, self.num_steps = shape, history, new, num_steps
        size = shape.block_size
        self.lengths = [h + n for h, n in zip(history, new, strict=True)]  # in the first step
        longest = [n + num_steps - 1 for n in self.lengths]
        blocks = [-(-n // size) for n in longest]
        rows, width = len(history) + padded_rows, max(blocks) + 1
        order = (torch.randperm(sum(blocks)) + 1).split(blocks)
        self.tables = torch.zeros(rows, width, dtype=torch.long)  # block 0 where a row has no block
        self.nobody = sum(blocks) + 1
        for row, ids in enumerate(order):
            self.tables[row, : len(ids)] = ids
        self.seq_lens = torch.tensor([*self.lengths, *[1] * padded_rows])
        self.keys = [torch.randn(n, shape.kv_heads, shape.key_dim, dtype=shape.dtype) for n in longest]
        self.values = [torch.randn(n, shape.kv_heads, shape.value_dim, dtype=shape.dtype) for n in longest]
        self.key_cache, self.value_cache = (
            torch.full((sum(blocks) + 2, size, shape.kv_heads, dim), float("nan"), dtype=shape.dtype)
            for dim in (shape.key_dim, shape.value_dim)
        )
        for row, n in enumerate(self.lengths):
            self.write(row, 0, n)

    def write(self, row: int, start: int, end: int) -> None:
        at = torch.arange(start, end)
        size = self.shape.block_size
        slots = self.tables[row, at // size] * size + at % size
        write_kv(self.keys[row][at], self.values[row][at], self.key_cache, self.value_cache, slots)

    def take_blocks_of(self, other: Rows) -> None:
        self.tables = other.tables
        for cache in (self.key_cache, self.value_cache):
            cache.fill_(float("nan"))
        for row, n in enumerate(self.lengths):
            self.write(row, 0, n)

    def plan_of_windows(self, visibility: Visibility, ops: Ops, **options: Any) -> Any:
        """For layers that see so much, in a table of their own, which names a block of NaN for what none sees any more;
        the other table names it for everything."""
        own = self.tables.clone()
        for row, history in enumerate(self.history):
            own[row, : visibility.first(history) // self.shape.block_size] = self.nobody
        return self.plan(ops=ops, tables=torch.full_like(own, self.nobody), window_tables=own, **options)

    def plan(
        self, gather_tokens: int = 8192, ops: Ops = REFERENCE, tables: Tensor | None = None, **options: Any
    ) -> Any:
        return ops.plan_attention(
            self.new,
            self.lengths,
            self.tables if tables is None else tables,
            self.seq_lens,
            block_size=self.shape.block_size,
            token_bytes=attention_plan._GATHER_BYTES // gather_tokens,
            num_steps=self.num_steps,
            **options,
        )

    def check(
        self,
        plan: Any,
        step: int,
        padded_tokens: int,
        ops: Ops = REFERENCE,
        spans: Sequence[tuple[int, int]] = (),
        **options: Any,
    ) -> Tensor:
        """Compare every query of a step; returns what the padded tokens got."""
        query = self.queries(padded_tokens)
        out, padding = self.attend(query, plan, ops, **options)
        wanted = self.wanted(query, step, spans, **options)
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=TOLERANCE[self.shape.dtype])
        return padding

    def queries(self, padded_tokens: int) -> Tensor:
        """As a model gives them: heads before tokens, seen the other way round."""
        return self.numbers(sum(self.new) + padded_tokens).transpose(0, 1)

    def numbers(self, tokens: int) -> Tensor:
        shape = self.shape
        return torch.randn(shape.kv_heads * shape.group, tokens, shape.key_dim, dtype=shape.dtype)

    def attend(self, query: Tensor, plan: Any, ops: Ops, **options: Any) -> tuple[Tensor, Tensor]:
        """What the tokens got, and the padded ones behind them."""
        out = ops.paged_attention(query, self.key_cache, self.value_cache, plan, **options)
        assert out.shape == (*query.shape[:2], self.shape.value_dim) and out.dtype == self.shape.dtype
        return out[: sum(self.new)], out[sum(self.new) :]

    def wanted(self, query: Tensor, step: int, spans: Sequence[tuple[int, int]] = (), **options: Any) -> Tensor:
        places = [
            (row, position)
            for row, (history, n) in enumerate(zip(self.history, self.new, strict=True))
            for position in range(history + step, history + step + n)
        ]
        newest = [p for _, p in places]
        for begin, end in spans:
            newest[begin:end] = newest[end - 1 : end] * (end - begin)
        return torch.stack(
            [
                naive(q, self.keys[r], self.values[r], p, newest=last, **options)
                for q, (r, p), last in zip(query, places, newest, strict=False)
            ]
        )


SINKS = torch.linspace(-1, 2, 8)
FEATURES: list[dict[str, Any]] = [
    {},
    {"visibility": Visibility(window=1)},
    {"visibility": Visibility(window=5)},
    {"visibility": Visibility(chunk=4)},
    {"visibility": Visibility(window=3, chunk=7)},
    {"softcap": 1.5},
    {"sinks": SINKS},
    {"sinks": SINKS, "visibility": Visibility(window=6)},
    {"sinks": SINKS, "softcap": 2.0, "visibility": Visibility(chunk=8)},
    {"scale": 1.0},
]


def options_of(feature: dict[str, Any], shape: Shape) -> dict[str, Any]:
    options = {"scale": shape.key_dim**-0.5, "visibility": Visibility()} | feature
    if "sinks" in options:
        options["sinks"] = options["sinks"][: shape.kv_heads * shape.group].to(shape.dtype)
    return options


SHAPES = [
    Shape(kv_heads=2, group=1, block_size=1),
    Shape(kv_heads=2, group=2, key_dim=12, value_dim=6, block_size=4),
    Shape(kv_heads=2, group=4, key_dim=6, value_dim=10, block_size=16),
    Shape(kv_heads=1, group=8, block_size=4),
]


def name(shape: Shape) -> str:
    return f"{shape.kv_heads}x{shape.group}-{shape.key_dim}-{shape.value_dim}-{shape.block_size}"


# (keys before this step, queries) of each row
LAYOUTS = {
    "decode": [(0, 1), (16, 1), (4, 1), (33, 1), (15, 1), (3, 1)],
    "one row": [(21, 1)],
    "prompts": [(0, 9), (0, 4), (0, 17)],
    "one prompt": [(0, 16)],
    "chunks": [(7, 5), (16, 9), (1, 2)],
    "mixed": [(9, 1), (0, 12), (30, 1), (5, 6), (0, 1), (12, 1), (16, 2)],
}
