"""What cannot work is refused with a message that names cause and remedy, before any work; the engine stays usable."""

import array
import copy
import math
import pickle
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
import torch
from family_fields import VOCAB
from small_engine import llama
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    BatchEncoding,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from usable import CONFIG, GREEDY, PROMPT, assert_usable

from stoker.kernels.errors import (
    EngineStateError,
    InvalidConfigError,
    InvalidRequestError,
    StokerError,
    UnsupportedModelError,
    WeightsMovedError,
)
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams
from stoker.rollout.prompts import read_prompts


@pytest.fixture(scope="module")
def shared() -> Iterator[RolloutEngine]:
    with RolloutEngine(llama(), config=CONFIG) as engine:
        yield engine


@pytest.fixture
def engine(shared) -> Iterator[RolloutEngine]:
    """An engine that has to be as it was, and still right, when a test is over."""
    before = shared.stats()
    yield shared
    assert shared.stats() == before, "a refused call has done some work"
    assert_usable(shared, llama())


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def test_ids_that_the_model_has_embeddings_of_and_no_outputs_for():
    class WithNarrowHead(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size - 8, bias=False)

    model = WithNarrowHead(copy.deepcopy(llama().config))
    with RolloutEngine(model, config=CONFIG) as engine:
        told = (
            f": the model has embeddings of {VOCAB} tokens, and outputs for {VOCAB - 8}, which prompts have to keep to$"
        )
        for refused in (partial(engine.generate_batch, [[1, VOCAB - 1]]), partial(engine.score, [[1, VOCAB - 8]])):
            with pytest.raises(InvalidRequestError, match=told):
                refused()
        with pytest.raises(InvalidRequestError, match=r"is the tokenizer its own\?\)$"):
            engine.generate_batch([[1, VOCAB]])
        assert_usable(engine, model)


