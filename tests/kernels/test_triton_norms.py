"""Norms in Triton, against torch in fp64 and Hugging Face's modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linears import EPS, expected_norm
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from triton_oracle import DEVICE, DTYPES, assert_close, randn, unwritten_is_nan  # noqa: F401

from stoker.kernels.ops import REFERENCE
from stoker.kernels.reference.norm_rotary import Norm
from stoker.kernels.triton_ops import TRITON

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

NORMS = {
    LlamaRMSNorm: {},
    Gemma2RMSNorm: {"offset": True},
    Cohere2LayerNorm: {"centred": True},
    torch.nn.LayerNorm: {"centred": True, "bias": True},
    NemotronLayerNorm1P: {"offset": True, "centred": True, "bias": True},
}


@dtypes
@pytest.mark.parametrize("kind", NORMS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("shape", [(1, 64), (3, 80), (5, 2304), (2, 3, 96), (1, 4097)], ids=str)
def test_rms_norm(shape: tuple[int, ...], with_residual: bool, kind: Any, dtype: torch.dtype) -> None:
    module = kind(shape[-1], eps=EPS).to(DEVICE, dtype).requires_grad_(False)
    for parameter in module.parameters():
        parameter.copy_(randn(shape[-1], dtype=dtype))
    options = NORMS[kind] | ({"bias": module.bias} if "bias" in NORMS[kind] else {})
    x, norm = randn(*shape, dtype=dtype), Norm(module.weight, EPS, **options)
    residual = randn(*shape, dtype=dtype) if with_residual else None
    out = TRITON.rms_norm(x, *norm, residual=residual)
    expected = expected_norm(x, *norm)
    assert_close(out, expected if residual is None else expected + residual.double(), dtype)
    if dtype != torch.float32 and kind is not NemotronLayerNorm1P:  # which rounds its factor
        wanted = module(x) if residual is None else residual + module(x)
        # It rounds as often as they do, where they do: one rounding more or less would show in a quarter of the numbers. A
        # mean, and a bias, are of other sums in fp32.
        assert (out == wanted).float().mean() > (0.98 if norm.centred else 0.99)
    for wide in {dtype, torch.float32}:
        scale = torch.tensor([0.3], dtype=wide, device=DEVICE)
        for ops in (REFERENCE, TRITON):
            before = ops.rms_norm(x, *norm, residual=residual)
            assert torch.equal(ops.rms_norm(x, *norm, residual=residual, scale=scale), before.mul_(scale))


def test_a_variance_is_no_small_difference_of_large_numbers() -> None:
    x, norm = 1024 + randn(3, 80, dtype=torch.float16), Norm(randn(80, dtype=torch.float16), EPS, centred=True)
    for ops in (REFERENCE, TRITON):
        assert_close(ops.rms_norm(x, *norm), expected_norm(x, *norm), x.dtype)


def test_rms_norm_of_rows_that_lie_apart() -> None:
    x, weight, other = randn(4, 3, 96), randn(32), randn(4, 3, 96)
    for take in (
        lambda t: t[:, 1, 32:64],
        lambda t: t.transpose(1, 2)[:, 32:64].transpose(1, 2),
        lambda t: t[..., ::3],
    ):
        rows, residual = take(x), take(other)
        expected = expected_norm(rows, weight)
        assert_close(TRITON.rms_norm(rows, weight, EPS), expected, x.dtype)
        for beside in (residual, residual.contiguous()):
            out = TRITON.rms_norm(rows, weight, EPS, residual=beside)
            assert_close(out, expected + residual.double(), x.dtype)
        assert torch.equal(residual, take(other))
