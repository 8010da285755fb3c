"""A small engine and long requests, for the tests of requests that live longer than a call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import oracle
import pytest
import torch
from families import make_model

from stoker.rollout import Completion, EngineConfig, RolloutEngine, SamplingParams

PROMPTS = [[5, 6, 7, 8, 9], [11, 3], [5, 6, 7, 8, 9, 2, 2, 1], [40] * 13]


def build(family: str = "llama", **fields: Any) -> RolloutEngine:
    settings = {"block_size": 4, "kv_cache_memory": "2MiB", "max_num_seqs": 8, "max_model_len": 128, "decode_window": 2}
    return RolloutEngine(make_model(family), config=EngineConfig(**(settings | fields)))


def long(seed: int = 1, **fields: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 24, "ignore_eos": True, "seed": seed} | fields))


@contextmanager
def held(engine: RolloutEngine, there: Callable[[], bool]) -> Iterator[threading.Event]:
    """Once it is ``there`` the engine makes no step before another thread wants a turn, or the event is set.

    So that what is done to it then comes in the middle of a request, however late this machine runs the thread that does it.
    """
    step, go_on = engine.core.step, threading.Event()

    def stepping() -> Any:
        end = time.monotonic() + 60
        while there() and not (go_on.is_set() or engine._loop._wanted) and time.monotonic() < end:
            time.sleep(1e-3)
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.core, "step", stepping)
        try:
            yield go_on
        finally:
            go_on.set()


@contextmanager
def beside(call: Callable[[], Any]) -> Iterator[list[Any]]:
    """Another thread that makes a call, and what this gave once the block is over."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield results
    thread.join(timeout=60)
    assert results and not isinstance(results[0], BaseException), results or "it hangs"


def nudge(engine: RolloutEngine) -> None:
    with torch.no_grad():
        for p in engine._binding.source.module.parameters():
            p.mul_(1.3)


def check_logprobs(engine: RolloutEngine, prompt: list[int], completion: Completion, first: int = 0) -> None:
    """Those from ``first`` on are of the weights as they are now, over everything before."""
    expected = oracle.logprobs(engine._binding.source.module, prompt, completion.token_ids)[first:]
    torch.testing.assert_close(torch.tensor(completion.logprobs)[first:].double(), expected, rtol=0, atol=1e-4)


def same(outputs: Any, expected: Any) -> bool:
    """The same completions, up to the rounding of another batch."""

    def flat(outputs: Any) -> list[Completion]:
        return [c for o in outputs for c in o.completions]

    return len(flat(outputs)) == len(flat(expected)) and all(
        (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        and a.logprobs == pytest.approx(b.logprobs, abs=2e-5)
        for a, b in zip(flat(outputs), flat(expected), strict=True)
    )


def at_rest(engine: RolloutEngine) -> None:
    engine.core.scheduler.check()
    assert not engine.core.has_work
    assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks
