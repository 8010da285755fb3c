"""TRL's trainers on the engine: settings, sleep, what goes wrong, and what is refused."""

import itertools
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments
from trl_setup import (
    END_OF_TURN,
    EOS,
    LOGPROB_TOLERANCE,
    MakeTrainer,
    ask,
    logged,
    make_model,
    plain_logprobs,
    trainers,
)

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
from stoker.rollout.binding import ModelBinding
from stoker.rollout.shells import ShellMaker

pytest.importorskip("trl", reason="TRL is not installed")

from stoker.integrations.trl import attach, detach

KINDS = ("grpo", "rloo")


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    yield from trainers(str(tmp_path))


def condition(trainer: Any) -> tuple[Any, ...]:
    """What attaching changes: attributes, callbacks, and whether weights own their memory."""
    memory = [(p.untyped_storage().nbytes(), p.untyped_storage().resizable()) for p in trainer.model.parameters()]
    return dict(vars(trainer)), list(trainer.callback_handler.callbacks), memory


def refused(trainer: Any, error: type[StokerError], match: str) -> None:
    before = dict(vars(trainer))
    where = [p.data_ptr() for p in trainer.model.parameters()]
    with pytest.raises(error, match=match):
        attach(trainer)
    assert vars(trainer) == before
    assert [p.data_ptr() for p in trainer.model.parameters()] == where


@pytest.mark.parametrize("kind", KINDS)
def test_attaching_where_completions_are_left_of_a_run_without_the_engine(make_trainer: MakeTrainer, kind: str) -> None:
    """Three steps on batches that are for two each: those of the last one do not come with what the engine's have."""
    trainer = make_trainer(kind, num_iterations=2, max_steps=3)
    trainer.train()
    assert trainer._buffered_inputs is not None
    attach(trainer)
    trainer.train()
    assert len(logged(trainer, "rollout/seconds")) == 2
    detach(trainer)


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
        ({"suppress_tokens": [5]}, {"suppress_token_ids": (5,)}),
        ({"sequence_bias": {(5,): 1.5}}, {"logit_bias": ((5, 1.5),)}),
        ({"logit_bias": {5: 1.5}}, {"logit_bias": ((5, 1.5),)}),
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


@pytest.mark.parametrize("given", [{"do_sample": False}, {"temperature": 0.0}], ids=lambda g: "-".join(g))
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_greedy_decoding_has_the_log_probabilities_of_the_trainers_forward(
    make_trainer: MakeTrainer, given: dict[str, Any], temperature: float
) -> None:
    trainer = make_trainer(temperature=temperature, top_p=0.5)
    trainer.args.generation_kwargs = given  # TRL itself refuses the second
    attach(trainer)
    prompts = [[3, 4, 5], [6] * 20]
    completions, logprobs = ask(trainer, prompts)
    for prompt, completion, found in zip(prompts, completions, logprobs, strict=True):
        logits = trainer.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        assert completion == logits.argmax(-1).tolist()
        assert found == pytest.approx(
            plain_logprobs(trainer.model, prompt, completion, temperature), abs=LOGPROB_TOLERANCE
        )
    trainer.train()
    assert min(logged(trainer, "sampling/importance_sampling_ratio/min")) > 0.99  # none is dropped


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


@pytest.mark.parametrize("kind", ["grpo", "rloo", "distillation", "sdft", "sdpo", "gold", "iw_opd"])
def test_logs_say_what_rollouts_cost(make_trainer: MakeTrainer, kind: str) -> None:
    trainer = make_trainer(kind, max_steps=2)
    engine = attach(trainer)
    trainer.train()
    seconds, rates = logged(trainer, "rollout/seconds"), logged(trainer, "rollout/tokens_per_second")
    assert len(seconds) == len(rates) == 2 and min(seconds) > 0
    tokens = sum(s * rate for s, rate in zip(seconds, rates, strict=True))
    assert tokens == pytest.approx(engine.stats().generated_tokens)
    assert logged(trainer, "rollout/weight_version") == [1, 2]
    if kind == "grpo":
        trainer.evaluate()
        assert len(logged(trainer, "eval_rollout/seconds")) == 1
    detach(trainer)
    trainer.train()
    assert len(logged(trainer, "rollout/seconds")) == 0  # a run of its own, without the engine


