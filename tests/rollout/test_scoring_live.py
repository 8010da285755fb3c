"""Scoring while weights change, requests run, and other threads have their say."""

import threading
import time
from collections.abc import Callable

import pytest
import torch
from families import draw, make_model
from scored import check, engine_of, model_of, plain

from stoker.rollout import RequestFailedError, RolloutBatch, RolloutEngine, SamplingParams

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")


def test_scores_are_of_the_weights_there_are():
    """Changed with and without a word, and after sleep, where what the cache kept is gone."""
    model, ids = make_model("qwen3", seed=3), draw(1, 30)

    def change():
        with torch.no_grad():
            model.model.norm.weight.mul_(1.3)

    with engine_of(model) as engine:
        for between in (
            lambda: None,
            change,
            lambda: (change(), engine.update_weights()),
            lambda: (engine.sleep(), engine.wake_up()),
            lambda: (engine.sleep(level=2), change(), engine.wake_up()),
        ):
            between()
            for _ in range(2):
                check(engine.score([ids], top_k=1)[0], model, ids, 1, top_k=1)


def test_beside_requests_that_are_under_way():
    model = model_of("qwen3")
    prompts = [draw(i, 20) for i in range(3)]
    params = SamplingParams(max_tokens=12, temperature=0, prompt_logprobs=0)
    with engine_of(model, decode_window=1) as engine:
        alone = [o.completions[0].token_ids for o in engine.generate_batch(prompts, params)]
        engine.update_weights()
        handles = [engine.submit(prompt, params) for prompt in prompts]
        for _ in range(4):
            engine.core.step()
        sequences = [prompt + draw(9, 7) for prompt in prompts]
        for one, ids in zip(engine.score(sequences), sequences, strict=True):
            check(one, model, ids, 1)
        assert any(h.status == "running" for h in handles)
        for handle, prompt, tokens in zip(handles, prompts, alone, strict=True):
            assert handle.result().completions[0].token_ids == tokens
            check(handle.result().prompt_logprobs, model, prompt, 1)


def test_each_score_is_told_when_it_is_there():
    """In order, between two steps, with what the call returns in the end; later sequences are still to come."""
    model, told, finished = model_of("qwen3"), [], []
    shared = draw(1, 20)
    sequences = [(shared if i < 6 else draw(i, 20)) + draw(10 + i, 5) for i in range(12)]
    with engine_of(model, max_num_seqs=2) as engine:

        def tell(row, one):
            told.append((row, one))
            finished.append(engine.stats().finished_requests)
            if row == 3:  # a call of its own, for which no step must be under way
                check(engine.score([sequences[-1]], start=20)[0], model, sequences[-1], 20)

        scores = engine.score(sequences, start=20, entropy=True, on_scored=tell)
        assert [row for row, _ in told] == list(range(12))
        assert all(one is score for (_, one), score in zip(told, scores, strict=True))
        assert finished[0] < 4 and finished == sorted(finished)
        for one, ids in zip(scores, sequences, strict=True):
            check(one, model, ids, 20)


def test_an_exception_of_who_is_told_ends_the_call():
    model, told = model_of("qwen3"), []
    sequences = [draw(i, 25) for i in range(8)]
    with engine_of(model, max_num_seqs=2) as engine:

        def tell(row, one):
            told.append(row)
            if row == 2:
                raise OSError("no room")

        with pytest.raises(OSError, match="no room"):
            engine.score(sequences, on_scored=tell)
        assert told == [0, 1, 2] and not engine.core.has_work
        for one, ids in zip(engine.score(sequences), sequences, strict=True):
            check(one, model, ids, 1)


