"""TRL's GRPO and RLOO trainers on the engine: they train, and the log-probabilities agree with the trainer's."""

import copy
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import ProcessorMixin, Trainer, TrainingArguments
from trl_setup import END_OF_TURN, EOS, LOGPROB_TOLERANCE, build, frozen_copy, logged, make_model, plain_logprobs

from stoker.rollout import (
    Completion,
    EngineConfig,
    EngineStateError,
    InvalidConfigError,
    InvalidRequestError,
    RolloutBatch,
    RolloutEngine,
    RolloutOutput,
    StokerError,
    UnsupportedModelError,
    WeightsMovedError,
)

pytest.importorskip("trl", reason="TRL is not installed")

from stoker.integrations.trl import attach, detach

KINDS = ("grpo", "rloo")
MakeTrainer = Callable[..., Any]


@pytest.fixture
def make_trainer(tmp_path: Any) -> Iterator[MakeTrainer]:
    """Builds trainers of either kind; whatever is attached at the end of the test is detached."""
    made = []

    def make(kind: str = "grpo", *, model: Any = None, **settings: Any) -> Any:
        trainer = build(kind, str(tmp_path), model=model, **settings)
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        if trainer.use_vllm:
            detach(trainer)


def ask(trainer: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """Completions and log-probabilities as TRL gets them."""
    if trainer.state.global_step != trainer._last_loaded_step:
        trainer.vllm_generation.sync_weights()
    _, completions, logprobs, ids = trainer.vllm_generation.generate(prompts, None, 1)
    assert ids == [[[token] for token in c] for c in completions]
    return completions, [[row[0] for row in rows] for rows in logprobs]


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
    assert syncs == [0, 1, 2, 2], "weights changed without a step, which a sharded model's engine does not notice"
    assert max(logged(trainer, "eval_sampling/sampling_logp_difference/max")) < LOGPROB_TOLERANCE


# -- what TRL gets -------------------------------------------------------------------------------------------------


def test_one_completion_for_each_prompt_in_order(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    attach(trainer)
    group = [[3, 4, 5]] * 4 + [[9, 8, 7, 6]] * 4
    prompt_ids, completions, logprobs, _ = trainer.vllm_generation.generate(group, None, 4)
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


# -- settings ------------------------------------------------------------------------------------------------------


def lowered(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The sampling parameters the engine is called with."""
    seen: list[Any] = []
    engine = trainer.vllm_generation.engine

    def generate_batch(prompts: list[list[int]], params: Any) -> RolloutBatch:
        seen.append(params)
        return RolloutBatch([])

    with monkeypatch.context() as patch:
        patch.setattr(engine, "generate_batch", generate_batch)
        trainer.vllm_generation.generate([[3]], None, 1)
    return seen[0][0]


def test_settings_are_read_at_each_generation(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(temperature=0.9, top_p=0.8, top_k=5, min_p=0.1, repetition_penalty=1.2)
    attach(trainer)
    params = lowered(trainer, monkeypatch)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.9, 0.8, 5, 0.1)
    assert (params.repetition_penalty, params.max_tokens, params.n) == (1.2, 8, 1)
    assert params.stop_token_ids == (EOS,) and params.ignore_eos
    trainer.temperature, trainer.max_completion_length = 0.5, 3
    for off in (None, 0, -1):
        trainer.top_k = off
        params = lowered(trainer, monkeypatch)
        assert (params.temperature, params.max_tokens, params.top_k) == (0.5, 3, 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 0.3, "top_k": 2}, {"temperature": 0.3, "top_k": 2}),
        ({"max_new_tokens": 4, "min_new_tokens": 2}, {"max_tokens": 4, "min_tokens": 2}),
        ({"max_tokens": 4, "min_tokens": 2}, {"max_tokens": 4, "min_tokens": 2}),
        ({"stop_strings": ["ab"]}, {"stop": ("ab",)}),
        ({"stop": "ab"}, {"stop": ("ab",)}),
        ({"do_sample": False}, {"temperature": 0.0, "top_p": 1.0}),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.25}, {"presence_penalty": 0.5, "frequency_penalty": 0.25}),
        ({"use_cache": True, "cache_implementation": "static"}, {"temperature": 1.0}),
    ],
    ids=lambda x: "-".join(x),
)
def test_generation_kwargs_win(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    trainer = make_trainer(top_p=0.8, generation_kwargs=given)
    attach(trainer)
    params = lowered(trainer, monkeypatch)
    assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize("key", ["num_beams", "eos_token_id", "stop_token_ids", "n", "seed", "max_lenght", "logprobs"])
def test_generation_kwargs_that_cannot_be_served_are_refused(make_trainer: MakeTrainer, key: str) -> None:
    trainer = make_trainer()
    trainer.args.generation_kwargs = {key: 2}
    refused(trainer, InvalidConfigError, f"generation_kwargs sets {key}")


def test_bad_values_are_refused_at_once(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.args.generation_kwargs = {"top_p": 3.0}
    refused(trainer, InvalidRequestError, "top_p")


def test_a_stop_string_ends_a_completion(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_completion_length=64, generation_kwargs={"stop_strings": ["a"]})
    attach(trainer)
    completions, _ = ask(trainer, [[3, 4, 5]] * 8)
    a = 3
    assert any(a in c for c in completions)
    assert all(a not in c[:-1] for c in completions)


def test_completions_end_at_the_trainers_eos_ids_and_no_other(make_trainer: MakeTrainer) -> None:
    model = make_model()
    model.generation_config.eos_token_id = [EOS, END_OF_TURN]
    trainer = make_trainer(model=model, max_completion_length=64)
    assert trainer.eos_token_ids == [EOS, END_OF_TURN]
    attach(trainer)
    prompts = [[3, 4, 5]] * 32
    ends = {c[-1] for c in ask(trainer, prompts)[0] if len(c) < 64}
    assert ends == {EOS, END_OF_TURN}
    trainer.eos_token_ids = [END_OF_TURN]
    completions, _ = ask(trainer, prompts)
    assert {c[-1] for c in completions if len(c) < 64} == {END_OF_TURN}
    assert any(EOS in c for c in completions)


# -- sleep, errors -------------------------------------------------------------------------------------------------


def test_sleep_mode_sleeps_between_generations(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(vllm_enable_sleep_mode=True)
    engine = attach(trainer)
    ask(trainer, [[3, 4]])
    assert engine.is_sleeping
    trainer.train()
    assert engine.is_sleeping and len(logged(trainer, "reward")) == 3


def test_an_engine_put_to_sleep_by_hand_wakes_for_a_generation(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    engine = attach(trainer)
    engine.sleep()
    trainer.train()
    assert not engine.is_sleeping


def test_a_failed_request_stops_training_and_names_its_row(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    engine = attach(trainer)
    good = Completion(
        index=0, token_ids=[EOS], logprobs=[0.0], top_logprobs=None, finish_reason="stop", stop_reason=EOS, weight_versions=[0]
    )  # fmt: skip
    outputs = [
        RolloutOutput(prompt_token_ids=[3], completions=[good], cached_tokens=0, error=error)
        for error in (None, UnsupportedModelError("NaN"))
    ]
    monkeypatch.setattr(engine, "generate_batch", lambda *_: RolloutBatch(outputs))
    with pytest.raises(UnsupportedModelError, match="prompt 1: NaN"):
        trainer.train()


def test_an_overlong_prompt_is_refused_by_name(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    attach(trainer, config=EngineConfig(max_model_len=16))
    with pytest.raises(InvalidRequestError, match="prompt 1"):
        trainer.vllm_generation.generate([[3], [4] * 40], None, 1)
    assert len(ask(trainer, [[3]])[0]) == 1


def test_images_are_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    attach(trainer)
    with pytest.raises(UnsupportedModelError, match="images"):
        trainer.vllm_generation.generate([[3]], [["an image"]], 1)


def test_another_model_object_is_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    attach(trainer)
    trainer.model = make_model()
    with pytest.raises(WeightsMovedError, match="another model"):
        trainer.vllm_generation.sync_weights()


# -- attach and detach ---------------------------------------------------------------------------------------------


def refused(trainer: Any, error: type[StokerError], match: str) -> None:
    before = dict(vars(trainer))
    where = [p.data_ptr() for p in trainer.model.parameters()]
    with pytest.raises(error, match=match):
        attach(trainer)
    assert vars(trainer) == before
    assert [p.data_ptr() for p in trainer.model.parameters()] == where


@pytest.mark.parametrize("kind", KINDS)
def test_after_detach_the_trainer_generates_by_itself(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    trainer = make_trainer(kind, max_steps=2)
    engine = attach(trainer)
    trainer.train()
    detach(trainer)
    with pytest.raises(EngineStateError, match="closed"):
        engine.generate_batch([[3]])
    calls = itertools.count()
    generate = trainer.model.generate
    monkeypatch.setattr(trainer.model, "generate", lambda **kwargs: (next(calls), generate(**kwargs))[1])
    trainer.train()
    assert next(calls) == 2


@pytest.mark.parametrize("found", ["1.15.2", "2.0.0.dev0"])
def test_other_versions_of_trl_are_refused(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setattr("stoker.integrations.trl.version", lambda _: found)
    refused(make_trainer(), InvalidConfigError, rf"TRL {found} .*>=1\.16,<2")


def test_an_engine_on_another_device_is_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    before = dict(vars(trainer))
    with pytest.raises(InvalidConfigError, match="device=cuda and the model is on cpu: set device='auto'"):
        attach(trainer, config=EngineConfig(device="cuda"))
    assert dict(vars(trainer)) == before


def test_a_model_cast_while_attached_is_noticed(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    attach(trainer)
    trainer.model.to(torch.float16)
    with pytest.raises(WeightsMovedError, match="now torch.float16 on cpu; the engine was built for torch.float32"):
        trainer.vllm_generation.sync_weights()


def test_other_trainers_are_refused(tmp_path: Any) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    refused(Trainer(model=make_model(), args=arguments), InvalidConfigError, "GRPOTrainer, RLOOTrainer.* a Trainer")
    with pytest.raises(InvalidConfigError, match="a SimpleNamespace"):
        attach(SimpleNamespace())


@pytest.mark.parametrize(
    ("attributes", "error", "match"),
    [
        ({"use_vllm": True}, InvalidConfigError, "use_vllm=False"),
        ({"use_transformers_continuous_batching": True}, InvalidConfigError, "continuous_batching=False"),
        ({"processing_class": object.__new__(ProcessorMixin)}, UnsupportedModelError, "multimodal"),
        ({"loss_type": "vespo"}, InvalidConfigError, "VESPO.*'sequence_mask'"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_settings_that_cannot_work_are_refused(
    make_trainer: MakeTrainer, attributes: dict[str, Any], error: type[StokerError], match: str
) -> None:
    trainer = make_trainer()
    original = dict(vars(trainer))
    vars(trainer).update(attributes)
    refused(trainer, error, match)
    vars(trainer).update(original)


def test_constrained_output_is_refused(make_trainer: MakeTrainer) -> None:
    refused(make_trainer(vllm_structured_outputs_regex="a+"), InvalidConfigError, "vllm_structured_outputs_regex")


def test_vespo_trains_with_a_correction_by_token(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(loss_type="vespo", vllm_importance_sampling_mode="token_truncate")
    attach(trainer)
    trainer.train()
    assert len(logged(trainer, "reward")) == 3
