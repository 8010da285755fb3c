"""Runs of TRL's AsyncGRPOTrainer on the engine that end early, go on from a checkpoint, or come after another."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures.thread import _threads_queues  # type: ignore[attr-defined]
from dataclasses import replace
from functools import wraps
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback
from trl_async_setup import (
    Make,
    a_folder,  # noqa: F401
    asked_of,
    async_trainers,  # noqa: F401
    count_a,
    look_often,
    record,
    threads,
)
from trl_setup import EOS, logged

pytest.importorskip("trl", minversion="1.16", reason="asynchronous GRPO needs TRL 1.16")

from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

from stoker.integrations import trl_async
from stoker.integrations.trl_async import AsyncRollouts
from stoker.rollout import EngineConfig, EngineStateError


def test_a_run_goes_on_where_its_checkpoint_stopped(make: Make, tmp_path: Path) -> None:
    trainer = make(count_a, save_strategy="steps", save_steps=2, max_steps=2)
    asked = asked_of(trainer.rollout_worker.attach(trainer))
    trainer.train()
    first = len(asked)
    trainer.train()  # a second run starts from the first prompt
    assert len(trainer.state.log_history) > 1 and not threads()
    trainer.rollout_worker.detach()
    state = tmp_path / "checkpoint-2" / "rollout_state.json"
    assert json.loads(state.read_text())["prompt_index"] > 0
    state.write_text(json.dumps({"prompt_index": 7, "model_version": 9}))  # of three prompts, so the second is next

    resumed = make(count_a, max_steps=3)
    later = asked_of(resumed.rollout_worker.attach(resumed))
    resumed.train(resume_from_checkpoint=str(state.parent))
    assert later[0][0] == resumed.processing_class("hg")["input_ids"]
    assert resumed.state.global_step == 3 and resumed.model_version == 11
    assert asked[first][0] == resumed.processing_class("abc")["input_ids"]
    seeds = [params.seed for _, params, _ in asked + later]  # nothing is drawn twice, in whichever run
    assert None not in seeds and len(set(seeds)) == len(seeds)


def test_the_loop_has_every_setting_of_the_trainer_that_there_is_one_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the names that TRL itself gives them in both places; but those that its server would have had."""
    settings: dict[str, Any] = {
        "num_generations": 2,
        "max_inflight_tasks": 5,
        "queue_maxsize": 77,
        "chat_template_kwargs": {"deep": True},
        "max_tool_calling_iterations": 3,
        "log_completions": True,
        "num_completions_to_print": 2,
        "fork_threshold_tokens": 9,
    }
    of_the_server = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "request_timeout"}
    trainer = make(count_a, **settings)
    engine = trainer.rollout_worker.attach(trainer)
    taken, given, begin = signature(_AsyncRolloutLoop).parameters, dict[str, Any](), _AsyncRolloutLoop.__init__
    assert taken.keys() & vars(trainer.args).keys() == settings.keys() | of_the_server
    assert all(settings[name] != taken[name].default for name in settings), "or this shows nothing"
    noted = wraps(begin)(lambda self, **o: (given.update(o), begin(self, **o))[1])
    monkeypatch.setattr(_AsyncRolloutLoop, "__init__", noted)
    loop = trl_async._loop(trainer.rollout_worker, trainer, engine)
    loop._steps.close()
    loop._loop.close()
    assert {name: given.get(name) for name in settings} == settings
    assert given["processing_class"] is trainer.processing_class and given["dataset"] is trainer.train_dataset
    assert given["eos_token_ids"] == trainer.eos_token_ids and given["reward_funcs"] == [count_a]


