"""Ranks that run one model together, where layers have other mixers than plain attention."""

from __future__ import annotations

from typing import Any

import parallel_mixers
import pytest
import ranks
import torch
from families import make_config

from stoker.engine.cache.kv_cache import LayerShape, StateShape
from stoker.engine.parallel.mixers import share_of
from stoker.engine.parallel.norms import AttentionNormedTogether, gated_rms_norm
from stoker.engine.parallel.shares import PartOf, Rows, part_of
from stoker.engine.parallel.tensor_parallel import TensorParallel
from stoker.kernels.errors import UnsupportedModelError
from stoker.kernels.ops import REFERENCE
from stoker.kernels.reference.norm_rotary import Norm


class _Alone(TensorParallel):
    """A rank of several, whose sums are those of one."""

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        return x


def place(rank: int, size: int) -> Any:
    group: Any = None
    return _Alone(group, rank, size)


@pytest.mark.parametrize("kind", parallel_mixers.OF_TWO)
def test_two_ranks(kind: str) -> None:
    ranks.run(parallel_mixers.follow, 2, 2, parallel_mixers.OF_TWO[kind])


@pytest.mark.parametrize("family", parallel_mixers.LATER)
def test_two_ranks_of_newer_families(family: str) -> None:
    make_config(family)
    ranks.run(parallel_mixers.follow, 2, 2, ((family, {}),))


def test_ranks_that_have_keys_groups_and_norms_in_common() -> None:
    ranks.run(parallel_mixers.follow, 4, 4, parallel_mixers.OF_FOUR)


def test_sharded_trainers() -> None:
    ranks.run(parallel_mixers.follow, 2, 2, parallel_mixers.SHARDED, True)


def test_heads_that_cannot_be_shared() -> None:
    ranks.run(parallel_mixers.refuse, 3)


# -- what a rank keeps -------------------------------------------------------------------------------------------------

_WIDE = torch.float32
_DELTA = StateShape((3, 2 * 2 * 16 + 4 * 12), _WIDE), StateShape((4, 16, 12), _WIDE, "gated_delta_rule")
_DELTA_OF_SIX = StateShape((3, 2 * 2 * 16 + 6 * 12), _WIDE), StateShape((6, 16, 12), _WIDE, "gated_delta_rule")
_MAMBA2 = StateShape((3, 4 * 24 + 2 * 2 * 8), _WIDE), StateShape((4, 24, 8), _WIDE, "selective_scan")
_MAMBA = StateShape((3, 96), _WIDE), StateShape((1, 96, 6), _WIDE, "selective_scan")


@pytest.mark.parametrize(
    ("states", "size", "expected"),
    [
        (_DELTA, 2, [(3, 2 * 16 + 2 * 12), (2, 16, 12)]),
        (_DELTA, 4, [(3, 2 * 16 + 12), (1, 16, 12)]),  # a key head of two ranks
        (_MAMBA2, 2, [(3, 2 * 24 + 2 * 8), (2, 24, 8)]),
        (_MAMBA2, 4, [(3, 24 + 2 * 8), (1, 24, 8)]),
        (_MAMBA, 4, [(3, 24), (1, 24, 6)]),
        (_MAMBA[:1], 3, [(3, 32)]),
    ],
)
def test_states_of_a_rank(states: tuple[StateShape, ...], size: int, expected: list[tuple[int, ...]]) -> None:
    for rank in range(size):
        found = share_of(LayerShape(states=states), place(rank, size))
        assert [state.size for state in found.states] == expected
        assert [state.operation for state in found.states] == [state.operation for state in states]


@pytest.mark.parametrize(
    ("states", "size", "message"),
    [
        (_DELTA, 3, "heads with a state, 4, cannot be shared by 3 ranks"),
        (_DELTA_OF_SIX, 3, "key heads of states, 2, cannot be shared by 3 ranks"),
        (_MAMBA2, 8, "heads with a state, 4, cannot be shared by 8 ranks"),
        (_MAMBA, 5, "channels of a convolution, 96, cannot be shared by 5 ranks"),
        (_DELTA[1:], 2, "no convolution"),
    ],
)
def test_states_that_cannot_be_shared(states: tuple[StateShape, ...], size: int, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        share_of(LayerShape(states=states), place(0, size))


# -- parts -------------------------------------------------------------------------------------------------------------


def test_small_parts_follow_the_whole() -> None:
    whole, remade = torch.arange(8.0), []
    view, copy = part_of(whole, [(2, 4)], remade), part_of(whole, [(0, 2), (6, 8)], remade)
    whole += 10
    assert view.tolist() == [12, 13]
    assert copy.tolist() == [0, 1, 6, 7]
    (make,) = remade
    make()
    assert copy.tolist() == [10, 11, 16, 17]


def test_rows_that_touch_are_one_span() -> None:
    rows = Rows()
    rows.take(4, (1, 4))
    rows.take_units(2, 3, (0, 1))
    rows.take(5, (2, 2))
    rows.take(5, (2, 3), (4, 5))
    assert rows.spans == [(1, 7), (17, 18), (19, 20)]


def test_a_part_of_a_module_has_the_rest_of_the_whole_one() -> None:
    whole = torch.nn.Linear(4, 6)
    part = PartOf(whole, weight=whole.weight[:3])
    assert part.weight.shape == (3, 4) and part.bias is whole.bias


# -- norms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [False, True])
def test_a_norm_of_all_heads_rounds_as_the_operation(dtype: torch.dtype, offset: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, 64 + 2 * 32, generator=generator).to(dtype)
    norms = tuple(
        Norm(torch.randn(width, generator=generator).to(dtype), eps, offset) for width, eps in ((64, 1e-5), (32, 1e-2))
    )
    sizes: dict[str, Any] = {"layer": 0, "head_dim": 16, "heads": 4, "kv_heads": 2, "gated": False, "gate_width": 0}
    attention = AttentionNormedTogether(
        ops=REFERENCE, **sizes, head_norm=None, whole_norms=norms, options={}, parallel=place(0, 1)
    )
    query, key, value = torch.split(qkv, [64, 32, 32], dim=1)
    expected = torch.cat((REFERENCE.rms_norm(query, *norms[0]), REFERENCE.rms_norm(key, *norms[1]), value), dim=1)
    rtol, atol = (1e-6, 1e-6) if dtype == torch.float32 else (0, 0)
    torch.testing.assert_close(attention._normed(qkv, *norms), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate_first", [False, True])
def test_a_norm_of_a_group_rounds_as_the_operation(dtype: torch.dtype, gate_first: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(5, 1, 64, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(1, 64, generator=generator).to(dtype)
    expected = REFERENCE.gated_rms_norm(x, gate, weight, 1e-2, gate_first)
    rtol, atol = (1e-6, 1e-6) if dtype == torch.float32 else (0, 0)
    found = gated_rms_norm(place(0, 1), 1, x, gate, weight, 1e-2, gate_first)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
