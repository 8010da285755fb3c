"""``generate`` and ``generate_batch`` of transformers, on an engine."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from adapted import with_lora
from families import make_model as of_family
from oracle import greedy
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import ContinuousBatchingConfig, TemperatureLogitsWarper
from transformers.generation.continuous_batching import RequestStatus
from trl_setup import EOS, LOGPROB_TOLERANCE, PAD, make_model, make_tokenizer, plain_logprobs

from stoker.integrations.transformers import GeneratedOnEngine, generate_batch, on_engine
from stoker.rollout import EngineConfig, InvalidRequestError, RolloutEngine

PROMPTS = [[3, 4, 5], [6] * 20, [9, 8]]


def padded(prompts: list[list[int]] = PROMPTS) -> dict[str, torch.Tensor]:
    """Prompts as a tokenizer gives them, padded on the left."""
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[PAD] * (longest - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]),
    }


@pytest.fixture
def model() -> Any:
    return make_model().eval()


# -- generate ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 24},
        {"max_length": 32},
        {"max_new_tokens": 24, "min_new_tokens": 12},
        {"max_length": 40, "min_length": 36},
        {"max_new_tokens": 12, "suppress_tokens": [4, 7]},
        {"max_new_tokens": 12, "sequence_bias": {(4,): 3.0, (7,): -2.0}},
        {"generation_config": GenerationConfig(max_new_tokens=10, eos_token_id=[4, 5], pad_token_id=6)},
        {"max_new_tokens": 6, "do_sample": True, "top_k": 1, "num_return_sequences": 3},
    ],
)
def test_sequences_are_those_of_generate(model: Any, settings: dict[str, Any]) -> None:
    model.generation_config.eos_token_id = eos = greedy(model, PROMPTS[0], 24)[5]
    theirs = model.generate(**padded(), **settings)
    with RolloutEngine(model) as engine:
        ours = model.generate(**padded(), **settings, custom_generate=on_engine(engine))
        assert engine.stats().generated_tokens > 0
    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert "generation_config" in settings or (theirs[:, 20:] == eos).any() or len(theirs[0]) >= 26


def test_without_padding_and_of_one_prompt(model: Any) -> None:
    ids = torch.tensor([PROMPTS[0]])
    with RolloutEngine(model) as engine:
        ours = model.generate(ids, max_new_tokens=9, custom_generate=on_engine(engine))
        assert torch.equal(ours, model.generate(ids, max_new_tokens=9))
        mapping = model.generate(ids, max_new_tokens=9, return_dict_in_generate=True, custom_generate=on_engine(engine))
    assert isinstance(mapping, GeneratedOnEngine) and torch.equal(mapping.sequences, ours)


def test_samples_have_their_logprobs_and_follow_torchs_seed(model: Any) -> None:
    settings = {"max_new_tokens": 8, "do_sample": True, "top_k": 0, "temperature": 0.7, "num_return_sequences": 4}
    with RolloutEngine(model) as engine:

        def sample(seed: int) -> Any:
            torch.manual_seed(seed)
            more = {"return_dict_in_generate": True, "custom_generate": on_engine(engine)}
            return model.generate(**padded(), **settings, **more)

        first, again, other = sample(1), sample(1), sample(2)
        assert engine.stats().shared_prompt_tokens >= 9 * len(PROMPTS[0])  # three of four samples, three times
    assert torch.equal(first.sequences, again.sequences) and not torch.equal(first.sequences, other.sequences)
    assert len({tuple(row) for row in first.sequences[:, 20:].tolist()}) > 6
    for row, (sequence, found) in enumerate(zip(first.sequences, first.logprobs, strict=True)):
        completion = sequence[20:].tolist()
        count = completion.index(EOS) + 1 if EOS in completion else len(completion)
        expected = plain_logprobs(model, PROMPTS[row // 4], completion[:count], 0.7)
        assert found[:count].tolist() == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
        assert not found[count:].any() and set(completion[count:]) <= {PAD}


def test_settings_of_the_engines_own(model: Any) -> None:
    tokenizer = make_tokenizer()
    theirs = model.generate(**padded(), max_new_tokens=12, stop_strings=["ac", "f"], tokenizer=tokenizer)
    with RolloutEngine(model, tokenizer=tokenizer) as engine:
        until = on_engine(engine, stop=["ac", "f"])
        assert torch.equal(model.generate(**padded(), max_new_tokens=12, custom_generate=until), theirs)
        seeded = on_engine(engine, seed=3, max_tokens=5)
        settings = {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 4}
        sample = partial(model.generate, **padded(), **settings, custom_generate=seeded)
        rows = sample()
        assert rows.shape == (12, 25) and torch.equal(rows, sample()) and len(set(map(tuple, rows.tolist()))) > 8
        with pytest.raises(TypeError, match="maximum"):
            model.generate(**padded(), max_new_tokens=4, custom_generate=on_engine(engine, maximum=3))


def test_the_live_adapter_and_the_base_below_it() -> None:
    adapted = with_lora(make_model().eval())
    base = make_model().eval()
    with RolloutEngine(adapted) as engine:
        call = partial(adapted.generate, **padded(), max_new_tokens=8)
        live = call(custom_generate=on_engine(engine))
        assert torch.equal(live, call())
        with adapted.disable_adapter():
            assert torch.equal(call(custom_generate=on_engine(engine)), base.generate(**padded(), max_new_tokens=8))
        assert not torch.equal(live[:, 20:], base.generate(**padded(), max_new_tokens=8)[:, 20:])


def test_code_that_calls_generate_by_itself(model: Any) -> None:
    def ask() -> torch.Tensor:
        with torch.no_grad():
            return model.generate(**padded(), max_new_tokens=8)

    def tokens() -> int:
        return engine.stats().generated_tokens

    before = ask()
    with RolloutEngine(model) as engine:
        model.generate = partial(model.generate, custom_generate=on_engine(engine))
        assert torch.equal(ask(), before) and tokens() == 3 * 8
        with torch.no_grad():
            model.lm_head.weight.neg_()  # a step of the trainer's: nobody tells the engine
        changed = ask()
        del model.generate
        counted = tokens()
        assert torch.equal(ask(), changed) and not torch.equal(changed, before) and tokens() == counted


class Own(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


class Enough(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.ones(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores=True"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size=2"),
        ({"logits_processor": LogitsProcessorList([Own()])}, "was given a Own"),
        ({"stopping_criteria": StoppingCriteriaList([Enough()])}, "was given a Enough"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [3]}, "PrefixConstrained"),
        (
            {"do_sample": True, "logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)])},
            "TemperatureLogitsWarper",
        ),
        ({"position_ids": torch.arange(20).expand(3, 20)}, "position_ids"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(3, 20, 32)}, "was given inputs_embeds"),
    ],
)
def test_what_an_engine_does_not_do_is_refused(model: Any, settings: dict[str, Any], message: str) -> None:
    with RolloutEngine(model) as engine:
        with pytest.raises(InvalidRequestError, match=message):
            model.generate(**padded() | {"max_new_tokens": 4} | settings, custom_generate=on_engine(engine))
        assert engine.stats().generated_tokens == 0
        assert model.generate(**padded(), max_new_tokens=4, custom_generate=on_engine(engine)).shape == (3, 24)


def test_another_model_is_refused(model: Any) -> None:
    with RolloutEngine(model) as engine, pytest.raises(InvalidRequestError, match="another model"):
        make_model().generate(**padded(), max_new_tokens=4, custom_generate=on_engine(engine))
    with pytest.raises(InvalidRequestError, match="takes an engine"):
        on_engine(model)  # type: ignore[arg-type]


def test_how_many_samples_is_generates_to_say(model: Any) -> None:
    with RolloutEngine(model) as engine, pytest.raises(InvalidRequestError, match="num_return_sequences"):
        on_engine(engine, n=4)


# -- generate_batch ----------------------------------------------------------------------------------------------------


def test_outputs_are_those_of_transformers(model: Any) -> None:
    # Two samples of a prompt, and one token to choose from, so that they can be compared.
    eos = greedy(model, PROMPTS[0], 24)[5]
    config = GenerationConfig(
        max_new_tokens=24, do_sample=True, top_k=1, num_return_sequences=2, eos_token_id=eos, pad_token_id=PAD
    )
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64, max_memory_percent=0.01)
    # By what ``model.generate_batch`` consists of: in transformers 5.17 that gives but one of a prompt's samples.
    theirs: dict[str, Any] = {}
    with model.continuous_batching_context_manager(config, True, 5, small, warmup=False) as manager:
        manager.add_requests(PROMPTS, max_new_tokens=24)
        while len(theirs) < 2 * len(PROMPTS):
            result = manager.get_result(timeout=1)
            assert result is not None or manager.is_running()
            if result is not None and result.is_finished():
                theirs[result.request_id] = result
    with RolloutEngine(model) as engine:
        ours = generate_batch(engine, PROMPTS, generation_config=config)
    assert sorted(ours) == sorted(theirs) and len(ours) == 2 * len(PROMPTS)
    for request_id, output in ours.items():
        assert type(output) is type(theirs[request_id]) and output.request_id == request_id
        assert output.prompt_ids == theirs[request_id].prompt_ids
        assert output.generated_tokens == theirs[request_id].generated_tokens
        assert output.status == theirs[request_id].status == RequestStatus.FINISHED
        assert output.error is None and output.is_finished()
    assert len(ours["req_0"].generated_tokens) <= 6  # EOS included


def test_logprobs_are_of_the_scaled_softmax(model: Any) -> None:
    config = GenerationConfig(max_new_tokens=3, do_sample=True, top_k=0, temperature=0.7, num_return_sequences=4)
    with RolloutEngine(model) as engine:
        outputs = generate_batch(engine, PROMPTS, config, max_new_tokens=5)
    for output in outputs.values():
        assert len(output.generated_tokens) == 5
        plain = plain_logprobs(model, output.prompt_ids, output.generated_tokens, 0.7)
        assert output.logprobs == pytest.approx(plain, abs=LOGPROB_TOLERANCE)
    assert len({tuple(output.generated_tokens) for output in outputs.values()}) > 3


def test_no_eos_id_means_none(model: Any) -> None:
    config = GenerationConfig(max_new_tokens=40, do_sample=True, top_k=0)
    with RolloutEngine(model) as engine:
        outputs = generate_batch(engine, PROMPTS * 4, config).values()
    assert {len(output.generated_tokens) for output in outputs} == {40}
    assert any(EOS in output.generated_tokens[:-1] for output in outputs)


def test_what_a_configuration_leaves_open_is_what_it_is_to_transformers() -> None:
    """No truncation, where ``generate`` would take the 50 likeliest; no EOS id, for which the call writes -1 into it."""
    model = of_family("llama", vocab_size=256)
    config = GenerationConfig(max_new_tokens=60, do_sample=True, temperature=8.0)
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64, max_memory_percent=0.01)
    theirs = model.generate_batch(PROMPTS, generation_config=config, continuous_batching_config=small, warmup=False)
    assert config.eos_token_id == -1
    with RolloutEngine(model) as engine:
        ours = generate_batch(engine, PROMPTS, config)
    for outputs in (ours, theirs):
        seen = {token for output in outputs.values() for token in output.generated_tokens}
        assert all(len(output.generated_tokens) == 60 for output in outputs.values()) and len(seen) > 50


def test_a_failed_request_says_so(model: Any) -> None:
    config = GenerationConfig(max_new_tokens=2, do_sample=False)
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    with RolloutEngine(model) as engine:
        output = generate_batch(engine, [[3]], config)["req_0"]
    assert output.status == RequestStatus.FAILED and output.error


def test_what_cannot_be_served_is_refused_at_once(model: Any) -> None:
    with RolloutEngine(model, config=EngineConfig(max_model_len=16)) as engine:
        with pytest.raises(InvalidRequestError, match="max_new_tokens"):
            generate_batch(engine, PROMPTS, GenerationConfig(do_sample=False))
        with pytest.raises(InvalidRequestError, match="num_beams"):
            generate_batch(engine, PROMPTS, GenerationConfig(max_new_tokens=2, num_beams=2))
        with pytest.raises(InvalidRequestError, match="prompt 1 has 20 tokens"):
            generate_batch(engine, PROMPTS, GenerationConfig(max_new_tokens=2))
        with pytest.raises(InvalidRequestError, match="presence_penalty"):
            generate_batch(engine, PROMPTS, GenerationConfig(max_new_tokens=2, presence_penalty=1.5))
        with pytest.raises(InvalidRequestError, match="^prompts is one str"):
            generate_batch(engine, "abc", GenerationConfig(max_new_tokens=2))  # type: ignore[arg-type]
        for call in (
            lambda: generate_batch(model, PROMPTS, GenerationConfig(max_new_tokens=2)),
            lambda: generate_batch(engine, PROMPTS, None),  # type: ignore[arg-type]
        ):
            with pytest.raises(
                InvalidRequestError, match="^generate_batch takes an engine, prompts and a generation con"
            ):
                call()
        assert generate_batch(engine, [], GenerationConfig(max_new_tokens=2)) == {}
