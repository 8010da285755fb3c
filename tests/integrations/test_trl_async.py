"""TRL's AsyncGRPOTrainer with the engine as its rollout worker: the trainer is TRL's own, and so is the rollout loop.

``trl_async_setup`` has the stand-ins for what it wants of a GPU.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from trl_async_setup import (
    ANSWER,
    Make,
    a_folder,  # noqa: F401
    async_trainers,  # noqa: F401
    chat_tokenizer,
    count_a,
    parse,
    record,
    threads,
    weights_noted,
)
from trl_setup import EOS, LOGPROB_TOLERANCE, make_model, plain_logprobs

pytest.importorskip("trl", minversion="1.16", reason="asynchronous GRPO needs TRL 1.16")

from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback
from trl.experimental.async_grpo import async_rollout_worker

from stoker.integrations.trl_async import AsyncRollouts
from stoker.rollout import EngineConfig


@pytest.mark.parametrize("recompute", [False, True])
def test_samples_carry_the_log_probabilities_of_the_weights_they_were_drawn_from(make: Make, recompute: bool) -> None:
    rollouts = AsyncRollouts(count_a, config=EngineConfig(kv_cache_memory="4MiB"), recompute=recompute)
    trainer = make(count_a, rollouts, temperature=0.8, max_completion_length=12, queue_maxsize=1000)
    engine = rollouts.attach(trainer)
    assert engine is not None
    assert trainer.args.token_budget == engine.max_model_len and rollouts.rollout_buffer.maxsize == 1000
    samples, handles = record(rollouts), []
    weights, newest_at = weights_noted(trainer, rollouts)
    submit, pause, tell = engine.submit, engine.pause, rollouts.update_model_version

    def noted_submit(*args: Any, **options: Any) -> Any:
        handles.append(submit(*args, **options))
        return handles[-1]

    def pause_within_a_completion(mode: Any, **whose: Any) -> None:
        while threads():
            pause(mode, **whose)
            if any(h.status == "running" and h._requests[0].num_output > 2 for h in handles):
                return
            engine.resume(**whose)
            time.sleep(1e-3)

    def tell_and_wait(version: int) -> None:
        tell(version)
        end = time.monotonic() + 30
        while version == 2 and threads() and time.monotonic() < end and all(s.model_version == 1 for s in samples):
            time.sleep(1e-3)  # or all steps might be over before a group that begins now is

    engine.submit, engine.pause = noted_submit, pause_within_a_completion  # type: ignore[method-assign, assignment]
    rollouts.update_model_version = tell_and_wait  # type: ignore[method-assign]
    first = {n: t.detach().clone() for n, t in trainer.model.state_dict().items()}
    trainer.train()
    assert not threads() and engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks
    assert any(not torch.equal(t, first[n]) for n, t in trainer.model.state_dict().items())
    assert len(weights) == 4 and trainer.model_version == 4

    oracle, several, of_sequence = make_model(), 0, {}
    for handle in handles:
        if not handle.done:
            continue
        output = handle.result()
        (c,) = output.completions
        assert EOS not in c.token_ids[:-1]
        if c.finish_reason == "abort":
            continue
        of_sequence.setdefault((*output.prompt_token_ids, *c.token_ids), []).append(c)
        several += len(set(c.weight_versions)) > 1
        if len(set(c.weight_versions)) > 1 and not recompute:
            continue  # over older keys and values, which no single model has
        for version in set(c.weight_versions):
            oracle.load_state_dict(weights[version])
            plain = plain_logprobs(oracle, output.prompt_token_ids, c.token_ids, temperature=0.8)
            drawn = [i for i, v in enumerate(c.weight_versions) if v == version]
            assert [c.logprobs[i] for i in drawn] == pytest.approx([plain[i] for i in drawn], abs=LOGPROB_TOLERANCE)
    assert several

    for sample in samples:
        same = of_sequence[tuple(sample.input_ids.tolist())]
        trained = sample.completion_mask == 1
        assert not sample.old_log_probs[~trained].any()
        assert any(sample.old_log_probs[trained].tolist() == pytest.approx(c.logprobs) for c in same)
        assert max(c.weight_versions[0] for c in same) >= newest_at[sample.model_version]
    assert len({sample.model_version for sample in samples}) > 1
    assert set(Counter(sample.group_id for sample in samples).values()) == {4}
    # The first step trains on what was drawn from the weights it starts from.
    (ratio, *_) = [log["ratio"] for log in trainer.state.log_history if "ratio" in log]
    assert ratio == pytest.approx(1.0, abs=1e-4)


def test_samples_that_are_too_old_are_not_trained_on(make: Make) -> None:
    trainer = make(count_a, max_staleness=0)
    trainer.rollout_worker.attach(trainer)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "sample/staleness_max" in log]
    assert len(logs) == 3 and all(log["sample/staleness_max"] == 0 for log in logs)
    assert sum(log.get("sample/dropped_stale_total") or 0 for log in logs) > 0
    assert all("rollout/duration_s" in log for log in logs)  # what the loop measures arrives


def test_reward_rises(make: Make) -> None:
    trainer = make(count_a, max_steps=40, learning_rate=8e-3, max_staleness=1)
    trainer.rollout_worker.attach(trainer)
    trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    assert sum(rewards[-8:]) / 8 > sum(rewards[:8]) / 8 + 2


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


@pytest.mark.parametrize("off", ["all of it", "a part"])  # the rest follows at once
def test_a_forward_without_the_adapter_changes_no_rollout(make: Make, off: str) -> None:
    """One of a reference policy, say, in the trainer's thread: completions that begin meanwhile are the policy's all the same."""
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    trainer = make(count_a, peft_config=config, learning_rate=0.0, max_inflight_tasks=8 if off == "all of it" else 1)
    engine = trainer.rollout_worker.attach(trainer)
    samples = record(trainer.rollout_worker)
    submit, compute_loss, begun = engine.submit, trainer.compute_loss, []

    def noted(*given: Any, **options: Any) -> Any:
        handle = submit(*given, **options)
        begun.append(handle)
        return handle

    def with_a_reference(*given: Any, **options: Any) -> Any:
        layer = next(module for module in trainer.model.modules() if hasattr(module, "lora_A"))
        layer.enable_adapters(off == "all of it")
        with trainer.model.disable_adapter() if off == "all of it" else nullcontext():
            before, end = len(begun), time.monotonic() + 60
            while threads() and len(begun) == before and time.monotonic() < end:
                time.sleep(1e-3)
        layer.enable_adapters(True)
        return compute_loss(*given, **options)

    engine.submit, trainer.compute_loss = noted, with_a_reference
    trainer.train()
    policy = get_peft_model(make_model(), config).eval()
    policy.load_state_dict(trainer.model.state_dict())
    for sample in samples:
        ids, first = sample.input_ids.tolist(), int(sample.completion_mask.argmax())
        plain = plain_logprobs(policy, ids[:first], ids[first:])
        assert sample.old_log_probs[first:].tolist() == pytest.approx(plain, abs=LOGPROB_TOLERANCE)


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
    samples = record(rollouts)
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


def test_an_optimizer_step_is_not_looked_into(make: Make) -> None:
    """A tool that answers during one has its next turn queued: the weights are neither those before nor those after."""
    within = [False]  # such a step, and not at its border
    answered: list[bool] = []
    submitted: list[bool] = []
    looked: list[bool] = []

    def look_up(key: str) -> str:
        """Look a key up.

        Args:
            key: what to look up.
        """
        end = time.monotonic() + (0.05 if any(answered) else 0.5)  # until one has answered during a step
        while not within[0] and time.monotonic() < end:
            time.sleep(0.005)
        answered.append(within[0])
        return ANSWER

    class Slow(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            time.sleep(0.02)
            within[0], before, end = True, (len(answered), len(submitted)), time.monotonic() + 2
            while not (len(answered) > before[0] and len(submitted) > before[1]) and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(0.1)
            within[0] = False

    rollouts = AsyncRollouts(count_a, tools=[look_up], config=EngineConfig(kv_cache_memory="4MiB"))
    trainer = make(count_a, rollouts, max_tool_calling_iterations=2)
    engine = rollouts.attach(trainer)
    assert engine is not None
    trainer.add_callback(Slow())
    submit, notice = engine.submit, engine._updates.notice
    engine.submit = lambda *given, **o: (submitted.append(within[0]), submit(*given, **o))[1]  # type: ignore[method-assign]
    engine._updates.notice = lambda **o: (looked.append(within[0]), notice(**o))[1]  # type: ignore[method-assign]
    trainer.train()
    assert any(answered) and any(submitted) and looked and not any(looked)


def test_environments_give_tools_and_the_reward(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def always(tokenizer: Any, ids: list[int], prefix: list[int], tools: Any = None) -> dict[str, Any]:
        return parse(tokenizer, ids, [], tools)

    monkeypatch.setattr(async_rollout_worker, "parse_response", always)

    class Room:
        def reset(self, **_: Any) -> str:
            self.looked = 0
            return "f"

        def look_up(self, key: str) -> str:
            """Look a key up.

            Args:
                key: what to look up.
            """
            self.looked += 1
            return ANSWER

        def get_reward(self) -> float:
            return float(self.looked)

    rollouts = AsyncRollouts(environment_factory=Room, config=EngineConfig(kv_cache_memory="4MiB"))
    trainer = make(None, rollouts, environment_factory=Room, max_steps=1, max_tool_calling_iterations=2)
    rollouts.attach(trainer)
    samples = record(rollouts)
    trainer.train()
    assert samples and all(sample.metrics["rewards/Room"] == 2 for sample in samples)
    assert all(sample.prompt[-1]["content"].endswith("f") for sample in samples)


def test_a_tokenizer_without_an_eos(make: Make) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.eos_token = None
    trainer = make(count_a, tokenizer=tokenizer, max_steps=1)
    assert trainer.eos_token_ids == [None, EOS]  # TRL's own
    trainer.rollout_worker.attach(trainer)
    samples = record(trainer.rollout_worker)
    trainer.train()
    assert any(sample.input_ids[-1] == EOS for sample in samples)


def test_somebody_elses_resume_within_an_optimizer_step_does_not_end_its_pause(make: Make) -> None:
    trainer = make(count_a, max_steps=1)
    engine = trainer.rollout_worker.attach(trainer)
    trainer.create_optimizer()
    step, held = trainer.optimizer.step, []

    def within(*args: Any, **options: Any) -> Any:
        for change in (engine.pause, engine.resume):
            changing = threading.Thread(target=change)
            changing.start()
            changing.join()
        held.append(engine.is_paused)
        return step(*args, **options)

    trainer.optimizer.step = within
    trainer.train()
    assert held == [True] and not engine.is_paused and not threads()


@pytest.mark.parametrize("fails", [False, True])
def test_a_pause_of_somebody_else_outlives_optimizer_steps_and_the_run(make: Make, fails: bool) -> None:
    """Of a client of a server on the same engine, say."""
    trainer = make(count_a, max_steps=1)

    class Somebody(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            pausing = threading.Thread(target=engine.pause)
            pausing.start()
            pausing.join()

    def fail(*_: Any, **__: Any) -> None:
        raise FloatingPointError("the loss is gone")

    trainer.add_callback(Somebody())  # before the rollouts' own
    engine = trainer.rollout_worker.attach(trainer)
    if fails:
        trainer.create_optimizer()
        trainer.optimizer.step = fail
        with pytest.raises(FloatingPointError, match="the loss is gone"):
            trainer.train()
    else:
        trainer.train()
        assert engine.weight_version > 0
    assert not threads() and engine.is_paused and not engine.core.has_work
    engine.resume()
    assert len(engine.generate_batch([[3, 4]])[0].completions[0].token_ids) > 0


@pytest.mark.parametrize("seed", [3, 4])
def test_what_is_sampled_follows_the_trainers_seed(make: Make, seed: int) -> None:
    rollouts = AsyncRollouts(count_a)
    engine = rollouts.attach(make(count_a, rollouts, seed=seed))
    assert engine is not None and engine.config.seed == seed
