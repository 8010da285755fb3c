"""TRL's loop of asynchronous GRPO for one run of a trainer, with the engine in place of TRL's server, and what other loops share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from inspect import signature
from random import Random
from typing import Any

from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

from stoker.integrations.async_steps import AsyncSteps
from stoker.integrations.daemon_executor import DaemonExecutor
from stoker.integrations.trl_sampling import live_model, sampling_params
from stoker.kernels.errors import RequestFailedError
from stoker.rollout import Completion, RolloutEngine
from stoker.weight_sync.naming import unwrap
from stoker.weight_sync.peft_adapters import active_adapters


class EngineLoop:
    """Gives one of TRL's own loops, the class after it, the engine in place of its server."""

    _loop: asyncio.AbstractEventLoop  # TRL's loop makes these two
    _stop_event: asyncio.Event

    def __init__(self, engine: RolloutEngine, trainer: Any, seed: str, **options: Any) -> None:
        """Called by the trainer's own thread. seed: of all that this run samples. options: parameters of TRL's loop.

        Those that the trainer has a setting for are set to that.
        """
        begin: Callable[..., None] = super().__init__
        of_the_loop = signature(begin).parameters
        begin(
            **{name: value for name, value in vars(trainer.args).items() if name in of_the_loop},
            model_name="",
            dataset=trainer.train_dataset,
            processing_class=trainer.processing_class,
            eos_token_ids=trainer.eos_token_ids,
            **options,
        )
        self._engine = engine
        self._params = sampling_params(trainer)
        self._seeds = Random(seed)
        self._policy = "+".join(active_adapters(unwrap(live_model(trainer)))) or None  # the adapter that is trained
        self._steps = AsyncSteps(engine)
        self._executor = DaemonExecutor()
        self._loop.set_default_executor(self._executor)  # reward functions run in it, and waits for teachers

    def run(self) -> None:
        try:
            super().run()  # type: ignore[misc]
        except BaseException:  # TRL has put it where ``check_health`` finds it
            self._steps.close()  # after ``sys.exit`` in a reward function, the event loop's tasks would just stop

    def request_stop(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._stop_event.set)
        except RuntimeError:  # the loop has ended by itself
            return

    def _loops(self, stop_event: asyncio.Event) -> Sequence[Awaitable[None]]:
        """TRL's own, which run side by side until the end."""
        raise NotImplementedError

    async def _run_loops(self, stop_event: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                loops = (*self._loops(stop_event), self._steps.run())
                tasks = [group.create_task(_to_its_end(loop)) for loop in loops]
                await stop_event.wait()
                for task in tasks:  # which wait for completions that nobody wants any more
                    task.cancel()
        except BaseExceptionGroup as several:
            first = several.exceptions[0]
            raise first from first.__cause__

    async def _sample(self, prompt_ids: list[int]) -> Completion:
        while True:
            params = replace(self._params, seed=self._seeds.getrandbits(62))
            # The policy's adapter, and not LIVE: the trainer may have it switched off right now, for a reference's forward.
            output = await self._steps.result(self._engine.submit(prompt_ids, params, adapter=self._policy))
            if output.error is not None:
                raise RequestFailedError(str(output.error)) from self._steps.failure
            (completion,) = output.completions
            if completion.finish_reason != "abort":  # a user's pause("abort") gives no completion to train on
                return completion


class GRPOLoop(EngineLoop, _AsyncRolloutLoop):  # type: ignore[misc]
    """Samples, calls tools, and computes rewards."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._tool_pool = self._executor

    def _loops(self, stop_event: asyncio.Event) -> Sequence[Awaitable[None]]:
        return self._generate_loop(stop_event=stop_event), self._score_loop(stop_event=stop_event)

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        completion = await self._sample(prompt_ids)
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
