"""TRL's asynchronous GRPO and distillation with the engine in the trainer's own process, on the trainer's own weights.

    from stoker.integrations.trl_async import AsyncGRPOTrainer  # in place of TRL's; or AsyncDistillationTrainer

    trainer = AsyncGRPOTrainer(...)  # as TRL's
    trainer.train()

TRL's rollout loop (conversations, tools, environments, scoring) runs in a thread and asks the engine where it would ask
a server; the trainer's forward and backward run beside it. Nothing is transferred: between the pause before an
optimizer step and the resume after it the engine takes the new weights, and completions under way go on with them,
every token with the log-probability it was sampled with. Reward functions, tools and environments need not be
picklable, and may use the trainer's device. In distillation the engine is the student; its teachers stay servers.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from inspect import signature
from itertools import count
from types import SimpleNamespace
from typing import Any

from transformers import TrainerCallback

from stoker.integrations.mixed_precision import as_the_forward
from stoker.integrations.trl_callbacks import remove_callback
from stoker.integrations.trl_checks import check_sampling, check_version, kinds_of
from stoker.integrations.trl_sampling import live_model
from stoker.kernels.errors import EngineStateError, InvalidConfigError
from stoker.kernels.interrupts import uninterrupted
from stoker.rollout import EngineConfig, RolloutEngine
from stoker.rollout.config import check_alone

check_version("asynchronous training")  # or the next lines would fail without saying why
from trl.experimental import async_distillation, async_grpo  # noqa: E402
from trl.experimental.async_distillation import async_rollout_worker as distillation_worker  # noqa: E402
from trl.experimental.async_grpo import async_rollout_worker as grpo_worker  # noqa: E402

from stoker.integrations.trl_async_loop import EngineLoop, GRPOLoop  # noqa: E402
from stoker.integrations.trl_async_teachers import DistillationLoop  # noqa: E402

_log = logging.getLogger("stoker")
_STOP_S = 30.0  # to wait for a reward function or tool that is running
_LOOPS = {"AsyncGRPOTrainer": GRPOLoop, "AsyncDistillationTrainer": DistillationLoop}
_SOURCES = ("reward_funcs", "tools", "environment_factory")


class _OnEngine:
    """Gives one of TRL's asynchronous trainers, the class after it, an engine on its own model in place of a server."""

    def __init__(
        self, *args: Any, engine_config: EngineConfig | None = None, recompute: bool = False, **kwargs: Any
    ) -> None:
        build: Callable[..., None] = super().__init__
        given = signature(build).bind(*args, **kwargs).arguments
        if taken := [name for name in ("rollout_worker", "weight_transfer") if name in given]:
            raise InvalidConfigError(
                f"the engine takes the place of {taken[0]}: leave it out, or use TRL's own trainer"
            )
        sources = {name: given[name] for name in _SOURCES if name in given}
        self.rollouts = AsyncRollouts(**sources, config=engine_config, recompute=recompute)
        build(*args, **kwargs, rollout_worker=self.rollouts, weight_transfer=self.rollouts)
        self.rollouts.attach(self)


class AsyncGRPOTrainer(_OnEngine, async_grpo.AsyncGRPOTrainer):  # type: ignore[misc]
    """TRL's ``AsyncGRPOTrainer`` with an engine on its own model in place of a server. It takes the same arguments, and these:

    engine_config: the engine's settings; by default its seed is ``args.seed``. recompute: compute the KV of completions
    under way again after each optimizer step, instead of continuing with that of older weights.

    ``trainer.rollouts`` are the ``AsyncRollouts``, with the engine; ``trainer.rollouts.detach()`` closes it. Raises a
    ``StokerError`` as ``AsyncRollouts.attach`` does, ``InvalidConfigError`` also where a rollout worker is given.
    """


class AsyncDistillationTrainer(_OnEngine, async_distillation.AsyncDistillationTrainer):  # type: ignore[misc]
    """TRL's ``AsyncDistillationTrainer`` with an engine on its own model, the student, in place of the student's server.

    It takes the same arguments, and those that ``AsyncGRPOTrainer`` takes here; ``trainer.rollouts`` too are as there. The
    teachers are servers, at ``args.teacher_server_urls``. One that refuses a request, or that cannot be reached for
    ``args.vllm_server_timeout`` seconds, ends training with an ``EngineStateError`` that has its answer.
    """


