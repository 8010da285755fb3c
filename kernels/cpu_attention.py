"""Paged attention on a CPU: what rows have in common is read once.

Decode rows whose block tables begin alike (samples of one prompt, hits of one cached prefix) attend to the shared blocks
together, their queries side by side, and each to the rest of its keys alone. The two parts are merged by their
log-sum-exp, as in "Hydragen" (Juravsky et al., 2024). Whatever does not fit goes the way of the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from stoker.kernels.reference import attention as reference
from stoker.kernels.reference.attention import AttentionPlan, Visibility

_LEAST_SAVED = 0.2  # of all keys: below it, two calls and a merge cost more than they save
_MOST_PADDING = 1.5  # groups are padded to the largest; beyond this much they are not worth it
_LEAST_BYTES = 4 * 2**20  # of a layer's keys and values: below it they are read so fast that finding groups costs more
_PLAIN = Visibility()
_attend_with_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class _Shared:
    """G groups of up to N rows with P shared blocks at most, and S blocks of each of the R rows' own."""

    members: Tensor  # int64 [G * N], rows of each group, padded with its first
    place: Tensor  # int64 [R], where a row stands in ``members``
    prefix_table: Tensor  # int64 [G * P]
    prefix_bias: Tensor  # fp32 [G, 1, 1, P * block]
    suffix_table: Tensor  # int64 [R * S]
    start: Tensor  # int64 [R], position of a row's first own key
    written: int  # own keys that every real row has, whatever the step
    groups: int


@dataclass(frozen=True, slots=True)
class CpuPlan:
    plain: AttentionPlan
    shared: _Shared | None

    def next_step(self) -> None:
        self.plain.next_step()


def plan_attention(
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    block_size: int,
    token_bytes: int,
    num_steps: int = 1,
    deterministic: bool = False,
) -> CpuPlan:
    """As the reference's, and with the rows' common beginnings found out, unless ``deterministic``."""
    plain = reference.plan_attention(
        query_lens,
        key_lens,
        block_tables,
        seq_lens,
        block_size=block_size,
        token_bytes=token_bytes,
        num_steps=num_steps,
        deterministic=deterministic,
    )
    decode = all(n == 1 for n in query_lens) and sum(key_lens) * token_bytes >= _LEAST_BYTES and not deterministic
    return CpuPlan(plain, _find_shared(key_lens, block_tables, block_size, num_steps) if decode else None)


