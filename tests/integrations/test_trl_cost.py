"""What rollouts cost, as a TRL trainer's metrics have it."""

import time
from collections import defaultdict
from types import SimpleNamespace

import pytest

from stoker.integrations.trl_cost import RolloutCost


def test_what_a_rollout_does_not_wait_for_costs_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of a rollout_func may still generate when that returns, with what was there first."""
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer = SimpleNamespace(_metrics=metrics, model=SimpleNamespace(training=True))
    cost = RolloutCost()
    with cost.timed():
        now[0] = 11.0
        with cost.timed():
            now[0] = 12.0
        cost.count(6)
        cost.log(trainer, 1)
        now[0] = 16.0
    cost.count(5)
    cost.count(7)
    now[0] = 50.0
    cost.log(trainer, 2)
    cost.log(trainer, 3)  # a rollout of nothing
    with pytest.raises(ZeroDivisionError), cost.timed():
        now[0] = 60.0
        raise ZeroDivisionError
    cost.count(1)
    cost.forget()
    trainer.model.training = False
    for start, end in ((60.0, 63.0), (70.0, 72.0)):
        now[0] = start
        with cost.timed():
            now[0] = end
    cost.count(5)
    cost.log(trainer, 4)
    cost.count(7)
    cost.log(SimpleNamespace(model=trainer.model), 5)  # of a kind that has no metrics
    cost.log(trainer, 6)
    names = ["rollout/seconds", "rollout/tokens_per_second", "rollout/weight_version"]
    assert metrics["train"] == dict(zip(names, ([2.0, 4.0], [3.0, 3.0], [1, 2]), strict=True))
    assert metrics["eval"] == dict(zip(names, ([5.0], [1.0], [4]), strict=True))
