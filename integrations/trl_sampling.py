"""Reads ``SamplingParams`` from a TRL trainer's settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import GenerationConfig

from stoker.kernels.errors import InvalidConfigError
from stoker.rollout import SamplingParams
from stoker.rollout.constraints import ConstraintMaker
from stoker.rollout.user_values import as_ids

# Keys of ``args.generation_kwargs``: transformers' names, other names for three of them, and three that it lacks.
_TRANSLATED = {"do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
_TRANSLATED |= {"max_new_tokens", "min_new_tokens", "stop_strings", "suppress_tokens", "sequence_bias"}
_ALSO_CALLED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "stop": "stop_strings"}
_OURS = {"presence_penalty", "frequency_penalty", "logit_bias"}
# Not taken from a model's own generation config: what a trainer always sets itself, and what does not change sampling.
_NOT_THE_MODELS = {"do_sample", "top_k", "max_new_tokens", "max_length", "eos_token_id", "num_return_sequences"}
_NOT_THE_MODELS |= {"output_attentions", "output_hidden_states", "output_scores", "output_logits"}
_WITHOUT_EFFECT = {"pad_token_id", "bos_token_id", "use_cache", "cache_implementation", "disable_compile"}


def live_model(trainer: Any) -> Any:
    # fp32 wrappers stay: taking one off would change the model's forward.
    return trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)


def tokenizer_of(trainer: Any) -> Any:
    processor = trainer.processing_class  # not every kind has ``_tokenizer``
    return getattr(trainer, "_tokenizer", getattr(processor, "tokenizer", processor))


def _eos_ids(trainer: Any) -> list[int]:
    """The trainer's EOS ids; where its kind keeps none, the tokenizer's and the generation config's."""
    if hasattr(trainer, "eos_token_ids"):
        return [token for token in trainer.eos_token_ids if token is not None]
    found: set[int] = set()
    for eos in (tokenizer_of(trainer).eos_token_id, trainer.generation_config.eos_token_id):
        found.update(as_ids(eos))
    return sorted(found)


def sampling_params(trainer: Any) -> SamplingParams:
    """The trainer's sampling settings as they are now, ``args.generation_kwargs`` on top.

    What they leave open comes from the model's own generation config, as when the trainer generates. A completion ends only at
    the trainer's EOS ids: TRL takes an ending in any other token for a truncation.
    """
    settings: dict[str, Any] = {"do_sample": True}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        if hasattr(trainer.args, name):  # not every kind has them all
            settings[name] = _setting(trainer, name)
    limit = "max_new_tokens" if hasattr(trainer.args, "max_new_tokens") else "max_completion_length"
    settings["max_new_tokens"] = _setting(trainer, limit)
    settings["suppress_tokens"] = _placeholders(trainer) or None
    of_the_forward = settings.get("temperature")
    ours = {}
    for key, value in (getattr(trainer.args, "generation_kwargs", None) or {}).items():
        name = _ALSO_CALLED.get(key, key)
        if name in _OURS:
            ours[name] = value
        elif name in _TRANSLATED:
            settings[name] = value
        elif name not in _WITHOUT_EFFECT:
            known = sorted(_TRANSLATED | _OURS | set(_ALSO_CALLED))
            raise InvalidConfigError(
                f"generation_kwargs sets {key}, which the engine does not take from a trainer: it takes {', '.join(known)}"
            )
    if settings["max_new_tokens"] is None:
        raise InvalidConfigError(f"{limit} is None, so completions have no bound: set it")
    if settings.get("top_k") in (None, -1):  # other ways of saying off
        settings["top_k"] = 0
    params = SamplingParams.from_generation_config(
        _filled(trainer, settings),
        stop_token_ids=_eos_ids(trainer),
        ignore_eos=True,  # the model's and the tokenizer's, which the trainer may have been told to leave out
        regex=getattr(trainer.args, "vllm_structured_outputs_regex", None),
        **ours,
    )
    if params.temperature == 0 and of_the_forward not in (None, 0, 1):
        # Greedy decoding, with log-probabilities at the temperature of the trainer's forward: at 1, as greedy decoding has
        # them, importance ratios would be wrong, and whole completions dropped.
        params = replace(params, temperature=of_the_forward, top_k=1, top_p=1.0, min_p=0.0)
    return params


def _filled(trainer: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, filled with what ``generate`` takes from the model's generation config (a repetition penalty, say)."""
    config = getattr(live_model(trainer), "generation_config", None)
    of_the_model = {} if config is None else config.to_dict()
    theirs = vars(GenerationConfig()).keys() - _NOT_THE_MODELS  # hub files also have what only other engines read
    found = {k: v for k, v in of_the_model.items() if v is not None and k in theirs}
    found |= {k: v for k, v in settings.items() if v is not None}
    words = found.get("bad_words_ids") or []
    if all(len(word) == 1 for word in words):  # tokens that are not to be sampled: models with images have such
        found.pop("bad_words_ids", None)
        suppressed = {word[0] for word in words} - set(_eos_ids(trainer))
        found["suppress_tokens"] = sorted(suppressed | set(found.get("suppress_tokens", ())))
    return found


def check_pattern(trainer: Any, params: SamplingParams) -> None:
    """Raise ``InvalidRequestError`` where no completion can match the pattern that ``params`` has, if any."""
    if params.regex is not None:
        vocab = live_model(trainer).config.get_text_config().vocab_size
        ends, excluded = (
            frozenset(t for t in ids if t < vocab) for ids in (params.stop_token_ids, params.suppress_token_ids)
        )
        ConstraintMaker(tokenizer_of(trainer), vocab)(params.regex, ends, excluded)


def _placeholders(trainer: Any) -> list[int]:
    """Tokens that must not be sampled, as they stand for images: the trainer's forward would look for another image.

    Where TRL has such a list itself, it replaces the model's; else the model's list counts too.
    """
    model = live_model(trainer)
    placeholder: int | None = getattr(model.config, "image_token_id", None)
    if placeholder is None or not hasattr(trainer.processing_class, "image_processor"):
        return []
    found = {placeholder} if placeholder < model.config.get_text_config().vocab_size else set()
    if "suppress_tokens" not in getattr(trainer, "generation_kwargs", {}):
        found |= set(getattr(getattr(model, "generation_config", None), "suppress_tokens", None) or ())
    return sorted(found)


def _setting(trainer: Any, name: str) -> Any:
    # Some kinds copy some settings from their arguments; then their own generation reads the copy.
    return getattr(trainer, name) if hasattr(trainer, name) else getattr(trainer.args, name)
