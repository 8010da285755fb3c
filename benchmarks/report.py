"""A run as one JSON file, one plot and one readable table."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

FOLDER = Path("outputs/benchmarks")  # where results go if no other folder is named


def environment(device: str) -> dict[str, Any]:
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("stoker", "torch", "transformers")},
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "git_revision": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _git(*arguments: str) -> str | None:
    """What git says of the current folder, where that is this repository: what runs is installed from it."""
    if not Path("benchmarks/report.py").is_file():
        return None
    try:
        run = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def write(results: dict[str, Any], folder: Path) -> Path:
    """Write the JSON file and, with matplotlib, the plot beside it; returns the JSON file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    path = folder / f"{results['environment']['device']}-{stamp}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib") is not None:
        plot(results, path.with_suffix(".png"))
    return path


def save(name: str, results: dict[str, Any], folder: Path, draw: Callable[[Any], Any]) -> Path:
    """Write ``name``'s JSON file and, with matplotlib, the figure that ``draw`` makes of pyplot; returns the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    env = results["environment"]
    path = folder / f"{name}-{env['device']}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib") is not None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure = draw(pyplot)
        versions = ", ".join(f"{package} {number}" for package, number in env["versions"].items())
        figure.suptitle(f"{env.get('gpu', env['cpu'])}, {versions}", fontsize=9)
        figure.tight_layout()
        figure.savefig(path.with_suffix(".png"), dpi=120)
        pyplot.close(figure)
    return path


def table(results: dict[str, Any]) -> str:
    """What the run found, for a terminal."""
    lines = []
    for run in results["rollouts"]:
        work = run["workload"]
        lines += [
            "",
            f"{run['model']['name']} ({run['model']['dtype']}), workload {work['name']}: {work['prompts']} prompts x "
            f"{work['samples']} samples, {work['slots']} slots, {work['completion_tokens']} completion tokens, "
            f"median {work['median_length']:.0f}, longest {work['longest']}; a static batch is "
            f"{work['static_batch_use']:.0%} useful",
            f"  {'engine':16}{'wall s':>9}{'range':>18}{'tok/s':>9}{'engine / stoker':>17}{'of ceiling':>12}",
        ]
        for name, engine in run["engines"].items():
            if "skipped" in engine:
                lines.append(f"  {name:16} not timed: {engine['skipped']}")
                continue
            low, high = min(engine["seconds"]), max(engine["seconds"])
            lines.append(
                f"  {name:16}{engine['median_s']:9.3f}{f'{low:.3f} - {high:.3f}':>18}"
                f"{engine['tokens_per_s']:9.0f}{engine['times_stoker']:16.2f}x{engine['of_ceiling']:12.1%}"
            )
        best = work["completion_tokens"] / run["ceiling_s"]
        lines.append(f"  {'ceiling':16}{run['ceiling_s']:9.3f}{'':18}{best:9.0f}")
        steps, shuffled, gate, kept = run["steps"], run["shuffled"], run["gate"], run["maintenance"]
        lines.append(
            f"  stoker: step p50 {steps['p50_step_ms']:.2f} ms, p95 {steps['p95_step_ms']:.2f} ms, "
            f"{steps['occupied_slots']:.0%} of slots occupied, last tenth of the requests {steps['tail_s']:.2f} s; lengths "
            f"shuffled: {shuffled['ratio']:.2f}x the time, {shuffled['first_come_first_served_ratio']:.2f}x the steps"
        )
        parts = ", ".join(f"{part} {us:.0f}" for part, us in run["step_us"].items() if part not in ("step", "host"))
        lines += [
            f"  a decode step of {run['step_us_rows']} requests: {run['step_us']['step']:.0f} us, of which host "
            f"{run['step_us']['host']:.0f} us ({parts})",
            f"  gate: log-probabilities within {gate['max_abs_diff']:.1e} over {gate['tokens']} tokens",
            f"  update_weights {kept['update_weights_ms']:.3f} ms; sleep {kept['sleep_ms']:.1f} ms gives back "
            f"{kept['given_back_bytes'] / 2**20:.0f} MiB of a {kept['kv_cache_bytes'] / 2**20:.0f} MiB KV cache; "
            f"wake_up {kept['wake_ms']:.1f} ms",
        ]
    if "growth" in results:
        g = results["growth"]
        lines += [
            "",
            f"host time of a plan of {g['rows']} requests: {g['ratio_after_finished']:.2f}x after "
            f"{g['finished_requests']} finished requests, {g['ratio_long_to_short']:.2f}x at {g['long_tokens']} tokens "
            "against 16",
        ]
    if "sweep" in results:
        lines += ["", f"  {'decode':>8}{'context':>9}{'step ms':>10}{'ceiling ms':>12}{'tok/s':>10}{'of ceiling':>12}"]
        lines += [
            f"  {p['batch']:8}{p['context']:9}{p['step_ms']:10.3f}{p['ceiling_ms']:12.3f}{p['tokens_per_s']:10.0f}"
            f"{p['of_ceiling']:12.1%}  {p['model']}{', deterministic' if p['deterministic'] else ''}"
            for p in results["sweep"]
        ]
    return "\n".join(lines)


def summary(results: dict[str, Any]) -> str:
    """The run's headline in one line of JSON."""
    runs = [
        {
            "model": run["model"]["name"],
            "workload": run["workload"]["name"],
            "tokens_per_s": round(run["engines"]["stoker"]["tokens_per_s"]),
            "of_ceiling": round(run["engines"]["stoker"]["of_ceiling"], 3),
            **{
                f"x_{name}": round(engine["times_stoker"], 2)
                for name, engine in run["engines"].items()
                if name != "stoker" and "skipped" not in engine
            },
        }
        for run in results["rollouts"]
    ]
    seconds = round(results["seconds"])
    return json.dumps({"device": results["environment"]["device"], "seconds": seconds, "rollouts": runs})


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs, sweep = results["rollouts"], results.get("sweep", [])
    swept = list(dict.fromkeys(point["model"] for point in sweep))
    count = len(runs) + len(swept)
    figure, panels = pyplot.subplots(1, count, figsize=(4.2 * count, 3.8), squeeze=False)
    colours = {"stoker": "tab:blue", "generate": "tab:gray"}
    for panel, run in zip(panels[0], runs, strict=False):
        timed = {name: e for name, e in run["engines"].items() if "skipped" not in e}
        tokens = run["workload"]["completion_tokens"]
        middle = [e["tokens_per_s"] for e in timed.values()]
        spread = [
            [e["tokens_per_s"] - tokens / max(e["seconds"]) for e in timed.values()],
            [tokens / min(e["seconds"]) - e["tokens_per_s"] for e in timed.values()],
        ]
        bars = panel.bar(
            list(timed), middle, yerr=spread, capsize=4, color=[colours.get(name, "tab:olive") for name in timed]
        )
        labels = [f"{e['tokens_per_s']:.0f}\n{e['of_ceiling']:.0%} of ceiling" for e in timed.values()]
        panel.bar_label(bars, labels, padding=3, fontsize=7)
        panel.margins(y=0.2)
        panel.set_title(f"{run['model']['name']}, workload {run['workload']['name']}", fontsize=9)
        panel.set_ylabel("completion tokens / s")
    for panel, model in zip(panels[0][len(runs) :], swept, strict=True):
        _roofline(panel, [point for point in sweep if point["model"] == model])
        panel.set_title(f"{model}, decode", fontsize=9)
    env = results["environment"]
    versions = ", ".join(f"{name} {number}" for name, number in env["versions"].items())
    figure.suptitle(f"{env.get('gpu', env['cpu'])}, {versions}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _roofline(panel: Any, points: list[dict[str, Any]]) -> None:
    """Tokens/s against batch, and what this run's ceiling allows."""
    kinds = dict.fromkeys((p["context"], p["deterministic"]) for p in points)
    for number, (context, deterministic) in enumerate(kinds):
        mine = [p for p in points if (p["context"], p["deterministic"]) == (context, deterministic)]
        batches, label = [p["batch"] for p in mine], f"context {context}{', deterministic' if deterministic else ''}"
        panel.plot(batches, [p["tokens_per_s"] for p in mine], "o-", color=f"C{number}", label=label)
        if not deterministic:
            best = [p["batch"] / p["ceiling_ms"] * 1e3 for p in mine]
            panel.plot(batches, best, "--", color=f"C{number}", alpha=0.6, label="its ceiling")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("sequences")
    panel.set_ylabel("tokens / s")
    panel.legend(fontsize=7)