class AsyncRollouts(grpo_worker.AsyncRolloutWorker, distillation_worker.AsyncRolloutWorker):  # type: ignore[misc]
    """Both the ``rollout_worker`` and the ``weight_transfer`` of an ``AsyncGRPOTrainer`` or ``AsyncDistillationTrainer``.

    It uses nothing of TRL's own workers, which start a process. It derives from these classes because for such a worker the
    trainer saves its place among the prompts in checkpoints, by ``_loop_kwargs``, and goes on there.

    reward_funcs, tools, environment_factory: as given to the trainer, which does not keep them; none for distillation. config
    and recompute: as ``AsyncGRPOTrainer`` takes them.
    """

    def __init__(
        self,
        reward_funcs: Callable[..., Any] | list[Callable[..., Any]] | None = None,
        *,
        tools: list[Callable[..., Any]] | None = None,
        environment_factory: Any = None,
        config: EngineConfig | None = None,
        recompute: bool = False,
    ) -> None:
        several = reward_funcs if isinstance(reward_funcs, list) else [] if reward_funcs is None else [reward_funcs]
        self._sources = dict(zip(_SOURCES, (several, tools, environment_factory), strict=True))
        self._config = config
        self._recompute = recompute
        self._model_version_value = SimpleNamespace(value=0)
        self._loop_kwargs = {"dataset_start_index": 0}
        self._heartbeat = SimpleNamespace(value=0.0)
        self._failures: queue.Queue[tuple[str, str, str]] = queue.Queue(maxsize=1)
        self._failed = threading.Event()
        self._runs = count()
        self._trainer: Any = None
        self._callback: TrainerCallback | None = None
        self._gave_budget = False
        self._has_paused = False  # for an optimizer step that has not come to its end
        self._loop: EngineLoop | None = None
        self._thread: threading.Thread | None = None
        self.engine: RolloutEngine | None = None
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue(maxsize=4096)

    def attach(self, trainer: Any) -> RolloutEngine | None:
        """Build the engine over the trainer's model. Every process calls it; the main one generates and gets it.

        Raises a ``StokerError`` before anything is changed: ``InvalidConfigError`` for another kind of trainer, one
        that was not given this object, or one that shards its model; ``InvalidRequestError`` for a sampling setting that
        cannot be; ``EngineStateError`` where it is attached already; ``UnsupportedModelError`` for a model the engine does
        not run.
        """
        kind = _kind_of(trainer)
        if kind is None:
            raise InvalidConfigError(
                f"AsyncRollouts is for TRL's {' and '.join(_LOOPS)}, and this is a {type(trainer).__name__}: use "
                "stoker.integrations.trl.attach"
            )
        distils = _LOOPS[kind] is DistillationLoop
        if distils and any(self._sources.values()):
            raise InvalidConfigError(f"{kind} has no reward functions, tools or environments: give AsyncRollouts none")
        if self._trainer is not None:
            raise EngineStateError("these rollouts are attached already: call detach() first")
        main = trainer.accelerator.is_main_process
        if main and not (trainer.rollout_worker is self and trainer.weight_transfer is self):
            raise InvalidConfigError(
                "the trainer was built without these rollouts: give it rollout_worker=rollouts and weight_transfer=rollouts"
            )
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise InvalidConfigError(
                "the trainer shards its model, and a process that generates by itself needs it whole: use DDP, or "
                + kind.removeprefix("Async")
            )
        # Or an invalid setting would show only when training begins.
        check_sampling(trainer, "teacher_temperature" if distils else "temperature")
        args = trainer.args
        if main:
            model, config = live_model(trainer), self._config or EngineConfig(seed=args.seed)
            check_alone(config, "asynchronous rollouts")
            config = as_the_forward(config, trainer.accelerator, {p.dtype for p in model.parameters()})
            self.engine = RolloutEngine(model, config=config, tokenizer=trainer.processing_class)
        self._trainer = trainer
        try:
            if self.engine is not None:
                if args.token_budget is None:  # or the trainer would ask a server
                    args.token_budget, self._gave_budget = self.engine.max_model_len, True
                self.rollout_buffer.maxsize = args.queue_maxsize
                self._callback = _AroundOptimizerSteps(self, self.engine, self._recompute)
                trainer.add_callback(self._callback)
            # TRL's own method would merge adapters into weights that the engine is reading.
            trainer._sync_weight_merged = self._count_version
            return self.engine
        except BaseException:  # an interrupt, say
            self._leave()
            raise

    def detach(self) -> None:
        """Close the engine, and undo ``attach``. The trainer needs another rollout worker before it can train again."""
        if self._trainer is None:
            raise EngineStateError("these rollouts are attached to no trainer")
        self._end_thread()
        self._leave()

    @uninterrupted()
    def _leave(self) -> None:
        vars(self._trainer).pop("_sync_weight_merged", None)
        if self._gave_budget:  # another engine may have another length
            self._trainer.args.token_budget, self._gave_budget = None, False
        if self._callback is not None:
            remove_callback(self._trainer, self._callback)
        if self.engine is not None:
            self.engine.close()
        self._trainer = self._callback = self.engine = None

    def _count_version(self, _: float) -> tuple[float, float, float]:
        trainer, now = self._trainer, time.time()
        if trainer.accelerator.is_main_process:
            trainer.model_version += 1
            self.update_model_version(trainer.model_version)
        return now, now, now

    # -- TRL's RolloutWorkerProtocol -----------------------------------------------------------------------------

    def start(self) -> None:
        """Produce rollouts in a thread. Called by the trainer when training begins."""
        if self._loop is not None or self.engine is None:
            return
        self._end_thread()  # if the last run could not end it
        self._forget()
        self.engine.update_weights()  # they may come from a checkpoint
        self._heartbeat.value = time.time()
        loop = _loop(self, self._trainer, self.engine)
        with uninterrupted():  # or nothing could end a thread that was not started, or a loop without a thread
            self._loop = loop
            self._thread = threading.Thread(target=loop.run, name="stoker-async-rollouts", daemon=True)
            self._thread.start()

    def _forget(self) -> None:
        """Drop what an earlier run left: samples, metrics, an error, the prompts it trained on."""
        for left in (self.rollout_buffer, self.metrics_queue, self._failures):
            while not left.empty():
                left.get_nowait()
        self._failed.clear()
        if hasattr(self._trainer, "_trained_groups"):  # a trainer that distils forgets by itself
            self._trainer._trained_groups.clear()
            self._trainer._last_groups_trained = 0

    def stop(self) -> None:
        """End the thread; completions under way are dropped.

        Called by the trainer when training ends in any way, so it raises nothing if a tool takes long.
        """
        try:
            self._end_thread()
        except EngineStateError as slow:
            _log.warning("%s: it goes on by itself, and the next run waits for it", slow)

    def _end_thread(self) -> None:
        """Raise ``EngineStateError`` where a user's function keeps it busy for ``_STOP_S``."""
        if self._thread is None:
            return
        if self._loop is not None:
            with uninterrupted():  # or ``start`` would take the loop for one that runs
                self._loop.request_stop()
                self._loop = None
        end = time.monotonic() + _STOP_S
        while self._has_paused and self.engine is not None and self.engine.is_paused:  # since an optimizer step failed
            self.engine.pause("abort", owner=self)  # nothing may run on the weights it has left
            self._thread.join(0.1)  # the thread may still submit requests
            if not self._thread.is_alive() or time.monotonic() > end:
                self.engine.pause("abort", owner=self)
                self.engine.resume(owner=self)
                self._has_paused = False
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            raise EngineStateError(
                f"a reward function or tool has not returned within {_STOP_S:.0f} s of the end of training"
            )
        self._thread = None

    def update_model_version(self, model_version: int) -> None:
        """Tag new groups with this version."""
        self._model_version_value.value = model_version

    @property
    def check_health(self) -> Callable[[float], None]:
        """Called with seconds, while the trainer waits for samples: ``_check_health``.

        Raises ``EngineStateError`` before ``attach``. (The trainer reads this attribute before it looks for a server.)
        """
        if self._trainer is None:
            raise EngineStateError("the rollouts have no engine: call attach(trainer) before trainer.train()")
        return self._check_health

    def _check_health(self, stale_after_s: float) -> None:
        """Raise ``EngineStateError`` with the cause, if the thread has failed, or shown no sign of life for so long."""
        if self._failed.is_set():
            try:
                name, message, trace = self._failures.get_nowait()
            except queue.Empty:
                raise EngineStateError("the rollouts have failed") from None
            raise EngineStateError(f"the rollouts have failed: {name}: {message}\n{trace}")
        age = time.time() - self._heartbeat.value
        if age > stale_after_s:
            raise EngineStateError(
                f"the rollouts have stood still for {age:.0f} s: a reward function, a tool or a teacher's server hangs"
            )

    # -- TRL's WeightTransferProtocol: there is nothing to transfer ------------------------------------------------

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[Any]) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class _AroundOptimizerSteps(TrainerCallback):  # type: ignore[misc]
    """Pauses the engine around each optimizer step, and has it take the new weights after it."""

    def __init__(self, rollouts: AsyncRollouts, engine: RolloutEngine, recompute: bool) -> None:
        self._rollouts = rollouts
        self._engine = engine
        self._recompute = recompute

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._rollouts.start()  # TRL does so at a trainer's first run only

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._rollouts._has_paused = True
        self._engine.pause("keep", owner=self._rollouts)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._engine.update_weights()
        self._engine.resume(recompute=self._recompute, owner=self._rollouts)
        self._rollouts._has_paused = False


def _kind_of(trainer: Any) -> str | None:
    return next((name for name in kinds_of(trainer) if name in _LOOPS), None)


def _loop(rollouts: AsyncRollouts, trainer: Any, engine: RolloutEngine) -> EngineLoop:
    """Called by the trainer's own thread, when a run begins."""
    loop: type[EngineLoop] = _LOOPS[str(_kind_of(trainer))]
    return loop(
        engine,
        trainer,
        # So that it samples neither what an earlier run did nor, after a checkpoint, what this one did before.
        f"{engine.config.seed}:{next(rollouts._runs)}:{trainer.state.global_step}",
        rollout_buffer=rollouts.rollout_buffer,
        model_version_value=rollouts._model_version_value,
        heartbeat_value=rollouts._heartbeat,
        failed_event=rollouts._failed,
        exception_info_queue=rollouts._failures,
        metrics_queue=rollouts.metrics_queue,
        **rollouts._loop_kwargs,
        **({} if loop is DistillationLoop else rollouts._sources),
    )
