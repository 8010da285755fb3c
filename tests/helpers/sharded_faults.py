"""What each rank does in the tests of sharded models that go wrong, and of what a gather moves and takes."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from families import make_model
from sharded import CONFIG, PARAMS, PROMPT, assert_matches, by_fsdp1, by_fsdp2, by_two_meshes, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from stoker.benchmarks.footprint import Peak, keep_nothing
from stoker.kernels.reference import checksum
from stoker.rollout import (
    EngineStateError,
    InvalidRequestError,
    RolloutEngine,
    UnsupportedModelError,
    WeightsMismatchError,
    WeightTransferError,
)
from stoker.weight_sync import dtensor_layout, gather, rank_agreement
from stoker.weight_sync.mirrored_source import MirroredSource
from stoker.weight_sync.source import source_for

GATE = "model.layers.0.mlp.gate_proj.weight"


def small() -> Any:
    return make_model("llama", num_hidden_layers=2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def lose_a_rank(rank: int, how: str) -> str | None:
    """The last rank dies before an update or inside of its gather, or stays away; what the others are told."""
    rank_agreement.GRACE_S = 1.5
    model = by_fsdp2(small())
    engine = RolloutEngine(model, config=replace(CONFIG, gather_memory="16KiB"))
    train(model, sgd(model), 1)
    dist.barrier()  # from here on all are as fast as each other
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    store = dist.distributed_c10d._get_default_store()
    if rank == dist.get_world_size() - 1:
        if how == "absent":
            store.wait(["told 0", "told 1"], timedelta(seconds=60))
            return None
        if how == "inside":
            collective, left = gather.all_gather, [2]

            def die_at_the_third(*arguments: Any, **fields: Any) -> Any:
                if not left[0]:
                    os._exit(1)
                left[0] -= 1
                return collective(*arguments, **fields)

            gather.all_gather = die_at_the_third
            engine.update_weights()
        os._exit(1)
    with pytest.raises(WeightTransferError) as caught:
        engine.update_weights()
    store.set(f"told {rank}", "1")
    assert engine.weight_version == 0
    if how == "inside":
        with pytest.raises(EngineStateError, match="incomplete since an update failed"):
            engine.generate_batch([PROMPT], PARAMS)
    else:
        assert set(assert_matches(engine, small())) == {0}, "the old weights stay in service"
    return str(caught.value)


def gathered_by_a_forward(rank: int) -> None:
    """FSDP2 that leaves a whole model behind where no backward follows: that is no model to run on, nor to lay out anew."""
    twin, model = small(), by_fsdp2(small(), reshard=False)
    optimizers = sgd(twin), sgd(model)

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=torch.tensor([PROMPT]))
        assert not any(isinstance(p, DTensor) for p in model.parameters())

    forward()
    with RolloutEngine(model, config=CONFIG) as engine:
        assert isinstance(engine._binding.source, MirroredSource)
        for step in range(1, 3):
            for one, optimizer in zip((twin, model), optimizers, strict=True):
                train(one, optimizer, step)
            assert engine.update_weights() == step
            forward()
            assert set(assert_matches(engine, twin)) == {step} and engine.verify_weights().ok
            forward()
            engine.sleep(level=2)
            engine.wake_up()
            assert set(assert_matches(engine, twin)) == {step}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        torch.testing.assert_close(whole, twin.get_parameter(name), rtol=0, atol=1e-5)


def alone_after_a_forward(rank: int) -> None:
    """One rank generates, or takes weights from elsewhere, while FSDP2 has a model gathered: it stays so on every rank."""
    twin, model = small(), by_fsdp2(small(), reshard=False)
    optimizers = sgd(twin), sgd(model)

    def gathered() -> None:
        with torch.no_grad():
            model(input_ids=torch.tensor([PROMPT]))
        assert not any(isinstance(p, DTensor) for p in model.parameters())

    with RolloutEngine(model, config=CONFIG) as engine:
        for step in range(1, 3):
            gathered()
            engine.sleep(level=step + 1)  # at the second step without its numbers
            engine.wake_up()
            if rank == 0:
                if step == 2:
                    engine.update_weights(twin.state_dict())
                assert_matches(engine, twin)
            assert not any(isinstance(p, DTensor) for p in model.parameters())
            for one, optimizer in zip((twin, model), optimizers, strict=True):
                train(one, optimizer, step)  # here that rank would gather alone, and wait for the others
            engine.update_weights()
            assert_matches(engine, twin)


def formed_anew(rank: int, folder: str) -> None:
    """A group made for a part of a mesh is made once, and goes, with its threads and sockets, after the world that it is of."""
    earlier = None
    for turn in range(2):
        if rank < 2:
            made = dtensor_layout._group_of((0, 1))
            assert dtensor_layout._group_of((0, 1)) is made and made.size() == 2
            gc.collect()
            assert earlier is None or earlier() is None
            earlier = weakref.ref(made)
            del made
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/{turn}", 3)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        dist.barrier()


def refuse_on_one(rank: int) -> str:
    """One rank's part holds NaN: all refuse, nothing moves, and the next update is taken."""
    twin, model = small(), by_fsdp2(small())
    with RolloutEngine(model, config=replace(CONFIG, check_finite_weights=True)) as engine:
        parameter = dict(model.named_parameters())[GATE]
        assert isinstance(parameter, DTensor)
        local = parameter.to_local().detach()
        kept = local[0, 0].clone()
        if rank == 1:
            local[0, 0] = float("nan")
        with pytest.raises(WeightsMismatchError) as caught:
            engine.update_weights()
        assert set(assert_matches(engine, twin)) == {0}
        local[0, 0] = kept
        train(twin, sgd(twin), 1)
        train(model, sgd(model), 1)
        assert engine.update_weights() == 1
        assert set(assert_matches(engine, twin)) == {1}
    return str(caught.value)


