"""Weights from elsewhere take their time: what happens to the engine while they come, and what begins under new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from live_setup import PROMPTS, at_rest, build, check_logprobs, long, nudge

from stoker.kernels.errors import EngineStateError, InvalidRequestError, WeightTransferError
from stoker.rollout import RolloutEngine


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