def _find_shared(key_lens: Sequence[int], block_tables: Tensor, block_size: int, num_steps: int) -> _Shared | None:
    tables = block_tables.tolist()
    by_first: dict[int, list[int]] = {}
    for row in range(len(key_lens)):
        by_first.setdefault(tables[row][0], []).append(row)
    groups = list(by_first.values())
    largest = max(map(len, groups))
    if largest == 1 or len(groups) * largest > _MOST_PADDING * len(key_lens):
        return None

    lengths = []  # shared blocks of each group; every row keeps a key of its own
    for rows in groups:
        full = min((key_lens[row] - 1) // block_size for row in rows)
        columns = zip(*(tables[row][:full] for row in rows), strict=True)
        lengths.append(sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, columns)))
    widest = max(n for rows, n in zip(groups, lengths, strict=True) if len(rows) > 1)
    lengths = [min(n, widest) for n in lengths]
    saved = sum((len(rows) - 1) * n for rows, n in zip(groups, lengths, strict=True)) * block_size
    if min(lengths) == 0 or saved < _LEAST_SAVED * sum(key_lens):
        return None

    own = [0] * len(tables)  # padded rows have nothing in common with anyone
    place = [0] * len(tables)
    for number, (rows, blocks) in enumerate(zip(groups, lengths, strict=True)):
        for index, row in enumerate(rows):
            own[row], place[row] = blocks, number * largest + index
    start = torch.tensor(own)
    most = max(-(-(n + num_steps - 1) // block_size) - own[row] for row, n in enumerate(key_lens))
    at = (start[:, None] + torch.arange(most)).clamp(max=block_tables.shape[1] - 1)
    # Padded with a block that is written, for unwritten keys may be NaN.
    firsts = [tables[rows[0]] for rows in groups]
    prefix = [table[:n] + table[:1] * (widest - n) for table, n in zip(firsts, lengths, strict=True)]
    beyond = torch.arange(widest * block_size) >= torch.tensor(lengths)[:, None] * block_size
    return _Shared(
        members=torch.tensor([row for rows in groups for row in rows + rows[:1] * (largest - len(rows))]),
        place=torch.tensor(place),
        prefix_table=torch.tensor(prefix).flatten(),
        prefix_bias=torch.zeros(beyond.shape).masked_fill_(beyond, reference.NEG_INF)[:, None, None],
        suffix_table=block_tables.gather(1, at).flatten(),
        start=start * block_size,
        written=min(n - own[row] * block_size for row, n in enumerate(key_lens)),
        groups=len(groups),
    )


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: CpuPlan,
    *,
    scale: float,
    visibility: Visibility,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As the reference's: query [T, Hq, Dk], caches [N, block, Hkv, D]; returns [T, Hq, Dv]."""
    shared = plan.shared
    ordinary = visibility == _PLAIN and softcap is None and sinks is None
    if shared is None or not ordinary or key_cache.shape[-1] != value_cache.shape[-1]:
        return reference.paged_attention(
            query, key_cache, value_cache, plan.plain, scale=scale, visibility=visibility, softcap=softcap, sinks=sinks
        )
    rows, heads, dim = query.shape
    kv_heads = key_cache.shape[2]
    per_key = heads // kv_heads  # heads that share a key are its queries, and so are the rows of a group
    prefix_key, prefix_value, key, value = _keys(plan, shared, key_cache, value_cache)

    together = query.index_select(0, shared.members).view(shared.groups, -1, kv_heads, per_key, dim)
    size = together.shape[1]
    together = together.transpose(1, 2).reshape(shared.groups, kv_heads, size * per_key, dim)
    bias = plan.plain.once(("prefix", query.dtype), lambda: shared.prefix_bias.to(query.dtype))
    prefix_out, prefix_lse = _attend_with_lse(together, prefix_key, prefix_value, attn_mask=bias, scale=scale)
    prefix_out = prefix_out.reshape(shared.groups, kv_heads, size, per_key, dim).transpose(1, 2)
    prefix_lse = prefix_lse.reshape(shared.groups, kv_heads, size, per_key).transpose(1, 2)

    alone = query.view(rows, kv_heads, per_key, dim)
    bias = plan.plain.once(
        ("suffix", query.dtype),
        lambda: torch.zeros(rows, 1, 1, key.shape[2], dtype=query.dtype).masked_fill_(
            _unwritten(plan, shared, key.shape[2])[:, None, None], reference.NEG_INF
        ),
    )
    out, lse = _attend_with_lse(alone, key, value, attn_mask=bias, scale=scale)
    weight = torch.sigmoid(prefix_lse.flatten(0, 1).index_select(0, shared.place) - lse)[..., None].to(out.dtype)
    merged: Tensor = torch.lerp(out, prefix_out.flatten(0, 1).index_select(0, shared.place), weight)
    return merged.reshape(rows, heads, dim)


def _unwritten(plan: CpuPlan, shared: _Shared, length: int) -> Tensor:
    """True where a row's own part has no key, bool [R, L]. A row that is over keeps one, or its softmax had none."""
    last = (plan.plain.seq_lens - 1 - shared.start).clamp(min=0)
    return torch.arange(length) > last[:, None]


def _keys(plan: CpuPlan, shared: _Shared, key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, ...]:
    """Shared keys and values [G, H, P, D], and the rows' own [R, H, S, D]; zeros where a row has none."""
    rows, block_size = len(shared.start), key_cache.shape[1]
    length = shared.suffix_table.shape[0] // rows * block_size
    caches, which = (key_cache, value_cache), ("own", key_cache.data_ptr())

    def newest() -> tuple[Tensor, Tensor]:
        last = (plan.plain.seq_lens - 1 - shared.start).clamp(min=0)[:, None]
        slots = shared.suffix_table.view(rows, -1).gather(1, last // block_size) * block_size + last % block_size
        return slots[:, 0], torch.arange(rows) * length + last[:, 0]

    if which in plan.plain.held:
        prefix_key, prefix_value, key, value = plan.plain.held[which]
        slots, at = plan.plain.once("newest", newest)
        for cache, kept in ((key_cache, key), (value_cache, value)):
            kept.flatten(0, 1).index_copy_(0, at, cache.flatten(0, 1).index_select(0, slots))
    else:
        # What no one has written may be NaN. The null block, all that padded rows read, never is.
        empty = plan.plain.once(
            "unwritten", lambda: _unwritten(plan, shared, length)[:, shared.written :, None, None].contiguous()
        )
        prefix_key, prefix_value = (
            c.index_select(0, shared.prefix_table).view(shared.groups, -1, *c.shape[2:]) for c in caches
        )
        key, value = (c.index_select(0, shared.suffix_table).view(rows, length, *c.shape[2:]) for c in caches)
        for gathered in (key, value):
            gathered[:, shared.written :].masked_fill_(empty, 0.0)
        plan.plain.keep(which, (prefix_key, prefix_value, key, value))
    return tuple(t.transpose(1, 2) for t in (prefix_key, prefix_value, key, value))
