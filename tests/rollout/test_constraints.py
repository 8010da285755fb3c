"""Completions that have to match a regular expression, through the whole engine.

The oracle knows no automaton: it runs the plain forward, and asks of every token of the vocabulary, at every step, whether
the text with it could still come to match (partial matches of the package ``regex``).
"""

from __future__ import annotations

import math
import re
from typing import Any
from weakref import ref

import pytest
import regex as partial_regex
import torch
from constrained import (
    EOS,
    PATTERNS,
    PROMPT,
    TOKENIZER,
    VOCAB,
    build,
    model,
    text_of,
)
from families import make_model
from small_engine import only
from tokenizer_kinds import KINDS, tokenizer

from stoker.engine.constraints import Constraint
from stoker.kernels.errors import InvalidRequestError
from stoker.rollout import Completion, EngineConfig, RolloutEngine, SamplingParams, constraints


def may_follow(pattern: str, tokens: list[int]) -> list[int]:
    """Of patterns in ASCII, where no character is cut between tokens."""
    before = text_of(tokens)
    assert pattern.isascii()
    found = [EOS] if re.fullmatch(pattern, before) else []
    for token in range(len(TOKENIZER)):
        text = text_of([*tokens, token])
        if text != before and "�" not in text and partial_regex.fullmatch(pattern, text, partial=True):
            found.append(token)
    return found


@torch.no_grad()
def oracle(pattern: str, max_tokens: int, presence: float = 0.0) -> tuple[list[int], list[float], list[float]]:
    """Greedy tokens, and their log-probabilities among those that may come, and among all, without a penalty."""
    tokens, processed, scaled = [], [], []
    while len(tokens) < max_tokens and EOS not in tokens:
        logits = model()(torch.tensor([PROMPT + tokens])).logits[0, -1].double()
        may = may_follow(pattern, tokens)
        among = torch.full_like(logits, float("-inf"))
        among[may] = logits[may]
        among[list({*tokens})] -= presence
        tokens.append(int(among.argmax()))
        processed.append(float(among.log_softmax(-1)[tokens[-1]]))
        scaled.append(float(logits.log_softmax(-1)[tokens[-1]]))
    return tokens, processed, scaled


@pytest.mark.parametrize("pattern", PATTERNS)
def test_greedy_completions_are_those_of_the_plain_forward_under_a_mask(pattern: str) -> None:
    tokens, processed, scaled = oracle(pattern, 24)
    with build() as engine:
        for mode, wanted in (("processed", processed), ("scaled", scaled)):
            params = SamplingParams(regex=pattern, temperature=0, max_tokens=24, logprobs_mode=mode, logprobs=3)
            found = only(engine.generate_batch([PROMPT], params))
            assert found.token_ids == tokens
            assert found.logprobs == pytest.approx(wanted, abs=1e-4)
            assert found.top_logprobs is not None and (mode == "scaled" or found.top_logprobs[0][tokens[0]] > -math.inf)
            assert found.finish_reason == ("stop" if tokens[-1] == EOS else "length")
    if tokens[-1] == EOS:
        assert re.fullmatch(pattern, text_of(tokens)) and found.stop_reason == EOS


def test_penalties_hold_among_what_may_come() -> None:
    pattern = "[a-h]{12}"
    tokens, processed, _ = oracle(pattern, 24, presence=2.0)
    assert tokens != oracle(pattern, 24)[0]
    params = {"temperature": 0, "presence_penalty": 2.0, "max_tokens": 24, "logprobs_mode": "processed"}
    with build() as engine:
        found = only(engine.generate_batch([PROMPT], SamplingParams(regex=pattern, **params)))
    assert found.token_ids == tokens and found.logprobs == pytest.approx(processed, abs=1e-4)


