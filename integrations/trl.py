"""TRL: let a ``GRPOTrainer`` or ``RLOOTrainer`` sample its completions on a ``RolloutEngine``.

    trainer = GRPOTrainer(model=model, ...)  # use_vllm=False, the default
    attach(trainer)
    trainer.train()

TRL has no registry of generation backends. It asks ``trainer.vllm_generation`` for completions while
``trainer.use_vllm`` is set, and wants two methods of it: ``sync_weights`` and ``generate``. ``attach`` puts an object
with these two there and patches nothing else. This also turns on what TRL ties to a backend that returns
log-probabilities: the importance-sampling correction, and the ``sampling/`` metrics that compare the engine's
log-probabilities with the trainer's. The two agree best in one dtype: over fp32 weights TRL's default ``bf16=True`` runs
the trainer's forward in bf16 while the engine samples in fp32, and the correction covers the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version
from transformers import TrainerCallback

from stoker.kernels.errors import EngineStateError, InvalidConfigError, UnsupportedModelError, WeightsMovedError
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

_OLDEST, _TOO_NEW = (1, 16), (2,)
# The trainer's attributes that are the seam; ``detach`` puts back what was there.
_SEAM = ("vllm_generation", "use_vllm", "vllm_mode", "_last_loaded_step")
_ABSENT = object()
# Keys of ``args.generation_kwargs``: transformers' names, the other spelling of three of them, and two it lacks.
_TRANSLATED = {"do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
_TRANSLATED |= {"max_new_tokens", "min_new_tokens", "stop_strings"}
_ALSO_CALLED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "stop": "stop_strings"}
_PENALTIES = {"presence_penalty", "frequency_penalty"}
_WITHOUT_EFFECT = {"pad_token_id", "bos_token_id", "use_cache", "cache_implementation", "disable_compile"}


def attach(trainer: Any, *, config: EngineConfig | None = None) -> RolloutEngine:
    """Make ``trainer`` generate on a new engine over its live model, in training and in evaluation.

    trainer: a ``GRPOTrainer`` or ``RLOOTrainer`` built with ``use_vllm=False``. Sampling settings are read from it
    (and from ``args.generation_kwargs``, which win) at every generation. With ``args.vllm_enable_sleep_mode`` the
    engine gives its KV cache back between generations. config: the engine's settings; by default its seed is
    ``args.seed``. The process index is added to the seed, so that processes that share a prompt sample differently.

    Returns the engine; it belongs to the trainer until ``detach``. Raises a ``StokerError`` before anything is changed:
    ``InvalidConfigError`` for TRL's version, the kind of trainer or a setting that cannot work, ``EngineStateError``
    where an engine is attached already, ``UnsupportedModelError`` for a model the engine does not run.
    """
    _check(trainer)
    backend = _EngineBackend(trainer, config)
    trainer.vllm_generation = backend
    trainer.use_vllm = True
    trainer.vllm_mode = "engine"  # none of TRL's own modes: what is special to those is skipped
    trainer._last_loaded_step = -1  # no step: TRL syncs before the first generation
    trainer.add_callback(backend.callback)
    return backend.engine


def detach(trainer: Any) -> None:
    """Undo ``attach``: the trainer is as it was before and generates by itself again; the engine is closed.

    Raises ``EngineStateError`` where no engine is attached.
    """
    backend = getattr(trainer, "vllm_generation", None)
    if not isinstance(backend, _EngineBackend):
        raise EngineStateError("no engine is attached to this trainer")
    for name, value in backend.before.items():
        if value is _ABSENT:
            delattr(trainer, name)
        else:
            setattr(trainer, name, value)
    trainer.remove_callback(backend.callback)
    backend.engine.close()


class _EngineBackend:
    """What TRL sees: the interface of its ``VLLMGeneration``."""

    def __init__(self, trainer: Any, config: EngineConfig | None) -> None:
        self._trainer = trainer
        self._model = _live_model(trainer)
        self.callback = _SyncAtBothEnds(trainer)
        self.before = {name: vars(trainer).get(name, _ABSENT) for name in _SEAM}
        config = config or EngineConfig(seed=trainer.args.seed)
        config = replace(config, seed=config.seed + trainer.accelerator.process_index)
        self.engine = RolloutEngine(self._model, config=config, tokenizer=trainer._tokenizer)

    def sync_weights(self) -> None:
        """Called by TRL before a generation when the optimizer has stepped since the last one."""
        # The trainer puts wrappers around its model after construction, so look it up now. Inside the wrappers has to
        # be the model the engine was built over.
        if _live_model(self._trainer) is not self._model:
            raise WeightsMovedError(
                "the trainer now trains another model object than the one the engine was attached to: call "
                "detach(trainer) and attach(trainer) again"
            )
        self.engine.update_weights()

    def generate(
        self,
        prompts: list[list[int]],
        images: Sequence[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """One completion for each prompt, in order: prompt ids, completion ids, and log-probabilities and ids [B][T][1].

        Prompts come already repeated ``num_generations`` times. Each is its own request here, as a group may be cut
        where a process's share of the batch ends; the engine computes equal neighbours once. No collective runs: in a
        tool loop processes call this a different number of times.
        """
        if images is not None and any(images):
            raise UnsupportedModelError("the prompts carry images: the engine runs text models only")
        with profiler or nullcontext():
            if self.engine.is_sleeping:
                self.engine.wake_up()
            try:
                batch = self.engine.generate_batch(prompts, _sampling_params(self._trainer))
            finally:
                if self._trainer.args.vllm_enable_sleep_mode:
                    self.engine.sleep()
        batch.raise_for_errors()
        completions = [output.completions[0] for output in batch]
        return (
            [output.prompt_token_ids for output in batch],
            [c.token_ids for c in completions],
            [[[logprob] for logprob in c.logprobs] for c in completions],
            [[[token] for token in c.token_ids] for c in completions],
        )


class _SyncAtBothEnds(TrainerCallback):  # type: ignore[misc]
    """Makes TRL sync at the first generation of a run, and at the first one after it.

    TRL takes weights for new when the step number differs from that of the last sync. A second run counts from 0 again,
    and ``load_best_model_at_end`` changes the weights without a step.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer._last_loaded_step = -1

    on_train_end = on_train_begin


