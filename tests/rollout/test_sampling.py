"""What is sampled and what is said of it, through the whole engine: log-probabilities, penalties, bias."""

import math
from dataclasses import replace

import oracle
import pytest
import torch
from family_fields import VOCAB
from small_engine import (
    CROWD,
    GREEDY,
    NEEDLE,
    build,
    draw,
    llama,
    only,
    successor_model,
    tokens,
)
from transformers import GenerationConfig

from stoker.rollout import SamplingParams

# -- log-probabilities -------------------------------------------------------------------------------------------


def test_logprobs_in_three_modes():
    prompt, temperature, top_k, repetition, presence, frequency = draw(3, 12), 0.7, 20, 1.3, 0.2, 0.1
    with build() as engine:
        for mode in ("scaled", "raw", "processed"):
            params = SamplingParams(
                temperature=temperature,
                top_k=top_k,
                repetition_penalty=repetition,
                presence_penalty=presence,
                frequency_penalty=frequency,
                max_tokens=20,
                seed=2,
                logprobs=3,
                logprobs_mode=mode,
            )
            c = only(engine.generate_batch([prompt], params))
            logits = oracle.logits(llama(), prompt, c.token_ids).double()
            if mode == "scaled":
                logits = logits / temperature
            elif mode == "processed":
                for at, row in enumerate(logits):
                    seen = torch.bincount(torch.tensor(c.token_ids[:at], dtype=torch.long), minlength=VOCAB)
                    either = (seen + torch.bincount(torch.tensor(prompt), minlength=VOCAB)) > 0
                    row[either] = torch.where(row > 0, row / repetition, row * repetition)[either]
                    row -= frequency * seen + presence * (seen > 0)
                    row /= temperature
                    row[row < row.topk(top_k).values[-1]] = -torch.inf
            expected = logits.log_softmax(-1)
            ours = torch.tensor(c.logprobs).double()
            torch.testing.assert_close(
                ours, expected.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0], rtol=0, atol=1e-4
            )
            for at, top in enumerate(c.top_logprobs):
                values, ids = expected[at].topk(3)
                assert list(top) == ids.tolist()
                torch.testing.assert_close(list(top.values()), values.tolist(), rtol=0, atol=1e-4)


def test_every_bit_of_a_seed_counts():
    seeds = [1, 1 + 2**31, 1 + 2**32, 1 + 2**48, 1 + 2**62]
    with build() as engine:
        batch = engine.generate_batch([NEEDLE] * 5, [SamplingParams(max_tokens=12, seed=seed) for seed in seeds])
        assert len({tuple(o.completions[0].token_ids) for o in batch}) == 5


def test_the_furthest_temperatures_and_penalties_give_numbers():
    """The lowest temperature is greedy, the highest uniform, and no combination leaves fp32's range."""
    far = [{"temperature": t, "seed": 1} for t in (1e-15, 1e15)]
    far += [one | {"repetition_penalty": r, "top_k": k} for one in far for r in (1e-15, 1e15) for k in (0, 5)]
    far += [one | {"presence_penalty": p, "frequency_penalty": p} for one in far for p in (-1e15, 1e15)]
    with build() as engine:
        batch = engine.generate_batch([NEEDLE] * len(far), [SamplingParams(max_tokens=6, **one) for one in far])
        assert all(math.isfinite(sum(o.completions[0].logprobs)) and o.error is None for o in batch)
        cold, hot = batch[0].completions[0], batch[1].completions[0]
        assert cold.token_ids == only(engine.generate_batch([NEEDLE], GREEDY)).token_ids[:6]
        assert cold.logprobs == [0.0] * 6 and hot.logprobs == pytest.approx([-math.log(VOCAB)] * 6)
        for temperature, expected in ((1e-15, 0.0), (1e15, -math.log(VOCAB))):
            (scores,) = engine.score([NEEDLE + cold.token_ids], start=len(NEEDLE), temperature=temperature)
            assert scores.logprobs.tolist() == pytest.approx([expected] * 6)


@pytest.mark.parametrize("mode", ["scaled", "raw", "processed"])
def test_greedy_logprobs_are_those_of_temperature_one(mode):
    with build() as engine:
        c = only(engine.generate_batch([NEEDLE], SamplingParams(temperature=0, logprobs_mode=mode)))
        expected = oracle.logprobs(llama(), NEEDLE, c.token_ids)
        torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)


def test_top_logprobs_are_as_many_as_asked_for_whatever_the_neighbours_want():
    params = [SamplingParams(logprobs=k, max_tokens=4, temperature=0) for k in (0, 1, 5, VOCAB)]
    with build() as engine:
        batch = engine.generate_batch([NEEDLE] * 4, params)
        for output, p in zip(batch, params, strict=True):
            (c,) = output.completions
            if p.logprobs == 0:
                assert c.top_logprobs is None
            else:
                assert [len(top) for top in c.top_logprobs] == [p.logprobs] * 4
                assert [next(iter(top)) for top in c.top_logprobs] == c.token_ids
                assert all(sorted(top.values(), reverse=True) == list(top.values()) for top in c.top_logprobs)


