"""Measures how long rollouts take and how many tokens they have, and adds that to a TRL trainer's metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class RolloutMetrics:
    """Seconds and tokens of the rollout under way.

    Threads of a ``rollout_func`` may generate at the same time: a second in which several do counts once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way, self._begun = 0, 0.0
        self._seconds, self._tokens = 0.0, 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        with self._lock:
            if not self._under_way:
                self._begun = time.perf_counter()
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                if not self._under_way:
                    self._seconds += time.perf_counter() - self._begun

    def count(self, tokens: int) -> None:
        with self._lock:
            self._tokens += tokens

    def log(self, trainer: Any, weight_version: int) -> None:
        """Add the rollout to the trainer's metrics, where its kind has such; the next one begins at zero."""
        seconds, tokens = self._taken()
        metrics = getattr(trainer, "_metrics", None)
        if metrics is not None and tokens:
            now = metrics["train" if trainer.model.training else "eval"]
            now["rollout/seconds"].append(seconds)
            now["rollout/tokens_per_second"].append(tokens / seconds)
            now["rollout/weight_version"].append(weight_version)

    def forget(self) -> None:
        self._taken()

    def _taken(self) -> tuple[float, int]:
        """(seconds, tokens) so far; both begin at zero again."""
        with self._lock:
            if self._under_way:  # in a thread that nobody waited for: the rest counts for the next rollout
                now = time.perf_counter()
                self._seconds, self._begun = self._seconds + now - self._begun, now
            taken = self._seconds, self._tokens
            self._seconds, self._tokens = 0.0, 0
        return taken