@pytest.mark.parametrize("truncation", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2, "temperature": 1.5}])
def test_sampling_draws_from_what_may_come(truncation: dict[str, float]) -> None:
    """The first token's distribution: over those that may come, then truncated."""
    pattern = "a{1,3}[bc]|[d-h]+|the|cat"
    with torch.no_grad():
        logits = model()(torch.tensor([PROMPT])).logits[0, -1].double() / truncation.get("temperature", 1.0)
    may = may_follow(pattern, [])
    among = torch.full_like(logits, float("-inf"))
    among[may] = logits[may]
    order = among.argsort(descending=True)
    if "top_k" in truncation:
        among[order[int(truncation["top_k"]) :]] = float("-inf")
    mass = among.softmax(-1)
    if "top_p" in truncation:
        among[order[mass[order].cumsum(0) - mass[order] >= truncation["top_p"]]] = float("-inf")
    among[mass < truncation.get("min_p", 0.0) * mass.max()] = float("-inf")
    wanted = among.softmax(-1)
    samples = 3000
    with build() as engine:
        params = SamplingParams(regex=pattern, n=samples, max_tokens=1, seed=1, logprobs_mode="processed", **truncation)
        (output,) = engine.generate_batch([PROMPT], params)
    counts = torch.zeros(VOCAB, dtype=torch.double)
    for completion in output.completions:
        (token,) = completion.token_ids
        counts[token] += 1
        assert completion.logprobs[0] == pytest.approx(float(wanted[token].log()), abs=1e-4)
    assert counts[wanted == 0].sum() == 0
    deviation = (samples * wanted * (1 - wanted)).sqrt().clamp(min=1.0)
    assert ((counts - samples * wanted).abs() <= 5 * deviation).all()


