"""Seconds and tokens of rollouts, as a TRL trainer's metrics have them."""

import time
from collections import defaultdict
from types import SimpleNamespace

import pytest

from stoker.integrations.trl_metrics import RolloutMetrics


def test_what_a_rollout_does_not_wait_for_costs_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of a rollout_func may still generate when that returns, with what was there first."""
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    logged = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer = SimpleNamespace(_metrics=logged, model=SimpleNamespace(training=True))
    metrics = RolloutMetrics()
    with metrics.timed():
        now[0] = 11.0
        with metrics.timed():
            now[0] = 12.0
        metrics.count(6)
        metrics.log(trainer, 1)
        now[0] = 16.0
    metrics.count(5)
    metrics.count(7)
    now[0] = 50.0
    metrics.log(trainer, 2)
    metrics.log(trainer, 3)  # a rollout of nothing
    with pytest.raises(ZeroDivisionError), metrics.timed():
        now[0] = 60.0
        raise ZeroDivisionError
    metrics.count(1)
    metrics.forget()
    trainer.model.training = False
    for start, end in ((60.0, 63.0), (70.0, 72.0)):
        now[0] = start
        with metrics.timed():
            now[0] = end
    metrics.count(5)
    metrics.log(trainer, 4)
    metrics.count(7)
    metrics.log(SimpleNamespace(model=trainer.model), 5)  # of a kind that has no metrics
    metrics.log(trainer, 6)
    names = ["rollout/seconds", "rollout/tokens_per_second", "rollout/weight_version"]
    assert logged["train"] == dict(zip(names, ([2.0, 4.0], [3.0, 3.0], [1, 2]), strict=True))
    assert logged["eval"] == dict(zip(names, ([5.0], [1.0], [4]), strict=True))
