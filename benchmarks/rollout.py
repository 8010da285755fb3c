"""Rollout speed against transformers, with this run's own ceilings: ``python -m stoker.benchmarks.rollout``.

Writes one JSON file and one plot, prints a table and, last, one line of JSON. On a CPU only ratios of one run mean
anything: run it on a machine that does nothing else.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from stoker.benchmarks import ceilings, command, gate, overhead, phases, plots, report, step_profile, sweeps
from stoker.benchmarks.footprint import clear
from stoker.benchmarks.outside import LMDeploy, Vllm
from stoker.benchmarks.peers import Generate, GenerateBatchAsCalled, GenerateBatchTuned, Peer, Stoker, TooSlowError
from stoker.benchmarks.scenarios import SCENARIOS, Scenario
from stoker.benchmarks.workloads import (
    HYBRID_2B,
    LLAMA_1B,
    QWEN_7B,
    SMALL,
    TOY,
    TOY_HYBRID,
    ModelSpec,
    Workload,
    dtype_of,
    fifo_steps,
)
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

_COMMAND = (sys.executable, "-P", "-m", "stoker.benchmarks.rollout")
PEERS: dict[str, type[Peer]] = {
    p.name: p for p in (Generate, GenerateBatchAsCalled, GenerateBatchTuned, Vllm, LMDeploy)
}
PARTS = ("rollouts", "sweep", "profiles", "start_up", "sweep_fp8", "growth")


@contextmanager
def running(peer: Peer) -> Iterator[None]:
    peer.start()
    try:
        yield
    finally:
        peer.stop()


def timed(peer: Peer, prompts: list[list[int]], lengths: Sequence[int], device: str) -> float:
    """Seconds of one rollout, from token ids to token ids; checks that every request ran to its length."""
    gc.collect()
    with running(peer):
        ceilings.synchronize(device)
        start = time.perf_counter()
        tokens = peer.rollout(prompts, lengths)
        ceilings.synchronize(device)
        seconds = time.perf_counter() - start
    if [len(t) for t in tokens] != list(lengths):
        raise RuntimeError(f"{peer.name} did not run every request to its length")
    return seconds


def compare(
    scenario: Scenario, device: str, peer_names: Sequence[str], note: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Gate, interleaved timings, ceiling and step times of one scenario. note: is told what is known so far."""
    spec, work = scenario.spec, scenario.workload
    dtype = dtype_of(device)
    vocab, lengths = spec.config.vocab_size, work.lengths
    stoker = Stoker(spec, work, device, dtype)
    kv_tokens = work.slots * work.max_len // 2
    ceiling = ceilings.measure(stoker.model, device, rows=(work.slots, 8 * work.slots), kv_tokens=kv_tokens)

    first = work.draw(vocab, -1)
    begin = time.perf_counter()
    stoker.engine.generate_batch(first[:1], SamplingParams(max_tokens=1))
    first_token_s = stoker.start_up_s + time.perf_counter() - begin
    with overhead.timed_captures(stoker.engine) as capture_ms:
        stoker.warm_up(first, scenario.warm_up_lengths)
    assert stoker.batch is not None
    checked = gate.check_logprobs(stoker.model, stoker.batch.outputs[:: work.samples][:8])
    results: dict[str, Any] = {
        "model": {"name": spec.name, "dtype": str(dtype).removeprefix("torch."), "parameters": _size(stoker.model)},
        "workload": work.describe(),
        "gate": checked,
        "ceiling": asdict(ceiling),
        "ceiling_s": ceiling.rollout_s(work.draw(vocab, 0), lengths, work.slots),
        "start_up_s": stoker.start_up_s,
        "first_token_s": first_token_s,
        "capture_ms": capture_ms,
        # Where others may take the device with them.
        **({"alone_s": timed(stoker, work.draw(vocab, -2), lengths, device)} if device == "cuda" else {}),
        "stats": asdict(stoker.engine.stats()),
    }
    note(results)
    engines = race(stoker, scenario, device, dtype, peer_names)
    seconds = {name: e["seconds"] for name, e in engines.items() if "skipped" not in e}
    for name, figures in report.compared(seconds, sum(lengths), results["ceiling_s"]).items():
        engines[name].update(figures)
    note(results | {"engines": engines})
    results |= {
        "engines": engines,
        **_steps(stoker, work, vocab),
        "prefill": phases.prefill(stoker.engine, ceiling, work, vocab),
        "maintenance": phases.maintenance(stoker.engine, device),
        "stats": asdict(stoker.engine.stats()),
    }
    note(results)
    if scenario.extras:
        results["shuffled"] = _shuffled(stoker, scenario, device, engines[stoker.name]["median_s"])
        results["cycle"] = phases.cycle(stoker.engine, stoker.model, work, vocab, device)
    stoker.close()
    return results


