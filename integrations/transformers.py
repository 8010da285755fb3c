"""transformers: for loops written on ``model.generate_batch``, the same call on an engine.

outputs = model.generate_batch(inputs, generation_config=config)  # before
outputs = generate_batch(engine, inputs, generation_config=config)  # after
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import GenerationConfig
from transformers.generation.continuous_batching import RequestStatus
from transformers.generation.continuous_batching.requests import GenerationOutput

from stoker.kernels.errors import InvalidRequestError
from stoker.rollout import RolloutEngine, SamplingParams


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
