"""Adapters that a trainer shards, on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
import sharded_adapter_faults
import sharded_adapters
import sharded_trl


@pytest.mark.parametrize("world_size", sharded_adapters.CASES)
def test_the_engine_follows_a_sharded_adapter(world_size: int):
    for found in ranks.run(sharded_adapters.follow_all, world_size, False):
        assert found.keys() == sharded_adapters.CASES[world_size].keys()
        for name, result in found.items():
            assert result["fused"], name
            of_one = "original" in name  # whose flat parameters have the base's weights too: they go as a whole
            assert of_one or result["moved"] == result["trained"], f"{name}: the base stays where it is"


@pytest.mark.parametrize("world_size", sharded_adapters.OTHERS)
def test_the_engine_follows_a_sharded_adapter_of_another_model(world_size: int):
    for found in ranks.run(sharded_adapters.follow_all, world_size, True):
        assert found.keys() == sharded_adapters.OTHERS[world_size].keys()
        for name, result in found.items():
            assert result["moved"] == result["trained"], f"{name}: its base stays where it is"
            assert result["mirrored"] < 2 * result["trained"] + 2**14, f"{name}: there is no copy of its base"


@pytest.mark.parametrize("world_size", [2, 4])
def test_several_sharded_adapters(world_size: int):
    ranks.run(sharded_adapters.several, world_size)


def test_zero3():
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    ranks.run(sharded_adapters.zero3, 2)


@pytest.mark.parametrize(
    ("how", "by_config", "beta"),
    [
        ("fsdp2", False, 0.0),
        ("zero 3", False, 0.0),
        ("ddp", False, 0.0),
        ("fsdp1", False, 0.0),
        ("fsdp2", True, 0.1),
        ("fsdp2", False, 0.1),
    ],
)
def test_grpo(tmp_path: Path, how: str, by_config: bool, beta: float):
    """A trainer that takes the adapter in parts after ``attach``, or that leaves it whole.

    Its reference is the base, or where it was given the adapter a copy of it, which is in parts too.
    """
    pytest.importorskip("trl", reason="TRL is not installed")
    if how == "zero 3":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    for found in ranks.run(sharded_trl.train, 2, how, str(tmp_path), "grpo", True, by_config, beta):
        sharded_trl.assert_trained(found, "aliased" if how == "ddp" else "mirror", kept=True)


def test_an_engine_in_a_wider_dtype():
    ranks.run(sharded_adapters.in_a_wider_dtype, 2)


def test_what_is_refused_on_one_rank_is_on_all():
    ranks.run(sharded_adapter_faults.refused, 2)


def test_odds_and_ends():
    ranks.run(sharded_adapter_faults.odds_and_ends, 2)


def test_an_adapter_that_another_one_replaced_is_not_run_from_its_copies():
    ranks.run(sharded_adapter_faults.replaced, 2)
