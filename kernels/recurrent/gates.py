"""The gates of layers with recurrent states, as Triton kernels. They round where the reference does."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.launch import await_turn
from stoker.kernels.recurrent.chunks import softplus

_ELEMENTS = 1024  # of a program


@triton.jit(do_not_specialize=["rows"])
def _gated_rms_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, rows, x_stride, x_head, gate_stride, gate_head, weight_head, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr, GATE_FIRST: tl.constexpr, SIGMOID: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (at < DIM)
    token, head = row // HEADS, row % HEADS
    if NORM:
        weight = tl.load(weight_ptr + head * weight_head + at, mask=inside, other=0.0)
    await_turn(DEPENDENT)
    x = tl.load(x_ptr + token * x_stride + head * x_head + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + head * gate_head + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.sigmoid(gate) if SIGMOID else gate * tl.sigmoid(gate)
    if GATE_FIRST or not NORM:
        x *= factor
    if NORM:
        dtype = out_ptr.dtype.element_ty
        x *= tl.rsqrt(tl.sum(x * x, 1)[:, None] / DIM + eps)
        if not SIGMOID:
            x = x.to(dtype).to(tl.float32)
        x *= weight.to(tl.float32)
        if not GATE_FIRST:
            if weight_ptr.dtype.element_ty == dtype and not SIGMOID:  # a product with fp32 is fp32
                x = x.to(dtype).to(tl.float32)
            x *= factor
    tl.store(out_ptr + row * DIM + at, x, mask=inside)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, gate_first: bool = False, *, sigmoid: bool = False
) -> Tensor:
    """As the reference's. x, gate: [T, H, D], each head's numbers contiguous; weight: [D], or [H, D], contiguous, or None."""
    tokens, heads, dim = x.shape
    assert x.stride(2) == gate.stride(2) == 1 and gate.shape == x.shape
    assert weight is None or weight.is_contiguous()
    out, block = torch.empty(x.shape, dtype=x.dtype, device=x.device), triton.next_power_of_2(dim)
    tile = max(_ELEMENTS // block, 1)
    _gated_rms_norm_kernel[(triton.cdiv(tokens * heads, tile),)](
        x, gate, x if weight is None else weight, out, tokens * heads, x.stride(0), x.stride(1), gate.stride(0),
        gate.stride(1), dim if weight is not None and weight.dim() == 2 else 0, eps, HEADS=heads, DIM=dim,
        NORM=weight is not None, GATE_FIRST=gate_first, SIGMOID=sigmoid, TILE=tile, BLOCK=block, num_warps=min(max(block // 512, 4), 16),
        **launch.options(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _delta_gates_kernel(
    a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, decay_ptr, beta_ptr, a_stride, b_stride, scale, bound, HEADS: tl.constexpr,
    DIM: tl.constexpr, BOUND: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One token and ``BLOCK`` of its numbers, ``DIM`` for each head."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, head = at < HEADS * DIM, at // DIM
    rate = tl.exp(tl.load(a_log_ptr + head, mask=inside, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    await_turn(DEPENDENT)
    x = tl.load(a_ptr + row * a_stride + at, mask=inside, other=0.0).to(tl.float32) + bias
    if ROUNDED:
        rate = rate.to(a_log_ptr.dtype.element_ty).to(tl.float32)
    decay = bound * tl.sigmoid(rate * x) if BOUND else -rate * softplus(x)
    if ROUNDED:
        decay = decay.to(a_ptr.dtype.element_ty).to(tl.float32)
    tl.store(decay_ptr + row * (HEADS * DIM) + at, decay, mask=inside)
    first = inside & (at % DIM == 0)
    b = tl.load(b_ptr + row * b_stride + head, mask=first, other=0.0).to(tl.float32)
    beta = tl.sigmoid(b).to(beta_ptr.dtype.element_ty).to(tl.float32) * scale
    tl.store(beta_ptr + row * HEADS + head, beta, mask=first)


def delta_gates(
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    scale: float = 1.0,
    *,
    bound: float | None = None,
    rounded: bool = False,
) -> tuple[Tensor, Tensor]:
    """As the reference's. The numbers of each token of ``a``, and of ``b``, are contiguous, and so are ``a_log`` and ``dt_bias``."""
    (tokens, heads), dim = a.shape[:2], a.shape[2] if a.dim() == 3 else 1
    assert a[0].is_contiguous() and b.stride(1) == 1 and a_log.is_contiguous() and dt_bias.is_contiguous()
    decay = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    beta = torch.empty(tokens, heads, dtype=b.dtype, device=b.device)
    block = min(triton.next_power_of_2(heads * dim), _ELEMENTS)
    _delta_gates_kernel[(tokens, triton.cdiv(heads * dim, block))](
        a, b, a_log, dt_bias, decay, beta, a.stride(0), b.stride(0), scale, bound or 0.0, HEADS=heads, DIM=dim,
        BOUND=bound is not None, ROUNDED=rounded, BLOCK=block, num_warps=max(block // 256, 1), **launch.options(a.device),
    )  # fmt: skip
    return decay, beta
