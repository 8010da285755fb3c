"""The ways by which new weights reach an engine, each timed and checked: those that ``benchmarks.weights`` compares."""

from __future__ import annotations

import gc
import importlib.util
import statistics
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import multiprocessing

from stoker.benchmarks import ceilings, command, weight_ranks
from stoker.benchmarks.footprint import Peak
from stoker.benchmarks.gate import GateError
from stoker.benchmarks.weight_ranks import CONFIG, WAIT_S, sums, train
from stoker.benchmarks.workloads import ModelSpec, dtype_of
from stoker.rollout import RolloutEngine
from stoker.weight_sync import gather
from stoker.weight_sync.transport import BroadcastTransfer, SharedMemoryTransfer

# Rounds before those that are timed: one says which tensors a trainer changes, and the next makes what takes them in one pass.
WARM_UP = 2

PARTS = ("masters", "adapter", "one dtype", "rounded", "elsewhere", "shards")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    spec: ModelSpec
    repeats: int
    gather_memory: int = gather.MEMORY_BYTES
    parts: Sequence[str] = PARTS


@dataclass(frozen=True, kw_only=True)
class Way:
    """prepare: change what is to be taken, untimed. update: take it; returns bytes written. check: whether it arrived.

    traffic: bytes that cannot but be read or written.
    """

    prepare: Callable[[], object]
    update: Callable[[], int]
    check: Callable[[], bool]
    traffic: int = 0


def race(ways: dict[str, Way], device: str, repeats: int, bandwidth: float) -> dict[str, Any]:
    """All ways by turns, after rounds of ``WARM_UP``; every round is checked. One that fails takes no more part.

    What a way's update does must not depend on the other ways' before it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    extra, moved = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0)
    failed: dict[str, Any] = {}
    for repeat in range(-WARM_UP, repeats):
        for name, way in ways.items():
            if name in failed:
                continue
            try:
                gc.collect()  # before: an update follows an optimizer's step, and an idle GPU has to be woken first
                way.prepare()
                peak = Peak(device)
                written: list[int] = []
                took = ceilings.timed(lambda w=way, n=written: n.append(w.update()), device)  # type: ignore[misc]
            except Exception as error:  # the device's, say, where one process may not open another's memory
                traceback.print_exc()
                failed[name] = {"skipped": command.reason(error), "failed": True}
                continue
            if repeat >= 0:
                seconds[name].append(took)
                extra[name] = max(extra[name], peak.extra())
            moved[name] = written[0]
            if not way.check():
                raise GateError(f"{name}: the engine does not run what it was given")
    return failed | {
        name: entry(times, moved[name], extra_bytes=extra[name], traffic=ways[name].traffic, bandwidth=bandwidth)
        for name, times in seconds.items()
        if name not in failed
    }


def entry(
    seconds: list[float], moved: int, *, extra_bytes: int | None = None, traffic: int = 0, bandwidth: float = 0.0
) -> dict[str, Any]:
    median = statistics.median(seconds)
    found: dict[str, Any] = {"seconds": seconds, "median_s": median, "bytes": moved}
    if extra_bytes is not None:
        found["extra_bytes"] = extra_bytes
    if traffic:
        found["of_bandwidth"] = traffic / bandwidth / median
    return found


def pushed(engine: RolloutEngine, weights: Any = None) -> int:
    engine.update_weights(weights)
    return engine.stats().last_update_bytes


@contextmanager
def process(function: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Another process, which gets one end of the connection as ``connection``."""
    # Forking spares each process the imports, among which one that looks at CUDA makes it unusable after a fork.
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    if not torch.cuda.is_available():
        context.set_forkserver_preload(["stoker.benchmarks.weight_ranks"])
    here, there = context.Pipe()
    child = context.Process(target=function, args=arguments, kwargs={"connection": there}, daemon=True)
    child.start()
    there.close()
    try:
        yield here
        child.join(WAIT_S)
        if child.exitcode != 0:
            raise GateError(f"a process of {function.__name__} ended with {child.exitcode}; what it printed says why")
    finally:
        here.close()
        child.kill()
        child.join()


