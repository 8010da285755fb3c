"""What a GRPO run on the engine is judged by, measured on its trainer, and the report of it."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.generation import ContinuousBatchingConfig
from trl import GRPOTrainer

from stoker.integrations.trl import detach
from stoker.rollout import RolloutEngine


def rollout_speeds(trainer: GRPOTrainer, texts: list[Any]) -> Iterator[tuple[str, float]]:
    """Completion tokens a second of the engine and of TRL's two ways without one, each called by the trainer as in training.

    texts: prompts, each sampled as often as in training. All three get the same and sample alike; tokens after the first EOS
    do not count. The engine is detached.
    """
    samples = trainer.num_generations
    prompts, _, _ = trainer._tokenize_prompts([text for text in texts for _ in range(samples)])

    def rollout() -> int:
        return sum(map(len, trainer._generate_single_turn(prompts, None, {}, samples)[0]))

    yield "engine", tokens_per_second(rollout)
    detach(trainer)
    yield "model.generate", tokens_per_second(rollout)
    # Sized to the batch. By default it takes a share of all memory, and on a CPU most of its time is then spent on that.
    pages = -(-(max(map(len, prompts)) + trainer.args.max_completion_length) // 32)
    trainer.use_transformers_continuous_batching = True
    trainer.continuous_batching_config = ContinuousBatchingConfig(
        page_size=32, num_blocks=pages * len(prompts), max_batch_tokens=2 * len(prompts)
    )
    yield "model.generate_batch", tokens_per_second(rollout)


def tokens_per_second(rollout: Callable[[], int]) -> float:
    rollout()  # warm-up
    speeds = []
    for _ in range(5):
        start = time.perf_counter()
        tokens = rollout()
        speeds.append(tokens / (time.perf_counter() - start))
    return statistics.median(speeds)


def seconds_of(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def adapter_updates(engine: RolloutEngine, trainer: GRPOTrainer) -> dict[str, dict[str, float]]:
    """Median seconds, and bytes copied, until an engine samples from a changed adapter.

    "live": read where the trainer has it. "merge and push": as an engine with weights of its own has to be fed, by merging
    the adapter into the base, copying every weight over, and taking it out of the base again. The adapter is as it was
    afterwards; the base is only up to rounding, so this is the last that is done with it.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = model.get_base_model()
    plain = {name.replace(".base_layer", ""): p for name, p in base.named_parameters() if "lora_" not in name}
    copies = {name: parameter.detach().clone() for name, parameter in plain.items()}

    @torch.no_grad()
    def merge_and_push() -> None:
        model.merge_adapter()
        for name, parameter in plain.items():
            copies[name].copy_(parameter)
        model.unmerge_adapter()

    @torch.no_grad()
    def change() -> None:  # stands in for an optimizer step
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(1 + 1e-6)

    seconds: dict[str, list[float]] = {"live": [], "merge and push": []}
    for _ in range(20):
        change()
        seconds["live"].append(seconds_of(engine.update_weights))
        seconds["merge and push"].append(seconds_of(merge_and_push))
    moved = {
        "live": engine.stats().last_update_bytes,
        "merge and push": sum(copy.nbytes for copy in copies.values()),
    }
    return {name: {"seconds": statistics.median(times), "bytes": moved[name]} for name, times in seconds.items()}


def training_record(trainer: GRPOTrainer) -> dict[str, Any]:
    """What TRL logged: the reward of each step, and the engine's log-probabilities against the trainer's forward."""

    def logged(key: str) -> list[float]:
        return [entry[key] for entry in trainer.state.log_history if key in entry]

    difference = "sampling/sampling_logp_difference"
    record: dict[str, Any] = {"rewards": logged("reward"), "mean_lengths": logged("completions/mean_length")}
    if record["rewards"]:
        record["logprob_difference"] = {
            "mean": statistics.fmean(logged(f"{difference}/mean")),
            "max": max(logged(f"{difference}/max")),
        }
    return record


def write(folder: Path, report: dict[str, Any]) -> None:
    """Written anew after each stage, so an interrupted run leaves what it had."""
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def show(report: dict[str, Any]) -> None:
    print()
    for when in ("before", "after"):
        if when in report:
            print(f"held-out accuracy {when}: {report[when]['accuracy']:.1%} of {report[when]['problems']} problems")
            for example in report[when]["examples"]:
                print(f"    {example!r}")
    if "logprob_difference" in report:
        difference = report["logprob_difference"]
        print(
            f"|log-probability difference| to the trainer: mean {difference['mean']:.1e}, max {difference['max']:.1e}"
        )
    if "update_seconds" in report:
        print(f"weight update: {report['update_seconds'] * 1e3:.2f} ms")
    for name, update in report.get("adapter_updates", {}).items():
        print(f"changed adapter, {name}: {update['seconds'] * 1e3:.2f} ms and {update['bytes']:,} bytes a step")
    if "tokens_per_second" in report:
        speeds = report["tokens_per_second"]
        print(f"rollout tokens/s on the same prompts, in this one run ({report['device']}):")
        for name, speed in speeds.items():
            ratio = "" if name == "engine" else f"   engine is {speeds['engine'] / speed:.1f} times as fast"
            print(f"    {name:<22}{speed:>10,.0f}{ratio}")


def plot(folder: Path, report: dict[str, Any]) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no report.png: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2), layout="constrained")
    left.plot(range(1, len(report["rewards"]) + 1), report["rewards"], label="mean reward (sampled)")
    for when, style in (("before", ":"), ("after", "--")):
        if when in report:
            accuracy = report[when]["accuracy"]
            left.axhline(accuracy, ls=style, color="grey", label=f"held-out accuracy {when} (greedy): {accuracy:.0%}")
    left.set(xlabel="GRPO step", ylim=(0, 1.02), title="Learning")
    left.legend(loc="lower right")
    speeds = report.get("tokens_per_second", {})
    right.bar_label(right.bar([name.replace("_", "_\n") for name in speeds], list(speeds.values())), fmt="{:,.0f}")
    right.set(ylabel="completion tokens/s", title=f"Rollouts, same prompts, one run\n{report['device']}")
    figure.savefig(folder / "report.png", dpi=120)
