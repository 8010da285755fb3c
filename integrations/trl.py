"""TRL: let a trainer that generates its own completions sample them on a ``RolloutEngine``.

    trainer = GRPOTrainer(model=model, ...)  # use_vllm=False, the default
    attach(trainer)
    trainer.train()

TRL has no registry of generation backends. Most of its trainers ask ``trainer.vllm_generation`` for completions while
``trainer.use_vllm`` is set, and want two methods of it: ``sync_weights`` and ``generate``. ``OnlineDPOTrainer`` calls
its own ``_generate``. ``attach`` puts an object with these methods there, wraps the function that makes all turns of a
rollout, and patches nothing else. For GRPO this also turns on what TRL does with a backend that returns log-probabilities:
the importance-sampling correction, and the ``sampling/`` metrics, which compare the engine's log-probabilities with the
trainer's. The two agree best in one dtype. Over fp32 weights TRL's default ``bf16=True`` has the trainer's forward multiply in
bf16; on a GPU the engine then samples in bf16, from a copy, and the correction covers what they still differ by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from stoker.integrations.trainer_memory import between_rollouts, sleep_after, wake_weights
from stoker.integrations.trl_callbacks import Listener, remove_callback
from stoker.integrations.trl_checks import check_rollouts, check_trainer, check_version
from stoker.integrations.trl_engine_config import resolve_auto
from stoker.integrations.trl_images import with_images
from stoker.integrations.trl_metrics import RolloutMetrics
from stoker.integrations.trl_sampling import live_model, sampling_params, tokenizer_of
from stoker.kernels.errors import EngineStateError, UnsupportedModelError, WeightsMovedError
from stoker.kernels.interrupts import uninterrupted
from stoker.rollout import EngineConfig, RolloutBatch, RolloutEngine, SamplingParams
from stoker.rollout.assembly import check_config

_ABSENT = object()


def attach(trainer: Any, *, config: EngineConfig | None = None) -> RolloutEngine:
    """Make ``trainer`` generate on a new engine over its live model, in training and in evaluation.

    trainer: a GRPO, RLOO, Distillation, SDFT, SDPO, GOLD, IWOPD or OnlineDPO trainer (or of a class derived from one) built
    with ``use_vllm=False``. Sampling settings are read from it (and from ``args.generation_kwargs``, which win) at every
    generation. With ``args.vllm_enable_sleep_mode`` the engine gives its KV cache back, and copies of weights that
    it has, between generations (for backward and optimizer step), but not between the turns of one. config: the
    engine's settings; by default its seed is ``args.seed``. The process index is added to the seed, so that processes that
    share a prompt sample differently.

    Returns the engine; it belongs to the trainer until ``detach``. Raises a ``StokerError`` before anything is changed (and
    after any other exception, Ctrl-C for example, the trainer is as it was):
    ``InvalidConfigError`` for TRL's version, the kind of trainer or a setting that cannot work, ``EngineStateError``
    where an engine is attached already, ``UnsupportedModelError`` for a model the engine does not run and for GOLD on images,
    ``InvalidRequestError`` for sampling settings that no completion could follow.
    """
    if isinstance(getattr(trainer, "vllm_generation", None), _EngineBackend):
        raise EngineStateError("an engine is attached to this trainer already: call detach(trainer) first")
    backend = _BACKENDS[check_trainer(trainer, _BACKENDS)](trainer, config)
    try:
        for owner, name, value in backend.seam():
            backend.before.append((owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, value)
        trainer.add_callback(backend.callback)
        if hasattr(trainer, "_buffered_inputs"):  # completions made without the engine have no log-probabilities
            trainer._buffered_inputs = None
        return backend.engine
    except BaseException:  # an interrupt, say: a trainer that is half attached could be neither used nor detached
        backend.leave()
        raise


def detach(trainer: Any) -> None:
    """Undo ``attach``: the trainer is as it was before and generates by itself again; the engine is closed.

    Raises ``EngineStateError`` where no engine is attached.
    """
    backend = getattr(trainer, "vllm_generation", None)
    if not isinstance(backend, _EngineBackend):
        raise EngineStateError("no engine is attached to this trainer")
    backend.leave()


def _was_aborted(batch: RolloutBatch) -> bool:
    return any(c.finish_reason == "abort" for output in batch for c in output.completions)


class _Trained(nn.Module):
    """A trainer's model with the wrappers it has by now: only the wrapper knows what FSDP1 does with parameters."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._orig_mod: Any  # the name that torch.compile's wrapper uses, so that ``unwrap`` finds it
        self.look(trainer)

    def look(self, trainer: Any) -> None:
        self._orig_mod = trainer.model


