"""The depthwise convolution along packed sequences, as a Triton kernel: tiles of one sequence's tokens by channels.

No sum crosses programs or threads, and none is fused with a product. So each number has the same bits however its sequence
is cut into pieces, and whatever else is in the batch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.launch import await_turn
from stoker.kernels.reference.recurrent import StateRows


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """The size of a tile: tokens of one sequence, and channels."""

    tokens: int
    channels: int
    num_warps: int


def launch_config(channels: int, *, decode: bool) -> LaunchConfig:
    """A row of 8192 channels makes 64 programs; a thread of a prompt's tile has 16 numbers."""
    width = min(triton.next_power_of_2(channels), 128)
    return LaunchConfig(1, width, 1) if decode else LaunchConfig(16, width, 4)


@triton.jit
def sequence_of_tile(starts_ptr, rows, halvings, tile, TOKENS: tl.constexpr):
    """The sequence whose tokens a tile takes. Sequence r has the tiles from ``starts[r] // TOKENS + r`` on, which are enough:
    between two of these there is one more than there are multiples of TOKENS between their first tokens."""
    row = tile * 0
    for i in range(halvings):
        further = row + (1 << (halvings - 1 - i))
        start = tl.load(starts_ptr + further, mask=further < rows, other=0)
        row = tl.where((further < rows) & (start // TOKENS + further <= tile), further, row)
    return row


@triton.jit
def _inputs(
    x_ptr, gate_ptr, state_ptr, place, column, inside, first, x_stride, gate_stride, channels, KEPT: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Those at ``place`` of a sequence, of which the last KEPT before its first token have negative ones."""
    new = tl.load(x_ptr + (first + place) * x_stride + column, mask=inside & (place >= 0), other=0.0)
    if GATED:
        gate = tl.load(gate_ptr + (first + place) * gate_stride + column, mask=inside & (place >= 0), other=0.0)
        new = (new.to(tl.float32) * gate.to(tl.float32)).to(new.dtype)
    old = tl.load(state_ptr + (KEPT + place) * channels + column, mask=inside & (place < 0), other=0.0)
    return tl.where(place >= 0, new, old)


@triton.jit(do_not_specialize=["rows", "halvings"], do_not_specialize_on_alignment=["slots_ptr", "starts_ptr"])
def _causal_conv_kernel(
    x_ptr,
    before_ptr,
    after_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    slots_ptr,
    starts_ptr,
    out_ptr,
    x_stride,
    before_stride,
    after_stride,
    slot_stride,
    channels,
    rows,
    halvings,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
    DECODE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_turn(DEPENDENT)
    KEPT: tl.constexpr = WIDTH - 1
    tile = tl.program_id(0).to(tl.int64)
    if DECODE:
        row = tile
        first, last, begin = row, row + 1, row * 0
    else:
        row = sequence_of_tile(starts_ptr, rows, halvings, tile, TOKENS)
        first, last = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
        begin = (tile - row - first // TOKENS) * TOKENS
        if begin >= last - first:
            return
    column = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    known = column < channels
    state_ptr += tl.load(slots_ptr + row) * slot_stride

    place = begin + tl.arange(0, TOKENS)[:, None]
    inside = known & (place < last - first)
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for j in tl.static_range(WIDTH):
        tap = tl.load(weight_ptr + column * WIDTH + j, mask=known, other=0.0).to(tl.float32)
        x = _inputs(
            x_ptr, before_ptr, state_ptr, place - KEPT + j, column, inside, first, x_stride, before_stride, channels,
            KEPT, GATED,
        )  # fmt: skip
        total += x.to(tl.float32) * tap
    if BIAS:
        total += tl.load(bias_ptr + column, mask=known, other=0.0).to(tl.float32)
    total = total.to(weight_ptr.dtype.element_ty).to(tl.float32)
    if SILU:
        total *= tl.sigmoid(total)
        total = total.to(weight_ptr.dtype.element_ty)
    if GATED:
        gate = tl.load(after_ptr + (first + place) * after_stride + column, mask=inside, other=0.0)
        total = total.to(out_ptr.dtype.element_ty).to(tl.float32) * gate.to(tl.float32)
    tl.store(out_ptr + (first + place) * channels + column, total, mask=inside)

    if begin == 0:  # the only tile that reads the state; what is written comes before what is still to be read
        for j in tl.static_range(KEPT):
            late = last - first - KEPT + j + tl.zeros([1, 1], tl.int64)
            newest = _inputs(
                x_ptr, before_ptr, state_ptr, late, column, known, first, x_stride, before_stride, channels, KEPT, GATED
            )  # fmt: skip
            tl.debug_barrier()  # every thread has read before one writes
            tl.store(state_ptr + j * channels + column, newest, mask=known)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    rows: StateRows,
    *,
    activation: Literal["silu"] | None = None,
    gates: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """As the reference. x and gates: [T, C], each token's channels contiguous; weight: [C, K]; state: [N, K - 1, C], each
    row contiguous.
    """
    tokens, channels = x.shape
    decode, count = rows.longest == 1, rows.slots.shape[0]
    before, after = (x, x) if gates is None else gates
    assert x.stride(1) == before.stride(1) == after.stride(1) == 1 and before.shape == after.shape == x.shape
    assert weight.is_contiguous() and state[0].is_contiguous() and state.dtype == x.dtype
    config = launch_config(channels, decode=decode)
    assert tokens == count if decode else weight.shape[1] <= config.tokens  # whose first tile alone reads the state
    out = (torch.empty if decode else torch.zeros)(tokens, channels, dtype=x.dtype, device=x.device)
    tiles = count if decode else tokens // config.tokens + count
    _causal_conv_kernel[(tiles, triton.cdiv(channels, config.channels))](
        x,
        before,
        after,
        weight,
        weight if bias is None else bias,
        state,
        rows.slots,
        rows.starts,
        out,
        x.stride(0),
        before.stride(0),
        after.stride(0),
        state.stride(0),
        channels,
        count,
        count.bit_length(),
        WIDTH=weight.shape[1],
        BIAS=bias is not None,
        SILU=activation == "silu",
        GATED=gates is not None,
        DECODE=decode,
        TOKENS=config.tokens,
        CHANNELS=config.channels,
        num_warps=config.num_warps,
        **launch.options(x.device, fused=False),
    )
    return out
