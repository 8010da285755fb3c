"""One scenario of ``rollout``: the gate, every engine timed in turn on the same requests, and where the engine's time goes."""

from __future__ import annotations

import gc
import importlib.util
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch

from stoker.benchmarks import ceilings, command, gate, overhead, phases, report
from stoker.benchmarks.outside import LMDeploy, Vllm
from stoker.benchmarks.peers import Generate, GenerateBatchAsCalled, GenerateBatchTuned, Peer, Stoker, TooSlowError
from stoker.benchmarks.scenarios import Scenario
from stoker.benchmarks.workloads import Workload, dtype_of, fifo_steps
from stoker.rollout import SamplingParams

PEERS: dict[str, type[Peer]] = {
    p.name: p for p in (Generate, GenerateBatchAsCalled, GenerateBatchTuned, Vllm, LMDeploy)
}


@contextmanager
def running(peer: Peer) -> Iterator[None]:
    peer.start()
    try:
        yield
    finally:
        peer.stop()


def timed(peer: Peer, prompts: list[Any], lengths: Sequence[int], device: str) -> float:
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
                engines[name]["skipped"] = reason(error)
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
                    engines[name]["skipped"] = reason(error)
                    del peers[name]
    return engines


def reason(error: Exception) -> str:
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
