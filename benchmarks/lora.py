"""Adapters against the bare base, and live adapters against merge-and-push, in one run: ``python -m stoker.benchmarks.lora``.

Decode steps alone, and GRPO groups from token ids to completions: on the base alone, with one live adapter, and with many
mixed in each batch. Then what it takes until a trainer's new adapter is what the engine samples from. Writes one JSON file,
prints a table and, last, one line of JSON. On a CPU only ratios of one run mean anything: run it on a machine that does
nothing else.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict

from stoker.benchmarks import ceilings, command, gate, sweeps
from stoker.benchmarks.workloads import (
    LLAMA_1B,
    QWEN_7B,
    SMALL,
    TOY,
    ModelSpec,
    Workload,
    dtype_of,
    random_prompts,
)
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

RANK = 16
CONTEXT, MOST_REPEATS = 512, 3  # of decode steps alone

Ways: TypeAlias = dict[str, str | Sequence[str | None] | None]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """batches: sequences of the decode steps that are timed alone. wide: adapters in fp32 over any base, as PEFT makes them by
    default; else in the base's dtype."""

    spec: ModelSpec
    workload: Workload
    adapters: int
    repeats: int
    batches: tuple[int, ...] = ()
    wide: bool = False


_CPU = Workload(name="grpo", prompts=16, samples=4, prompt_tokens=(16, 64), median=50, sigma=0.5, cap=128, slots=64)
_GPU = Workload(name="grpo", prompts=64, samples=4, prompt_tokens=(64, 256), median=400, sigma=0.5, cap=1024, slots=256)
_QUICK = Workload(name="quick", prompts=4, samples=2, prompt_tokens=(8, 16), median=8, sigma=0.5, cap=16, slots=8)
# A step of few rows is launches, and not what adapters cost.
_QUICK_GPU = Workload(
    name="quick", prompts=32, samples=4, prompt_tokens=(64, 256), median=60, sigma=0.3, cap=128, slots=128
)

_CHECKED = {"cpu": 8, "cuda": 40}  # rows

SCENARIOS = {
    ("cpu", False): [Scenario(spec=s, workload=_CPU, adapters=16, repeats=5) for s in (TOY, SMALL)],
    ("cpu", True): [Scenario(spec=s, workload=_QUICK, adapters=4, repeats=1, batches=(4,)) for s in (TOY, SMALL)],
    ("cuda", False): [
        Scenario(spec=s, workload=_GPU, adapters=16, repeats=5, batches=(64, 128, 256), wide=wide)
        for s, wide in ((LLAMA_1B, False), (QWEN_7B, False), (LLAMA_1B, True))
    ],
    ("cuda", True): [
        Scenario(spec=LLAMA_1B, workload=_QUICK_GPU, adapters=16, repeats=2, batches=(64,), wide=wide)
        for wide in (False, True)
    ],
}


@torch.no_grad()
def train(model: PeftModel) -> None:
    """Stands in for an optimizer step: new numbers in every adapter, in place."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.normal_(std=0.02)


def build(spec: ModelSpec, device: str, adapters: int, *, wide: bool = False) -> PeftModel:
    """A model with so many adapters, "0", "1", ... wide: as of ``Scenario``."""
    base = spec.build(device, dtype_of(device))
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    # Without memory at first: to fill it with numbers on the host, which ``train`` replaces, would take seconds.
    how = {"autocast_adapter_dtype": wide, "low_cpu_mem_usage": True}
    model = get_peft_model(base, config, adapter_name="0", **how).eval()
    for index in range(1, adapters):
        model.add_adapter(str(index), config, **how)
    for module in model.modules():
        if any(p.is_meta for p in module.parameters(recurse=False)):
            module.to_empty(device=device, recurse=False).to(torch.float32 if wide else base.dtype)
    train(model)
    return model


@torch.inference_mode()
def check(engine: RolloutEngine, model: PeftModel, prompts: Sequence[list[int]], adapters: int) -> dict[str, float]:
    """That log-probabilities are those of PEFT's own forward: of a batch of all adapters, as many rows as the steps timed."""
    names = [str(row % adapters) for row in range(len(prompts))]
    outputs = engine.generate_batch(list(prompts), SamplingParams(max_tokens=8), adapter=names)
    worst = 0.0
    for output, name in zip(outputs, names, strict=True):
        (completion,) = output.completions
        ids, prompt = completion.token_ids, output.prompt_token_ids
        model.set_adapter(name)
        logits = model(torch.tensor([prompt + ids], device=model.device)).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1)[range(len(ids)), ids].cpu()
        worst = max(worst, (expected - torch.tensor(completion.logprobs)).abs().max().item())
    model.set_adapter("0")
    return gate.check(worst, gate.limit_of(model.dtype), "PEFT's")


