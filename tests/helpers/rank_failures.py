"""What each rank does in tests of a rank that fails alone. The processes import it by name."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import accelerated
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from ranks import noted
from sharded import CONFIG, PARAMS, PROMPT, assert_matches, by_fsdp2, by_two_meshes, sgd, small, train
from sharded_adapters import GREEDY, adapted
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from trl_setup import build

from stoker.rollout import (
    EngineStateError,
    RolloutEngine,
    UnsupportedModelError,
    WeightsMovedError,
    WeightTransferError,
    adapter_sources,
    shell_builder,
    updates,
)
from stoker.weight_sync import change_detection, gather, mirror, mirror_comparison, mirrored_source
from stoker.weight_sync.aliased_source import AliasedSource
from stoker.weight_sync.mirror import Mirror
from stoker.weight_sync.shards import Reader


def told(
    rank: int, call: Callable[[], Any], own: str, others: str = "another rank refused; its error says why"
) -> None:
    """The last rank raises an error of its own, and the others at once one that says so."""
    with pytest.raises(Exception, match=own if rank == dist.get_world_size() - 1 else others):
        call()


def out_of_memory(works: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """What works so many times."""
    left = [calls]

    def call(*arguments: Any, **fields: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("none left")
        return works(*arguments, **fields)

    return call


def adapters(rank: int) -> None:
    """What the last rank refuses of a sharded model's adapter no rank loads, and none waits for it."""
    model, theirs = by_fsdp2(adapted("qwen3", {})), by_fsdp2(adapted("qwen3", {}, seed=7))
    wide = by_fsdp2(adapted("qwen3", {"r": 8}))
    fails = rank == dist.get_world_size() - 1
    with RolloutEngine(model, config=replace(CONFIG, max_lora_rank=4, check_finite_weights=True)) as engine:

        def refused(own: str, name: str = "theirs", source: Any = theirs) -> None:
            with noted(own):
                told(rank, lambda: engine.load_adapter(name, source), own)
                assert engine.adapters == ("default",)

        refused("name='': give a name", "" if fails else "theirs")
        refused("'default' is on the live model already", "default" if fails else "theirs")
        refused("no 'nobody'", source=(theirs, "nobody") if fails else theirs)
        refused("rank 8", source=wide if fails else theirs)
        if fails:
            engine.sleep(level=2)
        refused("the weights are asleep")
        engine.wake_up()
        part = next(p for n, p in theirs.named_parameters() if "lora_A" in n).to_local().detach()
        kept = part.clone()
        if fails:
            part.fill_(torch.nan)
        refused("holds NaN or Inf")
        part.copy_(kept)
        engine.load_adapter("theirs", theirs)
        engine.load_adapter("again", theirs)
        handle = engine.submit(PROMPT, GREEDY, adapter="theirs") if fails else None
        told(rank, lambda: engine.load_adapter("theirs", theirs), "cannot be replaced while 1 requests use it")
        if handle is not None:
            handle.result()
        engine.load_adapter("theirs", theirs)
        assert engine.update_weights() == 1 and engine.verify_weights().ok


def building(rank: int, sharding: str) -> None:
    """Whatever ends the building of an engine on one rank ends it on all, and the next attempt is none the worse for it."""
    shard = {"fsdp2": by_fsdp2, "two meshes": by_two_meshes}[sharding]
    model, fails = shard(small()), rank == dist.get_world_size() - 1

    def refused(own: str, owner: Any = None, name: str = "", **settings: Any) -> None:
        with noted(f"{own} {name}"), pytest.MonkeyPatch.context() as patch:
            if fails and owner is not None:
                patch.setattr(owner, name, out_of_memory(getattr(owner, name), 0))
            config = replace(CONFIG, **settings) if fails else CONFIG
            told(rank, lambda: RolloutEngine(model, config=config), own)

    refused("none left", Reader, "read")
    refused("none left", mirrored_source, "Mirror")
    refused("none left", gather, "buffers_for")
    refused("holds no block", kv_cache_memory=1)
    refused("is beyond the model's", max_model_len=2**20)
    refused("none left", shell_builder, "fuse_layers")
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_matches(engine, small())


