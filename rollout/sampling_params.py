"""What a user asks of one request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal

from stoker.kernels.errors import InvalidRequestError
from stoker.rollout.regex import check
from stoker.rollout.user_values import as_ids, as_int, as_ints, as_real, is_int, is_real, shown

LogprobsMode = Literal["scaled", "raw", "processed"]
_MODES: tuple[LogprobsMode, ...] = ("scaled", "raw", "processed")
# Temperatures and penalties further out would take logits out of fp32's range, and make NaN of them.
SMALLEST, LARGEST = 1e-15, 1e15


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How completions of one prompt are sampled. Field names follow vLLM.

    - n: completions of the prompt; sample ``i`` draws from ``(seed, i, position)``.
    - temperature: 0 is greedy (log-probabilities are then those of temperature 1), else from 1e-15 to 1e15.
    - top_p, top_k, min_p: truncation, applied in the order top-k, top-p, min-p; ``top_k=0`` is off.
    - repetition_penalty: over prompt and completion; 1 is off. presence_penalty, frequency_penalty: over the
      completion; 0 is off.
    - max_tokens, min_tokens: bounds on the completion, in tokens; before ``min_tokens`` no stop token can be sampled.
      ``max_tokens=None`` is as many as ``max_model_len`` and the KV cache have room for.
    - stop: strings that end a completion (needs a tokenizer); ``text`` ends before the string, ``token_ids`` keep the
      token that completed it. They are looked for in ``text``, and one that names a special token ("<|im_end|>") where
      that is sampled. stop_token_ids: ids that end it, besides the model's EOS ids. ignore_eos: EOS ids do not
      end it. suppress_token_ids: ids that are never sampled, such as an image's placeholder.
    - logit_bias: what is added to the logits of ids, before penalties: a mapping of ids to numbers, kept as pairs.
    - regex: what the completion's text matches, as by ``re.fullmatch(regex, text)``; needs a tokenizer. Stop ids are sampled
      only where it does, and have to be where the text cannot go on, even before ``min_tokens``. A completion that
      ``max_tokens`` or a stop string ends has not come so far. Look-around, back-references and the like are refused.
    - seed: None draws a fresh one from the engine's seed.
    - logprobs: how many top log-probabilities to return at each token, besides the sampled token's own.
    - logprobs_mode: ``"scaled"`` is ``log_softmax(logits / temperature)`` over the full vocabulary, what TRL and PPO
      recompute; ``"raw"`` is ``log_softmax(logits)``; ``"processed"`` is after ``logit_bias``, penalties,
      ``min_tokens``, ``suppress_token_ids``, ``regex`` and truncation.
    - prompt_logprobs: log-probabilities of the prompt's own tokens: None for none, 0 for the tokens' alone, k for those
      of the k most likely tokens too; under ``logits / temperature``, or ``logits`` where ``logprobs_mode`` is "raw".

    Raises ``InvalidRequestError`` naming the field and the accepted range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    suppress_token_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    regex: str | None = None
    seed: int | None = None
    logprobs: int = 0
    logprobs_mode: LogprobsMode = "scaled"
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._stops()
        self._biases()
        self._whole("n", 1)
        self._whole("top_k", 0, "0 is off")
        if self.max_tokens is not None:
            self._whole("max_tokens", 1, "None is as many as there is room for")
        self._whole("min_tokens", 0)
        self._whole("logprobs", 0, "0 is the sampled token's alone")
        self._real("temperature", 0.0, LARGEST)
        if 0 < self.temperature < SMALLEST:
            raise InvalidRequestError(f"temperature={self.temperature}: give 0 (greedy), or at least {SMALLEST}")
        self._real("top_p", 0.0, 1.0, open_low=True)
        self._real("min_p", 0.0, 1.0)
        self._real("repetition_penalty", SMALLEST, LARGEST)
        self._real("presence_penalty", -LARGEST, LARGEST)
        self._real("frequency_penalty", -LARGEST, LARGEST)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        if self.seed is not None:
            self._whole("seed")
        if self.prompt_logprobs is not None:
            self._whole("prompt_logprobs", 0)
        if self.regex is not None:
            if not isinstance(self.regex, str) or not self.regex:
                raise InvalidRequestError(f"regex={shown(self.regex)}: give a regular expression, or None for no bound")
            check(self.regex)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError(f"ignore_eos={shown(self.ignore_eos)}: give True or False")
        if not isinstance(self.logprobs_mode, str) or self.logprobs_mode not in _MODES:
            raise InvalidRequestError(f"logprobs_mode={shown(self.logprobs_mode)}: choose one of {', '.join(_MODES)}")

    def _stops(self) -> None:
        strings = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(strings, Sequence) or any(not isinstance(s, str) or not s for s in strings):
            raise InvalidRequestError(f"stop={shown(self.stop)}: give a non-empty string, or a sequence of them")
        object.__setattr__(self, "stop", tuple(strings))
        for name in ("stop_token_ids", "suppress_token_ids"):
            given = getattr(self, name)
            ids = as_ints(given) if isinstance(given, Sequence) else [None]
            if not all(map(is_int, ids)) or min(ids, default=0) < 0:
                raise InvalidRequestError(
                    f"{name}={shown(given)}: give a sequence of token ids, integers of at least 0"
                )
            object.__setattr__(self, name, tuple(map(int, ids)))

    def _biases(self) -> None:
        given = self.logit_bias
        pairs = given.items() if isinstance(given, Mapping) else given
        try:
            found: dict[Any, Any] = {as_int(token): as_real(bias) for token, bias in pairs}
        except (TypeError, ValueError):
            found = {None: None}
        for token, bias in found.items():
            if not is_int(token) or token < 0 or not is_real(bias) or not -LARGEST <= bias <= LARGEST:
                raise InvalidRequestError(
                    f"logit_bias={shown(given)}: give a mapping of token ids, integers of at least 0, to finite numbers from "
                    f"{-LARGEST:g} to {LARGEST:g}; suppress_token_ids are never sampled"
                )
        object.__setattr__(self, "logit_bias", tuple((int(token), float(bias)) for token, bias in found.items()))

    def _whole(self, name: str, low: float = -math.inf, hint: str = "") -> None:
        value = as_int(getattr(self, name))
        if not is_int(value) or value < low:
            bound = f" of at least {low}" if low > -math.inf else ""
            raise InvalidRequestError(
                f"{name}={shown(value)}: it has to be an integer{bound}{f' ({hint})' if hint else ''}"
            )
        object.__setattr__(self, name, int(value))

    def _real(self, name: str, low: float, high: float, open_low: bool = False) -> None:
        value = as_real(getattr(self, name))
        # By the bounds, which say no to NaN too: an integer may be too large to become a float.
        if not is_real(value) or not low <= value <= high or (open_low and value == low):
            bounds = f"{'above' if open_low else 'at least'} {low:g} and at most {high:g}"
            raise InvalidRequestError(f"{name}={shown(value)}: it has to be a finite number {bounds}")
        object.__setattr__(self, name, float(value))

    @classmethod
    def from_generation_config(cls, config: Any, **overrides: Any) -> SamplingParams:
        """Translate ``config``, a ``transformers.GenerationConfig`` or a mapping of its fields.

        ``do_sample`` unset or False becomes ``temperature=0``, ``max_new_tokens`` ``max_tokens``, ``min_new_tokens``
        ``min_tokens``, ``stop_strings`` ``stop``, ``suppress_tokens`` ``suppress_token_ids``, ``num_return_sequences``
        ``n``, ``sequence_bias`` of single tokens ``logit_bias``. ``eos_token_id`` ends completions as it does under
        ``generate`` (as ``stop_token_ids``), and ``top_k`` unset is 50 as it is there. Keyword arguments win over the
        translated fields. Raises ``InvalidRequestError`` for a field that asks for something this engine does not do
        (beam search, constraints, ...), for a name that is a field of this class and none of transformers'
        (``max_tokens``, ...), and for a name in a mapping that is nearly a field (``temprature``), instead of dropping
        it silently.
        """
        from transformers import GenerationConfig

        if not isinstance(config, Mapping | GenerationConfig):
            raise InvalidRequestError(
                f"config is a {type(config).__name__}: give a GenerationConfig, as model.generation_config, or a mapping "
                "of its fields"
            )
        get = config.get if isinstance(config, Mapping) else vars(config).get
        # A GenerationConfig keeps whatever names it was given, and transformers reads none of these.
        alien = [f.name for f in fields(cls) if f.name not in _GENERATION_FIELDS and get(f.name) is not None]
        if alien:
            raise InvalidRequestError(
                f"generation config sets {', '.join(alien)}, a field of SamplingParams and not of transformers: "
                "take it out, and give it as a keyword argument"
            )
        if isinstance(config, Mapping):
            _check_spelling(config)
        bias = _bias_of_tokens(get("sequence_bias"))
        for name, neutral in _UNSUPPORTED_GENERATION_FIELDS.items():
            value = get(name) if name != "sequence_bias" or bias is None else None
            if value is not None and value not in neutral:
                raise InvalidRequestError(
                    f"generation config sets {name}={shown(value)}, which the engine does not do: unset it, or use "
                    "model.generate for this batch"
                )
        found: dict[str, Any] = {} if bias is None else {"logit_bias": bias}
        for theirs, ours in _GENERATION_FIELDS.items():
            if get(theirs) is not None:
                found[ours] = get(theirs)
        if "max_tokens" not in found and "max_tokens" not in overrides and get("max_length") is not None:
            raise InvalidRequestError(
                "the generation config bounds prompt plus completion (max_length) and sets no max_new_tokens: "
                "set max_new_tokens, or pass max_tokens="
            )
        if get("eos_token_id") is not None:
            found["stop_token_ids"] = tuple(t for t in as_ids(get("eos_token_id")) if t != _NO_EOS)
        if not get("do_sample"):
            found.update(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        elif get("top_k") is None:
            found["top_k"] = 50
        return cls(**{**found, **overrides})


def _bias_of_tokens(sequences: Any) -> dict[Any, Any] | None:
    """``sequence_bias``, in either of transformers' forms, as a bias of tokens; None where it is anything else."""
    pairs = list(sequences.items()) if isinstance(sequences, Mapping) else [] if sequences is None else sequences
    found: dict[Any, Any] = {}
    for pair in pairs if isinstance(pairs, Sequence) else [None]:
        match pair:
            case [[token], bias] if is_int(as_int(token)):
                found[token] = bias
            case _:
                return None
    return found


