"""Prompts through the gated delta rule and Mamba-2's scan, 64 tokens at a time, on tensor cores.

What a chunk's tokens change is the solution of a triangular system that does not depend on the state: the UT transform of
"Parallelizing Linear Transformers with the Delta Rule" (Yang et al., 2024). The systems of all chunks are inverted at once,
row by row. (Powers of the system would need fewer steps, but grow beyond fp32 where keys are alike.) Then programs walk the
chunks of a sequence with a tile of its state in registers. Mamba-2 (Dao and Gu, 2024) is the same walk without a system.

Queries and keys are multiplied as they come, in 16 bits, and scaled to length 1 afterwards. An fp32 operand is multiplied
in two parts, the second of which is the rounding error of the first: nearly as exact, with fewer registers than tf32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.launch import await_turn
from stoker.kernels.recurrent.causal_conv import sequence_of_tile
from stoker.kernels.reference.recurrent import NORM_EPS, StateRows

CHUNK = 64
MOST_WALKED = 16  # tokens of a sequence that goes token after token, expected, not measured, to take what a chunk does
_ROWS = ["slots_ptr", "starts_ptr"]  # where they lie follows from the number of rows


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """The sizes of a walk through chunks: tokens of a chunk, and columns of a state for each program."""

    tokens: int
    values: int
    num_warps: int
    num_stages: int


def launch_config(key_dim: int, value_dim: int, dtype: torch.dtype) -> LaunchConfig:
    """Four programs for each head of Qwen3-Next, whose next chunk is in flight; no more fit without spilling.

    fp16 takes registers to bring numbers into its range, so its programs have half as many columns.
    """
    most = 16 if dtype == torch.float16 else 32
    values = max(min(triton.next_power_of_2(value_dim), most), 16)
    return LaunchConfig(CHUNK, values, 8 if key_dim > 128 else 4, 2)


def can_chunk(key_dim: int, dtype: torch.dtype, *, rule: bool) -> bool:
    """Whether prompts go by chunks. fp32 has no tensor cores that keep its precision, and larger heads do not fit."""
    return key_dim <= (128 if rule else 256) and dtype in (torch.bfloat16, torch.float16)


def workspace_bytes(tokens: int, heads: int, key_dim: int, dtype: torch.dtype, *, rule: bool) -> int:
    """The most memory that a layer's prompts take while they run, besides results. rule: of the gated delta rule."""
    if not can_chunk(key_dim, dtype, rule=rule):
        return 0
    return tokens * heads * ((2 if rule else 1) * 2 * CHUNK * dtype.itemsize + 4 * 4)


@triton.jit
def step_length(dt, bias, least, most, dtype: tl.constexpr, BIAS: tl.constexpr):
    """Mamba-2's step, in fp32, from ``dt`` in fp32: rounded to ``dtype`` where the reference's is."""
    if BIAS:
        dt = (dt + bias).to(dtype).to(tl.float32)
    step = tl.clamp(softplus(dt).to(dtype).to(tl.float32), least, most, propagate_nan=tl.PropagateNan.ALL)
    return step.to(dtype).to(tl.float32)


@triton.jit
def decay_rate(ptr, A_LOG: tl.constexpr):
    """Mamba-2's A, in fp32, which with ``A_LOG`` is given as the logarithm of ``-A``."""
    a = tl.load(ptr).to(tl.float32)
    return -tl.exp(a) if A_LOG else a


@triton.jit
def softplus(x):
    """log(1 + exp(x)) of fp32 to some ulp, and x beyond 20, as torch: log(1 + u) = 2 artanh(u / (2 + u)), by its series."""
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    square = s * s
    tail = 1.0 / 7 + square * (1.0 / 9 + square * (1.0 / 11 + square * (1.0 / 13 + square * (1.0 / 15))))
    series = 1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square * tail))
    return tl.where(x > 20.0, x, tl.maximum(x, 0.0) + 2.0 * s * series)


@triton.jit
def _load_tokens(ptr, token, own, stride, dims, is_dim):
    """[tokens, dims] of one head, 0 beyond the sequence's end."""
    return tl.load(ptr + token[:, None] * stride + dims[None, :], mask=own[:, None] & is_dim[None, :], other=0.0)


