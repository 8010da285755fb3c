"""The settings of TRL's trainers on the engine: each holds there, or is refused at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from trl_setup import (
    END_OF_TURN,
    EOS,
    KINDS,
    LOGPROB_TOLERANCE,
    MakeTrainer,
    ask,
    logged,
    make_model,
    plain_logprobs,
    refused,
    trainers,
)

from stoker.rollout import EngineConfig, InvalidConfigError, InvalidRequestError, RolloutBatch, StokerError

pytest.importorskip("trl", reason="TRL is not installed")

from stoker.integrations.trl import attach


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    yield from trainers(str(tmp_path))


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
        (dict.fromkeys(("use_cache", "cache_implementation", "pad_token_id", "bos_token_id")), {"temperature": 1.0}),
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
    has_several = hasattr(trainer, "eos_token_ids")  # TRL 1.10 ends at the tokenizer's alone
    assert not has_several or trainer.eos_token_ids == [EOS, END_OF_TURN]
    attach(trainer)
    prompts = [[3, 4, 5]] * 32
    ends = {c[-1] for c in ask(trainer, prompts)[0] if len(c) < 64}
    assert ends == ({EOS, END_OF_TURN} if has_several else {EOS})
    if not has_several:
        return
    trainer.eos_token_ids = [END_OF_TURN]
    completions, _ = ask(trainer, prompts)
    assert {c[-1] for c in completions if len(c) < 64} == {END_OF_TURN}
    assert any(EOS in c for c in completions)


@pytest.mark.parametrize(
    ("attributes", "error", "match"),
    [
        ({"use_vllm": True}, InvalidConfigError, "use_vllm=False"),
        ({"use_transformers_continuous_batching": True}, InvalidConfigError, "without use_transformers_paged"),
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


@pytest.mark.parametrize("name", ["tp_size", "cp_size"])
def test_processes_that_compute_a_batch_together_are_refused(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    trainer = make_trainer()
    monkeypatch.setattr(trainer.accelerator.state, "parallelism_config", ParallelismConfig(**{name: 2}))
    refused(trainer, InvalidConfigError, f"^processes compute each batch together .*{name}=2.* AcceleratedEngine$")
    monkeypatch.setattr(trainer.accelerator.state, "parallelism_config", ParallelismConfig(dp_shard_size=2))
    attach(trainer)


@pytest.mark.parametrize("name", ["tools", "rollout_func", "environment_factories"])
def test_processes_that_run_one_model_all_generate_equally_often(make_trainer: MakeTrainer, name: str) -> None:
    trainer = make_trainer()
    vars(trainer)[name] = [len]
    before = dict(vars(trainer))
    with pytest.raises(InvalidConfigError, match=f"^rollouts with {name} begin requests on each process by itself"):
        attach(trainer, config=EngineConfig(tensor_parallel_size=2))
    assert vars(trainer) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_temperature_that_the_forward_cannot_divide_by_is_refused(make_trainer: MakeTrainer, kind: str) -> None:
    trainer = make_trainer(kind, temperature=0.0)
    remedy = "" if kind in ("gold", "iw_opd") else r"; generation_kwargs=\{'do_sample': False\} decodes greedily"
    refused(trainer, InvalidConfigError, rf"^temperature=0, and the .* divides by it: set it above 0{remedy}$")


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
