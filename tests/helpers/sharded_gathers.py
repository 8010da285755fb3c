"""What each rank does in the tests of what a gather moves, takes and leaves behind. The processes import it by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from sharded import (
    CONFIG,
    GATE,
    PARAMS,
    PROMPT,
    assert_matches,
    by_fsdp1,
    by_fsdp2,
    by_fsdp2_on_any_dimension,
    cut_as_zero3,
    sgd,
    small,
    train,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef

from stoker.benchmarks.footprint import Peak, keep_nothing
from stoker.kernels.reference import checksum
from stoker.rollout import EngineStateError, RolloutEngine, UnsupportedModelError
from stoker.weight_sync import change_detection, gather, shards
from stoker.weight_sync.mirrored_source import MirroredSource
from stoker.weight_sync.source import source_for


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
            # Where a backward leaves it gathered, the step is taken in the shards, and what was gathered is out of date.
            model.set_reshard_after_backward(step == 1)  # type: ignore[operator]
            for one, optimizer in zip((twin, model), optimizers, strict=True):
                train(one, optimizer, step)
            assert any(isinstance(p, DTensor) for p in model.parameters()) == (step == 1)
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
        assert engine.update_weights() == 2 and engine.stats().last_update_bytes == 0, "no other rank takes it for new"
        source = engine._binding.source
        assert isinstance(source, MirroredSource) and source.mirror is not None
        if rank == 0:
            source.mirror.tensors[GATE].copy_(source.mirror.tensors[GATE].flip(0).clone())
        return differs, moved, engine.verify_weights().mismatched


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
    for value in (1.0, 2.0, 3.0):  # at first some things are made that stay
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


WAYS = {"fsdp2": by_fsdp2, "fsdp2 on any dimension": by_fsdp2_on_any_dimension, "fsdp1": by_fsdp1}


def parts_that_move(rank: int, way: str) -> None:
    """Updates after steps read a model's layout, and plan its gather, once. Of parts that the trainer moves nothing is kept."""
    twin, model = small(), WAYS[way](small())
    with RolloutEngine(model, config=replace(CONFIG, check_finite_weights="any" in way)) as engine:
        for step in range(1, 6):
            for one in (twin, model):
                train(one, sgd(one), step)
            with ExitStack() as stack:
                if step in (2, 5) and "fsdp2" in way:
                    stack.enter_context(mock.patch.object(shards, "read", None))
                    stack.enter_context(mock.patch.object(gather.Gatherer, "_plan", None))
                    stack.enter_context(mock.patch.object(engine._binding, "_has_moved", None))
                assert engine.update_weights() == step
            assert set(assert_matches(engine, twin)) == {step} and engine.verify_weights().ok
            if step == 3:
                memory = [StorageWeakRef(parts.untyped_storage()) for parts in parts_of(model)]
                move_parts(model)
                assert all(one.expired() for one in memory)


def placed_otherwise(rank: int) -> None:
    """The same parts at the same addresses, which are of other rows now."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(6, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(torch.arange(24.0).view(4, 6), mesh, [Shard(0)]))
    source = source_for(model)
    (whole,) = source.tensors().values()
    for placement, rows in ((Shard(0), [0, 1, 2, 3]), (_StridedShard(0, split_factor=2), [0, 2, 1, 3])):
        part, shape, stride = model.weight._local_tensor, torch.Size([4, 6]), (6, 1)
        other = DTensor.from_local(part, mesh, [placement], run_check=False, shape=shape, stride=stride)
        torch.utils.swap_tensors(model.weight, nn.Parameter(other))
        assert model.weight._local_tensor.data_ptr() == part.data_ptr()
        part.mul_(2)
        source.pull()
        assert (whole[:, 0] / whole[-1, 0] * 3).tolist() == rows


def alone_between_passes(rank: int) -> None:
    """What a forward leaves in parts for a backward is the trainer's, though a rollout may come between."""
    mesh, model = init_device_mesh("cpu", (4,)), small()
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=2)
    with RolloutEngine(model, config=CONFIG) as engine:
        for step in (1, 2):
            train(model, sgd(model), step)
            engine.update_weights()
        with torch.no_grad():
            model(input_ids=torch.tensor([PROMPT]))
        engine.generate_batch([PROMPT], PARAMS)
        halves = [p._local_tensor for p in model.model.layers.parameters()]
        assert any(
            half.numel() * 2 == p.numel() for half, p in zip(halves, small().model.layers.parameters(), strict=True)
        )
        memory = [StorageWeakRef(half.untyped_storage()) for half in halves]
        del halves
        train(model, sgd(model), 3)
        assert all(one.expired() for one in memory)


