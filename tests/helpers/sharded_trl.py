"""What each rank does in the tests of TRL's trainers on several ranks. The processes import it by name."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import zero
from accelerate import Accelerator
from accelerated import adapted, deepspeed_on_a_cpu, is_asleep, launched, lora, shard, whole
from trl_setup import LOGPROB_TOLERANCE, build, logged, make_model, plain_logprobs, worst_difference

from stoker.rollout import EngineConfig, EngineStateError

AUTO = {"train_micro_batch_size_per_gpu": "auto"}
TOGETHER = EngineConfig(tensor_parallel_size=2)


def is_kept(engine: Any) -> bool:
    """With a copy of the mirror in host memory."""
    mirror = getattr(engine._binding.source, "mirror", None)
    return mirror is not None and mirror._host is not None


def train(
    rank: int,
    how: str,
    folder: str,
    kind: str = "grpo",
    adapter: bool = False,
    by_config: bool = False,
    beta: float = 0.0,
    together: bool = False,
) -> dict[str, Any]:
    """A trainer of TRL over two ranks' weights, or of an adapter, with GRPO's groups cut between them.

    by_config: the trainer makes the adapter. beta: of its divergence from a reference. together: both ranks run one model.
    """
    from stoker.integrations.trl import attach, detach

    launched()
    model = adapted(make_model()) if adapter and not by_config else make_model()
    settings: dict[str, Any] = {"per_device_train_batch_size": 2, "vllm_enable_sleep_mode": True, "model": model}
    if kind in ("grpo", "rloo"):
        settings |= {"per_device_eval_batch_size": 2, "beta": beta}
    if by_config:
        settings["more"] = {"peft_config": lora()}
    if how.startswith("zero"):
        deepspeed_on_a_cpu()
        trainer = build(kind, folder, use_cpu=False, deepspeed=zero.settings(int(how[-1])) | AUTO, **settings)
    else:
        trainer = build(kind, folder, ddp_backend="gloo", **settings)
    if how.startswith("fsdp"):
        shard(trainer.accelerator.state, int(how[-1]))
        trainer.is_fsdp_enabled = True
        Accelerator.device = torch.device("cpu")  # of which FSDP1 knows no index
    engine = attach(trainer, config=TOGETHER if together else None)
    sample, backward = engine.generate_batch, trainer.accelerator.backward
    asleep: list[bool] = []
    kept: list[bool] = []
    differences: list[float] = []
    prompts: list[list[int]] = []

    def keep(*arguments: Any, **fields: Any) -> Any:
        for _ in range(1 if together else 1 + 2 * rank):  # a collective in one of them would never end
            batch = sample(*arguments, **fields)
        differences.append(worst_difference(whole(trainer.model_wrapped), batch, trainer.args.temperature))
        prompts.extend(output.prompt_token_ids for output in batch)
        return batch

    def look(*arguments: Any, **fields: Any) -> None:
        asleep.append(is_asleep(engine))
        kept.append(is_kept(engine))
        backward(*arguments, **fields)

    engine.generate_batch, trainer.accelerator.backward = keep, look  # type: ignore[method-assign]
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    kept.append(is_kept(engine))
    version = engine.weight_version
    engine.generate_batch = sample  # type: ignore[method-assign]
    for _ in range(0 if together else rank):  # nor in this one
        trainer.vllm_generation.sample([[3, 4, 5]], None, 1)
    after = list(whole(trainer.model_wrapped).parameters())
    found = {
        "source": engine._binding.source.kind,
        "version": version,
        "asleep": asleep,
        "kept": kept,
        "worst": max([*differences, *logged(trainer, "sampling/sampling_logp_difference/max")]),
        "moved": max((a - b).abs().max().item() for a, b in zip(after, before, strict=True)),
        "prompts": prompts,
    }
    detach(trainer)
    return found


class _OfTwoFaces(torch.optim.SGD):
    """As a schedule-free one: what is evaluated are other weights than those that are trained, and no step is between them."""

    evaluates = False

    def train(self) -> None:
        self._turn(False)

    def eval(self) -> None:
        self._turn(True)

    @torch.no_grad()
    def _turn(self, evaluates: bool) -> None:
        if evaluates != self.evaluates:
            self.evaluates = evaluates
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5 if evaluates else 2.0)


def evaluate_others(rank: int, folder: str) -> list[tuple[bool, float]]:
    """Of each rollout of a run under FSDP2: whether it was one to train on, and how far its log-probabilities are from the weights'."""
    from stoker.integrations.trl import attach, detach

    launched()
    model = make_model()
    optimizer = _OfTwoFaces(model.parameters(), lr=0.05)
    settings = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    trainer = build(
        "grpo", folder, model=model, more={"optimizers": (optimizer, None)}, ddp_backend="gloo", max_steps=2, **settings
    )
    shard(trainer.accelerator.state)
    trainer.is_fsdp_enabled = True
    engine = attach(trainer)
    sample = engine.generate_batch
    found = []

    def keep(*arguments: Any, **fields: Any) -> Any:
        batch = sample(*arguments, **fields)
        found.append((trainer.model.training, worst_difference(whole(trainer.model_wrapped), batch)))
        return batch

    engine.generate_batch = keep  # type: ignore[method-assign]
    trainer.train()
    assert engine._binding.source.kind == "mirror"
    detach(trainer)
    return found


