"""Checks whether an engine can generate for a trainer of TRL, and says what to do if not."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from stoker.integrations.trl_sampling import check_pattern, sampling_params
from stoker.kernels.errors import InvalidConfigError, UnsupportedModelError
from stoker.rollout import EngineConfig, SamplingParams
from stoker.rollout.config import check_alone

_OLDEST = {"attach": (1, 10), "a teacher on a server": (1, 11), "asynchronous training": (1, 16)}
_TOO_NEW = (2,)
# Trainers that call ``generate`` in a way that cannot be replaced, and what to do instead.
_REFUSED = {
    "AsyncGRPOTrainer": "takes its engine when it is built: use stoker.integrations.trl_async.AsyncGRPOTrainer",
    "AsyncDistillationTrainer": "takes its engine when it is built: use stoker.integrations.trl_async.AsyncDistillationTrainer",
    "GKDTrainer": "calls model.generate by itself: use GOLDTrainer, whose loss without ULD is the same, or put an engine into "
    "model.generate (stoker.integrations.transformers.on_engine)",
    "A2POTrainer": "calls model.generate by itself: put an engine there (stoker.integrations.transformers.on_engine)",
    "CPOTrainer": "generates samples to log and nothing else: train it without the engine",
    "ORPOTrainer": "generates samples to log and nothing else: train it without the engine",
    # Of TRL before 1.14, where they derive from OnlineDPOTrainer.
    "NashMDTrainer": "calls model.generate by itself, of a mixture of models too: use OnlineDPOTrainer",
    "XPOTrainer": "calls model.generate by itself, of two models: use OnlineDPOTrainer",
}


def check_version(what: str = "attach") -> tuple[int, ...]:
    """TRL's version, (major, minor, ...). Raises ``InvalidConfigError`` where ``what`` does not work with it, or TRL is missing."""
    try:
        found = version("trl")
    except PackageNotFoundError:
        raise InvalidConfigError("TRL is not installed: pip install trl datasets") from None
    oldest = _OLDEST[what]
    if not oldest <= Version(found).release < _TOO_NEW:
        major, minor = oldest
        raise InvalidConfigError(f"TRL {found} is installed: {what} works with trl>={major}.{minor},<2")
    return Version(found).release


def kinds_of(trainer: Any) -> list[str]:
    """Names of a trainer's classes that are TRL's, the most derived first."""
    return [c.__name__ for c in type(trainer).__mro__ if c.__module__.partition(".")[0] == "trl"]


def check_trainer(trainer: Any, known: Collection[str]) -> str:
    """Which of the known kinds a trainer is. Raises a ``StokerError`` where no engine could generate for it as it is set up."""
    check_version()
    kind = next((name for name in kinds_of(trainer) if name in known or name in _REFUSED), None)
    if kind is None:
        raise InvalidConfigError(
            f"attach takes one of TRL's {', '.join(known)}, and this is a {type(trainer).__name__}"
        )
    if kind in _REFUSED:
        raise InvalidConfigError(f"{kind} {_REFUSED[kind]}")
    if trainer.use_vllm:
        raise InvalidConfigError("the trainer generates with vLLM: build it with use_vllm=False")
    if getattr(trainer, "use_transformers_continuous_batching", False):
        raise InvalidConfigError(
            "the trainer generates with transformers' continuous batching: build it with "
            "use_transformers_continuous_batching=False, and without use_transformers_paged, which sets it"
        )
    parallel = trainer.accelerator.parallelism_config
    if parallel is not None and parallel.tp_size * parallel.cp_size > 1:
        # Most kinds have TRL draw otherwise on each process even without the engine; the forward would mix their batches unseen.
        raise InvalidConfigError(
            f"processes compute each batch together (tp_size={parallel.tp_size}, cp_size={parallel.cp_size}), and with TRL each of "
            "them samples its own: train with data parallelism (DDP, FSDP, DeepSpeed), or in a loop of your own with "
            "AcceleratedEngine"
        )
    if kind == "GOLDTrainer" and trainer._is_vision_dataset:
        # It would turn the tokens into text, and that by the template into a turn with an ending that was not sampled.
        raise UnsupportedModelError(
            "the prompts carry images, with which a GOLDTrainer does not train on the tokens that an engine sampled: use "
            "DistillationTrainer, or train without the engine"
        )
    # TRL checks this only if it is built with vLLM. Only GRPO has this loss.
    vespo = getattr(trainer, "loss_type", None) == "vespo" and trainer.vllm_importance_sampling_correction
    if vespo and trainer.vllm_importance_sampling_mode not in ("token_truncate", "token_mask"):
        raise InvalidConfigError(
            f"VESPO loss needs a correction by token, vllm_importance_sampling_mode is "
            f"{trainer.vllm_importance_sampling_mode!r}: set it to 'token_truncate' or 'token_mask', or set "
            "vllm_importance_sampling_correction=False"
        )
    check_pattern(trainer, check_sampling(trainer))
    return kind


def check_rollouts(trainer: Any, config: EngineConfig) -> None:
    """Raise ``InvalidConfigError`` where processes would generate a different number of times, and several run the model together."""
    names = ("tools", "rollout_func", "environment_factories")
    if found := next((name for name in names if getattr(trainer, name, None)), None):
        check_alone(config, f"rollouts with {found}")


def check_sampling(trainer: Any, divisor: str = "temperature") -> SamplingParams:
    """A trainer's sampling parameters. Raises a ``StokerError`` where they are invalid, or its forward cannot follow them.

    divisor: the setting by which its forward divides.
    """
    if getattr(trainer.args, divisor, None) == 0:
        # Some kinds would fail in their first step, and the others train on NaN.
        greedy = (
            "; generation_kwargs={'do_sample': False} decodes greedily"
            if hasattr(trainer.args, "generation_kwargs")
            else ""
        )
        raise InvalidConfigError(f"{divisor}=0, and the trainer's forward divides by it: set it above 0{greedy}")
    return sampling_params(trainer)
