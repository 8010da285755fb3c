"""The gated delta rule and Mamba-2's scan on a CPU: a few products for each 64 tokens of a prompt instead of for each one.

Sequences run side by side, the longest first, so those that still have tokens are always the first ones. Decode steps
among them are left to the reference. Within a chunk, exponents are differences of running sums of decays. They are taken
in fp64: in fp32, small differences between large sums would lose their digits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stoker.kernels.reference import recurrent as reference
from stoker.kernels.reference.recurrent import NORM_EPS, StateRows, decay_rates, steps

_CHUNK = 64


def _by_chunks(
    alone: Callable[[Tensor, StateRows], Tensor],
    chunk: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    out: Tensor,
    state: Tensor,
    rows: StateRows,
) -> Tensor:
    """Fill ``out``, [T, ...], which is 0. inputs: [T, H, ...].

    alone: computes the results of some tokens, each a sequence by itself. chunk: computes those of [A, H, size, ...] of
    each input, in fp32 and 0 beyond a sequence's end, and updates states, [A, ...].
    """
    lengths = rows.starts.diff().tolist()
    order = sorted((r for r, length in enumerate(lengths) if length > 1), key=lambda r: -lengths[r])
    single = rows.starts.new_tensor([r for r, length in enumerate(lengths) if length == 1])
    if len(single):
        tokens = rows.starts[single]
        out[tokens] = alone(tokens, StateRows(rows.slots[single], torch.arange(len(single) + 1, device=out.device), 1))
    longer = rows.starts.new_tensor(order)
    slots, starts, ends = rows.slots[longer], rows.starts[longer], rows.starts[longer + 1]
    states = state[slots]
    for first in range(0, max(lengths), _CHUNK):
        active = sum(lengths[r] > first for r in order)
        at = torch.arange(first, min(first + _CHUNK, max(lengths)), device=out.device) + starts[:active, None]
        own = at < ends[:active, None]
        at.clamp_(max=len(out) - 1)
        parts = [t[at].float() for t in inputs]
        for part in parts:
            part[~own] = 0.0
        took = chunk(*(part.transpose(1, 2) for part in parts), states[:active])
        out[at[own]] = took.transpose(1, 2)[own].to(out.dtype)
    state[slots] = states
    return out


def _decays(decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What decay leaves, from its logarithms, [A, H, size].

    Of each token's state at each later token, [A, H, size, size]; of the state before the chunk at each token,
    [A, H, size, 1]; of each token's state at the chunk's end, [A, H, size, 1].
    """
    total = decay.double().cumsum(-1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).float().tril_().exp_().tril_()
    return between, total.float().exp_().unsqueeze(-1), between[..., -1, :].unsqueeze(-1)


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
) -> Tensor:
    """As the reference, to rounding.

    By the UT transform of "Parallelizing Linear Transformers with the Delta Rule" (Yang et al., 2024): what a chunk's
    tokens change is the solution of a triangular system. Where each row of a state has a decay of its own, products of a chunk
    take as long as its tokens one after the other.
    """
    if rows.longest == 1 or decay.dim() == 3:
        return reference.gated_delta_rule(query, key, value, decay, beta, state, rows, normalise=normalise)
    inputs = query, key, value, decay, beta
    scale, shared = query.shape[-1] ** -0.5, value.shape[1] // key.shape[1]

    def alone(tokens: Tensor, at: StateRows) -> Tensor:
        q, k, v, kept, strength = (t[tokens] for t in inputs)
        return reference.gated_delta_rule(q, k, v, kept, strength, state, at, normalise=normalise)

    def chunk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, s: Tensor) -> Tensor:
        if normalise:
            q, k = (t * (t.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for t in (q, k))
        among_keys, with_query = k @ k.mT, (q * scale) @ k.mT
        q, k, among_keys, with_query = (_repeat(t, shared) for t in (q * scale, k, among_keys, with_query))
        between, before, after = _decays(decay)
        strength = beta.unsqueeze(-1)
        system = among_keys * between * strength  # its diagonal is taken to be 1
        change = strength * (v - before * (k @ s))
        change = torch.linalg.solve_triangular(system, change, upper=False, unitriangular=True)
        out: Tensor = before * (q @ s) + (with_query * between) @ change
        s.mul_(before[..., -1:, :]).add_((k * after).mT @ change)
        return out

    out = value.new_zeros(value.shape, dtype=query.dtype)
    return _by_chunks(alone, chunk, inputs, out, state, rows)


def _repeat(heads: Tensor, times: int) -> Tensor:
    """Repeat each head so many times: [A, H, ...]."""
    return heads.repeat_interleave(times, dim=1) if times > 1 else heads


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
) -> Tensor:
    """As the reference, to rounding: the chunks of Mamba-2 (Dao and Gu, 2024)."""
    A = decay_rates(A, a_log)
    if rows.longest == 1 or dt.dim() == 3:
        return reference.selective_scan(x, dt, A, B, C, D, state, rows, dt_bias=dt_bias, dt_limit=dt_limit)

    def alone(tokens: Tensor, at: StateRows) -> Tensor:
        given = (x[tokens], dt[tokens], A, B[tokens], C[tokens], D, state, at)
        return reference.selective_scan(*given, dt_bias=dt_bias, dt_limit=dt_limit)

    shared = x.shape[1] // B.shape[1]

    def chunk(x: Tensor, step: Tensor, b: Tensor, c: Tensor, s: Tensor) -> Tensor:
        between, before, after = _decays(step * A[:, None])
        added = x * step.unsqueeze(-1)
        out = (_repeat(c @ b.mT, shared) * between) @ added
        out += before * (_repeat(c, shared) @ s.mT)
        s.mul_(before[..., -1:, :]).add_((added * after).mT @ _repeat(b, shared))
        return out if D is None else out.addcmul_(x, D.float()[:, None, None])

    out = x.new_zeros(x.shape)
    return _by_chunks(alone, chunk, (x, steps(dt, dt_bias, dt_limit), B, C), out, state, rows)
