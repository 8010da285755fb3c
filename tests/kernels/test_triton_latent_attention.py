"""Heads of latent attention: the torch reference and the Triton kernel, against transformers' rotations in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb
from triton_oracle import DEVICE, DTYPES, assert_close, randn, unwritten_is_nan  # noqa: F401

from stoker.kernels.ops import REFERENCE
from stoker.kernels.reference.norm_rotary import latent_heads
from stoker.kernels.triton_ops import DETERMINISTIC, TRITON

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x: [T, H, R], angles: [T, R / 2]; fp64."""
    by_head = x.double().transpose(0, 1)[None]
    if interleaved:
        wide, _ = apply_rotary_emb(by_head, by_head, torch.polar(torch.ones_like(angles), angles)[None])
    else:
        both = torch.cat((angles, angles), dim=-1)[None]
        wide, _ = apply_rotary_pos_emb(by_head, by_head, both.cos(), both.sin())
    return wide[0].transpose(0, 1).double()


@dtypes
@pytest.mark.parametrize("interleaved", [False, True], ids=["", "interleaved"])
@pytest.mark.parametrize("tempered", [False, True], ids=["", "tempered"])
@pytest.mark.parametrize(
    ("heads", "plain", "rotated", "value"), [(3, 16, 8, 12), (5, 128, 64, 128), (1, 20, 6, 40), (2, 192, 64, 256)]
)
def test_latent_heads_write(
    heads: int, plain: int, rotated: int, value: int, tempered: bool, interleaved: bool, dtype: torch.dtype
) -> None:
    tokens = 3
    # Parts of what was projected together, whose tokens lie apart.
    query, key_rotary = randn(tokens, heads * (plain + rotated) + rotated, dtype=dtype).split(
        [heads * (plain + rotated), rotated], dim=1
    )
    query, key_value = query.view(tokens, heads, -1), randn(tokens, heads, plain + value, dtype=dtype)
    angles = randn(tokens, rotated // 2, scale=3.0).double()
    tables = tuple(torch.cat((t, t), dim=-1).float() for t in (angles.cos(), angles.sin()))
    factor = 1 + randn(tokens, 1).abs() if tempered else None
    slots = torch.tensor([7, 4, 0], device=DEVICE)
    expected_query = torch.cat((query[..., :plain].double(), turned(query[..., plain:], angles, interleaved)), dim=-1)
    shared = turned(key_rotary[:, None], angles, interleaved).expand(-1, heads, -1)
    expected_key = torch.cat((key_value[..., :plain].double(), shared), dim=-1)
    if factor is not None:
        expected_query *= factor[:, :, None]
    for ops in (REFERENCE, TRITON):
        caches = [
            torch.full((3, 4, heads, d), float("nan"), dtype=dtype, device=DEVICE) for d in (plain + rotated, value)
        ]
        out = ops.latent_heads_write(
            query, key_value, key_rotary, tables, *caches, slots, interleaved=interleaved, factor=factor
        )
        assert_close(out, expected_query, dtype)
        if not tempered:
            wanted, _, _ = latent_heads(query, key_value, key_rotary, tables, interleaved)
            assert torch.equal(out[..., :plain], wanted[..., :plain])
        keys, values = (cache.flatten(0, 1) for cache in caches)
        assert_close(keys[slots], expected_key, dtype)
        assert torch.equal(values[slots], key_value[..., plain:])
        assert keys.isnan().all(-1).sum() == values.isnan().all(-1).sum() == 9 * heads, "a slot of no token was written"


@dtypes
def test_heads_that_are_not_rotated(dtype: torch.dtype) -> None:
    query, key_value, key_rotary = (randn(3, *size, dtype=dtype) for size in ((5, 24), (5, 28), (8,)))
    slots = torch.tensor([7, 4, 0], device=DEVICE)
    for ops in (REFERENCE, TRITON):
        caches = [torch.zeros(3, 4, 5, d, dtype=dtype, device=DEVICE) for d in (24, 12)]
        assert torch.equal(ops.latent_heads_write(query, key_value, key_rotary, None, *caches, slots), query)
        keys, values = (cache.flatten(0, 1)[slots] for cache in caches)
        assert torch.equal(keys[..., :16], key_value[..., :16]) and torch.equal(values, key_value[..., 16:])
        assert torch.equal(keys[..., 16:], key_rotary[:, None].expand(-1, 5, -1))


@dtypes
def test_a_row_is_the_same_among_any_others(dtype: torch.dtype) -> None:
    query, key_value, key_rotary = (randn(20, *size, dtype=dtype) for size in ((3, 24), (3, 28), (8,)))
    angles = randn(20, 8)

    def run(rows: slice) -> list[Tensor]:
        slots = torch.arange(20, device=DEVICE)[rows]
        tables = angles.cos()[rows], angles.sin()[rows]
        caches = [torch.zeros(5, 4, 3, d, dtype=dtype, device=DEVICE) for d in (24, 12)]
        out = DETERMINISTIC.latent_heads_write(query[rows], key_value[rows], key_rotary[rows], tables, *caches, slots)
        return [out, *(cache.flatten(0, 1)[slots] for cache in caches)]

    together = run(slice(None))
    for alone, whole in zip(run(slice(9, 10)), together, strict=True):
        assert torch.equal(alone, whole[9:10])