def test_a_completion_that_was_aborted_is_sampled_anew(make: Make) -> None:
    aborted: list[Any] = []

    class Aborts(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            under_way, end = [], time.monotonic() + 30
            while not under_way and time.monotonic() < end:
                under_way = [h for _, _, h in list(asked) if not h.done and 0 < h._requests[0].num_output < 40]
            engine.pause("abort")
            aborted.extend(h for h in under_way if h.result().completions[0].finish_reason == "abort")
            engine.resume()

    trainer = make(count_a, max_completion_length=60, queue_maxsize=1000, max_staleness=100)
    trainer.add_callback(Aborts())
    engine = trainer.rollout_worker.attach(trainer)
    asked, samples = asked_of(engine), record(trainer.rollout_worker)
    trainer.train()
    assert aborted and len(samples) >= 24
    for sample in samples:
        completion = sample.input_ids[sample.completion_mask == 1]
        assert completion[-1] == EOS or len(completion) == 60


def test_a_reward_function_that_raises_ends_training_with_its_error(make: Make) -> None:
    def broken(**_: Any) -> list[float]:
        raise ZeroDivisionError("no reward today")

    trainer = make(broken)
    engine = trainer.rollout_worker.attach(trainer)
    look_often(trainer)
    with pytest.raises(EngineStateError, match="the rollouts have failed: ZeroDivisionError: no reward today"):
        trainer.train()
    assert not threads() and not engine.core.has_work
    assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks


@pytest.mark.parametrize("error", [FloatingPointError, KeyboardInterrupt])
def test_an_optimizer_step_that_raises_leaves_nothing_paused(make: Make, error: type[BaseException]) -> None:
    trainer = make(count_a)
    engine = trainer.rollout_worker.attach(trainer)
    trainer.create_optimizer()

    def fail(*_: Any, **__: Any) -> None:
        raise error("the loss is gone")

    trainer.optimizer.step = fail
    with pytest.raises(error, match="the loss is gone"):
        trainer.train()
    assert not threads() and not engine.is_paused and not engine.core.has_work
    assert len(engine.generate_batch([[3, 4]])[0].completions[0].token_ids) > 0

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            pausing = threading.Thread(target=engine.pause)
            pausing.start()
            pausing.join()
            raise error("no more")

    trainer.add_callback(Ends())
    with pytest.raises(error, match="no more"):
        trainer.train()
    assert not threads() and engine.is_paused, "that pause is not the failed step's"
    engine.resume()


def test_a_step_of_the_engine_that_fails_stops_training_with_its_cause(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(count_a)
    engine = trainer.rollout_worker.attach(trainer)
    look_often(trainer)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine.core, "_launch", fail)
    with pytest.raises(EngineStateError, match=r"(?s)RuntimeError: out of luck.*submit it again"):
        trainer.train()
    assert not threads() and not engine.core.has_work


def test_weights_that_a_failed_step_spoilt_leave_nothing_paused(make: Make) -> None:
    """Though the thread asks for one more completion, which cannot run on them."""
    trainer = make(count_a)
    engine = trainer.rollout_worker.attach(trainer)
    trainer.create_optimizer()
    pause, late = engine.pause, []

    def then_ask(mode: Any, **whose: Any) -> None:
        pause(mode, **whose)
        if mode == "abort" and not late:
            asking = threading.Thread(target=lambda: late.append(engine.submit([3, 4])))
            asking.start()
            asking.join()

    def spoil(*_: Any, **__: Any) -> None:
        engine.pause = then_ask  # type: ignore[method-assign]
        trainer.model.half()
        raise FloatingPointError("the loss is gone")

    trainer.optimizer.step = spoil
    with pytest.raises(FloatingPointError, match="the loss is gone"):
        trainer.train()
    assert not threads() and not engine.is_paused and not engine.core.has_work
    assert late[0].result().completions[0].finish_reason == "abort"


def test_a_worker_that_stands_still_is_noticed(make: Make) -> None:
    rollouts = AsyncRollouts(count_a)
    rollouts._heartbeat.value = time.time() - 60
    with pytest.raises(EngineStateError, match="have stood still for 60 s"):
        rollouts._check_health(30)


def test_a_run_that_has_just_begun_does_not_stand_still(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its thread has done nothing yet, and the run before it ended long ago."""
    trainer = make(count_a)
    rollouts = trainer.rollout_worker
    rollouts.attach(trainer)
    idle = SimpleNamespace(run=lambda: None, request_stop=lambda: None)
    monkeypatch.setattr(trl_async, "_loop", lambda *_: idle)
    rollouts.start()
    rollouts.check_health(60.0)
    rollouts.stop()


def test_a_second_run_knows_nothing_of_the_first(make: Make) -> None:
    epochs = {"max_steps": -1, "num_train_epochs": 2, "token_budget": 0, "per_device_train_batch_size": 4}
    trainer = make(count_a, **epochs)  # of three prompts, and one a step
    rollouts = trainer.rollout_worker
    rollouts.attach(trainer)
    samples = record(rollouts)
    for _ in range(2):
        trainer.train()
        assert trainer.state.global_step >= 5 and 77 not in trainer._trained_groups
        rollouts.rollout_buffer.queue.clear()
        late = replace(samples[0], group_id=77, model_version=trainer.model_version)
        rollouts.rollout_buffer.put(late)
        rollouts.metrics_queue.put({"late": 1.0})
    assert not logged(trainer, "late") and min(logged(trainer, "batch/groups_per_step")) >= 0


def test_the_error_of_a_run_is_its_own(make: Make) -> None:
    def broken(**_: Any) -> list[float]:
        raise ZeroDivisionError("of the second run")

    trainer = make(broken)
    rollouts = trainer.rollout_worker
    rollouts.attach(trainer)
    rollouts._failures.put(("ValueError", "of the first run, which ended before anybody looked", ""))
    rollouts._failed.set()
    look_often(trainer)
    with pytest.raises(EngineStateError, match="ZeroDivisionError: of the second run"):
        trainer.train()


def test_a_reward_function_that_exits_ends_training_and_holds_nothing(make: Make) -> None:
    status = [3]

    def reward(completions: list[Any], **_: Any) -> list[float]:
        if status:
            sys.exit(status.pop())
        return count_a(completions)

    trainer = make(reward, max_completion_length=64)  # others are under way then
    engine = trainer.rollout_worker.attach(trainer)
    look_often(trainer)
    with pytest.raises(EngineStateError, match="the rollouts have failed: SystemExit: 3"):
        trainer.train()
    assert not threads() and not engine.core.has_work
    trainer.train()
    assert trainer.state.global_step == 3
    trainer.rollout_worker.check_health(60.0)  # knows nothing of the failure of a run before it


@pytest.mark.parametrize("where", ["tool", "reward"])
def test_a_future_that_was_cancelled_ends_training_at_once(make: Make, where: str) -> None:
    """It comes as the error by which asyncio ends tasks, of which nobody is told."""

    def wait_for_it() -> str:
        future: Future[str] = Future()
        future.cancel()
        return future.result()

    def look_up(key: str) -> str:
        """Look a key up.

        Args:
            key: what to look up.
        """
        return wait_for_it()

    def reward(completions: list[Any], **_: Any) -> list[float]:
        wait_for_it()
        return count_a(completions)

    tools = [look_up] if where == "tool" else None
    rollouts = AsyncRollouts(reward, tools=tools, config=EngineConfig(kv_cache_memory="4MiB"))
    trainer = make(reward, rollouts, max_tool_calling_iterations=1, heartbeat_stale_after_s=20.0)
    engine = rollouts.attach(trainer)
    assert engine is not None
    look_often(trainer)
    of = "_execute_tool_calls" if where == "tool" else "_score_group"
    with pytest.raises(EngineStateError, match=rf"(?s)have failed: .* reward function raised CancelledError.*in {of}"):
        trainer.train()
    assert not threads() and not engine.core.has_work


def waited_for_at_exit() -> set[threading.Thread]:
    """Threads whose end a process waits for. Those of a ``ThreadPoolExecutor`` are, even as daemons."""
    return {t for t in threading.enumerate() if not t.daemon or t in _threads_queues}


@pytest.mark.parametrize("where", ["tool", "reward"])
def test_a_run_whose_tool_hangs_and_the_one_after_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """What a run has come to is not lost for a function whose answer nobody wants any more, nor does its process stay for it."""
    hangs, goes_on = threading.Event(), threading.Event()

    def look_up(key: str) -> str:
        """Look a key up.

        Args:
            key: what to look up.
        """
        hang()
        return "gggg"

    class UntilItHangs(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            hangs.wait(60)

    def reward(completions: list[Any], **_: Any) -> list[float]:
        if where == "reward":
            hang()
        return count_a(completions)

    def hang() -> None:
        if trainer.state.global_step:
            hangs.set()
            goes_on.wait(60)

    waited_for = waited_for_at_exit()
    monkeypatch.setattr(trl_async, "_STOP_S", 0.2)
    tools = [look_up] if where == "tool" else None
    rollouts = AsyncRollouts(reward, tools=tools, config=EngineConfig(kv_cache_memory="4MiB"))
    trainer = make(reward, rollouts, max_steps=1, max_tool_calling_iterations=1)
    trainer.add_callback(UntilItHangs())
    rollouts.attach(trainer)
    with caplog.at_level(logging.WARNING, "stoker"):
        trainer.train()
    assert trainer.state.global_step == 1 and "has not returned within 0 s of the end of training" in caplog.text
    assert waited_for_at_exit() == waited_for
    with pytest.raises(EngineStateError, match="has not returned within 0 s"):
        trainer.train()
    with pytest.raises(EngineStateError, match="has not returned within 0 s"):
        rollouts.detach()
    goes_on.set()
    monkeypatch.setattr(trl_async, "_STOP_S", 30.0)
    trainer.train()
    assert trainer.state.global_step == 1 and not threads()


@pytest.mark.parametrize("at", ["Thread", "request_stop"])
def test_an_interrupt_where_the_thread_begins_or_ends(make: Make, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    trainer = make(count_a)
    engine = trainer.rollout_worker.attach(trainer)
    where = trl_async.threading if at == "Thread" else trl_async.EngineLoop
    before, interrupted = getattr(where, at), []

    def interrupt(*given: Any, **options: Any) -> Any:
        result = before(*given, **options)
        if at == "request_stop" or options.get("name") == "stoker-async-rollouts":
            interrupted.append(at)
            signal.raise_signal(signal.SIGINT)
        return result

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(where, at, interrupt)
        trainer.train()
    assert interrupted
    if trainer.rollout_worker._thread is not None:  # it has been told to end, and was not waited for
        trainer.rollout_worker._thread.join(30)
    assert not threads() and not engine.core.has_work
    trainer.train()
    assert trainer.state.global_step == 3 and not threads()
