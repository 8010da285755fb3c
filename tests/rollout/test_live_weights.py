"""New weights while requests are under way: announced, noticed, or from elsewhere, which take their time to come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import oracle
import pytest
import torch
from live_setup import PROMPTS, at_rest, beside, build, check_logprobs, long, nudge
from sender import over_a_pipe, sending

from stoker.kernels.errors import EngineStateError, InvalidRequestError, WeightTransferError
from stoker.rollout import RolloutEngine


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_new_weights_on_the_way(recompute: bool, announced: bool) -> None:
    with build() as engine:
        handles = [engine.submit(p, long(i, temperature=0.7)) for i, p in enumerate(PROMPTS)]
        with pytest.raises(TimeoutError):
            handles[0].result(timeout=0)
        with pytest.raises(EngineStateError, match="cannot update its weights while requests are under way"):
            engine.update_weights()
        engine.pause("keep")
        assert engine.is_paused and {h.status for h in handles} == {"running"}
        nudge(engine)
        if announced:
            assert engine.update_weights() == 1
        engine.resume(recompute=recompute)
        assert engine.weight_version == 1
        fresh = engine.submit(PROMPTS[0], long(9))  # begins like one whose KV is older
        for prompt, handle in zip(PROMPTS, handles, strict=True):
            (completion,) = handle.result().completions
            versions = completion.weight_versions
            seam = versions.index(1)
            assert 0 < seam < 24 and versions == [0] * seam + [1] * (24 - seam)
            now = oracle.logprobs(engine._binding.source.module, prompt, completion.token_ids, 0.7)
            agrees = (torch.tensor(completion.logprobs).double() - now)[seam:].abs().max() < 1e-4
            assert agrees == recompute, "the KV is of the weights it should be of"
        output = fresh.result()
        assert (output.cached_tokens > 0) == recompute, "only KV of the new weights serves it"
        check_logprobs(engine, PROMPTS[0], output.completions[0])
        again = engine.generate_batch([PROMPTS[0] + output.completions[0].token_ids], long())[0]
        assert again.cached_tokens > 0
        check_logprobs(engine, again.prompt_token_ids, again.completions[0])
        at_rest(engine)


@pytest.mark.parametrize("recompute", [False, True])
def test_only_kv_of_the_present_weights_serves_a_next_turn(recompute: bool) -> None:
    """A prompt shorter than a block: the cache knew none of its blocks before the update."""
    with build() as engine:
        handle = engine.submit([7, 9], long(2))
        with pytest.raises(TimeoutError):
            handle.result(timeout=0)
        engine.pause()
        nudge(engine)
        engine.update_weights()
        engine.resume(recompute=recompute)
        turn = [7, 9, *handle.result().completions[0].token_ids]
        output = engine.generate_batch([turn], long(3))[0]
        assert (output.cached_tokens > 0) == recompute
        check_logprobs(engine, turn, output.completions[0])
        at_rest(engine)


def test_a_submission_notices_new_weights() -> None:
    with build() as engine:
        engine.generate_batch(PROMPTS, long())
        nudge(engine)
        output = engine.submit(PROMPTS[3], long(3)).result()
        assert output.cached_tokens == 0 and set(output.completions[0].weight_versions) == {1}
        check_logprobs(engine, PROMPTS[3], output.completions[0])


def test_a_submission_under_others_requests_looks_at_no_weights() -> None:
    """It would end the KV of all of these, in the middle of an optimizer step, perhaps; a batch and ``resume`` do look."""
    with build() as engine:
        handle = engine.submit(PROMPTS[0], long())
        next(iter(handle))
        engine.pause()
        nudge(engine)
        with beside(lambda: engine.submit(PROMPTS[1], long())):
            pass
        engine.submit(PROMPTS[2], long())
        assert engine.weight_version == 0
        engine.resume()
        assert engine.weight_version == 1
        (completion,) = handle.result().completions
        assert set(completion.weight_versions) == {0, 1}
        at_rest(engine)


def test_a_batch_notices_new_weights_under_others_requests() -> None:
    with build() as engine:
        engine.generate_batch(PROMPTS, long())
        handle = engine.submit(PROMPTS[0], long())
        next(iter(handle))
        nudge(engine)
        batch = engine.generate_batch(PROMPTS[:2], long(3))
        for output in batch:
            check_logprobs(engine, output.prompt_token_ids, output.completions[0])
        (completion,) = handle.result().completions
        check_logprobs(engine, PROMPTS[0], completion, first=completion.weight_versions.index(1))


def pairs(engine: RolloutEngine, meanwhile: Callable[[], Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """New weights for an engine's ``update_weights``, one by one, and what happens after the first."""
    named = [(name, p.detach() * 1.3) for name, p in engine._binding.source.module.named_parameters()]
    yield named[0]
    meanwhile()
    yield from named[1:]


