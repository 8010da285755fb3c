"""What each rank does in tests of ranks that differ from each other. The processes import it by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rank_failures import told
from ranks import noted
from sharded import CONFIG, PROMPT, assert_matches, by_fsdp2, sgd, small, train
from sharded_adapters import GREEDY, adapted

from stoker.rollout import RolloutEngine


def other_adapters(rank: int) -> None:
    """Ranks that load adapters in another order, or of which one unloads some alone: no parts of two come together."""
    model, sources = (
        by_fsdp2(adapted("qwen3", {})),
        {n: by_fsdp2(adapted("qwen3", {}, seed=s)) for n, s in (("a", 7), ("b", 8))},
    )
    fails = rank == dist.get_world_size() - 1
    differ = "or other adapters, as after one of them alone loaded or unloaded one"

    def refused(call: Callable[[], Any]) -> None:
        told(rank, call, differ, differ)

    with RolloutEngine(model, config=CONFIG) as engine:

        def logprobs() -> list[list[float]]:
            return [
                engine.generate_batch([PROMPT], GREEDY, adapter=n)[0].completions[0].logprobs for n in engine.adapters
            ]

        for name in sorted(sources, reverse=fails):
            refused(lambda name=name: engine.load_adapter(name, sources[name]))  # type: ignore[misc]
        assert engine.adapters == ("default",)
        for name, source in sources.items():
            engine.load_adapter(name, source)
        before = logprobs()
        if fails:
            engine.unload_adapter("a")
        refused(engine.update_weights)
        refused(engine.verify_weights)
        if not fails:
            engine.unload_adapter("a")
        assert engine.update_weights() == 1 and engine.verify_weights().ok
        assert logprobs() == [before[0], before[2]]


def other_settings(rank: int) -> None:
    """Ranks whose engines would send other bytes, or as many at another time, build none."""
    model, fails = by_fsdp2(small()), rank == dist.get_world_size() - 1
    differ = "or other settings"
    for settings in ({"dtype": "bfloat16"}, {"gather_memory": "64KiB"}, {"quantization": "fp8"}):
        with noted(str(settings)):
            config = replace(CONFIG, **settings) if fails else CONFIG
            told(rank, lambda config=config: RolloutEngine(model, config=config), differ, differ)  # type: ignore[misc]
    with RolloutEngine(model, config=replace(CONFIG, dtype=torch.float32 if fails else "float32")) as engine:
        assert_matches(engine, small())


def other_engines(rank: int) -> None:
    """Ranks that update engines over models of the same shape in other orders, or of which one updates and another one verifies:
    no parts of two come together, and nobody waits for what no other rank does."""
    twins, models = [small(), small()], [by_fsdp2(small()), by_fsdp2(small())]
    whole, theirs = adapted("qwen3", {}), [by_fsdp2(adapted("qwen3", {}, seed=s)) for s in (7, 8)]
    fails = rank == dist.get_world_size() - 1
    differ = "call update_weights and verify_weights, of one engine or of several, in other orders"
    engines = [RolloutEngine(model, config=CONFIG) for model in models]
    of_base = [RolloutEngine(whole, config=CONFIG) for _ in theirs]
    for engine, source in zip(of_base, theirs, strict=True):
        engine.load_adapter("theirs", source)
    for one in (twins[1], models[1]):
        train(one, sgd(one), 1)
    for pair in (engines, of_base):
        for engine in reversed(pair) if fails else pair:
            told(rank, engine.verify_weights, differ, differ)
            told(rank, engine.update_weights, differ, differ)
        told(rank, pair[1].update_weights if fails else pair[1].verify_weights, differ, differ)
    for engine in (*engines, *of_base):
        assert engine.update_weights() == 1 and engine.verify_weights().ok
    for engine, twin in zip(engines, twins, strict=True):
        assert_matches(engine, twin)
    for engine in (*engines, *of_base):
        engine.close()
