"""Engines on models that are sharded over real processes."""

from __future__ import annotations

import re

import accelerated
import pytest
import ranks
import sharded
import sharded_faults
import sharded_gathers


@pytest.mark.parametrize("world_size", sharded.WRAPPERS)
def test_the_engine_follows_a_sharded_trainer(world_size):
    for found in ranks.run(sharded.follow_all, world_size, world_size):
        assert found.keys() == sharded.WRAPPERS[world_size].keys()
        for name, result in found.items():
            if name.startswith("ddp"):
                assert result == {"moved": 0, "mirror": 0, "weights": result["weights"]}
            elif "images" in name:
                assert 0 < result["moved"] < result["weights"], "what no text goes through was not trained"
            else:
                assert result["moved"] == result["weights"] <= result["mirror"] < 1.2 * result["weights"], name


def test_packed_weights_of_which_each_rank_has_its_part_of_both():
    ranks.run(sharded.packed, 2)


@pytest.mark.parametrize("together", [False, True])
def test_fsdp2_under_accelerate(together):
    for rank, found in enumerate(ranks.run(accelerated.follow, 2, "fsdp2", together)):
        seed = 0 if together else rank  # the first rank's, of those that run one model
        assert found == {"asleep": [True] * 3, "versions": [1, 2, 3], "source": "mirror", "seed": seed}


def test_a_step_under_accelerate_while_fsdp2_has_the_model_gathered():
    assert ranks.run(accelerated.follow_past_a_forward, 2) == [[1, 2]] * 2


def test_pieces_of_zero3():
    ranks.run(sharded_gathers.pieces_of_zero3, 3)


@pytest.mark.parametrize("world_size", [1, 2])
def test_shards_in_host_memory_and_a_mirror_that_sleeps(world_size):
    ranks.run(sharded_gathers.offloaded, world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forward_that_leaves_the_whole_model_there(world_size):
    ranks.run(sharded_gathers.gathered_by_a_forward, world_size)


@pytest.mark.parametrize(("world_size", "way"), [(1, "fsdp2"), *((2, way) for way in sharded_gathers.WAYS)])
def test_a_model_is_read_once_and_its_parts_each_time(world_size, way):
    ranks.run(sharded_gathers.parts_that_move, world_size, way)


def test_a_rank_that_generates_alone_after_a_forward_leaves_what_it_gathered():
    ranks.run(sharded_gathers.alone_after_a_forward, 2)


def test_parts_that_stay_and_are_placed_otherwise():
    ranks.run(sharded_gathers.placed_otherwise, 2)


def test_a_rollout_between_a_forward_and_a_backward_keeps_nothing_of_the_trainers():
    ranks.run(sharded_gathers.alone_between_passes, 4)


def test_groups_of_a_world_that_is_no_more_are_let_go(tmp_path):
    ranks.run(sharded_faults.formed_anew, 3, str(tmp_path))


@pytest.mark.parametrize("how", ["before", "inside", "absent"])
def test_a_rank_that_is_lost_ends_an_update_with_an_error(how):
    *told, _ = ranks.run(sharded_faults.lose_a_rank, 3, how, dead=how != "absent")
    for message in told:
        assert "lost touch while" in message and "every rank has to" in message
        assert ("in parts old and new" in message) == (how == "inside")
        doing = "gathering model." if how == "inside" else "agreeing on what to gather"
        assert doing in message
        # A rank that waits for the first one at a barrier does not know yet that another one's connection was closed.
        late = "(1, )?" if message.startswith("rank 0") and how == "before" else ""
        heard = rf"Nothing was heard in 1.5 s of \[{late}2\]"
        assert re.search(heard, message) or re.search("^rank 0 .* Ranks? 2 failed", message), message
    if how == "absent":
        assert any(re.search(r"Ranks? 2 failed", message) for message in told), told


def test_what_one_rank_refuses_no_rank_takes():
    other, own = ranks.run(sharded_faults.refuse_on_one, 2)
    assert other.startswith("another rank refused") and own.startswith(f"{sharded.GATE} holds NaN")


def test_a_rank_whose_model_is_another_one_now_is_waited_for_by_none():
    other, own = ranks.run(sharded_faults.changed_on_one, 2)
    assert [message.partition(":")[0] for message in own] == [
        "the model has another shape than the engine was built for",
        "the ranks hold parts of other tensors each, as after one of them alone changed its model",
        f"parameter {sharded.GATE} is partitioned by ZeRO-3 and its part is not in memory (NVMe offload?)",
    ]
    assert other[1] == own[1] and all(other[i].startswith("another rank refused") for i in (0, 2))


def test_a_rank_that_is_not_ready_is_waited_for_by_none():
    other, own = ranks.run(sharded_faults.not_ready_on_one, 2)
    assert all(message.startswith("another rank refused") for message in other)
    why = ["requests are under way"] * 2 + ["the weights are asleep"] * 2 + ["q_proj runs the adapters []"]
    why += ["not above the present version", "is not an integer", "does not fit the 64 bits"]
    assert [reason in message for reason, message in zip(why, own, strict=True)] == [True] * 8


def test_one_changed_tensor_is_named_and_moved_alone():
    (named, moved, scrambled), (same, moved_too, whole) = ranks.run(sharded_gathers.change_one, 2)
    weight = dict(sharded.small().named_parameters())[sharded.GATE]
    assert named == same == (sharded.GATE,) == scrambled and whole == ()
    assert moved == moved_too == weight.nbytes


def test_parts_that_belong_elsewhere_now_are_moved():
    ranks.run(sharded_gathers.parts_of_columns, 2)


def test_what_keeps_changing_is_looked_at_while_it_is_gathered():
    ranks.run(sharded_gathers.looked_at_meanwhile, 2)


def test_groups_that_see_other_changes_stay_in_step():
    ranks.run(sharded_faults.copies_that_differ, 4)


def test_a_mesh_in_whose_order_a_model_is_not_whole_is_refused():
    ranks.run(sharded_faults.not_whole, 4)


def test_fsdp1_over_tensor_parallelism_is_refused():
    ranks.run(sharded_faults.cut_twice_by_fsdp1, 4)


@pytest.mark.parametrize("memory_bytes", [2**21, 2**22])
def test_a_gather_takes_what_it_may_besides_the_mirror_and_no_more(memory_bytes):
    peaks, gathered, mirrors = zip(*ranks.run(sharded_gathers.take_little, 2, memory_bytes), strict=True)
    # Two are under way at a time, each in a buffer and in Gloo's own memory, of which it takes less where ranks wait: what
    # the system sees is at the most so much.
    assert 0.9 * memory_bytes < 4 * max(gathered) <= memory_bytes
    assert max(peaks) < memory_bytes + 2**19 < min(mirrors)