def parts_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]


def move_parts(model: nn.Module) -> None:
    model._apply(torch.clone)  # as ``to`` does
    for unit in filter(shards.is_unit, model.modules()):
        flat: Any = unit._handle.flat_param
        flat.data = flat._local_shard = flat.data.clone()


def parts_of_columns(rank: int) -> None:
    """Parts by rows become parts by columns, and keep their numbers, in their order: the whole is another one."""
    twin, model, mesh = small(), small(), init_device_mesh("cpu", (2,))
    projection = model.get_submodule(GATE.removesuffix(".weight"))
    halves = projection.weight.detach().clone().chunk(2)
    projection.weight = nn.Parameter(distribute_tensor(torch.cat(halves), mesh, [Shard(0)]))
    with RolloutEngine(model, config=CONFIG) as engine:
        assert engine.update_weights() == 1 and engine.verify_weights().ok
        columns = [half.reshape(2 * half.shape[0], -1) for half in halves]
        projection.weight = nn.Parameter(DTensor.from_local(columns[rank], mesh, [Shard(1)]))
        assert engine.update_weights() == 2 and engine.verify_weights().ok
        twin.get_parameter(GATE).data.copy_(torch.cat(columns, 1))
        assert set(assert_matches(engine, twin)) == {2}


def looked_at_meanwhile(rank: int) -> None:
    """Parts that changed the last time, and at a glance did again, are looked at while they are gathered; others before that."""
    change_detection._GLANCE = 4
    twin, model = small(), by_fsdp2(small())
    optimizers = sgd(twin), sgd(model)
    held, whole = (sum(t.nbytes for t in tensors) for tensors in (parts_of(model), twin.parameters()))
    prepare, collective = change_detection.prepare, gather.all_gather
    looked, sent = {"before": 0, "meanwhile": 0}, list[int]()

    def looking(tensors: list[torch.Tensor], *arguments: Any) -> Any:
        looked["meanwhile" if sent else "before"] += sum(t.nbytes for t in tensors)
        return prepare(tensors, *arguments)

    def sending(*arguments: Any, **fields: Any) -> Any:
        sent.append(rank)
        return collective(*arguments, **fields)

    def update() -> tuple[bool, bool, int]:
        """(whether most was looked at before the gather, and within it, bytes that were moved)."""
        looked.update(before=0, meanwhile=0)
        sent.clear()
        engine.update_weights()
        return looked["before"] > held / 2, looked["meanwhile"] > held / 2, engine.stats().last_update_bytes

    def number_of(parameter: Any, place: int) -> torch.Tensor:
        return parameter.to_local().detach().view(-1)[place]

    with (
        RolloutEngine(model, config=replace(CONFIG, gather_memory=2**16)) as engine,
        mock.patch.object(change_detection, "prepare", looking),
        mock.patch.object(gather, "all_gather", sending),
    ):
        for step in range(1, 5):
            for one, optimizer in zip((twin, model), optimizers, strict=True):
                train(one, optimizer, step)
            assert update() == (step == 1, step > 1, whole)  # the first token's embedding is as it was, at a glance
            assert sum(looked.values()) >= held
            assert set(assert_matches(engine, twin)) == {step} and engine.verify_weights().ok
        gate, norm = model.get_parameter(GATE), model.get_parameter("model.norm.weight")
        if rank == 1:  # where no glance falls
            number_of(gate, -1).add_(1)
        number_of(norm, 0).add_(1)
        assert update() == (True, False, 4 * (gate.numel() + norm.numel())) and engine.verify_weights().ok
        assert update() == (True, False, 0)
        number_of(norm, 0).add_(1)
        for _ in range(2):
            assert update()[2] == 4 * norm.numel() and engine.verify_weights().ok
            number_of(norm, 0).add_(1)
        assert engine.verify_weights().mismatched == ("model.norm.weight",)