# -- prompts and parameters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"model": "gpt2"},
            UnsupportedModelError,
            r"^model is a str: give a transformers model, or Rollout.*from_pretr",
        ),
        ({"config": {"seed": 1}}, InvalidConfigError, r"^config is a dict: give EngineConfig\(...\)$"),
        (
            {"tokenizer": "gpt2"},
            InvalidConfigError,
            r"^tokenizer is a str: give one that is loaded, as by AutoTokenizer",
        ),
    ],
)
def test_what_is_no_model_config_or_tokenizer(arguments, error, message):
    with pytest.raises(error, match=message):
        RolloutEngine(**({"model": llama(), "config": CONFIG} | arguments))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], r"^prompt 0 is empty: give at least one token"),
        ([PROMPT, ()], r"^prompt 1 is empty"),
        ([PROMPT, list(range(64))], r"^prompt 1 has 64 tokens and max_model_len is 64.*shorten.*max_model_len"),
        ([[1, VOCAB]], r"^prompt 0 has 128 at position 1: token ids are integers from 0 to 127 .*is the tokenizer its"),
        ([PROMPT, [2, -1, 3]], r"^prompt 1 has -1 at position 1: token ids are integers from 0 to 127$"),
        ([[1.0]], r"^prompt 0 has 1.0 at position 0"),
        ([[1, math.nan]], r"^prompt 0 has nan at position 1"),
        ([[True, 1]], r"^prompt 0 has True at position 0"),
        ([[None]], r"^prompt 0 has None at position 0"),
        ([[10**30]], r"^prompt 0 has 10{30} at position 0"),
        (
            [["text in a list"]],
            r"^prompt 0 has a str of length 14 at position 0: give one flat list of token ids, integers from 0 to 127$",
        ),
        ([[PROMPT]], r"^prompt 0 has a list of length 5 at position 0: give one flat list of token ids"),
        ("a", r"^prompts is one str: give a list of prompts"),
        (None, r"^prompts is one NoneType: give a list"),
        (b"ab", r"^prompts is one bytes: give a list"),
        ({"prompt": [[1]]}, r"^prompts is one dict: give a list"),
        (
            BatchEncoding({"input_ids": [[1]]}),
            r"^prompts is one BatchEncoding: give its input_ids, and of tensors its at",
        ),
        (PROMPT, r"^prompt 0 is a int: give text, a list of token ids.*; one alone goes in a list, \[prompt\]$"),
        (
            [PROMPT, BatchEncoding({"input_ids": [[1], [2]]})],
            r"^prompt 1 has input_ids of shape \(2, 1\).*of one prompt",
        ),
        (
            [PROMPT, {"input_ids": [1, 2], "attention_mask": [1]}],
            r"^prompt 1 has an attention_mask of shape \(1,\) for 2",
        ),
        (
            [{"input_ids": [1, 2], "attention_mask": [1, 2]}],
            r"^prompt 0 has an attention_mask that holds 2: give 1 for",
        ),
        ([PROMPT, {"input_ids": [1, 2], "pixel_values": ["x"]}], r"^prompt 1 has pixel_values that is no tensor.*'pt'"),
        ([b"ab"], r"^prompt 0 is a bytes: give text, a list of token ids"),
        ([None], r"^prompt 0 is a NoneType: give text"),
        ([np.array([1.5])], r"^prompt 0 is a float64 tensor of shape \(1,\): give ids \[T\]"),
        ([{"role": "user", "content": "x"}], r"^prompt 0 is a dict: give text"),
        (["a"], r"^text prompts need a tokenizer: RolloutEngine\(model, tokenizer=...\), or give token ids"),
        ([[{"role": "user", "content": "x"}]], r"^chat prompts need a tokenizer"),
        (torch.tensor(PROMPT), r"^prompts is a torch.int64 tensor of shape \(5,\): give ids \[B, T\]"),
        (torch.tensor([[1.5]]), r"^prompts is a torch.float32 tensor"),
        (torch.tensor([[True]]), r"^prompts is a torch.bool tensor"),
        (torch.tensor([[1, 128]]), r"^prompt 0 has 128 at position 1"),
        (torch.zeros(2, 0, dtype=torch.long), r"^prompt 0 is empty"),
        ([torch.tensor([1.0])], r"^prompt 0 is a torch.float32 tensor"),
        ([torch.tensor([[1]])], r"^prompt 0 is a torch.int64 tensor of shape \(1, 1\): give ids \[T\]"),
        ([torch.tensor([True])], r"^prompt 0 is a torch.bool tensor"),
        ([[1, torch.tensor(2.0)]], r"^prompt 0 has tensor\(2.\) at position 1: token ids are integers"),
        ([[1, torch.tensor(True)]], r"^prompt 0 has tensor\(True\) at position 1"),
        ([[np.float64(2)]], r"^prompt 0 has np.float64\(2.0\) at position 0"),
        ([[np.bool_(True)]], r"^prompt 0 has np.True_ at position 0"),
        ([[torch.tensor([1])]], r"^prompt 0 has tensor\(\[1\]\) at position 0"),
        ([[np.int64(128)]], r"^prompt 0 has 128 at position 0"),
        (np.array([1, 2]), r"^prompt 0 is a int64: give text, a list of token ids"),
    ],
)
def test_prompts(engine, prompts, message):
    with pytest.raises(InvalidRequestError, match=message):
        engine.generate_batch(prompts, GREEDY)


def test_other_sequences_of_whole_numbers_are_prompts_too():
    expected = [oracle.greedy(llama(), PROMPT, 6), oracle.greedy(llama(), [3, 4, 5], 6)]
    with RolloutEngine(llama(), config=CONFIG) as engine:
        for prompts in (
            [np.array(PROMPT), range(3, 6)],
            [array.array("q", PROMPT), np.array([3, 4, 5], dtype=np.uint8)],
            [[np.int64(t) for t in PROMPT], list(torch.tensor([3, 4, 5]))],
            [(3, *np.array(PROMPT[1:], dtype=np.uint64)), [torch.tensor(3), np.array(4, dtype=np.int32), 5]],
        ):
            batch = engine.generate_batch(prompts, GREEDY)
            assert [o.completions[0].token_ids for o in batch] == expected
            assert {type(t) for o in batch for t in o.prompt_token_ids} == {int}


