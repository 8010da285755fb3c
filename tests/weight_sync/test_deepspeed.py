"""Engines on models that DeepSpeed trains, on real processes."""

from __future__ import annotations

from pathlib import Path

import accelerated
import pytest
import ranks
import sharded_trl
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


def test_a_folder_while_transformers_makes_models_in_pieces(tmp_path: Path):
    ranks.run(zero.weights_from_a_folder, 2, str(tmp_path))


@pytest.mark.parametrize(("stage", "source"), [(2, "aliased"), (3, "mirror")])
def test_under_accelerate(stage: int, source: str):
    for rank, found in enumerate(ranks.run(accelerated.follow, 2, f"zero {stage}")):
        assert found == {"asleep": [True] * 3, "versions": [1, 2, 3], "source": source, "seed": rank}


@pytest.mark.parametrize(("stage", "source"), [(2, "aliased"), (3, "mirror")])
def test_grpo(stage: int, source: str, tmp_path: Path):
    """DeepSpeed takes the model over after ``attach``: what was moved side by side lies in its buffers then, or in parts."""
    pytest.importorskip("trl", reason="TRL is not installed")
    for found in ranks.run(sharded_trl.train, 2, f"zero {stage}", str(tmp_path)):
        sharded_trl.assert_trained(found, source)


@pytest.mark.parametrize("stage", [2, 3])
def test_grpo_on_a_model_that_deepspeed_casts(stage: int, tmp_path: Path):
    pytest.importorskip("trl", reason="TRL is not installed")
    for found in ranks.run(sharded_trl.train_in_bfloat16, 2, f"zero {stage}", str(tmp_path)):
        assert found["dtypes"] == ({torch.bfloat16}, torch.bfloat16)
        assert found["same"] and found["trained"] and found["verified"]
