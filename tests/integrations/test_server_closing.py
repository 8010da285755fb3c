"""What the HTTP server answers while it is closed: whoever waits is told at once, and holds nothing up."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from live_setup import PROMPTS, at_rest, beside, build, long
from server_setup import an_engine, post, until  # noqa: F401 - a fixture among them

from stoker.integrations.async_steps import AsyncSteps
from stoker.integrations.server import Server, serve
from stoker.rollout import RolloutEngine

CLOSED = "the server is being closed, and what was asked for may not be done"


@contextmanager
def closing(server: Server) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=server.close, daemon=True)
    thread.start()
    yield thread
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_a_request_that_has_not_begun_yet(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for its turn with the engine, which a trainer may have for minutes: nobody waits for that any more."""
    asked, go_on, submit = threading.Event(), threading.Event(), RolloutEngine.submit

    def late(*args: Any, **options: Any) -> Any:
        asked.set()
        go_on.wait(60)
        return submit(*args, **options)

    monkeypatch.setattr(RolloutEngine, "submit", late)
    server = serve(engine, port=0)
    try:
        with beside(lambda: post(server, "/v1/completions", {"prompt": "abc", "max_tokens": 200})) as answers:
            assert asked.wait(60)
            with closing(server):
                until(lambda: bool(answers))
        ((status, body),) = answers
        assert status == 503 and CLOSED in body["error"]["message"]
    finally:
        go_on.set()
    until(
        lambda: (
            not engine._loop.has_work("be looked at")
            and not [t for t in threading.enumerate() if "stoker-requests" in t.name]
        )
    )


def test_a_body_that_has_not_come_yet(engine: RolloutEngine) -> None:
    server = serve(engine, port=0)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as half:
        half.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"prompt": "a"')
        until(lambda: bool(server._server.server_state.tasks))
        with closing(server):
            answer = b""
            while part := half.recv(1000):
                answer += part
    assert answer.startswith(b"HTTP/1.1 503 ") and CLOSED.encode() in answer


def test_a_change_that_takes_long(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends by itself. One that has not begun is not made."""
    begun, go_on, made = threading.Event(), threading.Event(), list[str]()

    def sleep() -> None:
        begun.set()
        go_on.wait(60)
        made.append("sleep")

    monkeypatch.setattr(engine, "sleep", sleep)
    monkeypatch.setattr(engine, "wake_up", lambda: made.append("wake_up"))
    server = serve(engine, port=0, control=True)
    with beside(lambda: post(server, "/sleep", {})) as first:
        assert begun.wait(60)
        with beside(lambda: post(server, "/wake_up", {})) as second:
            until(lambda: len(server._server.server_state.tasks) == 2)
            with closing(server):
                until(lambda: bool(first and second))
                go_on.set()
    for ((status, body),) in (first, second):
        assert status == 503 and CLOSED in body["error"]["message"]
    assert made == ["sleep"]


def test_what_is_waited_for_after_an_abort_ends_too() -> None:
    """A request of the last moment, which would go on to its end."""

    async def ask(engine: RolloutEngine) -> Any:
        async with AsyncSteps(engine) as steps:
            steps.abort()
            handle = engine.submit(PROMPTS[0], long(max_tokens=100))
            chunks = [chunk async for chunk in steps.chunks(engine.submit(PROMPTS[1], long(max_tokens=100)))]
            return await steps.result(handle), chunks

    with build() as engine:
        output, chunks = asyncio.run(ask(engine))
        assert output.completions[0].finish_reason == "abort" and not output.completions[0].token_ids and not chunks
        at_rest(engine)


def test_all_that_is_waited_for_ends_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two turns there may be a step, which takes its time while there is much left to end."""
    turns = list[str]()

    async def ask(engine: RolloutEngine) -> Any:
        async with AsyncSteps(engine) as steps:
            handles = [engine.submit(prompt, long(max_tokens=100)) for prompt in PROMPTS]
            waiting = [asyncio.create_task(steps.result(handle)) for handle in handles]
            await asyncio.sleep(0)
            do = engine._loop.do

            def counted(action: str, change: Any) -> Any:
                turns.append(action)
                return do(action, change)

            monkeypatch.setattr(engine._loop, "do", counted)
            steps.abort()
            assert turns == ["end requests"]
            return await asyncio.gather(*waiting)

    with build() as engine:
        assert all(output.completions[0].finish_reason == "abort" for output in asyncio.run(ask(engine)))
        at_rest(engine)


def test_a_pause_in_which_the_owner_has_put_requests_to_sleep(engine: RolloutEngine) -> None:
    """They cannot go on when the server ends what a client asked for: the pause is the owner's then."""
    with serve(engine, port=0, control=True) as server:
        assert post(server, "/pause", {})[1]["is_paused"] is True
        handle = engine.submit("abc")
        engine.sleep()
    assert engine.is_paused
    engine.wake_up()
    engine.resume()
    assert not engine.is_paused and handle.result(timeout=30).completions