def lack_of_memory(rank: int, sharding: str) -> None:
    """A rank that has no memory to look, or for a gather, refuses, and all keep what they had, and their version. One that has none
    for placing what came takes part to the end, and no rank generates before the next update."""
    shard = {"fsdp2": by_fsdp2, "two meshes": by_two_meshes}[sharding]
    twin, model, fails = small(), shard(small()), rank == dist.get_world_size() - 1
    optimizers = sgd(twin), sgd(model)
    with RolloutEngine(model, config=replace(CONFIG, gather_memory="64KiB")) as engine:
        for step, (owner, name, calls) in enumerate(
            [
                (Reader, "read", 0),
                (mirrored_source, "Look", 0),
                (gather, "buffers_for", 0),
                (change_detection.Later, "go_on", 3),
                (change_detection.Later, "seen", 0),
                (gather._Part, "pack", 3),
                (gather._Part, "place", 3),
                (mirror, "copy_each", 0),
            ]
        ):
            for one, optimizer in zip((twin, model), optimizers, strict=True):
                train(one, optimizer, step)
            with noted(name), pytest.MonkeyPatch.context() as patch:
                if fails:
                    patch.setattr(owner, name, out_of_memory(getattr(owner, name), calls))
                if name in ("read", "Look", "buffers_for"):
                    asking = "no memory to gather weights in: " if name == "buffers_for" else "^"
                    told(rank, engine.update_weights, f"{asking}none left")
                    engine.generate_batch([PROMPT], PARAMS)
                else:
                    half_way = "The weights are now in parts old and new"
                    own = f"OutOfMemoryError: none left. {half_way}"
                    told(rank, engine.update_weights, own, f"another rank failed half-way; .*{half_way}")
                    with pytest.raises(EngineStateError, match="incomplete since an update failed"):
                        engine.generate_batch([PROMPT], PARAMS)
                assert engine.weight_version == step
            assert engine.update_weights() == step + 1
            assert set(assert_matches(engine, twin)) == {step + 1}


def verifying(rank: int) -> None:
    """A rank that fails in a comparison before or after the ranks have told each other what they hold."""
    model, fails = by_fsdp2(small()), rank == dist.get_world_size() - 1
    with RolloutEngine(model, config=CONFIG) as engine:
        # The first two checksums are of tensors that are whole, here and there.
        for owner, name, calls in ((mirror_comparison, "checksums", 2), (mirror_comparison.Comparison, "differing", 0)):
            with noted(name), pytest.MonkeyPatch.context() as patch:
                if fails:
                    patch.setattr(owner, name, out_of_memory(getattr(owner, name), calls))
                told(rank, engine.verify_weights, "^none left")
            assert engine.verify_weights().ok


def settings(rank: int, passing: bool) -> None:
    """A setting that one rank alone has changed. It needs no other rank, but where weights pass through and are not kept."""
    model, fails = by_fsdp2(small()), rank == dist.get_world_size() - 1
    with RolloutEngine(model, config=replace(CONFIG, quantization="fp8") if passing else CONFIG) as engine:

        def logprobs() -> list[float]:
            return engine.generate_batch([PROMPT], PARAMS)[0].completions[0].logprobs

        def change(factor: float) -> None:
            for layer in model.model.layers if fails else ():
                layer.self_attn.scaling *= factor

        before = logprobs()
        change(2)
        if passing:
            if fails:
                with pytest.raises(WeightsMovedError, match=r"call update_weights\(\) on every rank once"):
                    logprobs()
                with pytest.raises(WeightsMovedError, match=r"call update_weights\(\) on every rank once"):
                    engine.update_weights(dict(small().named_parameters()))
            told(rank, engine.update_weights, "change it on all of them", "change it on all of them")
        else:
            assert (max(abs(a - b) for a, b in zip(logprobs(), before, strict=True)) > 1e-3) == fails
            engine.update_weights(version=5)
            assert (logprobs() != before) == fails and engine.verify_weights().ok
        change(0.5)
        engine.update_weights(version=10)
        assert engine.verify_weights().ok and logprobs() == before
        if fails:
            model.config.num_key_value_heads *= 2
        told(rank, engine.update_weights, "other shape|another shape|does not run")
        if fails:
            model.config.num_key_value_heads //= 2
        assert engine.update_weights() == 11 and engine.verify_weights().ok