def test_of_a_batch_that_was_aborted_the_tokens_there_are():
    """One row a completion, also where it has none."""
    model = model_of("qwen3")
    with engine_of(model, decode_window=1) as engine:
        handles = [engine.submit(draw(i, 20), SamplingParams(max_tokens=12)) for i in range(3)]
        for _ in range(2):
            engine.core.step()
        engine.pause("abort")
        engine.resume()
        batch = RolloutBatch([h.result() for h in handles])
        lengths = [len(o.completions[0].token_ids) for o in batch]
        assert lengths == sorted(lengths, reverse=True) and lengths[0] > 0 == lengths[-1]
        for one, output in zip(engine.score(batch, top_k=2), batch, strict=True):
            check(one, model, output.prompt_token_ids + output.completions[0].token_ids, 20, top_k=2)
        (nothing,) = engine.score(RolloutBatch(batch.outputs[2:]), entropy=True)
        assert nothing.logprobs.shape == nothing.entropy.shape == (0,)


def test_from_several_threads():
    model, failures = model_of("qwen3"), []
    with engine_of(model, decode_window=2) as engine:

        def work(top_k: int) -> None:
            try:
                for turn in range(2):
                    sequences = [draw(top_k, 10) + draw(9 * turn + i, 15) for i in range(4)]
                    for one, ids in zip(engine.score(sequences, top_k=top_k), sequences, strict=True):
                        check(one, model, ids, 1, top_k=top_k)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        params = SamplingParams(n=2, max_tokens=6, prompt_logprobs=0)
        for turn in range(3):
            (output,) = engine.generate_batch([draw(turn, 20)], params)
            check(output.prompt_logprobs, model, draw(turn, 20), 1)
        for thread in threads:
            thread.join()
        assert not failures


def scored_meanwhile(
    engine: RolloutEngine, sequences: list[list[int]], call: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> list:
    """Scores of sequences, ``call`` having been made by another thread when some were scored and others were not."""
    step, reached, scores = engine.core.step, threading.Event(), []

    def stepping():
        finished = step()
        if engine.stats().scored_tokens >= 150 and not reached.is_set():
            reached.set()
            until = time.monotonic() + 30
            while not engine._loop._wanted and time.monotonic() < until:  # it gets its turn after this step
                time.sleep(0.001)
        return finished

    monkeypatch.setattr(engine.core, "step", stepping)
    thread = threading.Thread(target=lambda: scores.extend(engine.score(sequences)))
    thread.start()
    assert reached.wait(60)
    call()
    engine.resume()
    thread.join()
    return scores


def test_new_weights_while_a_batch_is_scored(monkeypatch):
    """A sequence has the scores of one model, though others lent it some."""
    model, before = (make_model("qwen3", seed=4) for _ in range(2))
    sequences = [draw(1, 20) + draw(50 + i, 20) for i in range(12)]
    with engine_of(model) as engine:

        def update():
            engine.pause()
            with torch.no_grad():
                model.lm_head.weight.mul_(0.5)
            engine.update_weights()

        scores = scored_meanwhile(engine, sequences, update, monkeypatch)
        old = [
            abs(one.logprobs[-1] - plain(before, ids, 1)[-1, ids[-1]]) < 1e-4
            for one, ids in zip(scores, sequences, strict=True)
        ]
        assert old == sorted(old, reverse=True) and True in old and False in old
        for one, ids, is_old in zip(scores, sequences, old, strict=True):
            check(one, before if is_old else model, ids, 1)


def test_a_batch_that_another_thread_ends(monkeypatch):
    model = model_of("qwen3")
    sequences = [draw(1, 20) + draw(50 + i, 20) for i in range(12)]
    with engine_of(model) as engine:
        scores = scored_meanwhile(engine, sequences, lambda: engine.pause("abort"), monkeypatch)
        ended = [one.error is not None for one in scores]
        assert ended == sorted(ended) and True in ended and False in ended
        for one, ids in zip(scores, sequences, strict=True):
            if one.error is None:
                check(one, model, ids, 1)
            else:
                assert isinstance(one.error, RequestFailedError) and "score it again" in str(one.error)
        for one, ids in zip(engine.score(sequences), sequences, strict=True):
            check(one, model, ids, 1)
