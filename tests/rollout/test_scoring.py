"""Log-probabilities of given tokens, against the plain forward and torch's own log_softmax, topk and entropy."""

from types import SimpleNamespace

import pytest
import torch
from families import draw, make_config, make_model
from family_fields import FAMILIES, VOCAB
from scored import check, clean_engine, engine_of, model_of, shared_engine  # noqa: F401
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from stoker.engine import scorer
from stoker.engine.device import CpuRuntime
from stoker.engine.sampler import likeliest
from stoker.engine.scorer import Scorer, ScoreRows
from stoker.kernels.ops import REFERENCE
from stoker.kernels.triton_ops import DETERMINISTIC, TRITON
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams, UnsupportedModelError, binding

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")


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


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2", "mixtral", "llama4"])
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


def same_bits(engine: RolloutEngine, prompts: list[list[int]], max_tokens: int) -> list[bool]:
    """Of each way of sampling, whether scores from the first token on are what sampling and its prompt's scores gave."""
    kinds = [
        (0.7, {"temperature": 0.7}),
        (1.0, {"temperature": 1.3, "logprobs_mode": "raw"}),
        (1.0, {"temperature": 0}),
    ]
    settings = {"max_tokens": max_tokens, "ignore_eos": True, "prompt_logprobs": 0}
    params = [SamplingParams(seed=i, **settings, **kind) for i, (_, kind) in enumerate(kinds)]
    found = []
    for output, (temperature, _) in zip(engine.generate_batch(prompts, params), kinds, strict=True):
        (completion,) = output.completions
        (scores,) = engine.score([output.prompt_token_ids + completion.token_ids], temperature=temperature)
        found.append(scores.logprobs.tolist() == output.prompt_logprobs.logprobs.tolist() + completion.logprobs)
    return found


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_scores_have_the_bits_of_what_was_sampled(deterministic, monkeypatch):
    """Prompts are scored in chunks and then, beside nobody, from where the cache ends."""
    monkeypatch.setattr(binding, "ops_for", lambda *_, **__: DETERMINISTIC if deterministic else TRITON)
    settings = {"max_num_batched_tokens": 6, "score_chunk_tokens": 512, "decode_window": 2}
    with engine_of(make_model("qwen3", num_hidden_layers=1), deterministic=deterministic, **settings) as engine:
        found = same_bits(engine, [draw(i, 5) for i in range(3)], 2)
    assert found == [True] * 3 if deterministic else not all(found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_scores_have_the_bits_of_what_was_sampled_on_a_gpu(dtype):
    config = EngineConfig(kv_cache_memory="64MiB", deterministic=True, max_num_batched_tokens=24)
    with RolloutEngine(make_model("qwen3").to(dtype).cuda(), config=config) as engine:
        assert all(same_bits(engine, [draw(i, 50) for i in range(3)], 40))


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


class Shifted(LlamaForCausalLM):
    """Does something to its input before the base model sees it."""

    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids=None if input_ids is None else input_ids + 1, **kwargs)


def test_a_model_that_is_more_than_base_and_head_is_refused():
    model = Shifted(make_config("llama")).eval()
    with pytest.raises(UnsupportedModelError, match=r"^Shifted does more than its base model"):
        RolloutEngine(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_logits_of_16_bits_are_exact_where_they_are_compared(dtype):
    logits, inverse, targets = torch.randn(7, 90).to(dtype), torch.linspace(0.4, 3, 7), torch.arange(7) * 12
    logits[::2, 5] = 37.25  # so far from the others that 16 bits hold no difference
    model = SimpleNamespace(logits_of=lambda hidden, rows, adapters: logits[rows])
    rows = ScoreRows([range(3, 10)], torch.arange(7), targets, inverse, [5])
    (scores,) = Scorer(REFERENCE, CpuRuntime(torch.device("cpu")), 3)(model, logits, rows, None).read()
    expected = (logits.double() * inverse[:, None]).log_softmax(-1)
    torch.testing.assert_close(scores.logprobs.double(), expected[torch.arange(7), targets], rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.top_logprobs.double(), expected.topk(5).values, rtol=0, atol=1e-5)


def test_who_asks_for_all_tokens_does_not_ask_for_others(monkeypatch):
    """Steps are shared, and so many for each of a long prompt's tokens would be larger than the model."""
    made, model = [], model_of("qwen3")

    def noted(ops, logits, inverse, count, *given):
        made.append(len(logits) * count)
        return likeliest(ops, logits, inverse, count, *given)

    monkeypatch.setattr(scorer, "likeliest", noted)
    prompts, tops = [draw(seed, length) for seed, length in enumerate((9, 3, 30, 1, 5, 7))], [2, VOCAB, 0, 3, 2, 2]
    params = [SamplingParams(max_tokens=1, prompt_logprobs=top) for top in tops]
    with engine_of(model) as engine:
        batch = engine.generate_batch(prompts, params)
        batch.raise_for_errors()
    assert sum(made) == sum((len(prompt) - 1) * top for prompt, top in zip(prompts, tops, strict=True))
    for prompt, top, output in zip(prompts, tops, batch, strict=True):
        if len(prompt) > 1:
            check(output.prompt_logprobs, model, prompt, 1, top_k=top)


def test_who_is_scored_alike_is_so_at_once():
    """Those of whom nothing is scored in this step do not come between others."""
    nothing, tokens = torch.empty(0), [range(1, 4), range(0), range(2, 4), range(5, 6), range(0)]
    rows = ScoreRows(tokens, nothing, nothing, nothing, [5, 0, 5, 2, 5])
    assert list(rows.alike(0, 6)) == [(slice(0, 5), 5), (slice(5, 6), 2)]
    assert list(rows.alike(4, 6)) == [(slice(0, 1), 5), (slice(1, 2), 2)]


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


def test_each_prompt_of_a_plan_is_scored_as_it_asks():
    asked = [(1.0, 0), (0.5, 4), (2.0, 1)]
    prompts = [draw(i, 5 + 2 * i) for i in range(3)]
    with engine_of(model_of("qwen3"), max_num_batched_tokens=64) as engine:
        params = [SamplingParams(max_tokens=2, temperature=t, prompt_logprobs=k) for t, k in asked]
        for output, (temperature, top_k) in zip(engine.generate_batch(prompts, params), asked, strict=True):
            check(output.prompt_logprobs, model_of("qwen3"), output.prompt_token_ids, 1, temperature, top_k)


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