class _EngineBackend:
    """An engine over a trainer's live model. There is a subclass for each way in which trainers ask for completions."""

    last_sync = "_last_loaded_step"  # where the trainer keeps the step at which weights were last taken

    def __init__(self, trainer: Any, config: EngineConfig | None) -> None:
        check_config(config)
        self._trainer = trainer
        self._model = live_model(trainer)
        self.callback = Listener(self)
        self.before: list[tuple[Any, str, Any]] = []  # what ``detach`` puts back: owner, attribute, value
        self._turns_to_come = False
        self._to_sleep = False  # after these turns
        self._training = self._dropped = False  # dropped: copies of weights that slept
        self._longest: int | None = None  # the most tokens of a prompt with its turns; known from the first turn on
        self._metrics = RolloutMetrics()
        config = config or EngineConfig(seed=trainer.args.seed)
        check_rollouts(trainer, config)
        # Of ranks that run the model together the engine takes the first one's: a prompt that several have must differ by this.
        self._seed = config.seed + trainer.accelerator.process_index
        config = replace(config, seed=self._seed)
        self._trained = _Trained(trainer)
        config = resolve_auto(trainer, self._trained, config)
        self.engine = RolloutEngine(self._trained, config=config, tokenizer=tokenizer_of(trainer))

    def seam(self) -> list[tuple[Any, str, Any]]:
        """Owner, attribute and value of everything that is set on the trainer while the engine is attached."""
        return [
            (self._trainer, "vllm_generation", self),
            (self._trainer, "use_vllm", True),
            (self._trainer, self.last_sync, -1),  # no step: weights are taken before the first generation
        ]

    @uninterrupted()
    def leave(self) -> None:
        """Put back all that was set, and close the engine."""
        for owner, name, value in self.before:
            if value is not _ABSENT:
                setattr(owner, name, value)
            elif name in vars(owner):  # else ``attach`` did not get that far
                delattr(owner, name)
        remove_callback(self._trainer, self.callback)
        self.engine.close()

    @property
    def is_attached(self) -> bool:
        return getattr(self._trainer, "vllm_generation", None) is self

    def sync_weights(self) -> None:
        """Called before a generation when the optimizer has stepped since the last one."""
        # The trainer wraps its model after construction, so look it up now. Inside the wrappers there has to be the model
        # that the engine was built over.
        if live_model(self._trainer) is not self._model:
            raise WeightsMovedError(
                "the trainer now trains another model object than the one the engine was attached to: call "
                "detach(trainer) and attach(trainer) again"
            )
        self._trained.look(self._trainer)
        with self._metrics.timed():
            wake_weights(self.engine)
        with uninterrupted():  # or this process might take them once more, when no other one does
            self.engine.update_weights()
            self._dropped = False
            setattr(self._trainer, self.last_sync, self._trainer.state.global_step)

    def begin(self) -> None:
        """Note that a run begins: have the trainer sync at its first generation.

        It syncs when the step number differs from that of the last sync. But a second run counts from 0 again, and
        ``load_best_model_at_end`` changes the weights without a step.
        """
        self.forget_step()
        self._training = True

    def forget_step(self) -> None:
        """Sync at the next generation. Evaluation may use other weights: a schedule-free optimizer's, or an average."""
        setattr(self._trainer, self.last_sync, -1)

    def end(self) -> None:
        """Note that a run has ended: from now on processes may generate independently of each other."""
        self._training = False
        try:
            if self._dropped:
                self.sync_weights()
                self._send_to_sleep()
        finally:
            self.forget_step()

    def sample(
        self, prompts: list[list[int]], images: Sequence[Any] | None, n: int, *, is_turn: bool = False
    ) -> RolloutBatch:
        """``n`` completions of each prompt under the trainer's settings; the engine sleeps afterwards if told to.

        images: for each prompt, the list of images that its ids have placeholders for, or None. is_turn: whether this is a turn
        of the trainer's own completions, and not asked for by a tool or a user's function in between.
        """
        with nullcontext() if self._turns_to_come else self._rollout():
            with self._metrics.timed():
                params = self._params(prompts, n, is_turn)
                given = with_images(self._trainer.processing_class, prompts, images)
                self._wake_up()
                self._to_sleep = self._trainer.args.vllm_enable_sleep_mode
                batch = self.engine.generate_batch(given, params)
                while _was_aborted(batch):  # by another thread's pause("abort"): not to be trained on
                    batch = self.engine.generate_batch(given, params)
            batch.raise_for_errors()
            self._metrics.count(sum(len(c.token_ids) for output in batch for c in output.completions))
        return batch

    @contextmanager
    def _rollout(self) -> Iterator[None]:
        """Context manager around all turns of a rollout: KV is kept between them; afterwards the engine sleeps if told to."""

        def end() -> None:
            self._turns_to_come, self._longest = False, None
            self._sleep_if_told()

        self._turns_to_come = True
        try:
            with sleep_after(end):
                yield
        except BaseException:
            self._metrics.forget()
            raise
        self._metrics.log(self._trainer, self.engine.weight_version)

    def _sleep_if_told(self) -> None:
        if self._to_sleep:
            self._to_sleep = False
            with self._metrics.timed():
                self._send_to_sleep()

    def _wake_up(self) -> None:
        if self._dropped:
            self.sync_weights()
        if self.engine.is_sleeping:
            self.engine.wake_up()

    def on_engine_awake(self, rollout: Callable[..., Any]) -> Callable[..., Any]:
        """``rollout``, a user's function that uses the engine or a server on it, with the engine woken first."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._metrics.timed():
                self._wake_up()
            self._to_sleep = self._trainer.args.vllm_enable_sleep_mode
            return rollout(*args, **kwargs)

        return run

    def _send_to_sleep(self) -> None:
        """Put the engine to sleep. Copies of weights are dropped while a run trains the whole model: the next update brings all."""
        tags = between_rollouts(self.engine)
        all_trained = self._training and all(p.requires_grad for p in self._model.parameters())
        self._dropped = "weights" in tags and all_trained
        self.engine.sleep(3 if self._dropped else 1, tags=tags)

    def all_turns(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """``generate``, which makes all turns of a rollout, as one generation: after a tool's answer, only that is computed."""

        def generation(*args: Any, **kwargs: Any) -> Any:
            with self._rollout():
                return generate(*args, **kwargs)

        return generation

    def _params(self, prompts: Sequence[list[int]], n: int, is_turn: bool) -> list[SamplingParams]:
        """The sampling parameters of each prompt. After a tool's answer, tokens that TRL would cut off are not sampled."""
        trainer, params = self._trainer, sampling_params(self._trainer)
        longest = params.max_tokens
        assert longest is not None  # ``from_generation_config`` gives one
        limits = [longest] * len(prompts)
        with_tools = getattr(trainer, "tools", None) and getattr(trainer, "rollout_func", None) is None
        if is_turn and self._turns_to_come and with_tools:
            if self._longest is None:
                self._longest = max(map(len, prompts)) + trainer.max_completion_length
            else:
                limits = [max(1, min(longest, self._longest - len(prompt))) for prompt in prompts]
        return [
            replace(params, n=n, max_tokens=limit, min_tokens=min(params.min_tokens, limit), seed=seed)
            for limit, seed in zip(limits, self._seeds(prompts), strict=True)
        ]

    def _seeds(self, prompts: Sequence[Any]) -> list[int]:
        """One for each prompt, drawn from torch as ``generate`` draws.

        The trainer keeps torch's state in its checkpoints, so a run that is resumed samples what it would have sampled.
        """
        drawn: list[int] = torch.randint(2**62, (len(prompts),), device="cpu").tolist()
        return [self._seed + seed for seed in drawn]


