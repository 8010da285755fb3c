"""Engines on models that are sharded over real processes, and weights that come from another one."""

from __future__ import annotations

import pytest
import ranks
import sharded


@pytest.mark.parametrize("world_size", sharded.WRAPPERS)
def test_the_engine_follows_a_sharded_trainer(world_size):
    for found in ranks.run(sharded.follow_all, world_size, world_size):
        assert found.keys() == sharded.WRAPPERS[world_size].keys()
        for name, result in found.items():
            if name == "ddp":
                assert result == {"moved": 0, "mirror": 0, "weights": result["weights"]}
            else:
                assert result["moved"] == result["weights"] <= result["mirror"] < 1.2 * result["weights"], name
