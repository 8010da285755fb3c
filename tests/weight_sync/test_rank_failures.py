"""A rank that fails alone in what all do together: no other one waits for it."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import rank_differences
import rank_failures
import ranks
import torch

from stoker.kernels.errors import EngineStateError, WeightsMismatchError, WeightTransferError
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


def test_an_adapter_over_fewer_ranks_than_its_model():
    ranks.run(rank_failures.an_adapter_over_fewer_ranks, 4, timeout=20)


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
    error.__cause__ = rank_agreement._known_to(None, cause) if known else cause
    rank_agreement.refuse({}, torch.device("cpu"), error)
    assert told == ([] if known else [error])


class _Group:
    """A group of processes, which are threads."""

    def __init__(self, *members: int) -> None:
        self._said: list[torch.Tensor] = []
        self._barrier = Barrier(len(members), timeout=20)

    def all_reduce(self, said: torch.Tensor) -> None:
        self._said.append(said.clone())
        self._barrier.wait()
        said.copy_(torch.stack(self._said).amax(0))
        if self._barrier.wait() == 0:
            self._said.clear()
        self._barrier.wait()


@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("what", ["nothing", "news", "a refusal", "other rows", "other columns"])
def test_what_one_rank_of_a_mesh_knows_all_come_to_know(what: str, odd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are in no group with it, to which another one has to pass it on: or else some went on alone."""
    rows, columns = (_Group(0, 1), _Group(2, 3)), (_Group(0, 2), _Group(1, 3))
    monkeypatch.setattr(rank_agreement.dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(rank_agreement.dist, "all_reduce", lambda said, op, group: group.all_reduce(said))

    def agree(rank: int) -> str | bool:
        has = what if rank == odd else "nothing"
        parts: Any = {
            rows[rank // 2]: [("c" if has == "other rows" else "a",)],
            columns[rank % 2]: [("c" if has == "other columns" else "b",)],
        }
        refusal = ValueError("its error") if has == "a refusal" else None
        try:
            return rank_agreement.agree(parts, torch.device("cpu"), refusal, has_news=has == "news")
        except (ValueError, WeightsMismatchError) as error:
            return str(error).partition(";")[0]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(agree, range(4)))
    if what == "a refusal":
        assert found == ["its error" if rank == odd else "another rank refused" for rank in range(4)]
    elif "other" in what:
        assert all(str(one).startswith("the ranks hold parts of other tensors each") for one in found)
    else:
        assert found == [what == "news"] * 4