class _TokenListBackend(_EngineBackend):
    """For GRPO, RLOO, Distillation, SDFT and SDPO, which use the interface of TRL's ``VLLMGeneration``."""

    def seam(self) -> list[tuple[Any, str, Any]]:
        # In this mode the tool loop asks the backend, and not the model's config, how long sequences may be.
        seam = [*super().seam(), (self._trainer, "vllm_mode", "colocate")]
        if hasattr(self._trainer, "_generate"):  # not every kind has turns
            seam.append((self._trainer, "_generate", self.all_turns(self._trainer._generate)))
        if getattr(self._trainer, "rollout_func", None) is not None:
            seam.append((self._trainer, "rollout_func", self.on_engine_awake(self._trainer.rollout_func)))
        return seam

    @property
    def llm(self) -> Any:
        """The place where TRL's tool loop looks for ``max_model_len``."""
        return SimpleNamespace(llm_engine=SimpleNamespace(model_config=self.engine))

    def generate(
        self,
        prompts: list[list[int]],
        images: Sequence[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """One completion for each prompt, in order: prompt ids, completion ids, log-probabilities and ids [B][T][1].

        Prompts come already repeated ``num_generations`` times. Each is its own request here, as a group may be cut
        where a process's share of the batch ends; the engine computes equal neighbours once. No collective runs: in a
        tool loop processes call this a different number of times.
        """
        with profiler or nullcontext():
            batch = self.sample(prompts, images, n=1, is_turn=profiler is not None)  # which TRL's own calls have
        completions = [output.completions[0] for output in batch]
        return (
            [output.prompt_token_ids for output in batch],
            [c.token_ids for c in completions],
            [[[logprob] for logprob in c.logprobs] for c in completions],
            [[[token] for token in c.token_ids] for c in completions],
        )


class _DistillingBackend(_TokenListBackend):
    """For GOLD and IWOPD: the same interface, with a sync every ``vllm_sync_frequency`` steps."""

    last_sync = "_last_vllm_sync_step"

    def seam(self) -> list[tuple[Any, str, Any]]:
        # Sync at every step: the engine has no older weights, and they would save nothing.
        return [*super().seam(), (self._trainer, "vllm_sync_frequency", 1)]


class _PairBackend(_EngineBackend):
    """For OnlineDPO, which calls a method of its own for two completions of each prompt, as padded tensors."""

    def seam(self) -> list[tuple[Any, str, Any]]:
        # Not ``_generate_vllm``: for that its arguments would have to say ``use_vllm``, and they are saved in checkpoints.
        return [*super().seam(), (self._trainer, "_generate", self.generate)]

    def generate(
        self, model: Any, prompts: list[Any], images: Sequence[Any] | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        """Prompt ids and mask [2B, P], left-padded, and completion ids and mask [2B, C], right-padded, all int64.

        The first B rows hold one completion of each prompt, the other B the second: the trainer splits them there. From
        TRL 1.16 on it also asks for what its forward would take for images, which is None.
        """
        from trl.data_utils import maybe_apply_chat_template

        trainer = self._trainer
        if images is not None and any(image is not None for image in images):
            raise UnsupportedModelError(
                "the prompts carry images, which the engine does not take from an OnlineDPOTrainer: use GRPOTrainer or "
                "RLOOTrainer, or train without the engine"
            )
        if trainer.state.global_step != trainer._last_loaded_step:
            self.sync_weights()
        tokenizer = trainer._tokenizer
        processor = trainer.processing_class  # whose template it is: a tokenizer beside image processors has none
        texts = [maybe_apply_chat_template({"prompt": prompt}, processor)["prompt"] for prompt in prompts]
        batch = self.sample(tokenizer(text=texts, add_special_tokens=False)["input_ids"], None, n=2)
        tensors = batch.to_tensors(tokenizer.pad_token_id, device=trainer.accelerator.device)
        by_pair = (tensors.prompt_ids, tensors.prompt_mask, tensors.completion_ids, tensors.completion_mask)
        in_blocks = tuple(torch.cat([t[::2], t[1::2]]) for t in by_pair)
        return in_blocks if check_version() < (1, 16) else (*in_blocks, None)


# By name: importing experimental parts of TRL warns, and may fail in a version that has moved them.
_BACKENDS: dict[str, type[_EngineBackend]] = {
    "GRPOTrainer": _TokenListBackend,
    "RLOOTrainer": _TokenListBackend,
    "DistillationTrainer": _TokenListBackend,
    "SDFTTrainer": _TokenListBackend,
    "SDPOTrainer": _TokenListBackend,
    "GOLDTrainer": _DistillingBackend,
    "IWOPDTrainer": _DistillingBackend,
    "OnlineDPOTrainer": _PairBackend,
}
