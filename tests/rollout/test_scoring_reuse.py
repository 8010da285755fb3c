"""What scoring does not compute again: groups, what the cache kept, what is on its way; and when it has to."""

import random

import pytest
import torch
from families import draw, make_model
from scored import check, clean_engine, computed, engine_of, model_of, shared_engine  # noqa: F401

from stoker.engine.request_scores import Scoring, TokenScores, Variant
from stoker.rollout import SamplingParams

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")


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


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_begins_alike_is_scored_once(ahead):
    """From the first token on: the scores that one sequence waits for serve those after it, in the same plan even."""
    model = model_of("qwen3")
    prompts = [draw(i, 13) for i in (1, 2)]
    sequences = [p + draw(10 + i, 6) for p in prompts for i in range(4)]
    with engine_of(model, max_num_batched_tokens=256) as engine:
        engine.core.ahead = ahead
        scores = []
        count = computed(engine, lambda: scores.extend(engine.score(sequences, top_k=2, entropy=True)))
        for one, ids in zip(scores, sequences, strict=True):
            check(one, model, ids, 1, top_k=2)
        # Of 19 tokens the first sequence has 18 scores; each other borrows 12, those that three blocks predict.
        assert engine.stats().scored_tokens == 2 * (18 + 3 * 6)
        assert count == 2 * (18 + 3 * 6)


@pytest.mark.parametrize("tokens", [9, 24, 256])
def test_turns_of_a_conversation_borrow_from_each_other(tokens):
    model, text = model_of("qwen3"), draw(1, 60)
    turns = [text[:17], text[:40], text[:17] + draw(2, 20), text, text[:40] + draw(3, 9), text[:58]]
    with engine_of(model, max_num_batched_tokens=tokens) as engine:
        for temperature in (1.0, 0.5):
            count = computed(engine, lambda temperature=temperature: check_all(engine, model, turns, temperature))
            assert count < 150 < sum(map(len, turns))


def check_all(engine, model, sequences, temperature):
    for one, ids in zip(engine.score(sequences, temperature=temperature), sequences, strict=True):
        check(one, model, ids, 1, temperature)


def test_tokens_after_the_same_blocks_have_scores_of_their_own():
    """Which the last position of these gives to the one that was there, and not to another."""
    model, shared = model_of("qwen3"), draw(1, 12)
    sequences = [[*shared, token, *draw(token, 6)] for token in (5, 6, 5, 7)]
    with engine_of(model, max_num_batched_tokens=256) as engine:
        for _ in range(2):
            check_all(engine, model, sequences, 1.0)
        # The first and the third of 19 tokens have 13 in common.
        again = [5, *draw(3, 6)]
        assert computed(engine, lambda: check_all(engine, model, [shared + again], 1.0)) == 6
        assert computed(engine, lambda: check_all(engine, model, [[*shared, 8, *draw(8, 6)]], 1.0)) == 7


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("length", [11, 12, 13])
def test_a_prompt_borrows_all_scores_where_it_has_something_to_sample(length, ahead):
    """Requests with one prompt and no group: in the plan that scores it, and after it."""
    model, prompt = model_of("qwen3"), draw(4, length)
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1)
    with engine_of(model, max_num_batched_tokens=64, decode_window=1) as engine:
        engine.core.ahead = ahead
        for _ in range(2):
            handles = [engine.submit(prompt, params) for _ in range(3)]
            engine.wait(handles[:1])
            outputs = [handle.result() for handle in handles]
            assert len({tuple(output.completions[0].token_ids) for output in outputs}) == 1
            for output in outputs:
                check(output.prompt_logprobs, model, prompt, 1, 1.0, 1)
        # Those that full blocks predict are scored once.
        assert engine.stats().scored_tokens == length - 1 + 5 * max(0, length - 1 - length // 4 * 4)


@pytest.mark.parametrize("more", [0, 9])
def test_what_was_borrowed_arrives_though_its_lender_is_aborted(more):
    model, prompt = model_of("qwen3"), draw(4, 33)
    longer = prompt + draw(5, more)
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1)
    with engine_of(model, max_num_batched_tokens=64, decode_window=1) as engine:
        engine.core.ahead = 1
        lender, borrower = engine.submit(prompt, params), engine.submit(longer, params)
        engine.core.step()
        waiting = [r for r in engine.core.scheduler.running if r.scoring.borrowed]
        assert [r.prompt for r in waiting] == [longer] and not waiting[0].scoring.complete
        lender.abort()
        check(borrower.result().prompt_logprobs, model, longer, 1, 1.0, 1)


