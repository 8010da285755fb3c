"""The loop: plan, fill, run, commit."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.engine.request import Request
from stoker.engine.runner import EagerStep
from stoker.engine.scheduler import Scheduler
from stoker.engine.step_inputs import StepInputs


class EngineCore:
    """Joins scheduler, static inputs and runner. Knows neither text nor weights."""

    def __init__(self, scheduler: Scheduler, inputs: StepInputs, runner: EagerStep) -> None:
        self.scheduler = scheduler
        self.inputs = inputs
        self.runner = runner

    def add(self, requests: Iterable[Request]) -> None:
        self.scheduler.add(requests)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> list[Request]:
        """One plan from beginning to end; returns the requests that finished with it."""
        plan = self.scheduler.plan()
        if plan is None:
            return []
        for request in plan.admitted:
            if request.spec.penalised:
                self.runner.sampler.start_penalties(request.slot, request.prompt, request.output)
        if plan.copies:
            self.runner.kv.copy_blocks(plan.copies)
        batch = self.inputs.fill(plan)
        sampled = self.runner(batch)
        return self.scheduler.commit(plan, sampled)
