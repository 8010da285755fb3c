"""Log-probabilities of given tokens, against the plain forward and torch's own log_softmax, topk and entropy."""

import math
import random
import re
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from families import FAMILIES, VOCAB, make_config, make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from stoker.engine.virtual_memory import PlainBuffer
from stoker.rollout import (
    EngineConfig,
    EngineStateError,
    InvalidRequestError,
    RequestFailedError,
    RolloutEngine,
    SamplingParams,
    TokenLogprobs,
    UnsupportedModelError,
)

BLOCK = 4
EXACT = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(autouse=True)
def unwritten_kv_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainBuffer, "tensor", property(lambda self: self._tensor.fill_(255)))


@cache
def model_of(family: str) -> PreTrainedModel:
    return make_model(family)


def draw(seed: int, length: int) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def plain(model: PreTrainedModel, ids: list[int], start: int, temperature: float = 1.0) -> torch.Tensor:
    """The whole log_softmax that each token from ``start`` on was drawn from, float64 [T - start, vocabulary]."""
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, start - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1)


def check(
    scores: TokenLogprobs, model: PreTrainedModel, ids: list[int], start: int, temperature: float = 1.0, top_k: int = 0
) -> None:
    """Everything ``scores`` says of ``ids[start:]``."""
    expected = plain(model, ids, start, temperature)
    targets = torch.tensor(ids[start:], dtype=torch.long)
    chosen = expected.gather(1, targets[:, None])
    assert scores.error is None
    assert torch.equal(scores.token_ids, targets)
    torch.testing.assert_close(scores.logprobs.double(), chosen[:, 0], **EXACT)
    # A rank may go either way where another token is as likely as the rounding tells.
    low, high = ((expected > chosen + d).sum(1) + 1 for d in (1e-5, -1e-5))
    assert ((scores.ranks >= low) & (scores.ranks <= high - 1)).all()
    if scores.entropy is not None:
        entropy = torch.distributions.Categorical(logits=expected).entropy()
        torch.testing.assert_close(scores.entropy.double(), entropy, **EXACT)
    if not top_k:
        assert scores.top_ids is None and scores.top_logprobs is None
        return
    values = expected.topk(top_k, dim=1).values
    assert scores.top_ids is not None and scores.top_logprobs is not None
    assert scores.top_ids.shape == values.shape
    torch.testing.assert_close(scores.top_logprobs.double(), values, **EXACT)
    torch.testing.assert_close(expected.gather(1, scores.top_ids), values, **EXACT)


def engine_of(model: PreTrainedModel, *, blocks: int = 200, **fields: object) -> RolloutEngine:
    """In chunks of 16 tokens and 5 rows of logits, unless told otherwise."""
    with RolloutEngine(model, config=EngineConfig(block_size=BLOCK, kv_cache_memory="1MiB")) as probe:
        block_bytes = probe.stats().kv_block_bytes
    settings = {"block_size": BLOCK, "max_num_batched_tokens": 16, "score_chunk_tokens": 5} | fields
    return RolloutEngine(model, config=EngineConfig(kv_cache_memory=blocks * block_bytes, **settings))


@pytest.fixture(scope="module")
def shared() -> Iterator[RolloutEngine]:
    with engine_of(model_of("qwen3"), max_num_seqs=8, max_model_len=64) as engine:
        yield engine


@pytest.fixture
def engine(shared: RolloutEngine) -> Iterator[RolloutEngine]:
    """With nothing in its prefix cache; all blocks have to be free when a test is over."""
    shared.update_weights()
    yield shared
    assert shared.stats().num_free_kv_blocks == shared.stats().num_kv_blocks
    shared.core.scheduler.check()


# -- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_those_of_the_plain_forward(family):
    """Ragged, chunked and, in under half the memory they need, preempted; then again, on what the cache kept."""
    model = model_of(family)
    sequences = [draw(0, 8) + draw(1, 29), draw(0, 8) + draw(2, 31), draw(3, 42), draw(4, 2), draw(5, 21)]
    starts = [9, 9, 1, 1, 7]
    with engine_of(model, blocks=12) as engine:
        for _ in range(2):
            scores = engine.score(sequences, start=starts, temperature=0.7, top_k=3, entropy=True)
            for one, ids, start in zip(scores, sequences, starts, strict=True):
                check(one, model, ids, start, 0.7, 3)
            engine.core.scheduler.check()
        assert engine.stats().num_preemptions > 0
        assert engine.stats().prefix_cache_hit_tokens > 0


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "cohere2", "mixtral", "llama4"])
@pytest.mark.parametrize("mode", ["scaled", "raw"])
def test_what_was_just_sampled_scores_as_it_was_sampled(family, mode):
    prompts = [draw(7, 18), draw(8, 3), draw(9, 30)]
    params = SamplingParams(n=3, temperature=0.6, max_tokens=14, seed=1, logprobs_mode=mode, prompt_logprobs=2)
    with engine_of(model_of(family)) as engine:
        batch = engine.generate_batch(prompts, params)
        temperature = 0.6 if mode == "scaled" else 1.0
        scores = engine.score(batch, temperature=temperature)
        completions = [(o, c) for o in batch for c in o.completions]
        assert len(scores) == len(completions) == 9
        for one, (output, c) in zip(scores, completions, strict=True):
            assert one.token_ids.tolist() == c.token_ids
            torch.testing.assert_close(one.logprobs, torch.tensor(c.logprobs), rtol=0, atol=1e-5)
            check(output.prompt_logprobs, model_of(family), output.prompt_token_ids, 1, temperature, 2)