def changed_on_one(rank: int) -> list[str]:
    """One rank has other parts than the others, or cannot read its own: all refuse at once, and nobody waits or dies."""
    twin, model = small(), by_fsdp2(small())
    told = []
    with RolloutEngine(model, config=CONFIG) as engine:
        bias = model.model.layers[0].self_attn.q_proj
        kept = bias.bias
        if rank == 1:
            bias.bias = None
        for look in (engine.update_weights, engine.verify_weights):
            with pytest.raises((UnsupportedModelError, WeightsMismatchError)) as caught:
                look()
            told.append(str(caught.value))
        assert set(assert_matches(engine, twin)) == {0}
        bias.bias = kept
        assert engine.update_weights() == 1 and engine.verify_weights().ok
    cut_as_zero3(model := small(), twin)
    with RolloutEngine(model, config=CONFIG) as engine:
        parameter: Any = model.get_parameter(GATE)
        part = parameter.ds_tensor
        if rank == 1:
            parameter.ds_tensor = part[:1]  # of one in a file
        with pytest.raises((UnsupportedModelError, WeightsMismatchError)) as caught:
            engine.update_weights()
        told.append(str(caught.value))
        parameter.ds_tensor = part
        assert engine.update_weights() == 1
        assert set(assert_matches(engine, twin)) == {1}
    return told


def not_ready_on_one(rank: int) -> list[str]:
    """One rank is busy, asleep, has its adapter off in one layer, or is given a version that cannot be: all refuse at once, and
    nobody waits for it."""
    from sharded_adapters import adapted

    model = by_fsdp2(adapted("qwen3", {}))
    layer: Any = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    told = []
    with RolloutEngine(model, config=CONFIG) as engine:

        def refused(*calls: Any) -> None:
            for call in calls or (engine.update_weights, engine.verify_weights):
                with pytest.raises(
                    (EngineStateError, InvalidRequestError, UnsupportedModelError, WeightsMismatchError)
                ) as caught:
                    call()
                told.append(str(caught.value))

        handle = engine.submit(PROMPT, PARAMS) if rank == 1 else None
        refused()
        if handle is not None:
            assert len(handle.result().completions[0].token_ids) == PARAMS.max_tokens
            engine.sleep(level=2)
        refused()
        if rank == 1:
            engine.wake_up()
            layer.enable_adapters(False)
        refused(engine.update_weights)
        if rank == 1:
            layer.enable_adapters(True)
        for version in (0, 0.5, 2**63):
            refused(partial(engine.update_weights, version=version if rank == 1 else None))
        assert engine.update_weights() == 1 and engine.verify_weights().ok
    return told


