"""Paged attention on a CPU: keys that several rows share are read once.

Decode rows whose block tables begin alike (samples of one prompt, hits of one cached prefix) attend to the shared blocks
together, their queries side by side, and each to the rest of its keys alone. The two parts are merged by their
log-sum-exp, as in "Hydragen" (Juravsky et al., 2024). All other rows are left to the reference.

The steps of a decode window gather the keys from their blocks once: the first step keeps them, laid out as the products
read them, and each later step adds its newest key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from stoker.kernels.host_memory import host_memory
from stoker.kernels.reference import attention, attention_plan
from stoker.kernels.reference.attention_plan import PLAIN, AttentionPlan, Visibility

_LEAST_SAVED = 0.2  # of all keys: below it, two calls and a merge cost more than they save
_MOST_PADDING = 1.5  # groups are padded to the largest; beyond this much they are not worth it
_LEAST_BYTES = 4 * 2**20  # of a layer's keys and values: below it they are read so fast that finding groups costs more
# Up to so much, for all layers together, is gathered once a decode window, and each step adds its keys. What is beyond it is
# gathered at each step.
_HOLD_BYTES = 2**30
# Torch's attention multiplies one small matrix after the other, at a microsecond or two each with several threads. Up to so many
# keys, products of all at once are faster. By whether there are several threads.
_FEW_KEYS = {False: 64, True: 256}
# The fewest matrices for which that pays. By whether they are more than vectors.
_LEAST_MATRICES = {False: 64, True: 8}
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class _Shared:
    """Shared and own blocks of R rows: G groups of up to N rows, which share up to P blocks; S own blocks of each row."""

    members: Tensor  # int64 [G * N], rows of each group, padded with its first
    place: Tensor  # int64 [R], where a row stands in ``members``
    prefix_table: Tensor  # int64 [G, P]
    prefix_bias: Tensor  # fp32 [G, 1, 1, P * block]
    suffix_table: Tensor  # int64 [R, S]
    start: Tensor  # int64 [R], position of a row's first own key
    groups: int


class _Room:
    """Memory that window after window gathers into: fresh pages from the system would cost more than the copies."""

    def __init__(self) -> None:
        self._bytes = host_memory(_HOLD_BYTES)  # a page nobody writes to takes no memory
        self._used = 0

    def clear(self) -> None:
        self._used = 0

    def take(self, sizes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor] | None:
        """Tensors that are not initialised; None where they do not all fit."""
        taken, used = [], self._used
        for size in sizes:
            start = -(-used // 64) * 64
            used = start + math.prod(size) * dtype.itemsize
            if used > len(self._bytes):
                return None
            taken.append(self._bytes[start:used].view(dtype).view(size))
        self._used = used
        return taken


@dataclass(slots=True)
class _Held:
    """Keys and values that a window has gathered, by part and layer; empty where there is no room for them."""

    room: _Room | None
    parts: dict[tuple[object, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    # Of the same, of keys and of values: the cache and what is held of it, both [heads of all places, D].
    flat: dict[tuple[object, int], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def gather(
        self,
        plan: AttentionPlan,
        number: int,
        visibility: Visibility,
        key_cache: Tensor,
        value_cache: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows of a piece of the reference's plan."""
        table, _ = plan.decodes[number].seen(visibility)
        last = plan.last_seen(number, visibility)
        return self.own(plan, (number, visibility), table, last, (key_cache, value_cache), dtype)

    def own(
        self,
        plan: AttentionPlan,
        part: object,
        table: Tensor,
        last: Tensor,
        caches: tuple[Tensor, Tensor],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of R rows, [R, H, L, D] each, with those of this step. Where a row has none, its first are repeated.

        table: int64 [R, L / block]; last: int64 [R, 1], where each row's newest key is.
        """
        size, heads = caches[0].shape[1:3]
        which = part, caches[0].data_ptr()
        held = self.parts.get(which)
        if held is None:
            written = partial(attention_plan.written_keys, last, table.shape[1] * size)
            return self.keys(plan, part, table, written, caches, dtype)
        rows, length = len(last), held[0].shape[2]
        newest = plan.once((part, "newest", heads), lambda: _places(table, last, size, heads))
        at = plan.once(
            (part, "at", heads),
            lambda: (torch.arange(rows * heads, device="cpu").view(rows, heads) * length + last).flatten(),
        )
        for cache, kept in self.flat[which]:
            kept.index_copy_(0, at, cache.index_select(0, newest).type_as(kept))
        return held

    def keys(
        self,
        plan: AttentionPlan,
        part: object,
        table: Tensor,
        positions: Callable[[], Tensor],
        caches: tuple[Tensor, Tensor],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """The keys and values at ``positions``, int64 [R, L], of R rows: [R, H, L, D] each. table: int64 [R, blocks]."""
        which = part, caches[0].data_ptr()
        if which in self.parts:
            return self.parts[which]
        rows, length = len(table), table.shape[1] * caches[0].shape[1]
        size, heads = caches[0].shape[1:3]
        places = plan.once((part, "places", heads), lambda: _places(table, positions(), size, heads))
        sizes = [(rows, heads, length, c.shape[3]) for c in caches]
        room = None if self.room is None else self.room.take(sizes, dtype)
        flat = [c.flatten(0, 2) for c in caches]
        if room is None:
            key, value = (c.index_select(0, places).to(dtype).view(n) for c, n in zip(flat, sizes, strict=True))
            return key, value
        self.flat[which] = [(c, out.flatten(0, 2)) for c, out in zip(flat, room, strict=True)]
        for cache, kept in self.flat[which]:
            if cache.dtype == dtype:
                torch.index_select(cache, 0, places, out=kept)
            else:
                kept.copy_(cache.index_select(0, places))
        self.parts[which] = room[0], room[1]
        return self.parts[which]


def _places(table: Tensor, positions: Tensor, block_size: int, heads: int) -> Tensor:
    """Where keys stand among the heads of all slots, int64 [R * H * L]. table: int64 [R, blocks]; positions: [R, L]."""
    slots = attention_plan.key_slots(table, positions, block_size)
    return (slots[:, None] * heads + torch.arange(heads, device="cpu")[:, None]).flatten()


def _in_products(query: Tensor, key: Tensor) -> bool:
    """Whether plain products are faster. Not in 16 bits, where they would round the scores."""
    rows, heads, queries, _ = query.shape
    enough = rows * heads >= _LEAST_MATRICES[queries > 1]
    return enough and query.dtype == torch.float32 and key.shape[2] <= _FEW_KEYS[torch.get_num_threads() > 1]


def _scores(query: Tensor, key: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Scores of queries and keys, [B * H, Q, L]. query: [B, H, Q, D]; key: [B, H, L, D]; bias: [B, 1, 1, L]."""
    rows, heads, queries, dim = query.shape
    bias = bias.expand(rows, heads, 1, -1).reshape(rows * heads, 1, -1)
    return torch.baddbmm(bias, query.reshape(-1, queries, dim), key.flatten(0, 1).mT, alpha=scale)


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    if bias is None or not _in_products(query, key):
        return attention_plan.attend(query, key, value, bias, scale)
    probs = _scores(query, key, bias, scale).softmax(-1)
    return torch.bmm(probs, value.flatten(0, 1)).view(*query.shape[:3], -1)


def _attend_with_lse(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention, and the log-sum-exp of each query's scores, [B, H, Q]."""
    if not _in_products(query, key):
        out, lse = _flash_attention(query, key, value, attn_mask=bias, scale=scale)
        return out, lse
    scores = _scores(query, key, bias, scale)
    largest = scores.amax(-1, keepdim=True)
    total = scores.sub_(largest).exp_().sum(-1, keepdim=True)
    out = torch.bmm(scores, value.flatten(0, 1)).div_(total)
    return out.view(*query.shape[:3], -1), total.log_().add_(largest).view(query.shape[:3])


@dataclass(frozen=True, slots=True)
class CpuPlan:
    plain: AttentionPlan
    shared: _Shared | None
    held: _Held

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
    shared: bool = True,
    deterministic: bool = False,
    spans: Sequence[tuple[int, int]] = (),
    local_spans: bool = False,
    workspace: dict[str, Any] | None = None,
    window_tables: Tensor | None = None,
) -> CpuPlan:
    """As the reference's, but finds the rows' common beginnings, unless ``deterministic`` or not ``shared``.

    workspace: the next plan with the same one reuses this one's memory, of up to 1 GiB.
    """
    plain = attention_plan.plan_attention(
        query_lens,
        key_lens,
        block_tables,
        seq_lens,
        block_size=block_size,
        token_bytes=token_bytes,
        num_steps=num_steps,
        deterministic=deterministic,
        spans=spans,
        local_spans=local_spans,
        window_tables=window_tables,
    )
    room: _Room | None = None
    if num_steps > 1:
        workspace = {} if workspace is None else workspace
        if "room" not in workspace:
            workspace["room"] = _Room()
        room = workspace["room"]
        room.clear()
    held = _Held(room)
    decode = all(n == 1 for n in query_lens) and sum(key_lens) * token_bytes >= _LEAST_BYTES
    looked_for = decode and shared and not deterministic
    found = _find_shared(key_lens, block_tables, block_size, num_steps) if looked_for else None
    return CpuPlan(replace(plain, gather=held.gather, attend=_attend), found, held)


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
    start = torch.tensor(own, device="cpu")
    most = max(-(-(n + num_steps - 1) // block_size) - own[row] for row, n in enumerate(key_lens))
    at = (start[:, None] + torch.arange(most, device="cpu")).clamp(max=block_tables.shape[1] - 1)
    # Padded with a block that is written, for unwritten keys may be NaN.
    firsts = [tables[rows[0]] for rows in groups]
    prefix = [table[:n] + table[:1] * (widest - n) for table, n in zip(firsts, lengths, strict=True)]
    beyond = (
        torch.arange(widest * block_size, device="cpu") >= torch.tensor(lengths, device="cpu")[:, None] * block_size
    )
    return _Shared(
        members=torch.tensor([row for rows in groups for row in rows + rows[:1] * (largest - len(rows))], device="cpu"),
        place=torch.tensor(place, device="cpu"),
        prefix_table=torch.tensor(prefix, device="cpu"),
        prefix_bias=torch.zeros(beyond.shape, device="cpu").masked_fill_(beyond, attention.NEG_INF)[:, None, None],
        suffix_table=block_tables.gather(1, at),
        start=start * block_size,
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
    ordinary = visibility == PLAIN and softcap is None and sinks is None
    if shared is None or not ordinary or key_cache.shape[-1] != value_cache.shape[-1]:
        return attention.paged_attention(
            query, key_cache, value_cache, plan.plain, scale=scale, visibility=visibility, softcap=softcap, sinks=sinks
        )
    rows, heads, dim = query.shape
    kv_heads = key_cache.shape[2]
    per_key = heads // kv_heads  # heads that share a key are its queries, and so are the rows of a group
    caches = key_cache, value_cache
    last = plan.plain.once("last", lambda: (plan.plain.seq_lens - 1 - shared.start).clamp(min=0)[:, None])
    prefix = shared.prefix_table
    length = prefix.shape[1] * key_cache.shape[1]
    prefix_key, prefix_value = plan.held.keys(
        plan.plain,
        "prefix",
        prefix,
        lambda: torch.arange(length, device="cpu").expand(len(prefix), -1),
        caches,
        query.dtype,
    )
    key, value = plan.held.own(plan.plain, "suffix", shared.suffix_table, last, caches, query.dtype)

    together = query.index_select(0, shared.members).view(shared.groups, -1, kv_heads, per_key, dim)
    size = together.shape[1]
    together = together.transpose(1, 2).reshape(shared.groups, kv_heads, size * per_key, dim)
    bias = plan.plain.once(("prefix", query.dtype), lambda: shared.prefix_bias.to(query.dtype))
    prefix_out, prefix_lse = _flash_attention(together, prefix_key, prefix_value, attn_mask=bias, scale=scale)
    prefix_out = prefix_out.reshape(shared.groups, kv_heads, size, per_key, dim).transpose(1, 2)
    prefix_lse = prefix_lse.reshape(shared.groups, kv_heads, size, per_key).transpose(1, 2)

    alone = query.view(rows, kv_heads, per_key, dim)
    bias = plan.plain.once(
        ("suffix", query.dtype),
        lambda: torch.zeros(rows, 1, 1, key.shape[2], dtype=query.dtype, device="cpu").masked_fill_(
            (torch.arange(key.shape[2], device="cpu") > last)[:, None, None], attention.NEG_INF
        ),
    )
    out, lse = _attend_with_lse(alone, key, value, bias, scale)
    weight = torch.sigmoid(prefix_lse.flatten(0, 1).index_select(0, shared.place) - lse)[..., None].to(out.dtype)
    merged: Tensor = torch.lerp(out, prefix_out.flatten(0, 1).index_select(0, shared.place), weight)
    return merged.reshape(rows, heads, dim)