WIDE = [*PATTERNS, r"(?s).{0,9}", r"\w+[.!]", r"(日本|naïve|😀)\W{1,4}\w*", r"\s*[^\s]{3,5}\s*"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_completion_that_stops_matches(kind: str) -> None:
    """Of several tokenizers, where each request has a pattern of its own; characters are cut between tokens here."""
    one = tokenizer(kind)
    prompts = [[5 + i, 6, 7] for i in range(2 * len(WIDE))]
    stopped = 0
    with RolloutEngine(
        make_model("llama", vocab_size=len(one) + 3),
        config=EngineConfig(kv_cache_memory="4MiB", max_num_seqs=9),
        tokenizer=one,
    ) as engine:
        for i, prompt in enumerate(prompts):
            try:
                params = SamplingParams(regex=WIDE[i % len(WIDE)], n=2, max_tokens=40, seed=i)
                handle = engine.submit(prompt, params)
            except InvalidRequestError as error:
                assert "matched by no sequence of tokens" in str(error) and kind in ("words", "metaspace")
                continue
            for completion in handle.result().completions:
                if completion.finish_reason == "stop":
                    assert re.fullmatch(WIDE[i % len(WIDE)], completion.text), completion.text
                    assert completion.stop_reason == one.eos_token_id
                    stopped += 1
                else:
                    assert len(completion.token_ids) == 40
                assert all(math.isfinite(logprob) for logprob in completion.logprobs)
    assert stopped > 8


# -- where a completion ends -----------------------------------------------------------------------------------------------


def generate(engine: RolloutEngine, **params: Any) -> Completion:
    return only(engine.generate_batch([PROMPT], SamplingParams(seed=3, **params)))


def test_a_text_that_cannot_go_on_ends() -> None:
    with build() as engine:
        found = generate(engine, regex="yes", max_tokens=30)
        assert found.text == "yes" and found.finish_reason == "stop" and found.token_ids[-1] == EOS
        cut = generate(engine, regex="yes and no and more", max_tokens=2)
        assert cut.finish_reason == "length" and "yes and no and more".startswith(cut.text) and len(cut.token_ids) == 2
        empty = generate(engine, regex="()", max_tokens=5)
        assert empty.token_ids == [EOS] and empty.text == ""


def test_min_tokens_holds_where_the_text_can_go_on_and_no_longer() -> None:
    with build() as engine:
        params = SamplingParams(regex="[ab]*c?", min_tokens=2, max_tokens=12, n=60, seed=1)
        (output,) = engine.generate_batch([PROMPT], params)
        assert all(len(found.token_ids) > 2 or "c" in found.text for found in output.completions)
        assert any(len(found.token_ids) == 3 and "c" not in found.text for found in output.completions)
        # Beside a row that is not to stop.
        alike = {"min_tokens": 20, "max_tokens": 30, "logprobs_mode": "processed"}
        short, long = engine.generate_batch(
            [PROMPT] * 2, [SamplingParams(regex="no", **alike), SamplingParams(stop_token_ids=range(90), **alike)]
        )
        assert short.error is None and long.error is None
        assert short.completions[0].text == "no" and short.completions[0].finish_reason == "stop"
        assert len(long.completions[0].token_ids) > 20


def test_stop_ids_end_a_text_that_matches_and_are_no_text() -> None:
    """Each request's own, though they follow one pattern."""
    stops = TOKENIZER.convert_tokens_to_ids(["a", "b"])
    with build() as engine:
        for seed, stop in enumerate(stops * 6):
            params = SamplingParams(regex="[ab]{3,4}", stop_token_ids=[stop], ignore_eos=True, max_tokens=9, seed=seed)
            found = only(engine.generate_batch([PROMPT], params))
            assert found.finish_reason == "stop" and found.stop_reason == stop
            assert re.fullmatch("[ab]{3,4}", text_of(found.token_ids[:-1]))


def test_suppressed_ids_leave_other_ways() -> None:
    """Also those that the text would have come to a dead end without."""
    with_t = [token for token in range(len(TOKENIZER)) if "t" in text_of([token])]
    with build() as engine:
        texts = {generate(engine, regex="cat|cut|no", suppress_token_ids=with_t, max_tokens=9).text for _ in range(8)}
    assert texts == {"no"}


def test_a_stop_string_ends_earlier() -> None:
    with build() as engine:
        found = generate(engine, regex="aaab+", stop=["ab"], max_tokens=20)
        assert found.text == "aa" and found.stop_reason == "ab"


# -- what is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"regex": "a(?=b)"}, "has a look-around"),
        ({"regex": "("}, "is no regular expression"),
        ({"regex": ""}, "give a regular expression, or None"),
        ({"regex": 3}, "give a regular expression, or None"),
    ],
)
def test_bad_patterns_are_named_where_they_are_given(params: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        SamplingParams(**params)


def test_more_patterns_than_there_is_room_for_are_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = [rf"[a-z ]{{{n}}}" for n in range(20, 28)]
    params = [SamplingParams(regex=pattern, max_tokens=40, seed=1) for pattern in patterns]
    with build() as engine:
        wanted = [o.completions[0].token_ids for o in engine.generate_batch([PROMPT] * 8, params)]
        size = sum(one.table.nbytes for one in engine._requests.constraint._made.values())
    monkeypatch.setattr(constraints, "MOST_TOGETHER", size - 1)
    with build() as engine:
        with pytest.raises(InvalidRequestError, match="give fewer different patterns at a time"):
            engine.generate_batch([PROMPT] * 8, params)
        assert engine.stats().finished_requests == 0
        handles = [engine.submit(PROMPT, p) for p in params[:7]]
        with pytest.raises(InvalidRequestError, match="give fewer different patterns at a time"):
            engine.submit(PROMPT, params[7])
        assert [handle.result().completions[0].token_ids for handle in handles] == wanted[:7]
        assert engine.submit(PROMPT, params[7]).result().completions[0].token_ids == wanted[7]


def test_where_room_is_made_the_pattern_goes_that_was_not_used_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    make = constraints.ConstraintMaker(TOKENIZER, VOCAB)

    def used(pattern: str) -> ref[Constraint]:
        return ref(make(pattern, frozenset({EOS}), frozenset()))

    often, once = used("[ab]+"), used("[cd]+")
    monkeypatch.setattr(constraints, "MOST_TOGETHER", sum(found.table.nbytes for found in make._made.values()))
    assert used("[ab]+")() is often() is not None
    used("[ef]+")
    assert used("[ab]+")() is often() is not None and once() is None


def test_what_cannot_be_is_refused_before_any_work() -> None:
    bad = {
        "matched by no sequence of tokens": {"regex": r"[^\s\S]"},
        "more than 30000 states": {"regex": r"(a|b)*a(a|b){20}"},
        "leave ignore_eos out": {"regex": "a", "ignore_eos": True},
    }
    with build() as engine:
        for words, params in bad.items():
            with pytest.raises(InvalidRequestError, match=f"prompt 1: .*{words}"):
                engine.generate_batch([PROMPT, PROMPT], [SamplingParams(), SamplingParams(**params)])
            with pytest.raises(InvalidRequestError, match=f"prompt 0: .*{words}"):
                engine.submit(PROMPT, SamplingParams(**params))
        assert engine.stats().finished_requests == 0
    with (
        RolloutEngine(model(), config=EngineConfig(kv_cache_memory="1MiB")) as engine,
        pytest.raises(InvalidRequestError, match="prompt 0: regex needs a tokenizer"),
    ):
        engine.generate_batch([PROMPT], SamplingParams(regex="a"))