def test_an_array_is_a_list_of_prompts(tokenizer):
    rows = np.array([[3, 1, 4], [1, 5, 9]])
    with RolloutEngine(llama(), config=CONFIG, tokenizer=tokenizer) as engine:
        assert [o.prompt_token_ids for o in engine.generate_batch(rows, GREEDY)] == rows.tolist()
        assert [o.prompt_token_ids for o in engine.generate_batch(np.array(["a", "b a"]), GREEDY)] == [[1], [2, 1]]
        scores = engine.score(rows, start=[np.int64(1), torch.tensor(2)])
        assert [s.token_ids.tolist() for s in scores] == [[1, 4], [9]]


def test_padding_inside_a_prompt_is_dropped_as_generate_does():
    ids, mask = torch.tensor([[9, 3, 1, 77, 4, 1, 5]]), torch.tensor([[0, 1, 1, 0, 1, 1, 1]])
    theirs = llama().generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)[0, 7:].tolist()
    with RolloutEngine(llama(), config=CONFIG) as engine:
        batch = engine.generate_batch(ids, GREEDY, attention_mask=mask)
        assert batch[0].prompt_token_ids == PROMPT
        assert batch[0].completions[0].token_ids == theirs == oracle.greedy(llama(), PROMPT, 6)


@pytest.mark.parametrize(
    ("prompts", "mask", "message"),
    [
        ([PROMPT], torch.ones(1, 5), r"^attention_mask goes with prompts given as a tensor"),
        (torch.tensor([PROMPT]), torch.ones(1, 4), r"^attention_mask has shape \(1, 4\) and prompts \(1, 5\)"),
        (torch.tensor([PROMPT]), torch.ones(5), r"^attention_mask has shape \(5,\)"),
        (torch.tensor([PROMPT]), [[1] * 5], r"^attention_mask is a list: give a tensor"),
        (torch.tensor([PROMPT]), torch.tensor([[1, 1, 2, 2, 2]]), r"^attention_mask holds 2: give 1 for text"),
        (torch.tensor([PROMPT]), torch.tensor([[-1e9, 0, 0, 0, 0]]), r"^attention_mask holds -1e\+09: give 1 for text"),
        (torch.tensor([PROMPT]), torch.tensor([[math.nan, 1, 1, 1, 1]]), r"^attention_mask holds nan: give 1"),
        (torch.tensor([PROMPT] * 2), torch.tensor([[1] * 5, [0] * 5]), r"^prompt 1 is empty"),
    ],
)
def test_masks(engine, prompts, mask, message):
    with pytest.raises(InvalidRequestError, match=message):
        engine.generate_batch(prompts, GREEDY, attention_mask=mask)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([GREEDY], r"^1 sampling_params for 2 prompts: give one, or one per prompt"),
        ([], r"^0 sampling_params for 2 prompts"),
        ([GREEDY, None], r"^sampling_params: give one SamplingParams, or a list with one per prompt"),
        ({"temperature": 1}, r"^sampling_params: give one SamplingParams"),
        ("greedy", r"^sampling_params: give one"),
        ([GREEDY, SamplingParams(stop="x")], r"^prompt 1: stop strings need a tokenizer"),
        (SamplingParams(logprobs=VOCAB + 1), r"^prompt 0: logprobs=129 and the vocabulary has 128 tokens"),
        (SamplingParams(stop_token_ids=(VOCAB,)), r"^prompt 0: stop_token_ids has an id outside 0 to 127"),
        (SamplingParams(logit_bias={VOCAB: 1.0}), r"^prompt 0: logit_bias has an id outside 0 to 127"),
        (SamplingParams(suppress_token_ids=(VOCAB,)), r"^prompt 0: suppress_token_ids has an id outside 0 to 127"),
        (
            SamplingParams(suppress_token_ids=range(VOCAB)),
            r"^prompt 0: suppress_token_ids has every id,? .*leave some out",
        ),
        (
            SamplingParams(suppress_token_ids=range(9, VOCAB), stop_token_ids=range(9), min_tokens=1),
            r"^prompt 0: suppress_token_ids has every id that does not end a completion, and min_tokens=1 wants one",
        ),
    ],
)
def test_parameters(engine, params, message):
    with pytest.raises(InvalidRequestError, match=message):
        engine.generate_batch([PROMPT, PROMPT], params)


