"""What is neither decode nor a whole rollout: starting up, prefill alone, a trainer's whole cycle, sleep and wake."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from stoker.benchmarks import ceilings
from stoker.benchmarks.ceilings import Ceiling
from stoker.benchmarks.footprint import used
from stoker.benchmarks.workloads import Workload, train
from stoker.rollout import RolloutEngine, SamplingParams

# From a model in memory to its first token, in a process that has done nothing else.
_START_UP = """
import json, sys, time
from stoker.benchmarks.step_profile import MODELS
from stoker.benchmarks.workloads import dtype_of
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams
name, device = sys.argv[1:]
model = MODELS[name].build(device, dtype_of(device))
start = time.perf_counter()
engine = RolloutEngine(model, config=EngineConfig(max_model_len=4096))
engine.generate_batch([[1, 2, 3]], SamplingParams(max_tokens=1))
print(json.dumps(time.perf_counter() - start))
"""


def start_up(model: str, device: str, limit_s: float | None = None) -> dict[str, float]:
    """Seconds to the first token of a new process, its kernels compiled before (warm) or not (cold; a CPU compiles none).

    limit_s: each process may take this many seconds; the cold one's is told as ``cold_over_s`` where it takes more.
    """
    runs = ("cold_s", "warm_s") if device == "cuda" else ("warm_s",)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in runs:
            try:
                run = subprocess.run(
                    [sys.executable, "-P", "-c", _START_UP, model, device],
                    env=os.environ | {"TRITON_CACHE_DIR": folder},
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                    timeout=limit_s,
                )
            except subprocess.TimeoutExpired:
                if name == "warm_s":
                    raise
                assert limit_s is not None
                return {"cold_over_s": limit_s}  # another would have some kernels left to compile: it is not warm
            found[name] = json.loads(run.stdout.splitlines()[-1])
    return found


def prefill(engine: RolloutEngine, ceiling: Ceiling, work: Workload, vocab: int, repeats: int = 3) -> dict[str, float]:
    """Prompts alone (workload iv): every prompt is another one, and has one token sampled."""
    alone = replace(work, name="iv", prompts=work.prompts * 2, samples=1, median=1, sigma=0.0, cap=1)
    seconds = []
    for repeat in range(-1, repeats):
        prompts = alone.draw(vocab, 3000 + repeat)
        start = time.perf_counter()
        engine.generate_batch(prompts, SamplingParams(max_tokens=1))
        if repeat >= 0:
            seconds.append(time.perf_counter() - start)
    tokens, best = sum(map(len, prompts)), ceiling.rollout_s(prompts, alone.lengths, alone.slots)
    median = statistics.median(seconds)
    return {"tokens": tokens, "seconds": median, "tokens_per_s": tokens / median, "of_ceiling": best / median}


def cycle(
    engine: RolloutEngine, model: torch.nn.Module, work: Workload, vocab: int, device: str, repeats: int = 3
) -> dict[str, float]:
    """wake_up, update_weights, a rollout, sleep (workload vii), as a trainer does at each step: medians.

    Before each the weights change in place, as an optimizer changes them, which is not timed.
    """
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in work.lengths]
    engine.sleep()
    each: list[dict[str, float]] = []
    for repeat in range(repeats):
        train(model)
        prompts = work.draw(vocab, 4000 + repeat)
        calls: dict[str, Callable[[], object]] = {
            "wake_up": engine.wake_up,
            "update_weights": engine.update_weights,
            "rollout": partial(engine.generate_batch, prompts, params),
            "sleep": engine.sleep,
        }
        each.append({name: ceilings.seconds(call, device) for name, call in calls.items()})
    engine.wake_up()
    found = {f"{name}_s": statistics.median(one[name] for one in each) for name in each[0]}
    return found | {"not_rollout": 1 - found["rollout_s"] / sum(found.values())}


def maintenance(engine: RolloutEngine, device: str, rounds: int = 50) -> dict[str, float]:
    """What a trainer calls between rollouts: medians in milliseconds, and the memory that sleeping gives back."""

    def milliseconds(call: Any) -> float:
        return ceilings.seconds(call, device) * 1e3

    def held() -> int:
        return used(device)["driver" if device == "cuda" else "resident"]

    update = statistics.median(milliseconds(engine.update_weights) for _ in range(rounds))
    kv_cache_bytes = engine.stats().kv_cache_bytes
    # Only the first time: a cache that was woken and not used yet may hold no page of physical memory.
    before = held()
    sleeps = [milliseconds(engine.sleep)]
    given_back = before - held()
    wakes = [milliseconds(engine.wake_up)]
    for _ in range(4):
        sleeps.append(milliseconds(engine.sleep))
        wakes.append(milliseconds(engine.wake_up))
    return {
        "update_weights_ms": update,
        "kv_cache_bytes": kv_cache_bytes,
        "sleep_ms": statistics.median(sleeps),
        "wake_ms": statistics.median(wakes),
        "given_back_bytes": given_back,
    }
