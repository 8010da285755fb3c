"""The projections of fused layers, with their adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from stoker.engine.adapters.lora import Adapted
from stoker.kernels.ops import Ops
from stoker.kernels.reference.norm_rotary import Activation, Norm


def matrix_of(linear: Any) -> Tensor:
    """The weight of a linear, [N, D], also of one that holds it column by column (GPT-2)."""
    weight: Tensor = linear.weight
    return weight.t() if isinstance(linear, Conv1D) else weight


class Linears:
    """Linears that read the same input: one matmul where their weights lie side by side, else one each."""

    def __init__(
        self,
        ops: Ops,
        paths: tuple[str, ...],
        linears: Sequence[Any],
        lora: Adapted,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> None:
        self.ops = ops
        self.paths = paths
        self.lora = lora
        self.linears = linears
        self.weight = weight
        self.bias = bias
        self.row_scales: Tensor | None = None  # of a weight in fp8

    def __call__(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        gated: Activation | None = None,
        residual: Tensor | None = None,
        scale: float = 1.0,
        in_place: bool = False,
    ) -> Tensor:
        """As ``Ops.linear``; adapters come after the projection and before all else."""
        rows = self.lora.rows
        if self.weight is not None and rows is None:
            options = {"norm": norm, "gated": gated, "residual": residual, "scale": scale, "in_place": in_place}
            return self.ops.linear(x, self.weight, self.bias, row_scales=self.row_scales, **options)
        x = x if norm is None else self.ops.rms_norm(x, *norm)
        # Where adapters only add, they may add to the residual directly.
        onto = residual if in_place and scale == 1.0 and gated is None and self.lora.layers.only_add else None
        if self.weight is not None:
            assert rows is not None
            options = {"residual": onto, "in_place": onto is not None, "row_scales": self.row_scales}
            out = self.lora.project(x, self.weight, self.bias, rows, gated, **options)
        else:
            onto = None
            out = torch.cat([self.ops.linear(x, matrix_of(m), m.bias) for m in self.linears], dim=-1)
            if rows is not None:
                out = self.lora.apply(x, out, rows, gated, settled=True)
            elif gated is not None:
                out = self.ops.act_mul(out, gated)
        if residual is None or onto is not None:
            return out
        if scale != 1.0:  # rounds as the operation does, so that a row without adapters has the same bits
            out = out * scale
        return torch.add(residual, out, out=residual if in_place else None)
