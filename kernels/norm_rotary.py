"""Normalisation, rotary embedding with the KV write, and gated activation, as Triton kernels.

Each program does whole rows, in a shape that the row's width alone decides, so a row's result depends on no other row.
Arithmetic is in fp32, and rounds where the reference does.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.attention.write import keep
from stoker.kernels.launch import await_turn
from stoker.kernels.reference.norm_rotary import Activation, QKNorm

_ACT_BLOCK = 1024
_HEADS_TILE = 1024  # elements of a program's heads: a 16-byte load for each thread


def _warps(elements: int) -> int:
    """The number of warps for about 16 elements a thread."""
    return int(min(max(triton.next_power_of_2(elements) // 512, 1), 16))


@triton.jit
def norm_factor(weight_ptr, at, mask, OFFSET: tl.constexpr):
    """What a norm multiplies by, in fp32: the weight, or with ``OFFSET`` 1 + weight."""
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return weight + 1.0 if OFFSET else weight


@triton.jit
def _times_factor(normed, factor, dtype: tl.constexpr, WIDE: tl.constexpr):
    """Rounded to ``dtype`` before the product, or with ``WIDE`` not; the product, in fp32, is not."""
    return normed * factor if WIDE else normed.to(dtype).to(tl.float32) * factor


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    scale_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    dim,
    eps,
    OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SCALE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < dim
    factor = norm_factor(
        weight_ptr, at, inside, OFFSET
    )  # of the model, whose other weights have long driven it from cache
    if BIAS:
        bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    await_turn(DEPENDENT)
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, axis=0) / dim, 0.0)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / dim + eps)
    dtype = out_ptr.dtype.element_ty
    out = _times_factor(x * inverse, factor, dtype, OFFSET or CENTRED)
    if BIAS:
        out += bias
    if RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + at, mask=inside, other=0.0)
        out = out.to(dtype).to(tl.float32) + residual.to(tl.float32)
    if SCALE:
        out = out.to(dtype).to(tl.float32) * tl.load(scale_ptr).to(tl.float32)
    tl.store(out_ptr + row * dim + at, out, mask=inside)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: bool = False,
    centred: bool = False,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """As the reference's. x: [..., D]; weight, bias: [D]; residual: as ``x``; scale: [1]."""
    dim = x.shape[-1]
    rows = _rows(x)
    residual_rows = rows if residual is None else _rows(residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launched = _rms_norm_kernel[(rows.shape[0],)](
        rows,
        weight,
        weight if bias is None else bias,
        residual_rows,
        weight if scale is None else scale,
        out,
        rows.stride(0),
        residual_rows.stride(0),
        dim,
        eps,
        OFFSET=offset,
        CENTRED=centred,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        SCALE=scale is not None,
        BLOCK=triton.next_power_of_2(dim),
        num_warps=_warps(dim),
        # A product that is rounded before it is added is not one with the sum.
        **launch.options(x.device, fused=False),
    )
    launch.leave_room(launched)
    return out


def _rows(x: Tensor) -> Tensor:
    """[..., D] as [rows, D], each row contiguous."""
    return launch.in_rows(x.reshape(-1, x.shape[-1]))


@triton.jit
def _times_sigmoid(x, y):
    """``x * sigmoid(y)``, exact to some units in the last place. ``tl.sigmoid`` divides, in twice as many instructions."""
    root = tl.rsqrt(1.0 + tl.exp2(-1.4426950408889634 * y))
    return x * root * root


@triton.jit
def act_times(gate, up, dtype: tl.constexpr, ACT: tl.constexpr):
    """``act(gate) * up`` in fp32, rounded to ``dtype`` where separate operations would round; the product is not."""
    gate = gate.to(dtype).to(tl.float32)
    if ACT == "silu":
        gate = _times_sigmoid(gate, gate)
    elif ACT == "gelu_tanh":  # (1 + tanh(y)) / 2 is sigmoid(2 * y)
        gate = _times_sigmoid(gate, 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        tl.static_assert(ACT == "gelu")
        gate *= 0.5 * (1.0 + tl.erf(0.7071067811865476 * gate))
    return gate.to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit
def _act_mul_kernel(
    gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, size, scale, ACT: tl.constexpr, DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    await_turn(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32) * scale
    up = tl.load(up_ptr + row * up_stride + at, mask=inside, other=0.0)
    tl.store(out_ptr + row * size + at, act_times(gate, up, out_ptr.dtype.element_ty, ACT), mask=inside)


def act_mul(gate_up: Tensor, act: Activation, scale: float = 1.0, up: Tensor | None = None) -> Tensor:
    """As the reference's: gate_up [T, 2 * I], the gate first; returns ``act(scale * gate) * up``, [T, I].

    up: [T, I]; ``gate_up`` is then the gate alone, [T, I].
    """
    gate, up = gate_up.chunk(2, dim=1) if up is None else (gate_up, up)
    assert gate.ndim == 2 and gate.stride(1) == up.stride(1) == 1 and gate.shape == up.shape
    tokens, size = gate.shape
    out = torch.empty(tokens, size, dtype=gate.dtype, device=gate.device)
    _act_mul_kernel[(tokens, triton.cdiv(size, _ACT_BLOCK))](
        gate,
        up,
        out,
        gate.stride(0),
        up.stride(0),
        size,
        scale,
        ACT=act,
        BLOCK=_ACT_BLOCK,
        num_warps=4,
        **launch.options(out.device),
    )
    return out


@triton.jit
def _head_factor(query_weight_ptr, key_weight_ptr, at, is_query, inside, OFFSET: tl.constexpr):
    """``norm_factor`` of queries' heads, or of keys'."""
    of_query = norm_factor(query_weight_ptr, at, inside & is_query, OFFSET)
    return tl.where(is_query, of_query, norm_factor(key_weight_ptr, at, inside & ~is_query, OFFSET))


@triton.jit
def _qk_norm_rotary_write_kernel(
    qkv_ptr,
    query_weight_ptr,
    key_weight_ptr,
    cos_ptr,
    sin_ptr,
    factor_ptr,
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    token_stride,
    head_stride,
    cos_stride,
    sin_stride,
    factor_stride,
    key_slot_stride,
    key_head_stride,
    value_slot_stride,
    value_head_stride,
    heads,
    kv_heads,
    dim,
    eps,
    rotated,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUPED: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
    VALUE_NORM: tl.constexpr,
    NORM_LAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One token and ``HEADS`` of its heads: queries come first, then keys, then values, where these are others.

    All but the projection was there before the launch that made that: it is read before the turn.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, DIM)[None, :]
    dtype = query_ptr.dtype.element_ty
    is_query = head < heads
    is_key = (head >= heads) & (head < heads + kv_heads)
    value_head = head - heads if KEYS_ARE_VALUES else head - heads - kv_heads
    is_value = (value_head >= 0) & (value_head < kv_heads)
    inside = at < dim
    both = (is_query | is_key) & inside

    slot = tl.load(slots_ptr + token).to(tl.int64)  # times a stride, this passes 32 bits in a large cache
    if NORM:
        factor = _head_factor(query_weight_ptr, key_weight_ptr, at, is_query, inside, OFFSET)
    if ROTARY:
        # The other half of a pair, which another thread holds, is read and normalised again: it is in cache.
        turns = at < rotated
        if INTERLEAVED:
            low = at % 2 == 0
            other_at = at ^ 1
            angle_at = at // 2
        else:
            low = at < rotated // 2
            other_at = tl.where(low, at + rotated // 2, at - rotated // 2)
            angle_at = at
        if NORM and not NORM_LAST:
            other_factor = _head_factor(query_weight_ptr, key_weight_ptr, other_at, is_query, turns, OFFSET)
        cos = tl.load(cos_ptr + token * cos_stride + angle_at, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + token * sin_stride + angle_at, mask=turns, other=0.0).to(tl.float32)
    if FACTOR:
        temper = tl.load(factor_ptr + token * factor_stride)
    await_turn(DEPENDENT)

    place = head
    if GROUPED:
        group = heads // kv_heads
        within = tl.where(is_query, head % group, tl.where(is_key, group, group + 1))
        place = tl.where(is_query, head // group, (head - heads) % kv_heads) * (group + 2) + within
    row_ptr = qkv_ptr + token * token_stride + place * head_stride
    x = tl.load(row_ptr + at, mask=(is_query | is_key | is_value) & inside, other=0.0)
    if ROTARY:
        other = tl.load(row_ptr + other_at, mask=both & turns, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / dim + eps)[:, None]
    value_ptr = value_cache_ptr + slot * value_slot_stride + value_head * value_head_stride + at
    keep(value_ptr, wide * inverse if VALUE_NORM else x, is_value & inside)

    if NORM and not NORM_LAST:
        wide = _times_factor(wide * inverse, factor, dtype, OFFSET).to(dtype).to(tl.float32)
    if ROTARY:
        if NORM and not NORM_LAST:
            other = _times_factor(other * inverse, other_factor, dtype, OFFSET).to(dtype).to(tl.float32)
        wide = wide * cos + tl.where(low, -other, other) * sin
    if NORM and NORM_LAST:
        wide = wide.to(dtype).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / dim + eps)[:, None]
        wide = _times_factor(wide * inverse, factor, dtype, OFFSET)

    if FACTOR:
        wide = tl.where(is_query, wide * temper, wide)
    tl.store(query_ptr + (token * heads + head) * dim + at, wide, mask=is_query & inside)
    key_ptr = key_cache_ptr + slot * key_slot_stride + (head - heads) * key_head_stride + at
    keep(key_ptr, wide, is_key & inside)


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
    """As the reference's, in one pass over the projected heads.

    qkv: [T, heads + 2 * kv_heads, D], or [T, heads + kv_heads, D]; caches: [N, block, kv_heads, D]; slots: int64 [T]; factor:
    fp32 [T, 1]. Returns query [T, heads, D].
    """
    tokens, projected, dim = qkv.shape
    caches = (key_cache, value_cache)
    assert qkv.stride(2) == 1
    assert all(c.stride(3) == 1 and c.stride(0) == c.shape[1] * c.stride(1) for c in caches)
    query = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    query_weight, key_weight, eps, offset, of_values, last = norm or (qkv, qkv, 0.0, False, False, False)
    cos, sin = cos_sin or (qkv, qkv)
    assert cos.stride(-1) == sin.stride(-1) == 1
    padded = triton.next_power_of_2(dim)
    tile = max(_HEADS_TILE // padded, 1)
    _qk_norm_rotary_write_kernel[(tokens, triton.cdiv(projected, tile))](
        qkv,
        query_weight,
        key_weight,
        cos,
        sin,
        qkv if factor is None else factor,
        query,
        key_cache,
        value_cache,
        slots,
        qkv.stride(0),
        qkv.stride(1),
        cos.stride(0),
        sin.stride(0),
        0 if factor is None else factor.stride(0),
        *(stride for cache in caches for stride in (cache.stride(1), cache.stride(2))),
        heads,
        kv_heads,
        dim,
        eps,
        cos.shape[-1],
        HEADS=tile,
        DIM=padded,
        NORM=norm is not None,
        OFFSET=offset,
        ROTARY=cos_sin is not None,
        INTERLEAVED=interleaved,
        FACTOR=factor is not None,
        GROUPED=grouped,
        KEYS_ARE_VALUES=projected == heads + kv_heads,
        VALUE_NORM=of_values,
        NORM_LAST=last,
        num_warps=4,
        **launch.options(qkv.device),
    )
    return query
