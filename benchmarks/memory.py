"""Memory between rollouts: what sleep gives back, what stays, and whether anything grows: ``python -m stoker.benchmarks.memory``.

An engine with weights of its own (a bf16 mirror of fp32 masters) and, on CUDA, captured graphs. By level: seconds of sleep and
wake, bytes given back, and what is left beyond the trainer's own; then cycles of sleep, update, wake and rollout, whose greedy
output has to stay the same. Writes one JSON file and a plot, prints a table and, last, one line of JSON. On a CPU only ratios
of one run mean anything.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from stoker.benchmarks import ceilings, command
from stoker.benchmarks.footprint import clear, room, used
from stoker.benchmarks.gate import GateError
from stoker.benchmarks.workloads import LLAMA_1B, QWEN_7B, SMALL, TOY, ModelSpec
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams
from stoker.rollout.config import parse_bytes

LEVELS = (1, 2, 3)
PROMPTS = [[5, 17, 3], [9] * 40, [7, 8] * 10, [2, 4, 8, 16]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    spec: ModelSpec
    kv_cache_memory: str  # less on a device that has no room for it beside the model and its mirror
    repeats: int  # of each level
    cycles: int
    limit_s: float = math.inf  # after which no further cycle is begun


SCENARIOS = {
    ("cpu", False): [
        Scenario(spec=TOY, kv_cache_memory="256MiB", repeats=5, cycles=200),
        Scenario(spec=SMALL, kv_cache_memory="1GiB", repeats=5, cycles=200),
    ],
    ("cpu", True): [Scenario(spec=TOY, kv_cache_memory="32MiB", repeats=1, cycles=20)],
    ("cuda", False): [
        # A thousand cycles of a model whose mirror is large would be mostly copies of that, and of 100 GB mostly mapping.
        Scenario(spec=SMALL, kv_cache_memory="8GB", repeats=5, cycles=1000, limit_s=200),
        Scenario(spec=LLAMA_1B, kv_cache_memory="100GB", repeats=5, cycles=30),
        Scenario(spec=QWEN_7B, kv_cache_memory="60GB", repeats=5, cycles=100, limit_s=100),
    ],
    ("cuda", True): [Scenario(spec=LLAMA_1B, kv_cache_memory="40GB", repeats=2, cycles=30)],
}


def rollout(engine: RolloutEngine) -> list[list[int]]:
    batch = engine.generate_batch(PROMPTS, GREEDY)
    batch.raise_for_errors()
    return [output.completions[0].token_ids for output in batch]


def fill(engine: RolloutEngine) -> None:
    """Write to the whole KV cache: on a CPU memory that was never written to is not held."""
    for pair in engine.core.runner.kv.layers:
        for cache in pair:
            cache.fill_(1.0)


def levels(engine: RolloutEngine, scenario: Scenario, device: str, trainer: dict[str, int]) -> dict[str, Any]:
    """trainer: what was held before there was an engine."""
    found = {}
    for level in LEVELS:
        sleeps, wakes, updates = [], [], []
        for _ in range(scenario.repeats):
            rollout(engine)
            fill(engine)
            gc.collect()
            awake = used(device)
            sleeps.append(ceilings.timed(lambda level=level: engine.sleep(level), device))  # type: ignore[misc]
            asleep = used(device)
            wakes.append(ceilings.timed(engine.wake_up, device))
            updates.append(ceilings.timed(engine.update_weights, device))
        found[str(level)] = {
            "sleep_s": sleeps,
            "wake_s": wakes,
            "update_s": updates,
            "given_back": {kind: awake[kind] - asleep[kind] for kind in awake},
            "residual": {kind: asleep[kind] - trainer[kind] for kind in asleep},
        }
    return found


def cycles(engine: RolloutEngine, model: PreTrainedModel, scenario: Scenario, device: str) -> Iterator[dict[str, Any]]:
    """What is known after each hundred cycles and after all of them.

    Drift: the most that is held in the last tenth of the cycles, less the most in the second.
    """
    weight = next(p for name, p in model.named_parameters() if name.endswith("o_proj.weight"))
    expected: list[list[list[int]]] = []
    held: list[dict[str, int]] = []
    start = time.perf_counter()

    def most(some: list[dict[str, int]], kind: str) -> int:
        return max(h[kind] for h in some)

    def found() -> dict[str, Any]:
        tenth = max(1, len(held) // 10)
        return {
            "cycles": len(held),
            "cycles_wanted": scenario.cycles,
            "seconds": time.perf_counter() - start,
            "identical_output": True,
            "outputs_differ_with_weights": expected[0] != expected[1],
            "held": held,
            "drift": {kind: most(held[-tenth:], kind) - most(held[tenth : 2 * tenth], kind) for kind in held[0]},
        }

    for cycle in range(scenario.cycles):
        if cycle >= 20 and time.perf_counter() - start > scenario.limit_s:
            break
        tokens = rollout(engine)
        if cycle < 2:
            expected.append(tokens)
        if tokens != expected[cycle % 2]:
            raise GateError(f"greedy output of cycle {cycle} is not that of cycle {cycle % 2}")
        engine.sleep(LEVELS[cycle % len(LEVELS)])
        with torch.no_grad():
            weight.neg_()  # and back in the next cycle
        engine.wake_up("weights")
        engine.update_weights()
        engine.wake_up()
        if cycle % 10 == 0:
            gc.collect()
        held.append(used(device))
        if cycle % 100 == 99:
            yield found()
    yield found()


def measure(scenario: Scenario, device: str) -> Iterator[dict[str, Any]]:
    model = scenario.spec.build(device, torch.float32)
    model(torch.tensor([PROMPTS[0]], device=device))  # what libraries set up at their first use is the trainer's
    clear(device)
    trainer = used(device)
    mirror = sum(p.nbytes for p in model.parameters()) // 2
    wanted = parse_bytes(scenario.kv_cache_memory, "kv_cache_memory")
    memory = room(device, wanted, besides=mirror)
    config = EngineConfig(dtype=torch.bfloat16, kv_cache_memory=memory, max_num_seqs=64, max_model_len=2048)
    with RolloutEngine(model, config=config) as engine:
        rollout(engine)
        stats = engine.stats()
        found = {
            "model": {"name": scenario.spec.name, "weight_bytes": mirror},
            "kv_cache_bytes": stats.kv_cache_bytes,
            "kv_cache_wanted_bytes": wanted,
            "trainer": trainer,
            "levels": levels(engine, scenario, device, trainer),
        }
        yield found
        for known in cycles(engine, model, scenario, device):
            yield found | {"cycles": known}
    del engine, model
    clear(device)


def table(run: dict[str, Any]) -> list[str]:
    lines = [
        f"{run['model']['name']}: KV cache {run['kv_cache_bytes'] / 1e6:.0f} MB, a mirror of "
        f"{run['model']['weight_bytes'] / 1e6:.0f} MB",
        f"  {'level':7}{'sleep ms':>10}{'wake ms':>10}{'update ms':>11}  given back, and left beyond the trainer's, MB",
    ]
    for level, at in run["levels"].items():
        sleep, wake, update = (1e3 * statistics.median(at[f"{what}_s"]) for what in ("sleep", "wake", "update"))
        sizes = ", ".join(
            f"{kind} {at['given_back'][kind] / 1e6:.1f} and {at['residual'][kind] / 1e6:.1f}" for kind in at["residual"]
        )
        lines.append(f"  {level:7}{sleep:10.2f}{wake:10.2f}{update:11.2f}  {sizes}")
    drift = ", ".join(f"{kind} {size / 1e6:+.2f} MB" for kind, size in run["cycles"]["drift"].items())
    lines.append(f"  {run['cycles']['cycles']} cycles, greedy output identical; drift: {drift}")
    return lines


def figure(pyplot: Any, runs: list[dict[str, Any]]) -> Any:
    made, panels = pyplot.subplots(1, len(runs), figsize=(5 * len(runs), 3.8), squeeze=False)
    for panel, run in zip(panels[0], runs, strict=True):
        held = run["cycles"]["held"]
        for kind in held[0]:
            panel.plot([h[kind] / 1e6 for h in held], label=kind)
        panel.set(title=run["model"]["name"], xlabel="cycles of sleep, update, wake, rollout", ylabel="MB held")
        panel.set_ylim(0, 1.1 * max(max(h.values()) for h in held) / 1e6)
        panel.legend(fontsize=7)
    return made


def headline(run: dict[str, Any]) -> dict[str, Any]:
    return {
        "sleep_ms": round(1e3 * statistics.median(run["levels"]["1"]["sleep_s"]), 2),
        "wake_ms": round(1e3 * statistics.median(run["levels"]["1"]["wake_s"]), 2),
        "residual_bytes": run["levels"]["2"]["residual"],
        "cycles": run["cycles"]["cycles"],
        "drift_bytes": run["cycles"]["drift"],
    }


def main() -> int:
    quick = "few cycles of a small model"
    return command.run("memory", __doc__, SCENARIOS, measure, table, headline, figure, quick=quick)


if __name__ == "__main__":
    sys.exit(main())