def _live_model(trainer: Any) -> Any:
    # fp32 wrappers stay: taking one off would change the model's forward.
    return trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)


def _sampling_params(trainer: Any) -> SamplingParams:
    """The trainer's sampling settings as they are now, ``args.generation_kwargs`` on top.

    A completion ends at the trainer's EOS ids and at no other: TRL takes an ending in any other token for a truncation.
    """
    settings = {
        "do_sample": True,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p,
        "repetition_penalty": trainer.repetition_penalty,
        "max_new_tokens": trainer.max_completion_length,
    }
    penalties = {}
    for key, value in (trainer.args.generation_kwargs or {}).items():
        name = _ALSO_CALLED.get(key, key)
        if name in _PENALTIES:
            penalties[name] = value
        elif name in _TRANSLATED:
            settings[name] = value
        elif name not in _WITHOUT_EFFECT:
            known = sorted(_TRANSLATED | _PENALTIES | set(_ALSO_CALLED))
            raise InvalidConfigError(
                f"generation_kwargs sets {key}, which the engine does not take from a trainer: it takes {', '.join(known)}"
            )
    if settings["top_k"] in (None, -1):  # other ways of saying off
        settings["top_k"] = 0
    return SamplingParams.from_generation_config(
        settings,
        stop_token_ids=[token for token in trainer.eos_token_ids if token is not None],
        ignore_eos=True,  # the model's and the tokenizer's, which the trainer may have been told to leave out
        **penalties,
    )


def _check(trainer: Any) -> None:
    """Raise for whatever would not work, before anything is changed."""
    try:
        found = version("trl")
    except PackageNotFoundError:
        raise InvalidConfigError("TRL is not installed: pip install 'stoker[trl]'") from None
    if not _OLDEST <= Version(found).release < _TOO_NEW:
        raise InvalidConfigError(f"TRL {found} is installed: attach works with trl>=1.16,<2")

    from trl import GRPOTrainer, RLOOTrainer

    if not isinstance(trainer, GRPOTrainer | RLOOTrainer):
        raise InvalidConfigError(f"attach takes a GRPOTrainer or an RLOOTrainer, this is a {type(trainer).__name__}")
    if isinstance(getattr(trainer, "vllm_generation", None), _EngineBackend):
        raise EngineStateError("an engine is attached to this trainer already: call detach(trainer) first")
    if trainer.use_vllm:
        raise InvalidConfigError("the trainer generates with vLLM: build it with use_vllm=False")
    if trainer.use_transformers_continuous_batching:
        raise InvalidConfigError(
            "the trainer generates with transformers' continuous batching: build it with "
            "use_transformers_continuous_batching=False"
        )
    if trainer._is_vlm:
        raise UnsupportedModelError("the trainer has a multimodal processor: the engine runs text models only")
    if trainer.args.vllm_structured_outputs_regex is not None:
        raise InvalidConfigError("vllm_structured_outputs_regex is set, and the engine does not constrain its output")
    # TRL checks this where it is built with vLLM. RLOO has neither kind of loss nor a correction.
    vespo = getattr(trainer, "loss_type", None) == "vespo" and trainer.vllm_importance_sampling_correction
    if vespo and trainer.vllm_importance_sampling_mode not in ("token_truncate", "token_mask"):
        raise InvalidConfigError(
            f"VESPO loss needs a correction by token, vllm_importance_sampling_mode is "
            f"{trainer.vllm_importance_sampling_mode!r}: set it to 'token_truncate' or 'token_mask', or set "
            "vllm_importance_sampling_correction=False"
        )
    _sampling_params(trainer)
