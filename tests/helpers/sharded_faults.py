"""What each rank does in the tests of what fails or is refused with sharded models. The processes import it by name."""

from __future__ import annotations

import gc
import os
import weakref
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from sharded import (
    CONFIG,
    GATE,
    PARAMS,
    PROMPT,
    assert_matches,
    by_fsdp1,
    by_fsdp2,
    by_two_meshes,
    cut_as_zero3,
    sgd,
    small,
    train,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from stoker.rollout import (
    EngineStateError,
    InvalidRequestError,
    RolloutEngine,
    UnsupportedModelError,
    WeightsMismatchError,
    WeightTransferError,
)
from stoker.weight_sync import dtensor_layout, gather, rank_agreement


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
