"""What engines took for the same work; and what a run of ``rollout`` found, the targets it reaches, and its headline."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any


def compared(seconds: Mapping[str, list[float]], tokens: int, ceiling_s: float) -> dict[str, dict[str, Any]]:
    """Of each engine, what the same work of so many tokens took it, next to "stoker" and to the ceiling."""
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        name: {
            "seconds": times,
            "median_s": median[name],
            "tokens_per_s": tokens / median[name],
            "times_stoker": median[name] / median["stoker"],
            "of_ceiling": ceiling_s / median[name],
        }
        for name, times in seconds.items()
    }


def comparison(engines: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of a table of what is ``compared``, with those that were ``skipped``."""
    lines = [f"  {'engine':22}{'wall s':>9}{'range':>18}{'tok/s':>9}{'/ stoker':>10}{'of ceiling':>12}"]
    for name, e in engines.items():
        if "skipped" in e:
            lines.append(f"  {name:22} not timed: {e['skipped']}")
            continue
        low, high = min(e["seconds"]), max(e["seconds"])
        lines.append(
            f"  {name:22}{e['median_s']:9.3f}{f'{low:.3f} - {high:.3f}':>18}{e['tokens_per_s']:9.0f}"
            f"{e['times_stoker']:9.2f}x{e['of_ceiling']:12.1%}"
        )
    return lines


def table(results: dict[str, Any]) -> str:
    """What the run found, for a terminal."""
    lines = [line for run in results["rollouts"] for line in _of_rollouts(run)]
    if "growth" in results:
        g = results["growth"]
        lines += [
            "",
            f"host time of a plan of {g['rows']} requests: {g['ratio_after_finished']:.2f}x after "
            f"{g['finished_requests']} finished requests, {g['ratio_long_to_short']:.2f}x at {g['long_tokens']} tokens "
            "against 16",
        ]
    if points := [*results.get("sweep", []), *results.get("sweep_fp8", [])]:
        lines += ["", f"  {'decode':>8}{'context':>9}{'step ms':>10}{'ceiling ms':>12}{'tok/s':>10}{'of ceiling':>12}"]
        lines += [
            f"  {p['batch']:8}{p['context']:9}{p['step_ms']:10.3f}{p['ceiling_ms']:12.3f}{p['tokens_per_s']:10.0f}"
            f"{p['of_ceiling']:12.1%}  {p['model']}{', deterministic' if p['deterministic'] else ''}"
            f"{', KV in fp8' if p['kv_cache_dtype'] == 'fp8' else ''}{', weights in fp8' if p['quantization'] else ''}"
            for p in points
        ]
    if points := results.get("sampling", []):
        lines += [
            "",
            f"  {'rows':>8}{'step ms':>10}{'of plain':>10}{'generate ms':>13}{'generate / stoker':>19}  sampling",
        ]
        lines += [
            f"  {p['batch']:8}{p['step_ms']:10.3f}{p['of_plain']:9.2f}x{p['generate_ms']:13.3f}{p['x_generate']:18.2f}x"
            f"  {p['settings']}; {p['model']}"
            for p in points
        ]
    for p in results.get("profiles", []):
        parts = ", ".join(f"{part} {us / p['step_us']:.0%}" for part, us in p["parts_us"].items())
        lines.append(f"  {p['model']}, {p['batch']} x {p['context']}, a decode step under the profiler: {parts}")
    lines += [_of_start_up(model, seconds) for model, seconds in results.get("start_up", {}).items()]
    for target in targets(results):
        found = target["found"]
        verdict = "not measured" if found is None else f"{found:.3g}, {'reached' if target['reached'] else 'MISSED'}"
        lines.append(f"  target {target['what']}: at least {target['at_least']:g}; {verdict}")
    lines += [f"left out, {what}" for what in results["left_out"]]
    return "\n".join(lines)


