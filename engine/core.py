"""The loop: plan, fill, run, commit.

A device that works by itself is kept busy: the next plan is made and launched while the one before it runs, and what
was sampled is read one plan late. Plans run in order on the device, so a block that is given up by one and taken by the
next is never used by both at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from stoker.engine.request import Request
from stoker.engine.runner import Pending, Runner
from stoker.engine.scheduler import Plan, Scheduler
from stoker.engine.step_inputs import StepInputs
from stoker.kernels.errors import StokerError


class EngineCore:
    """Joins scheduler, static inputs and runner. Knows neither text nor weights."""

    def __init__(self, scheduler: Scheduler, inputs: StepInputs, runner: Runner, *, ahead: int = 0) -> None:
        """ahead: plans that may be launched before the oldest one's results are read."""
        self.scheduler = scheduler
        self.inputs = inputs
        self.runner = runner
        self.ahead = ahead
        self._launched: deque[tuple[Plan, Pending]] = deque()

    def add(self, requests: Iterable[Request]) -> None:
        self.scheduler.add(requests)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self._launched)

    def step(self) -> list[Request]:
        """Launch a plan, and read the oldest where enough are under way; returns the requests that finished."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._launched.append((plan, self._launch(plan)))
        elif not self._launched:
            assert not self.has_work, "requests are left but none can run"
            return []
        if plan is not None and len(self._launched) <= self.ahead:
            return []
        plan, pending = self._launched.popleft()
        return self.scheduler.commit(plan, pending.read())

    def _launch(self, plan: Plan) -> Pending:
        with self.inputs.runtime.chosen():
            for request in plan.admitted:
                if request.spec.penalised:
                    self.runner.sampler.start_penalties(request.slot, request.prompt, request.output)
            if plan.copies:
                self.runner.kv.copy_blocks(plan.copies)
            return self.runner(self.inputs.fill(plan))

    def drain(self) -> None:
        """Read all that was launched; requests stay where they are."""
        while self._launched:
            plan, pending = self._launched[0]
            self.scheduler.commit(plan, pending.read())
            self._launched.popleft()

    def abort(self, requests: Iterable[Request]) -> None:
        """End these requests, those that have not ended yet. What is sampled for them still arrives, and is dropped."""
        self.scheduler.abort(requests)

    def abort_all(self, error: StokerError | None = None) -> None:
        """Drop all work, wherever an exception struck. Every block and slot is free again."""
        self._launched.clear()
        self.scheduler.abort_all(error)