def test_a_message_shows_the_beginning_of_what_is_long(engine):
    calls = [
        lambda: engine.generate_batch([[["x" * 10**5] * 10**3] * 10**3], GREEDY),
        lambda: engine.generate_batch([PROMPT], GREEDY, adapter="x" * 10**5),
        lambda: engine.submit([[1] * 10**5, [2] * 10**5], GREEDY),
        lambda: engine.score([[1, 2]], start="x" * 10**5),
        lambda: engine.wait([], share=[1] * 10**5),
        lambda: SamplingParams(stop=["x" * 10**5] * 10**3 + [""]),
        lambda: SamplingParams(stop_token_ids=[-1] * 10**5),
        lambda: SamplingParams(temperature=["x"] * 10**5),
        lambda: SamplingParams.from_generation_config(GenerationConfig(bad_words_ids=[[1] * 10**5])),
        lambda: engine.generate_batch([]).to_tensors(["x"] * 10**5),
        lambda: EngineConfig(kv_cache_memory="x" * 10**5),
    ]
    for call in calls:
        with pytest.raises(StokerError) as caught:
            call()
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("temperature", [math.nan, -0.1, math.inf])
def test_a_bad_temperature_never_reaches_the_engine(temperature):
    with pytest.raises(InvalidRequestError, match=r"^temperature=.*finite number at least 0 and at most 1e\+15"):
        SamplingParams(temperature=temperature)


def test_a_padded_tensor_without_a_mask():
    tokenizer = SimpleNamespace(pad_token_id=9, eos_token_id=1, bos_token_id=None)
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    for padded in (torch.tensor([[9, 3, 4], [6, 7, 8]]), torch.tensor([[3, 4, 5], [6, 7, 9]])):
        for what in ("prompt", "sequence"):
            message = rf"^{what}s is a tensor with padding \(token 9\).*give its attention_mask, or torch.ones_like"
            with pytest.raises(InvalidRequestError, match=message):
                read_prompts(padded, None, tokenizer, what)
        assert read_prompts(padded, torch.ones_like(ids), tokenizer) == [(row, None) for row in padded.tolist()]
        for other in (None, {"pad_token_id": None}, {"eos_token_id": 9}, {"bos_token_id": 9}):  # it may be meant
            known = None if other is None else SimpleNamespace(**vars(tokenizer) | other)
            assert read_prompts(padded, None, known) == [(row, None) for row in padded.tolist()]
    assert read_prompts(ids, None, tokenizer) == [(row, None) for row in ids.tolist()]
    assert read_prompts(torch.zeros(0, 4, dtype=torch.long), None, tokenizer) == []


def test_no_prompts_are_an_empty_batch(engine):
    for prompts in ([], (), torch.zeros(0, 4, dtype=torch.long)):
        for params in (None, GREEDY, []):
            assert len(engine.generate_batch(prompts, params)) == 0


def test_half_a_character(tokenizer):
    with RolloutEngine(llama(), config=CONFIG, tokenizer=tokenizer) as engine:
        for call in (engine.generate_batch, engine.score):
            with pytest.raises(InvalidRequestError, match="1 holds half a character.*surrogates"):
                call(["a b", "a \ud83d"])