def test_what_was_borrowed_of_old_weights_is_scored_again():
    model = make_model("qwen3", seed=5)
    prompt = draw(3, 40)
    longer = prompt + draw(4, 30)
    params = SamplingParams(max_tokens=9, prompt_logprobs=0)
    with engine_of(model, max_num_batched_tokens=24, decode_window=1) as engine:
        lender, borrower = engine.submit(prompt, params), engine.submit(longer, params)
        for _ in range(2):
            engine.core.step()
        (running,) = (r.scoring for r in engine.core.scheduler.running if r.prompt == longer)
        assert running.borrowed and not running.complete
        engine.pause()
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
        engine.update_weights()
        engine.resume()
        check(borrower.result().prompt_logprobs, model, longer, 1)
        lender.abort()


def scores(first: int, end: int) -> TokenScores:
    known = TokenScores.unknown(first, end, 0)
    known.logprobs.copy_(torch.arange(first, end))
    return known


def test_scores_that_are_computed_again_are_complete_with_the_last_of_them():
    scoring = Scoring(Variant(1.0, 0), 1, 4)
    for through in (2, 3):  # new weights come after the second of three plans
        for count in range(1, through + 1):
            assert not scoring.complete
            tokens = scoring.claim(count)
            scoring.take(scores(tokens.start, tokens.stop))
        if through == 2:
            scoring.restart()
    assert scoring.complete and torch.equal(scoring.scores.logprobs, torch.arange(1.0, 4.0))


def test_who_lends_what_is_borrowed():
    one, two, three = (Scoring(Variant(1.0, 0), 1, end) for end in (9, 20, 20))
    one.claim(20)
    assert not two.borrow(one, 12), "it does not score as far"
    assert two.borrow(one, 8) and two.next == 8
    two.claim(15)
    assert not three.borrow(two, 20)
    assert three.borrow(two, 12) and three.next == 12
    three.claim(20)
    for scoring, found in ((one, scores(1, 9)), (two, scores(8, 16)), (three, scores(12, 20))):
        scoring.take(found)
    assert (one.complete, two.complete, three.complete) == (True, False, True)
    assert torch.equal(three.scores.logprobs, torch.arange(1.0, 20.0))


def test_scores_of_more_of_a_block_are_not_displaced_by_those_of_less(engine):
    ids = draw(1, 40)
    for start, count in ((1, 39), (6, 3), (1, 3)):
        assert computed(engine, lambda start=start: engine.score([ids], start=start)) == count


def test_a_block_that_a_single_token_fills_keeps_its_scores():
    ids = draw(1, 9)
    with engine_of(model_of("qwen3"), max_num_batched_tokens=7) as engine:
        for count in (8, 1):
            assert computed(engine, lambda: engine.score([ids])) == count


def test_the_scores_of_a_few_temperatures_are_kept(engine):
    ids, cache = draw(1, 20), engine.core.scheduler.prefixes.cache
    for temperature in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5):
        assert computed(engine, lambda t=temperature: engine.score([ids], temperature=t)) == 19
    assert {len(kept) for kept in cache._scores.values()} == {4}
    assert computed(engine, lambda: engine.score([ids], temperature=1.5)) == 3
    assert computed(engine, lambda: engine.score([ids], temperature=1.0)) == 19


def test_kept_scores_spare_the_computation(engine):
    model, ids = model_of("qwen3"), draw(1, 42)
    longer = ids + draw(2, 8)

    def score(sequence: list[int], **options: object) -> None:
        (one,) = engine.score([sequence], **options)
        check(one, model, sequence, options.get("start", 1), options.get("temperature", 1.0), options.get("top_k", 0))

    assert computed(engine, lambda: score(ids, start=7)) == 41
    assert (
        computed(engine, lambda: score(ids, start=7)) == 1
    )  # 10 blocks are cached, and predict all but the last token
    assert computed(engine, lambda: score(longer, start=7)) == 9
    assert computed(engine, lambda: score(ids[:41], start=7)) == 1
    assert computed(engine, lambda: score(ids, start=20)) == 1
    assert computed(engine, lambda: score(ids, start=5)) == 37  # of the second block, two scores are not there
    assert computed(engine, lambda: score(ids, start=5)) == 1
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
        cache = engine.core.scheduler.prefixes.cache
        assert cache._scores.keys() <= cache._block_of.keys() and len(cache) <= 11
        engine.update_weights()
        assert not cache._scores


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_random_traffic(ahead, monkeypatch):
    """Groups, repeats, tight memory, chunks, rollouts that ask for prompt log-probabilities; plans launched ahead."""
    model, rng = model_of("qwen3"), random.Random(ahead)
    begin = [draw(100 + i, 40) for i in range(3)]
    preempted = 0
    for _ in range(3):
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
                    prompt = rng.choice(begin)[: rng.randint(1, 24)] + draw(rng.randrange(5), rng.randint(0, 5))
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
