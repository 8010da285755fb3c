"""What gates layers with a state for each sequence: against transformers' modules, and the kernels against fp64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated
from triton_oracle import (
    DEVICE,
    DTYPES,
    assert_close,
    randn,
    unwritten_is_nan,  # noqa: F401
)

from stoker.kernels.ops import REFERENCE
from stoker.kernels.triton_ops import DETERMINISTIC, TRITON

EPS = 1e-6
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
shapes = pytest.mark.parametrize("shape", [(1, 1, 8), (5, 3, 12), (7, 32, 128), (2, 48, 96)], ids=str)


def apart(x: Tensor) -> Tensor:
    """The same numbers within rows that have others besides."""
    return torch.cat([x, x[..., :3]], dim=-1)[..., : x.shape[-1]]


@dtypes
@shapes
@pytest.mark.parametrize("wide", [False, True], ids=["", "fp32 weight"])
def test_gated_rms_norm(shape: tuple[int, ...], wide: bool, dtype: torch.dtype) -> None:
    weight = randn(shape[-1], dtype=torch.float32 if wide else dtype)
    x, gate = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, scale=2)
    exact = x.double()
    normed = exact * (exact.square().mean(-1, keepdim=True) + EPS).rsqrt()
    expected = weight.double() * normed * F.silu(gate.double())
    module = Qwen3_5RMSNormGated(shape[-1], EPS).to(DEVICE, weight.dtype)
    module.weight.data.copy_(weight)
    with torch.no_grad():
        wanted = module(x, gate)
    assert torch.equal(REFERENCE.gated_rms_norm(x, gate, weight, EPS), wanted)
    for given in (gate, apart(gate)):
        out = TRITON.gated_rms_norm(apart(x), given, weight, EPS)
        assert_close(out, expected, dtype)
        if dtype != torch.float32:  # it rounds where they do
            assert (out == wanted).float().mean() > 0.98


@dtypes
@pytest.mark.parametrize("shape", [(5, 1, 12), (3, 2, 48), (2, 8, 1024), (2, 1, 3000)], ids=str)
def test_a_gate_before_the_norm_of_groups(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = randn(*shape[1:], dtype=dtype)
    x, gate = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, scale=2)
    exact = x.double() * F.silu(gate.double())
    expected = weight.double() * exact * (exact.square().mean(-1, keepdim=True) + EPS).rsqrt()
    module = Zamba2RMSNormGated(weight.numel(), shape[2], EPS).to(DEVICE, dtype)
    module.weight.data.copy_(weight.flatten())
    with torch.no_grad():
        wanted = module(x.flatten(1), gate.flatten(1)).view(shape)
    assert torch.equal(REFERENCE.gated_rms_norm(x, gate, weight, EPS, True), wanted)
    out = TRITON.gated_rms_norm(apart(x), apart(gate), weight, EPS, True)
    assert_close(out, expected, dtype)
    if dtype != torch.float32:
        assert (out == wanted).float().mean() > 0.98


@dtypes
def test_a_gate_without_a_norm_and_a_norm_of_groups_before_a_gate(dtype: torch.dtype) -> None:
    x, gate, weight = randn(5, 3, 40, dtype=dtype), randn(5, 3, 40, dtype=dtype, scale=2), randn(3, 40, dtype=dtype)
    exact, factor = x.double(), F.silu(gate.double())
    normed = weight.double() * exact * (exact.square().mean(-1, keepdim=True) + EPS).rsqrt()
    for ops in (REFERENCE, TRITON):
        assert_close(ops.gated_rms_norm(apart(x), apart(gate), None, 0.0), exact * factor, dtype)
        assert_close(ops.gated_rms_norm(apart(x), apart(gate), weight, EPS), normed * factor, dtype)


@dtypes
@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("heads", [1, 5, 32])
def test_delta_gates(heads: int, scale: float, dtype: torch.dtype) -> None:
    a, b = (randn(9, heads, dtype=dtype, scale=8) for _ in range(2))
    a_log, dt_bias = randn(heads), randn(heads, dtype=dtype)
    decay = -a_log.double().exp() * F.softplus(a.double() + dt_bias.double())
    beta = scale * b.double().sigmoid()
    for ops in (REFERENCE, TRITON):
        for given in ((apart(a), b), (a, apart(b))):
            found = ops.delta_gates(*given, a_log, dt_bias, scale)
            assert_close(found[0], decay, torch.float32)
            assert_close(found[1], beta, dtype)


def test_a_token_s_bits_depend_on_no_other() -> None:
    x, gate, weight = randn(9, 4, 24), randn(9, 4, 24), randn(4, 24)
    a, b, a_log, dt_bias = randn(9, 4), randn(9, 4), randn(4), randn(4)
    gated = [partial(DETERMINISTIC.gated_rms_norm, weight=w, eps=EPS) for w in (weight, weight[0], None)]
    gated.append(partial(gated[0], gate_first=True))
    normed, gates = [f(x, gate) for f in gated], DETERMINISTIC.delta_gates(a, b, a_log, dt_bias)
    for rows in (slice(0, 1), slice(3, 7)):
        for f, whole in zip(gated, normed, strict=True):
            assert torch.equal(f(x[rows], gate[rows]), whole[rows])
        for part, whole in zip(DETERMINISTIC.delta_gates(a[rows], b[rows], a_log, dt_bias), gates, strict=True):
            assert torch.equal(part, whole[rows])
