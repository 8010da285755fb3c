"""A rank that fails alone in what all do together: no other one waits for it."""

from __future__ import annotations

import re

import pytest
import rank_differences
import rank_failures
import ranks
import torch

from stoker.kernels.errors import EngineStateError, WeightTransferError
from stoker.weight_sync import rank_agreement

SHARDINGS = [("fsdp2", 2), ("two meshes", 4)]


def test_an_adapter_of_a_sharded_model():
    ranks.run(rank_failures.adapters, 2, timeout=20)


@pytest.mark.parametrize(("sharding", "world_size"), SHARDINGS)
def test_the_building_of_an_engine(sharding, world_size):
    ranks.run(rank_failures.building, world_size, sharding, timeout=20)


@pytest.mark.parametrize(("sharding", "world_size"), SHARDINGS)
def test_a_lack_of_memory_for_an_update(sharding, world_size):
    ranks.run(rank_failures.lack_of_memory, world_size, sharding, timeout=20)


def test_a_comparison_of_weights():
    ranks.run(rank_failures.verifying, 2, timeout=20)


@pytest.mark.parametrize("passing", [False, True])
def test_a_setting_of_one_ranks_model(passing):
    ranks.run(rank_failures.settings, 2, passing, timeout=20)


@pytest.mark.parametrize("passing", [False, True])
def test_the_layers_of_a_model_that_is_bound_again(passing):
    ranks.run(rank_failures.fusing, 2, passing, timeout=20)


def test_rollouts_outlive_the_group_of_processes(tmp_path):
    ranks.run(rank_failures.without_processes, 2, str(tmp_path))


def test_a_rank_that_is_lost_among_some_is_named_by_its_number_among_all():
    _, told, _ = ranks.run(rank_failures.lost_in_a_part, 3)
    assert re.search(
        r"with ranks \[2\] over gloo: .*Ranks? 1 failed to pass.* In the whole world these are \[2\]\.", told
    ), told


def test_memory_to_wake_in(tmp_path):
    ranks.run(rank_failures.waking, 2, str(tmp_path), timeout=20)


def test_an_interrupt():
    ranks.run(rank_failures.interrupts, 2, timeout=20)


def test_a_base_that_is_whole_on_each_rank():
    ranks.run(rank_failures.a_whole_base, 2, timeout=20)


def test_an_adapter_that_all_have_gathered():
    ranks.run(rank_failures.after_an_adapter_came, 2, timeout=20)


def test_adapters_that_not_all_ranks_have():
    ranks.run(rank_differences.other_adapters, 2, timeout=20)


def test_settings_that_not_all_ranks_have():
    ranks.run(rank_differences.other_settings, 2, timeout=20)


def test_engines_in_other_orders():
    ranks.run(rank_differences.other_engines, 2, timeout=20)


@pytest.mark.parametrize("known", [False, True])
def test_what_came_of_an_error_that_all_ranks_know_is_told_to_none(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have ended by it: nobody would answer, and this one would wait until its time is out."""
    told: list[Exception] = []
    monkeypatch.setattr(rank_agreement, "agree", lambda parts, device, error: told.append(error))
    cause = WeightTransferError("a rank was lost")
    error = EngineStateError("no update")
    error.__cause__ = rank_agreement._known_to_all(cause) if known else cause
    rank_agreement.refuse({}, torch.device("cpu"), error)
    assert told == ([] if known else [error])
