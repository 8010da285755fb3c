"""TRL's AsyncGRPOTrainer with the engine as its rollout worker: the trainer is TRL's own, and so is the rollout loop.

``trl_async_setup`` has the stand-ins for what it wants of a GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl_async_setup import ANSWER, chat_tokenizer, count_a, stand_in
from trl_setup import LOGPROB_TOLERANCE, make_model, plain_logprobs

pytest.importorskip("trl", reason="TRL is not installed")

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from stoker.integrations.trl_async import AsyncRollouts
from stoker.rollout import EngineConfig, EngineStateError, InvalidConfigError

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(path)
    return str(path)


@pytest.fixture
def make(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    stand_in(monkeypatch)
    made: list[AsyncRollouts] = []

    def build(reward: Any, rollouts: AsyncRollouts | None = None, *, peft_config: Any = None, **settings: Any) -> Any:
        rollouts = rollouts or AsyncRollouts(reward, config=EngineConfig(kv_cache_memory="4MiB"))
        made.append(rollouts)
        options: dict[str, Any] = {
            "output_dir": str(tmp_path),
            "per_device_train_batch_size": 8,
            "max_steps": 3,
            "learning_rate": 1e-2,
            "num_generations": 4,
            "max_completion_length": 8,
            "max_staleness": 4,
            "max_inflight_tasks": 8,
            "dtype": "float32",
            "bf16": False,
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
        }
        return AsyncGRPOTrainer(
            model=folder,
            reward_funcs=reward,
            args=AsyncGRPOConfig(**options | settings),
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": c}] for c in ("abc", "hg", "d")]}),
            processing_class=chat_tokenizer(),
            rollout_worker=rollouts,
            weight_transfer=rollouts,
            peft_config=peft_config,
        )

    yield build
    for rollouts in made:
        if rollouts.engine is not None:
            rollouts.detach()


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("stoker-async")}


@pytest.mark.parametrize("recompute", [False, True])
def test_samples_carry_the_log_probabilities_of_the_weights_they_were_drawn_from(make: Make, recompute: bool) -> None:
    rollouts = AsyncRollouts(count_a, config=EngineConfig(kv_cache_memory="4MiB"), recompute=recompute)
    trainer = make(count_a, rollouts, max_steps=4)
    engine = rollouts.attach(trainer)
    assert engine is not None
    weights: dict[int, dict[str, torch.Tensor]] = {}
    outputs: list[Any] = []
    submit = engine.submit

    def noted(*args: Any, **options: Any) -> Any:
        weights.setdefault(
            engine.weight_version, {n: t.detach().clone() for n, t in trainer.model.state_dict().items()}
        )
        handle = submit(*args, **options)
        outputs.append(handle)
        return handle

    engine.submit = noted  # type: ignore[method-assign]
    first = {n: t.detach().clone() for n, t in trainer.model.state_dict().items()}
    trainer.train()
    assert not threads() and engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks
    assert any(not torch.equal(t, first[n]) for n, t in trainer.model.state_dict().items())
    assert engine.weight_version >= 4 and trainer.model_version == 5
    oracle, checked, versions = make_model(), 0, set()
    for handle in outputs:
        if not handle.done:
            continue
        output = handle.result()
        (c,) = output.completions
        if c.finish_reason == "abort" or len(set(c.weight_versions)) > 1 or c.weight_versions[0] not in weights:
            continue  # of several versions: older keys and values, which no single model has
        oracle.load_state_dict(weights[c.weight_versions[0]])
        plain = plain_logprobs(oracle, output.prompt_token_ids, c.token_ids)
        assert c.logprobs == pytest.approx(plain, abs=LOGPROB_TOLERANCE)
        checked += 1
        versions.add(c.weight_versions[0])
    assert checked >= 8 and len(versions) >= 2


def test_reward_rises(make: Make) -> None:
    trainer = make(count_a, max_steps=40, learning_rate=3e-2, max_staleness=1)
    trainer.rollout_worker.attach(trainer)
    trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    assert sum(rewards[-8:]) / 8 > sum(rewards[:8]) / 8 + 0.5


def test_an_adapter_is_read_live_and_never_merged(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    trainer = make(count_a, peft_config=config, learning_rate=0.1)
    monkeypatch.setattr(type(trainer.model.base_model), "merge_adapter", lambda self: pytest.fail("merged"))
    engine = trainer.rollout_worker.attach(trainer)
    base = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora_" not in n}
    trainer.train()
    assert all(torch.equal(p, base[n]) for n, p in trainer.model.named_parameters() if n in base)
    batch = engine.generate_batch([[3, 4, 5]] * 4)
    oracle = get_peft_model(make_model(), config).eval()
    oracle.load_state_dict(trainer.model.state_dict())
    for output in batch:
        plain = plain_logprobs(oracle, output.prompt_token_ids, output.completions[0].token_ids)
        assert output.completions[0].logprobs == pytest.approx(plain, abs=LOGPROB_TOLERANCE)


def test_a_reward_function_that_raises_ends_training_with_its_error(make: Make) -> None:
    def broken(**_: Any) -> list[float]:
        raise ZeroDivisionError("no reward today")

    trainer = make(broken)
    engine = trainer.rollout_worker.attach(trainer)
    monkeypatched = trainer.get_train_dataloader

    def impatient() -> Any:
        loader = monkeypatched()
        trainer._rollout_dataset.poll_interval_s = 0.2
        return loader

    trainer.get_train_dataloader = impatient
    with pytest.raises(RuntimeError, match="the rollouts have failed: ZeroDivisionError: no reward today"):
        trainer.train()
    assert not threads() and not engine.core.has_work
    assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks


def test_an_optimizer_step_that_raises_leaves_nothing_paused(make: Make) -> None:
    trainer = make(count_a)
    engine = trainer.rollout_worker.attach(trainer)
    trainer.create_optimizer()

    def fail(*_: Any, **__: Any) -> None:
        raise FloatingPointError("the loss is gone")

    trainer.optimizer.step = fail
    with pytest.raises(FloatingPointError, match="the loss is gone"):
        trainer.train()
    assert not threads() and not engine.is_paused and not engine.core.has_work
    assert len(engine.generate_batch([[3, 4]])[0].completions[0].token_ids) > 0


def test_tools_are_called_and_their_answers_are_context(make: Make) -> None:
    asked: list[str] = []

    def look_up(key: str) -> str:
        """Look a key up.

        Args:
            key: what to look up.
        """
        asked.append(key)
        return ANSWER

    rollouts = AsyncRollouts(count_a, tools=[look_up], config=EngineConfig(kv_cache_memory="4MiB"))
    trainer = make(count_a, rollouts, max_steps=1, max_tool_calling_iterations=2)
    rollouts.attach(trainer)
    samples: list[Any] = []
    put = rollouts.rollout_buffer.put_nowait
    rollouts.rollout_buffer.put_nowait = lambda sample: (samples.append(sample), put(sample))[1]  # type: ignore[method-assign]
    trainer.train()
    assert len(asked) >= len(samples) > 0 and set(asked) == {"x"}
    answer = trainer.processing_class(ANSWER)["input_ids"]
    before = 0
    for sample in samples:
        ids, mask = sample.input_ids.tolist(), sample.completion_mask.tolist()
        at = next(
            i for i in range(len(ids)) if ids[i : i + len(answer)] == answer and not any(mask[i : i + len(answer)])
        )
        before += any(mask[:at])  # not where the first turn was an EOS and no more
        assert any(mask[at:]) and sample.metrics["tools/call_frequency"] == 1
        assert sample.metrics["tools/failure_frequency"] == 0
    assert before


def test_what_cannot_work_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(count_a)
    with pytest.raises(InvalidConfigError, match="built without these rollouts"):
        AsyncRollouts(count_a).attach(trainer)
    with pytest.raises(InvalidConfigError, match="and this is a SimpleNamespace: use stoker.integrations.trl.attach"):
        AsyncRollouts(count_a).attach(SimpleNamespace())
    with pytest.raises(EngineStateError, match=r"call attach\(trainer\) before trainer.train\(\)"):
        trainer.train()
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    with pytest.raises(InvalidConfigError, match="the trainer shards its model"):
        trainer.rollout_worker.attach(trainer)
    monkeypatch.undo()
    trainer.rollout_worker.attach(trainer)
    with pytest.raises(EngineStateError, match="attached already"):
        trainer.rollout_worker.attach(trainer)
    trainer.rollout_worker.detach()
    with pytest.raises(EngineStateError, match="attached to no trainer"):
        trainer.rollout_worker.detach()


def test_a_worker_that_stands_still_is_noticed(make: Make) -> None:
    rollouts = AsyncRollouts(count_a)
    rollouts._heartbeat.value = time.time() - 60
    with pytest.raises(RuntimeError, match="have stood still for 60 s"):
        rollouts._check_health(30)
