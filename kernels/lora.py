"""Low-rank adapters over a projection's output, for a GPU: shrink to each token's rank, expand into the output.

After Punica (Chen et al. 2023, arXiv:2310.18547) and S-LoRA (Sheng et al. 2023, arXiv:2311.03285), but the matrices stay where
their owner keeps them: a slot is a row of addresses, so that a change of slots is a change of a few numbers, which a
captured graph reads too. Linears of one input share both launches. Tokens without an adapter cost a look at their slot.
The shrink of an embedding is a look-up.

A tile of tokens runs once for each adapter in it. Few tokens are tiles of one, as they may all differ and what counts is
that every multiprocessor reads; many are tiles for the tensor cores, most of them within one sequence.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels.linear import multiprocessors
from stoker.kernels.reference.lora import POINTER_FIELDS, AdapterRows, LoraTable

_FEW = 256  # tokens
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit(do_not_specialize=["tokens"])
def _shrink_kernel(
    x_ptr,
    slots_ptr,
    pointers_ptr,
    hidden_ptr,
    x_stride,
    tokens,
    depth,
    span,
    entries,
    linears,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    STRIDED: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """hidden[split, linear, token, rank] = x[token, span of the split] @ a.T, where the token's adapter has that rank."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    linear = tl.program_id(1) // (RANK // BLOCK_R)
    ranks = (tl.program_id(1) % (RANK // BLOCK_R)) * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(2)
    first = split * span
    last = tl.minimum(first + span, depth)
    slots = tl.load(slots_ptr + rows, mask=rows < tokens, other=0)
    slot = tl.max(slots, axis=0)
    while slot > 0:
        entry = pointers_ptr + (linear * entries + slot) * FIELDS
        rank = tl.load(entry + 4)
        if tl.min(ranks, axis=0) < rank:
            a_ptr = tl.load(entry).to(tl.pointer_type(DTYPE))
            if STRIDED:
                rank_stride, depth_stride = tl.load(entry + 6), tl.load(entry + 7)
            else:
                rank_stride, depth_stride = depth, 1
            mine = slots == slot
            total = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
            for start in range(first, last, BLOCK_K):
                at = start + tl.arange(0, BLOCK_K)
                inside = at < last
                x = tl.load(
                    x_ptr + rows.to(tl.int64)[:, None] * x_stride + at[None, :],
                    mask=mine[:, None] & inside[None, :],
                    other=0.0,
                ).to(DTYPE)
                a = tl.load(
                    a_ptr + ranks[:, None] * rank_stride + at[None, :] * depth_stride,
                    mask=(ranks < rank)[:, None] & inside[None, :],
                    other=0.0,
                )
                if BLOCK_T == 1:
                    total += tl.sum(a.to(tl.float32) * x.to(tl.float32), axis=1)[None, :]
                else:
                    total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
            target = hidden_ptr + ((split * linears + linear) * tokens + rows.to(tl.int64)[:, None]) * RANK
            tl.store(target + ranks[None, :], total, mask=mine[:, None] & (ranks < rank)[None, :])
        slots = tl.where(slots == slot, 0, slots)
        slot = tl.max(slots, axis=0)


@triton.jit(do_not_specialize=["tokens"])
def _expand_kernel(
    hidden_ptr,
    slots_ptr,
    pointers_ptr,
    columns_ptr,
    out_ptr,
    out_stride,
    tokens,
    entries,
    linears,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    STRIDED: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out = out + scale * hidden @ b.T of each token's adapter; with a gain g, bias + g * (out - bias + the same); plus shift."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    tile = tl.program_id(1)
    linear = 0
    for other in range(1, linears):
        linear += (tile >= tl.load(columns_ptr + other * 4)).to(tl.int32)
    first_tile = tl.load(columns_ptr + linear * 4)
    offset = tl.load(columns_ptr + linear * 4 + 1)
    width = tl.load(columns_ptr + linear * 4 + 2)
    bias_address = tl.load(columns_ptr + linear * 4 + 3)
    columns = (tile - first_tile) * BLOCK_N + tl.arange(0, BLOCK_N)
    slots = tl.load(slots_ptr + rows, mask=rows < tokens, other=0)
    slot = tl.max(slots, axis=0)
    while slot > 0:
        entry = pointers_ptr + (linear * entries + slot) * FIELDS
        shift_address = tl.load(entry + 3)
        rank = tl.load(entry + 4)
        if (rank > 0) | (shift_address != 0):
            b_ptr = tl.load(entry + 1).to(tl.pointer_type(DTYPE))
            gain_address = tl.load(entry + 2)
            scale = tl.load(entry + 5).to(tl.float64, bitcast=True).to(tl.float32)
            if STRIDED:
                width_stride, rank_stride = tl.load(entry + 8), tl.load(entry + 9)
            else:
                width_stride, rank_stride = rank, 1
            mine = slots == slot
            total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
            for start in range(0, rank, BLOCK_R):
                ranks = start + tl.arange(0, BLOCK_R)
                known = mine[:, None] & (ranks < rank)[None, :]
                hidden = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
                for split in range(SPLITS):
                    source = hidden_ptr + ((split * linears + linear) * tokens + rows.to(tl.int64)[:, None]) * RANK
                    hidden += tl.load(source + ranks[None, :], mask=known, other=0.0)
                b = tl.load(
                    b_ptr + columns.to(tl.int64)[:, None] * width_stride + ranks[None, :] * rank_stride,
                    mask=(columns < width)[:, None] & (ranks < rank)[None, :],
                    other=0.0,
                )
                if BLOCK_T == 1:
                    total += tl.sum(b.to(tl.float32) * hidden, axis=1)[None, :]
                else:
                    total = tl.dot(hidden.to(DTYPE), tl.trans(b), total, input_precision="ieee")
            total *= scale
            target = out_ptr + rows.to(tl.int64)[:, None] * out_stride + offset + columns[None, :]
            inside = mine[:, None] & (columns < width)[None, :]
            before = tl.load(target, mask=inside, other=0.0).to(tl.float32)
            if gain_address != 0:
                gain_ptr = gain_address.to(tl.pointer_type(tl.float32))
                gain = tl.load(gain_ptr + columns, mask=columns < width, other=0.0)[None, :]
                plain = before
                if bias_address != 0:
                    bias_ptr = bias_address.to(tl.pointer_type(out_ptr.dtype.element_ty))
                    plain -= tl.load(bias_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
                total = (gain - 1) * plain + gain * total
            if shift_address != 0:
                shift_ptr = shift_address.to(tl.pointer_type(tl.float32))
                total += tl.load(shift_ptr + columns, mask=columns < width, other=0.0)[None, :]
            tl.store(target, before + total, mask=inside)
        slots = tl.where(slots == slot, 0, slots)
        slot = tl.max(slots, axis=0)


@triton.jit
def _look_up_kernel(
    ids_ptr,
    slots_ptr,
    pointers_ptr,
    hidden_ptr,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
):
    """hidden[token, rank] = a[rank, id of the token], where the token's adapter has that rank."""
    token = tl.program_id(0).to(tl.int64)
    ranks = tl.arange(0, RANK)
    entry = pointers_ptr + tl.load(slots_ptr + token) * FIELDS
    known = ranks < tl.load(entry + 4)
    a_ptr = tl.load(entry).to(tl.pointer_type(DTYPE))
    at = ranks * tl.load(entry + 6) + tl.load(ids_ptr + token) * tl.load(entry + 7)
    tl.store(hidden_ptr + token * RANK + ranks, tl.load(a_ptr + at, mask=known, other=0.0).to(tl.float32), mask=known)


_BLOCK_N = 64


def lora(x: Tensor, out: Tensor, table: LoraTable, rows: AdapterRows, *, deterministic: bool = False) -> Tensor:
    """As the reference. deterministic: a row's result has the same bits whatever stands beside it."""
    if table.empty:
        return out
    tokens, depth = x.shape
    rank = _padded_rank(table)
    block_r = min(rank, 64)
    block_t = _tokens_per_tile(tokens, deterministic)
    linears, tiles = len(table.widths), triton.cdiv(tokens, block_t)
    block_k, splits = 128, 1
    programs = 1 if deterministic else tiles * linears * (rank // block_r)
    while programs * splits < 2 * multiprocessors(x.device) and depth >= 2 * splits * 4 * block_k and splits < 8:
        splits *= 2
    span = triton.cdiv(triton.cdiv(depth, splits), block_k) * block_k
    hidden = torch.empty(splits, linears, tokens, rank, dtype=torch.float32, device=x.device)
    _shrink_kernel[(tiles, linears * (rank // block_r), splits)](
        x,
        rows.slots,
        table.pointers,
        hidden,
        x.stride(0),
        tokens,
        depth,
        span,
        table.pointers.shape[1],
        linears,
        FIELDS=POINTER_FIELDS,
        DTYPE=_TYPES[table.dtype],
        STRIDED=table.strided,
        RANK=rank,
        BLOCK_T=block_t,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
    )
    return _expand(hidden, out, table, rows, block_t)


def lora_embedding(
    token_ids: Tensor, out: Tensor, table: LoraTable, rows: AdapterRows, *, deterministic: bool = False
) -> Tensor:
    """As the reference. deterministic: as for ``lora``."""
    if table.empty:
        return out
    tokens, rank = len(token_ids), _padded_rank(table)
    hidden = torch.empty(1, 1, tokens, rank, dtype=torch.float32, device=out.device)
    _look_up_kernel[(tokens,)](
        token_ids,
        rows.slots,
        table.pointers,
        hidden,
        FIELDS=POINTER_FIELDS,
        DTYPE=_TYPES[table.dtype],
        RANK=rank,
    )
    return _expand(hidden, out, table, rows, _tokens_per_tile(tokens, deterministic))


def _padded_rank(table: LoraTable) -> int:
    return int(max(16, triton.next_power_of_2(table.max_rank)))


def _tokens_per_tile(tokens: int, deterministic: bool) -> int:
    return 1 if tokens <= _FEW and not deterministic else 16


def _expand(hidden: Tensor, out: Tensor, table: LoraTable, rows: AdapterRows, block_t: int) -> Tensor:
    """hidden: fp32 [splits, linears, T, padded rank], of which nothing above a token's rank is read."""
    splits, linears, tokens, rank = hidden.shape
    tiles = sum(triton.cdiv(width, _BLOCK_N) for width in table.widths)
    _expand_kernel[(triton.cdiv(tokens, block_t), tiles)](
        hidden,
        rows.slots,
        table.pointers,
        table.columns(_BLOCK_N),
        out,
        out.stride(0),
        tokens,
        table.pointers.shape[1],
        linears,
        FIELDS=POINTER_FIELDS,
        DTYPE=_TYPES[table.dtype],
        STRIDED=table.strided,
        SPLITS=splits,
        RANK=rank,
        BLOCK_T=block_t,
        BLOCK_R=min(rank, 64),
        BLOCK_N=_BLOCK_N,
    )
    return out
