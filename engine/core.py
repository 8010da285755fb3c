"""The loop: plan, fill, run, commit.

An asynchronous device is kept busy: the next plan is made and launched while the one before it runs, and what was sampled is
read one plan late. Plans run in order on the device, so a block that one plan gives up and the next one takes is never used
by both at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from stoker.engine.frames import in_one_piece
from stoker.engine.images.inputs import ImageInputs
from stoker.engine.images.reader import ImageReader
from stoker.engine.plan import Plan
from stoker.engine.request import Adapter, Request
from stoker.engine.runner import Pending, Runner
from stoker.engine.scheduler import Scheduler
from stoker.engine.step_inputs import StepInputs
from stoker.kernels.errors import EngineStateError, StokerError


class EngineCore:
    """Joins scheduler, static inputs and runner. Knows neither text nor weights."""

    def __init__(
        self,
        scheduler: Scheduler,
        inputs: StepInputs,
        runner: Runner,
        *,
        place_adapter: Callable[[Adapter], None],
        images: ImageReader,
        ahead: int,
    ) -> None:
        """place_adapter: puts an adapter's weights into its slot, before the first step of a request that uses it.

        ahead: plans that may be launched before the oldest one's results are read.
        """
        self.scheduler = scheduler
        self.inputs = inputs
        self.runner = runner
        self.place_adapter = place_adapter
        self.images = images
        self.ahead = ahead
        self._launched: deque[tuple[Plan, Pending]] = deque()
        self._steps = 0

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests, whose images have been encoded."""
        self.scheduler.add(requests)

    def encoder(self) -> Callable[[Sequence[ImageInputs], Adapter | None], None]:
        """A function that encodes the images of prompts, as ``ImageReader.begin`` gives it. For use now, between two steps."""
        ensure = self.images.begin(self.runner.model)

        def between_steps(prompts: Sequence[ImageInputs], adapter: Adapter | None) -> None:
            with self.inputs.runtime.chosen(), torch.inference_mode(False):
                ensure(prompts, adapter)

        return between_steps

    def set_weight_version(self, version: int) -> None:
        """New weights: nothing computed before is used for a prompt. No step may be pending."""
        self.scheduler.set_weight_version(version)
        self.images.renew()

    @property
    def under_way(self) -> list[Request]:
        """All requests that were added and have not ended."""
        return [*self.scheduler.running, *self.scheduler.waiting]

    @property
    def has_work(self) -> bool:
        """Whether a request is under way. A plan may still be running without: then all its requests ended early."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    @in_one_piece
    def step(self) -> list[Request]:
        """Launch a plan, and read the oldest one if enough are under way; returns the requests that finished."""
        plan = self.scheduler.plan()
        self._steps += 1
        if plan is not None:
            self._launched.append((plan, self._launch(plan)))
        elif not self._launched:
            assert not self.has_work, "requests are left but none can run"
            return []
        if plan is not None and len(self._launched) <= self.ahead:
            return []
        return self._read(*self._launched.popleft())

    def _read(self, plan: Plan, pending: Pending) -> list[Request]:
        try:
            sampled = pending.read()
        except torch.AcceleratorError as error:  # kernels fail some time after their launch: here
            raise self._lost(plan, error) from error
        return self.scheduler.commit(plan, sampled)

    def _lost(self, plan: Plan, error: Exception) -> EngineStateError:
        return EngineStateError(
            f"the device failed at or before step {self._steps}, of {len(plan.requests)} rows and {sum(plan.num_new)} "
            f"tokens: {error}. Every request has ended, and nothing on this device can be used in this process any more: "
            "start it anew, with CUDA_LAUNCH_BLOCKING=1 and use_graphs=False to find the operation"
        )

    def _launch(self, plan: Plan) -> Pending:
        try:
            # Not in inference mode, even if the caller is: tensors made in it could not be written to outside of it.
            with self.inputs.runtime.chosen(), torch.inference_mode(False):
                ensure = self.images.begin(self.runner.model)
                for request, start in zip(plan.requests, plan.starts, strict=True):
                    if request.images is not None and request.images.end > start:
                        ensure([request.images], request.adapter)
                for request in plan.admitted:
                    if request.adapter is not None:
                        self.place_adapter(request.adapter)
                    if request.spec.penalised:
                        self.runner.sampler.start_penalties(request.slot, request.prompt, request.output)
                if plan.copies or plan.window_copies:
                    self.runner.kv.copy_blocks(plan.copies, plan.window_copies)
                if plan.begun_states:
                    self.runner.kv.copy_states(plan.begun_states)
                pending = self.runner(self.inputs.fill(plan))
                if plan.kept_states:
                    self.runner.kv.copy_states(plan.kept_states)
                return pending
        except torch.AcceleratorError as error:
            raise self._lost(plan, error) from error

    def drain(self) -> None:
        """Read the results of all launched plans; requests stay where they are."""
        while self._launched:
            self._read(*self._launched[0])
            self._launched.popleft()

    def abort(self, requests: Iterable[Request]) -> None:
        """End those of the requests that have not ended yet. What is being sampled for them still arrives, and is dropped."""
        self.scheduler.abort(requests)

    def release(self) -> None:
        """Let go of all that a step runs on: there will be no more steps."""
        for name in ("runner", "inputs", "images"):
            vars(self).pop(name, None)

    def abort_all(self, error: StokerError | None = None) -> None:
        """Drop all work, wherever an exception struck. All blocks and slots are free afterwards."""
        self._launched.clear()
        self.scheduler.abort_all(error)
