"""An update is one step: weights, version and caches change together or not at all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """An interrupt (Ctrl-C) waits until the block is done, or has failed; a second one does not.

    Outside of the main thread, where no interrupt arrives, nothing is changed.
    """
    previous: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    waiting: list[tuple[Any, ...]] = []

    def wait(*arguments: Any) -> None:
        waiting.append(arguments)
        if len(waiting) > 1:
            previous(*arguments)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if waiting:
            previous(*waiting[0])