def race(
    stoker: Stoker, scenario: Scenario, device: str, dtype: torch.dtype, peer_names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Seconds of every engine, in rounds of one rollout each. ``stoker`` is warm already."""
    work, vocab = scenario.workload, scenario.spec.config.vocab_size
    peers: dict[str, Peer] = {stoker.name: stoker}
    engines: dict[str, dict[str, Any]] = {stoker.name: {"settings": stoker.settings, "seconds": []}}
    with ExitStack() as stack:
        for name in peer_names:
            module = PEERS[name].module
            if module is not None and importlib.util.find_spec(module) is None:
                engines[name] = {"settings": {}, "skipped": f"{module} is not installed"}
                continue
            engines[name] = {"settings": {}}
            try:
                peer = PEERS[name](scenario.spec, work, device, dtype)
                stack.callback(peer.close)
                engines[name]["settings"] = peer.settings
                if module is not None:
                    engines[name]["version"] = getattr(sys.modules[module], "__version__", None)
                with running(peer):
                    start = time.perf_counter()
                    peer.warm_up(work.draw(vocab, -1), scenario.warm_up_lengths, scenario.peer_limit_s)
                    if (took := time.perf_counter() - start) > scenario.peer_limit_s:
                        raise TooSlowError(f"its warm-up took {took:.0f} s, allowed are {scenario.peer_limit_s:.0f} s")
            except Exception as error:  # whatever another engine fails with, the run goes on without it
                engines[name]["skipped"] = _reason(error)
            else:
                peers[name], engines[name]["seconds"] = peer, []
        start = time.perf_counter()
        for repeat in range(scenario.repeats):
            prompts = work.draw(vocab, repeat)
            for name, peer in list(peers.items()):
                seconds = engines[name]["seconds"]
                if peer.repeats is not None and repeat >= peer.repeats:
                    continue
                if repeat and time.perf_counter() - start + seconds[-1] > scenario.budget_s:
                    continue
                try:
                    seconds.append(timed(peer, prompts, work.lengths, device))
                except Exception as error:
                    if peer is stoker:
                        raise
                    engines[name]["skipped"] = _reason(error)
                    del peers[name]
    return engines


def _reason(error: Exception) -> str:
    """As ``command.reason``; a ``TooSlowError`` says it all by itself."""
    return str(error) if isinstance(error, TooSlowError) else command.reason(error)


def _size(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _shuffled(stoker: Stoker, scenario: Scenario, device: str, median_s: float) -> dict[str, Any]:
    """The same lengths dealt to other requests: time may only change as it does for whoever serves in their order."""
    work, seconds, steps = scenario.workload, [], []
    for repeat in range(scenario.repeats):
        lengths = work.lengths
        random.Random(repeat).shuffle(lengths)
        prompts = work.draw(scenario.spec.config.vocab_size, 1000 + repeat)
        seconds.append(timed(stoker, prompts, lengths, device))
        steps.append(fifo_steps(lengths, work.slots))
    return {
        "seconds": seconds,
        "ratio": statistics.median(seconds) / median_s,
        "first_come_first_served_ratio": statistics.median(steps) / fifo_steps(work.lengths, work.slots),
    }


def _steps(stoker: Stoker, work: Workload, vocab: int) -> dict[str, Any]:
    """Step times over one more rollout, and the parts of a step with all slots at work."""
    with overhead.timed_steps(stoker.engine) as whole:
        stoker.rollout(work.draw(vocab, 2000), work.lengths)
    prompts = work.draw(vocab, 2001)[: work.slots]
    with overhead.timed_steps(stoker.engine) as full:
        stoker.rollout(prompts, [33] * len(prompts))
    return {
        "steps": overhead.step_percentiles(whole, work.slots),
        "running": overhead.running(whole),
        "step_us_rows": len(prompts),
        "step_us": overhead.breakdown(full, len(prompts)),
    }


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

    On CUDA ``needs_s`` adds up to 480 seconds, of which `make gpu` allows 230 after the tests, and 360 without them: what
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

    def steps(spec: ModelSpec, batches: Sequence[int], context: int, needs_s: float = 0) -> list[Part]:
        def measure() -> Iterator[dict[str, Any]]:
            count = 16 if quick else 64
            return (step_profile.measure(spec.name, device, batch, context, count) for batch in batches)

        return of(spec, Part("profiles", needs_s, measure))

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
        results["left_out"].append(f"{part.key}: {_reason(error)}")
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
