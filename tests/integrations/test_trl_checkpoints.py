"""Checkpoints of a trainer to which an engine is attached: saved, and resumed from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trl_setup import MakeTrainer, check_parity, make_model, trainers

pytest.importorskip("trl", reason="TRL is not installed")

from stoker.integrations.trl import attach, detach


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    yield from trainers(str(tmp_path))


def test_resuming_takes_the_weights_of_the_checkpoint(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    first = make_trainer(max_steps=2, save_strategy="steps", save_steps=2)
    attach(first)
    first.train()
    saved = {name: tensor.clone() for name, tensor in first.model.state_dict().items()}
    detach(first)

    resumed = make_trainer(max_steps=4)
    engine = attach(resumed)
    seen = []
    generate_batch = engine.generate_batch

    def keep(prompts: Any, params: Any) -> Any:
        batch = generate_batch(prompts, params)
        seen.append({name: tensor.clone() for name, tensor in resumed.model.state_dict().items()})
        return batch

    engine.generate_batch = keep  # type: ignore[method-assign]
    engine.generate_batch([[3] * 40], None)  # caches keys and values of the weights before
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4 and len(seen) == 3
    assert all(torch.equal(seen[1][name], tensor) for name, tensor in saved.items())
    check_parity(resumed)


def test_a_resumed_run_ends_where_one_that_was_never_stopped_does(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def train(**more: Any) -> dict[str, torch.Tensor]:
        trainer = make_trainer(max_steps=4, save_strategy="steps", save_steps=2)
        attach(trainer)
        trainer.train(**more)
        check_parity(trainer)
        detach(trainer)
        return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}

    whole = train()
    torch.manual_seed(99)
    resumed = train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(whole[name], tensor) for name, tensor in resumed.items())


def test_a_checkpoint_saved_while_attached_is_an_ordinary_one(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(max_steps=1, save_strategy="steps", save_steps=1)
    attach(trainer)
    trainer.train()
    folder = tmp_path / "checkpoint-1"
    loaded = type(make_model()).from_pretrained(folder)
    assert all(torch.equal(loaded.state_dict()[name], t) for name, t in trainer.model.state_dict().items())
    parameters = sum(t.nbytes for t in trainer.model.state_dict().values())
    assert (folder / "model.safetensors").stat().st_size < parameters + 10_000  # nothing written twice
