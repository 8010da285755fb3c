"""TRL on two processes, under DDP and FSDP2: groups cut between them, seeds of their own, no collective in a rollout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import accelerated
import pytest
import ranks
import torch
from trl_setup import LOGPROB_TOLERANCE, build, logged, plain_logprobs
from two_processes import run_in_two_processes

pytest.importorskip("trl", reason="TRL is not installed")


def train(folder: str) -> dict[str, Any]:
    from stoker.integrations.trl import attach, detach

    rank = int(os.environ["RANK"])
    # 2 rows a process and groups of 4: every group is cut in the middle.
    trainer = build("grpo", folder, per_device_train_batch_size=2, per_device_eval_batch_size=2, ddp_backend="gloo")
    engine = attach(trainer)
    prompts, completions = [], []
    generate = trainer.vllm_generation.generate

    def keep(*args: Any, **kwargs: Any) -> Any:
        answer = generate(*args, **kwargs)
        prompts.append([list(p) for p in answer[0]])
        completions.append([list(c) for c in answer[1]])
        return answer

    trainer.vllm_generation.generate = keep
    trainer.train()
    # A different number of calls on each: a collective in one of them would never end.
    for _ in range(1 + 2 * rank):
        _, ids, logprobs, _ = generate([[3, 4, 5]], None, 1)
    model = trainer.accelerator.unwrap_model(trainer.model)
    plain = plain_logprobs(model, [3, 4, 5], ids[0])
    detach(trainer)
    return {
        "wrapper": type(trainer.model_wrapped).__name__,
        "seed": engine.config.seed,
        "version": engine.weight_version,
        "prompts": prompts,
        "completions": completions,
        "differences": logged(trainer, "sampling/sampling_logp_difference/max"),
        "error": max(abs(a - b[0]) for a, b in zip(plain, logprobs[0], strict=True)),
        "weights": {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()},
    }


def test_two_processes_train_one_policy(tmp_path: Path) -> None:
    first, second = run_in_two_processes(train, str(tmp_path))
    assert first["wrapper"] == second["wrapper"] == "DistributedDataParallel"
    assert second["seed"] == first["seed"] + 1
    assert first["version"] == second["version"] >= 3
    assert len(first["prompts"]) == 3
    assert first["prompts"] == second["prompts"]  # the other half of the same groups
    assert all(a != b for a, b in zip(first["completions"], second["completions"], strict=True))
    assert max(first["differences"]) < LOGPROB_TOLERANCE  # gathered from both
    assert max(first["error"], second["error"]) < LOGPROB_TOLERANCE
    before = build("grpo", str(tmp_path)).model.state_dict()
    for name, tensor in first["weights"].items():
        assert torch.equal(tensor, second["weights"][name])
    assert any(not torch.equal(before[name], tensor) for name, tensor in first["weights"].items())


@pytest.mark.parametrize(
    ("how", "kind"),
    [("fsdp2", "grpo"), ("fsdp2", "rloo"), ("fsdp2", "online_dpo"), ("fsdp2", "distillation"), ("ddp", "online_dpo")],
)
def test_every_rank_samples_from_the_whole_model(tmp_path: Path, how: str, kind: str) -> None:
    first, second = ranks.run(accelerated.trl, 2, how, str(tmp_path), kind)
    for found in (first, second):
        accelerated.assert_trained(found, "mirror" if how == "fsdp2" else "aliased")
    # Halves of the same groups, or prompts of each rank's own.
    assert (first["prompts"] == second["prompts"]) == (kind in ("grpo", "rloo"))