def fusing(rank: int, passing: bool) -> None:
    """A rank that fails in laying out a moved model's layers, while the others gather what passes through, or are done."""
    twin, fails = small(), rank == dist.get_world_size() - 1
    model = by_fsdp2(small()) if passing else small()
    with RolloutEngine(model, config=replace(CONFIG, quantization="fp8") if passing else CONFIG) as engine:
        if passing:
            for layer in model.model.layers:
                layer.self_attn.scaling *= 2
        else:
            by_fsdp2(model)
        with pytest.MonkeyPatch.context() as patch:
            if fails:
                patch.setattr(shell_builder, "fuse_layers", out_of_memory(shell_builder.fuse_layers, 0))
            told(rank, engine.update_weights, "none left")
        with pytest.raises(WeightsMovedError, match=r"call update_weights\(\) on every rank once"):
            engine.generate_batch([PROMPT], PARAMS)
        assert engine.update_weights() == 1 and engine.verify_weights().ok
        if not passing:
            assert_matches(engine, twin)


def without_processes(rank: int, folder: str) -> None:
    """Rollouts go on when the group of processes is no more, and nothing is gathered over one of others in its place."""
    model, twin = by_fsdp2(small()), small()
    with RolloutEngine(model, config=CONFIG) as engine:
        for step in (1, 2, 3):
            train(model, sgd(model), step)
            if step < 3:
                train(twin, sgd(twin), step)
                engine.update_weights()
        dist.destroy_process_group()
        assert set(assert_matches(engine, twin)) == {2}
        engine.sleep(level=2)
        engine.wake_up()
        assert set(assert_matches(engine, twin)) == {2}
        for call in (engine.update_weights, engine.verify_weights, lambda: RolloutEngine(model, config=CONFIG)):
            with pytest.raises(EngineStateError, match="the group of processes that would gather them is no more"):
                call()
        assert set(assert_matches(engine, twin)) == {2}
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{rank}", 1), rank=0, world_size=1)
        for call in (engine.update_weights, lambda: RolloutEngine(model, config=CONFIG)):
            with pytest.raises(
                UnsupportedModelError, match=r"over the ranks \[0, 1\], and the group of processes was made"
            ):
                call()


def lost_in_a_part(rank: int) -> str | None:
    """The last two of three ranks hold a model; the last one stays away, and torch names it by its place among them."""
    group = dist.new_group([1, 2], timeout=timedelta(seconds=2))
    if rank == 0:
        return None
    model = small()
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    store = dist.distributed_c10d._get_default_store()
    with RolloutEngine(model, config=CONFIG) as engine:
        if rank == 2:
            store.wait(["told"], timedelta(seconds=60))
            return None
        with pytest.raises(WeightTransferError) as caught:
            engine.update_weights()
        store.set("told", "1")
    return str(caught.value)


def waking(rank: int, folder: str) -> None:
    """A rank that has no memory to wake its weights in, where a trainer's update is about to be taken."""
    from stoker.integrations.accelerate import AcceleratedEngine
    from stoker.integrations.trl import attach, detach

    accelerated.launched()
    fails = rank == dist.get_world_size() - 1
    trainer = build("grpo", folder, model=by_fsdp2(accelerated.make_model()), ddp_backend="gloo")
    with AcceleratedEngine(trainer.accelerator, trainer.model, sleep=True) as engine:
        engine._changed = True  # as by an optimizer's step
        attached = attach(trainer)
        attached.sleep(level=2)
        for take in (lambda: engine.generate_batch([[3, 4, 5]]), trainer.vllm_generation.sync_weights):
            with pytest.MonkeyPatch.context() as patch:
                if fails:
                    patch.setattr(Mirror, "restore", out_of_memory(Mirror.restore, 0))
                told(rank, take, "no memory for the weights")
            take()
        detach(trainer)
        assert (engine.engine.weight_version, attached.weight_version) == (1, 1)


def interrupts(rank: int) -> None:
    """Ctrl-C on one rank waits until it has done its part in what all do together, so that the next such call finds all in step."""
    from stoker.integrations.accelerate import AcceleratedEngine

    accelerated.launched()
    model, theirs = by_fsdp2(adapted("qwen3", {})), by_fsdp2(adapted("qwen3", {}, seed=7))
    fails = rank == dist.get_world_size() - 1

    def interrupted(owner: Any, name: str, call: Callable[[], Any]) -> None:
        real, left = getattr(owner, name), [fails]

        def interrupt(*arguments: Any, **fields: Any) -> Any:
            if left.pop() if left else False:
                signal.raise_signal(signal.SIGINT)
            return real(*arguments, **fields)

        with noted(name), pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, interrupt)
            if fails:
                with pytest.raises(KeyboardInterrupt):
                    call()
            else:
                call()
        dist.barrier()

    interrupted(Reader, "read", lambda: RolloutEngine(model, config=CONFIG).close())
    interrupted(shell_builder, "fuse_layers", lambda: RolloutEngine(model, config=CONFIG).close())
    with RolloutEngine(model, config=CONFIG) as engine:
        interrupted(updates.WeightUpdates, "_read_version", engine.update_weights)
        assert engine.weight_version == 1
        interrupted(mirror_comparison, "checksums", engine.verify_weights)
        interrupted(adapter_sources, "read_adapter", lambda: engine.load_adapter("theirs", theirs))
        assert engine.adapters == ("default", "theirs") and engine.verify_weights().ok
        assert engine.update_weights() == 2
    with AcceleratedEngine(Accelerator(cpu=True), model, config=CONFIG) as rollouts:
        rollouts._changed = True  # as by an optimizer's step
        interrupted(Reader, "read", lambda: rollouts.generate_batch([PROMPT]))
        for _ in range(1 + rank):  # a collective in one of them would never end
            rollouts.generate_batch([PROMPT])
        assert rollouts.engine.weight_version == 1


