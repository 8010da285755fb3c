"""Engines on models that DeepSpeed trains, on real processes."""

from __future__ import annotations

import pytest
import ranks
import torch
import zero

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_engine_follows_deepspeed_and_does_not_disturb_it(world_size):
    nbytes = sum(p.nbytes for p in zero.small().parameters())
    for found in ranks.run(zero.follow_all, world_size):
        assert found.keys() == {name for name, case in zero.CASES.items() if case[0] == world_size}
        for name, result in found.items():
            _, stage, dtype, _ = zero.CASES[name]
            copied = stage == 3 or dtype is not torch.float32
            assert result == {"moved": nbytes if copied else 0, "fused": True}, name


def test_a_model_that_was_never_whole():
    ranks.run(zero.made_in_pieces, 2)
