"""Rotary embedding and the KV write of latent attention's heads, as a Triton kernel. Arithmetic is fp32."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.attention.write import keep
from stoker.kernels.launch import await_turn

_HEADS_TILE = 1024  # elements of a program's heads: a 16-byte load for each thread


@triton.jit
def _rotated(row_ptr, place, mask, cos, sin, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Of pairs of numbers, of which there are ``ROTATED`` numbers from ``row_ptr`` on; place: in them, of each number."""
    if INTERLEAVED:
        low, other = place % 2 == 0, place ^ 1
    else:
        low = place < ROTATED // 2
        other = tl.where(low, place + ROTATED // 2, place - ROTATED // 2)
    x = tl.load(row_ptr + place, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(row_ptr + other, mask=mask, other=0.0).to(tl.float32)
    return x * cos + tl.where(low, -y, y) * sin


@triton.jit
def _latent_heads_write_kernel(
    query_ptr,
    key_value_ptr,
    key_rotary_ptr,
    cos_ptr,
    sin_ptr,
    factor_ptr,
    out_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    query_stride,
    key_value_stride,
    key_rotary_stride,
    cos_stride,
    sin_stride,
    factor_stride,
    key_slot_stride,
    key_head_stride,
    value_slot_stride,
    value_head_stride,
    heads,
    PLAIN: tl.constexpr,
    ROTATED: tl.constexpr,
    VALUE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FACTOR: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One token and ``HEADS`` of its heads; the key's rotated numbers, which all heads have in common, anew for each.

    Angles and slots were there before the launches that made the heads: they are read before the turn.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    real = head < heads
    plain, turns = real & (at < PLAIN), real & (at >= PLAIN) & (at < PLAIN + ROTATED)
    place = at - PLAIN
    if TURNS:
        angle_at = place // 2 if INTERLEAVED else place
        cos = tl.load(cos_ptr + token * cos_stride + angle_at, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + token * sin_stride + angle_at, mask=turns, other=0.0).to(tl.float32)
    else:
        cos, sin = 1.0, 0.0
    slot = tl.load(slots_ptr + token).to(tl.int64)  # times a stride, this passes 32 bits in a large cache
    if FACTOR:
        factor = tl.load(factor_ptr + token * factor_stride)
    await_turn(DEPENDENT)

    row_ptr = query_ptr + token * query_stride + head * (PLAIN + ROTATED)
    query = tl.load(row_ptr + at, mask=plain, other=0.0).to(tl.float32)
    query += _rotated(row_ptr + PLAIN, place, turns, cos, sin, ROTATED, INTERLEAVED)
    if FACTOR:
        query *= factor
    out_row_ptr = out_ptr + (token * heads + head) * (PLAIN + ROTATED)
    tl.store(out_row_ptr + at, query, mask=plain | turns)

    row_ptr = key_value_ptr + token * key_value_stride + head * (PLAIN + VALUE)
    key = tl.load(row_ptr + at, mask=plain, other=0.0).to(tl.float32)
    key += _rotated(key_rotary_ptr + token * key_rotary_stride, place, turns, cos, sin, ROTATED, INTERLEAVED)
    keep(key_cache_ptr + slot * key_slot_stride + head * key_head_stride + at, key, plain | turns)
    inside = real & (at < VALUE)
    value = tl.load(row_ptr + PLAIN + at, mask=inside, other=0.0)
    keep(value_cache_ptr + slot * value_slot_stride + head * value_head_stride + at, value, inside)


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
    """As the reference's, in one pass over the heads.

    query: [T, H, N + R]; key_value: [T, H, N + V]; key_rotary: [T, R]; caches: [N, block, H, D]; slots: int64 [T]; factor: fp32
    [T, 1]. Returns [T, H, N + R].
    """
    tokens, heads, dim = query.shape
    rotated, (cos, sin) = key_rotary.shape[1], (key_rotary, key_rotary) if cos_sin is None else cos_sin
    plain = dim - rotated
    value = key_value.shape[2] - plain
    caches = (key_cache, value_cache)
    assert all(t.stride(-1) == 1 for t in (query, key_value, key_rotary, cos, sin, *caches))
    assert cos.shape[-1] == rotated and all(t.stride(1) == t.shape[2] for t in (query, key_value))
    assert all(c.stride(0) == c.shape[1] * c.stride(1) for c in caches)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    block = triton.next_power_of_2(max(dim, value))
    tile = max(_HEADS_TILE // block, 1)
    _latent_heads_write_kernel[(tokens, triton.cdiv(heads, tile))](
        query,
        key_value,
        key_rotary,
        cos,
        sin,
        query if factor is None else factor,
        out,
        key_cache,
        value_cache,
        slots,
        *(t.stride(0) for t in (query, key_value, key_rotary, cos, sin)),
        0 if factor is None else factor.stride(0),
        *(stride for cache in caches for stride in (cache.stride(1), cache.stride(2))),
        heads,
        PLAIN=plain,
        ROTATED=rotated,
        VALUE=value,
        HEADS=tile,
        BLOCK=block,
        TURNS=cos_sin is not None,
        INTERLEAVED=interleaved,
        FACTOR=factor is not None,
        num_warps=4,
        **launch.options(query.device),
    )
    return out