def a_whole_base(rank: int) -> None:
    """A base that is whole on each rank and cannot be taken on one, while the others go on to another model's adapter."""
    model, theirs = adapted("qwen3", {}), by_fsdp2(adapted("qwen3", {}, seed=7))
    weight = model.get_parameter("base_model.model.model.norm.weight").detach()
    fails = rank == dist.get_world_size() - 1
    with RolloutEngine(model, config=replace(CONFIG, check_finite_weights=True)) as engine:
        assert isinstance(engine._binding.source, AliasedSource)
        engine.load_adapter("theirs", theirs)
        kept = weight.clone()
        if fails:
            weight.fill_(torch.nan)
        told(rank, engine.update_weights, "norm.weight holds NaN")
        weight.copy_(kept)
        assert engine.update_weights() == 1
        with pytest.MonkeyPatch.context() as patch:
            if fails:
                patch.setattr(AliasedSource, "mismatches", out_of_memory(AliasedSource.mismatches, 0))
            told(rank, engine.verify_weights, "none left")
        assert engine.verify_weights().ok


def after_an_adapter_came(rank: int) -> None:
    """A rank that has no memory to take what all have gathered: none has that adapter, or all the one before of its name."""
    model, theirs = by_fsdp2(adapted("qwen3", {})), by_fsdp2(adapted("qwen3", {}, seed=7))
    other = by_fsdp2(adapted("qwen3", {}, seed=8))
    fails = rank == dist.get_world_size() - 1
    with RolloutEngine(model, config=CONFIG) as engine:

        def logprobs() -> list[float]:
            return engine.generate_batch([PROMPT], GREEDY, adapter="theirs")[0].completions[0].logprobs

        engine.load_adapter("theirs", theirs)
        before = logprobs()
        for name in ("theirs", "other"):
            with pytest.MonkeyPatch.context() as patch:
                if fails:
                    look = adapter_sources.AdapterSources.look
                    patch.setattr(adapter_sources.AdapterSources, "look", out_of_memory(look, 1))
                told(rank, lambda name=name: engine.load_adapter(name, other), "none left")  # type: ignore[misc]
            assert engine.adapters == ("default", "theirs") and logprobs() == pytest.approx(before, abs=1e-4)
        assert engine.update_weights() == 1 and engine.verify_weights().ok
        for name in ("theirs", "other"):
            engine.load_adapter(name, other)
        assert logprobs() != pytest.approx(before, abs=1e-2) and engine.verify_weights().ok


def an_adapter_over_fewer_ranks(rank: int) -> None:
    """One whose parts are over one dimension of a mesh, of a model that is over both: who shares none with the rank that fails
    hears of it as well."""
    target = {"target_modules": ["embed_tokens"]}
    model, theirs = (by_two_meshes(adapted("llama", target, seed=seed)) for seed in (1, 7))
    fails = rank == dist.get_world_size() - 1
    with RolloutEngine(model, config=CONFIG) as engine:
        for owner, name in ((Reader, "read"), (mirrored_source, "Look"), (gather._Part, "place")):
            with noted(name), pytest.MonkeyPatch.context() as patch:
                if fails:
                    patch.setattr(owner, name, out_of_memory(getattr(owner, name), 0))
                others = "another rank (refused|failed half-way)"
                told(rank, lambda: engine.load_adapter("theirs", theirs), "none left", others)
            assert engine.adapters == ("default",)
        engine.load_adapter("theirs", theirs)
        assert engine.update_weights() == 1 and engine.verify_weights().ok
