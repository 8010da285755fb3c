"""Norms over what several ranks share: each has some of the numbers, and their squares are added up over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.engine.layers.fused_mixers import Attention
from stoker.engine.parallel.tensor_parallel import TensorParallel
from stoker.kernels.reference.norm_rotary import Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNormedTogether(Attention):
    """Attention over some of the heads that are normed together."""

    parallel: TensorParallel

    @classmethod
    def of(cls, attention: Attention, parallel: TensorParallel) -> AttentionNormedTogether:
        given: dict[str, Any] = {f.name: getattr(attention, f.name) for f in fields(attention)}
        return cls(**given, parallel=parallel)

    def _normed(self, qkv: Tensor, query_norm: Norm, key_norm: Norm) -> Tensor:
        query, key, value = torch.split(qkv, self._widths, dim=1)
        inverse = _inverse_rms((query, key), (query_norm.eps, key_norm.eps), self.parallel)
        normed = (
            _times(x, of_x, norm) for x, of_x, norm in zip((query, key), inverse, (query_norm, key_norm), strict=True)
        )
        return torch.cat((*normed, value), dim=1)


def gated_rms_norm(
    parallel: TensorParallel,
    groups: int,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    gate_first: bool = False,
) -> Tensor:
    """``Ops.gated_rms_norm`` where several ranks share each of these groups. x, gate: [T, 1, D]; weight: [1, D]."""
    wide, factor = x.float(), F.silu(gate.float())
    if gate_first:
        wide = wide * factor
    squares = wide.new_zeros(groups, *wide.shape[:2])
    mine = parallel.rank * groups // parallel.size
    squares[mine] = wide.square().sum(-1)
    mean = parallel.add_up(squares)[mine] / (wide.shape[-1] * parallel.size // groups)
    normed = (wide * torch.rsqrt(mean + eps).unsqueeze(-1)).to(x.dtype)
    return (weight * normed if gate_first else weight * normed * factor).to(x.dtype)


def _inverse_rms(parts: Sequence[Tensor], eps: Sequence[float], parallel: TensorParallel) -> list[Tensor]:
    """1 / sqrt(mean of x^2 + eps) over the last dimension of all ranks' parts. parts: [T, D] each; returns fp32 [T, 1] each.

    What several ranks have counts for each of them, alike for all: this does not change a mean.
    """
    squares = torch.stack([part.float().square().sum(-1) for part in parts])
    counts = [part.shape[-1] * parallel.size for part in parts]
    sums = parallel.add_up(squares)
    return [torch.rsqrt(of_x / n + e).unsqueeze(-1) for of_x, n, e in zip(sums, counts, eps, strict=True)]


def _times(x: Tensor, inverse: Tensor, norm: Norm) -> Tensor:
    """An RMS norm, rounded as ``Ops.rms_norm`` rounds it."""
    normed = x.float() * inverse
    if norm.offset:
        return (normed * (1.0 + norm.weight.float())).to(x.dtype)
    return (norm.weight * normed.to(x.dtype)).to(x.dtype)
