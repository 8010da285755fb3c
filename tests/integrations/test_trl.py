"""TRL's GRPO and RLOO trainers on the engine: they train, and the log-probabilities agree with the trainer's."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from trl_setup import (
    LOGPROB_TOLERANCE,
    MakeTrainer,
    ask,
    frozen_copy,
    logged,
    plain_logprobs,
    trainers,
)

from stoker.rollout import EngineConfig, RolloutEngine

pytest.importorskip("trl", reason="TRL is not installed")

from stoker.integrations.trl import attach, detach

KINDS = ("grpo", "rloo")


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    yield from trainers(str(tmp_path))


def worst_difference(model: Any, prompts: list[list[int]], answers: Any, temperature: float = 1.0) -> float:
    return max(
        abs(a - b)
        for prompt, completion, logprobs in zip(prompts, *answers, strict=True)
        for a, b in zip(logprobs, plain_logprobs(model, prompt, completion, temperature), strict=True)
    )


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_trains_and_evaluates_on_the_engine(make_trainer: MakeTrainer, kind: str) -> None:
    trainer = make_trainer(kind, eval_strategy="steps", eval_steps=2)
    before = copy.deepcopy(trainer.model.state_dict())
    engine = attach(trainer)
    trainer.train()
    trainer.evaluate()
    assert len(logged(trainer, "reward")) == 3 and logged(trainer, "eval_reward")
    # 3 batches of training, and evaluation at step 2 and at the end over 2 prompts.
    finished = engine.stats().finished_requests
    assert finished >= 3 * 8 and finished > 3 * 8
    assert engine.weight_version > 0
    assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())
    prompts = [[3, 4, 5], [6] * 20]
    assert worst_difference(trainer.model, prompts, ask(trainer, prompts)) < LOGPROB_TOLERANCE


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_iterations": 2},
        {"temperature": 0.7},
        {"gradient_accumulation_steps": 2},
        {"steps_per_generation": 2, "vllm_importance_sampling_mode": "token_truncate"},
        {"vllm_enable_sleep_mode": True},
        {"mask_truncated_completions": True},
        {"gradient_checkpointing": False},
    ],
    ids=lambda s: "-".join(s) or "default",
)
def test_logprobs_are_the_trainers(make_trainer: MakeTrainer, settings: dict[str, Any]) -> None:
    trainer = make_trainer(max_steps=4, eval_strategy="steps", eval_steps=2, **settings)
    attach(trainer)
    trainer.train()
    differences = logged(trainer, "sampling/sampling_logp_difference/max")
    assert len(differences) >= 2 and max(differences) < LOGPROB_TOLERANCE
    for which in ("min", "mean", "max"):
        ratios = logged(trainer, f"sampling/importance_sampling_ratio/{which}")
        assert ratios and all(abs(ratio - 1) < 8 * LOGPROB_TOLERANCE for ratio in ratios)  # 8 tokens a sequence
    assert max(logged(trainer, "eval_sampling/sampling_logp_difference/max")) < LOGPROB_TOLERANCE


def test_the_correction_can_be_off(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(vllm_importance_sampling_correction=False)
    attach(trainer)
    trainer.train()
    assert len(logged(trainer, "reward")) == 3
    assert not logged(trainer, "sampling/sampling_logp_difference/max")


def test_training_goes_where_the_reward_is(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_steps=25, learning_rate=5e-3)
    attach(trainer)
    trainer.train()
    rewards = logged(trainer, "reward")
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 5


@pytest.mark.parametrize("kind", KINDS)
def test_rollouts_use_the_weights_after_the_step(make_trainer: MakeTrainer, kind: str) -> None:
    trainer = make_trainer(kind, max_steps=1)
    prompts = [[3 + i % 8 for i in range(40)]] * 2  # longer than a block: old cached keys and values would show
    attach(trainer)
    old = frozen_copy(trainer.model)
    assert worst_difference(old, prompts, ask(trainer, prompts)) < LOGPROB_TOLERANCE
    trainer.train()
    answers = ask(trainer, prompts)
    assert worst_difference(trainer.model, prompts, answers) < LOGPROB_TOLERANCE
    assert worst_difference(old, prompts, answers) > 100 * LOGPROB_TOLERANCE  # the check can tell


def test_an_engine_left_behind_is_noticed(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inverse: an engine over a copy of the model, which no update reaches, shows in TRL's metrics."""
    trainer = make_trainer(max_steps=3)
    engine = attach(trainer)
    stale = RolloutEngine(frozen_copy(trainer.model), tokenizer=trainer._tokenizer)
    monkeypatch.setattr(trainer.vllm_generation, "engine", stale)
    trainer.train()
    differences = logged(trainer, "sampling/sampling_logp_difference/max")
    assert differences[0] < LOGPROB_TOLERANCE and max(differences[1:]) > 100 * LOGPROB_TOLERANCE
    monkeypatch.undo()
    assert trainer.vllm_generation.engine is engine


