"""Training is what it is with ``generate``: reward curves over seeds, and exactly what can be told exactly.

A sampled curve is random, so it is compared by a permutation test. What is not random has to be the same: greedy rollouts,
and all that the trainer does with samples once they are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from transformers import PrinterCallback
from trl_setup import build, logged, make_model, recorded, replay

from stoker.rollout import RolloutBatch, SamplingParams

pytest.importorskip("trl", reason="TRL is not installed")

from stoker.integrations.trl import attach

SEEDS = range(5)
LEVEL = (
    0.01  # of the 252 ways to split 10 runs in two, only the two that put all of one kind above the other are below it
)
STEPS, PROMPTS_A_STEP, SAMPLES = 5, 6, 16  # every prompt at every step: what is left to differ is what is sampled


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Any]:
    def make(kind: str = "grpo", **settings: Any) -> Any:
        trainer = build(kind, str(tmp_path), gradient_checkpointing=False, **settings)
        trainer.remove_callback(PrinterCallback)
        return trainer

    return make


# -- what is random ----------------------------------------------------------------------------------------------------


def permutation_test(a: Sequence[float], b: Sequence[float]) -> float:
    """Exact two-sided p-value of "a and b are draws from one distribution", by the difference of their means."""
    pooled, size = [*a, *b], len(a)
    centre = sum(pooled) * size / len(pooled)
    observed = abs(sum(a) - centre) * (1 - 1e-9)  # two sums of the same numbers may round apart
    return mean(abs(sum(chosen) - centre) >= observed for chosen in combinations(pooled, size))


def test_the_permutation_test() -> None:
    assert permutation_test([1, 2, 3], [1, 2, 3]) == 1
    assert permutation_test([1, 2, 3], [4, 5, 6]) == permutation_test([4, 5, 6], [1, 2, 3]) == 2 / 20
    assert permutation_test([1, 2, 4], [3, 5, 6]) == 4 / 20
    assert permutation_test(range(5), range(5, 10)) == pytest.approx(2 / 252) and 2 / 252 < LEVEL < 4 / 252


def p_values(some: list[list[float]], others: list[list[float]]) -> dict[str, float]:
    """Of the mean reward before anything was learned, that at the end, and the area under the curve."""
    statistics: dict[str, Callable[[list[float]], float]] = {
        "first": itemgetter(0),
        "last": itemgetter(-1),
        "area": mean,
    }
    return {name: permutation_test([f(c) for c in some], [f(c) for c in others]) for name, f in statistics.items()}


def at_temperature_one(trainer: Any) -> None:
    """A fault to be found: the engine no longer samples as the trainer is set."""
    sample = trainer.vllm_generation.engine.generate_batch

    def generate_batch(prompts: Any, params: list[SamplingParams]) -> RolloutBatch:
        return sample(prompts, [replace(p, temperature=1.0) for p in params])  # type: ignore[no-any-return]

    trainer.vllm_generation.engine.generate_batch = generate_batch


def test_reward_curves_over_seeds_are_those_of_generate(make_trainer: Callable[..., Any]) -> None:
    """They cannot be told apart; the same runs at a wrong temperature can."""

    def curves(*, engine: bool, fault: Callable[[Any], None] = lambda _: None) -> list[list[float]]:
        found = []
        for seed in SEEDS:
            trainer = make_trainer(
                seed=seed, max_steps=STEPS, per_device_train_batch_size=PROMPTS_A_STEP * SAMPLES, num_generations=SAMPLES,
                learning_rate=3e-3, temperature=1.5,
            )  # fmt: skip
            if engine:
                attach(trainer)
                fault(trainer)
            trainer.train()
            found.append(logged(trainer, "reward"))
        return found

    plain = curves(engine=False)
    assert {len(c) for c in plain} == {STEPS}
    assert permutation_test([c[0] for c in plain], [c[-1] for c in plain]) < LEVEL, "nothing was learned"
    assert min(p_values(plain, curves(engine=True)).values()) > LEVEL
    assert p_values(plain, curves(engine=True, fault=at_temperature_one))["area"] < LEVEL


# -- what is not -------------------------------------------------------------------------------------------------------


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Up to what sums in another order come to over a few steps of plain gradient descent."""
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], atol=1e-5, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind", ["grpo", "distillation"])
def test_greedy_rollouts_train_as_those_of_generate(
    make_trainer: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    """Nothing is random: one curve, one policy. Another model draws it along its own greedy completions."""
    settings: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 6}
    settings["generation_kwargs"] = {"do_sample": False}
    if kind == "grpo":  # equal completions have no advantage: all there is to learn from is the reference
        settings |= {"beta": 1.0, "per_device_train_batch_size": 4 * PROMPTS_A_STEP}
        make_model(tie_word_embeddings=True).save_pretrained(tmp_path / "reference")
    before = make_model().state_dict()

    def train(*, engine: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = make_model()
        model.config._name_or_path = str(tmp_path / "reference")  # where TRL looks for it
        trainer = make_trainer(kind, model=model, **settings)
        if engine:
            attach(trainer)
        trainer.train()
        return logged(trainer, "reward" if kind == "grpo" else "loss"), weights(trainer)

    (curve, policy), (engine_curve, engine_policy) = train(engine=False), train(engine=True)
    assert engine_curve == pytest.approx(curve, abs=0 if kind == "grpo" else 1e-5, rel=0) and len(set(curve)) > 2
    assert_close(engine_policy, policy)
    assert max((before[name] - tensor).abs().max() for name, tensor in policy.items()) > 1e-2  # there was a way to go


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("grpo", {}), ("grpo", {"num_iterations": 2, "gradient_accumulation_steps": 2}), ("rloo", {})],
    ids=["grpo", "grpo-iterations", "rloo"],
)
def test_of_the_same_samples_the_trainer_makes_the_same(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, Any]
) -> None:
    """A trainer whose ``generate`` gives what another's engine has sampled: rewards, losses and weights are the other's."""
    settings = settings | {
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_grad_norm": 0.0,
        "temperature": 0.7,
        "max_steps": 4,
    }
    on_engine = make_trainer(kind, **settings)
    engine = attach(on_engine)
    rollouts = recorded(engine, monkeypatch)
    on_engine.train()

    plain = make_trainer(kind, **settings)
    before = weights(plain)
    replay(plain, rollouts, monkeypatch)
    for key, tolerance in (("reward", 0), ("reward_std", 0), ("loss", 1e-4), ("grad_norm", 1e-4)):
        found, expected = logged(on_engine, key), logged(plain, key)
        assert len(expected) >= 2 and found == pytest.approx(expected, abs=tolerance, rel=0), key
    assert_close(weights(on_engine), weights(plain))
    assert max((before[name] - tensor).abs().max() for name, tensor in weights(plain).items()) > 1e-3