def ways(rows: int, adapters: int, samples: int = 1) -> Ways:
    """What is compared, of rows in groups of ``samples``: no adapter, one, all of them mixed, and those in every other group."""
    by_row: list[str | None] = [str(row // samples % adapters) for row in range(rows)]
    half = [name if row // samples % 2 else None for row, name in enumerate(by_row)]
    return {"base": None, "one": "0", "mixed": by_row, "half without": half}


def steps(engine: RolloutEngine, scenario: Scenario, device: str) -> Iterator[dict[str, Any]]:
    """A decode step of each batch."""
    repeats = min(scenario.repeats, MOST_REPEATS)
    for batch in scenario.batches:
        prompts = random_prompts(scenario.spec, batch, CONTEXT, f"{batch}/adapters")
        seconds: dict[str, list[float]] = {}
        # One after the other: the prefix cache may not hold the prompts of all.
        for name, adapter in ways(batch, scenario.adapters).items():
            by_row = [adapter] * batch if adapter is None or isinstance(adapter, str) else adapter
            seconds[name] = sweeps.step_seconds(engine, prompts, device, repeats, by_row)
        step_s = {name: statistics.median(times) for name, times in seconds.items()}
        yield {
            "batch": batch,
            "context": CONTEXT,
            "seconds": seconds,
            "step_ms": {name: 1e3 * s for name, s in step_s.items()},
            "of_base_speed": {name: step_s["base"] / s for name, s in step_s.items()},
        }


def rollouts(engine: RolloutEngine, scenario: Scenario, device: str) -> Iterator[dict[str, Any]]:
    """After each repeat, seconds of the same requests with no adapter, with one, and with all of them mixed.

    Speeds are compared within a repeat, whose runs follow each other: a machine's own speed may change from one to the next.
    """
    work = scenario.workload
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in work.lengths]
    compared = ways(len(params), scenario.adapters, work.samples)
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    for repeat in range(-1, scenario.repeats):  # the first is for what is made or captured once
        prompts = work.draw(scenario.spec.config.vocab_size, repeat)
        for name, adapter in compared.items():
            took = ceilings.timed(lambda p=prompts, a=adapter: engine.generate_batch(p, params, adapter=a), device)  # type: ignore[misc]
            if repeat >= 0:
                seconds[name].append(took)
        if repeat >= 0:
            yield {name: _speed(scenario, times, seconds["base"]) for name, times in seconds.items()}


def _speed(scenario: Scenario, times: list[float], of_base: list[float]) -> dict[str, Any]:
    return {
        "seconds": times,
        "median_s": statistics.median(times),
        "tokens_per_s": sum(scenario.workload.lengths) / statistics.median(times),
        "of_base_speed": statistics.median(b / t for b, t in zip(of_base, times, strict=True)),
    }


def updates(engine: RolloutEngine, model: PeftModel, scenario: Scenario, device: str) -> dict[str, Any]:
    """Seconds and bytes until the engine samples from a changed adapter: read live, or merged and pushed to a copy.

    And those of a token behind it: what an update leaves to the next rollout is a look at all weights and adapters.
    """
    seconds: dict[str, list[float]] = {"live": [], "merge and push": []}
    token: dict[str, list[float]] = {name: [] for name in seconds}
    copy = scenario.spec.build(device, model.dtype)
    config = EngineConfig(max_num_seqs=4, max_model_len=64, kv_cache_memory="64MiB")
    moved = 0
    with RolloutEngine(copy, config=config) as other:
        names = dict(copy.named_parameters())

        def merge_and_push() -> None:
            nonlocal moved
            model.merge_adapter(["0"])
            merged = {
                n.replace(".base_layer", ""): p
                for n, p in model.get_base_model().named_parameters()
                if n.replace(".base_layer", "") in names
            }
            other.update_weights(merged)
            model.unmerge_adapter()
            moved = sum(p.nbytes for p in merged.values())

        for repeat in range(-1, scenario.repeats):  # the first is for what is made once
            train(model)
            for name, updated in {"live": engine, "merge and push": other}.items():
                took = ceilings.timed(engine.update_weights if updated is engine else merge_and_push, device)
                token_of = partial(updated.generate_batch, [[1]], SamplingParams(max_tokens=1))
                behind = ceilings.timed(token_of, device)
                if repeat >= 0:
                    seconds[name].append(took)
                    token[name].append(behind)
    live_bytes = engine.stats().last_update_bytes
    return {
        name: {
            "seconds": times,
            "median_s": statistics.median(times),
            "bytes": nbytes,
            "token_s": statistics.median(token[name]),
        }
        for (name, times), nbytes in zip(seconds.items(), (live_bytes, moved), strict=True)
    }


def swaps(model: PeftModel, scenario: Scenario, device: str) -> dict[str, Any]:
    """Seconds and bytes to have another adapter in the one slot there is: read where it is, or copied from the host."""
    config = EngineConfig(max_num_seqs=4, max_model_len=64, kv_cache_memory="64MiB", max_loras=1)
    results = {}
    with RolloutEngine(model, config=config) as engine:
        tensors = {n: t.cpu() for n, t in get_peft_model_state_dict(model, adapter_name="0").items()}
        for name in ("a", "b"):
            engine.load_adapter(name, (tensors, model.peft_config["0"]))
        for kind, names in {"swap live": ("0", "1"), "swap from host": ("a", "b")}.items():
            seconds = []
            for repeat in range(-2, 2 * scenario.repeats):
                adapter = engine._adapters.found([names[repeat % 2]])[0]
                assert adapter is not None
                adapter.slot = 1
                took = ceilings.timed(lambda a=adapter: engine._adapters.place(a), device)  # type: ignore[misc]
                if repeat >= 0:
                    seconds.append(took)
            on_device = kind == "swap live" or device == "cpu"
            nbytes = 0 if on_device else sum(t.nbytes for t in tensors.values())
            results[kind] = {"seconds": seconds, "median_s": statistics.median(seconds), "bytes": nbytes}
    return results


def compare(scenario: Scenario, device: str) -> Iterator[dict[str, Any]]:
    """What is known so far: of rollouts first."""
    model = build(scenario.spec, device, scenario.adapters, wide=scenario.wide)
    config = EngineConfig(
        max_num_seqs=max((scenario.workload.slots, *scenario.batches)),
        max_model_len=max(scenario.workload.max_len, CONTEXT + sweeps.TOKENS),
        max_loras=scenario.adapters,
    )
    with RolloutEngine(model, config=config) as engine:
        drawn = scenario.workload.draw(scenario.spec.config.vocab_size, -2)
        found: dict[str, Any] = {
            "model": {"name": scenario.spec.name, "dtype": str(model.dtype).removeprefix("torch.")},
            "workload": scenario.workload.describe(),
            "adapters": scenario.adapters,
            "adapter_dtype": str(next(p.dtype for n, p in model.named_parameters() if "lora_" in n)).removeprefix(
                "torch."
            ),
            "rank": RANK,
            "gate": check(engine, model, drawn[: _CHECKED[device]], scenario.adapters),
        }
        for step in steps(engine, scenario, device):
            found.setdefault("steps", []).append(step)
            found["matmuls"] = engine.stats().matmuls
            yield found
        for timed in rollouts(engine, scenario, device):
            found["rollouts"] = timed
            yield found
        found["matmuls"] = engine.stats().matmuls
        found["updates"] = updates(engine, model, scenario, device)
        yield found
    found["updates"] |= swaps(model, scenario, device)
    yield found


def table(run: dict[str, Any]) -> list[str]:
    work = run["workload"]
    lines = [
        f"{run['model']['name']} ({run['model']['dtype']}): {work['prompts']} prompts x {work['samples']} samples, "
        f"{work['completion_tokens']} tokens; {run['adapters']} adapters of rank {run['rank']} in {run['adapter_dtype']} on every "
        f"linear layer; within {run['gate']['max_abs_diff']:.1e} of PEFT",
        *(
            f"  {step['batch']} x {step['context']}, {step['step_ms']['base']:.3f} ms a step on the base; of its speed: "
            + ", ".join(f"{name} {speed:.1%}" for name, speed in step["of_base_speed"].items() if name != "base")
            for step in run.get("steps", ())
        ),
        f"  {'adapters':16}{'wall s':>9}{'tok/s':>9}{'of base speed':>15}",
    ]
    for name, r in run["rollouts"].items():
        lines.append(f"  {name:16}{r['median_s']:9.3f}{r['tokens_per_s']:9.0f}{r['of_base_speed']:15.1%}")
    lines.append(f"  {'update or swap':16}{'ms':>9}{'bytes':>14}{'a token, ms':>15}")
    for name, u in run["updates"].items():
        token = f"{1e3 * u['token_s']:15.2f}" if "token_s" in u else ""
        lines.append(f"  {name:16}{1e3 * u['median_s']:9.2f}{u['bytes']:14,}{token}")
    return lines


def headline(run: dict[str, Any]) -> dict[str, Any]:
    return {
        "adapter_dtype": run["adapter_dtype"],
        "one_of_base": round(run["rollouts"]["one"]["of_base_speed"], 3),
        "mixed_of_base": round(run["rollouts"]["mixed"]["of_base_speed"], 3),
        "live_update_ms": round(1e3 * run["updates"]["live"]["median_s"], 3),
        "push_ms": round(1e3 * run["updates"]["merge and push"]["median_s"], 3),
        "swap_ms": round(1e3 * run["updates"]["swap live"]["median_s"], 3),
    }


def main() -> int:
    return command.run("lora", __doc__, SCENARIOS, compare, table, headline)


if __name__ == "__main__":
    sys.exit(main())
