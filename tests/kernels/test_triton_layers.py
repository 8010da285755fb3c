"""Triton kernels of a decoder layer around its attention and projections, against torch in fp64 and Hugging Face's modules."""

from __future__ import annotations

import itertools
from dataclasses import replace

import oracle
import pytest
import torch
from families import make_model
from family_fields import ROUTED, VOCAB
from linears import EPS, HF_NAMES, expected_norm
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2Config, Gemma2MLP
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as interleaved_rotary
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb
from triton_oracle import (
    DEVICE,
    DTYPES,
    assert_close,
    assert_early_starts_change_nothing,
    randn,
    unwritten_is_nan,  # noqa: F401
)

from stoker.kernels.ops import REFERENCE
from stoker.kernels.reference.norm_rotary import ACTIVATIONS, Activation, Norm, QKNorm, qk_norm_rotary
from stoker.kernels.triton_ops import DETERMINISTIC, TRITON
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams, binding

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def gemma_mlp(act: str, hidden: int, size: int) -> Gemma2MLP:
    config = Gemma2Config(
        hidden_size=hidden, num_attention_heads=1, intermediate_size=size, hidden_activation=HF_NAMES[act]
    )
    return Gemma2MLP(config).to(DEVICE).requires_grad_(False)


@dtypes
def test_act_mul_of_a_gate_that_is_scaled(dtype: torch.dtype) -> None:
    gate_up = randn(3, 2 * 1100, dtype=dtype, scale=3.0)
    scaled = torch.cat((gate_up[:, :1100] * 0.6, gate_up[:, 1100:]), dim=1)
    for ops in (REFERENCE, TRITON):
        assert torch.equal(ops.act_mul(gate_up, "silu", 0.6), ops.act_mul(scaled, "silu"))


@dtypes
def test_act_mul_of_what_lies_elsewhere(dtype: torch.dtype) -> None:
    gate, up = randn(3, 1100, dtype=dtype, scale=3.0), randn(3, 4, 1100, dtype=dtype)[:, 2]
    for ops in (REFERENCE, TRITON):
        assert torch.equal(ops.act_mul(gate, "gelu", 0.6, up), ops.act_mul(torch.cat((gate, up), dim=1), "gelu", 0.6))


@dtypes
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "size"), [(1, 7), (3, 1024), (2, 1500)])
def test_act_mul(tokens: int, size: int, act: Activation, dtype: torch.dtype) -> None:
    gate_up = randn(tokens, 2 * size, dtype=dtype, scale=3.0)
    out = TRITON.act_mul(gate_up, act)
    mlp = gemma_mlp(act, 2 * size, size)
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = Half(0), Half(1), torch.nn.Identity()
    assert_close(out, mlp(gate_up.double()), dtype)
    if dtype != torch.float32:  # it rounds where they do; further down 1 + erf(x) is a small difference
        assert (out == mlp(gate_up))[gate_up[:, :size] > -2].float().mean() > 0.99


