"""An executor for users' functions, which may never return: its threads do not keep the process from exiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any


class DaemonExecutor(ThreadPoolExecutor):
    """Runs each call in a daemon thread, as many as there are calls at a time. A process that exits does not wait for them.

    It would wait for the base class's threads, so none of those is started; but asyncio accepts no other class.
    """

    def __init__(self) -> None:
        super().__init__(1)  # it never starts threads of its own
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._begun: list[threading.Thread] = []
        self._ended = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._ended:
            return super().submit(fn, *args, **kwargs)  # raises an error
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
            self._begun.append(threading.Thread(target=self._run, name="stoker-user-functions", daemon=True))
            self._begun[-1].start()
        return future

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # and with it its arguments and its result
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
