"""Every kind of TRL trainer ``attach`` takes: it trains on the engine's samples, and ``detach`` leaves no trace."""

from __future__ import annotations

import gc
import importlib
import re
import warnings
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from trl_setup import (
    EOS,
    KINDS,
    LOGPROB_TOLERANCE,
    PAD,
    MakeTrainer,
    frozen_copy,
    make_tokenizer,
    trainers,
    worst_difference,
)

from stoker.integrations.transformers import on_engine
from stoker.rollout import (
    EngineConfig,
    EngineStateError,
    InvalidConfigError,
    RolloutBatch,
    RolloutEngine,
    UnsupportedModelError,
)

pytest.importorskip("trl", reason="TRL is not installed")

import trl

from stoker.integrations.trl import _BACKENDS, attach, detach
from stoker.integrations.trl_checks import _REFUSED

WITH_REWARDS = tuple(kind for kind in KINDS if kind not in ("distillation", "sdft", "gold", "iw_opd"))
OFF_POLICY_IN_EVALUATION = ("gold", "iw_opd", "online_dpo")  # these sample in training only


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    yield from trainers(str(tmp_path))


def recorded(trainer: Any, monkeypatch: pytest.MonkeyPatch, engine: Any = None) -> list[tuple[Any, Any, RolloutBatch]]:
    """Of every call of the trainer's engine: the weights at the time, in a model of their own, parameters and outputs."""
    calls: list[tuple[Any, Any, RolloutBatch]] = []
    engine = engine or trainer.vllm_generation.engine
    generate_batch = engine.generate_batch

    def record(prompts: Any, params: Any, **more: Any) -> RolloutBatch:
        batch = generate_batch(prompts, params, **more)
        calls.append((frozen_copy(trainer.accelerator.unwrap_model(trainer.model)), params[0], batch))
        return batch

    monkeypatch.setattr(engine, "generate_batch", record)
    return calls


