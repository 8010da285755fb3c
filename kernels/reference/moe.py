"""The experts of a mixture-of-experts layer, as plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels.reference.fp8 import dequantise_rows
from stoker.kernels.reference.lora import AdapterRows, LoraTable, expert_slots, lora
from stoker.kernels.reference.norm_rotary import ACTIVATIONS, Activation


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The activation of experts.

    ``act(g) * u``, as SwiGLU and GeGLU (Shazeer, 2020); or, as in gpt-oss, ``g * sigmoid(alpha * g) * (u + offset)`` with g
    at most ``limit`` and u within ``-limit`` to ``limit``; or, where it is not ``gated``, ``relu(u) ** 2`` (So et al., 2021), as
    in Nemotron-H. interleaved: gate and up alternate in the projection; otherwise the gate's half comes first.
    """

    gated: bool = True
    interleaved: bool = False
    act: Activation = "silu"
    alpha: float = 1.0
    limit: float = float("inf")
    offset: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether it is ``act(g) * u``."""
        return self == Gate(interleaved=self.interleaved, act=self.act)

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2 * I], or [T, I] without a gate; returns [T, I]."""
        if not self.gated:
            return F.relu(gate_up).square()
        gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if self.interleaved else gate_up.chunk(2, dim=-1)
        if self.plain:
            return ACTIVATIONS[self.act](gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + self.offset) * (gate * torch.sigmoid(gate * self.alpha))


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """Adapters over the two projections of experts, which are applied one table after the other."""

    gate_up: Sequence[LoraTable]
    down: Sequence[LoraTable]
    slots: Tensor  # int64 [T]

    def rows(self, order: Tensor, expert_ids: Tensor, num_experts: int) -> AdapterRows:
        """The adapter rows of P pairs of a token and one of its experts, in this order. expert_ids: int64 [T, K]."""
        slots = self.slots.index_select(0, order // expert_ids.shape[1])
        return AdapterRows(expert_slots(slots, expert_ids.flatten().index_select(0, order), num_experts))


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
) -> Tensor:
    """Each token through its experts, ``sum over k of weight[k] * down(gate(gate_up(x)))``, and what is added to that.

    The whole is ``residual + scale * (sum + sigmoid(x @ shared_gate.T) * shared)``, of which all but the sum is optional.

    x: [T, D]; expert_ids: int64 [T, K], those of a token all different; expert_weights: [T, K]; gate_up: [E, 2 * I, D], or
    [E, I, D] without a gate, and down: [E, D, I], of any strides; biases: [E, 2 * I] and [E, D]; weigh_input: weights
    multiply the experts' input, as in Llama 4, and not their output; adapters: applied to the output of each projection;
    scales: fp32 [E, 2 * I] and [E, D], of weights in fp8 (``quantise_rows``); groups: of ``Routing``, for implementations
    that use them; shared, residual: as ``x``; shared_gate: [1, D]; in_place: nobody reads the residual afterwards, so the
    result may take its place. Returns [T, D] in the dtype of ``x``. Without adapters nothing waits for the device. Raises
    ``RuntimeError`` where a row of a weight is not a multiple of 16 bytes.
    """
    per_token = expert_ids.shape[1]
    ids, order = expert_ids.flatten().sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(gate_up.shape[0], device=x.device), right=True).int()
    rows = None if adapters is None else adapters.rows(order, expert_ids, gate_up.shape[0])

    if scales is not None:
        gate_up, down = (dequantise_rows(*given, x.dtype) for given in zip((gate_up, down), scales, strict=True))

    def project(x: Tensor, weight: Tensor, bias: Tensor | None, tables: Sequence[LoraTable]) -> Tensor:
        out = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
        if bias is not None:
            out = out + bias[ids]
        if rows is not None:
            for table in tables:
                lora(x, out, table, rows)
        return out

    tables = ((), ()) if adapters is None else (adapters.gate_up, adapters.down)
    given = x[order // per_token]
    if weigh_input:
        given = (given * expert_weights.flatten()[order, None]).to(x.dtype)
    hidden = gate(project(given, gate_up, gate_up_bias, tables[0]))
    out = project(hidden, down, down_bias, tables[1])
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    chosen = out[places].view(*expert_ids.shape, -1)
    if not weigh_input:
        chosen = chosen * expert_weights[..., None]
    total = chosen.sum(1, dtype=torch.float32).to(x.dtype)
    if shared is not None:
        total += shared if shared_gate is None else F.linear(x, shared_gate).sigmoid() * shared
    return total if residual is None else torch.add(residual, total, alpha=scale, out=residual if in_place else None)
