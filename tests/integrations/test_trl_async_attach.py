"""How rollouts are attached to TRL's AsyncGRPOTrainer and detached: what is refused, and that nothing is left behind."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl_async_setup import (
    OPTIONS,
    Make,
    a_folder,  # noqa: F401
    async_trainers,  # noqa: F401
    chat_tokenizer,
    count_a,
    stand_in,
    threads,
)

pytest.importorskip("trl", minversion="1.16", reason="asynchronous GRPO needs TRL 1.16")

from datasets import Dataset
from peft import LoraConfig
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from stoker.integrations import trl_async
from stoker.integrations.trl_async import AsyncRollouts
from stoker.rollout import EngineConfig, EngineStateError, InvalidConfigError, InvalidRequestError, StokerError


def test_what_cannot_work_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(count_a)
    with pytest.raises(InvalidConfigError, match="built without these rollouts"):
        AsyncRollouts(count_a).attach(trainer)
    with pytest.raises(InvalidConfigError, match="and this is a SimpleNamespace: use stoker.integrations.trl.attach"):
        AsyncRollouts(count_a).attach(SimpleNamespace())
    with pytest.raises(EngineStateError, match=r"call attach\(trainer\) before trainer.train\(\)"):
        trainer.train()
    for kind in ("is_fsdp_enabled", "is_deepspeed_enabled"):
        with monkeypatch.context() as patch, pytest.raises(InvalidConfigError, match="the trainer shards its model"):
            patch.setattr(trainer, kind, True)
            trainer.rollout_worker.attach(trainer)
    trainer.rollout_worker.attach(trainer)
    with pytest.raises(EngineStateError, match="attached already"):
        trainer.rollout_worker.attach(trainer)
    trainer.rollout_worker.detach()
    with pytest.raises(EngineStateError, match="attached to no trainer"):
        trainer.rollout_worker.detach()


def test_over_fp32_weights_in_mixed_precision_a_gpu_samples_in_bf16(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, found = make(count_a), []

    def build(model: Any, *, config: EngineConfig, tokenizer: Any) -> Any:
        found.append(config.dtype)
        return SimpleNamespace(max_model_len=64, close=lambda: None)

    monkeypatch.setattr(trl_async, "RolloutEngine", build)
    monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", "bf16")
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(type(trainer.accelerator), "device", torch.device(device))
        trainer.rollout_worker.attach(trainer)
        trainer.rollout_worker.detach()
    assert found == ["auto", torch.bfloat16]


def test_an_interrupt_leaves_the_trainer_as_it_was(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(count_a)
    trainer.model.load_state_dict(
        {k: v.clone() for k, v in trainer.model.state_dict().items()}, assign=True
    )  # no file's
    before, settings = dict(vars(trainer)), dict(vars(trainer.args))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(trainer), "add_callback", interrupt)
        trainer.rollout_worker.attach(trainer)
    assert vars(trainer) == before and trainer.rollout_worker.engine is None
    assert vars(trainer.args) == settings
    assert all(p.untyped_storage().resizable() for p in trainer.model.parameters()), "weights own their memory again"
    trainer.rollout_worker.attach(trainer)
    trainer.rollout_worker.detach()
    assert vars(trainer) == before and vars(trainer.args) == settings


@pytest.mark.parametrize(
    ("setting", "error"), [({"top_p": 3.0}, InvalidRequestError), ({"temperature": 0.0}, InvalidConfigError)]
)
def test_a_setting_that_cannot_be_is_refused_before_training(
    make: Make, setting: dict[str, float], error: type[StokerError]
) -> None:
    trainer = make(count_a, **setting)
    with pytest.raises(error, match=next(iter(setting))):
        trainer.rollout_worker.attach(trainer)
    assert trainer.rollout_worker.engine is None


@pytest.mark.parametrize("lora", [False, True])
def test_one_import_is_all_that_changes(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    """What is given by position and by name arrives, with the trainer's class and signature as they were."""
    stand_in(monkeypatch)
    seen: list[str] = []

    def reward(completions: list[Any], **_: Any) -> list[float]:
        seen.extend(c[0]["content"] for c in completions)
        return count_a(completions)

    args = AsyncGRPOConfig(**OPTIONS | {"output_dir": str(tmp_path), "max_steps": 2})
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": c}] for c in ("abc", "hg", "d")]})
    made = trl_async.AsyncGRPOTrainer(
        folder,
        reward,
        args,
        train_dataset=data,
        processing_class=chat_tokenizer(),
        peft_config=LoraConfig(target_modules=["q_proj"]) if lora else None,
        engine_config=EngineConfig(kv_cache_memory="4MiB", seed=7),
        recompute=True,
    )
    assert isinstance(made, AsyncGRPOTrainer) and made.rollouts is made.rollout_worker is made.weight_transfer
    engine = made.rollouts.engine
    assert engine is not None and engine.config.seed == 7 and made.rollouts._recompute
    before = {n: p.detach().clone() for n, p in made.model.named_parameters() if p.requires_grad}
    made.train()
    assert len(seen) >= 16 and engine.weight_version >= 2 and not threads()
    assert any(not torch.equal(p, before[n]) for n, p in made.model.named_parameters() if n in before)
    made.rollouts.detach()


def test_tools_and_environments_are_those_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(self: Any, *args: Any, rollout_worker: Any, **kwargs: Any) -> None:
        self.given = args, kwargs, rollout_worker._sources, rollout_worker._config

    monkeypatch.setattr(AsyncGRPOTrainer, "__init__", wraps(AsyncGRPOTrainer.__init__)(built))
    monkeypatch.setattr(AsyncRollouts, "attach", lambda *_: None)
    made = trl_async.AsyncGRPOTrainer("model", tools=[print], environment_factory=dict)
    sources = {"reward_funcs": [], "tools": [print], "environment_factory": dict}
    kwargs = {"tools": [print], "environment_factory": dict, "weight_transfer": made.rollouts}
    assert made.given == (("model",), kwargs, sources, None)
    for name in ("rollout_worker", "weight_transfer"):
        with pytest.raises(InvalidConfigError, match=f"the engine takes the place of {name}: leave it out"):
            trl_async.AsyncGRPOTrainer("model", **{name: made.rollouts})