def score_in_a_reward(rank: int, folder: str) -> list[float]:
    """How far, in each step of a run under FSDP2, a reward function's scores of the completions are from what they were sampled with."""
    from stoker.integrations.trl import attach, detach

    launched()
    batches: list[Any] = []
    found = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        engine.wake_up()
        with pytest.raises(EngineStateError, match=r"sleep\(level=3\) dropped them: call update_weights\(\)"):
            engine.score(batches[-1])
        engine.update_weights()
        sampled = [c.logprobs for output in batches[-1] for c in output.completions]
        scored = engine.score(batches[-1], temperature=trainer.temperature)
        engine.sleep()
        found.append(
            max(float((s.logprobs - torch.tensor(own)).abs().max()) for s, own in zip(scored, sampled, strict=True))
        )
        return [float(text.count("a")) for text in completions]

    settings = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "vllm_enable_sleep_mode": True}
    trainer = build("grpo", folder, more={"reward_funcs": reward}, ddp_backend="gloo", **settings)
    shard(trainer.accelerator.state)
    trainer.is_fsdp_enabled = True
    engine = attach(trainer)
    sample = engine.generate_batch

    def keep(*arguments: Any, **fields: Any) -> Any:
        batches.append(sample(*arguments, **fields))
        return batches[-1]

    engine.generate_batch = keep  # type: ignore[method-assign]
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < LOGPROB_TOLERANCE
    detach(trainer)
    return found


def train_one_policy(rank: int, folder: str, together: bool) -> dict[str, Any]:
    """GRPO under DDP, of groups that are each cut in the middle: 2 rows a process and groups of 4.

    together: both ranks run one model.
    """
    from stoker.integrations.trl import attach, detach

    launched()
    trainer = build("grpo", folder, per_device_train_batch_size=2, per_device_eval_batch_size=2, ddp_backend="gloo")
    engine = attach(trainer, config=TOGETHER if together else None)
    prompts, completions = [], []
    generate = trainer.vllm_generation.generate

    def keep(*args: Any, **kwargs: Any) -> Any:
        answer = generate(*args, **kwargs)
        prompts.append([list(p) for p in answer[0]])
        completions.append([list(c) for c in answer[1]])
        return answer

    trainer.vllm_generation.generate = keep
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    # A different number of calls on each: a collective in one of them would never end.
    for _ in range(1 if together else 1 + 2 * rank):
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
        "moved": any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)),
        "weights": {name: tensor.numpy() for name, tensor in trainer.model.state_dict().items()},
    }


def assert_trained(found: dict[str, Any], source: str = "mirror", *, kept: bool = False) -> None:
    """kept: whether a mirror that sleeps is, though the next update comes before anything runs on it."""
    copies = source == "mirror"
    version = found["version"] - (copies and not kept)  # taken once more when training has ended
    assert (found["source"], version, found["asleep"]) == (source, 3, [True] * 3)
    assert found["kept"] == [copies and kept] * 3 + [copies]
    assert found["worst"] < LOGPROB_TOLERANCE < found["moved"] / 100


def train_in_bfloat16(rank: int, how: str, folder: str) -> dict[str, Any]:
    """A trainer whose model, prepared, is in another dtype than before: DeepSpeed's in bfloat16, parameters of FSDP in float32."""
    from stoker.integrations.trl import attach, detach

    launched()
    settings: dict[str, Any] = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "bf16": True}
    if how.startswith("zero"):
        deepspeed_on_a_cpu()
        deepspeed = zero.settings(int(how[-1]), torch.bfloat16) | AUTO
        with mock.patch("transformers.training_args.is_torch_bf16_gpu_available", lambda: True):
            trainer = build("grpo", folder, model=make_model(), use_cpu=False, deepspeed=deepspeed, **settings)
    else:
        trainer = build("grpo", folder, model=make_model().bfloat16(), ddp_backend="gloo", **settings)
        shard(trainer.accelerator.state)
        trainer.accelerator.state.fsdp_plugin.set_mixed_precision("bf16")
        trainer.is_fsdp_enabled = True
    engine = attach(trainer)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    expected = {name: tensor.bfloat16() for name, tensor in whole(trainer.model_wrapped).state_dict().items()}
    held = engine._binding.shell.tensors()
    before = make_model().bfloat16().state_dict()
    found = {
        "dtypes": ({p.dtype for p in trainer.model.parameters()}, engine._binding.source.dtype),
        "same": all(torch.equal(held[name], tensor) for name, tensor in expected.items()),
        "trained": any(not torch.equal(before[name], tensor) for name, tensor in expected.items()),
        "verified": engine.verify_weights().ok,
    }
    detach(trainer)
    return found