class Half(torch.nn.Module):
    """One half of the columns, in place of a projection."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return x.chunk(2, dim=-1)[self.index]


def test_the_activations_are_told_apart() -> None:
    """Far from 0, where their limits are, and near, where the two forms of GELU differ by 5e-4 at most."""
    gate = torch.tensor([[-60.0, -8.0, -3.0, -1.0, -0.1, 0.0, 0.1, 1.0, 3.0, 8.0, 60.0]], device=DEVICE)
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=-1)
    out = {act: TRITON.act_mul(gate_up, act) for act in ACTIVATIONS}
    wanted = {act: ACT2FN[name](gate.double()) for act, name in HF_NAMES.items()}
    for act, other in itertools.product(ACTIVATIONS, repeat=2):
        error = ((out[act].double() - wanted[other]).abs() / wanted[other].abs().clamp(min=1)).max()
        assert error < 1e-6 if act == other else error > 1e-4
    assert set(HF_NAMES) == set(ACTIVATIONS)


# heads, kv heads, head size, rotated dimensions of it (0: no rotation), norm: as llama, qwen3, phi3, glm4, smollm3's
# layers without rotation, gpt-neox's odd sizes, gemma's wide heads.
HEADS = [
    (4, 2, 64, 64, False),
    (3, 1, 128, 128, True),
    (5, 5, 80, 32, False),
    (8, 2, 96, 48, True),
    (2, 2, 16, 0, False),
    (2, 1, 20, 0, True),
    (16, 1, 12, 6, True),
    (1, 1, 256, 256, True),
]


@dtypes
@pytest.mark.parametrize("last", [False, True], ids=["", "norm-last"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["", "interleaved"])
@pytest.mark.parametrize("offset", [False, True], ids=["", "offset"])
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_qk_norm_rotary_write(
    shape: tuple[int, int, int, int, bool], offset: bool, interleaved: bool, last: bool, dtype: torch.dtype
) -> None:
    heads, kv_heads, dim, rotated, normed = shape
    if ((offset or last) and not normed) or ((interleaved or last) and not rotated):
        pytest.skip("another case is the same")
    tokens, block = 5, 4
    wide = randn(tokens, 2, heads + 2 * kv_heads, dim, dtype=dtype)
    qkv = wide[:, 1]  # its tokens lie apart
    norm = QKNorm(randn(dim, dtype=dtype), randn(dim, dtype=dtype), EPS, offset, last=last) if normed else None
    angles = randn(tokens, rotated, scale=3.0)  # unlike in both halves, so that a mixed-up one shows
    table_dtype = torch.float32 if offset else dtype  # some families keep their angles in fp32
    cos_sin = (angles.cos().to(table_dtype), angles.sin().to(table_dtype)) if rotated else None
    caches = [torch.full((6, block, kv_heads, dim), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2)]
    slots = torch.tensor([7, 4, 23, 0, 12], device=DEVICE)
    query = TRITON.qk_norm_rotary_write(qkv, heads, kv_heads, norm, cos_sin, *caches, slots, interleaved=interleaved)

    q, k, v = qkv.double().split([heads, kv_heads, kv_heads], dim=1)
    if norm is not None and not last:
        q, k = (expected_norm(t, w, offset=offset) for t, w in ((q, norm.query), (k, norm.key)))
    if cos_sin is not None:
        cos, sin = (t.double() for t in cos_sin)
        rotate = interleaved_rotary if interleaved else apply_rotary_pos_emb
        q, k = (t.transpose(0, 1)[None] for t in (q, k))
        q, k = (t[0].transpose(0, 1) for t in rotate(q, k, cos[None], sin[None]))
    if norm is not None and last:
        q, k = (expected_norm(t, w, offset=offset) for t, w in ((q, norm.query), (k, norm.key)))
    assert_close(query, q, dtype)
    if dtype != torch.float32 and not rotated:
        wanted, _, _ = qk_norm_rotary(qkv, heads, kv_heads, norm, None)
        assert (query == wanted).float().mean() > 0.99  # it rounds where the reference does
    for cache, expected in zip(caches, (k, v), strict=True):
        flat = cache.flatten(0, 1)
        assert_close(flat[slots], expected, dtype)
        others = torch.ones(len(flat), dtype=torch.bool, device=DEVICE)
        others[slots] = False
        assert flat[others].isnan().all(), "a slot of no token was written"
    assert torch.equal(caches[1].flatten(0, 1)[slots], qkv[:, heads + kv_heads :])


@dtypes
@pytest.mark.parametrize("dim", [20, 64])
@pytest.mark.parametrize("tempered", [False, True], ids=["", "tempered"])
@pytest.mark.parametrize("values", [False, True], ids=["", "values-normed"])
@pytest.mark.parametrize(("kv_heads", "own_values"), [(0, False), (2, False), (2, True)])
def test_heads_of_other_kinds(
    kv_heads: int, own_values: bool, values: bool, tempered: bool, dim: int, dtype: torch.dtype
) -> None:
    """Keys that are values, or those of another layer, norms of values (Gemma 4) and queries with a factor (Llama 4)."""
    tokens, heads = 3, 5
    qkv = randn(tokens, heads + kv_heads * (1 + own_values), dim, dtype=dtype)
    norm = QKNorm(randn(dim, dtype=dtype), randn(dim, dtype=dtype), EPS, values=values)
    angles = randn(tokens, dim, scale=3.0)
    cos, sin = angles.cos(), angles.sin()
    factor = 1 + randn(tokens, 1).abs() if tempered else None
    slots = torch.tensor([7, 4, 0], device=DEVICE)
    q, k, v = (
        qkv[:, :heads].double(),
        qkv[:, heads : heads + kv_heads].double(),
        qkv[:, qkv.shape[1] - kv_heads :].double(),
    )
    if values:
        v = expected_norm(v, torch.ones(dim, dtype=dtype, device=DEVICE))
    q, k = (expected_norm(t, w).transpose(0, 1)[None] for t, w in ((q, norm.query), (k, norm.key)))
    q, k = (t[0].transpose(0, 1) for t in apply_rotary_pos_emb(q, k, cos[None].double(), sin[None].double()))
    for ops in (REFERENCE, TRITON):
        caches = [torch.full((3, 4, 2, dim), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2)]
        query = ops.qk_norm_rotary_write(qkv, heads, kv_heads, norm, (cos, sin), *caches, slots, factor=factor)
        assert_close(query, q if factor is None else q * factor[:, :, None].double(), dtype)
        for cache, expected in zip(caches, (k, v), strict=True):
            written = cache.flatten(0, 1)
            if kv_heads:
                assert_close(written[slots], expected, dtype)
            assert written.isnan().all(-1).sum() == 2 * (12 - (3 if kv_heads else 0)), "a slot of no token was written"


@dtypes
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (5, 1)])
def test_heads_that_lie_by_group(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Behind the queries that read a key head lies that, and behind it its values: as GPT-NeoX has them, or all in a row."""
    tokens, dim, slots = 3, 20, torch.tensor([7, 4, 0], device=DEVICE)
    groups = randn(tokens, kv_heads, heads // kv_heads + 2, dim, dtype=dtype)
    query, key, value = torch.split(groups, [heads // kv_heads, 1, 1], dim=2)
    in_row = torch.cat([t.flatten(1, 2) for t in (query, key, value)], dim=1)
    norm = QKNorm(randn(dim, dtype=dtype), randn(dim, dtype=dtype), EPS)
    angles = randn(tokens, 12, scale=3.0)
    cos_sin = angles.cos(), angles.sin()
    for ops in (REFERENCE, TRITON):
        found = []
        for qkv, grouped in ((groups.flatten(1, 2), True), (in_row, False)):
            caches = [torch.zeros(3, 4, kv_heads, dim, dtype=dtype, device=DEVICE) for _ in range(2)]
            arguments = qkv, heads, kv_heads, norm, cos_sin, *caches, slots
            found.append([ops.qk_norm_rotary_write(*arguments, grouped=grouped), *caches])
        assert all(map(torch.equal, *found)) and found[0][2].flatten(0, 1)[7].equal(value[0].flatten(0, 1))


@pytest.mark.gpu
def test_a_cache_of_more_than_two_to_the_31_elements() -> None:
    blocks = 2**31 // (16 * 8 * 128) + 2
    caches = [torch.zeros(blocks, 16, 8, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    qkv, slots = randn(1, 24, 128, dtype=torch.bfloat16), torch.tensor([blocks * 16 - 1], device=DEVICE)
    TRITON.qk_norm_rotary_write(qkv, 8, 8, None, None, *caches, slots)
    for cache, first in zip(caches, (8, 16), strict=True):
        assert torch.equal(cache[-1, -1], qkv[0, first : first + 8])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_kernels_that_come_up_early_see_all_that_was_written(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long chain gives the bits it gives where each kernel starts when the one before has ended, captured or not."""
    norm = Norm(torch.ones(1024, dtype=torch.bfloat16, device=DEVICE), 1e-6)
    first, second, third = (
        randn(*size, dtype=torch.bfloat16) / 32 for size in ((3072, 1024), (6144, 1024), (1024, 3072))
    )
    caches = [torch.zeros(4, 16, 8, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    start, slots = randn(tokens, 1024, dtype=torch.bfloat16), torch.arange(tokens, device=DEVICE)

    def chain() -> Tensor:
        x = start
        for _ in range(50):
            qkv = TRITON.linear(x, first, norm=norm).view(tokens, 24, 128)
            query = TRITON.qk_norm_rotary_write(qkv, 8, 8, None, None, *caches, slots)
            keys = caches[0].flatten(0, 1)[:tokens].flatten(1)
            x = TRITON.linear((query.flatten(1) + keys).repeat(1, 3), third, residual=x)
            x = TRITON.linear(TRITON.linear(x, second, norm=norm, gated="silu"), third, residual=x)
            x = TRITON.rms_norm(x, *norm)
        return x

    assert_early_starts_change_nothing(chain, monkeypatch)


@dtypes
def test_a_row_of_the_other_kernels_is_the_same_among_any_others(dtype: torch.dtype) -> None:
    x, weight, gate_up = randn(64, 96, dtype=dtype), randn(96, dtype=dtype), randn(64, 160, dtype=dtype)
    qkv, angles = randn(64, 4, 24, dtype=dtype), randn(64, 24)
    norm = QKNorm(randn(24, dtype=dtype), randn(24, dtype=dtype), EPS)

    def run(rows: slice) -> list[Tensor]:
        slots = torch.arange(64, device=DEVICE)[rows]
        cos_sin = tuple(t.to(dtype)[rows] for t in (angles.cos(), angles.sin()))
        caches = [torch.zeros(16, 4, 1, 24, dtype=dtype, device=DEVICE) for _ in range(2)]
        query = DETERMINISTIC.qk_norm_rotary_write(qkv[rows], 2, 1, norm, cos_sin, *caches, slots)
        cached = [cache.flatten(0, 1)[slots] for cache in caches]
        normed = [
            DETERMINISTIC.rms_norm(x[rows], weight, EPS, offset, centred, residual=residual)
            for offset, centred, residual in ((False, False, None), (True, False, x[rows]), (False, True, None))
        ]
        return [*normed, *(DETERMINISTIC.act_mul(gate_up[rows], act) for act in ACTIVATIONS), query, *cached]

    together = run(slice(None))
    for tokens in (1, 3, 17):
        for alone, whole in zip(run(slice(9, 9 + tokens)), together, strict=True):
            assert torch.equal(alone, whole[9 : 9 + tokens])


@pytest.mark.parametrize(
    ("family", "fused", "sizes"),
    [
        ("qwen3", 1, {"num_hidden_layers": 1}),
        ("smollm3", 2, {"num_hidden_layers": 2, "no_rope_layers": [1, 0], "layer_types": ["full_attention"] * 2}),
        ("gpt_oss", 2, {"num_hidden_layers": 2, "layer_types": None}),
        ("phi", 0, {"num_hidden_layers": 1, "qk_layernorm": True}),
        ("gemma4", 4, {}),
        ("llama4", 2, {"num_hidden_layers": 2, "no_rope_layers": [1, 0], "moe_layers": [1]}),
        ("gemma3", 2, {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}),
        ("glm4", 1, {"num_hidden_layers": 1}),
        ("granite", 1, {"num_hidden_layers": 1}),
        ("qwen3_moe", 1, {"num_hidden_layers": 1, "mlp_only_layers": []}),
        ("deepseek_v3", 2, {"num_hidden_layers": 2}),
        ("qwen3_5_moe", 1, {"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
    ],
)
def test_the_engine_runs_on_them(family: str, fused: int, sizes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and sampling are the reference's here; the rest of the layer, experts too, is Triton's."""
    called = set()

    def noted(name: str):
        def call(*args, **kwargs):
            called.add(name)
            return getattr(TRITON, name)(*args, **kwargs)

        return call

    mine = {"linear", "qk_norm_rotary_write"} if fused else set()
    if family in ("gemma3", "gemma4", "glm4", "gpt_oss", "llama4", "qwen3_moe", "qwen3_5_moe"):
        mine.add("rms_norm")  # after attention and after the MLP, or before what reads it more than once
    if family == "gemma4":
        mine.add("act_mul")  # of the input of each layer
    if family in ROUTED or family in ("llama4", "qwen3_5_moe"):
        mine |= {"route", "experts"}
    if family == "deepseek_v3":
        mine = {"linear", "latent_heads_write", "rms_norm", "route", "experts"}
    monkeypatch.setattr(binding, "ops_for", lambda *_, **__: replace(REFERENCE, **{name: noted(name) for name in mine}))
    model = make_model(family, **sizes)
    prompts = [torch.randint(1, VOCAB, (n,)).tolist() for n in (6, 1)]
    expected = [oracle.greedy(model, prompt, 3) for prompt in prompts]
    config = EngineConfig(block_size=4, kv_cache_memory="1MiB")
    with RolloutEngine(model.to(DEVICE), config=config) as engine:
        assert engine.stats().fused_layers == fused
        called.clear()  # what the probes ran
        batch = engine.generate_batch(prompts, SamplingParams(temperature=0, max_tokens=3))
    assert [output.completions[0].token_ids for output in batch] == expected
    assert called == mine