def test_sleep_mode_sleeps_between_generations(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(vllm_enable_sleep_mode=True)
    engine = attach(trainer)
    ask(trainer, [[3, 4]])
    assert engine.is_sleeping
    trainer.train()
    assert engine.is_sleeping and len(logged(trainer, "reward")) == 3
    ask(trainer, [[3, 4]])  # and so it is outside of the trainer's own calls, before and after
    assert engine.is_sleeping


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


def test_images_without_a_processor_are_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    attach(trainer)
    with pytest.raises(UnsupportedModelError, match=r"^the prompts carry images.* with the model.s processor as"):
        trainer.vllm_generation.generate([[3]], [["an image"]], 1)


def test_another_model_object_is_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    attach(trainer)
    trainer.model = make_model()
    with pytest.raises(WeightsMovedError, match="another model"):
        trainer.vllm_generation.sync_weights()


# -- attach and detach ---------------------------------------------------------------------------------------------


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


def test_an_interrupt_leaves_the_trainer_as_it_was(make_trainer: MakeTrainer) -> None:
    """Before each line of what attaches, once weights may have been laid side by side, and of all that gives it its engine."""
    trainer = make_trainer()
    before = condition(trainer)
    assert all(resizable for _, resizable in before[2])
    attaching = {attach.__code__, RolloutEngine.__init__.__wrapped__.__code__, ModelBinding.fuse.__code__}
    fused = ShellMaker.fuse.__code__

    def interrupted_at(line: int) -> bool:
        lines = itertools.count()
        begun = False

        def by_line(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal begun
            begun = begun or (frame.f_code is fused and event == "return")
            code = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            # ``try`` does nothing, and no interrupt comes there.
            if begun and event == "line" and frame.f_code in attaching and code != "try:" and next(lines) == line:
                raise KeyboardInterrupt
            return by_line

        traced = {*attaching, fused}
        sys.settrace(lambda frame, *_: by_line if frame.f_code in traced else None)
        try:
            attach(trainer)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    lines = 0
    while interrupted_at(lines):
        assert condition(trainer) == before, f"after an interrupt at the {lines}. line"
        lines += 1
    assert lines > 10 and condition(trainer) != before
    detach(trainer)
    assert condition(trainer) == before


@pytest.mark.parametrize("found", ["1.15.2", "2.0.0.dev0"])
def test_other_versions_of_trl_are_refused(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setattr("stoker.integrations.trl_checks.version", lambda _: found)
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


def test_a_pattern_that_cannot_be_is_refused(make_trainer: MakeTrainer) -> None:
    refused(make_trainer(vllm_structured_outputs_regex="a(?=b)"), InvalidRequestError, "has a look-around")
    refused(
        make_trainer(vllm_structured_outputs_regex="[0-9]+"), InvalidRequestError, "matched by no sequence of tokens"
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_fp32_over_layers_in_bf16(make_trainer: MakeTrainer, tied: bool) -> None:
    model = make_model(tie_word_embeddings=tied).bfloat16()
    trainer = make_trainer(model=model, cast_lm_head_to_fp32=True)
    engine = attach(trainer)
    trainer.train()
    assert engine.stats().mirror_bytes == 0 and engine.verify_weights().ok
    differences = logged(trainer, "sampling/sampling_logp_difference/mean")
    assert len(differences) == 3 and max(differences) < 0.05
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}


def test_vespo_trains_with_a_correction_by_token(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(loss_type="vespo", vllm_importance_sampling_mode="token_truncate")
    attach(trainer)
    trainer.train()
    assert len(logged(trainer, "reward")) == 3


@pytest.mark.parametrize(
    "settings", [{"vllm_importance_sampling_mode": "token_mask"}, {"vllm_importance_sampling_correction": False}]
)
def test_vespo_is_taken_with_the_other_correction_by_token_and_with_none(
    make_trainer: MakeTrainer, settings: dict[str, Any]
) -> None:
    attach(make_trainer(loss_type="vespo", **settings))