def test_forms_of_sequences(engine):
    """Lists, padded tensors as ``to_tensors`` gives them, and a batch of rollouts are the same sequences."""
    batch = engine.generate_batch([draw(1, 11), draw(2, 5)], SamplingParams(n=2, max_tokens=9, seed=3, min_tokens=2))
    t = batch.to_tensors(pad_token_id=0)
    forms = [
        engine.score(batch),
        engine.score(
            torch.cat((t.prompt_ids, t.completion_ids), 1),
            attention_mask=torch.cat((t.prompt_mask, t.completion_mask), 1),
            start=t.prompt_mask.sum(1),
        ),
        engine.score(
            [o.prompt_token_ids + c.token_ids for o in batch for c in o.completions],
            start=[len(o.prompt_token_ids) for o in batch for c in o.completions],
        ),
    ]
    for scores in forms:
        padded = torch.nn.utils.rnn.pad_sequence([s.logprobs for s in scores], batch_first=True)
        torch.testing.assert_close(padded, t.logprobs, rtol=0, atol=1e-5)
    assert engine.score([]) == []


def test_text_is_tokenised():
    core = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    with RolloutEngine(model_of("qwen3"), tokenizer=tokenizer) as engine:
        (scores,) = engine.score(["a b b a"])
        check(scores, model_of("qwen3"), [1, 2, 2, 1], 1)


def test_temperature_entropy_and_top_k_are_as_asked(engine):
    model, ids = model_of("qwen3"), draw(4, 20)
    for temperature, top_k, entropy in ((1.0, 0, False), (2.5, VOCAB, True), (0.3, 1, False)):
        (scores,) = engine.score([ids], start=3, temperature=temperature, top_k=top_k, entropy=entropy)
        check(scores, model, ids, 3, temperature, top_k)
        assert (scores.entropy is not None) == entropy
        assert (scores.logprobs.dtype, scores.ranks.dtype) == (torch.float32, torch.int64)


def test_a_sequence_may_fill_the_model(engine):
    ids = draw(5, 64)
    (scores,) = engine.score([ids], start=60)
    check(scores, model_of("qwen3"), ids, 60)


def test_results_are_the_callers_own(engine):
    ids = draw(6, 20)
    (first,) = engine.score([ids], top_k=2, entropy=True)
    for tensor in (first.logprobs, first.ranks, first.top_ids, first.top_logprobs, first.entropy):
        tensor.zero_()
    (again,) = engine.score([ids], top_k=2, entropy=True)
    check(again, model_of("qwen3"), ids, 1, top_k=2)


def test_scoring_changes_no_later_sample():
    params = SamplingParams(max_tokens=8)
    tokens = []
    for scored in (False, True):
        with engine_of(model_of("qwen3")) as engine:
            if scored:
                engine.score([draw(1, 9), draw(2, 9)])
            tokens.append(engine.generate_batch([draw(3, 9)], params)[0].completions[0].token_ids)
    assert tokens[0] == tokens[1]


# -- what is computed --------------------------------------------------------------------------------------------


def computed(engine: RolloutEngine, call) -> int:
    """Tokens whose hidden states a call computes, padding aside."""
    tokens, fill = 0, engine.core.inputs.fill

    def counting(plan):
        nonlocal tokens
        tokens += sum(plan.num_new)
        return fill(plan)

    engine.core.inputs.fill = counting
    try:
        call()
    finally:
        del engine.core.inputs.fill
    return tokens


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("prompt_length", [13, 12, 5])
def test_a_group_computes_its_prompt_once(prompt_length, prefix_caching):
    model = model_of("qwen3")
    prompts = [draw(i, prompt_length) for i in (1, 2)]
    sequences = [p + draw(10 + i, 6) for p in prompts for i in range(4)]
    with engine_of(model, max_num_batched_tokens=256, enable_prefix_caching=prefix_caching) as engine:
        scores = []
        count = computed(engine, lambda: scores.extend(engine.score(sequences, start=prompt_length)))
        for one, ids in zip(scores, sequences, strict=True):
            check(one, model, ids, prompt_length)
    # Neither the last token of a sequence nor, but once, what comes before the one that predicts the first scored.
    assert count == 2 * (prompt_length - 1) + 8 * 6


