"""A base in 4 bits that a trainer shards, with an adapter on top (FSDP-QLoRA), on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

import sharded_quantised
from quantised_bases import save
from trl_setup import LOGPROB_TOLERANCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("world_size", sharded_quantised.CASES)
def test_the_engine_follows_an_adapter_on_a_sharded_base(folder: Path, world_size: int) -> None:
    for found in ranks.run(sharded_quantised.follow_all, world_size, folder):
        assert found.keys() == sharded_quantised.CASES[world_size].keys()
        for name, result in found.items():
            of_one = "original" in name  # whose flat parameters have the base's bits too: they go as a whole
            assert of_one or result["moved"] == result["trained"], f"{name}: the base stays where it is"
            assert result["packed"] < result["mirror"] < 2 * result["packed"] + result["plain"], (
                f"{name}: as it is packed"
            )


def test_odds_and_ends(folder: Path) -> None:
    ranks.run(sharded_quantised.odds_and_ends, 2, folder)


def test_a_gather_takes_what_it_may_besides_the_mirror_and_no_more() -> None:
    memory_bytes = 2**21
    peaks, gathered, mirrors = zip(*ranks.run(sharded_quantised.take_little, 2, memory_bytes), strict=True)
    # Two are under way at a time, each in a buffer and in Gloo's own memory, of which it takes less where ranks wait.
    assert 0.9 * memory_bytes < 4 * max(gathered) <= memory_bytes
    assert max(gathered) < max(peaks) < memory_bytes + 2**19 < min(mirrors)


def test_zero3(folder: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    ranks.run(sharded_quantised.zero3, 2, folder)


def test_values_that_are_not_finite(folder: Path) -> None:
    ranks.run(sharded_quantised.finite, 2, folder)


def test_grpo(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    for found in ranks.run(sharded_quantised.grpo, 2, folder, str(tmp_path)):
        assert found["sharded"] and (found["source"], found["version"]) == ("mirror", 3)
        assert len(found["differences"]) == 3 and max(found["differences"]) < LOGPROB_TOLERANCE
        assert found["moved"] > 0
