"""The experts of a mixture-of-experts layer, for a GPU: a grouped product over the model's own 3-D weights.

Pairs of token and expert are sorted by expert on the device, in a number of programs that depends on the number of pairs
alone. Nothing waits for the host, so it can be captured. There are four kernels: the sort, where the router has not done
it; gate and up with the activation; down; and the weighted sum with all that is added to it. With adapters, the activation
is an operation of its own, which comes after those of gate and up.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.fp8 import as_dtype
from stoker.kernels.grouping import group_of_tile, most_tiles, order_by_group, rows_per_tile
from stoker.kernels.launch import await_turn
from stoker.kernels.lora.lora import lora
from stoker.kernels.norm_rotary import act_times
from stoker.kernels.reference.moe import ExpertAdapters, Gate

_INVARIANT_ROWS = 64


@triton.jit
def _gate(gate, up, alpha, limit, offset, ACT: tl.constexpr, CLAMPED: tl.constexpr, dtype: tl.constexpr):
    """``Gate`` in fp32, rounded to ``dtype`` where separate operations would round. ACT: of a plain one, else None."""
    if ACT is not None:
        return act_times(gate, up, dtype, ACT)
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if CLAMPED:  # what is no number stays that
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return (gate * tl.sigmoid(gate * alpha)).to(dtype).to(tl.float32) * (up + offset).to(dtype).to(tl.float32)


@triton.jit
def _grouped_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    scales_ptr,
    order_ptr,
    starts_ptr,
    weights_ptr,
    out_ptr,
    expert_stride,
    row_stride,
    depth_stride,
    experts,
    width,
    depth,
    per_token,
    alpha,
    limit,
    offset,
    FIRST: tl.constexpr,
    GATED: tl.constexpr,
    IN_ORDER: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IN_HALVES: tl.constexpr,
    WEIGHED: tl.constexpr,
    ACT: tl.constexpr,
    CLAMPED: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A tile of one expert's pairs by columns of its weight.

    FIRST: rows of ``x`` are tokens, those of the result pairs in order, [S, width], after the activation, with GATED of a
    weight twice as wide. Else rows of ``x`` are pairs in order, and the result goes back to the pairs' own places but with
    IN_ORDER. WEIGHED: by the pairs' weights, as if ``x`` were.
    """
    await_turn(DEPENDENT)
    dtype = out_ptr.dtype.element_ty
    expert, first, end = group_of_tile(starts_ptr, experts, tl.program_id(1), EXPERTS, BLOCK_M)
    if expert >= experts:
        return
    places = first + tl.arange(0, BLOCK_M)
    real = places < end
    pairs = tl.load(order_ptr + places, mask=real, other=0).to(tl.int64)
    HALF: tl.constexpr = BLOCK_N // 2
    number = tl.arange(0, BLOCK_N)
    columns = tl.program_id(0) * BLOCK_N + number
    if GATED:  # of a tile, columns of gate and up alternate, or where neighbours are read together stand in halves
        of_up = number // HALF if IN_HALVES else number % 2
        of_width = tl.program_id(0) * HALF + (number % HALF if IN_HALVES else number // 2)
        weight_rows = columns if INTERLEAVED else of_up * width + of_width
        inside = columns < 2 * width if INTERLEAVED else of_width < width
    else:
        weight_rows = columns
        inside = columns < width
    x_rows = pairs // per_token if FIRST else places.to(tl.int64)
    x_tile = x_ptr + x_rows[:, None] * depth
    weight_tile = weight_ptr + expert.to(tl.int64) * expert_stride + weight_rows.to(tl.int64)[None, :] * row_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_tile + at[None, :], mask=real[:, None] & (at < depth)[None, :], other=0.0)
        w = tl.load(
            weight_tile + at[:, None].to(tl.int64) * depth_stride,
            mask=inside[None, :] & (at < depth)[:, None],
            other=0.0,
        )
        total = tl.dot(x, as_dtype(w, x.dtype), total, input_precision="ieee")
    full_width = 2 * width if GATED else width
    if SCALED:
        scales = tl.load(scales_ptr + expert.to(tl.int64) * full_width + weight_rows, mask=inside, other=0.0)
        total *= scales[None, :]
    if WEIGHED:
        total *= tl.load(weights_ptr + pairs, mask=real, other=0.0).to(tl.float32)[:, None]
    if BIAS:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * full_width + weight_rows, mask=inside, other=0.0)
        total += bias.to(tl.float32)[None, :]
    if GATED:
        if IN_HALVES:
            total = tl.permute(tl.reshape(total, (BLOCK_M, 2, HALF)), (0, 2, 1))
        gate, up = tl.split(tl.reshape(total, (BLOCK_M, HALF, 2)))
        total = _gate(gate, up, alpha, limit, offset, ACT, CLAMPED, dtype)
        columns = tl.program_id(0) * HALF + tl.arange(0, HALF)
    elif FIRST:
        total = total.to(dtype).to(tl.float32)
        total = tl.where(total < 0.0, 0.0, total * total)  # what is no number stays that
    out_rows = places.to(tl.int64) if FIRST or IN_ORDER else pairs
    out_at = out_rows[:, None] * width + columns[None, :]
    tl.store(out_ptr + out_at, total, mask=real[:, None] & (columns < width)[None, :])


