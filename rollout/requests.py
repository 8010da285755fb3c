"""Turns what a user asks for into the core's requests, after checking it, and finished requests into results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.engine.constraints import Constraint
from stoker.engine.images.inputs import ImageInputs
from stoker.engine.request import Adapter, Request, SamplingSpec
from stoker.engine.request_scores import Scoring, Variant
from stoker.engine.sampler import LOGPROBS_MODES
from stoker.kernels.errors import (
    InvalidRequestError,
    PromptTooLongError,
    RequestFailedError,
    StokerError,
    UnsupportedModelError,
)
from stoker.rollout.constraints import ConstraintMaker
from stoker.rollout.outputs import Completion, RolloutBatch, RolloutOutput, TokenLogprobs
from stoker.rollout.prompts import Read, check_ids, read_prompts
from stoker.rollout.sampling_params import LARGEST, SMALLEST, SamplingParams
from stoker.rollout.stop_strings import StopStringChecker, completion_text, special_tokens
from stoker.rollout.user_values import as_int, as_ints, as_real, is_int, is_real, shown

_SEED_MASK = 2**63 - 1
_SHOWN = 40  # tokens of a prompt that is refused


def params_per_prompt(params: Any, count: int) -> list[SamplingParams]:
    """``sampling_params`` as ``generate_batch`` takes them: None, one for all, or one per prompt."""
    params = SamplingParams() if params is None else params
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise InvalidRequestError("sampling_params: give one SamplingParams, or a list with one per prompt")
    if len(params) != count:
        raise InvalidRequestError(f"{len(params)} sampling_params for {count} prompts: give one, or one per prompt")
    return list(params)


def read_sequences(
    sequences: Any, attention_mask: Tensor | None, start: Any, tokenizer: Any
) -> tuple[list[Read], list[int]]:
    """Token ids and images of each sequence that ``score`` is given, and the position it is scored from."""
    if isinstance(sequences, RolloutBatch):
        if attention_mask is not None or not isinstance(start, int) or start != 1:
            raise InvalidRequestError(
                "a RolloutBatch is scored from where its completions begin: give no start and no attention_mask"
            )
        sequences.raise_for_errors()
        found: list[Read] = []
        for o in sequences:
            images = None if o.prompt_inputs is None else ImageInputs.of(o.prompt_token_ids, o.prompt_inputs)
            found += [(o.prompt_token_ids + c.token_ids, images) for c in o.completions]
        return found, [len(o.prompt_token_ids) for o in sequences for _ in o.completions]
    if isinstance(sequences, Sequence) and any(isinstance(s, list) and s and isinstance(s[0], dict) for s in sequences):
        raise InvalidRequestError("chats cannot be scored as they are: give their token ids, or their text")
    read = read_prompts(sequences, attention_mask, tokenizer, "sequence")
    if isinstance(start, (Tensor, np.ndarray)):
        start = start.tolist()
    starts = list(start) if isinstance(start, Sequence) and not isinstance(start, str) else [start] * len(read)
    if len(starts) != len(read):
        raise InvalidRequestError(f"{len(starts)} starts for {len(read)} sequences: give one, or one per sequence")
    return read, as_ints(starts)


@dataclass(kw_only=True, slots=True)
class RequestMaker:
    """Checks and numbers the requests of one engine."""

    tokenizer: Any
    vocab: int
    embedded: int  # how many ids the model has embeddings of, which may be more than it has outputs for
    constraint: ConstraintMaker
    find_eos_ids: Callable[[], frozenset[int]]
    max_model_len: int
    kv_tokens: int  # tokens the KV cache holds
    token_bytes: int  # what one of them takes there
    share: int  # sequences to score are a group where they begin with at least so many equal tokens
    seed: int
    encoder: Callable[[], Callable[[Sequence[ImageInputs], Adapter | None], None]]  # as ``EngineCore.encoder``
    attempt: Callable[[str, Callable[[], None]], None]  # as ``Loop.attempt``
    ids: Iterator[int] = field(default_factory=count)
    prompts: Iterator[int] = field(default_factory=count)
    eos_ids: frozenset[int] = frozenset()

    # -- checks: each raises InvalidRequestError --------------------------------------------------------------------

    def check_prompts(self, prompts: list[Read], params: list[SamplingParams]) -> None:
        # The generation config and the tokenizer may name others than at the last call.
        self.eos_ids = self.find_eos_ids()
        for row, ((prompt, _), p) in enumerate(zip(prompts, params, strict=True)):
            self._check_prompt(f"prompt {row}", prompt, p)

    def _check_prompt(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        check_ids(name, prompt, self.vocab, self.embedded)
        if len(prompt) >= self.max_model_len:
            raise PromptTooLongError(
                f"{name} has {len(prompt)} tokens and max_model_len is {self.max_model_len}, so nothing can be "
                f"generated: shorten the prompt or raise EngineConfig.max_model_len{self._ending(prompt)}"
            )
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError(f"{name}: stop strings need a tokenizer: RolloutEngine(model, tokenizer=...)")
        for which in ("logprobs", "prompt_logprobs"):
            if (value := getattr(params, which) or 0) > self.vocab:
                raise InvalidRequestError(f"{name}: {which}={value} and the vocabulary has {self.vocab} tokens")
        for which in ("stop_token_ids", "suppress_token_ids", "logit_bias"):
            given = dict(params.logit_bias) if which == "logit_bias" else getattr(params, which)
            if given and not 0 <= min(given) <= max(given) < self.vocab:
                raise InvalidRequestError(f"{name}: {which} has an id outside 0 to {self.vocab - 1}")
        if len(set(params.suppress_token_ids)) == self.vocab:
            raise InvalidRequestError(
                f"{name}: suppress_token_ids has every id, so nothing can be sampled: leave some out"
            )
        ends = {*params.suppress_token_ids, *self._stop_ids(params)}
        if params.min_tokens and params.regex is None and len(ends) == self.vocab:
            raise InvalidRequestError(
                f"{name}: suppress_token_ids has every id that does not end a completion, and min_tokens="
                f"{params.min_tokens} wants one first: leave some out"
            )
        try:
            self._constraint(params)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{name}: {error}") from error
        open_end = params.max_tokens is None
        longest = min(len(prompt) + (params.max_tokens or 1), self.max_model_len)
        if longest > self.kv_tokens:
            raise InvalidRequestError(
                f"{name} may grow to {longest} tokens and the KV cache holds {self.kv_tokens}: raise "
                f"EngineConfig.kv_cache_memory (a token takes {self.token_bytes} bytes) or "
                f"{'shorten the prompt' if open_end else 'lower max_tokens'}"
            )

    def _ending(self, prompt: list[int]) -> str:
        """How a prompt ends, by which to find it in a shuffled dataset: chats mostly begin alike."""
        return "" if self.tokenizer is None else f"; it ends with {self.tokenizer.decode(prompt[-_SHOWN:])!r}"

    def check_sequences(self, sequences: list[Read], starts: list[Any], of_rollout: bool) -> None:
        """of_rollout: they are prompts with completions, which may be empty where they were aborted."""
        for row, ((sequence, _), start) in enumerate(zip(sequences, starts, strict=True)):
            self._check_sequence(f"sequence {row}", sequence, start, of_rollout)

    def _check_sequence(self, name: str, sequence: list[int], start: Any, of_rollout: bool) -> None:
        length = len(sequence)
        check_ids(name, sequence, self.vocab, self.embedded)
        if length > self.max_model_len:
            raise InvalidRequestError(
                f"{name} has {length} tokens and max_model_len is {self.max_model_len}: shorten it or raise "
                "EngineConfig.max_model_len"
            )
        if not is_int(start) or not 1 <= start < length + of_rollout:
            raise InvalidRequestError(
                f"{name}: start={shown(start)} and the sequence has {length} tokens: give the position of the first token "
                f"to score, an integer from 1 to {length - 1}"
                if length > 1
                else f"{name} has one token, and the first token has no log-probability: leave it out"
            )
        if length - 1 > self.kv_tokens:
            raise InvalidRequestError(
                f"{name} has {length} tokens and the KV cache holds {self.kv_tokens}: raise "
                f"EngineConfig.kv_cache_memory (a token takes {self.token_bytes} bytes)"
            )

    def variant(self, temperature: Any, top_k: Any) -> Variant:
        temperature = as_real(temperature)
        if not is_real(temperature) or not SMALLEST <= temperature <= LARGEST:
            raise InvalidRequestError(
                f"temperature={shown(temperature)}: it has to be a number from {SMALLEST} to {LARGEST:g} (1 is the model's own "
                "distribution)"
            )
        top_k = as_int(top_k)
        if not is_int(top_k) or not 0 <= top_k <= self.vocab:
            raise InvalidRequestError(f"top_k={shown(top_k)}: it has to be an integer from 0 to {self.vocab}")
        return Variant(float(temperature), int(top_k))

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        if params.regex is None:
            return None
        return self.constraint(params.regex, self._stop_ids(params), frozenset(params.suppress_token_ids))

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)

    # -- making ------------------------------------------------------------------------------------------------------

    def for_generation(
        self, prompts: list[Read], params: list[SamplingParams], adapters: list[Adapter | None]
    ) -> list[tuple[list[Request], Scoring | None]]:
        """For each prompt, the requests of its samples, and the ``Scoring`` of its prompt log-probabilities where asked for.

        Consecutive equal prompts with the same adapter are a group, of which one sample computes these. Raises as
        ``EngineCore.encoder`` does, naming the prompt.
        """
        made: list[tuple[list[Request], Scoring | None]] = []
        group: list[Request] = []
        scorings: dict[Variant, Scoring] = {}
        special = special_tokens(self.tokenizer) if any(p.stop for p in params) else {}
        encoded = self._encoded("prompt", prompts, adapters)
        for row, ((prompt, _), images, p, adapter) in enumerate(zip(prompts, encoded, params, adapters, strict=True)):
            same = row and prompt == prompts[row - 1][0] and images is encoded[row - 1]
            if not same or adapter is not adapters[row - 1]:
                group, scorings = [], {}
            try:
                spec = self._lower(prompt, p)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {row}: {error}") from error
            requests = []
            for index in range(p.n):
                checker = StopStringChecker(self.tokenizer, p.stop, special) if p.stop else None
                requests.append(
                    Request(next(self.ids), prompt, spec, index, checker, group, adapter=adapter, images=images)
                )
            scoring = None
            if p.prompt_logprobs is not None:
                variant = Variant(1.0 if p.logprobs_mode == "raw" else p.temperature or 1.0, p.prompt_logprobs)
                scoring = scorings.get(variant)
                if scoring is None:
                    scoring = scorings[variant] = requests[0].scoring = Scoring(variant, 1, len(prompt))
            group.extend(requests)
            made.append((requests, scoring))
        return made

    def for_scoring(
        self, sequences: list[Read], starts: list[int], variants: list[Variant], adapters: list[Adapter | None]
    ) -> list[Request]:
        """One request a sequence. Raises as ``for_generation`` does.

        Consecutive ones with the same adapter and tokens before those to score are a group.
        """
        made: list[Request] = []
        group: list[Request] = []
        encoded = self._encoded("sequence", sequences, adapters)
        rows = zip(sequences, encoded, starts, variants, adapters, strict=True)
        for (sequence, _), images, start, variant, adapter in rows:
            shared, given = sequence[: start - 1], sequence[start - 1 :]
            same = group and shared == group[0].prompt and adapter is group[0].adapter and images is group[0].images
            if len(shared) < self.share or not same:
                group = []
            spec = SamplingSpec(temperature=0.0, max_tokens=len(given))  # nothing is sampled beyond the given ones
            request = Request(
                next(self.ids), shared, spec, 0, None, group, Scoring(variant, start, len(sequence)), given, adapter
            )
            request.images = images
            if start == len(sequence):  # a completion that was aborted before its first token
                request.end()
            group.append(request)
            made.append(request)
        return made

    def _encoded(self, what: str, read: list[Read], adapters: list[Adapter | None]) -> list[ImageInputs | None]:
        """The encoded images of each prompt. Prompts that are equal up to their last image share one object."""
        ensure, known = self.encoder(), dict[object, list[ImageInputs]]()
        together: dict[Adapter | None, list[ImageInputs]] = {}
        for (_, given), adapter in zip(read, adapters, strict=True):
            if given is not None and (given.digest, adapter) not in known:
                known[given.digest, adapter] = [replace(given)]  # with another adapter it has other features
                together.setdefault(adapter, []).extend(known[given.digest, adapter])
        for adapter, several in together.items():  # between steps of other threads, which use the same modules
            with suppress(InvalidRequestError, UnsupportedModelError):  # raised below, with the prompt's number
                self.attempt("read images", partial(ensure, several, adapter))
        found: list[ImageInputs | None] = []
        for row, ((_, given), adapter) in enumerate(zip(read, adapters, strict=True)):
            if given is None:
                found.append(None)
                continue
            alike = known[given.digest, adapter]
            fitting = (one for one in alike if one.features is None or one.serves(given.tokens))
            if (images := next(fitting, None)) is None:
                images = replace(given)
                alike.append(images)
            if images.features is None:
                try:
                    self.attempt("read images", partial(ensure, [images], adapter))
                except (InvalidRequestError, UnsupportedModelError) as error:
                    raise type(error)(f"{what} {row}: {error}") from error
            found.append(images)
        return found

    def _lower(self, prompt: list[int], p: SamplingParams) -> SamplingSpec:
        # A request without a seed draws from the engine's seed and its own number: new tokens at every call, and the
        # same ones in every run.
        seed = p.seed
        if seed is None:
            name = f"{self.seed}:{next(self.prompts)}".encode()
            seed = int.from_bytes(blake2b(name, digest_size=8).digest(), "little")
        max_tokens = min(self.max_model_len, self.kv_tokens) - len(prompt)
        if p.max_tokens is not None:
            max_tokens = min(p.max_tokens, self.max_model_len - len(prompt))
        return SamplingSpec(
            temperature=p.temperature,
            top_p=p.top_p,
            top_k=p.top_k if p.top_k < self.vocab else 0,
            min_p=p.min_p,
            repetition_penalty=p.repetition_penalty,
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
            max_tokens=max_tokens,
            min_tokens=min(p.min_tokens, max_tokens),
            stop_ids=self._stop_ids(p),
            bias=_bias(p.logit_bias, p.suppress_token_ids),
            constraint=self._constraint(p),
            seed=seed & _SEED_MASK,
            top_logprobs=p.logprobs,
            logprobs_mode=LOGPROBS_MODES.index(p.logprobs_mode),
        )

    # -- results -----------------------------------------------------------------------------------------------------

    def output(self, read: Read, requests: list[Request], scoring: Scoring | None) -> RolloutOutput:
        prompt, given = read  # not the requests' images, which may be of another prompt with the same ones
        completions = []
        for r in requests:
            decode = None
            if self.tokenizer is not None:
                decode = partial(completion_text, self.tokenizer, r.output, r.stop_reason)
            completions.append(
                Completion(
                    index=r.sample_index,
                    token_ids=r.output,
                    logprobs=r.logprobs,
                    top_logprobs=r.top_logprobs if r.spec.top_logprobs else None,
                    finish_reason=r.finish_reason,  # type: ignore[arg-type]
                    stop_reason=r.stop_reason,
                    weight_versions=r.weight_versions,
                    _decode=decode,
                )
            )
        return RolloutOutput(
            prompt_token_ids=prompt,
            prompt_inputs=None if given is None else given.inputs,
            completions=completions,
            cached_tokens=requests[0].cached_tokens,
            prompt_logprobs=token_logprobs(prompt, scoring) if scoring is not None and scoring.complete else None,
            error=next((r.error for r in requests if r.error is not None), None),
        )


@lru_cache(maxsize=16)
def _bias(logit_bias: Sequence[tuple[int, float]], suppressed: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """``SamplingSpec.bias``. Cached, as it may be long and is mostly the same for all prompts of a call."""
    return tuple(sorted((dict(logit_bias) | dict.fromkeys(suppressed, -math.inf)).items()))


def token_logprobs(
    tokens: list[int], scoring: Scoring, *, entropy: bool = False, error: StokerError | None = None
) -> TokenLogprobs:
    """The result of scoring a sequence. The tensors are the caller's own."""
    scores = scoring.scores
    if error is None and not scoring.complete:
        error = RequestFailedError("the sequence was aborted before it was scored: score it again")
    bad = scores.logprobs.isnan().nonzero()
    if error is None and len(bad):
        error = RequestFailedError(
            f"the model gave NaN logits for the token at position {scoring.first + int(bad[0])}: check the weights and the "
            "learning rate; the engine and its other requests go on"
        )
    top_k = scoring.variant.top_k
    return TokenLogprobs(
        token_ids=torch.tensor(tokens[scoring.first : scoring.end], dtype=torch.long, device="cpu"),
        logprobs=scores.logprobs.clone(),
        ranks=scores.ranks.clone(),
        top_ids=scores.top_ids.clone() if top_k else None,
        top_logprobs=scores.top_logprobs.clone() if top_k else None,
        entropy=scores.entropy.clone() if entropy else None,
        error=error,
    )