def _check_spelling(config: Mapping[str, Any]) -> None:
    """Raise ``InvalidRequestError`` for a name that is a misspelt field. Others may be there, as in files of the hub."""
    read = [*_GENERATION_FIELDS, *_UNSUPPORTED_GENERATION_FIELDS, "do_sample", "eos_token_id", "max_length"]
    for name, value in config.items():
        # Files name tokens of their own besides: "eot_token_id".
        if value is None or not isinstance(name, str) or name in read or name.endswith("_token_id"):
            continue
        if near := get_close_matches(name.lower().replace("-", "_"), read, 1, _NEARLY):
            raise InvalidRequestError(
                f"generation config sets {name}, which is no field of transformers': {near[0]} is; take it out where it is "
                "not meant"
            )


_NEARLY = 0.88  # of a name's letters: one is missing in "topk"
_NO_EOS = -1  # what transformers' generate_batch writes into a configuration that has none
_GENERATION_FIELDS = {
    "num_return_sequences": "n",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "suppress_tokens": "suppress_token_ids",
}
_UNSUPPORTED_GENERATION_FIELDS: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "min_length": (0,),
    "max_time": (),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "penalty_alpha": (0.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "guidance_scale": (1.0,),
    "sequence_bias": ({},),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
    "prompt_lookup_num_tokens": (0,),
    "dola_layers": (),
    "token_healing": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_scores": (False,),
    "output_logits": (False,),
}