def test_kept_scores_spare_the_computation(engine):
    model, ids = model_of("qwen3"), draw(1, 42)
    longer = ids + draw(2, 8)

    def score(sequence: list[int], **options: object) -> None:
        (one,) = engine.score([sequence], **options)
        check(one, model, sequence, options.get("start", 1), options.get("temperature", 1.0), options.get("top_k", 0))

    assert computed(engine, lambda: score(ids, start=7)) == 41
    assert computed(engine, lambda: score(ids, start=7)) == 2  # 10 blocks are cached, and predict all but two tokens
    assert computed(engine, lambda: score(longer, start=7)) == 10
    assert computed(engine, lambda: score(ids[:41], start=7)) == 1
    assert computed(engine, lambda: score(ids, start=20)) == 2
    assert computed(engine, lambda: score(ids, start=5)) == 37  # of the second block, two scores are not there
    assert computed(engine, lambda: score(ids, start=5)) == 2
    for other in ({"temperature": 0.5}, {"top_k": 2}):
        assert computed(engine, lambda other=other: score(ids, start=7, **other)) == 35
    engine.update_weights()
    assert computed(engine, lambda: score(ids, start=7)) == 41


def test_kv_without_scores_is_of_use_before_start_alone(engine):
    """Blocks that generation has cached hold no scores."""
    model, prompt = model_of("qwen3"), draw(3, 21)
    engine.generate_batch([prompt], SamplingParams(max_tokens=4, temperature=0))
    scores = []
    assert computed(engine, lambda: scores.extend(engine.score([prompt], start=15))) == 6
    check(scores[0], model, prompt, 15)
    assert computed(engine, lambda: scores.extend(engine.score([prompt]))) == 20
    check(scores[1], model, prompt, 1)


def test_evicted_blocks_take_their_scores_along():
    model = model_of("qwen3")
    with engine_of(model, blocks=12) as engine:
        for seed in range(6):
            ids = draw(seed, 30)
            for _ in range(2):
                (scores,) = engine.score([ids])
                check(scores, model, ids, 1)
        cache = engine.core.scheduler.prefix_cache
        assert cache._scores.keys() <= cache._block_of.keys() and len(cache) <= 11
        engine.update_weights()
        assert not cache._scores


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_random_traffic(ahead, monkeypatch):
    """Groups, repeats, tight memory, chunks, rollouts that ask for prompt log-probabilities; plans launched ahead."""
    model, rng = model_of("qwen3"), random.Random(ahead)
    begin = draw(0, 40)
    preempted = 0
    for _ in range(4):
        blocks, tokens = rng.randint(12, 14), rng.choice((5, 16, 64))
        fields = {"max_num_seqs": rng.randint(2, 6), "max_num_batched_tokens": tokens}
        with engine_of(model, blocks=blocks, enable_prefix_caching=rng.random() < 0.8, **fields) as engine:
            engine.core.ahead = ahead
            commit = engine.core.scheduler.commit

            def proving(*arguments, commit=commit, scheduler=engine.core.scheduler):
                finished = commit(*arguments)
                scheduler.check()
                return finished

            engine.core.scheduler = Proxy(engine.core.scheduler, proving)
            for _ in range(3):
                sequences, starts = [], []
                for _ in range(rng.randint(1, 3)):
                    prompt = begin[: rng.randint(1, 24)] + draw(rng.randrange(5), rng.randint(0, 5))
                    for _ in range(rng.randint(1, 4)):
                        sequences.append(prompt + draw(rng.randrange(9), rng.randint(1, 12)))
                        starts.append(rng.choice((len(prompt), len(prompt), 1)))
                for one, ids, start in zip(engine.score(sequences, start=starts), sequences, starts, strict=True):
                    check(one, model, ids, start)
                params = SamplingParams(n=2, max_tokens=3, temperature=0, prompt_logprobs=rng.randint(0, 2))
                for output in engine.generate_batch(sequences[::2], params):
                    check(output.prompt_logprobs, model, output.prompt_token_ids, 1, 1.0, params.prompt_logprobs)
            preempted += engine.stats().num_preemptions
            assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks
    assert preempted > 0


