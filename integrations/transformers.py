"""transformers: for loops written on ``model.generate`` or ``model.generate_batch``, the same calls on an engine.

sequences = model.generate(**inputs, max_new_tokens=64)  # before
sequences = model.generate(**inputs, max_new_tokens=64, custom_generate=on_engine(engine))  # after

outputs = model.generate_batch(inputs, generation_config=config)  # before
outputs = generate_batch(engine, inputs, generation_config=config)  # after
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.continuous_batching import RequestStatus
from transformers.generation.continuous_batching.requests import GenerationOutput

from stoker.kernels.errors import InvalidRequestError
from stoker.rollout import RolloutEngine, SamplingParams
from stoker.weight_sync.naming import unwrap

# What ``generate`` makes of its configuration: a name that each kind has in the configuration and as its own attribute.
_MADE_BY_GENERATE = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
    "RepetitionPenaltyLogitsProcessor": ("repetition_penalty", "penalty"),
    "MinLengthLogitsProcessor": "min_length",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
    "SequenceBiasLogitsProcessor": "sequence_bias",
    "MaxLengthCriteria": "max_length",
    "EosTokenCriteria": "eos_token_id",
}
# Of what ``generate`` hands on for the model's forward, that which says nothing beyond the token ids and their mask.
_OF_THE_FORWARD = {"attention_mask", "position_ids", "past_key_values", "cache", "use_cache", "logits_to_keep"}


def generate_batch(
    engine: RolloutEngine,
    inputs: Sequence[Sequence[int]],
    generation_config: GenerationConfig,
    *,
    max_new_tokens: int | None = None,
    progress_bar: bool = False,
) -> dict[str, GenerationOutput]:
    """Completions of ``inputs``, prompts as token ids, under request ids ``"req_0"``, ``"req_1"``, ... in their order.

    generation_config: as ``SamplingParams.from_generation_config`` translates it. max_new_tokens: wins over the
    configuration's. What sets up transformers' own engine (``continuous_batching_config``, ``persistent_manager``,
    ``warmup``, ``record_timestamps``) has no meaning here: leave it out. Of ``num_return_sequences`` completions of a
    prompt the last has the id of the prompt, those before it ``"req_0__child#0"`` and so on. As there, completions end at
    the configuration's ``eos_token_id`` and at no other, a configuration without ``top_k`` does not truncate, and a request
    that failed says so in its ``error``. Unlike there, ``logprobs`` are always set, those of
    ``SamplingParams.logprobs_mode="scaled"``; sampling needs no cast of the model, and what cannot be served is an
    ``InvalidRequestError`` before any work starts.
    """
    if isinstance(engine, nn.Module) or not isinstance(generation_config, GenerationConfig):
        raise InvalidRequestError(
            "generate_batch takes an engine, prompts and a generation config: model.generation_config, say"
        )
    if max_new_tokens is None and generation_config.max_new_tokens is None:
        raise InvalidRequestError("the generation config sets no max_new_tokens: set it, or pass max_new_tokens=")
    settings: dict[str, int] = {} if max_new_tokens is None else {"max_tokens": max_new_tokens}
    if generation_config.top_k is None:
        settings["top_k"] = 0  # ``generate`` would take 50
    params = SamplingParams.from_generation_config(generation_config, ignore_eos=True, **settings)
    batch = engine.generate_batch(inputs, params, progress_bar=progress_bar)
    outputs = {}
    for row, output in enumerate(batch):
        for completion in output.completions:
            last = completion.index == params.n - 1
            request_id = f"req_{row}" if last else f"req_{row}__child#{completion.index}"
            outputs[request_id] = GenerationOutput(
                request_id=request_id,
                prompt_ids=output.prompt_token_ids,
                generated_tokens=completion.token_ids,
                logprobs=completion.logprobs,
                error=None if output.error is None else str(output.error),
                status=RequestStatus.FINISHED if output.error is None else RequestStatus.FAILED,
            )
    return outputs


@dataclass
class GeneratedOnEngine(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """What ``generate`` returns with ``return_dict_in_generate``.

    sequences: int64 [B, P + C], prompts as given and completions, padded on the right. logprobs: float32 [B, C] of the
    completions' tokens, in nats, under ``softmax(logits / temperature)`` (greedy: of temperature 1); 0 where padded.
    """

    logprobs: Tensor | None = None


def on_engine(engine: RolloutEngine, **settings: Any) -> Callable[..., Tensor | GeneratedOnEngine]:
    """A decoding loop for ``model.generate(..., custom_generate=on_engine(engine))``, which samples on ``engine``.

    settings: of ``SamplingParams``, beside or instead of what ``generate`` is told: ``stop``, say, as transformers hands no
    tokenizer for ``stop_strings`` to such a loop. It reads the arguments, the generation configuration and the model's own as
    ever, and repeats prompts for ``num_return_sequences``; each is computed once. Row i samples with ``seed + i``, else with what
    torch's generator of the CPU gives. For code that calls ``model.generate`` by itself:

        model.generate = partial(model.generate, custom_generate=on_engine(engine))
        ...
        del model.generate

    It returns as ``generate`` does: int64 [B, P + C], or with ``return_dict_in_generate`` a ``GeneratedOnEngine``. Raises
    ``InvalidRequestError`` before any work starts for what the engine does not do: beams, scores, another model, logits
    processors and stopping criteria of one's own, inputs other than token ids. A ``streamer`` is given the prompt alone.
    """
    if not isinstance(engine, RolloutEngine):
        raise InvalidRequestError(f"on_engine takes an engine, and this is a {type(engine).__name__}")
    if "n" in settings:
        raise InvalidRequestError("on_engine(n=...): say it to generate, as num_return_sequences")

    def decode(
        model: nn.Module,
        input_ids: Tensor,
        logits_processor: Iterable[Any],
        stopping_criteria: Iterable[Any],
        generation_config: GenerationConfig,
        **of_the_forward: Any,
    ) -> Tensor | GeneratedOnEngine:
        if model is not unwrap(engine.model):
            raise InvalidRequestError("generate was called on another model than the engine's: make an engine for it")
        mask = _mask_of(input_ids, of_the_forward)
        params = _params_of(generation_config, input_ids.shape[1], settings)
        for each in (*logits_processor, *stopping_criteria):
            if not _is_of(generation_config, each):
                raise InvalidRequestError(
                    f"generate was given a {type(each).__name__}, which the engine does not run: say it by the generation "
                    "configuration if that has a field for it, or leave custom_generate out"
                )
        of_rows = [params] * len(input_ids)
        if params.temperature:  # the samples of a prompt are rows, too
            given = None if params.seed is None else range(params.seed, params.seed + len(input_ids))
            seeds = given or torch.randint(2**62, (len(input_ids),), device="cpu").tolist()
            of_rows = [replace(params, seed=seed) for seed in seeds]
        batch = engine.generate_batch(input_ids, of_rows, attention_mask=mask.to(torch.int64))
        batch.raise_for_errors()
        padding = generation_config.pad_token_id
        tensors = batch.to_tensors(
            params.stop_token_ids[0] if padding is None and params.stop_token_ids else padding or 0,
            device=input_ids.device,
        )
        sequences = torch.cat([input_ids, tensors.completion_ids], dim=1)
        if not generation_config.return_dict_in_generate:
            return sequences
        return GeneratedOnEngine(sequences=sequences, logprobs=tensors.logprobs)

    return decode


def _mask_of(input_ids: Tensor, of_the_forward: dict[str, Any]) -> Tensor:
    """Which tokens count, bool [B, P]. Raises ``InvalidRequestError`` for what a prompt of tokens does not have."""
    more = [name for name, given in of_the_forward.items() if name not in _OF_THE_FORWARD and given is not None]
    if more:
        raise InvalidRequestError(
            f"generate was given {', '.join(sorted(more))}, and the engine takes token ids here: for images give "
            "engine.generate_batch what the processor returns"
        )
    mask = of_the_forward.get("attention_mask")  # None where it would be all ones
    mask = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    positions = of_the_forward.get("position_ids")
    if positions is not None and positions.dim() == 2:
        expected = mask.cumsum(1) - 1
        if positions.shape != expected.shape or bool((positions != expected)[mask].any()):
            raise InvalidRequestError("generate was given position_ids other than the tokens' order: leave them out")
    return mask


def _is_of(config: GenerationConfig, made: Any) -> bool:
    """Whether a logits processor or stopping criterion does what the configuration says and no more."""
    names = _MADE_BY_GENERATE.get(type(made).__name__)
    if names is None:
        return False
    field, attribute = (names, names) if isinstance(names, str) else names
    wanted, found = getattr(config, field, None), getattr(made, attribute, None)
    return wanted is not None and _plain(wanted) == _plain(found)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.tolist()
    return list(value) if isinstance(value, tuple | list | set) else [value]


def _params_of(config: GenerationConfig, num_prompt: int, settings: dict[str, Any]) -> SamplingParams:
    """As ``generate`` has filled it in, lengths with the padded prompt's, where ``settings`` say nothing else. Of one sample."""
    config, most = copy.copy(config), config.max_length - num_prompt
    fewest = max(config.min_new_tokens or 0, (config.min_length or 0) - num_prompt)
    config.min_length = config.max_length = None
    lengths = {"max_tokens": most, "min_tokens": max(min(fewest, most), 0)}
    return SamplingParams.from_generation_config(config, **{"ignore_eos": True, **lengths, **settings, "n": 1})
