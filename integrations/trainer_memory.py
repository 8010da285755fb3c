"""Puts an engine to sleep while a trainer trains, and wakes its weights for an update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from stoker.kernels.errors import StokerError
from stoker.rollout import RolloutEngine

_log = logging.getLogger("stoker")


def between_rollouts(engine: RolloutEngine) -> list[str]:
    """The tags that sleep while a trainer trains: all of the engine's own memory, except graphs, which take long to capture."""
    return ["weights", "kv_cache"] if engine.stats().mirror_bytes else ["kv_cache"]


@contextmanager
def sleep_after(sleep: Callable[[], None]) -> Iterator[None]:
    """Context manager around a rollout: calls ``sleep`` after it. If that fails, the completions are not lost."""
    try:
        yield
    except BaseException as error:
        try:
            sleep()
        except Exception as busy:
            error.add_note(f"and the rollout engine is still awake: {busy}")
        raise
    try:
        sleep()
    except (StokerError, RuntimeError, MemoryError) as error:  # requests of others are under way, or memory is short
        _log.warning("the rollout engine did not go to sleep after a rollout, and keeps its memory: %s", error)


def wake_weights(engine: RolloutEngine) -> None:
    """Wake weights before an update that ranks make together. If memory is short here, the others do not wait for this rank."""
    try:
        engine.wake_up("weights")
    except Exception:
        with suppress(StokerError):  # the weights are still asleep, so it refuses, here and on all ranks
            engine.update_weights()
        raise
