"""Threads for functions that may never return."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from small_engine import in_another_process

from stoker.integrations.daemon_executor import DaemonExecutor


def fail() -> None:
    raise SystemExit("of the function")


def test_calls_run_at_the_same_time_and_threads_serve_again() -> None:
    threads, together = DaemonExecutor(), threading.Barrier(3, timeout=30)
    for _ in range(4):
        assert sorted(f.result(30) for f in [threads.submit(together.wait) for _ in range(3)]) == [0, 1, 2]
        time.sleep(0.05)
    with pytest.raises(SystemExit, match="of the function"):
        threads.submit(fail).result(30)
    assert threads.submit(divmod, 7, 2).result(30) == (3, 1)
    threads.shutdown()
    assert not [t for t in threading.enumerate() if t.name == "calls"]
    with pytest.raises(RuntimeError, match="after shutdown"):
        threads.submit(int)


def test_asyncio_takes_them_for_its_own_calls() -> None:
    async def where() -> str:
        asyncio.get_running_loop().set_default_executor(DaemonExecutor())
        return await asyncio.to_thread(lambda: threading.current_thread().name)

    assert asyncio.run(where()) == "stoker-user-functions"


def test_a_process_exits_though_a_call_does_not_return() -> None:
    code = """
import threading
from stoker.integrations.daemon_executor import DaemonExecutor
begun, never = threading.Event(), threading.Event()
DaemonExecutor().submit(lambda: (begun.set(), never.wait()))
begun.wait()
print("exits")
"""
    assert in_another_process(code) == "exits\n"
