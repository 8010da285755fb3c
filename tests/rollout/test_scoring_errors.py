"""What scoring refuses, and what goes wrong in the middle of it: nothing else is disturbed."""

import math
import re

import pytest
import torch
from families import draw, make_model
from family_fields import VOCAB
from scored import check, clean_engine, engine_of, model_of, shared_engine  # noqa: F401

from stoker.rollout import EngineStateError, InvalidRequestError, RequestFailedError, SamplingParams

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")


@pytest.mark.parametrize(
    ("sequences", "options", "message"),
    [
        ([[1, 2], []], {}, r"^sequence 1 is empty: give at least one token"),
        ([[1, 2], [3]], {}, r"^sequence 1 has one token, and the first token has no log-probability"),
        ([[1, 2, 3]], {"start": 3}, r"^sequence 0: start=3 .* an integer from 1 to 2$"),
        ([[1, 2, 3], [1, 2]], {"start": [2, 0]}, r"^sequence 1: start=0 .* from 1 to 1$"),
        ([[1, 2, 3]], {"start": -1}, r"^sequence 0: start=-1"),
        ([[1, 2, 3]], {"start": 1.0}, r"^sequence 0: start=1.0"),
        ([[1, 2, 3]], {"start": True}, r"^sequence 0: start=True"),
        ([[1, 2, 3]], {"start": [1, 2]}, r"^2 starts for 1 sequences: give one, or one per sequence"),
        ([[1, 2], list(range(1, 66))], {}, r"^sequence 1 has 65 tokens and max_model_len is 64"),
        ([[1, VOCAB]], {}, rf"^sequence 0 has {VOCAB} at position 1: token ids are integers from 0 to {VOCAB - 1}"),
        ([[1, -1]], {}, r"^sequence 0 has -1 at position 1"),
        (["text"], {}, r"^text .*need a tokenizer"),
        ([[{"role": "user", "content": "hi"}]], {}, r"^chats cannot be scored as they are"),
        ("text", {}, r"^sequences is one str: give a list of sequences"),
        (torch.ones(2, 3), {}, r"^sequences is a torch.float32 tensor"),
        (torch.ones(2, 3, dtype=torch.long), {"attention_mask": torch.ones(2, 2)}, r"^attention_mask has shape"),
        ([[1, 2]], {"attention_mask": torch.ones(1, 2)}, r"^attention_mask goes with sequences given as a tensor"),
        *(
            ([[1, 2]], {"temperature": t}, r"^temperature=.*: it has to be a number from 1e-15 to 1e\+15")
            for t in (0, 0.0, -1.0, 1e-45, 1e39, math.nan, math.inf, True, "1")
        ),
        ([[1, 2]], {"entropy": "False"}, r"^entropy='False': give True or False$"),
        ([[1, 2]], {"on_scored": 3}, r"^on_scored=3: give a function of a sequence's number and its result$"),
        *(
            ([[1, 2]], {"top_k": k}, rf"^top_k=.*: it has to be an integer from 0 to {VOCAB}")
            for k in (-1, VOCAB + 1, 1.5, True)
        ),
    ],
)
def test_bad_input(engine, sequences, options, message):
    before = engine.stats()
    with pytest.raises(InvalidRequestError, match=message):
        engine.score(sequences, **options)
    assert engine.stats() == before, "a refused call has done some work"


def test_bad_prompt_logprobs(engine):
    for value in (-1, 1.5, True):
        with pytest.raises(InvalidRequestError, match=r"^prompt_logprobs="):
            SamplingParams(prompt_logprobs=value)
    with pytest.raises(InvalidRequestError, match=r"^prompt 1: prompt_logprobs=129 and the vocabulary has 128 tokens"):
        engine.generate_batch([[1], [2]], [SamplingParams(), SamplingParams(prompt_logprobs=129)])


def test_a_rollout_batch_knows_where_its_completions_begin(engine):
    batch = engine.generate_batch([[1, 2, 3]], SamplingParams(max_tokens=2))
    for options in ({"start": 2}, {"attention_mask": torch.ones(1, 5)}):
        with pytest.raises(InvalidRequestError, match=r"^a RolloutBatch is scored from where its completions begin"):
            engine.score(batch, **options)


