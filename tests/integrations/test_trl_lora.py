"""TRL's trainers that train an adapter: the engine samples on the base and the live adapter, with nothing merged or pushed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trl_setup import (
    KINDS,
    LOGPROB_TOLERANCE,
    PROMPTS,
    MakeTrainer,
    logged,
    make_model,
    make_tokenizer,
    plain_logprobs,
    trainers,
)

from stoker.rollout import InvalidConfigError, RolloutBatch, SamplingParams, UnsupportedModelError

pytest.importorskip("trl", reason="TRL is not installed")

from peft import LoraConfig, get_peft_model

from stoker.integrations.trl import attach, detach

IDS: list[list[int]] = make_tokenizer()(PROMPTS)["input_ids"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    yield from trainers(str(tmp_path))


def adapter(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": "all-linear"} | options)


def adapted_weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
@pytest.mark.parametrize("options", [{}, {"use_dora": True, "use_rslora": True}])
def test_training_an_adapter(make_trainer: MakeTrainer, kind: str, options: dict[str, Any]) -> None:
    """The trainer's own forward gives what was sampled with, at every step."""
    trainer = make_trainer(kind, more={"peft_config": adapter(**options)}, learning_rate=0.1, beta=0.1)
    engine = attach(trainer)
    base = engine.generate_batch(IDS, GREEDY, adapter=None)
    before = adapted_weights(trainer)
    trainer.train()
    after = adapted_weights(trainer)
    assert before.keys() == after.keys() and any(not torch.equal(before[n], after[n]) for n in before)
    assert all("lora_" in name for name in before)
    if kind == "grpo":
        differences = logged(trainer, "sampling/sampling_logp_difference/max")
        assert len(differences) == 3 and max(differences) < LOGPROB_TOLERANCE
    model = trainer.model.eval()
    learned = engine.generate_batch(IDS, GREEDY)
    again = engine.generate_batch(IDS, GREEDY, adapter=None)
    for prompt, now, bare, first in zip(IDS, learned, again, base, strict=True):
        (completion,) = now.completions
        expected = plain_logprobs(model, prompt, completion.token_ids)
        torch.testing.assert_close(completion.logprobs, expected, atol=LOGPROB_TOLERANCE, rtol=0)
        assert bare.completions[0].token_ids == first.completions[0].token_ids
    assert [o.completions[0].token_ids for o in learned] != [o.completions[0].token_ids for o in again]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("grpo", "rloo")])
def test_every_kind_samples_with_the_live_adapter(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model = get_peft_model(make_model(), adapter(init_lora_weights=False))
    trainer = make_trainer(kind, model=model, max_steps=2, learning_rate=0.1)
    engine = attach(trainer)
    before = adapted_weights(trainer)
    sample = engine.generate_batch
    worst = []

    def check(prompts: Any, params: Any) -> RolloutBatch:
        batch = sample(prompts, params)
        training = model.training
        model.eval()
        worst.append(
            max(
                abs(a - b)
                for output in batch
                for c in output.completions
                for a, b in zip(
                    c.logprobs,
                    plain_logprobs(model, output.prompt_token_ids, c.token_ids, params[0].temperature),
                    strict=True,
                )
            )
        )
        model.train(training)
        return batch

    monkeypatch.setattr(engine, "generate_batch", check)
    trainer.train()
    after = adapted_weights(trainer)
    assert len(worst) == 2 and max(worst) < LOGPROB_TOLERANCE
    assert all("lora_" in name for name in before) and any(not torch.equal(before[n], after[n]) for n in before)
    assert engine.stats().mirror_bytes == 0


def test_the_reference_policy_is_the_engine_without_the_adapter(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("grpo", more={"peft_config": adapter()}, learning_rate=0.1)
    engine = attach(trainer)
    trainer.train()
    model = trainer.model.eval()
    batch = engine.generate_batch(IDS, GREEDY)
    with model.disable_adapter():
        for prompt, output, score in zip(IDS, batch, engine.score(batch, adapter=None), strict=True):
            expected = plain_logprobs(model, prompt, output.completions[0].token_ids)
            torch.testing.assert_close(score.logprobs.tolist(), expected, atol=LOGPROB_TOLERANCE, rtol=0)


def test_a_peft_model_of_the_users(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("grpo", model=get_peft_model(make_model(), adapter()))
    attach(trainer)
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < LOGPROB_TOLERANCE
    detach(trainer)
    assert all(p.untyped_storage().resizable() for p in trainer.model.parameters())


def test_a_reference_in_another_dtype_than_what_is_trained(make_trainer: MakeTrainer) -> None:
    """TRL adds it, in fp32, to a model that came with an adapter; that one it has in bf16 where the base is quantised."""
    model = get_peft_model(make_model(), adapter(init_lora_weights=False))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    trainer = make_trainer("grpo", model=model, beta=0.1)
    engine = attach(trainer)
    kinds = {name.split(".")[-2]: p.dtype for name, p in trainer.model.named_parameters() if "lora_" in name}
    assert kinds == {"default": torch.bfloat16, "ref": torch.float32}
    trainer.train()
    assert {*engine.adapters} == {"default", "ref"}
    wide = get_peft_model(make_model(), adapter()).eval()  # no copy: the trainer's forward hangs on the model
    wide.add_adapter("ref", adapter())
    wide.load_state_dict(trainer.model.state_dict())
    for name in ("default", "ref"):
        wide.set_adapter(name)
        batch = engine.generate_batch(IDS, GREEDY, adapter=name)
        for prompt, output in zip(IDS, batch, strict=True):
            (completion,) = output.completions
            expected = plain_logprobs(wide, prompt, completion.token_ids)
            torch.testing.assert_close(completion.logprobs, expected, atol=LOGPROB_TOLERANCE, rtol=0)


def test_an_adapter_the_engine_does_not_run_is_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("grpo", more={"peft_config": adapter(alora_invocation_tokens=[1])})
    with pytest.raises((UnsupportedModelError, InvalidConfigError), match="alora_invocation_tokens"):
        attach(trainer)
    assert not trainer.use_vllm