def test_requests_that_begin_while_weights_come_go_on_under_these() -> None:
    with build() as engine:
        handles = []

        def begin() -> None:
            handles.append(engine.submit(PROMPTS[0], long()))
            next(iter(handles[0]))

        assert engine.update_weights(pairs(engine, begin)) == 1
        versions = handles[0].result().completions[0].weight_versions
        seam = versions.index(1)
        assert seam > 0 and versions == [0] * seam + [1] * (24 - seam)
        check_logprobs(engine, PROMPTS[3], engine.generate_batch([PROMPTS[3]], long())[0].completions[0])
        at_rest(engine)


def test_what_changes_after_an_update_under_which_requests_go_on_is_noticed() -> None:
    """Beside them others begin without a look at the weights, and leave KV of the update's."""
    with build() as engine:
        handles = []

        def begin() -> None:
            handles.append(engine.submit(PROMPTS[0], long()))
            next(iter(handles[0]))

        engine.update_weights(pairs(engine, begin))
        handles.append(engine.submit(PROMPTS[3], long()))
        engine.wait(handles)
        nudge(engine)
        (output,) = engine.generate_batch([PROMPTS[3]], long())
        assert output.cached_tokens == 0 and engine.weight_version == 2
        check_logprobs(engine, PROMPTS[3], output.completions[0])


def test_a_sample_that_begins_after_an_update_shares_no_prompt_of_the_old_weights() -> None:
    """It waited for the first one to compute it, which goes on with what it has."""
    with build() as engine:
        handle = engine.submit(PROMPTS[3], long(n=2))
        engine.core.step()
        assert [r.status.value for r in engine.core.under_way] == ["running", "waiting"]
        engine.pause()
        nudge(engine)
        assert engine.update_weights() == 1
        engine.resume()
        _, second = handle.result().completions
        assert set(second.weight_versions) == {1}
        check_logprobs(engine, PROMPTS[3], second)
        at_rest(engine)


@pytest.mark.parametrize("noticed", [False, True])
def test_weights_that_come_for_tensors_which_are_no_more(noticed: bool) -> None:
    with build() as engine:
        model = engine._binding.model

        def replace() -> None:
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
            if noticed:
                engine.generate_batch(PROMPTS[:1], long())

        with pytest.raises(
            WeightTransferError, match="changed in this process while the other weights arrived: send again"
        ):
            engine.update_weights(pairs(engine, replace))
        (output,) = engine.generate_batch(PROMPTS[:1], long())
        assert engine.weight_version == 1
        check_logprobs(engine, PROMPTS[0], output.completions[0])
        assert engine.update_weights(pairs(engine, lambda: None)) == 2
        (output,) = engine.generate_batch(PROMPTS[:1], long())
        check_logprobs(engine, PROMPTS[0], output.completions[0])
        at_rest(engine)


@pytest.mark.parametrize("how", ["another update", "sleep"])
def test_what_did_not_come_and_changes_when_all_else_is_there(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another thread that has its turn first. What came belongs to weights that are no more."""
    with build(dtype="float64") as engine:
        first = {name: tensor.clone() for name, tensor in engine._binding.source.bound.items()}
        sent, other = first | {"lm_head.weight": first["lm_head.weight"] + 1}, {n: t + 2 for n, t in first.items()}
        here, there = over_a_pipe()
        finish = here.finish

        def finished(error: str | None = None) -> None:
            finish(error)
            if how == "sleep":
                engine.sleep(3)
                engine.wake_up()
                for tensor in engine._binding.source.bound.values():
                    tensor.detach().fill_(9)  # new memory may lie where the old did, with all that was there
            else:
                engine.update_weights(other)

        with monkeypatch.context() as patch, sending(there, sent, 10_000) as future:
            patch.setattr(here, "finish", finished)
            with pytest.raises(
                WeightTransferError, match=r"changed in this process while .* What arrived was not taken"
            ):
                engine.update_weights(here)
            future.result(60)
        in_service = engine._binding.source.bound
        assert engine.weight_version == (how != "sleep")
        if how != "sleep":
            assert all(torch.equal(in_service[name], other[name]) for name in other)
        with sending(there, sent, 10_000) as future:
            assert engine.update_weights(here) == engine.weight_version
            future.result(60)
        assert all(torch.equal(in_service[name], sent[name]) for name in sent)
        engine.generate_batch(PROMPTS, long()).raise_for_errors()
        at_rest(engine)


def test_weights_that_come_for_an_engine_in_another_state() -> None:
    with build(dtype="float64") as engine:
        with pytest.raises(EngineStateError, match="the weights are asleep"):
            engine.update_weights(pairs(engine, lambda: engine.sleep(2)))
        with pytest.raises(EngineStateError, match="the weights are asleep"):
            engine.verify_weights()
        engine.wake_up()
        with pytest.raises(InvalidRequestError, match="version=1 is not above the present version 3"):
            engine.update_weights(pairs(engine, lambda: engine.update_weights(version=3)), version=1)
        assert engine.weight_version == 3 and engine.verify_weights().ok
        check_logprobs(engine, PROMPTS[0], engine.generate_batch(PROMPTS[:1], long())[0].completions[0])
        with pytest.raises(EngineStateError, match="closed"):
            engine.update_weights(pairs(engine, engine.close))
