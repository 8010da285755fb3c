"""Sections of code that an interrupt (Ctrl-C) does not cut in two, such as an update of weights, version and caches."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Deferred:
    """Keeps the first interrupt for later; further ones go to ``handler`` at once."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler = handler
        self.first: tuple[Any, ...] | None = None

    def __call__(self, *arguments: Any) -> None:
        if self.first is None:
            self.first = arguments
        else:
            self.handler(*arguments)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Context manager: an interrupt (Ctrl-C) waits until the block is done or has failed. A second one does not wait.

    It changes nothing inside another one, or outside of the main thread, where no interrupt arrives.
    """
    previous: Any = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not callable(previous) or isinstance(previous, _Deferred):
        yield
        return
    deferred = _Deferred(previous)
    signal.signal(signal.SIGINT, deferred)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if deferred.first is not None:
            previous(*deferred.first)
