"""Models that several ranks run together, over real processes: the same as on one rank, and nothing waits for a rank that fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
import together
import together_refused
import together_replays
import torch
from families import make_model

from stoker.rollout import EngineConfig, InvalidConfigError, RolloutEngine
from stoker.rollout.loading import load_model


@pytest.mark.parametrize("world_size", together.FAMILIES)
def test_families(world_size: int) -> None:
    ranks.run(together.families, world_size)


def test_the_same_tokens_as_one_rank() -> None:
    ranks.run(together.as_alone, 2)


def test_a_trainer_that_is_sharded() -> None:
    ranks.run(together.follow_a_sharded_trainer, 2)


def test_captured_steps() -> None:
    ranks.run(together_replays.replay, 2)


def test_trainers_that_hold_the_whole_model(tmp_path: Path) -> None:
    ranks.run(together.whole_trainers, 2, str(tmp_path))


def test_adapters() -> None:
    ranks.run(together.adapters, 2)


def test_adapters_that_are_sharded_too() -> None:
    ranks.run(together.sharded_adapters, 2)


def test_adapters_that_cannot_be_cut() -> None:
    ranks.run(together_refused.refused_adapters, 2)


def test_what_is_refused() -> None:
    ranks.run(together_refused.refusals, 2)


def test_a_rank_that_cannot_build_its_part() -> None:
    ranks.run(together_refused.one_fails_to_build, 2)


def test_no_rank_takes_the_whole_model() -> None:
    for built, took, held, whole in ranks.run(together.take_little, 2):
        assert held < 0.6 * whole
        layer = whole // 8  # is whole at a time
        assert built < 2 * layer + 2**20 and took < 2 * layer + 2**20


def test_a_folder_of_weights(tmp_path: Path) -> None:
    make_model("qwen3").save_pretrained(tmp_path)
    ranks.run(together.from_a_folder, 2, str(tmp_path))


def test_a_model_too_large_for_a_device_is_not_loaded_onto_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    model, _, config = load_model(tmp_path, EngineConfig(tensor_parallel_size=2), None)
    assert model.device.type == "cpu" and config.device == torch.device("cuda")


def test_ranks_are_needed() -> None:
    with pytest.raises(InvalidConfigError, match="tensor_parallel_size=2 takes 2 processes"):
        RolloutEngine(make_model("llama"), config=EngineConfig(tensor_parallel_size=2))


@pytest.mark.parametrize("fields", [{"deterministic": True}, {"quantization": "fp8"}])
def test_settings_that_do_not_go_together(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidConfigError, match="tensor_parallel_size=2 and .* do not go together"):
        EngineConfig(tensor_parallel_size=2, **fields)  # type: ignore[arg-type]