def test_a_sequence_that_would_never_fit():
    with engine_of(model_of("qwen3"), blocks=3) as engine:
        check(engine.score([draw(1, 9)])[0], model_of("qwen3"), draw(1, 9), 1)
        with pytest.raises(InvalidRequestError, match=r"^sequence 0 has 10 tokens and the KV cache holds 8: raise"):
            engine.score([draw(1, 10)])


def test_asleep_closed_and_paused():
    engine = engine_of(model_of("qwen3"))
    engine.sleep()
    with pytest.raises(EngineStateError, match="asleep"):
        engine.score([[1, 2]])
    engine.wake_up()
    engine.pause()
    with pytest.raises(EngineStateError, match="paused"):
        engine.score([[1, 2]])
    engine.resume()
    check(engine.score([[1, 2]])[0], model_of("qwen3"), [1, 2], 1)
    engine.close()
    with pytest.raises(EngineStateError, match="closed"):
        engine.score([[1, 2]])


def test_a_call_inside_a_call(engine, monkeypatch):
    step, refused = engine.core.step, []

    def stepping():
        with pytest.raises(EngineStateError, match="the engine cannot start score inside a step"):
            engine.score([[1, 2]])
        refused.append(True)
        return step()

    monkeypatch.setattr(engine.core, "step", stepping)
    check(engine.score([[1, 2, 3]])[0], model_of("qwen3"), [1, 2, 3], 1)
    assert refused


@pytest.mark.parametrize("when", ["plan", "fill", "commit"])
def test_an_interrupt_leaves_the_engine_usable(engine, when, monkeypatch):
    sequences = [draw(1, 20) + draw(i, 9) for i in range(6)]
    target = {"plan": engine.core.scheduler, "fill": engine.core.inputs, "commit": engine.core.scheduler}[when]
    calls, original = 0, getattr(type(target), when)

    def interrupting(self, *arguments):
        nonlocal calls
        calls += 1
        result = original(self, *arguments)
        if calls == 3:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(type(target), when, interrupting)
        with pytest.raises(KeyboardInterrupt):
            engine.score(sequences, start=20)
    assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks
    for one, ids in zip(engine.score(sequences, start=20), sequences, strict=True):
        check(one, model_of("qwen3"), ids, 20)


def test_an_aborted_sequence_says_so(engine, monkeypatch):
    """As another thread's ``pause("abort")`` would have it."""
    step, sequences = engine.core.step, [draw(i, 30) for i in range(3)]

    def stepping():
        finished = step()
        engine.core.abort(r for r in engine.core.scheduler.running if r.tokens == sequences[1] and r.computed > 9)
        return finished

    monkeypatch.setattr(engine.core, "step", stepping)
    scores = engine.score(sequences)
    for row in (0, 2):
        check(scores[row], model_of("qwen3"), sequences[row], 1)
    assert isinstance(scores[1].error, RequestFailedError)
    assert "aborted before it was scored: score it again" in str(scores[1].error)
    assert scores[1].logprobs[-1].isnan()


def test_nan_is_told_of_the_sequence_that_has_it():
    model = make_model("qwen3", tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[77] = math.nan
    good, bad = [5, 6, 7, 8, 9], [5, 6, 77, 8, 9]
    with engine_of(model) as engine:
        one, two, three = engine.score([good, bad, good], entropy=True)
        for scores in (one, three):
            check(scores, model, good, 1)
        assert isinstance(two.error, RequestFailedError)
        assert re.search(r"NaN logits for the token at position \d", str(two.error))
        assert two.logprobs[2:].isnan().all()
        outputs = engine.generate_batch([good, bad], SamplingParams(max_tokens=2, prompt_logprobs=0))
        check(outputs[0].prompt_logprobs, model, good, 1)
        assert outputs[1].error is not None
        assert outputs[1].prompt_logprobs.logprobs[2:].isnan().all()
