"""Engines with weights in fp8 on models that are sharded over real processes: no plain copy of what is rounded."""

from __future__ import annotations

import pytest
import ranks
import sharded_fp8


@pytest.mark.parametrize("world_size", sharded_fp8.CASES)
def test_the_engine_follows_a_sharded_trainer(world_size: int) -> None:
    ranks.run(sharded_fp8.follow_all, world_size)


def test_pieces_of_zero3() -> None:
    ranks.run(sharded_fp8.zero3, 3)


def test_adapters_that_are_sharded_too() -> None:
    ranks.run(sharded_fp8.adapters, 2)


def test_a_sleep_at_every_level() -> None:
    ranks.run(sharded_fp8.sleep, 2)


def test_a_setting_that_changes_after_a_forward() -> None:
    ranks.run(sharded_fp8.set_after_a_forward, 2)


def test_a_gather_that_fails_at_a_layer() -> None:
    ranks.run(sharded_fp8.fail_inside, 2)


def test_neither_the_engine_nor_an_update_takes_a_plain_copy() -> None:
    for built, took, plain in ranks.run(sharded_fp8.take_little, 2):
        layer = plain // sharded_fp8.LAYERS  # those of one are whole at a time, and what rounds it takes some as well
        assert layer < took < sharded_fp8.GATHER_BYTES + 2 * layer + 2**19
        assert built < plain // 3
