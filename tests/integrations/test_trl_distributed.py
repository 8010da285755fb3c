"""TRL on two processes, under DDP and FSDP2: groups cut between them, seeds of their own, no collective in a rollout."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
import sharded_trl
import torch
import trl_async_setup
from trl_setup import LOGPROB_TOLERANCE

pytest.importorskip("trl", reason="TRL is not installed")


@pytest.mark.parametrize("together", [False, True])
def test_two_processes_train_one_policy(tmp_path: Path, together: bool) -> None:
    first, second = ranks.run(sharded_trl.train_one_policy, 2, str(tmp_path), together)
    assert first["wrapper"] == second["wrapper"] == "DistributedDataParallel"
    assert second["seed"] == first["seed"] + (not together)
    assert first["version"] == second["version"] >= 3
    assert len(first["prompts"]) == 3
    assert first["prompts"] == second["prompts"]  # the other half of the same groups
    assert all(a != b for a, b in zip(first["completions"], second["completions"], strict=True))
    assert max(first["differences"]) < LOGPROB_TOLERANCE  # gathered from both
    assert max(first["error"], second["error"]) < LOGPROB_TOLERANCE
    assert first["moved"] and second["moved"]
    assert all((array == second["weights"][name]).all() for name, array in first["weights"].items())


def test_the_main_process_samples_for_all_that_train_asynchronously(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("trl", minversion="1.16", reason="asynchronous GRPO needs TRL 1.16")
    folder = trl_async_setup.saved_model(tmp_path_factory)
    first, second = ranks.run(trl_async_setup.train_under_ddp, 2, folder, str(tmp_path))
    assert first["wrapper"] == second["wrapper"] == "DistributedDataParallel"
    assert (first["version"], second["version"]) == (4, None)
    assert len(first["ratios"]) == 3 and first["ratios"] == second["ratios"]  # of the samples of both
    assert first["ratios"][0] == pytest.approx(1.0, abs=LOGPROB_TOLERANCE)  # drawn from the weights it begins with
    assert first["moved"] and second["moved"]
    assert all((array == second["weights"][name]).all() for name, array in first["weights"].items())


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("fsdp2", "grpo"),
        ("fsdp2", "rloo"),
        ("fsdp2", "online_dpo"),
        ("fsdp2", "distillation"),
        ("fsdp1", "grpo"),
        ("ddp", "online_dpo"),
    ],
)
def test_every_rank_samples_from_the_whole_model(tmp_path: Path, how: str, kind: str) -> None:
    first, second = ranks.run(sharded_trl.train, 2, how, str(tmp_path), kind)
    for found in (first, second):
        sharded_trl.assert_trained(found, "aliased" if how == "ddp" else "mirror")
    # Halves of the same groups, or prompts of each rank's own.
    assert (first["prompts"] == second["prompts"]) == (kind in ("grpo", "rloo"))


@pytest.mark.parametrize(("how", "adapter"), [("fsdp2", False), ("fsdp2", True), ("zero 3", False)])
def test_ranks_that_run_one_model_together(tmp_path: Path, how: str, adapter: bool) -> None:
    for found in ranks.run(sharded_trl.train, 2, how, str(tmp_path), "grpo", adapter, False, 0.0, True):
        sharded_trl.assert_trained(found, kept=adapter)


def test_a_reward_function_scores_under_shards_that_went_to_sleep(tmp_path: Path) -> None:
    """As the guide says, and the error that it gets otherwise."""
    for found in ranks.run(sharded_trl.score_in_a_reward, 2, str(tmp_path)):
        assert len(found) == 3 and max(found) < LOGPROB_TOLERANCE


def test_shards_that_are_others_in_evaluation(tmp_path: Path) -> None:
    """They come and go within a step, which nobody could see of shards."""
    found, _ = ranks.run(sharded_trl.evaluate_others, 2, str(tmp_path))
    assert [trains for trains, _ in found] == [True, False] * 2
    assert max(difference for _, difference in found) < LOGPROB_TOLERANCE


def test_parameters_that_fsdp_makes_fp32_leave_the_engine_in_the_dtype_of_the_forward(tmp_path: Path) -> None:
    for found in ranks.run(sharded_trl.train_in_bfloat16, 2, "fsdp2", str(tmp_path)):
        assert found["dtypes"] == ({torch.float32}, torch.bfloat16)
        assert found["same"] and found["trained"] and found["verified"]
