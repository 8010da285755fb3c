"""Where a decode step's time goes: kernels by kind, gaps between them, host: ``python -m stoker.benchmarks.step_profile``.

On CUDA the kernels of replayed graphs are attributed by their names, and what is left of the time is the device idle: gaps
between kernels within a window, and waits between windows. On a CPU the operations themselves are attributed. Prints a
table and one JSON line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from stoker.benchmarks import ceilings, command, sweeps
from stoker.benchmarks.workloads import HYBRID_2B, LLAMA_1B, QWEN_7B, SMALL, TOY, TOY_HYBRID, dtype_of, random_prompts
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

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


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in lower for word in words)), "other")


_WAIT_US = 20.0  # a longer gap is no gap between kernels of a graph: the device had nothing to do


def attribute(spans: Iterable[tuple[str, float, float]]) -> dict[str, float]:
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
        total[kind_of(name)] += max(0.0, end - max(start, end_of_last))  # type: ignore[assignment]
        end_of_last = max(end, end_of_last)
    return dict(total)


def measure(name: str, device: str, batch: int, context: int, steps: int, adapters: int = 0) -> dict[str, Any]:
    """Of at least so many steps. adapters: as many as are mixed in the batch."""
    spec = MODELS[name]
    model: Any
    by_row: list[str] | None = None
    if adapters:
        from stoker.benchmarks import lora  # needs peft

        model = lora.build(spec, device, adapters)
        by_row = [str(row % adapters) for row in range(batch)]
    else:
        model = spec.build(device, dtype_of(device))
    prompts = random_prompts(spec, batch, context, seed="0")
    most = steps + 2 * EngineConfig().decode_window  # as in ``sweeps``
    params = SamplingParams(max_tokens=most, ignore_eos=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    config = EngineConfig(max_num_seqs=batch, max_model_len=context + most, max_loras=max(adapters, 1))
    with RolloutEngine(model, config=config) as engine:
        for _ in range(2):
            engine.generate_batch(prompts, params, adapter=by_row)  # compiles, captures, fills the prefix cache
        handles, before = sweeps.begun(engine, prompts, params, by_row)
        ceilings.synchronize(device)
        with profile(activities=activities) as trace:
            start = time.perf_counter()
            engine.wait(handles)
            ceilings.synchronize(device)
            wall = time.perf_counter() - start
        done = (sum(len(h.result().completions[0].token_ids) for h in handles) - before) / batch
        ceiling = ceilings.measure(model, device, rows=(batch,), kv_tokens=batch * context)
        matmuls = engine.stats().matmuls
    if device == "cuda":
        events = [e for e in trace.events() if e.device_type == DeviceType.CUDA]
        if (
            not events
        ):  # as where a virtual machine keeps the counters: a device of no kernels is not one that never waits
            raise RuntimeError("the profiler saw no kernels")
        parts = attribute((e.name, e.time_range.start, e.time_range.end) for e in events)
    else:  # an operation's own time, without that of the operations it calls
        events = list(trace.events())
        parts = Counter[str]()
        for event in events:
            parts[kind_of(event.name)] += event.self_cpu_time_total
        parts["host"] = max(0.0, wall * 1e6 - sum(parts.values()))  # Python
    best = ceiling.step_s(batch, int(batch * (context + done / 2)) + before)
    return {
        "model": name,
        "device": device,
        "batch": batch,
        "context": context,
        "adapters": adapters,
        "steps": done,
        "step_us": wall / done * 1e6,
        "ceiling_us": best * 1e6,
        "of_ceiling": best * done / wall,
        "parts_us": {part: us / done for part, us in sorted(parts.items(), key=lambda p: -p[1])},
        "idle_share": parts.get("waits" if device == "cuda" else "host", 0.0) * 1e-6 / wall,
        "kernels_per_step": len(events) / done,
        "matmuls": matmuls,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=tuple(MODELS), help="default: the toy on a CPU, the 1B on CUDA")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument(
        "--adapters", type=int, default=0, help="LoRA adapters of rank 16, mixed in the batch; needs peft"
    )
    parser.add_argument("--output", type=Path, help="a folder to write the JSON line to as a file")
    args = command.parse(parser)
    if args.adapters < 0:
        parser.error("argument --adapters: it has to be at least 0")
    if args.adapters and importlib.util.find_spec("peft") is None:
        parser.error("argument --adapters: pip install peft")
    name = args.model or (LLAMA_1B.name if args.device == "cuda" else TOY.name)
    found = measure(name, args.device, args.batch, args.context, args.steps, args.adapters)
    print(
        f"{name}, {args.batch} rows, context {args.context}: a step takes {found['step_us']:.0f} us under the profiler"
    )
    for part, us in found["parts_us"].items():
        print(f"  {part:24}{us:10.1f} us {us / found['step_us']:7.1%}")
    print(json.dumps(found))
    if args.output is not None:
        what = f"{args.batch}x{args.context}" + (f"-{args.adapters}-adapters" if args.adapters else "")
        path = args.output / f"profile-{args.device}-{name}-{what}.json"
        path.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
