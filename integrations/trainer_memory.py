"""An engine's memory around the rollouts of a trainer: what sleeps while it trains, and how weights wake for an update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from stoker.kernels.errors import StokerError
from stoker.rollout import RolloutEngine

_log = logging.getLogger("stoker")


def between_rollouts(engine: RolloutEngine) -> list[str]:
    """What to send to sleep while a trainer trains: all memory of the engine's own, but for graphs, which take long to capture."""
    return ["weights", "kv_cache"] if engine.stats().mirror_bytes else ["kv_cache"]


@contextmanager
def sleep_after(sleep: Callable[[], None]) -> Iterator[None]:
    """Call ``sleep`` after the rollout within. Its completions are there, whether sleeping works or not; an exception goes on."""
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
    """Before an update that other ranks make with this engine. Where it has no memory for that, they do not wait for it."""
    try:
        engine.wake_up("weights")
    except Exception:
        with suppress(StokerError):  # it refuses, here and so on all ranks: the weights are asleep still
            engine.update_weights()
        raise