def test_a_tokenizer_without_chat_template(tokenizer):
    with RolloutEngine(llama(), config=CONFIG, tokenizer=tokenizer) as engine:
        assert engine.generate_batch(["a b"], GREEDY)[0].prompt_token_ids == [1, 2]
        with pytest.raises(InvalidRequestError, match=r"^prompt 1: .*chat_template"):
            engine.generate_batch([PROMPT, [{"role": "user", "content": "a"}]], GREEDY)
        with pytest.raises(InvalidRequestError, match=r"^prompt 0 is empty"):
            engine.generate_batch([""], GREEDY)


def test_a_request_that_would_never_fit():
    with RolloutEngine(llama(), config=CONFIG) as probe:
        block = probe.stats().kv_block_bytes
    with RolloutEngine(llama(), config=EngineConfig(kv_cache_memory=4 * block)) as engine:
        assert engine.stats().num_kv_blocks == 3
        message = r"^prompt 1 may grow to 49 tokens and the KV cache holds 48: raise EngineConfig.kv_cache_memory"
        with pytest.raises(InvalidRequestError, match=message):
            engine.generate_batch([PROMPT, [1] * 9], SamplingParams(max_tokens=40))
        whole = engine.generate_batch([PROMPT, [1] * 8] * 2, SamplingParams(max_tokens=40, n=2, temperature=0))
        assert [c.token_ids for c in whole[3].completions] == [oracle.greedy(llama(), [1] * 8, 40)] * 2
        assert_usable(engine, llama())


# -- states ------------------------------------------------------------------------------------------------------


def test_asleep():
    with RolloutEngine(llama(), config=CONFIG) as engine:
        engine.sleep()
        engine.sleep()
        with pytest.raises(EngineStateError, match=r"^the engine is asleep \(kv_cache\): call wake_up\(\) first"):
            engine.generate_batch([PROMPT])
        engine.wake_up()
        engine.wake_up()
        assert_usable(engine, llama())


def test_closed():
    engine = RolloutEngine(llama(), config=CONFIG)
    engine.close()
    engine.close()
    for call in (lambda: engine.generate_batch([PROMPT]), engine.sleep, engine.wake_up, engine.update_weights):
        with pytest.raises(EngineStateError, match=r"^the engine is closed: build a new one"):
            call()
    assert engine.stats().kv_cache_bytes == 0


@pytest.mark.parametrize("call", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_of_an_engine(call):
    with RolloutEngine(llama(), config=CONFIG) as engine:
        with pytest.raises(
            EngineStateError, match=r"^an engine cannot be copied, pickled or sent .* build another one"
        ):
            call({"engine": engine} if call is not copy.copy else engine)
        assert_usable(engine, llama())


def test_a_call_inside_a_call(tokenizer, monkeypatch):
    """As a callback would make it."""
    with RolloutEngine(llama(), config=CONFIG, tokenizer=tokenizer) as engine:
        step, seen = engine.core.step, []
        calls = [
            (lambda: engine.generate_batch([PROMPT]), "cannot start generate_batch inside a step"),
            (lambda: engine.submit(PROMPT), "cannot submit inside a step"),
            (engine.sleep, "cannot sleep inside a step"),
            (engine.close, "cannot close inside a step"),
            (engine.pause, "cannot pause inside a step"),
            (engine.update_weights, "inside a step"),
        ]

        def stepping():
            for call, message in calls:
                with pytest.raises(EngineStateError, match=message):
                    call()
                seen.append(message)
            return step()

        monkeypatch.setattr(engine.core, "step", stepping)
        assert_usable(engine, llama())
        assert len(seen) >= len(calls)


def test_a_version_that_is_none_or_goes_back(engine):
    for version, message in (
        (0, "not above the present version 0"),
        (-3, "not above"),
        (1.0, "not an integer"),
        (True, "not an"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            engine.update_weights(version=version)


def test_every_error_is_a_stoker_error():
    for error in (InvalidConfigError, InvalidRequestError, UnsupportedModelError, EngineStateError, WeightsMovedError):
        assert issubclass(error, StokerError)
