"""Norm, rotary and activation against transformers' modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2Config, Gemma2MLP, Gemma2RMSNorm
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as interleaved_rotary
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as partial_rotary
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from stoker.kernels.reference.norm_rotary import Norm, QKNorm, act_mul, qk_norm_rotary, rms_norm, rotary


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [(5, 48), (5, 3, 16)])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm])
def test_rms_norm_is_that_of_llama_and_of_gemma(kind: Any, size: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual = (torch.randn(size) * 3).to(dtype), torch.randn(size).to(dtype)
    module = kind(size[-1], eps=1e-5).to(dtype).requires_grad_(False)
    module.weight.data = torch.randn(size[-1]).to(dtype)
    norm = Norm(module.weight, 1e-5, offset=kind is Gemma2RMSNorm)
    out = rms_norm(x, *norm)
    assert out.dtype == dtype
    torch.testing.assert_close(out, module(x), rtol=1e-6, atol=1e-6 if dtype == torch.float32 else 0)
    before = residual.clone()
    added = rms_norm(x, *norm, residual=residual)
    torch.testing.assert_close(added, before + module(x), rtol=1e-6, atol=1e-6 if dtype == torch.float32 else 0)
    assert torch.equal(residual, before)
    tiny = rms_norm(x * 1e-3, *norm._replace(eps=1e-2))
    assert tiny.abs().max() < 0.2, "eps counts"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_is_that_of_llama(dtype: torch.dtype) -> None:
    q, k = torch.randn(7, 4, 16, dtype=dtype), torch.randn(7, 2, 16, dtype=dtype)
    angle = torch.arange(7)[:, None] * 0.3 ** torch.arange(8)
    cos, sin = (f(torch.cat((angle, angle), -1)).to(dtype) for f in (torch.cos, torch.sin))
    wanted = apply_rotary_pos_emb(*(t.transpose(0, 1)[None] for t in (q, k)), cos[None], sin[None])
    for x, w in zip((q, k), wanted, strict=True):
        torch.testing.assert_close(rotary(x, cos, sin), w[0].transpose(0, 1), rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_only_the_first_dimensions_rotate_where_cos_is_short() -> None:
    q, k = torch.randn(7, 4, 16), torch.randn(7, 2, 16)
    angle = torch.arange(7)[:, None] * 0.3 ** torch.arange(3)
    cos, sin = (f(torch.cat((angle, angle), -1)) for f in (torch.cos, torch.sin))
    wanted = partial_rotary(*(t.transpose(0, 1)[None] for t in (q, k)), cos[None], sin[None])
    for x, w in zip((q, k), wanted, strict=True):
        out = rotary(x, cos, sin)
        torch.testing.assert_close(out, w[0].transpose(0, 1), rtol=0, atol=1e-6)
        assert torch.equal(out[..., 6:], x[..., 6:])


@pytest.mark.parametrize("rotated", [16, 6])
def test_neighbours_rotate_where_pairs_are_interleaved(rotated: int) -> None:
    q, k = torch.randn(7, 4, 16), torch.randn(7, 2, 16)
    angle = torch.arange(7)[:, None] * 0.3 ** torch.arange(rotated // 2)
    cos, sin = (f(torch.cat((angle, angle), -1)) for f in (torch.cos, torch.sin))
    wanted = interleaved_rotary(*(t.transpose(0, 1)[None] for t in (q, k)), cos[None], sin[None])
    for x, w in zip((q, k), wanted, strict=True):
        torch.testing.assert_close(rotary(x, cos, sin, interleaved=True), w[0].transpose(0, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotated", [16, 6, 0])
@pytest.mark.parametrize(
    ("kind", "last"), [(None, False), (LlamaRMSNorm, False), (LlamaRMSNorm, True), (Gemma2RMSNorm, False)]
)
def test_query_and_key_are_normalised_and_rotated(kind: Any, last: bool, rotated: int, dtype: torch.dtype) -> None:
    """As Qwen3 and Gemma 3 do, or Hunyuan, the norm last; with only some dimensions rotated, as GPT-NeoX does."""
    qkv = torch.randn(7, 4 + 2 + 2, 16, dtype=dtype) * 2
    before = qkv.clone()
    q, k, value = (t.transpose(0, 1)[None] for t in qkv.split([4, 2, 2], dim=1))
    norm = cos_sin = None
    if kind is not None:
        modules = [kind(16, eps=1e-5).to(dtype) for _ in range(2)]
        for module in modules:
            module.weight.data = torch.randn(16).to(dtype)
        norm = QKNorm(modules[0].weight, modules[1].weight, 1e-5, offset=kind is Gemma2RMSNorm, last=last)
    if norm is not None and not last:
        q, k = (module(t) for module, t in zip(modules, (q, k), strict=True))
    if rotated:
        angle = torch.arange(7)[:, None] * 0.3 ** torch.arange(rotated // 2)
        cos_sin = tuple(f(torch.cat((angle, angle), -1)).to(dtype) for f in (torch.cos, torch.sin))
        q, k = partial_rotary(q, k, *(t[None] for t in cos_sin))
    if last:
        q, k = (module(t) for module, t in zip(modules, (q, k), strict=True))
    with torch.no_grad():
        out = qk_norm_rotary(qkv, 4, 2, norm, cos_sin)
    for x, wanted in zip(out, (q, k, value), strict=True):
        wanted = wanted[0].transpose(0, 1)
        torch.testing.assert_close(x, wanted, rtol=0, atol=8 * torch.finfo(dtype).eps)
        if not rotated and dtype != torch.float32:
            assert (x == wanted).float().mean() > 0.99, "it rounds where they do"
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("act", "name"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh")])
def test_act_mul_is_the_middle_of_gemmas_mlp(act: Any, name: str, dtype: torch.dtype) -> None:
    mlp = Gemma2MLP(
        Gemma2Config(hidden_size=12, num_attention_heads=2, intermediate_size=20, hidden_activation=name)
    ).to(dtype)
    mlp.down_proj = nn.Identity()
    x = 3 * torch.randn(5, 12, dtype=dtype)
    gate_up = torch.cat((mlp.gate_proj(x), mlp.up_proj(x)), dim=-1)
    torch.testing.assert_close(act_mul(gate_up, act), mlp(x), rtol=1e-6, atol=2e-6)  # vectorised otherwise in a tail
