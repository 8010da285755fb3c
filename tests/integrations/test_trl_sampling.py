"""What a model's own generation config says, where TRL's trainers say nothing: it holds on the engine as without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trl_setup import EOS, PROMPTS, MakeTrainer, make_model, make_tokenizer, trainers

from stoker.rollout import InvalidConfigError, InvalidRequestError

pytest.importorskip("trl", reason="TRL is not installed")

from stoker.integrations.trl import attach
from stoker.integrations.trl_sampling import sampling_params


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    yield from trainers(str(tmp_path))


def with_generation_config(**fields: Any) -> Any:
    model = make_model()
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    return model


@pytest.mark.parametrize(
    "fields",
    [
        {"suppress_tokens": [3, 9]},
        {"bad_words_ids": [[3], [EOS]], "suppress_tokens": [9]},
        {"min_new_tokens": 7},
        {"sequence_bias": {(5,): 9.0}},
    ],
    ids=lambda f: "-".join(f),
)
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_what_the_models_generation_config_says_holds_as_without_the_engine(
    make_trainer: MakeTrainer, kind: str, fields: dict[str, Any]
) -> None:
    def greedy(model: Any, *, engine: bool) -> list[list[int]]:
        trainer = make_trainer(kind, model=model, generation_kwargs={"do_sample": False})
        if engine:
            attach(trainer)
        return trainer._generate(PROMPTS)[1]  # type: ignore[no-any-return]

    plain = greedy(with_generation_config(**fields), engine=False)
    assert greedy(with_generation_config(**fields), engine=True) == plain
    assert greedy(make_model(), engine=False) != plain  # or it would say nothing


@pytest.mark.parametrize(("kind", "penalty"), [("grpo", 1.0), ("gold", 1.3), ("iw_opd", 1.3)])
def test_what_the_trainer_says_wins_over_the_models_generation_config(
    make_trainer: MakeTrainer, kind: str, penalty: float
) -> None:
    """Two kinds have no setting for a repetition penalty; that of the model is then what they generate with."""
    fields = {"repetition_penalty": 1.3, "min_p": 0.2, "temperature": 0.5, "top_k": 3, "max_length": 4}
    fields["num_return_sequences"] = 2
    trainer = make_trainer(kind, model=with_generation_config(**fields), temperature=0.9)
    params = sampling_params(trainer)
    assert (params.repetition_penalty, params.min_p) == (penalty, 0.2)
    assert (params.temperature, params.top_k, params.max_tokens, params.n) == (0.9, 0, 8, 1)


def test_what_generate_does_not_read_of_a_models_generation_config_is_without_effect(make_trainer: MakeTrainer) -> None:
    """Files on the hub may have settings for other engines."""
    trainer = make_trainer(model=with_generation_config(presence_penalty=1.5, max_tokens=3))
    attach(trainer)
    params = sampling_params(trainer)
    assert (params.presence_penalty, params.max_tokens) == (0.0, 8)


@pytest.mark.parametrize(("name", "value"), [("no_repeat_ngram_size", 2), ("bad_words_ids", [[3], [5, 6]])])
def test_a_model_whose_generation_config_cannot_be_followed_is_refused(
    make_trainer: MakeTrainer, name: str, value: Any
) -> None:
    trainer = make_trainer(model=with_generation_config(**{name: value}))
    with pytest.raises(InvalidRequestError, match=f"generation config sets {name}=.*: unset it"):
        attach(trainer)
    assert not trainer.use_vllm


def test_ids_that_a_trainer_does_not_have_end_nothing(make_trainer: MakeTrainer) -> None:
    """Of a tokenizer or a generation config without one TRL keeps None."""
    trainer = make_trainer()
    trainer.eos_token_ids = [EOS, None]
    assert sampling_params(trainer).stop_token_ids == (EOS,)


def test_completions_without_a_bound_are_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.max_completion_length = None
    with pytest.raises(InvalidConfigError, match="max_completion_length is None, so completions have no bound: set it"):
        attach(trainer)
    assert not trainer.use_vllm


def test_a_pattern_of_tokens_that_are_not_to_be_sampled_is_refused(make_trainer: MakeTrainer) -> None:
    tokenizer = make_tokenizer()
    (a,) = tokenizer("a").input_ids
    settings = {"vllm_structured_outputs_regex": "a+"}
    attach(make_trainer(**settings))
    trainer = make_trainer(model=with_generation_config(suppress_tokens=[a]), **settings)
    with pytest.raises(InvalidRequestError, match="regex='a\\+'"):
        attach(trainer)
    assert not trainer.use_vllm
