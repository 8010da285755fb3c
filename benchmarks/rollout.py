"""Rollout speed against transformers, with this run's own ceilings: ``python -m stoker.benchmarks.rollout``.

Writes one JSON file and one plot, prints a table and, last, one line of JSON. On a CPU only ratios of one run mean
anything: run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from stoker.benchmarks import ceilings, gate, overhead, phases, report, step_profile
from stoker.benchmarks.outside import LMDeploy, Vllm
from stoker.benchmarks.peers import Generate, GenerateBatchAsCalled, GenerateBatchTuned, Peer, Stoker, TooSlowError
from stoker.benchmarks.workloads import LLAMA_1B, QWEN_7B, SMALL, TOY, ModelSpec, Workload, fifo_steps
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

PEERS: dict[str, type[Peer]] = {
    p.name: p for p in (Generate, GenerateBatchAsCalled, GenerateBatchTuned, Vllm, LMDeploy)
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A comparison: ``repeats`` timed rounds of all engines in turn, none begun after ``budget_s`` seconds."""

    spec: ModelSpec
    workload: Workload
    repeats: int
    budget_s: float = float("inf")
    peer_limit_s: float = float("inf")  # a peer whose warm-up takes longer is not timed


# GRPO groups: (i) median 0.4 of the cap, all in flight at once; (ii) median 0.17 of it, more requests than slots.
_CPU_I = Workload(name="i", prompts=8, samples=8, prompt_tokens=(64, 256), median=100, sigma=0.7, cap=256, slots=64)
_CPU_II = Workload(name="ii", prompts=24, samples=8, prompt_tokens=(64, 256), median=44, sigma=1.0, cap=256, slots=64)
_GPU_I = Workload(name="i", prompts=16, samples=8, prompt_tokens=(256, 1024), median=200, sigma=0.7, cap=512, slots=128)
_GPU_II = Workload(
    name="ii", prompts=32, samples=8, prompt_tokens=(256, 1024), median=700, sigma=0.9, cap=4096, slots=256
)
_QUICK = Workload(name="quick", prompts=8, samples=8, prompt_tokens=(16, 64), median=26, sigma=0.7, cap=64, slots=64)

SCENARIOS = {
    ("cpu", False): (
        Scenario(spec=TOY, workload=_CPU_I, repeats=5),
        Scenario(spec=TOY, workload=_CPU_II, repeats=3),
        Scenario(spec=SMALL, workload=_CPU_I, repeats=3),
    ),
    ("cpu", True): (
        Scenario(spec=TOY, workload=_QUICK, repeats=3),
        Scenario(spec=SMALL, workload=_QUICK, repeats=1),
    ),
    ("cuda", False): (
        # With what is measured besides, about 5 minutes in all.
        Scenario(spec=LLAMA_1B, workload=_GPU_I, repeats=5, budget_s=40, peer_limit_s=20),
        Scenario(spec=LLAMA_1B, workload=_GPU_II, repeats=2, budget_s=30, peer_limit_s=20),
        Scenario(spec=QWEN_7B, workload=_GPU_I, repeats=3, budget_s=40, peer_limit_s=20),
    ),
    ("cuda", True): (Scenario(spec=LLAMA_1B, workload=_QUICK, repeats=3, budget_s=30, peer_limit_s=30),),
}


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


def compare(scenario: Scenario, device: str, peer_names: Sequence[str]) -> dict[str, Any]:
    """Gate, interleaved timings, ceiling and step times of one scenario."""
    spec, work = scenario.spec, scenario.workload
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    vocab, lengths = spec.config.vocab_size, work.lengths
    stoker = Stoker(spec, work, device, dtype)
    kv_tokens = work.slots * work.max_len // 2
    ceiling = ceilings.measure(stoker.model, device, rows=(work.slots, 8 * work.slots), kv_tokens=kv_tokens)

    first = work.draw(vocab, -1)
    begin = time.perf_counter()
    stoker.engine.generate_batch(first[:1], SamplingParams(max_tokens=1))
    first_token_s = stoker.start_up_s + time.perf_counter() - begin
    with overhead.timed_captures(stoker.engine) as capture_ms:
        stoker.warm_up(first, lengths)
    assert stoker.batch is not None
    checked = gate.check_logprobs(stoker.model, stoker.batch.outputs[:: work.samples][:8])
    engines = race(stoker, scenario, device, dtype, peer_names)
    ceiling_s = ceiling.rollout_s(work.draw(vocab, 0), lengths, work.slots)
    median = {name: statistics.median(e["seconds"]) for name, e in engines.items() if "skipped" not in e}
    for name, seconds in median.items():
        engines[name].update(
            median_s=seconds,
            tokens_per_s=sum(lengths) / seconds,
            times_stoker=seconds / median[stoker.name],
            of_ceiling=ceiling_s / seconds,
        )
    results = {
        "model": {"name": spec.name, "dtype": str(dtype).removeprefix("torch."), "parameters": _size(stoker.model)},
        "workload": work.describe(),
        "gate": checked,
        "ceiling": asdict(ceiling),
        "ceiling_s": ceiling_s,
        "engines": engines,
        "start_up_s": stoker.start_up_s,
        "first_token_s": first_token_s,
        "capture_ms": capture_ms,
        "shuffled": _shuffled(stoker, scenario, device, median[stoker.name]),
        **_steps(stoker, work, vocab),
        "prefill": phases.prefill(stoker.engine, ceiling, work, vocab),
        "cycle": phases.cycle(stoker.engine, work, vocab, device),
        "maintenance": phases.maintenance(stoker.engine, device),
        "stats": asdict(stoker.engine.stats()),
    }
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
                with running(peer):
                    peer.warm_up(work.draw(vocab, -1), work.lengths, scenario.peer_limit_s)
            except TooSlowError as error:
                engines[name]["skipped"] = str(error)
            except Exception as error:  # of a package that may not fit this torch or transformers
                if module is None:
                    raise
                engines[name]["skipped"] = f"{type(error).__name__}: {error}"[:300]
            else:
                peers[name], engines[name]["seconds"] = peer, []
        start = time.perf_counter()
        for repeat in range(scenario.repeats):
            if repeat and time.perf_counter() - start > scenario.budget_s:
                break
            prompts = work.draw(vocab, repeat)
            for name, peer in peers.items():
                if peer.repeats is not None and repeat >= peer.repeats:
                    continue
                engines[name]["seconds"].append(timed(peer, prompts, work.lengths, device))
    return engines


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
    long, rows = 1024, 64
    model = TOY.build(device, torch.float32)
    rng = random.Random(0)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(1, TOY.config.vocab_size) for _ in range(tokens)]

    with RolloutEngine(model, config=EngineConfig(max_num_seqs=rows, max_model_len=long + 64)) as engine:
        return overhead.growth(engine, prompt, rows, long, rounds=8 if quick else 40)


