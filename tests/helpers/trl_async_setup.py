"""TRL's AsyncGRPOTrainer on a CPU.

Stand-ins replace three things: the GPU kernel of its training forward, the GPU's name, and the templates of real models by
which it parses completions. All else is TRL's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl_setup import logged, make_model, make_tokenizer

from stoker.rollout import EngineConfig

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
ANSWER = "gggg"


def plain_varlen(
    query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, *_: Any, softmax_scale: float, **__: Any
) -> Any:
    """What the kernel computes: each segment of queries over its own keys, causal from the end. [T, H, D] each."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    out = torch.empty_like(query)
    for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], key[k0:k1]) * softmax_scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + int(k1 - k0) - int(q1 - q0))
        probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[q0:q1] = torch.einsum("hqk,khd->qhd", probs, value[k0:k1])
    return out


def chat_tokenizer() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, {"by": "parse"}
    return tokenizer


def parse(tokenizer: Any, ids: list[int], prefix: list[int], tools: Any = None) -> dict[str, Any]:
    """A completion is its text. With tools, the first turn of a conversation calls one."""
    message: dict[str, Any] = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    if tools and ANSWER not in tokenizer.decode(prefix):
        message["tool_calls"] = [{"type": "function", "function": {"name": "look_up", "arguments": {"key": "x"}}}]
    return message


def count_a(completions: list[Any], **_: Any) -> list[float]:
    return [float(c[0]["content"].count("a")) for c in completions]


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker, packing

    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=plain_varlen))
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    monkeypatch.setattr(async_rollout_worker, "parse_response", parse)


Make = Callable[..., Any]
OPTIONS: dict[str, Any] = {
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


def saved_model(paths: pytest.TempPathFactory) -> str:
    """The folder of a model, as the trainer takes it."""
    path = paths.mktemp("model")
    make_model().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", name="folder")
def a_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_model(tmp_path_factory)


def trainers(folder: str, output_dir: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Builds trainers that have their rollouts and no engine yet, and detaches in the end."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from stoker.integrations.trl_async import AsyncRollouts

    stand_in(monkeypatch)
    made: list[AsyncRollouts] = []

    def build(
        reward: Any,
        rollouts: AsyncRollouts | None = None,
        *,
        peft_config: Any = None,
        environment_factory: Any = None,
        tokenizer: Any = None,
        **settings: Any,
    ) -> Any:
        rollouts = rollouts or AsyncRollouts(reward, config=EngineConfig(kv_cache_memory="4MiB"))
        made.append(rollouts)
        return AsyncGRPOTrainer(
            model=folder,
            reward_funcs=reward,
            args=AsyncGRPOConfig(**OPTIONS | {"output_dir": output_dir} | settings),
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": c}] for c in ("abc", "hg", "d")]}),
            processing_class=tokenizer or chat_tokenizer(),
            rollout_worker=rollouts,
            weight_transfer=rollouts,
            peft_config=peft_config,
            environment_factory=environment_factory,
        )

    yield build
    for rollouts in made:
        if rollouts.engine is not None:
            rollouts.detach()


@pytest.fixture(name="make")
def async_trainers(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    yield from trainers(folder, str(tmp_path), monkeypatch)


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith(("stoker-async", "stoker-steps"))}


def record(rollouts: Any) -> list[Any]:
    """The samples that the trainer is given, from now on."""
    samples: list[Any] = []
    put = rollouts.rollout_buffer.put_nowait
    rollouts.rollout_buffer.put_nowait = lambda sample: (samples.append(sample), put(sample))[1]
    return samples


def look_often(trainer: Any) -> None:
    """Have the trainer look after its rollouts five times a second."""
    loader = trainer.get_train_dataloader

    def impatient() -> Any:
        made = loader()
        trainer._rollout_dataset.poll_interval_s = 0.2
        return made

    trainer.get_train_dataloader = impatient


def asked_of(engine: Any) -> list[tuple[list[int], Any, Any]]:
    """Prompt, parameters and handle of every request from now on."""
    submit, asked = engine.submit, []

    def keep(prompt: list[int], params: Any, **options: Any) -> Any:
        handle = submit(prompt, params, **options)
        asked.append((prompt, params, handle))
        return handle

    engine.submit = keep
    return asked


def weights_noted(trainer: Any, rollouts: Any) -> tuple[dict[int, dict[str, torch.Tensor]], dict[int, int]]:
    """Of every update from now on: the weights of the engine's version, and its version where the trainer counts its own."""
    engine, weights, newest_at = rollouts.engine, {}, {}
    update, tell = engine.update_weights, rollouts.update_model_version

    def noted_update() -> int:
        version: int = update()
        weights[version] = {n: t.detach().clone() for n, t in trainer.model.state_dict().items()}
        return version

    def noted_tell(version: int) -> None:
        newest_at[version] = engine.weight_version
        tell(version)

    engine.update_weights, rollouts.update_model_version = noted_update, noted_tell
    return weights, newest_at


def train_under_ddp(rank: int, folder: str, output_dir: str) -> dict[str, Any]:
    """Of two processes the main one samples, for both."""
    from accelerated import launched

    from stoker.integrations.trl_async import AsyncRollouts

    launched()
    made = trainers(folder, output_dir, pytest.MonkeyPatch())
    rollouts = AsyncRollouts(count_a, config=EngineConfig(kv_cache_memory="4MiB"))
    trainer = next(made)(count_a, rollouts, per_device_train_batch_size=4, ddp_backend="gloo")
    rollouts.attach(trainer)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    found = {
        "wrapper": type(trainer.model_wrapped).__name__,
        "version": rollouts.engine and rollouts.engine.weight_version,
        "ratios": logged(trainer, "ratio"),
        "moved": any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True)),
        "weights": {name: tensor.numpy() for name, tensor in trainer.model.state_dict().items()},
    }
    rollouts.detach()
    return found