def difference(model: Any, params: Any, batch: RolloutBatch) -> float:
    return worst_difference(model, batch, params.temperature)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rollout_is_of_the_weights_of_its_step(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    trainer = make_trainer(kind)
    engine = attach(trainer)
    calls = recorded(trainer, monkeypatch)
    trainer.train()
    assert len(calls) == 3 and engine.weight_version == 3
    assert all(difference(*call) < LOGPROB_TOLERANCE for call in calls)
    (_, params, first), (last, *_) = calls[0], calls[-1]
    assert difference(last, params, first) > 10 * LOGPROB_TOLERANCE  # the weights moved, and the check can tell


@pytest.mark.parametrize("kind", ["gkd", "a2po"])
def test_a_trainer_that_calls_generate_itself(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    trainer = make_trainer(kind)
    model = trainer.accelerator.unwrap_model(trainer.model)
    with RolloutEngine(model) as engine:
        calls = recorded(trainer, monkeypatch, engine)
        model.generate = partial(model.generate, custom_generate=on_engine(engine))
        trainer.train()
        del model.generate
    assert len(calls) == 3 and all(
        difference(weights, params, batch) < LOGPROB_TOLERANCE for weights, params, batch in calls
    )
    assert difference(calls[-1][0], *calls[0][1:]) > 10 * LOGPROB_TOLERANCE


@pytest.mark.parametrize("kind", ["grpo", "rloo", "distillation", "gold", "iw_opd", "online_dpo"])
def test_completions_match_the_pattern_of_the_trainer(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    trainer = make_trainer(kind, vllm_structured_outputs_regex="(ab|c){1,2}d?")
    attach(trainer)
    calls = recorded(trainer, monkeypatch)
    trainer.train()
    completions = [c for _, _, batch in calls for output in batch for c in output.completions]
    assert len(completions) >= 12 and {c.finish_reason for c in completions} == {"stop"}
    assert all(re.fullmatch("(ab|c){1,2}d?", c.text) for c in completions)
    assert all(difference(*call) < LOGPROB_TOLERANCE for call in calls)  # of the whole vocabulary


@pytest.mark.parametrize("kind", WITH_REWARDS)
def test_rewards_are_of_the_completions_and_their_prompts(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    scored: list[tuple[str, str]] = []

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        scored.extend(zip(prompts, completions, strict=True))
        return [float(len(text)) for text in completions]

    trainer = make_trainer(kind, more={"reward_funcs": reward})
    attach(trainer)
    calls = recorded(trainer, monkeypatch)
    trainer.train()
    decode = make_tokenizer().decode
    sampled = [
        (decode(output.prompt_token_ids), decode(c.token_ids, skip_special_tokens=True))
        for _, _, batch in calls
        for output in batch
        for c in output.completions
    ]
    assert len(sampled) > 20 and sorted(sampled) == sorted(scored)
    assert len({text for _, text in sampled}) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_settings_are_the_trainers(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    settings = {"temperature": 0.7, "top_p": 0.8, "top_k": 5}
    more: dict[str, Any] = {}
    if kind not in ("gold", "iw_opd"):  # which have no more than these
        settings |= {"min_p": 0.1, "repetition_penalty": 1.2}
        more["generation_kwargs"] = {"presence_penalty": 0.5}
    trainer = make_trainer(kind, max_steps=1, **more, **settings)
    attach(trainer)
    calls = recorded(trainer, monkeypatch)
    trainer.train()
    (_, params, _), *_ = calls
    assert {name: getattr(params, name) for name in settings} == settings
    assert (params.max_tokens, params.presence_penalty, params.stop_token_ids) == (8, 0.5 if more else 0, (EOS,))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in OFF_POLICY_IN_EVALUATION])
def test_evaluation_is_on_the_engine(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    trainer = make_trainer(kind, max_steps=1)
    attach(trainer)
    trainer.train()
    calls = recorded(trainer, monkeypatch)
    trainer.evaluate()
    assert calls and all(difference(*call) < LOGPROB_TOLERANCE for call in calls)
    assert calls[0][2][0].completions[0].weight_versions[0] == trainer.vllm_generation.engine.weight_version == 2


@pytest.mark.parametrize("kind", KINDS)
def test_sleep_mode_leaves_no_cache_to_the_trainers_step(make_trainer: MakeTrainer, kind: str) -> None:
    trainer = make_trainer(kind, max_steps=2, vllm_enable_sleep_mode=True)
    engine = attach(trainer)
    asleep = []
    trainer.model.get_input_embeddings().weight.register_hook(lambda _: asleep.append(engine.is_sleeping))
    trainer.train()
    assert len(asleep) >= 2 and all(asleep)  # in every backward pass
    assert engine.stats().finished_requests > 0


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_after_detach(make_trainer: MakeTrainer, kind: str) -> None:
    trainer = make_trainer(kind)
    objects = (trainer, trainer.args, trainer.model, trainer.model.config, trainer.model.generation_config)
    before = [dict(vars(thing)) for thing in objects]
    callbacks = list(trainer.callback_handler.callbacks)
    parameters = {name: (p, p.dtype, p.requires_grad) for name, p in trainer.model.named_parameters()}
    engine = weakref.ref(attach(trainer))
    with pytest.raises(EngineStateError, match="already"):
        attach(trainer)
    detach(trainer)
    assert [dict(vars(thing)) for thing in objects] == before
    assert trainer.callback_handler.callbacks == callbacks
    after = {name: (p, p.dtype, p.requires_grad) for name, p in trainer.model.named_parameters()}
    assert after.keys() == parameters.keys()
    for name, (p, dtype, requires_grad) in parameters.items():
        assert after[name][0] is p and after[name][1:] == (dtype, requires_grad)
        assert p.untyped_storage().resizable() and p.is_contiguous()
    gc.collect()
    assert engine() is None
    with pytest.raises(EngineStateError, match="no engine"):
        detach(trainer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_after_detach_is_one_never_attached(make_trainer: MakeTrainer, kind: str) -> None:
    """Same samples of its own, same weights, same warnings."""

    def run(attached: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
        trainer = make_trainer(kind, max_steps=2)
        if attached:
            attach(trainer)
            trainer.vllm_generation.engine.generate_batch([[3, 4]])
            detach(trainer)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.manual_seed(7)
            trainer.train()
        return trainer.model.state_dict(), sorted(str(w.message) for w in seen)

    (plain, plain_warnings), (detached, detached_warnings) = run(False), run(True)
    assert all(torch.equal(plain[name], detached[name]) for name in plain)
    assert detached_warnings == plain_warnings


@pytest.mark.parametrize("kind", KINDS)
def test_attached_again_is_attached_once(make_trainer: MakeTrainer, kind: str) -> None:
    def weights(rounds: int) -> dict[str, torch.Tensor]:
        trainer = make_trainer(kind, max_steps=2)
        for _ in range(rounds):
            attach(trainer)
            detach(trainer)
        attach(trainer)
        trainer.train()
        return trainer.model.state_dict()  # type: ignore[no-any-return]

    once, again = weights(0), weights(2)
    assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.parametrize("kind", KINDS)
def test_the_arguments_in_a_checkpoint_are_those_given(make_trainer: MakeTrainer, tmp_path: Path, kind: str) -> None:
    """With ``use_vllm`` in them a trainer built from them would want vLLM."""
    trainer = make_trainer(kind, max_steps=1, save_strategy="steps", save_steps=1)
    before = trainer.args.to_dict()
    attach(trainer)
    trainer.train()
    saved = torch.load(tmp_path / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert saved.to_dict() == before and not saved.use_vllm


# -- OnlineDPO ---------------------------------------------------------------------------------------------------------


def test_pairs_come_in_two_blocks(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer("online_dpo")
    attach(trainer)
    calls = recorded(trainer, monkeypatch)
    prompt_ids, prompt_mask, completion_ids, completion_mask, _ = trainer._generate(trainer.model, ["abc", "d"])
    batch = calls[0][2]
    assert prompt_ids.tolist() == [[3, 4, 5], [PAD, PAD, 6]] * 2 and prompt_mask.tolist() == [[1, 1, 1], [0, 0, 1]] * 2
    for row, (prompt, sample) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        ids = batch[prompt].completions[sample].token_ids
        rest = completion_ids.shape[1] - len(ids)
        assert completion_ids[row].tolist() == ids + [PAD] * rest
        assert completion_mask[row].tolist() == [1] * len(ids) + [0] * rest
    assert batch[0].completions[0].token_ids != batch[0].completions[1].token_ids


def test_pairs_of_chats_use_the_chat_template(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("online_dpo")
    trainer._tokenizer.chat_template = (
        "{% for m in messages %}h{{ m.content }}{% endfor %}{% if add_generation_prompt %}g{% endif %}"
    )
    attach(trainer)
    chat = [{"role": "user", "content": "ab"}]
    assert trainer._generate(trainer.model, [chat])[0].tolist() == [make_tokenizer()("habg")["input_ids"]] * 2


def test_pairs_take_weights_once_a_step(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer("online_dpo", max_steps=2, per_device_train_batch_size=1, gradient_accumulation_steps=2)
    engine = attach(trainer)
    calls = recorded(trainer, monkeypatch)
    trainer.train()
    assert len(calls) == 4 and engine.weight_version == 2


def test_pairs_with_images_are_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("online_dpo")
    attach(trainer)
    with pytest.raises(
        UnsupportedModelError, match=r"^the prompts carry images.*from an OnlineDPOTrainer: use GRPOTrainer"
    ):
        trainer._generate(trainer.model, ["abc"], ["an image"])
    assert len(trainer._generate(trainer.model, ["abc"], [None])[0]) == 2


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["grpo", "online_dpo"])
def test_completions_without_a_bound_are_refused(make_trainer: MakeTrainer, kind: str) -> None:
    trainer = make_trainer(kind)
    limit = "max_new_tokens" if kind == "online_dpo" else "max_completion_length"
    setattr(trainer.args if kind == "online_dpo" else trainer, limit, None)
    with pytest.raises(InvalidConfigError, match=f"{limit} is None"):
        attach(trainer)
    trainer.args.generation_kwargs = {"max_new_tokens": 4}
    attach(trainer)


def test_a_class_of_the_same_name_elsewhere_is_refused() -> None:
    class GRPOTrainer:
        pass

    with pytest.raises(InvalidConfigError, match="OnlineDPOTrainer, and this is a GRPOTrainer"):
        attach(GRPOTrainer(), config=EngineConfig())


def test_derived_trainers_are_of_their_base_kind(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("grpo", max_steps=1)
    trainer.__class__ = type("Mine", (type(trainer),), {})
    engine = attach(trainer)
    trainer.train()
    assert engine.stats().finished_requests == 8


def test_weights_are_taken_at_every_step_whatever_the_frequency(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("gold", vllm_sync_frequency=2)
    engine = attach(trainer)
    trainer.train()
    assert engine.weight_version == 3
    assert trainer._last_vllm_sync_step == -1, "another run counts its steps from 0 again"


def trainers_that_generate() -> dict[str, str]:
    """Of the installed TRL: class and module."""
    found = {}
    for file in sorted(Path(trl.__file__).parent.rglob("*_trainer.py")):
        text = file.read_text()
        if re.search(r"\.generate\(|vllm_generation|rollout_worker", text):
            module = ".".join(("trl", *file.relative_to(Path(trl.__file__).parent).with_suffix("").parts))
            found |= dict.fromkeys(re.findall(r"^class (\w+Trainer)\(", text, re.MULTILINE), module)
    return found


def test_every_trainer_of_trl_that_generates_is_attached_or_refused_by_name() -> None:
    found = trainers_that_generate()
    gone = {"NashMDTrainer", "XPOTrainer"}
    assert found.keys() == {*_BACKENDS, *_REFUSED} - gone and len(found) == 14
    pair = importlib.import_module(found["OnlineDPOTrainer"]).OnlineDPOTrainer
    for name, reason in _REFUSED.items():
        of_older = type(name, (pair,), {"__module__": "trl.experimental"})
        kind = of_older if name in gone else getattr(importlib.import_module(found[name]), name)
        for one in (kind, type("Mine", (kind,), {})):
            with pytest.raises(InvalidConfigError, match=re.escape(f"{name} {reason}")):
                attach(object.__new__(one))


def test_the_docs_name_every_trainer() -> None:
    page = (Path(__file__).parents[2] / "docs/pages/trl.md").read_text()
    table = [row.split("|") for row in page.splitlines() if row.startswith("| `")]
    how = {name: row[2] for row in table for name in re.findall(r"`(\w+Trainer)`", row[1])}
    assert how.keys() == {*_BACKENDS, *_REFUSED}
    assert {name for name, words in how.items() if "`attach`" in words} == _BACKENDS.keys()