@triton.jit
def _weighted_sum_kernel(
    pairs_ptr,
    weights_ptr,
    x_ptr,
    shared_ptr,
    shared_gate_ptr,
    residual_ptr,
    out_ptr,
    shared_stride,
    residual_stride,
    width,
    scale,
    PER_TOKEN: tl.constexpr,
    WEIGHED: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_GATE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """It rounds where the reference does. The residual may be where the result goes."""
    await_turn(DEPENDENT)
    dtype = out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(PER_TOKEN):
        pair = token * PER_TOKEN + k
        row = tl.load(pairs_ptr + pair * width + at, mask=inside, other=0.0).to(tl.float32)
        if WEIGHED:
            row *= tl.load(weights_ptr + pair).to(tl.float32)
        total += row
    if SHARED:
        shared = tl.load(shared_ptr + token * shared_stride + at, mask=inside, other=0.0).to(tl.float32)
        if SHARED_GATE:
            products = tl.zeros((BLOCK,), tl.float32)  # of the whole token, in each of its programs
            for start in range(0, width, BLOCK):
                of = start + tl.arange(0, BLOCK)
                x = tl.load(x_ptr + token * width + of, mask=of < width, other=0.0).to(tl.float32)
                products += x * tl.load(shared_gate_ptr + of, mask=of < width, other=0.0).to(tl.float32)
            factor = tl.sigmoid(tl.sum(products, axis=0).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
            shared = (factor * shared).to(dtype).to(tl.float32)
        total = total.to(dtype).to(tl.float32) + shared
    if RESIDUAL:
        residual = tl.load(residual_ptr + token * residual_stride + at, mask=inside, other=0.0).to(tl.float32)
        total = (total.to(dtype).to(tl.float32) * scale).to(dtype).to(tl.float32) + residual
    tl.store(out_ptr + token * width + at, total, mask=inside)


def _tile(pairs: int, experts: int, width: int, device: torch.device) -> tuple[int, int]:
    """Rows and columns of a tile: narrow while there are few pairs, so that all multiprocessors read."""
    rows = rows_per_tile(pairs, experts)
    tiles = most_tiles(pairs, experts, rows) * triton.cdiv(width, 128)
    return rows, 64 if tiles < 2 * launch.multiprocessors(device) else 128


def _stages(rows: int, columns: int, depth: int, itemsize: int, device: torch.device) -> int:
    """Stages of the compiler's pipeline: one more than the tiles of the depth in flight, of which there are as many as fit."""
    room = launch.shared_memory(device) - launch.PROGRAM_SHARED
    return min(3 if rows == 128 else 4, 1 + room // ((rows + columns) * depth * itemsize))


def experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    gate: Gate,
    weigh_input: bool = False,
    adapters: ExpertAdapters | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    groups: tuple[Tensor, Tensor] | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
    in_place: bool = False,
    deterministic: bool = False,
) -> Tensor:
    """As the reference's. x: [T, D]; expert_ids, expert_weights: [T, K]; gate_up: [E, 2 * I, D]; down: [E, D, I].

    deterministic: all tiles have one shape, so that a token without an adapter has the same bits in any batch.
    """
    x, expert_ids, expert_weights = (t.contiguous() for t in (x, expert_ids, expert_weights))
    assert all(t is None or t.is_contiguous() for t in (gate_up_bias, down_bias, *(scales or ())))
    tokens, per_token = expert_ids.shape
    pairs, num_experts = expert_ids.numel(), gate_up.shape[0]
    rows, columns = (_INVARIANT_ROWS, 128) if deterministic else _tile(pairs, num_experts, down.shape[1], x.device)
    if x.dtype == torch.float32:  # on no tensor core, wider tiles are more than there are registers
        columns = 64
    block_k = (256 if rows < 64 else 128) // x.dtype.itemsize
    stages = _stages(rows, columns, block_k, x.dtype.itemsize, x.device)
    order, starts = order_by_group(expert_ids, num_experts) if groups is None else groups
    options = {"num_warps": 4} | launch.options(x.device)

    projections = (gate_up, gate_up_bias), (down, down_bias)

    def multiply(x: Tensor, number: int, first: bool, in_order: bool = False) -> Tensor:
        (weight, bias), row_scales = projections[number], None if scales is None else scales[number]
        full_width, depth = weight.shape[1:]
        gated = first and gate.gated
        width = full_width // 2 if gated else full_width
        out = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
        # Columns vary first: programs of one expert run near each other, and share its weight in cache.
        _grouped_kernel[(triton.cdiv(full_width, columns), most_tiles(pairs, num_experts, rows))](
            x,
            weight,
            x if bias is None else bias,
            x if row_scales is None else row_scales,
            order,
            starts,
            expert_weights,
            out,
            *weight.stride(),
            num_experts,
            width,
            depth,
            per_token,
            gate.alpha,
            gate.limit,
            gate.offset,
            FIRST=first,
            GATED=gated,
            IN_ORDER=in_order,
            INTERLEAVED=gate.interleaved,
            IN_HALVES=gated and weight.stride(2) != 1 and not gate.interleaved,
            WEIGHED=first and weigh_input,
            ACT=gate.act if gate.plain else None,
            CLAMPED=gate.limit != float("inf"),
            BIAS=bias is not None,
            SCALED=row_scales is not None,
            EXPERTS=triton.next_power_of_2(num_experts),
            BLOCK_M=rows,
            BLOCK_N=columns,
            BLOCK_K=block_k,
            num_stages=stages,
            **(options | {"num_warps": 8 if rows == 128 else 4}),
        )
        return out

    if adapters is None:
        chosen = multiply(multiply(x, 0, True), 1, False)
    else:  # pairs stay in order, where those of one expert and slot are near each other
        of_pairs = adapters.rows(order, expert_ids, num_experts)
        hidden = x.index_select(0, order // per_token)
        if weigh_input:
            hidden = (hidden * expert_weights.flatten().index_select(0, order)[:, None]).to(x.dtype)
        for number, tables in enumerate((adapters.gate_up, adapters.down)):
            projected = multiply(hidden, number, False, in_order=True)
            for table in tables:
                lora(hidden, projected, table, of_pairs)
            hidden = projected if number else gate(projected).contiguous()
        chosen = torch.empty_like(hidden).index_copy_(0, order.long(), hidden)
    in_place = in_place and residual is not None and residual.is_contiguous()
    out = residual if residual is not None and in_place else torch.empty_like(x)
    assert all(t is None or t.stride(1) == 1 for t in (shared, shared_gate, residual))
    _weighted_sum_kernel[(tokens, triton.cdiv(x.shape[1], 1024))](
        chosen,
        expert_weights,
        x,
        x if shared is None else shared,
        x if shared_gate is None else shared_gate,
        x if residual is None else residual,
        out,
        0 if shared is None else shared.stride(0),
        0 if residual is None else residual.stride(0),
        x.shape[1],
        scale,
        PER_TOKEN=per_token,
        WEIGHED=not weigh_input,
        SHARED=shared is not None,
        SHARED_GATE=shared_gate is not None,
        RESIDUAL=residual is not None,
        BLOCK=1024,
        **options,
    )
    return out