@contextmanager
def sender(scenario: Scenario, device: str, dtype: torch.dtype, store: str, *, few: bool) -> Iterator[Connection]:
    """A trainer in another process, which sends as often as ``race`` takes."""
    rounds, threads = WARM_UP + scenario.repeats, torch.get_num_threads()
    other = process(weight_ranks.send, scenario.spec, device, dtype, store, threads, rounds, few)
    with other as connection, ExitStack() as stack:
        if store:
            weight_ranks.join(store, 1, 2, "gloo")
            stack.callback(dist.destroy_process_group)
        yield connection
        connection.send("done")


def of_one_dtype(scenario: Scenario, device: str, bandwidth: float) -> dict[str, Any]:
    """Ways into the model's own tensors, which is what an engine of the model's dtype runs on."""
    model = scenario.spec.build(device, dtype_of(device))
    new = {name: -p for name, p in model.named_parameters()}
    size: int = sum(t.nbytes for t in new.values())
    train(model)
    expected = sums(model)  # and those of ``new``

    def change() -> None:
        train(model)

    def arrived() -> bool:
        return bool(sums(model) == expected)

    def loaded() -> int:
        model.load_state_dict(new, strict=False)  # a tied head has no entry of its own
        return size

    with RolloutEngine(model, config=CONFIG) as engine:
        ways = {
            "aliased": Way(prepare=change, update=lambda: pushed(engine), check=lambda: engine.verify_weights().ok),
            "named tensors": Way(prepare=change, update=lambda: pushed(engine, new), check=arrived, traffic=2 * size),
            "load_state_dict": Way(prepare=change, update=loaded, check=arrived, traffic=2 * size),
        }
        return race(ways, device, scenario.repeats, bandwidth)


def of_elsewhere(
    scenario: Scenario, device: str, bandwidth: float, folder: Path, found: dict[str, Any]
) -> dict[str, Any]:
    """As ``of_one_dtype``, from files and from other processes.

    found: has them before the other processes are told to end, which may go wrong where a way has failed.
    """
    dtype = dtype_of(device)
    model = scenario.spec.build(device, dtype)
    start = {  # there are copies enough on the device
        name: p.to("cpu", copy=True) for name, p in model.named_parameters()
    }
    size = sum(t.nbytes for t in start.values())
    file = folder / "new.safetensors"
    save_file({name: t.contiguous() for name, t in start.items()}, file)
    expected = sums(model)

    def change() -> None:
        model.load_state_dict(start, strict=False)
        train(model)

    with ExitStack() as stack:
        engine = stack.enter_context(RolloutEngine(model, config=CONFIG))

        def from_process(store: str, *, few: bool = False) -> Way:
            connection = stack.enter_context(sender(scenario, device, dtype, store, few=few))
            transfer: Any = BroadcastTransfer(0) if store else SharedMemoryTransfer(connection, timeout=WAIT_S)
            theirs: list[Any] = []
            lacking = weight_ranks.first_layer(model) if few else list(model.parameters())

            def prepare() -> None:
                model.load_state_dict(start, strict=False)
                for parameter in lacking:  # what is held already would not be moved
                    parameter.fill_(3.0)
                theirs.append(connection.recv())

            return Way(
                prepare=prepare,
                update=lambda: pushed(engine, transfer),
                check=lambda: sums(model) == theirs[-1],
                traffic=2 * size + (2 * sum(p.nbytes for p in lacking) if few else 0),
            )

        ways = {
            "file": Way(
                prepare=change,
                update=lambda: pushed(engine, file),
                check=lambda: sums(model) == expected,
                traffic=2 * size,
            ),
            "shared memory": from_process(""),
            "shared memory, one layer": from_process("", few=True),
        }
        if device == "cpu":
            ways["broadcast"] = from_process(str(folder / "store"))
        found |= race(ways, device, scenario.repeats, bandwidth)
    return {} if device == "cpu" else {"broadcast": {"skipped": "NCCL takes one rank a GPU, and this run has one"}}


