"""Where a step's time goes: timers around plan, fill, run and commit, around the model within a run, and around waiting."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from stoker.engine.device import HostCopy
from stoker.rollout import RolloutEngine, SamplingParams


@dataclass(slots=True)
class Step:
    """One ``core.step()``, in seconds. ``model`` is part of ``run``; ``total`` covers plan, fill, run, wait and commit.

    On CUDA ``run`` only launches, and ``wait`` is for the plan before; a CPU is through when ``run`` is.
    """

    total: float = 0.0
    plan: float = 0.0
    fill: float = 0.0
    run: float = 0.0
    model: float = 0.0
    wait: float = 0.0
    commit: float = 0.0
    rows: int = 0
    num_steps: int = 0
    finished: int = 0
    decode: bool = False

    @property
    def host(self) -> float:
        """Everything the engine does for a step outside the runner, but for waiting until the device is through."""
        return self.total - self.run - self.wait


@dataclass(slots=True)
class StepTimes:
    steps: list[Step] = field(default_factory=list)
    wall: float = 0.0

    def decode_steps(self, rows: int = 0) -> list[Step]:
        return [s for s in self.steps if s.decode and s.rows >= rows]


@contextmanager
def timed_steps(engine: RolloutEngine) -> Iterator[StepTimes]:
    """Time every step within. Methods are patched on their classes: the objects may have no dictionary."""
    times = StepTimes()
    core: Any = engine.core
    current = Step()

    def timed(owner: Any, method: str, part: str, note: Callable[[Any], None] | None = None) -> Any:
        original = getattr(owner, method)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = original(*args, **kwargs)
            setattr(current, part, getattr(current, part) + time.perf_counter() - start)
            if note is not None:
                note(result)
            return result

        return patch.object(owner, method, wrapper)

    def note_plan(plan: Any) -> None:
        if plan is not None:
            current.rows, current.num_steps = len(plan.requests), plan.num_steps
            current.decode = all(n == 1 for n in plan.num_new)

    def note_step(finished: Any) -> None:
        nonlocal current
        current.finished = len(finished)
        times.steps.append(current)
        current = Step()

    with ExitStack() as stack:
        stack.enter_context(timed(core.runner.model, "hidden", "model"))  # attributes that hold functions
        stack.enter_context(timed(core.runner.model, "logits", "model"))
        stack.enter_context(timed(type(core.runner), "__call__", "run"))
        stack.enter_context(timed(type(core.scheduler), "plan", "plan", note_plan))
        stack.enter_context(timed(type(core.inputs), "fill", "fill"))
        stack.enter_context(timed(HostCopy, "wait", "wait"))
        stack.enter_context(timed(type(core.scheduler), "commit", "commit"))
        stack.enter_context(timed(type(core), "step", "total", note_step))
        start = time.perf_counter()
        yield times
        times.wall = time.perf_counter() - start


@contextmanager
def timed_captures(engine: RolloutEngine) -> Iterator[list[float]]:
    """Milliseconds of every CUDA graph captured within."""
    times: list[float] = []
    owner = type(engine.runtime)
    original = owner.capture

    def capture(self: Any, body: Callable[[], None]) -> Callable[[], None]:
        start = time.perf_counter()
        try:
            return original(self, body)
        finally:
            times.append((time.perf_counter() - start) * 1e3)

    with patch.object(owner, "capture", capture):
        yield times


def breakdown(times: StepTimes, rows: int) -> dict[str, float]:
    """Microseconds a decode step with at least ``rows`` requests spends in each part, on average."""
    steps = times.decode_steps(rows)
    count = sum(s.num_steps for s in steps)
    assert count, "no decode step had that many requests"
    parts = ("plan", "fill", "commit", "model", "wait")
    total = {part: sum(getattr(s, part) for s in steps) / count * 1e6 for part in parts}
    total["sampling_and_readback"] = sum(s.run - s.model for s in steps) / count * 1e6
    total["host"] = sum(s.host for s in steps) / count * 1e6
    total["step"] = sum(s.total for s in steps) / count * 1e6
    return total


def step_percentiles(times: StepTimes, slots: int) -> dict[str, float]:
    """Milliseconds of a decode step, median and 95th percentile; share of slots at work; time of the last tenth."""
    each = sorted(s.total / s.num_steps * 1e3 for s in times.decode_steps() for _ in range(s.num_steps))
    count = sum(s.num_steps for s in times.steps)
    left, tail = sum(s.finished for s in times.steps), 0.0
    for step in reversed(times.steps):
        left -= step.finished
        tail += step.total
        if left < 0.9 * sum(s.finished for s in times.steps):
            break
    return {
        "p50_step_ms": each[len(each) // 2],
        "p95_step_ms": each[int(len(each) * 0.95)],
        "decode_steps": len(each),
        "occupied_slots": sum(s.rows * s.num_steps for s in times.steps) / (slots * count),
        "tail_s": tail,
        "outside_steps_s": times.wall - sum(s.total for s in times.steps),
    }


def running(times: StepTimes) -> dict[str, list[float]]:
    """Requests at work against time: how the batch empties. One point a plan."""
    seconds, rows, elapsed = [], [], 0.0
    for step in times.steps:
        seconds.append(round(elapsed, 6))
        rows.append(step.rows)
        elapsed += step.total
    return {"seconds": [*seconds, round(elapsed, 6)], "rows": [*rows, 0]}


def growth(
    engine: RolloutEngine, prompt: Callable[[int], list[int]], rows: int, long: int, rounds: int
) -> dict[str, Any]:
    """Host time of a decode plan after few and many finished requests, and at short and long sequences.

    prompt: makes a random prompt of so many tokens.
    """
    params = SamplingParams(max_tokens=24, ignore_eos=True)

    def host_us(tokens: int) -> float:
        prompts = [prompt(tokens) for _ in range(rows)]
        with timed_steps(engine) as times:
            engine.generate_batch(prompts, params)
        return statistics.median(s.host * 1e6 for s in times.decode_steps(rows))

    host_us(16)
    before = engine.stats().finished_requests
    each = [host_us(16) for _ in range(rounds)]
    finished = engine.stats().finished_requests - before
    short, far = (statistics.median(host_us(n) for _ in range(3)) for n in (16, long))
    few, many = statistics.median(each[:3]), statistics.median(each[-3:])
    return {
        "rows": rows,
        "finished_requests": finished,
        "host_us_per_plan_first": few,
        "host_us_per_plan_last": many,
        "ratio_after_finished": many / few,
        "long_tokens": long,
        "host_us_per_plan_short": short,
        "host_us_per_plan_long": far,
        "ratio_long_to_short": far / short,
    }
