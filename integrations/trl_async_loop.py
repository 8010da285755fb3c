"""TRL's loop of asynchronous rollouts for one run of a trainer, with the engine in place of TRL's server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from random import Random
from typing import Any

from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

from stoker.integrations.async_steps import AsyncSteps
from stoker.integrations.daemon_executor import DaemonExecutor
from stoker.kernels.errors import RequestFailedError
from stoker.rollout import RolloutEngine, SamplingParams


class EngineLoop(_AsyncRolloutLoop):  # type: ignore[misc]
    """TRL's own loop, with the engine in place of its server."""

    def __init__(
        self, engine: RolloutEngine, params: SamplingParams, seed: str, policy: str | None, **options: Any
    ) -> None:
        """seed: of all that this run samples. policy: the adapter that is trained, by name; None for a model without."""
        super().__init__(**options)
        self._engine = engine
        self._params = params
        self._seeds = Random(seed)
        self._policy = policy
        self._steps = AsyncSteps(engine)
        self._tool_pool = DaemonExecutor()
        self._loop.set_default_executor(self._tool_pool)  # reward functions run in it

    def run(self) -> None:
        try:
            super().run()
        except BaseException:  # TRL has put it where ``check_health`` finds it
            self._steps.close()  # after ``sys.exit`` in a reward function, the event loop's tasks would just stop

    def request_stop(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._stop_event.set)
        except RuntimeError:  # the loop has ended by itself
            return

    async def _run_loops(self, stop_event: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                loops = (
                    self._generate_loop(stop_event=stop_event),
                    self._score_loop(stop_event=stop_event),
                    self._steps.run(),
                )
                tasks = [group.create_task(_to_its_end(loop)) for loop in loops]
                await stop_event.wait()
                for task in tasks:  # which wait for completions that nobody wants any more
                    task.cancel()
        except BaseExceptionGroup as several:
            first = several.exceptions[0]
            raise first from first.__cause__

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        while True:
            params = replace(self._params, seed=self._seeds.getrandbits(62))
            # The policy's adapter, and not LIVE: the trainer may have it switched off right now, for a reference's forward.
            output = await self._steps.result(self._engine.submit(prompt_ids, params, adapter=self._policy))
            if output.error is not None:
                raise RequestFailedError(str(output.error)) from self._steps.failure
            (completion,) = output.completions
            if completion.finish_reason != "abort":  # a user's pause("abort") gives no completion to train on
                return completion.token_ids, completion.logprobs


async def _to_its_end(loop: Awaitable[None]) -> None:
    """Run a loop; if it is cancelled from within, raise an error, or the group of tasks would go on without it.

    Such a ``CancelledError`` comes from a future that was cancelled, for example one that a tool waits for.
    """
    try:
        await loop
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # from outside, at the end
            raise
        raise RequestFailedError("a tool, an environment or a reward function raised CancelledError") from error