def sweep(
    spec: ModelSpec,
    device: str,
    batches: Sequence[int],
    contexts: Sequence[int],
    budget_s: float,
    *,
    deterministic: bool = False,
) -> list[dict[str, Any]]:
    """Decode alone, at fixed batch and context: the difference of a long and a short rollout of cached prompts."""
    steps, points = 64, []
    start = time.perf_counter()
    config = EngineConfig(
        max_num_seqs=max(batches), max_model_len=max(contexts) + 2 * steps, deterministic=deterministic
    )
    with RolloutEngine(model := spec.build(device, torch.bfloat16), config=config) as engine:
        ceiling = ceilings.measure(model, device, rows=(max(batches), 4096), kv_tokens=0)
        rng = random.Random(0)
        for context in contexts:
            for batch in batches:
                if time.perf_counter() - start > budget_s:
                    return points
                prompts = [[rng.randrange(1, spec.config.vocab_size) for _ in range(context)] for _ in range(batch)]

                def seconds(tokens: int, prompts: list[list[int]] = prompts) -> float:
                    begin = time.perf_counter()
                    engine.generate_batch(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
                    return time.perf_counter() - begin

                seconds(1 + steps)  # fills the prefix cache and captures what there is to capture
                step_s = statistics.median(seconds(1 + steps) - seconds(1) for _ in range(3)) / steps
                best_s = ceiling.step_s(batch, batch * (context + steps // 2))
                points.append(
                    {
                        "model": spec.name,
                        "deterministic": deterministic,
                        "batch": batch,
                        "context": context,
                        "step_ms": step_s * 1e3,
                        "ceiling_ms": best_s * 1e3,
                        "tokens_per_s": batch / step_s,
                        "of_ceiling": best_s / step_s,
                    }
                )
    return points


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, default=report.FOLDER)
    parser.add_argument("--quick", action="store_true", help="small workloads, to see that everything runs")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--peers", nargs="*", choices=tuple(PEERS), default=list(PEERS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()

    start = time.perf_counter()
    environment = report.environment(args.device)
    if (environment["load_average"] or 0) > 0.5:
        print(f"the machine is busy (load average {environment['load_average']:.1f})", file=sys.stderr)
    results: dict[str, Any] = {
        "environment": environment,
        "configuration": {"quick": args.quick, "only": args.only, "peers": args.peers},
        "rollouts": [],
    }
    try:
        for scenario in SCENARIOS[args.device, args.quick]:
            if args.only in scenario.spec.name:
                print(f"{scenario.spec.name}, workload {scenario.workload.name} ...", file=sys.stderr, flush=True)
                results["rollouts"].append(compare(scenario, args.device, args.peers))
    except gate.GateError as error:
        print(f"gate: {error}; nothing was timed further", file=sys.stderr)
        return 1
    results["growth"] = growth(args.device, args.quick)
    if args.device == "cuda" and not args.quick:
        batches, contexts = (1, 16, 64, 256, 512), (512, 2048, 8192)
        results["sweep"] = [
            *sweep(LLAMA_1B, "cuda", batches, contexts, 35),
            *sweep(LLAMA_1B, "cuda", (64, 256), (512,), 15, deterministic=True),
            *sweep(QWEN_7B, "cuda", batches, contexts, 40),
        ]
    if not args.quick:
        profiled = (
            ((LLAMA_1B, (1, 64, 256), 512),) if args.device == "cuda" else ((TOY, (64,), 128), (SMALL, (64,), 128))
        )
        results["profiles"] = [
            step_profile.measure(spec.name, args.device, batch, context, steps=64)
            for spec, batches, context in profiled
            if args.only in spec.name
            for batch in batches
        ]
        results["start_up"] = {
            spec.name: phases.start_up(spec.name, args.device) for spec, _, _ in profiled if args.only in spec.name
        }
    results["seconds"] = time.perf_counter() - start
    path = report.write(results, args.output)
    print(report.table(results))
    print(f"\nwrote {path}")
    print(report.summary(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
