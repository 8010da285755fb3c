"""Lets coroutines wait for completions: one thread steps the engine for all of them.

async with AsyncSteps(engine) as steps:
    outputs = await asyncio.gather(*(steps.result(engine.submit(prompt)) for prompt in prompts))
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Self

from stoker.kernels.errors import EngineStateError
from stoker.rollout import RolloutChunk, RolloutEngine, RolloutHandle, RolloutOutput
from stoker.rollout.handles import abort

_log = logging.getLogger("stoker")
_WAIT_S = 0.05  # for a completion, before looking for handles that have come meanwhile
_PAUSED_S = 0.02


class AsyncSteps:
    """Steps an engine for all who wait in one event loop: within ``async with``, or as long as ``run`` is a task of the loop.

    A coroutine that waits may be cancelled; that aborts the request, if nobody else waits for it. Once this has ended, waiting
    raises ``EngineStateError``, and so does another ``async with``.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._followed: dict[RolloutHandle, list[asyncio.Event]] = {}  # one event for each that waits
        self._streams: set[asyncio.Event] = set()
        self._arrived = asyncio.Event()
        self._stepper = ThreadPoolExecutor(1, "stoker-steps")
        self._aborts = self._ended = False
        self.failure: Exception | None = None  # of the last step that failed

    async def __aenter__(self) -> Self:
        self._refuse_where_ended()
        self._running = asyncio.create_task(self.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running
        self.close()  # where it was cancelled before it began

    async def run(self) -> None:
        """Step the engine for whoever waits, until cancelled."""
        try:
            while True:
                while not self._followed:  # those who came may have left again
                    self._arrived.clear()
                    await self._arrived.wait()
                await self._step()
        finally:
            try:
                self.close()
            finally:  # even if that fails, wake those who wait, so that they see it
                with suppress(RuntimeError):  # the loop is closed, and nobody waits in it
                    for events in self._followed.values():
                        for event in events:
                            event.set()

    async def _step(self) -> None:
        handles = list(self._followed)
        # Streams see every step; those who wait for whole results are told when one has finished.
        share, timeout = (0.0, 0.0) if self._streams else (1 / len(handles), _WAIT_S)
        wait = partial(self._engine.wait, handles, share=share, timeout=timeout)
        try:
            await asyncio.get_running_loop().run_in_executor(self._stepper, wait)
        except Exception as error:  # every request has ended, with an error of its own; new ones may come
            if not all(handle.done for handle in handles):
                raise
            self.failure = error
            _log.warning("a step of the engine failed: %s", error)
        for handle in handles:
            for event in self._followed.get(handle, ()):
                if handle.done or event in self._streams:
                    event.set()
        if self._streams and self._engine.is_paused:
            await asyncio.sleep(_PAUSED_S)

    def abort(self) -> None:
        """End every request that is waited for, now and from now on, with the tokens it has."""
        self._aborts = True
        abort(self._followed)

    def close(self) -> None:
        """As ``abort``, and end the thread. To be called if ``run`` did not come to do it."""
        self._ended = True
        try:
            self.abort()
        finally:
            self._stepper.shutdown()

    async def result(self, handle: RolloutHandle) -> RolloutOutput:
        """Wait for ``handle.result()``."""
        event = self._follow(handle)
        try:
            await event.wait()
        finally:
            self._leave(handle, event)
        return handle.result()

    async def chunks(self, handle: RolloutHandle) -> AsyncIterator[list[RolloutChunk]]:
        """Yields a handle's new tokens, as they come."""
        event = self._follow(handle)
        self._streams.add(event)
        try:
            while True:
                event.clear()
                last = handle.done
                if chunks := handle.poll():
                    yield chunks
                if last:
                    return
                await event.wait()
        finally:
            self._streams.discard(event)
            self._leave(handle, event)

    def _refuse_where_ended(self) -> None:
        if self._ended:
            raise EngineStateError("these AsyncSteps have ended, and nobody steps the engine for them: make new ones")

    def _follow(self, handle: RolloutHandle) -> asyncio.Event:
        if self._aborts:
            handle.abort()
        self._refuse_where_ended()
        event = asyncio.Event()
        self._followed.setdefault(handle, []).append(event)
        self._arrived.set()
        return event

    def _leave(self, handle: RolloutHandle, event: asyncio.Event) -> None:
        others = self._followed[handle]
        others.remove(event)
        if others:
            return
        del self._followed[handle]
        if not handle.done:  # in the thread that steps, since an abort waits for the end of a step
            self._stepper.submit(handle.abort)
