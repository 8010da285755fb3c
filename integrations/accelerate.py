"""accelerate: rollouts for any training loop that has an ``Accelerator``.

    from stoker.integrations.accelerate import AcceleratedEngine, SamplingParams

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    engine = AcceleratedEngine(accelerator, model, tokenizer=tokenizer)
    for prompts in loader:
        batch = engine.generate_batch(prompts, SamplingParams(n=8))  # instead of model.generate
        ...

The loop need not mention weights: the first rollout after an optimizer step or ``load_state`` takes them anew. Where FSDP or
ZeRO-3 shard them, that rollout gathers them, so every process has to make it. No other rollout communicates, unless the config
has several processes run the model together (``tensor_parallel_size``): processes may generate different numbers of prompts, at
different times. Autocast is off in a rollout: under
``mixed_precision="bf16"`` an engine on a GPU samples in bf16, from a copy of the parameters that stay in fp32 (of DeepSpeed's, which
are in bf16, from themselves).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from stoker.integrations.mixed_precision import as_the_forward
from stoker.integrations.trainer_memory import between_rollouts, sleep_after, wake_weights
from stoker.kernels.errors import InvalidConfigError
from stoker.kernels.interrupts import uninterrupted
from stoker.rollout import LIVE, EngineConfig, RolloutBatch, RolloutEngine, SamplingParams
from stoker.rollout.adapters import AdapterChoice
from stoker.rollout.assembly import check_config
from stoker.rollout.prompts import Prompts
from stoker.weight_sync.receiving import NewWeights
from stoker.weight_sync.shards import is_sharded

__all__ = ["AcceleratedEngine", "EngineConfig", "SamplingParams"]  # all that a loop needs can be imported from here


class AcceleratedEngine:
    """A ``RolloutEngine`` that follows the steps, processes and trackers of an ``Accelerator``.

    model: the model, best as ``accelerator.prepare`` returned it. config: the engine's settings; the process index is
    added to its seed, so that processes that share a prompt sample differently. (Those that compute one batch together, by
    tensor or context parallelism, count as one and sample the same.) ``tensor_parallel_size`` of as many has them run the
    model together, too. sleep: give the KV cache's memory back
    after every rollout, for backward and optimizer step, and take it again for the next; copies of weights that the engine
    has leave the device, too. Where that is not possible, because other requests are under way, a warning says so.

    ``engine`` is the engine itself, for all that is not a rollout. Raises ``InvalidConfigError`` where the accelerator
    is none or works on another device than the model, and what ``RolloutEngine`` raises.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        *,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        sleep: bool = False,
    ) -> None:
        if not isinstance(accelerator, Accelerator):
            raise InvalidConfigError(f"accelerator is a {type(accelerator).__name__}: give the loop's Accelerator")
        if not isinstance(model, nn.Module):
            raise InvalidConfigError(f"model is a {type(model).__name__}: give what accelerator.prepare(model) returns")
        device = next(model.parameters()).device
        if device.type != accelerator.device.type and not is_sharded(model):  # parts may wait in host memory
            raise InvalidConfigError(
                f"the model is on {device} and the accelerator works on {accelerator.device}: give the model that "
                "accelerator.prepare(model) returns"
            )
        check_config(config)
        config = config or EngineConfig()
        together = _together(accelerator)
        if config.tensor_parallel_size > 1 and together not in (1, config.tensor_parallel_size):
            raise InvalidConfigError(
                f"{together} processes compute each batch together (tp_size, cp_size): give tensor_parallel_size={together}, or 1"
            )
        config = replace(config, seed=config.seed + _share(accelerator))
        config = as_the_forward(config, accelerator, {p.dtype for p in model.parameters()})
        engine = _FollowedEngine(model, config=config, tokenizer=tokenizer)
        engine.taken = weakref.WeakMethod(self._weights_taken)
        engine._ranks.same_prompts = config.tensor_parallel_size == together > 1
        self.engine: RolloutEngine = engine
        self._accelerator = accelerator
        self._model = model
        self._sleep = sleep
        try:
            self._weights_taken()
            self._stop_watching = weakref.finalize(self, _watch(weakref.ref(self), accelerator))
            self._sleep_if_told()
        except BaseException:  # an interrupt, or no host memory for what sleeps: nobody has the engine, to close it
            self.engine.close()
            raise

    def generate_batch(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        attention_mask: Tensor | None = None,
        adapter: AdapterChoice | Sequence[AdapterChoice] = LIVE,
        progress_bar: bool = False,
        step: int | None = None,
    ) -> RolloutBatch:
        """``RolloutEngine.generate_batch`` on the weights as the last optimizer step left them.

        prompts, sampling_params, attention_mask, adapter, and what is raised: as there. The progress bar shows on the main
        process only. accelerate's trackers get the main process's ``rollout/seconds``, ``rollout/tokens_per_second``,
        ``rollout/mean_length`` (of completions, in tokens) and ``rollout/weight_version``; step: the step they are
        logged under. Without one, W&B has them in the entry that the loop logs next.
        """
        with sleep_after(self._sleep_if_told):
            if self._changed or self._deepspeed_steps() != self._steps_seen:
                with uninterrupted():  # or this process might miss an update that the others make
                    if self.engine.is_sleeping:  # weights only: the KV cache is not there while an update takes memory
                        wake_weights(self.engine)
                    self.engine.update_weights()
            if self.engine.is_sleeping:
                self.engine.wake_up()
            start = time.perf_counter()
            batch = self.engine.generate_batch(
                prompts,
                sampling_params,
                attention_mask=attention_mask,
                adapter=adapter,
                progress_bar=progress_bar and self._accelerator.is_main_process,
            )
            seconds = time.perf_counter() - start
        lengths = [len(c.token_ids) for output in batch for c in output.completions]
        metrics = {
            "rollout/seconds": seconds,
            "rollout/tokens_per_second": sum(lengths) / seconds,
            "rollout/mean_length": sum(lengths) / max(1, len(lengths)),
            "rollout/weight_version": self.engine.weight_version,
        }
        # W&B begins a new step at every entry without one, and would then drop what the loop logs for earlier steps.
        self._accelerator.log(metrics, step=step, log_kwargs={} if step is not None else {"wandb": {"commit": False}})
        return batch

    def _sleep_if_told(self) -> None:
        if self._sleep:
            self.engine.sleep(tags=between_rollouts(self.engine))

    def close(self) -> None:
        """Close the engine, and stop watching optimizers. Also a context manager: ``with AcceleratedEngine(...):``."""
        self._stop_watching()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _weights_taken(self) -> None:
        # The parameters as an optimizer knows them: here the model is not gathered, as FSDP2 may leave it after a forward,
        # with other tensors in their place. No weak references: ``to`` could not swap tensors that have some.
        self._parameters = list(self._model.parameters())
        self._changed, self._steps_seen = False, self._deepspeed_steps()

    def _notice_step(self, optimizer: torch.optim.Optimizer) -> None:
        ours = {id(parameter) for parameter in (*self._model.parameters(), *self._parameters)}
        if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            self._changed = True

    def _deepspeed_steps(self) -> int:
        # DeepSpeed's optimizers hold flattened copies of the parameters, which do not tell whose they are.
        trainer = _deepspeed_engine(self._accelerator, self._model)
        return trainer.global_steps - trainer.skipped_steps if trainer is not None else 0


