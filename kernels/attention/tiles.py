"""What the attention kernels do with a tile of queries: load it, attend to a tile of keys, merge, store.

Exponentials are of base two: ``log2(e)`` is in the scale. A key whose dimension is no power of two is multiplied in two
pieces (80 as 64 and 16), which needs little padding; values are padded.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.fp8 import as_dtype

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(
    base,
    offsets,
    real,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Columns START to START + WIDTH of rows at ``base + offsets``; zeros beyond DIM and, if MASKED, in unreal rows."""
    d = START + tl.arange(0, WIDTH)
    pointers = base + offsets[:, None] + d[None, :]
    if START + WIDTH > DIM:
        if MASKED:
            rows = tl.load(pointers, mask=real[:, None] & (d < DIM)[None, :], other=0.0)
        else:
            rows = tl.load(pointers, mask=(d < DIM)[None, :], other=0.0)
    elif MASKED:
        rows = tl.load(pointers, mask=real[:, None], other=0.0)
    else:
        rows = tl.load(pointers)
    return rows


@triton.jit
def load_query(query, offsets, real, D1: tl.constexpr, D2: tl.constexpr, KEY_DIM: tl.constexpr):
    first = load_rows(query, offsets, real, 0, D1, KEY_DIM, True)
    second = first
    if D2 > 0:
        second = load_rows(query, offsets, real, D1, D2, KEY_DIM, True)
    return first, second


@triton.jit
def _wide(number):
    """A number that is not negative, in 64 bits. Where the compiler sees that two have 32, their product is one instruction."""
    if number.dtype == tl.int32:
        number = number.to(tl.uint32)
    return number.to(tl.int64)


@triton.jit
def attend_tile(
    top,
    total,
    acc,
    query1,
    query2,
    newest,
    oldest,
    keys,
    values,
    table,
    page,
    within,
    at,
    real,
    scale,
    softcap,
    key_block,
    key_token,
    value_block,
    value_token,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SAME_PLACES: tl.constexpr,
    VALUE_IS_KEY: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Online softmax of a tile of queries over a tile of one row's keys.

    top, total: fp32 [M], largest score and sum of exponentials so far; acc: fp32 [M, DV]; newest, oldest: [M], positions
    of the last and first key a query sees (used where CAUSAL); keys, values: the key head's, in block 0; table: the row's;
    page, within: [N], each key's place in the table, and in the block that stands there; at: [N], the keys' positions.
    MASKED: some are not real. Those are not loaded, for what nobody wrote may be NaN. SAME_PLACES: both caches have the same
    strides.
    """
    if MASKED:
        block = tl.load(table + page, mask=real, other=0)
    else:
        block = tl.load(table + page)
    block = _wide(block.to(tl.int32))
    offsets = block * _wide(key_block) + within * key_token
    key = as_dtype(load_rows(keys, offsets, real, 0, D1, KEY_DIM, MASKED), query1.dtype)
    scores = tl.dot(query1, tl.trans(key), input_precision=PRECISION)
    if D2 > 0:
        rest = as_dtype(load_rows(keys, offsets, real, D1, D2, KEY_DIM, MASKED), query1.dtype)
        scores = tl.dot(query2, tl.trans(rest), scores, input_precision=PRECISION)
    scores = scores * scale
    if SOFTCAP:  # the scale makes tanh of an exponential, that may be infinite
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    if CAUSAL:
        seen = (at[None, :] <= newest[:, None]) & (at[None, :] >= oldest[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    elif MASKED:
        scores = tl.where(real[None, :], scores, float("-inf"))
    above = tl.maximum(top, tl.max(scores, 1))
    finite = tl.where(above == float("-inf"), 0.0, above)  # a query may see none of these keys
    weights = tl.exp2(scores - finite[:, None])
    decay = tl.exp2(top - finite)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    if VALUE_IS_KEY:
        value = key
    else:
        if not SAME_PLACES:
            offsets = block * _wide(value_block) + within * value_token
        value = as_dtype(load_rows(values, offsets, real, 0, DV, VALUE_DIM, MASKED), query1.dtype)
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=PRECISION)
    return above, total, acc


@triton.jit
def fold(top, total, acc, next_top, next_total, next_acc):
    """What two pieces of a row come to, the sum so far first. Each rounding is said, so that it has the same bits everywhere."""
    above = tl.maximum(top, next_top)
    finite = tl.where(above == float("-inf"), 0.0, above)
    decay = tl.exp2(top - finite)
    weight = tl.exp2(next_top - finite)
    total = tl.fma(next_total, weight, total * decay)
    weights = tl.broadcast_to(weight[:, None], acc.shape)
    return above, total, tl.fma(next_acc, weights, acc * decay[:, None])


@triton.jit
def store_partial(
    partial,
    partial_stats,
    places,
    real,
    top,
    total,
    acc,
    VALUE_DIM: tl.constexpr,
    DV: tl.constexpr,
):
    """Leave a piece for the merge. places: [M], whose ``partial`` and ``partial_stats`` it is."""
    d = tl.arange(0, DV)
    tl.store(partial + places[:, None] * VALUE_DIM + d[None, :], acc, mask=real[:, None] & (d < VALUE_DIM)[None, :])
    tl.store(partial_stats + 2 * places, top, mask=real)
    tl.store(partial_stats + 2 * places + 1, total, mask=real)


@triton.jit
def store_output(
    out,
    lse,
    sinks,
    token,
    head,
    real,
    top,
    total,
    acc,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DV: tl.constexpr,
    SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """token, head: [M]. The log-sum-exp is that of the scores alone, without the sink. No key gives zeros."""
    at = token.to(tl.int64) * HEADS + head
    if WITH_LSE:
        tl.store(lse + at, (top + tl.log2(tl.where(total > 0, total, 1.0))) * _LN2, mask=real)
    if SINKS:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * _LOG2E
        above = tl.maximum(top, sink)
        decay = tl.exp2(top - above)
        total = total * decay + tl.exp2(sink - above)
        acc = acc * decay[:, None]
    d = tl.arange(0, DV)
    scaled = acc / tl.where(total > 0, total, 1.0)[:, None]
    mask = real[:, None] & (d < VALUE_DIM)[None, :]
    tl.store(out + at[:, None] * VALUE_DIM + d[None, :], scaled.to(out.dtype.element_ty), mask=mask)


@triton.jit
def merge(
    partial,
    partial_stats,
    head,
    real,
    parts,
    jump_at,
    jump,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """A row's pieces one after the other, BLOCK_P of them on their way at a time. Past L1: other programs wrote them.

    jump_at, jump: after so many pieces, so many places of those that were folded into the one before.
    """
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, DV], tl.float32)
    d = tl.arange(0, DV)
    for start in range(0, parts, BLOCK_P):
        for i in tl.static_range(BLOCK_P):
            number = start + i
            place = (number + tl.where(number >= jump_at, jump, 0)) * HEADS + head
            mask = real & (head * 0 + number < parts)  # one that is not there changes no bit
            values = tl.load(
                partial + place[:, None] * VALUE_DIM + d[None, :],
                mask=mask[:, None] & (d < VALUE_DIM)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            next_top = tl.load(partial_stats + 2 * place, mask=mask, other=float("-inf"), cache_modifier=".cg")
            next_total = tl.load(partial_stats + 2 * place + 1, mask=mask, other=1.0, cache_modifier=".cg")
            top, total, acc = fold(top, total, acc, next_top, next_total, values)
    return top, total, acc
