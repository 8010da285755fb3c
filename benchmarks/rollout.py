"""Rollout speed against transformers, with this run's own ceilings: ``python -m stoker.benchmarks.rollout``.

Writes one JSON file and one plot, prints a table and, last, one line of JSON. On a CPU only ratios of one run mean
anything: run it on a machine that does nothing else.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from stoker.benchmarks import ceilings, command, overhead, phases, plots, report, step_profile, sweeps
from stoker.benchmarks.comparison import PEERS, compare, reason
from stoker.benchmarks.footprint import clear
from stoker.benchmarks.peers import Generate, GenerateBatchAsCalled
from stoker.benchmarks.scenarios import SCENARIOS
from stoker.benchmarks.workloads import (
    HYBRID_2B,
    LLAMA_1B,
    QWEN_7B,
    SMALL,
    SMALL_WIDE,
    TOY,
    TOY_HYBRID,
    ModelSpec,
)
from stoker.rollout import EngineConfig, RolloutEngine

_COMMAND = (sys.executable, "-P", "-m", "stoker.benchmarks.rollout")
PARTS = ("rollouts", "sweep", "sampling", "profiles", "start_up", "sweep_fp8", "growth")


def growth(device: str, quick: bool) -> dict[str, Any]:
    """Does host work grow with what is finished or how long sequences are? On the toy, where it would show most."""
    long, rows = 256 if quick else 1024, 64
    model = TOY.build(device, torch.float32)
    rng = random.Random(0)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(1, TOY.config.vocab_size) for _ in range(tokens)]

    with RolloutEngine(model, config=EngineConfig(max_num_seqs=rows, max_model_len=long + 64)) as engine:
        return overhead.growth(engine, prompt, rows, long, rounds=8 if quick else 40)


@dataclass(frozen=True)
class Part:
    """One measurement of a run: what it adds under ``key``, begun where at least ``needs_s`` seconds are left.

    measure: gives a dictionary, or one thing after the other, each of which is written at once.
    """

    key: str
    needs_s: float
    measure: Callable[[], dict[str, Any] | Iterable[Any]]


def parts(
    device: str,
    quick: bool,
    only: str,
    peer_names: Sequence[str],
    limited: bool,
    note: Callable[[dict[str, Any]], object],
) -> list[Part]:
    """What a run measures, in the order of its worth: what a budget leaves no time for is left out at the end.

    On CUDA ``needs_s`` adds up to 540 seconds, of which `make gpu` allows 230 after the tests, and 360 without them: what
    comes after the profiles may be missing there. limited: sweeps take no longer than ``needs_s`` either. note: as for ``compare``.
    """

    def scenario(number: int, needs_s: float = 0) -> list[Part]:
        chosen = SCENARIOS[device, quick][number]
        return of(
            chosen.spec,
            Part("rollouts", needs_s, lambda: (compare(chosen, device, peer_names, note) for _ in range(1))),
        )

    def decode(
        spec: ModelSpec, points: Sequence[tuple[int, int]], needs_s: float, key: str = "sweep", **options: Any
    ) -> list[Part]:
        budget_s = needs_s if limited else math.inf
        return of(spec, Part(key, needs_s, lambda: sweeps.decode(spec, device, points, budget_s, **options)))

    def sampling(spec: ModelSpec, batches: Sequence[int], needs_s: float = 0) -> list[Part]:
        return of(spec, Part("sampling", needs_s, lambda: sweeps.sampling(spec, device, batches)))

    def steps(spec: ModelSpec, batches: Sequence[int], context: int, needs_s: float = 0) -> list[Part]:
        count = 16 if quick else 64
        return of(
            spec, Part("profiles", needs_s, lambda: step_profile.measure(spec.name, device, batches, context, count))
        )

    def start_up(spec: ModelSpec, needs_s: float = 0) -> list[Part]:
        return of(spec, Part("start_up", needs_s, lambda: {spec.name: phases.start_up(spec.name, device, limit_s=60)}))

    def of(spec: ModelSpec, part: Part) -> list[Part]:
        return [part] if only in spec.name else []

    host = Part("growth", 10, lambda: growth(device, quick))
    if device == "cpu" or quick:
        spec = TOY if device == "cpu" else LLAMA_1B
        return [
            *(part for number in range(len(SCENARIOS[device, quick])) for part in scenario(number)),
            *decode(spec, ((1, 64), (16, 64)) if quick else ((1, 512), (16, 512), (64, 512), (16, 2048)), 60),
            *(sampling(spec, (4,)) if quick else sampling(SMALL_WIDE, (4, 32))),
            *steps(spec, (16,) if quick else (64,), 128),
            *([] if quick else steps(SMALL, (64,), 128) + steps(TOY_HYBRID, (64,), 128)),
            *start_up(spec),
            host,
        ]
    return [
        *scenario(0, 85),
        *decode(LLAMA_1B, ((64, 512), (1, 512), (256, 512), (512, 512), (64, 2048), (256, 2048), (512, 2048)), 35),
        *decode(QWEN_7B, ((64, 512), (256, 512), (64, 2048), (1, 512), (256, 2048), (512, 512)), 30),
        *steps(LLAMA_1B, (64, 256), 512, 15),
        *decode(LLAMA_1B, ((64, 512), (256, 512)), 10, deterministic=True),
        *scenario(1, 70),
        *start_up(LLAMA_1B, 35),
        *steps(HYBRID_2B, (64,), 512, 20),
        *decode(QWEN_7B, ((64, 512), (1, 512), (256, 512)), 20, key="sweep_fp8", quantization="fp8"),
        *decode(QWEN_7B, ((256, 2048), (64, 2048)), 15, key="sweep_fp8", kv_cache_dtype="fp8"),
        *decode(LLAMA_1B, ((16, 512), (64, 8192), (16, 8192), (1, 8192)), 30),
        *steps(LLAMA_1B, (1,), 512, 10),
        *sampling(LLAMA_1B, (1, 64), 60),
        host,
        *scenario(3, 40),
        *scenario(2, 55),
    ]


def measured(part: Part, written: command.Results) -> bool:
    """Measure a part, and write what it finds as soon as it is known. Returns False where it failed, and notes why."""
    results = written.found
    try:
        found = part.measure()
        if isinstance(found, dict):
            results[part.key] = found
        for one in () if isinstance(found, dict) else found:
            results.setdefault(part.key, []).append(one)
            results.pop("unfinished", None)
            written.write()
    except Exception as error:  # the gate's too: what the other parts have found and will find is not lost
        traceback.print_exc()
        results["left_out"].append(f"{part.key}: {reason(error)}")
        if "unfinished" in results:
            results.setdefault("broken_off", []).append(results.pop("unfinished"))
        return False
    return True


def answers(device: str) -> bool:
    """Whether the device does any more work of this process."""
    try:
        ceilings.synchronize(device)
    except RuntimeError:
        return False
    return True


def main() -> int:
    parser = command.flags(__doc__, "small workloads", PARTS)
    parser.add_argument("--peers", nargs="*", choices=tuple(PEERS), help="all, less those that take minutes on CUDA")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds, about; what comes late is left out")
    parser.add_argument(
        "--resume", type=Path, help="go on with the run of this file, whose process has lost the device"
    )
    args = command.parse(parser)
    transformers.logging.set_verbosity_error()
    peer_names = args.peers
    if peer_names is None:
        slow = {GenerateBatchAsCalled.name} if args.device == "cuda" else set()
        if args.budget < math.inf:
            slow.add(Generate.name)
        peer_names = [name for name in PEERS if name not in slow]

    start = time.perf_counter()
    written = command.Results("rollout", args, peers=peer_names, parts=args.parts or PARTS, budget_s=str(args.budget))
    written.found.update(rollouts=[], part_s=[], left_out=[], begun=0, seconds=0.0)
    if args.resume is not None:
        try:
            written.path, written.found = args.resume, written.found | json.loads(args.resume.read_text())
        except (OSError, TypeError, ValueError) as error:
            parser.error(f"argument --resume: {args.resume} is no file of a run ({error}): leave it out")
    results = written.found
    start -= results["seconds"]

    def note(found: dict[str, Any]) -> None:
        results["unfinished"] = found
        written.write()

    planned = parts(args.device, args.quick, args.only, peer_names, args.budget < math.inf, note)
    planned = [part for part in planned if args.parts is None or part.key in args.parts]
    if {part.key for part in planned} <= {"growth"}:  # which is of no model of ``--only``
        return command.no_model(args)
    failed = args.resume is not None
    for part in planned[results["begun"] :]:
        results["begun"] += 1
        began = time.perf_counter()
        left = args.budget - (began - start)
        if left < part.needs_s:
            results["left_out"].append(f"{part.key}: {left:.0f} s were left, it needs {part.needs_s:.0f} s")
            continue
        print(f"{part.key}, after {began - start:.0f} s ...", file=sys.stderr, flush=True)
        if measured(part, written):
            results["part_s"].append((part.key, time.perf_counter() - began))
        else:
            failed = True
        results["seconds"] = time.perf_counter() - start
        written.write()
        if not answers(args.device):  # and never will in this process, as after an illegal access
            print("the device is lost; another process goes on", file=sys.stderr, flush=True)
            os.execv(sys.executable, [*_COMMAND, *sys.argv[1:], "--resume", str(written.path)])
        clear(args.device)
    results["targets"] = report.targets(results)
    written.write()
    written.draw(lambda pyplot: plots.draw(pyplot, results))
    print(report.table(results))
    print(f"\nwrote {written.path}")
    print(report.summary(results))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
