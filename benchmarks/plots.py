"""A run of ``rollout`` as one picture."""

from __future__ import annotations

from typing import Any


def draw(pyplot: Any, results: dict[str, Any]) -> Any:
    """Throughput of each engine and, where they were measured, decode against its roofline, step times, and tails."""
    runs, sweep, profiles = results["rollouts"], results.get("sweep", []), results.get("profiles", [])
    swept = list(dict.fromkeys(point["model"] for point in sweep))
    columns = max(1, len(runs) + max(len(swept), bool(profiles)))
    figure, panels = pyplot.subplots(2, columns, figsize=(4.2 * columns, 7.2), squeeze=False)
    for (upper, lower), run in zip(panels.T, runs, strict=False):
        _throughput(upper, run)
        _tail(lower, run)
    for panel, model in zip(panels[0][len(runs) :], swept, strict=False):
        _roofline(panel, [point for point in sweep if point["model"] == model])
        panel.set_title(f"{model}, decode", fontsize=9)
    if profiles:
        _breakdown(panels[1][len(runs)], profiles)
    for panel in panels.flat:
        panel.set_visible(panel.has_data())
    return figure


def _throughput(panel: Any, run: dict[str, Any]) -> None:
    """Tokens/s of every engine that was timed, the median and the range of its repeats."""
    timed = {name: e for name, e in run["engines"].items() if "skipped" not in e}
    tokens = run["workload"]["completion_tokens"]
    middle = [e["tokens_per_s"] for e in timed.values()]
    spread = [
        [e["tokens_per_s"] - tokens / max(e["seconds"]) for e in timed.values()],
        [tokens / min(e["seconds"]) - e["tokens_per_s"] for e in timed.values()],
    ]
    names = [name.replace(", ", ",\n") for name in timed]
    bars = panel.bar(names, middle, yerr=spread, capsize=4, color=[_colour(name) for name in timed])
    labels = [f"{e['tokens_per_s']:.0f}\n{e['of_ceiling']:.0%} of ceiling" for e in timed.values()]
    panel.bar_label(bars, labels, padding=3, fontsize=7)
    panel.margins(y=0.2)
    panel.tick_params(axis="x", labelsize=7)
    panel.set_title(f"{run['model']['name']}, workload {run['workload']['name']}", fontsize=9)
    panel.set_ylabel("completion tokens / s")


def _tail(panel: Any, run: dict[str, Any]) -> None:
    """Requests at work in the engine against time, and when each engine was through with all of them."""
    panel.step(run["running"]["seconds"], run["running"]["rows"], where="post", color=_colour("stoker"))
    for name, engine in run["engines"].items():
        if "skipped" not in engine:
            label = f"{name} ends: {engine['median_s']:.3g} s"
            panel.axvline(engine["median_s"], color=_colour(name), linestyle="--", label=label)
    panel.set_xlim(0, 4 * run["engines"]["stoker"]["median_s"])  # or the slowest engine would hide the tail
    panel.set_xlabel("seconds")
    panel.set_ylabel("requests at work (stoker)")
    panel.legend(fontsize=7)


def _breakdown(panel: Any, profiles: list[dict[str, Any]]) -> None:
    """A decode step's microseconds by kind, under the profiler, and what the ceiling allows."""
    names = [f"{p['model']}\n{p['batch']} x {p['context']}" for p in profiles]
    bottom = [0.0] * len(profiles)
    for kind in sorted({kind for p in profiles for kind in p["parts_us"]}):
        part = [p["parts_us"].get(kind, 0.0) / p["step_us"] for p in profiles]
        panel.bar(names, part, bottom=bottom, label=kind)
        bottom = [low + high for low, high in zip(bottom, part, strict=True)]
    panel.plot(names, [p["of_ceiling"] for p in profiles], "k_", markersize=24, label="its ceiling")
    panel.margins(x=0.5)
    panel.set_ylabel("share of a decode step")
    panel.tick_params(axis="x", labelsize=7)
    panel.legend(fontsize=6)


def _colour(name: str) -> str:
    return {"stoker": "tab:blue", "generate": "tab:gray", "vllm": "tab:orange", "lmdeploy": "tab:purple"}.get(
        name, "tab:olive"
    )


def _roofline(panel: Any, points: list[dict[str, Any]]) -> None:
    """Tokens/s against batch, and what this run's ceiling allows."""
    kinds = dict.fromkeys((p["context"], p["deterministic"]) for p in points)
    points = sorted(points, key=lambda p: p["batch"])
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