@triton.jit
def _inverse_length(x, EPS: tl.constexpr):
    """Of each token's vector; 1 without EPS."""
    wide = x.to(tl.float32)
    square = tl.sum(wide * wide, 1)
    return square * 0.0 + 1.0 if EPS is None else tl.rsqrt(square + EPS)


@triton.jit(do_not_specialize=["rows", "halvings", "tokens"], do_not_specialize_on_alignment=["starts_ptr"])
def _prepare_kernel(
    query_ptr, key_ptr, decay_ptr, weight_ptr, bias_ptr, starts_ptr, seen_ptr, inverse_ptr, factors_ptr, query_token,
    query_head, key_token, key_head, decay_token, weight_token, scale, least, most, tokens, rows, halvings,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, EPS: tl.constexpr, RULE: tl.constexpr,
    A_LOG: tl.constexpr, BIAS: tl.constexpr, MOST_WALKED: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """All of a chunk that no state has a part in. RULE: weights are beta, and decays as they are; else weights are dt, and
    decays, [HEADS], those of a step of 1.

    seen, [T, HEADS, 2, TOKENS]: what a token's query finds of each token's change, in two parts; inverse: alike, a token's
    change by what each token's would be alone; factors, [4, T, HEADS]: see ``_chunks_kernel``.
    """
    await_turn(DEPENDENT)
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = sequence_of_tile(starts_ptr, rows, halvings, tile, TOKENS)
    first, last = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    begin = first + (tile - row - first // TOKENS) * TOKENS
    if (begin >= last) | (last - first <= MOST_WALKED):
        return
    dtype: tl.constexpr = seen_ptr.dtype.element_ty
    at, dims = tl.arange(0, TOKENS), tl.arange(0, KEYS)
    token = begin + at
    own = token < last
    key = _load_tokens(key_ptr + head // SHARED * key_head, token, own, key_token, dims, dims < KEY_DIM)
    query = _load_tokens(query_ptr + head // SHARED * query_head, token, own, query_token, dims, dims < KEY_DIM)
    weight = tl.load(weight_ptr + token * weight_token + head, mask=own, other=0.0).to(tl.float32)
    if RULE:
        decay = tl.load(decay_ptr + token * decay_token + head, mask=own, other=0.0)
    else:
        bias = tl.load(bias_ptr + head).to(weight_ptr.dtype.element_ty).to(tl.float32) if BIAS else 0.0
        step = step_length(weight, bias, least, most, weight_ptr.dtype.element_ty, BIAS)
        weight = tl.where(own, step, 0.0)
        decay = weight * decay_rate(decay_ptr + head, A_LOG)
    # In fp64, as those of neighbours would else lose in their difference what the sum has grown to.
    total, whole = tl.cumsum(decay.to(tl.float64), 0), tl.sum(decay.to(tl.float64), 0)
    query_scale, key_scale = _inverse_length(query, EPS) * scale, _inverse_length(key, EPS)
    before = tl.exp(total.to(tl.float32))
    factors_ptr += token * HEADS + head
    tl.store(factors_ptr, query_scale * before, mask=own)
    tl.store(factors_ptr + tokens * HEADS, key_scale * before if RULE else weight, mask=own)
    tl.store(factors_ptr + 2 * tokens * HEADS, key_scale * tl.exp((whole - total).to(tl.float32)), mask=own)
    tl.store(factors_ptr + 3 * tokens * HEADS, before, mask=own)

    part = ((token[:, None] * HEADS + head) * 2) * TOKENS + at[None, :]
    earlier = at[:, None] >= at[None, :]
    kept = tl.exp(tl.where(earlier, (total[:, None] - total[None, :]).to(tl.float32), 0.0))
    seen = tl.dot(query, tl.trans(key)) * query_scale[:, None] * key_scale[None, :] * kept
    _store_parts(seen_ptr + part, tl.where(earlier, seen, 0.0), own, TOKENS, dtype)
    if RULE:
        # Transposed, so that a row of the system is a column, along the rows of what is summed.
        later = at[:, None] < at[None, :]
        kept = tl.exp(tl.where(later, (total[None, :] - total[:, None]).to(tl.float32), 0.0))
        system = tl.dot(key, tl.trans(key)) * key_scale[:, None] * (key_scale * weight)[None, :] * kept
        system = tl.where(later, system, 0.0)
        inverse = tl.where(at[:, None] == at[None, :], 1.0, 0.0)
        for i in range(1, tl.minimum(last - begin, TOKENS).to(tl.int32)):
            of_row = tl.sum(tl.where(at[None, :] == i, system, 0.0), 1)
            less = tl.sum(of_row[:, None] * inverse, 0)
            inverse = tl.where(at[:, None] == i, inverse - less[None, :], inverse)
        _store_parts(inverse_ptr + part, inverse * weight[None, :], own, TOKENS, dtype)


@triton.jit
def _store_parts(ptr, x, own, TOKENS: tl.constexpr, dtype: tl.constexpr):
    high = x.to(dtype)
    tl.store(ptr, high, mask=own[:, None])
    tl.store(ptr + TOKENS, (x - high.to(tl.float32)).to(dtype), mask=own[:, None])


@triton.jit
def _times(high, low, x):
    """What is in two parts times fp32, but for what is left of both."""
    x, divisor = _within_range(x, high.dtype)
    rounded = x.to(high.dtype)
    return tl.dot(low, rounded, _product(high, x, rounded)) * divisor


@triton.jit
def _short_times(a, x):
    """a @ x of 16 bits and fp32, in fp32."""
    x, divisor = _within_range(x, a.dtype)
    return _product(a, x, x.to(a.dtype)) * divisor


@triton.jit
def _product(a, x, rounded):
    return tl.dot(a, (x - rounded.to(tl.float32)).to(a.dtype), tl.dot(a, rounded))


@triton.jit
def _within_range(x, dtype: tl.constexpr):
    """x divided so that ``dtype`` holds it, and by what: fp16 ends at 65504, beyond which states and steps may be."""
    divisor = 1.0
    if dtype == tl.float16:
        divisor = tl.maximum(tl.max(tl.abs(x)) * (1.0 / 32768), 1.0)
        x *= 1.0 / divisor
    return x, divisor


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=_ROWS)
def _chunks_kernel(
    query_ptr, key_ptr, value_ptr, seen_ptr, inverse_ptr, factors_ptr, skip_ptr, state_ptr, slots_ptr, starts_ptr,
    out_ptr, query_token, query_head, key_token, key_head, value_token, value_head, slot_stride, state_key,
    state_value, tokens, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    RULE: tl.constexpr, SKIP: tl.constexpr, MOST_WALKED: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, TILES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """From chunk to chunk of a sequence with a tile of a head's state. Mamba-2's query, key and value are C, B and x.

    factors: of a query that reads the state before the chunk; of a key that does, and for Mamba-2 the step; of a key that is
    written to the state after it; and of that state, up to each token. SKIP: whether so much of the value is added.
    """
    await_turn(DEPENDENT)
    program = tl.program_id(0)
    tile, head = program % TILES, program // TILES % HEADS
    row = (program // (TILES * HEADS)).to(tl.int64)
    first, last = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    if last - first <= MOST_WALKED:
        return
    at, keys, values = tl.arange(0, TOKENS), tl.arange(0, KEYS), tile * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    query_ptr += head // SHARED * query_head
    key_ptr += head // SHARED * key_head
    value_ptr += head * value_head
    factors_ptr += head
    within = is_key[:, None] & is_value[None, :]
    state_ptr += tl.load(slots_ptr + row) * slot_stride + head * (KEY_DIM * VALUE_DIM)
    state_ptr += keys[:, None] * state_key + values[None, :] * state_value
    state = tl.load(state_ptr, mask=within, other=0.0)
    for begin in range(first, last, TOKENS):
        token = begin + at
        own = token < last
        part = ((token[:, None] * HEADS + head) * 2) * TOKENS + at[None, :]
        of_token = factors_ptr + token * HEADS
        key = _load_tokens(key_ptr, token, own, key_token, keys, is_key)
        value = _load_tokens(value_ptr, token, own, value_token, values, is_value).to(tl.float32)
        of_key = tl.load(of_token + tokens * HEADS, mask=own, other=0.0)[:, None]
        if RULE:
            high = tl.load(inverse_ptr + part, mask=own[:, None], other=0.0)
            low = tl.load(inverse_ptr + part + TOKENS, mask=own[:, None], other=0.0)
            change = _times(high, low, value - _short_times(key, state) * of_key)
        else:
            change = of_key * value
        query = _load_tokens(query_ptr, token, own, query_token, keys, is_key)
        out = _short_times(query, state) * tl.load(of_token, mask=own, other=0.0)[:, None]
        high = tl.load(seen_ptr + part, mask=own[:, None], other=0.0)
        low = tl.load(seen_ptr + part + TOKENS, mask=own[:, None], other=0.0)
        out += _times(high, low, change)
        if SKIP:
            out += tl.load(skip_ptr + head).to(tl.float32) * value
        out_at = out_ptr + (token[:, None] * HEADS + head) * VALUE_DIM + values[None, :]
        tl.store(out_at, out, mask=own[:, None] & is_value[None, :])
        change *= tl.load(of_token + 2 * tokens * HEADS, mask=own, other=0.0)[:, None]
        state *= tl.load(factors_ptr + (3 * tokens + tl.minimum(begin + TOKENS, last) - 1) * HEADS)
        state += _short_times(tl.trans(key), change)
    tl.store(state_ptr, state, mask=within)


def rule_by_chunks(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, rows: StateRows, out: Tensor,
    *, normalise: bool,
) -> None:  # fmt: skip
    """``gated_delta_rule`` of the sequences of more than MOST_WALKED tokens, into ``out``."""
    _by_chunks(
        query, key, value, state, rows, out, decay=decay, weight=beta, bias=None, limit=(0.0, 0.0), skip=None,
        rule=True, scale=query.shape[-1] ** -0.5, eps=NORM_EPS if normalise else None,
    )  # fmt: skip


def scan_by_chunks(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor, rows: StateRows,
    out: Tensor, *, dt_bias: Tensor | None, dt_limit: tuple[float, float], a_log: bool,
) -> None:  # fmt: skip
    """``selective_scan`` of the sequences of more than MOST_WALKED tokens, into ``out``."""
    _by_chunks(
        C, B, x, state.mT, rows, out, decay=A, weight=dt, bias=dt_bias, limit=dt_limit, skip=D, rule=False, scale=1.0,
        eps=None, a_log=a_log,
    )  # fmt: skip


def _by_chunks(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, rows: StateRows, out: Tensor, *, decay: Tensor,
    weight: Tensor, bias: Tensor | None, limit: tuple[float, float], skip: Tensor | None, rule: bool, scale: float,
    eps: float | None, a_log: bool = False,
) -> None:  # fmt: skip
    (tokens, heads, value_dim), (key_heads, key_dim), count = value.shape, key.shape[1:], rows.slots.shape[0]
    config, dependent = launch_config(key_dim, value_dim, key.dtype), launch.options(out.device)
    tiles = triton.cdiv(value_dim, config.values)
    shape = {"HEADS": heads, "SHARED": heads // key_heads, "KEY_DIM": key_dim, "RULE": rule}
    shape |= {"MOST_WALKED": MOST_WALKED, "TOKENS": config.tokens, "KEYS": max(triton.next_power_of_2(key_dim), 16)}
    size = tokens, heads, 2, config.tokens
    seen = torch.empty(size, dtype=key.dtype, device=key.device)
    inverse = torch.empty(size, dtype=key.dtype, device=key.device) if rule else seen
    factors = torch.empty(4, tokens, heads, dtype=torch.float32, device=key.device)
    _prepare_kernel[(tokens // config.tokens + count, heads)](
        query, key, decay, weight, decay if bias is None else bias, rows.starts, seen, inverse, factors,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), decay.stride(0), weight.stride(0), scale,
        *map(float, limit), tokens, count, count.bit_length(), EPS=eps, A_LOG=a_log, BIAS=bias is not None, num_warps=4, **shape,
        **dependent,
    )  # fmt: skip
    _chunks_kernel[(count * heads * tiles,)](
        query, key, value, seen, inverse, factors, decay if skip is None else skip, state, rows.slots, rows.starts,
        out, query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        state.stride(0), state.stride(2), state.stride(3), tokens, VALUE_DIM=value_dim, SKIP=skip is not None,
        VALUES=config.values, TILES=tiles, num_warps=config.num_warps, num_stages=config.num_stages, **shape,
        **dependent,
    )  # fmt: skip
