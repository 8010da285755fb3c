"""Where a decode step's time goes: kernels by kind, gaps between them, host: ``python -m stoker.benchmarks.step_profile``.

On CUDA the kernels of replayed graphs are attributed by their names, and what is left of the time is the device idle: gaps
between kernels within a window, and waits between windows. On a CPU the operations themselves are attributed. Prints a
table and one JSON line for each batch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from stoker.benchmarks import ceilings, command, sweeps
from stoker.benchmarks.workloads import HYBRID_2B, LLAMA_1B, QWEN_7B, SMALL, TOY, TOY_HYBRID, dtype_of, random_prompts
from stoker.rollout import EngineConfig, RolloutEngine, RolloutHandle, SamplingParams

MODELS = {spec.name: spec for spec in (TOY, TOY_HYBRID, SMALL, LLAMA_1B, HYBRID_2B, QWEN_7B)}

# The first kind whose word is in a kernel's or an operation's name takes it.
KINDS = {
    "sampling": (
        *("sample", "gumbel", "noise", "philox", "logprob", "score", "softmax", "logsumexp", "argmax"),
        *("truncate", "thresholds", "sort", "topk"),
    ),
    "attention": (
        *("attention", "attend", "flash", "sdpa", "decode_kernel", "prefill_kernel"),
        *("work_list", "common_blocks", "units_kernel"),
    ),
    "states": ("causal_conv", "delta_rule", "delta_gates", "prepare_kernel", "chunks_kernel", "selective_scan"),
    "experts": ("grouped", "_order_kernel", "weighted_sum", "route", "_logits_kernel"),
    "adapters": ("tiles_kernel", "shrink", "expand_", "look_up"),
    "matmul": (
        *("gemm", "gemv", "linear", "cutlass", "nvjet", "addmm", "matmul", "::mm", "bmm", "cublas", "splitk"),
        *("skinny", "single_kernel", "streamed", "add_segments"),
    ),
    "norm, rotary, KV write": ("norm", "rotary", "write_kv", "write_kernel", "index_copy"),
    "activation": ("silu", "gelu", "swiglu", "act_mul"),
    "copies": ("memcpy", "memset", "copy", "index_select", "gather", "cat"),
}


@cache  # of many operations, few have different names
def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in lower for word in words)), "other")


_MOST_NAMES = 16
_WAIT_US = 20.0  # a longer gap is no gap between kernels of a graph: the device had nothing to do


def attribute(spans: Iterable[tuple[str, float, float]], kind: Callable[[str], str] = kind_of) -> dict[str, float]:
    """Microseconds by kind, and of gaps and waits, from (name, start, end) of work.

    A kernel that comes up while the one before still runs waits for that one's end, so its time begins there.
    """
    total: Counter[str] = Counter()
    end_of_last: float | None = None
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        end_of_last = start if end_of_last is None else end_of_last
        gap = start - end_of_last
        if gap > 0:
            total["waits" if gap > _WAIT_US else "gaps"] += gap  # type: ignore[assignment]
        total[kind(name)] += max(0.0, end - max(start, end_of_last))  # type: ignore[assignment]
        end_of_last = max(end, end_of_last)
    return dict(total)


def measure(
    name: str, device: str, batches: Sequence[int], context: int, steps: int, adapters: int = 0
) -> Iterator[dict[str, Any]]:
    """Of each batch, at least so many steps; with adapters, on the base alone and then with as many mixed in the batch."""
    spec = MODELS[name]
    model: Any
    if adapters:
        from stoker.benchmarks import lora  # needs peft

        model = lora.build(spec, device, adapters)
    else:
        model = spec.build(device, dtype_of(device))
    most = steps + 2 * EngineConfig().decode_window  # two windows may be under way before the first is read
    params = SamplingParams(max_tokens=most, ignore_eos=True)
    config = EngineConfig(max_num_seqs=max(batches), max_model_len=context + most, max_loras=max(adapters, 1))
    with RolloutEngine(model, config=config) as engine:
        for batch in batches:
            prompts = random_prompts(spec, batch, context, seed="0")
            for mixed in [0, adapters] if adapters else [0]:
                by_row = [str(row % mixed) for row in range(batch)] if mixed else None
                for _ in range(2):
                    engine.generate_batch(prompts, params, adapter=by_row)  # compiles, captures, fills the prefix cache
                handles, before = sweeps.begun(engine, prompts, params, by_row)
                found = _profiled(engine, handles, device)
                tokens = sum(len(h.result().completions[0].token_ids) for h in handles) - before
                done, wall = tokens / batch, found.pop("wall")
                ceiling = ceilings.measure(model, device, rows=(batch,), kv_tokens=batch * context)
                best = ceiling.step_s(batch, int(batch * (context + done / 2)) + before)
                yield {
                    "model": name,
                    "device": device,
                    "batch": batch,
                    "context": context,
                    "adapters": mixed,
                    "steps": done,
                    "step_us": wall / done,
                    "ceiling_us": best * 1e6,
                    "of_ceiling": best * 1e6 * done / wall,
                    "parts_us": {part: us / done for part, us in sorted(found["parts"].items(), key=lambda p: -p[1])},
                    "idle_share": found["parts"].get("waits" if device == "cuda" else "host", 0.0) / wall,
                    "kernels_per_step": sum(found["counts"].values()) / done,
                    "largest": {
                        kernel: {"us": us / done, "count": found["counts"][kernel] / done}
                        for kernel, us in found["by_name"].most_common(_MOST_NAMES)
                    },
                    "matmuls": engine.stats().matmuls,
                }


def _profiled(engine: RolloutEngine, handles: Sequence[RolloutHandle], device: str) -> dict[str, Any]:
    """Microseconds until all have ended, and of it by kind and by name, with how often each came."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    ceilings.synchronize(device)
    with profile(activities=activities) as trace:
        start = time.perf_counter()
        engine.wait(handles)
        ceilings.synchronize(device)
        wall = 1e6 * (time.perf_counter() - start)
    if device == "cuda":
        events = [e for e in trace.events() if e.device_type.name == "CUDA"]
        if not events:  # as where a virtual machine keeps the counters: such a device is not one that never waits
            raise RuntimeError("the profiler saw no kernels")
        spans = [(e.name, e.time_range.start, e.time_range.end) for e in events]
        parts, by_name = Counter(attribute(spans)), Counter(attribute(spans, _short))
        del by_name["gaps"], by_name["waits"]
    else:  # an operation's own time, without that of the operations it calls
        events = list(trace.events())
        parts, by_name = Counter(), Counter()
        for event in events:
            parts[kind_of(event.name)] += event.self_cpu_time_total
            by_name[_short(event.name)] += event.self_cpu_time_total
        host: Any = max(0.0, wall - sum(parts.values()))  # Python
        parts["host"] = host
    return {"wall": wall, "parts": parts, "by_name": by_name, "counts": Counter(_short(e.name) for e in events)}


