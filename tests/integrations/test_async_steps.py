"""Coroutines that wait for completions: all that a handle gives, for many at once, and nothing left behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from live_setup import PROMPTS, at_rest, build, held, long, same

from stoker.integrations.async_steps import AsyncSteps
from stoker.rollout import EngineStateError, RolloutChunk, RolloutEngine, RolloutOutput


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("stoker")]


def test_they_get_what_a_batch_gives() -> None:
    async def rollouts(engine: RolloutEngine) -> list[RolloutOutput]:
        async def one(i: int) -> RolloutOutput:
            await asyncio.sleep(0.01 * i)  # they come while others are under way
            return await steps.result(engine.submit(PROMPTS[i], long(i, n=2)))

        async with AsyncSteps(engine) as steps:
            return await asyncio.gather(*map(one, range(4)))

    with build() as engine:
        expected = engine.generate_batch(PROMPTS[:4], [long(i, n=2) for i in range(4)])
        assert same(asyncio.run(rollouts(engine)), expected)
        at_rest(engine)
    assert not threads()


def test_chunks_are_the_completion_in_pieces() -> None:
    async def follow(engine: RolloutEngine) -> tuple[list[RolloutChunk], RolloutOutput]:
        async with AsyncSteps(engine) as steps:
            other = asyncio.create_task(steps.result(engine.submit(PROMPTS[1], long(1))))
            pieces = [piece async for some in steps.chunks(engine.submit(PROMPTS[0], long())) for piece in some]
            return pieces, await other

    with build() as engine:
        expected, other = engine.generate_batch(PROMPTS[:2], [long(), long(1)])
        pieces, beside = asyncio.run(follow(engine))
        assert len(pieces) > 4 and same([beside], [other])
        assert [t for piece in pieces for t in piece.token_ids] == expected.completions[0].token_ids
        at_rest(engine)


@pytest.mark.parametrize("how", ["result", "chunks"])
def test_a_task_that_is_cancelled_ends_its_request_and_no_other(how: str) -> None:
    async def cancel(engine: RolloutEngine) -> RolloutOutput:
        async with AsyncSteps(engine) as steps:
            handle = engine.submit(PROMPTS[0], long(max_tokens=100))
            waiting = asyncio.create_task(drained(steps, handle) if how == "chunks" else steps.result(handle))
            with held(engine, lambda: handle._requests[0].num_output > 0):
                other = asyncio.create_task(steps.result(engine.submit(PROMPTS[1], long(1))))
                while not handle._requests[
                    0
                ].num_output:  # no poll: what that gave the stream would not see, nor this what it saw
                    await asyncio.sleep(0.001)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            output = await other
            while not handle.done:
                await asyncio.sleep(0.001)
            assert handle.result().completions[0].finish_reason == "abort"
            return output

    with build() as engine:
        expected = engine.generate_batch(PROMPTS[1:2], long(1))
        assert same([asyncio.run(cancel(engine))], expected)
        at_rest(engine)


def test_a_stream_of_what_has_ended_already_is_nothing_to_step_for() -> None:
    """As where another's step ended a request before anybody followed it. It comes and leaves before the thread is asked."""

    async def follow(engine: RolloutEngine) -> tuple[list[RolloutChunk], RolloutOutput]:
        handle = engine.submit(PROMPTS[0], long())
        engine.wait([handle])
        async with AsyncSteps(engine) as steps:
            await asyncio.sleep(0)  # until they wait for whoever comes
            pieces = [piece async for some in steps.chunks(handle) for piece in some]
            return pieces, await asyncio.wait_for(steps.result(engine.submit(PROMPTS[1], long(1))), 60)

    with build() as engine:
        expected, other = engine.generate_batch(PROMPTS[:2], [long(), long(1)])
        pieces, beside = asyncio.run(follow(engine))
        assert [t for piece in pieces for t in piece.token_ids] == expected.completions[0].token_ids
        assert same([beside], [other])
        at_rest(engine)


def test_several_may_wait_for_one_request() -> None:
    """And where one of them is cancelled it goes on for the others."""

    async def wait(engine: RolloutEngine) -> tuple[list[RolloutOutput], list[int]]:
        async with AsyncSteps(engine) as steps:
            handle = engine.submit(PROMPTS[0], long())
            waiting = [asyncio.create_task(steps.result(handle)) for _ in range(3)]
            await asyncio.sleep(0)  # they wait
            waiting.pop().cancel()
            pieces = [piece async for some in steps.chunks(handle) for piece in some]
            outputs = await asyncio.wait_for(asyncio.gather(*waiting), 30)
            return outputs, [token for piece in pieces for token in piece.token_ids]

    with build() as engine:
        expected = engine.generate_batch(PROMPTS[:1], long())
        outputs, streamed = asyncio.run(wait(engine))
        assert same(outputs[:1], expected) and same(outputs[1:], expected)
        assert streamed == expected[0].completions[0].token_ids
        at_rest(engine)