def of_masters(scenario: Scenario, device: str, bandwidth: float) -> dict[str, Any]:
    """A bf16 mirror of fp32 masters, of which all tensors have changed, as at the update before, or the same few."""
    model = scenario.spec.build(device, torch.float32)
    few = weight_ranks.first_layer(model)
    held = sum(p.nbytes for p in model.parameters())
    with RolloutEngine(model, config=replace(CONFIG, dtype=torch.bfloat16)) as engine:

        def matches() -> bool:
            return engine.verify_weights().ok

        def mirror(change: Callable[[], object], changed: int) -> Way:
            return Way(prepare=change, update=lambda: pushed(engine), check=matches, traffic=held + changed // 2)

        ways = {
            "mirror": mirror(lambda: train(model), held),
            "mirror, one layer changed": mirror(lambda: torch._foreach_neg_(few), sum(p.nbytes for p in few)),
        }
        # Not by turns: each is to find changed what its own update before did.
        races = (race({name: way}, device, scenario.repeats, bandwidth) for name, way in ways.items())
        return {name: found for one in races for name, found in one.items()}


def of_rounded(scenario: Scenario, device: str, bandwidth: float) -> dict[str, Any]:
    """Weights in fp8, made of the model's own tensors, which are looked at besides: changes that come later are to be seen. Or
    of fp32 masters, cast layer by layer."""
    found: dict[str, Any] = {}
    for name, dtype, own in (("aliased", dtype_of(device), "auto"), ("mirror", torch.float32, torch.bfloat16)):
        model = scenario.spec.build(device, dtype)
        with RolloutEngine(model, config=replace(CONFIG, quantization="fp8", dtype=own)) as engine:
            held = engine.stats().mirror_bytes
            rounded = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and p.dim() > 1)
            cast = dtype.itemsize if own == "auto" else 2
            written = rounded * (cast + 1) + (0 if own == "auto" else rounded * cast)  # rounding reads a weight twice
            way = Way(
                prepare=lambda model=model: train(model),  # type: ignore[misc]
                update=lambda engine=engine: pushed(engine),  # type: ignore[misc]
                check=lambda engine=engine: engine.verify_weights().ok,  # type: ignore[misc]
                traffic=sum(p.nbytes for p in model.parameters()) + written,
            )
            ways = race({f"{name}, rounded to fp8": way}, device, scenario.repeats, bandwidth)
            found |= {key: measured | {"held_bytes": held} for key, measured in ways.items()}
    return found


def of_shards(scenario: Scenario, device: str, folder: Path) -> dict[str, Any]:
    """FSDP2 ranks, gathered: two over Gloo on a CPU, one over NCCL on a GPU, where there can be no more."""
    ranks = 1 if device == "cuda" else 2
    ways: dict[str, Any] = {}
    for name, quantization in (("gathered", None), ("gathered, rounded to fp8", "fp8")):
        store = str(folder / f"ranks of {name}")
        arguments = (ranks, scenario.spec, device, store, torch.get_num_threads(), scenario.repeats)
        with ExitStack() as stack:
            connections = [
                stack.enter_context(
                    process(weight_ranks.hold_shards, rank, *arguments, scenario.gather_memory, quantization)
                )
                for rank in range(ranks)
            ]
            found = connections[0].recv()
        ways[name] = entry(found["seconds"], found["bytes"], extra_bytes=found["extra"]) | {
            "ranks": ranks,
            "held_bytes": found["held"],
            "promised_extra_bytes": scenario.gather_memory,
            "of_collective": found["gathered"] / statistics.median(found["seconds"]) / found["collective"],
        }
    return ways


def of_adapter(scenario: Scenario, device: str) -> dict[str, Any]:
    if importlib.util.find_spec("peft") is None:
        return {f"adapter, {way}": {"skipped": "peft is not installed"} for way in ("live", "merge and push")}
    from stoker.benchmarks import lora

    work = lora.SCENARIOS["cpu", True][0].workload
    one = lora.Scenario(spec=scenario.spec, workload=work, adapters=1, repeats=scenario.repeats)
    model = lora.build(one.spec, device, one.adapters)
    with RolloutEngine(model, config=replace(CONFIG, max_loras=1)) as engine:
        lora.check(engine, model, work.draw(scenario.spec.config.vocab_size, 0)[:1], 1)
        found = lora.updates(engine, model, one, device)
    return {f"adapter, {name}": entry(way["seconds"], way["bytes"]) for name, way in found.items()}
