"""Decode alone: at fixed batch and context (workload iii), and with each of the parameters of sampling."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stoker.benchmarks import ceilings
from stoker.benchmarks.footprint import room
from stoker.benchmarks.workloads import ModelSpec, dtype_of, random_prompts
from stoker.rollout import EngineConfig, RolloutEngine, RolloutHandle, SamplingParams

TOKENS = 80  # of each request: with windows of 8 steps, at least 64 of them are timed
_MOST_KV_BYTES = 40 * 2**30
_REPEATS = 3
_STOP = 5  # an id that ends nothing: where it is named, it may not come
# Parameters of sampling, and what says the same to ``model.generate``, for so many tokens. Random weights make likely tokens
# many; a low temperature makes them few, as a trained model does.
SAMPLING: dict[str, Callable[[int], tuple[dict[str, Any], dict[str, Any]]]] = {
    "plain": lambda tokens: ({}, {}),
    "top-k 20": lambda tokens: _alike(top_k=20),
    "top-p 0.95": lambda tokens: _alike(top_p=0.95),
    "top-p 0.95, temperature 0.1": lambda tokens: _alike(top_p=0.95, temperature=0.1),
    "min-p 0.05": lambda tokens: _alike(min_p=0.05),
    "repetition penalty 1.1": lambda tokens: _alike(repetition_penalty=1.1),
    "min_tokens": lambda tokens: (
        {"min_tokens": tokens, "stop_token_ids": [_STOP], "ignore_eos": False},
        {"min_new_tokens": tokens, "eos_token_id": _STOP},
    ),
    "logit_bias": lambda tokens: ({"logit_bias": {_STOP: -9.0}}, {"sequence_bias": {(_STOP,): -9.0}}),
}


def _alike(**settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return settings, settings


def begun(
    engine: RolloutEngine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    adapters: Sequence[str | None] | None = None,
) -> tuple[list[RolloutHandle], int]:
    """Requests all of whose prompts are through, and how many tokens they have, with those that the device still samples."""
    by_row = adapters or [None] * len(prompts)
    handles = [engine.submit(prompt, params, adapter=name) for prompt, name in zip(prompts, by_row, strict=True)]
    engine.wait(handles, share=0, timeout=0)
    while any(not h._requests[0].num_output for h in handles):
        engine.wait(handles, timeout=0)
    return handles, sum(r.num_output + r.pending for h in handles for r in h._requests)


def step_seconds(
    engine: RolloutEngine,
    prompts: Sequence[list[int]],
    device: str,
    repeats: int,
    adapters: Sequence[str | None] | None = None,
    **settings: Any,
) -> list[float]:
    """Of one decode step, in each repeat: from when all prompts are through to the end of all."""
    params, times = SamplingParams(**({"max_tokens": TOKENS, "ignore_eos": True} | settings)), []
    engine.generate_batch(list(prompts), params, adapter=adapters)  # fills caches, captures what there is to capture
    for _ in range(repeats):
        handles, before = begun(engine, prompts, params, adapters)
        took = ceilings.seconds(partial(engine.wait, handles), device)
        tokens = sum(len(handle.result().completions[0].token_ids) for handle in handles) - before
        times.append(took * len(prompts) / tokens)
    return times


def _seconds_of_generate(model: PreTrainedModel, prompts: Tensor, tokens: int, **settings: Any) -> float:
    start = time.perf_counter()
    out = model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=tokens, **settings)
    assert out.tolist() and out.shape[1] == prompts.shape[1] + tokens
    return time.perf_counter() - start


def sampling(spec: ModelSpec, device: str, batches: Sequence[int], context: int = 64) -> Iterator[dict[str, Any]]:
    """A decode step of each batch with each of ``SAMPLING``, of the engine and of ``model.generate``."""
    dtype = dtype_of(device)
    model = spec.build(device, dtype)
    memory = max(batches) * (context + TOKENS) * ceilings.kv_token_bytes(spec.config, dtype)
    config = EngineConfig(max_num_seqs=max(batches), max_model_len=context + TOKENS, kv_cache_memory=memory)

    def of_generate(prompts: Tensor, name: str, steps: int) -> list[float]:
        """Of every repeat: what a long rollout takes longer than a short one."""

        def one(tokens: int) -> float:
            return _seconds_of_generate(model, prompts, tokens, **SAMPLING[name](tokens)[1])

        one(1 + steps)
        return [(one(1 + steps) - one(1)) / steps for _ in range(_REPEATS)]

    with RolloutEngine(model, config=config) as engine:
        for batch in batches:
            prompts = random_prompts(spec, batch, context, f"{batch}/sampling")
            ids = torch.tensor(prompts, device=device)
            plain_s = None
            for name in SAMPLING:
                own = step_seconds(engine, prompts, device, _REPEATS, **SAMPLING[name](TOKENS)[0])
                others = of_generate(ids, name, max(TOKENS // 5, 1))
                own_s, others_s = statistics.median(own), statistics.median(others)
                plain_s = plain_s or own_s
                yield {
                    "model": spec.name,
                    "vocab": spec.config.vocab_size,
                    "batch": batch,
                    "settings": name,
                    "step_ms": own_s * 1e3,
                    "range_ms": [min(own) * 1e3, max(own) * 1e3],
                    "of_plain": own_s / plain_s,
                    "generate_ms": others_s * 1e3,
                    "x_generate": others_s / own_s,
                }


def decode(
    spec: ModelSpec,
    device: str,
    points: Sequence[tuple[int, int]],
    budget_s: float,
    *,
    deterministic: bool = False,
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    quantization: Literal["fp8"] | None = None,
) -> Iterator[dict[str, Any]]:
    """Steps of ``points``, each a batch and a context.

    No point is begun after ``budget_s`` seconds, and none whose KV cache is beyond any reason, or the device. Each is
    given as soon as it is known.
    """
    dtype = dtype_of(device)
    token_bytes = ceilings.kv_token_bytes(spec.config, torch.float8_e4m3fn if kv_cache_dtype == "fp8" else dtype)
    start = time.perf_counter()
    model = spec.build(device, dtype)
    rounded = sum(p.nbytes for p in model.parameters()) // 2 if quantization else 0
    most = room(device, _MOST_KV_BYTES, besides=rounded)
    fitting = [(b, c) for b, c in points if b * (c + TOKENS) * token_bytes <= most]
    if not fitting:
        raise MemoryError(f"none of {len(points)} points fits into {most / 1e9:.1f} GB")
    batches = [batch for batch, _ in fitting]
    config = EngineConfig(
        max_num_seqs=max(batches),
        max_model_len=max(context for _, context in fitting) + TOKENS,
        kv_cache_memory=max(b * (c + TOKENS) for b, c in fitting) * token_bytes,
        kv_cache_dtype=kv_cache_dtype,
        quantization=quantization,
        deterministic=deterministic,
    )
    with RolloutEngine(model, config=config) as engine:
        ceiling = ceilings.measure(model, device, rows=(max(batches), 4096), kv_tokens=0)
        ceiling = replace(ceiling, kv_bytes=token_bytes)
        if quantization is not None:
            head = model.get_output_embeddings().weight
            ceiling = replace(ceiling, weight_bytes=engine.stats().mirror_bytes + head.nbytes)
        for number, (batch, context) in enumerate(fitting):
            if number and time.perf_counter() - start > budget_s:
                break
            prompts = random_prompts(spec, batch, context, f"{batch}/{context}")
            engine.update_weights()  # empties the prefix cache
            times = step_seconds(engine, prompts, device, _REPEATS)
            step_s = statistics.median(times)
            best_s = ceiling.step_s(batch, batch * (context + TOKENS // 2))
            yield {
                "model": spec.name,
                "deterministic": deterministic,
                "kv_cache_dtype": kv_cache_dtype,
                "quantization": quantization,
                "batch": batch,
                "context": context,
                "step_ms": step_s * 1e3,
                "range_ms": [min(times) * 1e3, max(times) * 1e3],
                "ceiling_ms": best_s * 1e3,
                "tokens_per_s": batch / step_s,
                "of_ceiling": best_s / step_s,
            }
