"""Attention over a paged KV cache, as plain torch: the oracle of the GPU kernels, and what a CPU falls back to.

Keys and values live in blocks, ``[num_blocks, block_size, heads, dim]``. ``attention_plan.py`` decides once a step which of
them are read. Here each layer writes its keys and values, and attends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.reference.attention_plan import (
    PLAIN,
    Attend,
    AttentionPlan,
    Chunk,
    Decode,
    Visibility,
    attend,
)
from stoker.kernels.reference.fp8 import FP8, FP8_MAX
from stoker.kernels.reference.norm_rotary import QKNorm, latent_heads, qk_norm_rotary

NEG_INF = float("-inf")


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Store each token's key and value. key: [T, H, Dk]; value: [T, H, Dv]; slots: int64 [T], block * size + offset.

    In an fp8 cache, numbers beyond fp8's largest become that.
    """
    for new, cache in ((key, key_cache), (value, value_cache)):
        movable(cache).flatten(0, 1).index_copy_(0, slots, movable(kept(new, cache.dtype)))


def kept(new: Tensor, dtype: torch.dtype) -> Tensor:
    """New keys or values as a cache of that dtype keeps them."""
    return new.clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype == FP8 else new


def movable(cache: Tensor) -> Tensor:
    """The cache in a dtype that torch's operations move rows of: not all of them know fp8."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def qk_norm_rotary_write(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    norm: QKNorm | None,
    cos_sin: tuple[Tensor, Tensor] | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    interleaved: bool = False,
    factor: Tensor | None = None,
    grouped: bool = False,
) -> Tensor:
    """From projected heads to the query, [T, heads, D], and to keys and values in the cache.

    ``qk_norm_rotary`` and ``write_kv`` in one; arguments as theirs. Without key heads nothing is written. Everything but
    ``qkv`` must have been there before the last kernel was launched, as kernels read it early.
    """
    query, key, value = qk_norm_rotary(qkv, heads, kv_heads, norm, cos_sin, interleaved, factor, grouped)
    if kv_heads:
        write_kv(key, value, key_cache, value_cache, slots)
    return query


def latent_heads_write(
    query: Tensor,
    key_value: Tensor,
    key_rotary: Tensor,
    cos_sin: tuple[Tensor, Tensor] | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    interleaved: bool = False,
    factor: Tensor | None = None,
) -> Tensor:
    """``latent_heads`` and ``write_kv`` in one; arguments as theirs. Returns the query, [T, H, N + R].

    Angles, factors and slots must have been there before the last kernel was launched, as kernels read them early.
    """
    query, key, value = latent_heads(query, key_value, key_rotary, cos_sin, interleaved, factor)
    write_kv(key, value, key_cache, value_cache, slots)
    return query


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    visibility: Visibility,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of each query over its row's keys.

    query: [T, Hq, Dk]; key_cache: [N, block, Hkv, Dk]; value_cache: [N, block, Hkv, Dv], both of the query's dtype or fp8;
    Hq a multiple of Hkv.
    softcap: ``cap * tanh(scores / cap)`` (Gemma 2). sinks: [Hq], a logit that takes probability and gives no value
    (gpt-oss). Returns [T, Hq, Dv], for padded tokens something finite.
    """
    heads, kv_heads = query.shape[1], key_cache.shape[2]
    group = heads // kv_heads

    def decoded(number: int, d: Decode) -> Tensor:
        key, value = plan.gather(plan, number, visibility, key_cache, value_cache, query.dtype)
        rows, length = key.shape[0], key.shape[2]
        q = query if d.rows is None else query.index_select(0, d.rows)
        q = q.reshape(rows, kv_heads, group, -1)  # the heads that share a key are the queries

        def decode_bias() -> Tensor:
            start = d.seen(visibility)[1]
            keys = start + torch.arange(length, device=query.device)
            hidden = visibility.hidden(start + plan.last_seen(number, visibility), keys)
            return _as_bias(hidden, query.dtype)[:, None, None]

        bias = plan.once((number, visibility, query.dtype), decode_bias)
        sink = None if sinks is None else sinks.view(1, kv_heads, group, 1)
        return _attend(q, key, value, bias, scale, softcap, sink, plan.attend).reshape(rows, heads, -1)

    if plan.decodes and plan.decodes[0].rows is None:  # it is the only piece of the plan
        return decoded(0, plan.decodes[0])
    out = query.new_zeros(query.shape[0], heads, value_cache.shape[-1])
    for number, d in enumerate(plan.decodes):
        assert d.rows is not None
        out.index_copy_(0, d.rows, decoded(number, d))
    for number, c in enumerate(plan.chunks):
        first = visibility.first(c.position) // plan.block_size
        table, begin = c.tables.of(visibility)[first:], first * plan.block_size
        key, value = (
            cache.index_select(0, table).flatten(0, 1)[: c.length - begin].to(query.dtype).transpose(0, 1)[None]
            for cache in (key_cache, value_cache)
        )
        tokens = slice(c.start, c.start + c.num_queries)
        q = query[tokens].transpose(0, 1)[None]

        def chunk_bias(c: Chunk = c, begin: int = begin) -> Tensor | None:
            plain = visibility == PLAIN and softcap is None and sinks is None
            whole = c.whole and not (plan.local_spans and visibility.window is None)
            if c.length == c.num_queries and plain and not whole:
                return None  # plain causal: no mask to hold
            if not c.whole and visibility.chunk is None:
                return _piece_bias(plan, c, visibility, c.position - begin, query)
            at = torch.arange(begin, c.length, device=query.device)
            queries = torch.arange(c.position, c.position + c.num_queries, device=query.device)[:, None]
            newest = at[-1:].expand_as(queries) if whole else None
            return _as_bias(visibility.hidden(queries, at, newest), query.dtype)

        mask = plan.once(("chunk", number, visibility, softcap is None and sinks is None, query.dtype), chunk_bias)
        if group > 1:
            key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
        sink = None if sinks is None else sinks.view(1, heads, 1, 1)
        out[tokens] = _attend(q, key, value, mask, scale, softcap, sink)[0].transpose(0, 1)
    return out


def _piece_bias(plan: AttentionPlan, c: Chunk, visibility: Visibility, before: int, query: Tensor) -> Tensor:
    """The bias of a chunk with ``before`` keys before its first query's own, [queries, keys].

    What a query sees depends on how far away a key is, so all pieces of a row share one bias, of which this is a view.
    One for each piece of a long prompt would take the memory of all its queries times all its keys.
    """
    room = c.last if visibility.window is None else min(c.last, visibility.window + plan.block_size)

    def make() -> Tensor:
        queries = torch.arange(room, room + c.most, device=query.device)[:, None]
        return _as_bias(visibility.hidden(queries, torch.arange(room + c.most, device=query.device)), query.dtype)

    bias = plan.once(("pieces", visibility, room, c.most, query.dtype), make)
    return bias[: c.num_queries, room - before : room + c.num_queries]


def _as_bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, NEG_INF)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    plain: Attend = attend,
) -> Tensor:
    """Attention with softcap or sinks; where there is neither, ``plain`` does it."""
    if softcap is None and sinks is None:
        return plain(query, key, value, bias, scale)
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1)
    probs = scores.softmax(-1)
    return probs[..., : key.shape[-2]].to(value.dtype) @ value
