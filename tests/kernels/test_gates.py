"""What gates layers with a state for each sequence: against transformers' modules, and the kernels against fp64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CONFIG_MAPPING
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


@dtypes
@pytest.mark.parametrize("wide", [False, True], ids=["", "fp32 weight"])
def test_kimi_s_gated_norm(wide: bool, dtype: torch.dtype) -> None:
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    x, gate, weight = randn(5, 3, 24, dtype=dtype), randn(5, 3, 24, dtype=dtype, scale=2), randn(24, dtype=dtype)
    weight = weight.float() if wide else weight
    exact = x.double()
    normed = exact * (exact.square().mean(-1, keepdim=True) + EPS).rsqrt()
    module = kimi.KimiLinearRMSNormGated(24, EPS).to(DEVICE, weight.dtype)
    module.weight.data.copy_(weight)
    with torch.no_grad():
        wanted = module(x, gate)
    assert torch.equal(REFERENCE.gated_rms_norm(x, gate, weight, EPS, sigmoid=True), wanted)
    out = TRITON.gated_rms_norm(apart(x), apart(gate), weight, EPS, sigmoid=True)
    assert_close(out, weight.double() * normed * gate.double().sigmoid(), dtype)
    assert dtype == torch.float32 or (out == wanted).float().mean() > 0.98


@dtypes
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (3, 20), (4, 300)])
def test_gates_for_each_row_of_a_state(heads: int, dim: int, bound: float | None, dtype: torch.dtype) -> None:
    a, b = randn(9, heads, dim, dtype=dtype, scale=8), randn(9, heads, dtype=dtype, scale=8)
    a_log, dt_bias = randn(heads), randn(heads * dim, dtype=dtype)
    rate, x = a_log.double().exp()[:, None], a.double() + dt_bias.double().view(heads, dim)
    decay = -rate * F.softplus(x) if bound is None else bound * (rate * x).sigmoid()
    for ops in (REFERENCE, TRITON):
        for shape in (a_log.shape, (1, 1, heads, 1)):  # as the two families have it
            for given in ((apart(a.flatten(1)).view(a.shape), b), (a, apart(b))):
                found = ops.delta_gates(*given, a_log.view(shape), dt_bias, bound=bound)
                assert_close(found[0], decay, torch.float32)
                assert_close(found[1], b.double().sigmoid(), dtype)


@dtypes
@pytest.mark.parametrize("family", ["kimi_linear", "bailing_hybrid", "bailing_hybrid unbounded"])
def test_what_makes_kimi_s_decay(family: str, dtype: torch.dtype) -> None:
    """Where it is rounded, too; the modules' projections are such that they change nothing."""
    heads, dim, kind = 2, 16, family.split()[0]
    theirs = pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}")
    options = {"kda_safe_gate": "unbounded" not in family, "kda_lower_bound": -3.0}
    config = CONFIG_MAPPING[kind](hidden_size=heads * dim, num_attention_heads=heads, head_dim=dim, **options)
    config.linear_head_dim, config.linear_num_heads = dim, heads
    if kind == "kimi_linear":
        config.hidden_size = dim
    name = "KimiLinearForgetGate" if kind == "kimi_linear" else "BailingHybridForgetGate"
    gate, b = getattr(theirs, name)(config).to(DEVICE, dtype), randn(7, heads, dtype=dtype)
    for parameter in gate.parameters():
        parameter.data.copy_(randn(*parameter.shape, dtype=dtype))
    for linear in gate.children():
        eye = torch.eye(linear.in_features, device=DEVICE)
        linear.weight.data.copy_(eye.repeat(linear.out_features // linear.in_features, 1))
    x = randn(7, config.hidden_size, dtype=dtype, scale=4)
    with torch.no_grad():
        wanted = gate(x[None])[0]
    how = {"bound": getattr(gate, "lower_bound", None) if getattr(gate, "safe_gate", False) else None}
    a = x.repeat(1, heads * dim // x.shape[1]).view(7, heads, dim)
    for ops in (REFERENCE, TRITON):
        decay, _ = ops.delta_gates(a, b, gate.A_log, gate.dt_bias, rounded=wanted.dtype == dtype, **how)
        assert torch.equal(decay, decay.to(wanted.dtype).float())
        assert_close(decay.to(wanted.dtype), wanted.double(), wanted.dtype)
        assert (decay.to(wanted.dtype) == wanted).float().mean() > (0.98 if wanted.dtype != torch.float32 else 0.0)


def test_a_token_s_bits_depend_on_no_other() -> None:
    x, gate, weight = randn(9, 4, 24), randn(9, 4, 24), randn(4, 24)
    a, b, a_log, dt_bias = randn(9, 4), randn(9, 4), randn(4), randn(4)
    gated = [partial(DETERMINISTIC.gated_rms_norm, weight=w, eps=EPS) for w in (weight, weight[0], None)]
    gated += [partial(gated[0], gate_first=True), partial(gated[1], sigmoid=True)]
    normed = [f(x, gate) for f in gated]
    made = [(a, dt_bias), (randn(9, 4, 400), randn(1600))]  # the latter by several programs
    gates = [DETERMINISTIC.delta_gates(whole, b, a_log, bias) for whole, bias in made]
    for rows in (slice(0, 1), slice(3, 7)):
        for f, whole in zip(gated, normed, strict=True):
            assert torch.equal(f(x[rows], gate[rows]), whole[rows])
        for (given, bias), wanted in zip(made, gates, strict=True):
            for part, whole in zip(DETERMINISTIC.delta_gates(given[rows], b[rows], a_log, bias), wanted, strict=True):
                assert torch.equal(part, whole[rows])
