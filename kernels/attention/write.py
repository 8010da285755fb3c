"""The Triton kernel that writes keys and values to the paged cache.

Arguments named after a tensor and one of its dimensions (``key_head``) are its strides. Addresses are 64 bits wide.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.reference.fp8 import FP8_MAX

_FP8_MAX = tl.constexpr(FP8_MAX)


@triton.jit
def keep(pointers, rows, mask):
    """Store keys or values in a cache. In one of fp8, numbers beyond its largest become that; NaN stays NaN."""
    if pointers.dtype.element_ty == tl.float8e4nv:
        rows = tl.clamp(rows.to(tl.float32), -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(pointers, rows.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _write_token(
    new,
    cache,
    block,
    within,
    new_head,
    cache_block,
    cache_token,
    cache_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    head = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < HEADS) & (d < DIM)
    row = tl.load(new + head * new_head + d, mask=mask)
    keep(cache + block * cache_block + within * cache_token + head * cache_head + d, row, mask)


@triton.jit
def write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    key_token,
    key_head,
    value_token,
    value_head,
    key_cache_block,
    key_cache_token,
    key_cache_head,
    value_cache_block,
    value_cache_token,
    value_cache_head,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program a token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    block = slot // BLOCK_SIZE
    within = slot % BLOCK_SIZE
    key += token * key_token
    _write_token(
        key,
        key_cache,
        block,
        within,
        key_head,
        key_cache_block,
        key_cache_token,
        key_cache_head,
        HEADS,
        KEY_DIM,
        BLOCK_H,
        BLOCK_K,
    )
    value += token * value_token
    _write_token(
        value,
        value_cache,
        block,
        within,
        value_head,
        value_cache_block,
        value_cache_token,
        value_cache_head,
        HEADS,
        VALUE_DIM,
        BLOCK_H,
        BLOCK_V,
    )