def change_one(rank: int) -> tuple[tuple[str, ...], int, tuple[str, ...]]:
    """(what differs after one element on rank 1 changed, bytes its update moves, what differs with a scrambled mirror)."""
    model = by_fsdp2(small())
    with RolloutEngine(model, config=CONFIG) as engine:
        parameter = dict(model.named_parameters())[GATE]
        assert isinstance(parameter, DTensor)
        if rank == 1:
            parameter.to_local().detach()[0, 0] += 1
        for _ in range(rank):  # as many rollouts as each likes: none of them communicates
            engine.generate_batch([PROMPT], PARAMS)
        differs = engine.verify_weights().mismatched
        engine.update_weights()
        moved = engine.stats().last_update_bytes
        assert engine.verify_weights().ok
        source = engine._binding.source
        assert isinstance(source, MirroredSource) and source.mirror is not None
        if rank == 0:
            source.mirror.tensors[GATE].copy_(source.mirror.tensors[GATE].flip(0).clone())
        return differs, moved, engine.verify_weights().mismatched


def copies_that_differ(rank: int) -> None:
    """Tensors that only some groups of a mesh see changed do not bring the others' gathers out of step."""
    model = by_two_meshes(small())
    with RolloutEngine(
        model, config=CONFIG
    ) as engine:  # tensors before and after those of one mesh dimension share buckets
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            over_one_dimension = "layernorm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))
            if "layers" in name and (rank % 2 or not over_one_dimension):
                parameter.to_local().detach().add_(1)
        assert engine.update_weights() == 1
        assert engine.verify_weights().ok


def not_whole(rank: int) -> None:
    """A mesh in whose order torch gives two ranks one part and none another, and loses it: that is no model to run on."""
    model = by_two_meshes(small(), ranks=((3, 0), (1, 2)))
    with pytest.raises(
        UnsupportedModelError, match=r"not whole on the ranks \[\[3, 0\], \[1, 2\]\], which are out of order"
    ):
        RolloutEngine(model, config=CONFIG)


def cut_twice_by_fsdp1(rank: int) -> None:
    """FSDP1 over tensor parallelism: the local parts of tensors are not taken for whole ones."""
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), small()
    parallelize_module(model.model.layers[1].mlp, mesh["tp"], {"up_proj": ColwiseParallel()})
    with pytest.raises(
        UnsupportedModelError,
        match=r"^parameter model.layers.1.mlp.up_proj.weight is cut by tensor parallelism and then by FSDP1, .* use FSDP2",
    ):
        RolloutEngine(by_fsdp1(model, device_mesh=mesh["dp"]), config=CONFIG)


@contextmanager
def watched(rank: int) -> Iterator[list[int]]:
    """Bytes of what each gather fills."""
    collective, gathered = gather.all_gather, list[int]()

    def in_place(whole: torch.Tensor, share: torch.Tensor, **fields: Any) -> Any:
        gathered.append(whole.nbytes)
        assert share.data_ptr() == whole.data_ptr() + rank * share.nbytes, (
            "NCCL wants it there, or elsewhere altogether"
        )
        return collective(whole, share, **fields)

    with mock.patch.object(gather, "all_gather", in_place):
        yield gathered


