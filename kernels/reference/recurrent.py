"""Layers that keep a state of fixed size for each sequence, as plain torch: convolution, gated delta rule, Mamba-2.

A batch is packed: the tokens of all sequences lie one after the other. Each sequence's state is a row of a state tensor. It
is read before the sequence's first token here and written after its last, so a sequence may come in any pieces. In a
decode step, the states must have been there before the launch of the last kernel, which made the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPS = 1e-6  # of query and key, under the root


@dataclass(frozen=True, slots=True)
class StateRows:
    """Which tokens of a packed batch belong to which sequence, and where each sequence's state is.

    Tokens from ``starts[R]`` on belong to no sequence; their results are 0. Rows share a slot only where nobody reads it, as
    rows of padding do.
    """

    slots: Tensor  # int64 [R], row of the state tensors
    starts: Tensor  # int64 [R + 1], tokens of sequence r are starts[r] : starts[r + 1]; there may be none
    longest: int  # most tokens of one sequence; 1 is a decode step: R tokens, one for each row

    def padded(self, x: Tensor) -> Tensor:
        """From [T, ...] to [R, longest, ...], with zeros beyond a sequence's end."""
        if self.longest == 1:
            return x.unsqueeze(1)
        at = self.starts[:-1, None] + torch.arange(self.longest, device=x.device)
        beyond = (at >= self.starts[1:, None]).view(*at.shape, *(1 for _ in x.shape[1:]))
        return x[at.clamp_(max=x.shape[0] - 1)].masked_fill_(beyond, 0)

    def places(self, tokens: int) -> tuple[Tensor, Tensor]:
        """(each token's row, its place among the row's tokens), with any values where a token belongs to no row."""
        at = torch.arange(tokens, device=self.starts.device)
        row = torch.searchsorted(self.starts[1:], at, right=True).clamp_(max=self.slots.shape[0] - 1)
        return row, at - self.starts[row]

    def packed(self, y: Tensor, tokens: int) -> Tensor:
        """From [R, longest, ...] to [tokens, ...]."""
        if self.longest == 1:
            return y.squeeze(1)
        row, place = self.places(tokens)
        return self.without_nobodys(y[row, place.clamp_(max=self.longest - 1)])

    def without_nobodys(self, out: Tensor) -> Tensor:
        """``out``, [T, ...], with 0 where a token belongs to no row."""
        if self.longest == 1:
            return out
        nobodys = torch.arange(out.shape[0], device=out.device) >= self.starts[-1]
        return out.masked_fill_(nobodys.view(-1, *(1 for _ in out.shape[1:])), 0)


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
    """``act(bias[c] + sum over j of weight[c, j] * x[t - K + 1 + j, c])`` along each sequence: a depthwise convolution.

    x: [T, C]; weight: [C, K]; bias: [C]; state: [N, K - 1, C], each sequence's last inputs, the oldest first, in the dtype
    of ``x``, changed in place. gates: factors of ``x`` and of the result, [T, C] each. Sums are in fp32, and rounded to the
    weight's dtype before the activation. Returns [T, C] in the dtype of ``x``.
    """
    x = x if gates is None else x * gates[0]
    kept, taps = weight.shape[1] - 1, weight.float().unbind(1)
    if rows.longest == 1:
        window = torch.cat((state[rows.slots], x.unsqueeze(1)), dim=1)
        state[rows.slots] = window[:, 1:]
        shifted = window.unbind(1)
    else:
        source = torch.cat((state[rows.slots].flatten(0, 1), x))

        def inputs(row: Tensor, place: Tensor) -> Tensor:
            """Inputs of a sequence; those before its first token have negative places."""
            of_state, of_batch = row * kept + kept + place, rows.starts[row] + place + rows.slots.numel() * kept
            return source[torch.where(place < 0, of_state, of_batch)]

        row, place = rows.places(x.shape[0])
        shifted = tuple(inputs(row, place - kept + j) for j in range(kept + 1))
        last = (rows.starts[1:] - rows.starts[:-1])[:, None]
        of_rows = torch.arange(len(rows.slots), device=x.device)[:, None]
        state[rows.slots] = inputs(of_rows, last - kept + torch.arange(kept, device=x.device))
    out = shifted[0].float() * taps[0]
    for tap, one in zip(taps[1:], shifted[1:], strict=True):
        out.addcmul_(one.float(), tap)
    if bias is not None:
        out += bias
    out = out.to(weight.dtype)
    if activation == "silu":
        out = F.silu(out, inplace=True)
    out = out.to(x.dtype)
    return rows.without_nobodys(out if gates is None else out * gates[1])


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
    """The gated delta rule (Yang et al., 2024), token after token, in fp32: with S the state of a head and the key k,
    ``S = exp(decay) S; S = S + k (beta (v - k^T S))^T; out = S^T q / sqrt(Dk)``.

    query, key: [T, Hk, Dk]; value: [T, H, Dv], head h with the key head h // (H / Hk); decay: fp32, 0 at most, [T, H], or [T, H,
    Dk] for each row of S by itself (Kimi Delta Attention, 2025); beta: [T, H]; state: fp32 [N, H, Dk, Dv], changed in place.
    normalise: query and key are divided by their length. Returns [T, H, Dv] in the dtype of ``query``.
    """
    q, k, v, strength, kept = (rows.padded(t).float() for t in (query, key, value, beta, decay))
    if normalise:
        q, k = (t * (t.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for t in (q, k))
    q = q * query.shape[-1] ** -0.5
    if value.shape[1] != key.shape[1]:
        q, k = (t.repeat_interleave(value.shape[1] // key.shape[1], dim=2) for t in (q, k))
    q, k, v = (t.unsqueeze(-2) for t in (q, k, v))
    strength, kept = strength[..., None, None], kept.exp()[..., None]
    kept = kept if decay.dim() == 3 else kept.unsqueeze(-1)
    s, out = state[rows.slots], torch.empty_like(v, memory_format=torch.contiguous_format)
    for t in range(rows.longest):  # after a sequence's end nothing decays and the key is 0: its state stays
        s.mul_(kept[:, t])
        change = (v[:, t] - k[:, t] @ s).mul_(strength[:, t])
        s.addcmul_(k[:, t].mT, change)
        out[:, t] = q[:, t] @ s
    state[rows.slots] = s
    return rows.packed(out.squeeze(-2).to(query.dtype), query.shape[0])


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
    """Mamba-2's scan (Dao and Gu, 2024), token after token, in fp32: with S the state of a head and d its step,
    ``S = exp(d A) S + d x B^T; y = S C + D x``.

    The step is ``clamp(softplus(dt + dt_bias), *dt_limit)``, where each operation rounds to the dtype of ``dt``.
    x: [T, H, P]; dt: [T, H]; A: fp32 [H], negative, or with ``a_log`` the logarithm of ``-A``, in any dtype; B, C: [T, G, S],
    head h with the group h // (H / G); D, dt_bias: [H]; state: fp32 [N, H, P, S], changed in place. In Mamba (Gu and Dao, 2023)
    each row of S has a step of its own, and each number a rate: dt: [T, H, P]; A: [H, P, S]; D, dt_bias: [H, P]. Returns [T, H, P]
    in the dtype of ``x``.
    """
    A = decay_rates(A, a_log)
    wide, b, c, step = (rows.padded(t).float() for t in (x, B, C, steps(dt, dt_bias, dt_limit)))
    if B.shape[1] != x.shape[1]:
        b, c = (t.repeat_interleave(x.shape[1] // B.shape[1], dim=2) for t in (b, c))
    b, c, step = b.unsqueeze(-2), c.unsqueeze(-1), step[..., None] if dt.dim() == 3 else step[..., None, None]
    A = A if dt.dim() == 3 else A[:, None, None]
    added, s = wide.unsqueeze(-1) * step, state[rows.slots]
    out = torch.empty_like(wide, memory_format=torch.contiguous_format)
    for t in range(rows.longest):  # after a sequence's end the step is 0: its state stays
        s.mul_((step[:, t] * A).exp_()).addcmul_(added[:, t], b[:, t])
        out[:, t] = (s @ c[:, t]).squeeze(-1)
    state[rows.slots] = s
    if D is not None:
        out.addcmul_(wide, D.float() if D.dim() == 2 else D.float().unsqueeze(-1))
    return rows.packed(out.to(x.dtype), x.shape[0])


def decay_rates(A: Tensor, a_log: bool) -> Tensor:
    """``A`` of ``selective_scan`` as a rate, in fp32."""
    return A.float().exp().neg_() if a_log else A


def steps(dt: Tensor, dt_bias: Tensor | None, dt_limit: tuple[float, float]) -> Tensor:
    """How far each token steps: see ``selective_scan``."""
    return F.softplus(dt if dt_bias is None else dt + dt_bias.to(dt.dtype)).clamp(*dt_limit)
