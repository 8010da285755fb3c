"""TRL's trainers on the engine: sleep, what goes wrong, and what is refused."""

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
from trl_setup import EOS, MakeTrainer, ask, logged, make_model, refused, trainers

from stoker.rollout import (
    Completion,
    EngineConfig,
    EngineStateError,
    InvalidConfigError,
    InvalidRequestError,
    RolloutBatch,
    RolloutEngine,
    RolloutOutput,
    UnsupportedModelError,
    WeightsMovedError,
)
from stoker.rollout.binding import ModelBinding
from stoker.rollout.shell_builder import ShellBuilder

pytest.importorskip("trl", reason="TRL is not installed")

from stoker.integrations import trl as integration
from stoker.integrations.trl import attach, detach
from stoker.integrations.trl_checks import check_version

KINDS = ("grpo", "rloo")


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    yield from trainers(str(tmp_path))


def condition(trainer: Any) -> tuple[Any, ...]:
    """What attaching changes: attributes, callbacks, and whether weights own their memory."""
    memory = [(p.untyped_storage().nbytes(), p.untyped_storage().resizable()) for p in trainer.model.parameters()]
    return dict(vars(trainer)), list(trainer.callback_handler.callbacks), memory


def test_a_model_that_is_on_the_host_until_training_begins(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FSDP and DeepSpeed have it on a GPU, which then take it there: the engine is there from the start."""
    trainer, found = make_trainer("grpo"), []

    def build(model: Any, *, config: EngineConfig, tokenizer: Any) -> Any:
        found.append(config.device)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(integration, "RolloutEngine", build)
    monkeypatch.setattr(type(trainer.accelerator), "device", torch.device("cuda:1"))
    for config in (None, EngineConfig(device="cpu")):
        attach(trainer, config=config)
        detach(trainer)
    assert found == [torch.device("cuda:1"), torch.device("cpu")]


def test_over_fp32_weights_in_mixed_precision_a_gpu_samples_in_bf16(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL loads a model by name in fp32, and its forward multiplies in bf16 by default."""
    trainer, found = make_trainer("grpo"), []

    def build(model: Any, *, config: EngineConfig, tokenizer: Any) -> Any:
        found.append(config.dtype)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(integration, "RolloutEngine", build)
    monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", "bf16")
    for device, config in (("cuda", None), ("cuda", EngineConfig(dtype="float32")), ("cpu", None)):
        monkeypatch.setattr(type(trainer.accelerator), "device", torch.device(device))
        attach(trainer, config=config)
        detach(trainer)
    assert found == [torch.bfloat16, torch.float32, "auto"]
    monkeypatch.setattr(type(trainer.accelerator), "device", torch.device("cuda"))
    for precision, dtype in (("no", torch.float32), ("fp16", torch.float32), ("bf16", torch.bfloat16)):
        monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", precision)
        trainer.model.to(dtype)
        attach(trainer)
        detach(trainer)
    assert found[3:] == ["auto"] * 3


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
    fused = ShellBuilder.fuse.__code__

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


@pytest.mark.parametrize("found", ["1.9.2", "2.0.0.dev0"])
def test_other_versions_of_trl_are_refused(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setattr("stoker.integrations.trl_checks.version", lambda _: found)
    refused(make_trainer(), InvalidConfigError, rf"TRL {found} is installed: attach works with trl>=1\.10,<2")
    with pytest.raises(
        InvalidConfigError, match=rf"TRL {found} is installed: asynchronous training works with trl>=1\.16,<2"
    ):
        check_version("asynchronous training")


def test_settings_of_an_engine_that_are_none_are_refused(make_trainer: MakeTrainer) -> None:
    for settings in ({"max_model_len": 64}, {}, EngineConfig):
        with pytest.raises(InvalidConfigError, match=r"^config is a (dict|type): give EngineConfig\(...\)$"):
            attach(make_trainer(), config=settings)  # type: ignore[arg-type]


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
