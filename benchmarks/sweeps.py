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
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

STEPS = 64
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


def _seconds(engine: RolloutEngine, prompts: list[list[int]], tokens: int, **settings: Any) -> float:
    start = time.perf_counter()
    engine.generate_batch(prompts, SamplingParams(max_tokens=tokens, **({"ignore_eos": True} | settings)))
    return time.perf_counter() - start


def _seconds_of_generate(model: PreTrainedModel, prompts: Tensor, tokens: int, **settings: Any) -> float:
    start = time.perf_counter()
    out = model.generate(  # type: ignore[operator]
        input_ids=prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=tokens, **settings
    )
    assert out.tolist() and out.shape[1] == prompts.shape[1] + tokens
    return time.perf_counter() - start


def sampling(spec: ModelSpec, device: str, batches: Sequence[int], context: int = 64) -> Iterator[dict[str, Any]]:
    """A decode step of each batch with each of ``SAMPLING``, of the engine and of ``model.generate``."""
    dtype = dtype_of(device)
    model = spec.build(device, dtype)
    memory = max(batches) * (context + 2 * STEPS) * ceilings.kv_token_bytes(spec.config, dtype)
    config = EngineConfig(max_num_seqs=max(batches), max_model_len=context + 2 * STEPS, kv_cache_memory=memory)

    def step_s(seconds: Callable[..., float], which: int, name: str, steps: int) -> list[float]:
        """Of every repeat: what a long rollout takes longer than a short one."""

        def one(tokens: int) -> float:
            return seconds(tokens, **SAMPLING[name](tokens)[which])

        one(1 + steps)  # fills caches, and captures what there is to capture
        return [(one(1 + steps) - one(1)) / steps for _ in range(_REPEATS)]

    with RolloutEngine(model, config=config) as engine:
        for batch in batches:
            prompts = random_prompts(spec, batch, context, f"{batch}/sampling")
            ids = torch.tensor(prompts, device=device)
            plain_s = None
            for name in SAMPLING:
                own = step_s(partial(_seconds, engine, prompts), 0, name, STEPS)
                others = step_s(partial(_seconds_of_generate, model, ids), 1, name, max(STEPS // 4, 1))
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
    """Steps of ``points``, each a batch and a context: the difference of a long and a short rollout of cached prompts.

    No point is begun after ``budget_s`` seconds, and none whose KV cache is beyond any reason, or the device. Each is
    given as soon as it is known.
    """
    dtype = dtype_of(device)
    token_bytes = ceilings.kv_token_bytes(spec.config, torch.float8_e4m3fn if kv_cache_dtype == "fp8" else dtype)
    start = time.perf_counter()
    model = spec.build(device, dtype)
    rounded = sum(p.nbytes for p in model.parameters()) // 2 if quantization else 0
    most = room(device, _MOST_KV_BYTES, besides=rounded)
    fitting = [(b, c) for b, c in points if b * (c + 2 * STEPS) * token_bytes <= most]
    if not fitting:
        raise MemoryError(f"none of {len(points)} points fits into {most / 1e9:.1f} GB")
    batches = [batch for batch, _ in fitting]
    config = EngineConfig(
        max_num_seqs=max(batches),
        max_model_len=max(context for _, context in fitting) + 2 * STEPS,
        kv_cache_memory=max(b * (c + 2 * STEPS) for b, c in fitting) * token_bytes,
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
            _seconds(engine, prompts, 1 + STEPS)  # fills it, and captures what there is to capture
            times = [_seconds(engine, prompts, 1 + STEPS) - _seconds(engine, prompts, 1) for _ in range(_REPEATS)]
            step_s = statistics.median(times) / STEPS
            best_s = ceiling.step_s(batch, batch * (context + STEPS // 2))
            yield {
                "model": spec.name,
                "deterministic": deterministic,
                "kv_cache_dtype": kv_cache_dtype,
                "quantization": quantization,
                "batch": batch,
                "context": context,
                "step_ms": step_s * 1e3,
                "range_ms": [min(times) / STEPS * 1e3, max(times) / STEPS * 1e3],
                "ceiling_ms": best_s * 1e3,
                "tokens_per_s": batch / step_s,
                "of_ceiling": best_s / step_s,
            }