def _short(name: str) -> str:
    return name[:60]


def table(found: dict[str, Any]) -> list[str]:
    adapters = f", {found['adapters']} adapters" if found["adapters"] else ""
    return [
        f"{found['model']}, {found['batch']} rows, context {found['context']}{adapters}: a step takes {found['step_us']:.0f} us under "
        f"the profiler, {found['of_ceiling']:.0%} of the ceiling's speed",
        *(f"  {part:24}{us:10.1f} us {us / found['step_us']:7.1%}" for part, us in found["parts_us"].items()),
        "  of which the largest, by name:",
        *(f"  {name:60}{of['us']:10.1f} us in {of['count']:.1f}" for name, of in found["largest"].items()),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=tuple(MODELS), help="default: the toy on a CPU, the 1B on CUDA")
    parser.add_argument("--batch", type=int, nargs="+", default=[64], help="one or several, one after the other")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument(
        "--adapters",
        type=int,
        default=0,
        help="besides the base: LoRA adapters of rank 16, mixed in the batch; needs peft",
    )
    parser.add_argument("--output", type=Path, help="a folder to write a JSON file to")
    args = command.parse(parser)
    if args.adapters < 0:
        parser.error("argument --adapters: it has to be at least 0")
    if args.adapters and importlib.util.find_spec("peft") is None:
        parser.error("argument --adapters: pip install peft")
    name = args.model or (LLAMA_1B.name if args.device == "cuda" else TOY.name)
    runs: list[dict[str, Any]] = []
    started = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    for found in measure(name, args.device, args.batch, args.context, args.steps, args.adapters):
        runs.append(found)
        print("\n".join(table(found)), flush=True)
        print(json.dumps(found), flush=True)
        if args.output is not None:  # after each, so that a run that is cut off leaves what it has found
            path = args.output / f"profile-{args.device}-{started}.json"
            path.write_text(
                json.dumps({"environment": command.environment(args.device), "profiles": runs}, indent=1) + "\n"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