class Proxy:
    """A scheduler whose ``commit`` is another."""

    def __init__(self, scheduler, commit) -> None:
        self.__dict__.update(_scheduler=scheduler, commit=commit)

    def __getattr__(self, name: str) -> object:
        return getattr(self._scheduler, name)


# -- memory ------------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest storage that an operation gives, but for those that were there before."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("family", ["qwen3", "cohere2"])
def test_no_more_logits_than_a_chunk(family):
    """A fused and an unfused model, with logits that outweigh all else, stacks of small weights for their checksums too."""
    vocab, chunk = 4096, 32
    model = make_model(family, vocab_size=vocab)
    sequences = [draw(i, 60) for i in range(6)]
    with RolloutEngine(model, config=EngineConfig(max_num_batched_tokens=64, score_chunk_tokens=chunk)) as engine:
        for call in (
            lambda: engine.score(sequences, top_k=2, entropy=True),
            lambda: engine.generate_batch(sequences[:2], SamplingParams(max_tokens=1, prompt_logprobs=1)),
        ):
            engine.update_weights()
            known = [*model.parameters(), *(t for pair in engine._kv.layers for t in pair)]
            with LargestTensor(known) as largest:
                call()
            assert largest.nbytes == 4 * vocab * chunk


# -- prompt log-probabilities --------------------------------------------------------------------------------------


def test_prompt_logprobs_are_computed_once_a_group(engine):
    model, prompt = model_of("qwen3"), draw(1, 14)
    params = SamplingParams(n=3, max_tokens=2, temperature=0, prompt_logprobs=2)
    plain_params = SamplingParams(max_tokens=2, temperature=0)
    other = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0)
    outputs = []
    before = engine.stats().scored_tokens
    engine.generate_batch([prompt], plain_params)
    outputs.extend(engine.generate_batch([prompt] * 4, [plain_params, params, params, other]))
    assert outputs[0].prompt_logprobs is None
    for output, top_k in zip(outputs[1:], (2, 2, 0), strict=True):
        check(output.prompt_logprobs, model, prompt, 1, 1.0, top_k)
    assert engine.stats().scored_tokens - before == 2 * 13


def test_prompt_logprobs_of_a_first_token_that_ends_it_all():
    """The plan that scores the prompt is also the request's last."""
    model = make_model("qwen3")
    prompt = draw(2, 9)
    with engine_of(model) as engine:
        (first,) = (
            engine.generate_batch([prompt], SamplingParams(max_tokens=1, temperature=0))[0].completions[0].token_ids
        )
        engine.update_weights()
        params = SamplingParams(max_tokens=5, temperature=0, stop_token_ids=(first,), prompt_logprobs=0)
        (output,) = engine.generate_batch([prompt], params)
        assert output.completions[0].token_ids == [first]
        check(output.prompt_logprobs, model, prompt, 1)
        (output,) = engine.generate_batch([[7]], SamplingParams(max_tokens=1, prompt_logprobs=3))
        assert output.prompt_logprobs.logprobs.shape == (0,) and output.prompt_logprobs.top_ids.shape == (0, 3)


def test_new_weights_under_a_paused_request():
    """Scores are all of the same weights, the new ones."""
    model = make_model("qwen3", seed=5)
    prompt = draw(3, 40)
    with engine_of(model, max_num_batched_tokens=8) as engine:
        handle = engine.submit(prompt, SamplingParams(max_tokens=2, prompt_logprobs=0))
        for _ in range(2):
            engine.core.step()
        engine.pause()
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
        engine.update_weights()
        engine.resume()
        check(handle.result().prompt_logprobs, model, prompt, 1)
        for _ in range(2):
            check(engine.score([prompt])[0], model, prompt, 1)


def test_scores_of_old_weights_are_not_kept_for_new_ones():
    model = make_model("qwen3", seed=6)
    prompt = draw(3, 21)
    with engine_of(model, max_num_batched_tokens=64, decode_window=1) as engine:
        handle = engine.submit(prompt, SamplingParams(max_tokens=8, prompt_logprobs=0))
        for _ in range(2):
            engine.core.step()
        engine.pause()
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
        engine.update_weights()
        engine.resume(recompute=True)
        handle.result()
        check(engine.score([prompt])[0], model, prompt, 1)


class Shifted(LlamaForCausalLM):
    """Does something to its input before the base model sees it."""

    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids=None if input_ids is None else input_ids + 1, **kwargs)


def test_a_model_that_is_more_than_base_and_head_is_refused():
    model = Shifted(make_config("llama")).eval()
    with pytest.raises(UnsupportedModelError, match=r"^Shifted does more than its base model"):
        RolloutEngine(model)


# -- what goes wrong -----------------------------------------------------------------------------------------------


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