def take_little(rank: int, memory_bytes: int) -> tuple[int, int, int]:
    """(what an update takes at the most besides the mirror, largest gather, bytes of the mirror).

    The first is all that the system sees, Gloo's own memory too.
    """
    keep_nothing()
    checksum._LOT_BYTES = 2**13
    model = nn.Sequential(*(nn.Linear(256, 1000) for _ in range(6)))
    model.experts = nn.Parameter(torch.randn(3, 800, 512))  # three rows for two ranks, of more than a bucket each
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    source = source_for(model, gather_bytes=memory_bytes)
    source.tensors()
    for value in (1.0, 2.0):  # at first some things are made that stay
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        peak = Peak("cpu")
        with watched(rank) as gathered:
            assert source.pull() == sum(p.numel() * 4 for p in model.parameters())
        took = peak.extra()
        assert all((t == value).all() for t in source.tensors().values())
    peak = Peak("cpu")
    torch.ones(2**22)
    assert peak.extra() > 2**23, "the system sees no peaks"
    return took, max(gathered), source.nbytes


def cut_as_zero3(model: nn.Module, twin: nn.Module) -> None:
    """Leave of the model's parameters this rank's part of the twin's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parameter: Any
    for whole, parameter in zip(twin.parameters(), model.parameters(), strict=True):
        flat = whole.detach().reshape(-1)
        length = -(-flat.numel() // ranks)
        padded = torch.cat([flat, flat.new_full((length * ranks - flat.numel(),), float("nan"))])
        parameter.data = parameter.data.new_empty(0)
        parameter.ds_tensor = padded[rank * length : (rank + 1) * length].clone()
        parameter.ds_shape, parameter.ds_numel = whole.shape, whole.numel()
        parameter.ds_process_group = dist.group.WORLD


def pieces_of_zero3(rank: int) -> None:
    """Parameters as ZeRO-3 leaves them: empty, with a flat part of each, padded, on every rank."""
    twin, model = small(), small()
    offloaded = small().to("meta")  # which stands for a device, with the parts in host memory
    cut_as_zero3(offloaded, twin)
    assert source_for(offloaded).device == torch.device("meta")
    cut_as_zero3(model, twin)
    optimizer = sgd(twin)
    with RolloutEngine(model, config=CONFIG) as engine:
        assert_matches(engine, twin)
        for step in (1, 2):
            train(twin, optimizer, step)
            cut_as_zero3(model, twin)
            assert engine.update_weights() == step
            assert set(assert_matches(engine, twin)) == {step}
            assert engine.verify_weights().ok


def offloaded(rank: int) -> None:
    """FSDP2 that keeps its shards in host memory; the mirror goes to sleep, with its numbers and without, and comes back."""
    twin, model = small(), small()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.raises(UnsupportedModelError, match=r"embed_tokens.weight holds no data here \(meta\)"):
        RolloutEngine(fully_shard(small().to("meta"), mesh=mesh), config=CONFIG)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizers = sgd(twin), sgd(model)
    with RolloutEngine(model, config=CONFIG) as engine:
        source = engine._binding.source
        assert isinstance(source, MirroredSource) and source.mirror is not None
        storage = next(iter(source.mirror.tensors.values())).untyped_storage()
        assert storage.nbytes() == engine.stats().mirror_bytes > 0
        for step, level in enumerate((1, 2, 3), start=1):
            before = copy.deepcopy(twin)
            engine.sleep(level)
            assert storage.nbytes() == (engine.stats().mirror_bytes if level == 1 else 0)
            for one, optimizer in zip((twin, model), optimizers, strict=True):
                train(one, optimizer, step)
            engine.wake_up()
            if dist.get_world_size() == 1:  # which sees by itself what changed
                assert set(assert_matches(engine, twin)) == {2 * step - 1}
            elif level < 3:  # before it is told, the engine has the numbers it had
                assert set(assert_matches(engine, before)) == {step - 1}
            else:
                with pytest.raises(EngineStateError, match="incomplete"):
                    engine.generate_batch([PROMPT], PARAMS)
            version = engine.update_weights()
            assert version == (2 * step if dist.get_world_size() == 1 else step)
            assert set(assert_matches(engine, twin)) == {version} and engine.verify_weights().ok
