"""An executor for functions of the user's, which may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any


class DaemonExecutor(ThreadPoolExecutor):
    """As many daemon threads as there are calls at a time: a process that exits does not wait for them.

    The base class's threads it would wait for, and none are started; but asyncio takes no other class for its own calls.
    """

    def __init__(self, name: str) -> None:
        super().__init__(1, name)  # threads of its own it never starts
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._begun: list[threading.Thread] = []
        self._ended = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._ended:
            return super().submit(fn, *args, **kwargs)  # which refuses it
        future: Future[Any] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(call)
        if not self._idle.acquire(blocking=False):
            self._begun.append(threading.Thread(target=self._run, name=self._name, daemon=True))
            self._begun[-1].start()
        return future

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # and with it what it was given and gave
            self._idle.release()
        self._calls.put(None)  # for the next one

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """wait: until all calls have returned."""
        super().shutdown(wait=False)
        self._ended = True
        self._calls.put(None)
        if wait:
            for thread in self._begun:
                thread.join()