def test_prefill_equals_decode():
    """The engine's decode continues where its own prefill of prompt and completion would."""
    with build(enable_prefix_caching=False, block_size=4) as engine:
        long = only(engine.generate_batch([NEEDLE], SamplingParams(temperature=0, max_tokens=30)))
        prompts = [NEEDLE + long.token_ids[:k] for k in range(30)]
        batch = engine.generate_batch(prompts, SamplingParams(temperature=0, max_tokens=1))
        assert [o.completions[0].token_ids[0] for o in batch] == long.token_ids
        torch.testing.assert_close([o.completions[0].logprobs[0] for o in batch], long.logprobs, rtol=0, atol=1e-5)


def test_top_k_one_is_greedy_and_tiny_top_p_too():
    expected = oracle.greedy(llama(), NEEDLE, 12)
    with build() as engine:
        for p in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
            c = only(engine.generate_batch([NEEDLE], SamplingParams(max_tokens=12, temperature=1.5, seed=1, **p)))
            assert c.token_ids == expected


def test_repetition_penalty_is_that_of_generate():
    ids = torch.tensor([NEEDLE])
    out = llama().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, repetition_penalty=1.7
    )
    expected = out[0, len(NEEDLE) :].tolist()
    assert expected != oracle.greedy(llama(), NEEDLE, 24)
    for config in ({}, {"decode_window": 1}, {"max_num_batched_tokens": 4, "block_size": 4}):
        with build(**config) as engine:
            params = SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.7)
            batch = engine.generate_batch([NEEDLE, CROWD[0]], [params, SamplingParams(seed=1, max_tokens=24)])
            assert tokens(batch)[0] == [expected]


def test_presence_and_frequency_penalties():
    cycle = [5, 6, 7, 8]
    with build(successor_model(cycle, vocab=32)) as engine:
        assert only(engine.generate_batch([[5]], GREEDY)).token_ids == [6, 7, 8, 5] * 2
        # Without penalty the cycle's next token has a lead of 2 * sqrt(32) over all others, which are equal.
        for name in ("presence_penalty", "frequency_penalty"):
            c = only(engine.generate_batch([[5]], SamplingParams(temperature=0, max_tokens=8, **{name: 12.0})))
            assert c.token_ids[:4] == [6, 7, 8, 5] and c.token_ids[4] not in (6, 7, 8, 5), name
        halves = SamplingParams(temperature=0, max_tokens=12, frequency_penalty=6.0)
        assert only(engine.generate_batch([[5]], halves)).token_ids[:9] == [6, 7, 8, 5, 6, 7, 8, 5, 0]
        never = SamplingParams(temperature=0, max_tokens=12, presence_penalty=6.0)
        assert only(engine.generate_batch([[5]], never)).token_ids == [6, 7, 8, 5] * 3


def test_logit_bias_is_the_sequence_bias_of_generate():
    """Which comes before penalties there, too; the log-probabilities stay those of the policy."""
    bias = {(0,): 4.5, (3,): 4.0, (50,): 3.5, (77,): 5.0, (11,): -2.0}
    config = GenerationConfig(max_new_tokens=20, repetition_penalty=1.4, sequence_bias=bias, eos_token_id=None)
    for given in (config, {**config.to_dict(), "sequence_bias": [[list(ids), value] for ids, value in bias.items()]}):
        params = SamplingParams.from_generation_config(given, ignore_eos=True)
        with build() as engine:
            free, biased = engine.generate_batch([NEEDLE] * 2, [replace(params, logit_bias={}), params])
        out = llama().generate(torch.tensor([NEEDLE]), generation_config=config, do_sample=False)
        assert biased.completions[0].token_ids == out[0, len(NEEDLE) :].tolist() != free.completions[0].token_ids
        expected = oracle.logprobs(llama(), NEEDLE, biased.completions[0].token_ids)
        torch.testing.assert_close(torch.tensor(biased.completions[0].logprobs).double(), expected, rtol=0, atol=1e-4)


def test_suppressed_ids_are_not_sampled_and_others_are_as_likely_as_before():
    even = tuple(range(0, VOCAB, 2))
    with build() as engine:
        both = [
            SamplingParams(n=8, seed=1, max_tokens=12, suppress_token_ids=even, logit_bias={4: 99.0}),  # which is even
            SamplingParams(n=8, seed=1, max_tokens=12),
        ]
        without, free = engine.generate_batch([NEEDLE, NEEDLE], both)
    assert all(t % 2 for c in without.completions for t in c.token_ids)
    assert any(t % 2 == 0 for c in free.completions for t in c.token_ids)
    for c in without.completions:
        expected = oracle.logprobs(llama(), NEEDLE, c.token_ids)
        torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)


def test_numbers_beyond_64_bits_are_as_large_ones():
    with build() as engine:
        large = SamplingParams(max_tokens=2**70, min_tokens=2**69, top_k=2**70, seed=5)
        plain = SamplingParams(max_tokens=10**6, min_tokens=10**5, seed=5)
        expected = only(engine.generate_batch([[1, 2, 3]], plain))
        assert len(expected.token_ids) == engine.max_model_len - 3
        assert only(engine.generate_batch([[1, 2, 3]], large)).token_ids == expected.token_ids
