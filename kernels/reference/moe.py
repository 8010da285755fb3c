"""The experts of a mixture-of-experts layer, as plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Gate:
    """``g * sigmoid(alpha * g) * (u + offset)`` with g at most ``limit`` and u within ``-limit`` to ``limit``.

    The defaults are SwiGLU (Shazeer, 2020); gpt-oss has the others. interleaved: gate and up alternate along the
    projection, instead of the gate's half standing before the up's.
    """

    interleaved: bool = False
    alpha: float = 1.0
    limit: float = float("inf")
    offset: float = 0.0

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2 * I]; returns [T, I]."""
        gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if self.interleaved else gate_up.chunk(2, dim=-1)
        if self == Gate(interleaved=self.interleaved):
            return F.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + self.offset) * (gate * torch.sigmoid(gate * self.alpha))


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
) -> Tensor:
    """Each token through its experts, ``sum over k of weight[k] * down(gate(gate_up(x)))``.

    x: [T, D]; expert_ids: int64 [T, K], those of a token all different; expert_weights: [T, K]; gate_up: [E, 2 * I, D]
    and down: [E, D, I], of any strides; biases: [E, 2 * I] and [E, D]. Returns [T, D] in the dtype of ``x``. Nothing
    waits for the device. Raises ``RuntimeError`` where a row of a weight is not a multiple of 16 bytes.
    """
    per_token = expert_ids.shape[1]
    ids, order = expert_ids.flatten().sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(gate_up.shape[0], device=x.device), right=True).int()
    hidden = F.grouped_mm(x[order // per_token], gate_up.transpose(1, 2), offs=ends)
    if gate_up_bias is not None:
        hidden = hidden + gate_up_bias[ids]
    out = F.grouped_mm(gate(hidden), down.transpose(1, 2), offs=ends)
    if down_bias is not None:
        out = out + down_bias[ids]
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    chosen = out[places].view(*expert_ids.shape, -1)
    return (chosen * expert_weights[..., None]).sum(1, dtype=torch.float32).to(x.dtype)
