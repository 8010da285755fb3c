"""TRL runs that end early, or detach in a callback: what was asked for happens, and nothing is left."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from live_setup import beside, held, same
from transformers import TrainerCallback
from trl_setup import LOGPROB_TOLERANCE, MakeTrainer, ask, logged, plain_logprobs, recorded, trainers

from stoker.rollout import EngineConfig, SamplingParams

pytest.importorskip("trl", reason="TRL is not installed")

from stoker.integrations.trl import attach, detach

# Every test is of the end of runs, not of how they train.
PLAIN: dict[str, Any] = {"optim": "sgd", "max_steps": 2}


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    yield from trainers(str(tmp_path))


def check_parity(trainer: Any) -> None:
    prompt = [3, 4, 5]
    (completion,), (logprobs,) = ask(trainer, [prompt])
    expected = plain_logprobs(trainer.model.eval(), prompt, completion)
    torch.testing.assert_close(logprobs, expected, atol=LOGPROB_TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["grpo", "online_dpo"])
def test_a_rollout_that_was_aborted_is_made_anew(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As any thread may do, or a request to a server on the engine. What was cut off would be trained on as truncated."""
    trainer = make_trainer(kind)
    engine = attach(trainer, config=EngineConfig(decode_window=1))
    backend, prompts = trainer.vllm_generation, [[3, 4], [5]]
    torch.manual_seed(0)
    expected = backend.sample(prompts, None, n=2)
    torch.manual_seed(0)
    made = recorded(engine, monkeypatch)
    begun = engine._loop._steps
    with (
        held(engine, lambda: engine._loop._steps == begun + 1) as go_on,
        beside(lambda: backend.sample(prompts, None, n=2)) as found,
    ):
        while engine._loop._steps == begun:
            time.sleep(1e-3)
        engine.pause("abort")
        go_on.set()
        engine.resume()
    assert len(made) == 2 and same(found[0], expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_goes_on_though_requests_are_under_way(
    make_trainer: MakeTrainer, error: type[BaseException]
) -> None:
    """With them the engine does not sleep, which is no reason to hide what ended the run."""
    interrupted = False

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        nonlocal interrupted
        ids = trainer.processing_class(prompts)["input_ids"]
        handles = [trainer.vllm_generation.engine.submit(p, SamplingParams(max_tokens=100)) for p in ids]
        if not interrupted:
            interrupted = True
            raise error("in the middle")
        for handle in handles:
            handle.abort()
        _, completions, logprobs, _ = trainer.vllm_generation.generate(ids, None, 1)
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[x[0] for x in row] for row in logprobs]}

    trainer = make_trainer(more={"rollout_func": rollout}, vllm_enable_sleep_mode=True, **PLAIN)
    engine = attach(trainer)
    with pytest.raises(error, match="in the middle") as raised:
        trainer.train()
    assert any("the rollout engine is still awake" in note for note in raised.value.__notes__)
    assert "rollout/seconds" not in trainer._metrics["train"]  # no rollout was made
    del raised  # and with it the handles
    trainer.train()
    assert trainer.state.global_step == 2 and engine.is_sleeping
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < LOGPROB_TOLERANCE
    check_parity(trainer)


def test_an_interrupt_does_not_come_between_an_update_and_the_word_of_it(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a rank would ask for shards once more, while the others think they have them."""
    trainer = make_trainer(vllm_enable_sleep_mode=True, **PLAIN)
    engine = attach(trainer, config=EngineConfig(dtype="float64"))  # with a copy, which is dropped between rollouts
    update = engine.update_weights

    def interrupted() -> int:
        version = update()
        if version == 2:
            signal.raise_signal(signal.SIGINT)
        return version

    monkeypatch.setattr(engine, "update_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer._last_loaded_step == trainer.state.global_step == 1
    ask(trainer, [[3, 4, 5]])
    assert engine.weight_version == 2
    check_parity(trainer)


def test_a_rollout_is_not_lost_where_sleep_is_refused(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """A request of the user's outlives the rollout: training goes on, on its completions."""
    handles: list[Any] = []

    class Aborts(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            handles[0].abort()

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = trainer.processing_class(prompts)["input_ids"]
        _, completions, logprobs, _ = trainer.vllm_generation.generate(ids, None, 1)
        if not handles:
            handles.append(trainer.vllm_generation.engine.submit(ids[0], SamplingParams(max_tokens=100)))
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[x[0] for x in row] for row in logprobs]}

    trainer = make_trainer(more={"rollout_func": rollout}, vllm_enable_sleep_mode=True, **PLAIN)
    trainer.add_callback(Aborts())
    engine = attach(trainer)
    trainer.train()
    assert trainer.state.global_step == 2 and engine.is_sleeping
    assert caplog.text.count("cannot sleep while requests are under way") == 1
    assert len(logged(trainer, "rollout/seconds")) == 2


def test_an_error_is_not_hidden_by_one_of_falling_asleep(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        raise ZeroDivisionError("in the middle")

    trainer = make_trainer(more={"rollout_func": rollout}, vllm_enable_sleep_mode=True, **PLAIN)
    engine = attach(trainer)
    monkeypatch.setattr(engine, "sleep", lambda *_, **__: bytearray(2**62))  # MemoryError
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        trainer.train()


class Listens(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.heard.append("step")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.heard.append("end")


class Detaches(TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: Any, at: str) -> None:
        self._trainer = trainer
        setattr(self, f"on_{at}", self._detach)

    def _detach(self, *_: Any, **__: Any) -> None:
        if self._trainer.use_vllm:
            detach(self._trainer)


@pytest.mark.parametrize("first", [True, False], ids=["before-the-engines", "after-the-engines"])
@pytest.mark.parametrize("at", ["train_begin", "step_end", "train_end", "evaluate", "predict"])
def test_a_callback_that_detaches(make_trainer: MakeTrainer, at: str, first: bool) -> None:
    """The other callbacks miss nothing, and that of an engine that is not there does nothing."""
    trainer = make_trainer(vllm_enable_sleep_mode=True, **PLAIN)
    listens = Listens()
    if first:
        trainer.add_callback(Detaches(trainer, at))
    attach(trainer)
    if not first:
        trainer.add_callback(Detaches(trainer, at))
    trainer.add_callback(listens)
    trainer.train()
    assert listens.heard == ["step", "step", "end"]
    if at in ("evaluate", "predict"):
        getattr(trainer.callback_handler, f"on_{at}")(trainer.args, trainer.state, trainer.control, {})
    assert not trainer.use_vllm and not {"vllm_generation", "_last_loaded_step"} & set(vars(trainer))


@pytest.mark.parametrize("at", ["evaluate", "predict"])
def test_weights_are_taken_anew_after_an_evaluation(make_trainer: MakeTrainer, at: str) -> None:
    """It may have been of other weights, with no step between."""
    trainer = make_trainer(**PLAIN)
    attach(trainer)
    trainer._last_loaded_step = trainer.state.global_step
    getattr(trainer.callback_handler, f"on_{at}")(trainer.args, trainer.state, trainer.control, {})
    assert trainer._last_loaded_step != trainer.state.global_step
