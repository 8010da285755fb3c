"""What an update of the weights takes, by where they come from and how large the model is: ``python -m stoker.benchmarks.weights``.

From the trainer's own tensors to shards of FSDP2, other processes and files, against ``load_state_dict`` of the full model and
against merging and pushing an adapter, in one run, with the copy bandwidth of that run. A trainer changes the same tensors step
after step, and a source learns from one step what the next will change: each way is timed after updates of its own, and ways
that change different tensors of one mirror do not take turns. Writes one JSON file and a plot, prints a table and, last, one
line of JSON. On a CPU only ratios of one run mean anything: run it on a machine that does nothing else.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stoker.benchmarks import ceilings, command
from stoker.benchmarks.footprint import clear
from stoker.benchmarks.weight_updates import (
    PARTS,
    Scenario,
    of_adapter,
    of_elsewhere,
    of_masters,
    of_one_dtype,
    of_rounded,
    of_shards,
)
from stoker.benchmarks.workloads import LLAMA_1B, LLAMA_8B, MEDIUM, SMALL, TOY, dtype_of

SCENARIOS = {
    ("cpu", False): [Scenario(spec=s, repeats=3, gather_memory=16 * 2**20) for s in (TOY, SMALL, MEDIUM)],
    ("cpu", True): [Scenario(spec=s, repeats=1, gather_memory=2**20) for s in (TOY, SMALL)],
    ("cuda", False): [Scenario(spec=s, repeats=5) for s in (LLAMA_1B, LLAMA_8B)],
    ("cuda", True): [Scenario(spec=LLAMA_1B, repeats=3)],
}


def measure(scenario: Scenario, device: str) -> Iterator[dict[str, Any]]:
    meta = scenario.spec.build("meta", dtype_of(device))
    size = sum(p.nbytes for p in meta.parameters())
    bandwidth = ceilings.copy_bandwidth(2**30 if device == "cuda" else max(2**20, size), device)
    ways: dict[str, Any] = {}
    found = {
        "model": {
            "name": scenario.spec.name,
            "parameters": sum(p.numel() for p in meta.parameters()),
            "bytes": size,
            "dtype": str(meta.dtype).removeprefix("torch."),
        },
        "copy_bandwidth": bandwidth,
        "ways": ways,
    }
    with tempfile.TemporaryDirectory() as folder:
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "masters": lambda: of_masters(scenario, device, bandwidth),
            "adapter": lambda: of_adapter(scenario, device),
            "one dtype": lambda: of_one_dtype(scenario, device, bandwidth),
            "rounded": lambda: of_rounded(scenario, device, bandwidth),
            "elsewhere": lambda: of_elsewhere(scenario, device, bandwidth, Path(folder), ways),
            "shards": lambda: of_shards(scenario, device, Path(folder)),  # each rank is a process to start, as above
        }
        broken: dict[str, str] = {}
        for name in scenario.parts:
            try:
                ways |= parts[name]()
            except Exception as error:  # of another process, say, or of its way to this one: the others go on
                traceback.print_exc()
                broken[name] = command.reason(error)
            broken |= {one: way["skipped"] for one, way in ways.items() if way.get("failed")}
            if broken:
                found["failed"] = [f"{one}: {why}" for one, why in broken.items()]
            clear(device)
            yield found


def table(run: dict[str, Any]) -> list[str]:
    model = run["model"]
    lines = [
        f"{model['name']} ({model['dtype']}): {model['parameters'] / 1e6:.1f} M parameters, {model['bytes'] / 1e6:.1f} MB; "
        f"copies at {run['copy_bandwidth'] / 1e9:.1f} GB/s",
        f"  {'update from':27}{'ms':>10}{'range':>20}{'MB written':>12}{'MB besides':>12}{'of bandwidth':>14}",
    ]
    for name, way in run["ways"].items():
        if "skipped" in way:
            lines.append(f"  {name:27} not timed: {way['skipped']}")
            continue
        low, high = (1e3 * f(way["seconds"]) for f in (min, max))
        extra = f"{way['extra_bytes'] / 1e6:12.1f}" if "extra_bytes" in way else f"{'':12}"
        part = way.get("of_bandwidth", way.get("of_collective"))
        lines.append(
            f"  {name:27}{1e3 * way['median_s']:10.3f}{f'{low:.3f} - {high:.3f}':>20}{way['bytes'] / 1e6:12.1f}{extra}"
            + (f"{part:14.1%}" if part is not None else "")
        )
    if gathered := run["ways"].get("gathered"):
        lines.append(
            f"  gathered: {gathered['ranks']} ranks, of the bandwidth of all_gather; promised are "
            f"{gathered['promised_extra_bytes'] / 1e6:.1f} MB besides, and one layer's weights where they are rounded"
        )
    held = ", ".join(f"{n} {w['held_bytes'] / 1e6:.1f} MB" for n, w in run["ways"].items() if "held_bytes" in w)
    if held:
        lines.append(f"  held by the engine: {held}")
    return lines


def figure(pyplot: Any, runs: list[dict[str, Any]]) -> Any:
    made, panel = pyplot.subplots(figsize=(8.5, 4.5))
    sizes = [run["model"]["bytes"] for run in runs]
    for number, name in enumerate(runs[0]["ways"]):
        timed = [(size, run["ways"][name]) for size, run in zip(sizes, runs, strict=True) if name in run["ways"]]
        points = [(size, 1e3 * way["median_s"]) for size, way in timed if "skipped" not in way]
        if points:
            panel.plot(*zip(*points, strict=True), "o-" if number < 10 else "s--", label=name)
    copies = [2e3 * run["model"]["bytes"] / run["copy_bandwidth"] for run in runs]
    panel.plot(sizes, copies, "k+:", alpha=0.6, label="one copy at this run's bandwidth")
    panel.set(xscale="log", yscale="log", xlabel="bytes of the weights", ylabel="update, ms")
    panel.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return made


def headline(run: dict[str, Any]) -> dict[str, float]:
    return {f"{n}_ms": round(1e3 * w["median_s"], 3) for n, w in run["ways"].items() if "skipped" not in w}


def main() -> int:
    quick = "few repeats of small models"
    return command.run("weights", __doc__, SCENARIOS, measure, table, headline, figure, quick=quick, parts=PARTS)


if __name__ == "__main__":
    sys.exit(main())
