"""The gated delta rule and Mamba-2's scan in Triton: each program walks a sequence's tokens with a tile of its state.

A decode step is bound by memory. It reads and writes each state once, 2 MiB for each row and layer of Qwen3-Next: 1 us of an
H200 (4.3 TB/s), expected and not measured. A tile is 8 KiB, the registers of one warp. So one row has two programs for each
multiprocessor, and many rows have more loads in flight than latency asks for. The next token's inputs are loaded while one
is computed.

Prompts go by ``chunks``, except short ones; a sequence's own length alone decides. Also where it is walked token by token, a
sequence has the same bits however it is cut into pieces: the layer's shape decides the size of a tile, and with it each sum's
order, and no product is fused with a sum.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.launch import await_turn
from stoker.kernels.recurrent.chunks import (
    MOST_WALKED,
    can_chunk,
    decay_rate,
    rule_by_chunks,
    scan_by_chunks,
    step_length,
)
from stoker.kernels.reference.recurrent import NORM_EPS, StateRows

_TILE = 2048  # numbers of a state: 64 registers of each thread
# Where these lie follows from the number of rows: a kernel specialised on it would be compiled again.
_ROWS = ["slots_ptr", "starts_ptr"]


def tile_width(depth: int, width: int) -> int:
    """How many of a state's columns (or rows) a program takes. depth: the state's other dimension."""
    return int(min(max(_TILE // triton.next_power_of_2(depth), 1), triton.next_power_of_2(width)))


@triton.jit
def _tile(starts_ptr, HEADS: tl.constexpr, TILES: tl.constexpr, DECODE: tl.constexpr):
    """A program's row, head and tile, and the tokens of the row's sequence. Tiles of one state run together."""
    program = tl.program_id(0)
    row = (program // (TILES * HEADS)).to(tl.int64)
    if DECODE:
        first, last = row, row + 1
    else:
        first, last = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    return row, program // TILES % HEADS, program % TILES, first, last


@triton.jit
def _load_rule(
    query_ptr, key_ptr, value_ptr, decay_ptr, beta_ptr, token, query_token, key_token, value_token, decay_token,
    beta_token, is_key, is_value, BY_ROW: tl.constexpr,
):  # fmt: skip
    query = tl.load(query_ptr + token * query_token, mask=is_key, other=0.0)
    key = tl.load(key_ptr + token * key_token, mask=is_key, other=0.0)
    value = tl.load(value_ptr + token * value_token, mask=is_value, other=0.0)
    decay_ptr += token * decay_token
    decay = tl.load(decay_ptr, mask=is_key, other=0.0) if BY_ROW else tl.load(decay_ptr)
    return query, key, value, decay, tl.load(beta_ptr + token * beta_token)


@triton.jit(do_not_specialize=["longest"], do_not_specialize_on_alignment=_ROWS)
def _gated_delta_rule_kernel(
    query_ptr, key_ptr, value_ptr, decay_ptr, beta_ptr, state_ptr, slots_ptr, starts_ptr, out_ptr, query_token,
    query_head, key_token, key_head, value_token, value_head, decay_token, decay_head, beta_token, slot_stride, longest, scale,
    HEADS: tl.constexpr, SHARED: tl.constexpr, BY_ROW: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, NORM_EPS: tl.constexpr, DECODE: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, TILES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """NORM_EPS: None where query and key stay as they are. BY_ROW: each row of a state has a decay of its own. DECODE: no launch
    but one like this writes states, and the step before did."""
    if not DECODE:
        await_turn(DEPENDENT)
    row, head, tile, first, last = _tile(starts_ptr, HEADS, TILES, DECODE)
    if (first >= last) | (last - first > longest):
        return
    keys, values = tl.arange(0, KEYS), tile * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    query_ptr += head // SHARED * query_head + keys
    key_ptr += head // SHARED * key_head + keys
    value_ptr += head * value_head + values
    decay_ptr += head * decay_head
    if BY_ROW:
        decay_ptr += keys
    beta_ptr += head
    out_ptr += head * VALUE_DIM + values
    within = is_key[:, None] & is_value[None, :]
    state_ptr += tl.load(slots_ptr + row) * slot_stride + head * (KEY_DIM * VALUE_DIM)
    state_ptr += keys[:, None] * VALUE_DIM + values[None, :]
    state = tl.load(state_ptr, mask=within, other=0.0)
    if DECODE:
        await_turn(DEPENDENT)
    query, key, value, decay, beta = _load_rule(
        query_ptr, key_ptr, value_ptr, decay_ptr, beta_ptr, first, query_token, key_token, value_token, decay_token,
        beta_token, is_key, is_value, BY_ROW,
    )  # fmt: skip
    for token in range(first, last):
        q, k, v = query.to(tl.float32), key.to(tl.float32), value.to(tl.float32)
        kept, strength = tl.exp(decay), beta.to(tl.float32)
        if not DECODE:
            query, key, value, decay, beta = _load_rule(
                query_ptr, key_ptr, value_ptr, decay_ptr, beta_ptr, tl.minimum(token + 1, last - 1), query_token,
                key_token, value_token, decay_token, beta_token, is_key, is_value, BY_ROW,
            )  # fmt: skip
        if NORM_EPS is not None:
            q *= tl.rsqrt(tl.sum(q * q, 0) + NORM_EPS)
            k *= tl.rsqrt(tl.sum(k * k, 0) + NORM_EPS)
        q, k = (q * scale)[:, None], k[:, None]
        state *= kept[:, None] if BY_ROW else kept
        change = (v - tl.sum(state * k, 0)) * strength
        state += k * change[None, :]
        tl.store(out_ptr + token * (HEADS * VALUE_DIM), tl.sum(state * q, 0), mask=is_value)
    tl.store(state_ptr, state, mask=within)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    rows: StateRows,
    *,
    normalise: bool,
    deterministic: bool = False,
) -> Tensor:
    """As the reference; the last dimension of each input is contiguous, and so is each row of ``state``.

    deterministic: the same bits in whatever pieces a sequence comes; otherwise the same to rounding. With a decay for each row
    of a state, sequences of any length go token after token.
    """
    (heads, value_dim), (key_heads, key_dim), by_row = value.shape[1:], key.shape[1:], decay.dim() == 3
    assert all(t.stride(-1) == 1 for t in (query, key, value, decay, beta)) and state[0].is_contiguous()
    width, most = tile_width(key_dim, value_dim), rows.longest
    out, tiles = _result(value, query.dtype, rows), triton.cdiv(value_dim, width)
    if most > MOST_WALKED and not (deterministic or by_row) and can_chunk(key_dim, key.dtype, rule=True):
        rule_by_chunks(query, key, value, decay, beta, state, rows, out, normalise=normalise)
        most = MOST_WALKED
    _gated_delta_rule_kernel[(rows.slots.shape[0] * heads * tiles,)](
        query, key, value, decay, beta, state, rows.slots, rows.starts, out, query.stride(0), query.stride(1),
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), decay.stride(0), decay.stride(1), beta.stride(0),
        state.stride(0), most, key_dim**-0.5, HEADS=heads, SHARED=heads // key_heads, BY_ROW=by_row, KEY_DIM=key_dim,
        VALUE_DIM=value_dim, NORM_EPS=NORM_EPS if normalise else None, DECODE=rows.longest == 1, KEYS=triton.next_power_of_2(key_dim), VALUES=width,
        TILES=tiles, num_warps=1, **launch.options(out.device, fused=False),
    )  # fmt: skip
    return out


def _result(like: Tensor, dtype: torch.dtype, rows: StateRows) -> Tensor:
    """A tensor for the result. It is zero where a token may belong to no row, which is never so in a decode step."""
    assert rows.longest > 1 or like.shape[0] == rows.slots.shape[0]
    make = torch.empty if rows.longest == 1 else torch.zeros
    return make(like.shape, dtype=dtype, device=like.device)


@triton.jit
def _of_step(ptr, is_row, BY_ROW: tl.constexpr):
    """What a step has one of, or one for each row of a tile."""
    return tl.load(ptr, mask=is_row, other=0.0) if BY_ROW else tl.load(ptr)


@triton.jit
def _load_scan(
    x_ptr, dt_ptr, b_ptr, c_ptr, token, x_token, dt_token, b_token, c_token, is_row, is_column, BY_ROW: tl.constexpr
):  # fmt: skip
    x = tl.load(x_ptr + token * x_token, mask=is_row, other=0.0)
    b = tl.load(b_ptr + token * b_token, mask=is_column, other=0.0)
    c = tl.load(c_ptr + token * c_token, mask=is_column, other=0.0)
    return x, _of_step(dt_ptr + token * dt_token, is_row, BY_ROW), b, c


@triton.jit(do_not_specialize=["longest"], do_not_specialize_on_alignment=_ROWS)
def _selective_scan_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, dt_bias_ptr, state_ptr, slots_ptr, starts_ptr, out_ptr, x_token, x_head,
    dt_token, b_token, b_group, c_token, c_group, slot_stride, longest, least, most, HEADS: tl.constexpr, SHARED: tl.constexpr,
    BY_ROW: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, A_LOG: tl.constexpr, SKIP: tl.constexpr, BIAS: tl.constexpr,
    DECODE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """ROWS: of the state, of DIM; COLUMNS: of it, at least SIZE. BY_ROW: each row has a step of its own, and each number a rate.
    SKIP: whether D times the input is added. DECODE: as there."""
    if not DECODE:
        await_turn(DEPENDENT)
    row, head, tile, first, last = _tile(starts_ptr, HEADS, TILES, DECODE)
    if (first >= last) | (last - first > longest):
        return
    dtype: tl.constexpr = dt_ptr.dtype.element_ty
    of_rows, columns = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_row, is_column = of_rows < DIM, columns < SIZE
    within = is_row[:, None] & is_column[None, :]
    of_step = head * DIM + of_rows if BY_ROW else head
    x_ptr += head * x_head + of_rows
    dt_ptr += of_step
    b_ptr += head // SHARED * b_group + columns
    c_ptr += head // SHARED * c_group + columns
    out_ptr += head * DIM + of_rows
    if BY_ROW:
        a_ptr += of_step[:, None] * SIZE + columns[None, :]
        a = tl.load(a_ptr, mask=within, other=0.0).to(tl.float32)
        a = -tl.exp(a) if A_LOG else a
    else:
        a = decay_rate(a_ptr + head, A_LOG)
    if SKIP:
        skip = _of_step(d_ptr + of_step, is_row, BY_ROW).to(tl.float32)
    bias = _of_step(dt_bias_ptr + of_step, is_row, BY_ROW).to(dtype).to(tl.float32) if BIAS else 0.0
    state_ptr += tl.load(slots_ptr + row) * slot_stride + head * (DIM * SIZE)
    state_ptr += of_rows[:, None] * SIZE + columns[None, :]
    state = tl.load(state_ptr, mask=within, other=0.0)
    if DECODE:
        await_turn(DEPENDENT)
    x, dt, b, c = _load_scan(
        x_ptr, dt_ptr, b_ptr, c_ptr, first, x_token, dt_token, b_token, c_token, is_row, is_column, BY_ROW
    )  # fmt: skip
    for token in range(first, last):
        wide, step = x.to(tl.float32), dt.to(tl.float32)
        from_input, to_output = b.to(tl.float32)[None, :], c.to(tl.float32)[None, :]
        if not DECODE:
            x, dt, b, c = _load_scan(
                x_ptr, dt_ptr, b_ptr, c_ptr, tl.minimum(token + 1, last - 1), x_token, dt_token, b_token, c_token,
                is_row, is_column, BY_ROW,
            )  # fmt: skip
        step = step_length(step, bias, least, most, dtype, BIAS)
        kept = tl.exp(step[:, None] * a) if BY_ROW else tl.exp(step * a)
        state = state * kept + (wide * step)[:, None] * from_input
        y = tl.sum(state * to_output, 1)
        if SKIP:
            y += skip * wide
        tl.store(out_ptr + token * (HEADS * DIM), y, mask=is_row)
    tl.store(state_ptr, state, mask=within)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor,
    rows: StateRows,
    *,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float],
    a_log: bool = False,
    deterministic: bool = False,
) -> Tensor:
    """As the reference; the last dimension of each input is contiguous, and so is each row of ``state``.

    deterministic: the same bits in whatever pieces a sequence comes; otherwise the same to rounding. With a step for each row of
    a state, sequences of any length go token after token.
    """
    (heads, dim), (groups, size) = x.shape[1:], B.shape[1:]
    by_row = dt.dim() == 3
    assert all(t.stride(-1) == 1 for t in (x, dt, A, B, C)) and state[0].is_contiguous()
    assert not by_row or (dt[0].is_contiguous() and A.is_contiguous())
    width, most = tile_width(size, dim), rows.longest
    out, tiles = _result(x, x.dtype, rows), triton.cdiv(dim, width)
    if most > MOST_WALKED and not (deterministic or by_row) and can_chunk(size, x.dtype, rule=False):
        scan_by_chunks(x, dt, A, B, C, D, state, rows, out, dt_bias=dt_bias, dt_limit=dt_limit, a_log=a_log)
        most = MOST_WALKED
    _selective_scan_kernel[(rows.slots.shape[0] * heads * tiles,)](
        x, dt, A, B, C, A if D is None else D, A if dt_bias is None else dt_bias, state, rows.slots, rows.starts, out,
        x.stride(0), x.stride(1), dt.stride(0), B.stride(0), B.stride(1), C.stride(0), C.stride(1), state.stride(0), most, *map(float, dt_limit),
        HEADS=heads, SHARED=heads // groups, BY_ROW=by_row, DIM=dim, SIZE=size, A_LOG=a_log, SKIP=D is not None, BIAS=dt_bias is not None,
        DECODE=rows.longest == 1, ROWS=width, COLUMNS=triton.next_power_of_2(size), TILES=tiles, num_warps=1,
        **launch.options(out.device, fused=False),
    )  # fmt: skip
    return out
