"""Random projections with the norm, activation and residual around them, and their results in fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN
from triton_oracle import randn

from stoker.kernels.linear import measured as linear_measured
from stoker.kernels.reference.norm_rotary import Activation, Norm

EPS = 1e-5
HF_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


def expected_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = EPS,
    offset: bool = False,
    centred: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    factor = weight.double() + offset
    if not centred:
        return F.rms_norm(x.double(), weight.shape, factor, eps)
    return F.layer_norm(x.double(), weight.shape, factor, None if bias is None else bias.double(), eps)


def expected_linear(x: Tensor, weight: Tensor, bias: Tensor | None, norm, gated, residual: Tensor | None, scale: float):
    out = x.double() if norm is None else expected_norm(x, *norm)
    out = F.linear(out, weight.double(), None if bias is None else bias.double())
    if gated is not None:
        gate, up = out.chunk(2, -1)
        out = ACT2FN[HF_NAMES[gated]](gate) * up
    return out if residual is None else scale * out + residual.double()


GATED: dict[str, Activation] = {"g": "silu", "t": "gelu_tanh", "e": "gelu"}


def make_linear(tokens: int, width: int, depth: int, options: str, dtype: torch.dtype):
    """options: letters of bias, norm, or norm with Offset or Centred, residual, scaled residual, gated by SiLU, Tanh GELU, or
    Erf GELU."""
    gated = next((act for letter, act in GATED.items() if letter in options), None)
    scaled = "s" in options
    has_residual = scaled or "r" in options
    centred = "c" in options
    norm = Norm(randn(depth, dtype=dtype), EPS, "o" in options, centred, randn(depth, dtype=dtype) if centred else None)
    wide = randn(tokens, depth + 3, dtype=dtype)
    x = wide[:, :depth] if has_residual else randn(tokens, depth, dtype=dtype)  # rows that lie apart, now and then
    return {
        "x": x,
        "weight": randn(width, depth, dtype=dtype, scale=depth**-0.5),
        "bias": randn(width, dtype=dtype) if "b" in options else None,
        "norm": norm if set("noc") & set(options) else None,
        "gated": gated,
        "residual": randn(tokens, width // 2 if gated else width, dtype=dtype) if has_residual else None,
        "scale": 0.3 if scaled else 1.0,
    }


def pretend_times(monkeypatch: pytest.MonkeyPatch, times: Mapping[str, float]) -> None:
    """What is measured takes ``times``, by the beginnings of names, and any other way 9, of weights of any size."""

    def microseconds(calls: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
        next(iter(calls.values()))()  # in place; the others have just run, so that their results could be compared
        return {name: min([t for n, t in times.items() if name.startswith(n)], default=9.0) for name in calls}

    monkeypatch.setattr(linear_measured, "microseconds", microseconds)
    monkeypatch.setattr(linear_measured, "_LEAST_BYTES", 0)
