"""Adapters that a trainer shards, on real processes."""

from __future__ import annotations

from pathlib import Path

import accelerated
import pytest
import ranks
import sharded_adapters


@pytest.mark.parametrize("world_size", sharded_adapters.CASES)
def test_the_engine_follows_a_sharded_adapter(world_size: int):
    for found in ranks.run(sharded_adapters.follow_all, world_size):
        assert found.keys() == sharded_adapters.CASES[world_size].keys()
        for name, result in found.items():
            assert result["fused"], name
            of_one = "original" in name  # whose flat parameters have the base's weights too: they go as a whole
            assert of_one or result["moved"] == result["trained"], f"{name}: the base stays where it is"


def test_zero3():
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    ranks.run(sharded_adapters.zero3, 2)


@pytest.mark.parametrize("how", ["fsdp2", "zero 3", "ddp"])
def test_grpo(tmp_path: Path, how: str):
    """A trainer that takes the adapter in parts after ``attach``, or that leaves it whole."""
    pytest.importorskip("trl", reason="TRL is not installed")
    if how == "zero 3":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    for found in ranks.run(accelerated.trl, 2, how, str(tmp_path), "grpo", True):
        accelerated.assert_trained(found, "aliased" if how == "ddp" else "mirror")


def test_odds_and_ends():
    ranks.run(sharded_adapters.odds_and_ends, 2)
