"""What is let go of at once, and does not wait until garbage is collected, which may be long after."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from live_setup import PROMPTS, build, check_logprobs, long

from stoker.rollout import RolloutEngine


@pytest.fixture
def engine() -> Iterator[RolloutEngine]:
    """No garbage is collected while a test has it."""
    with build() as engine:
        engine.generate_batch(PROMPTS, long())
        gc.collect()
        gc.disable()
        try:
            yield engine
        finally:
            gc.enable()


@pytest.mark.parametrize("tell", [True, False])
def test_matrices_that_the_trainer_has_replaced(engine: RolloutEngine, tell: bool) -> None:
    """They are most of a model, each time."""
    model = engine._binding.source.module
    before = [weakref.ref(t) for t in (*model.parameters(), *engine._binding.wholes.values()) if t.ndim > 1]
    model.load_state_dict({name: 1.1 * tensor for name, tensor in model.state_dict().items()}, assign=True)
    if tell:
        engine.update_weights()
    for _ in range(2):
        check_logprobs(engine, PROMPTS[0], engine.generate_batch(PROMPTS[:1], long())[0].completions[0])
    assert len(before) == 20 and not any(ref() is not None for ref in before)


def _load(engine: RolloutEngine) -> None:
    engine.load_adapter("more", ({1: 2}, {}))


def _unload(engine: RolloutEngine) -> None:
    engine.unload_adapter("more")


def _move(engine: RolloutEngine) -> None:
    engine._binding.source.module.double()
    engine.generate_batch(PROMPTS)


def _attempt(engine: RolloutEngine) -> None:
    def read() -> None:
        raise ValueError

    engine._loop.attempt("read images", read)


@pytest.mark.parametrize("refused", [_load, _unload, _move, _attempt])
def test_what_the_frames_have_that_an_error_came_through(
    engine: RolloutEngine, refused: Callable[[RolloutEngine], None]
) -> None:
    """The caller's too, a batch of a training step, say."""

    def call() -> weakref.ref[Any]:
        held = torch.ones(1)
        try:
            refused(engine)
        except Exception:
            return weakref.ref(held)
        raise AssertionError("it was not refused")

    assert call()() is None
