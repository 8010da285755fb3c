"""Decode alone, at fixed batch and context (workload iii)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from stoker.benchmarks import ceilings
from stoker.benchmarks.footprint import room
from stoker.benchmarks.workloads import ModelSpec, dtype_of, random_prompts
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

STEPS = 64
_MOST_KV_BYTES = 40 * 2**30
_REPEATS = 3


def _seconds(engine: RolloutEngine, prompts: list[list[int]], tokens: int) -> float:
    start = time.perf_counter()
    engine.generate_batch(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
    return time.perf_counter() - start


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