class _FollowedEngine(RolloutEngine):
    """Tells when the model's weights were taken: a loop may also call ``update_weights`` itself."""

    taken: weakref.WeakMethod[Callable[[], None]]

    def update_weights(self, weights: NewWeights | None = None, *, version: int | None = None) -> int:
        if weights is not None:
            return super().update_weights(weights, version=version)
        with uninterrupted():  # or this process might take them once more, when no other one does
            version = super().update_weights(version=version)
            if (taken := self.taken()) is not None:
                taken()
            return version


def _share(accelerator: Accelerator) -> int:
    """The number of the process's share of the data, as accelerate's loaders hand it out."""
    share: int = accelerator.process_index // _together(accelerator)
    return share


def _together(accelerator: Accelerator) -> int:
    """How many processes compute one batch."""
    parallel = accelerator.parallelism_config
    return 1 if parallel is None else int(parallel.tp_size * parallel.cp_size)


def _deepspeed_engine(accelerator: Any, model: nn.Module) -> Any:
    """DeepSpeed's engine that trains the model, which is that engine, or is inside it. None without DeepSpeed."""
    if hasattr(model, "global_steps"):
        return model
    wrapper = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if wrapper is None:
        return None
    trained = {id(parameter) for parameter in wrapper.engine.parameters()}
    return wrapper.engine if any(id(p) in trained for p in model.parameters()) else None


def _watch(engine: weakref.ref[AcceleratedEngine], accelerator: Accelerator) -> Callable[[], None]:
    """Tell the engine of every step of any optimizer, also of those made later, and of checkpoints that are loaded.

    Returns a function that ends this.
    """

    # accelerate calls an optimizer's step when accumulation is complete and the gradients are finite, not before.
    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        watching = engine()
        if watching is not None:
            watching._notice_step(optimizer)

    def before_load(models: Any, folder: str) -> None:
        watching = engine()
        if watching is not None:
            watching._changed = True

    handles = register_optimizer_step_post_hook(after_step), accelerator.register_load_state_pre_hook(before_load)

    def stop() -> None:
        for handle in handles:
            handle.remove()

    return stop