def test_after_the_end_nobody_waits_for_ever() -> None:
    async def wait(engine: RolloutEngine) -> None:
        steps = AsyncSteps(engine)
        async with steps:
            pass
        for ask in (steps.result, lambda handle: drained(steps, handle)):
            with pytest.raises(EngineStateError, match="have ended"):
                await asyncio.wait_for(ask(engine.submit(PROMPTS[0], long())), 30)
        with pytest.raises(EngineStateError, match="have ended"):
            await steps.__aenter__()

    with build() as engine:
        asyncio.run(wait(engine))
        at_rest(engine)


async def drained(steps: AsyncSteps, handle: Any) -> None:
    async for _ in steps.chunks(handle):
        pass


def test_an_error_inside_leaves_nothing_under_way() -> None:
    async def fail(engine: RolloutEngine) -> None:
        async with AsyncSteps(engine) as steps:
            handles = [engine.submit(p, long(max_tokens=100)) for p in PROMPTS]
            with held(engine, lambda: under_way(handles)):
                waiting = [asyncio.create_task(steps.result(handle)) for handle in handles]
                while not under_way(handles):
                    await asyncio.sleep(0.001)
                assert not any(task.done() for task in waiting)
                raise ZeroDivisionError("of the environment")

    def under_way(handles: list[Any]) -> bool:
        return all(handle._requests[0].num_output > 0 for handle in handles)

    with build() as engine:
        with pytest.raises(ZeroDivisionError, match="of the environment"):
            asyncio.run(fail(engine))
        at_rest(engine)
    assert not threads()


@pytest.mark.parametrize("stream", [False, True])
def test_a_pause_holds_them(stream: bool) -> None:
    async def pause(engine: RolloutEngine) -> None:
        async with AsyncSteps(engine) as steps:
            handle = engine.submit(PROMPTS[0], long(max_tokens=60))
            waiting = asyncio.create_task(drained(steps, handle) if stream else steps.result(handle))
            with held(engine, lambda: len(handle._requests[0].output) > 4):
                while len(handle._requests[0].output) < 5:
                    await asyncio.sleep(0.001)
                engine.pause()
            stood = len(handle._requests[0].output)
            await asyncio.sleep(0.1)
            assert len(handle._requests[0].output) == stood and not waiting.done()
            assert engine.update_weights() == 1
            engine.resume()
            await waiting
            assert set(handle.result().completions[0].weight_versions) == {0, 1}

    with build() as engine:
        asyncio.run(pause(engine))
        at_rest(engine)


@pytest.mark.parametrize("where", ["step", "in_order"])
def test_a_turn_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Whoever waited is told, and who comes then is served."""

    async def wait(engine: RolloutEngine) -> list[RolloutOutput]:
        async with AsyncSteps(engine) as steps:
            handles = [engine.submit(p, long()) for p in PROMPTS[:2]]
            with monkeypatch.context() as patch:
                patch.setattr(*((engine.core, "step") if where == "step" else (engine._loop, "_in_order")), fail)
                failed = await asyncio.wait_for(asyncio.gather(*map(steps.result, handles)), 30)
            assert all("failed or was interrupted" in str(output.error) for output in failed)
            assert "of the device" in str(steps.failure)
            return [await asyncio.wait_for(steps.result(engine.submit(PROMPTS[0], long())), 30)]

    def fail() -> None:
        raise RuntimeError("of the device")

    with build() as engine:
        expected = engine.generate_batch(PROMPTS[:1], long())
        assert same(asyncio.run(wait(engine)), expected)
        at_rest(engine)
    assert not threads()


def test_an_engine_that_can_end_nothing_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait(engine: RolloutEngine) -> None:
        async with AsyncSteps(engine) as steps:
            handles = [engine.submit(p, long()) for p in PROMPTS[:2]]
            for name in ("step", "abort", "abort_all"):
                monkeypatch.setattr(engine.core, name, fail)
            for handle in handles:
                with pytest.raises(RuntimeError, match="of the device"):
                    await asyncio.wait_for(steps.result(handle), 30)

    def fail(*_: object) -> None:
        raise RuntimeError("of the device")

    engine = build()
    with pytest.raises(RuntimeError, match="of the device"):
        asyncio.run(wait(engine))
    monkeypatch.undo()
    engine.close()
    assert not threads()