def test_weights_are_taken_once_a_step(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(max_steps=4, num_iterations=2)
    engine = attach(trainer)
    syncs: list[int] = []
    update = engine.update_weights
    monkeypatch.setattr(engine, "update_weights", lambda: (syncs.append(trainer.state.global_step), update())[1])
    trainer.train()
    assert len(syncs) == len(set(syncs)) == 2  # each batch serves two steps


def test_a_second_run_starts_from_the_weights_of_the_first(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_steps=1)
    attach(trainer)
    trainer.train()  # syncs at step 0 only, which is where the next run begins
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < LOGPROB_TOLERANCE


def test_the_best_checkpoint_is_what_is_evaluated(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(
        max_steps=2, eval_strategy="steps", save_strategy="steps", eval_steps=1, save_steps=1, save_total_limit=2,
        load_best_model_at_end=True, metric_for_best_model="eval_reward", greater_is_better=False,
    )  # fmt: skip
    engine = attach(trainer)
    syncs: list[int] = []
    update = engine.update_weights
    monkeypatch.setattr(engine, "update_weights", lambda: (syncs.append(trainer.state.global_step), update())[1])
    trainer.train()  # the reward is to be lowest, so the first checkpoint is loaded in the end
    trainer.evaluate()
    # Of the rollout after an evaluation, too: an average may have been evaluated, and nothing tells of what is put back.
    assert syncs == [0, 1, 1, 2, 2], "weights changed without a step, which a sharded model's engine does not notice"
    assert max(logged(trainer, "eval_sampling/sampling_logp_difference/max")) < LOGPROB_TOLERANCE


# -- what TRL gets -------------------------------------------------------------------------------------------------


def test_one_completion_for_each_prompt_in_order(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    engine = attach(trainer)
    group = [[3, 4, 5]] * 4 + [[9, 8, 7, 6]] * 4
    timed = []

    @contextmanager
    def profiler() -> Iterator[None]:
        timed.append(engine.stats().finished_requests)
        yield
        timed.append(engine.stats().finished_requests)

    prompt_ids, completions, logprobs, _ = trainer.vllm_generation.generate(group, None, 4, profiler())
    assert timed == [0, 8]  # around the sampling and nothing else
    assert prompt_ids == group
    assert [len(c) for c in completions] == [len(row) for row in logprobs]
    assert all(type(row) is list and 1 <= len(row) <= 8 for row in completions)
    assert len({tuple(c) for c in completions[:4]}) > 1  # samples of a group differ
    assert ask(trainer, group)[0] != completions  # and so do calls


def test_a_tool_loop_continues_ragged_subsets(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's tool loop: fewer and longer prompts each turn, one sample each, lists that grow in place, no sync."""
    trainer = make_trainer()
    engine = attach(trainer)
    histories = [[3, 4, 5]] * 3 + [[6, 7]]
    completions, logprobs = trainer._generate_single_turn(histories, None, {}, 4)
    monkeypatch.setattr(engine, "update_weights", lambda: pytest.fail("a tool turn must not take the weights again"))
    kept = copy.deepcopy(completions)
    for turn in ([0, 1, 3], [3]):
        prompts = [histories[i] + completions[i] + [10, 9] for i in turn]
        more, more_logprobs = trainer._generate_single_turn(prompts, None, {}, 1)
        assert worst_difference(trainer.model, prompts, (more, more_logprobs)) < LOGPROB_TOLERANCE
        for i, tokens, scores in zip(turn, more, more_logprobs, strict=True):
            completions[i] = completions[i] + [10, 9] + tokens
            logprobs[i] += [0.0, 0.0, *scores]
    assert completions[2] == kept[2] and all(c[: len(k)] == k for c, k in zip(completions, kept, strict=True))
    assert trainer.vllm_generation.generate([], None, 1) == ([], [], [], [])


def test_equal_prompts_are_sampled_anew_and_as_torch_is_seeded(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    attach(trainer)
    runs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        runs.append([ask(trainer, [[3, 4, 5]] * 4)[0] for _ in range(2)])
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(completion) for call in runs[0] for completion in call}) == 8


def test_processes_sample_differently(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(seed=5)
    prompts = [[3, 4, 5]] * 4

    def sampled(rank: int, config: EngineConfig | None = None) -> tuple[int, list[list[int]]]:
        monkeypatch.setattr(type(trainer.accelerator), "process_index", rank)
        engine = attach(trainer, config=config)
        torch.manual_seed(3)
        tokens, _ = ask(trainer, prompts)
        detach(trainer)
        return engine.config.seed, tokens

    first, again, other = sampled(0), sampled(0), sampled(1)
    assert first == again and first[0] == 5 and other[0] == 6
    assert first[1] != other[1]
    assert sampled(1, EngineConfig(seed=40, max_num_seqs=2))[0] == 41