def _of_rollouts(run: dict[str, Any]) -> list[str]:
    """Lines of one scenario: the engines, the ceiling, and what this engine did."""
    work = run["workload"]
    lines = [
        "",
        f"{run['model']['name']} ({run['model']['dtype']}), workload {work['name']}: {work['prompts']} prompts x "
        f"{work['samples']} samples, {work['slots']} slots, {work['completion_tokens']} completion tokens, "
        f"median {work['median_length']:.0f}, longest {work['longest']}; a static batch is "
        f"{work['static_batch_use']:.0%} useful",
        *comparison(run["engines"]),
    ]
    best = work["completion_tokens"] / run["ceiling_s"]
    lines.append(f"  {'ceiling':22}{run['ceiling_s']:9.3f}{'':18}{best:9.0f}")
    steps, gate, kept = run["steps"], run["gate"], run["maintenance"]
    lines.append(
        f"  stoker: step p50 {steps['p50_step_ms']:.2f} ms, p95 {steps['p95_step_ms']:.2f} ms, "
        f"{steps['occupied_slots']:.0%} of slots occupied, last tenth of the requests {steps['tail_s']:.2f} s"
    )
    parts = ", ".join(f"{part} {us:.0f}" for part, us in run["step_us"].items() if part not in ("step", "host"))
    lines += [
        f"  a decode step of {run['step_us_rows']} requests: {run['step_us']['step']:.0f} us, of which host "
        f"{run['step_us']['host']:.0f} us ({parts})",
        f"  gate: log-probabilities within {gate['max_abs_diff']:.1e} over {gate['tokens']} tokens",
        f"  update_weights {kept['update_weights_ms']:.3f} ms; sleep {kept['sleep_ms']:.1f} ms gives back "
        f"{kept['given_back_bytes'] / 2**20:.0f} MiB of a {kept['kv_cache_bytes'] / 2**20:.0f} MiB KV cache; "
        f"wake_up {kept['wake_ms']:.1f} ms",
        f"  prefill alone: {run['prefill']['tokens_per_s']:.0f} tok/s, {run['prefill']['of_ceiling']:.0%} of its ceiling",
    ]
    if "shuffled" in run:
        shuffled = run["shuffled"]
        lines.append(
            f"  lengths shuffled: {shuffled['ratio']:.2f}x the time, "
            f"{shuffled['first_come_first_served_ratio']:.2f}x the steps; of a cycle wake_up, update_weights, "
            f"rollout, sleep {run['cycle']['not_rollout']:.1%} is not the rollout"
        )
    return lines


def _of_start_up(model: str, seconds: dict[str, Any]) -> str:
    if "cold_over_s" in seconds:
        return (
            f"  {model}: no first token of a new process after {seconds['cold_over_s']:.3g} s, as kernels are compiled"
        )
    cold = f", {seconds['cold_s']:.3g} s where every kernel has to be compiled" if "cold_s" in seconds else ""
    return f"  {model}: first token of a new process after {seconds['warm_s']:.3g} s{cold}"


_H200_CEILING = 1728  # tokens/s of a sequence of 512 tokens, of Llama-3.2-1B in bf16, at 4.3 TB/s


def targets(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What the project wants of one H200, what this run found, and whether that reaches it (None: not measured).

    Each asks for at least so much. Empty on a CPU. Of another GPU the one that is no ratio asks for the same share of what that
    one's memory allows.
    """
    if results["environment"]["device"] != "cuda" or results["configuration"]["quick"]:
        return []
    points = {(p["model"], p["batch"], p["context"], p["deterministic"]): p for p in results.get("sweep", [])}
    profiles = {p["batch"]: p for p in results.get("profiles", [])}
    starts = results.get("start_up", {}).get("llama-3.2-1b", {})
    runs = {(r["model"]["name"], r["workload"]["name"]): r for r in results["rollouts"]}

    def point(key: tuple[str, int, int, bool], field: str) -> float | None:
        return points[key][field] if key in points else None

    single = "llama-3.2-1b", 1, 512, False
    rows: list[tuple[str, float, float | None]] = [
        ("1B, batch 1, context 512: tokens/s", 1000, point(single, "tokens_per_s"))
        if "H200" in results["environment"].get("gpu", "")
        else ("1B, batch 1, context 512: of its ceiling", round(1000 / _H200_CEILING, 2), point(single, "of_ceiling"))
    ]
    for model in ("llama-3.2-1b", "qwen2.5-7b"):
        for batch in (64, 256, 512):
            for context in (512, 2048):
                share = point((model, batch, context, False), "of_ceiling")
                rows.append((f"{model}, {batch} x {context}: of its ceiling", 0.70, share))
    for batch in (64, 256):
        fast, fixed = (point(("llama-3.2-1b", batch, 512, d), "tokens_per_s") for d in (False, True))
        rows.append((f"deterministic over fast, {batch} x 512", 0.85, fixed / fast if fast and fixed else None))
        rows.append(
            (f"device at work, batch {batch}", 0.97, 1 - profiles[batch]["idle_share"] if batch in profiles else None)
        )
    long = runs.get(("llama-3.2-1b", "ii"), {}).get("engines", {})
    rows.append(("GRPO workload ii: of its ceiling", 0.60, long["stoker"]["of_ceiling"] if long else None))
    for peer, wanted in (("generate_batch", 5.0), ("generate_batch, tuned", 5.0), ("vllm", 1.0)):
        rows.append((f"GRPO workload ii: times {peer}", wanted, long.get(peer, {}).get("times_stoker")))
    for name, limit in (("cold_s", 15), ("warm_s", 3)):
        rows.append((f"first token, {name}: {limit} s over it", 1.0, limit / starts[name] if name in starts else None))
    captures = [ms for run in results["rollouts"] for ms in run["capture_ms"]]
    rows.append(("graph capture: 100 ms over the slowest", 1.0, 100 / max(captures) if captures else None))
    return [
        {"what": what, "at_least": least, "found": found, "reached": None if found is None else found >= least}
        for what, least, found in rows
    ]


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
