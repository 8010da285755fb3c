"""What each rank does in the tests of sharded models. The processes import it by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import oracle
import torch
import torch.distributed as dist
from families import make_model
from family_fields import VOCAB
from ranks import noted
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel

from stoker.rollout import (
    EngineConfig,
    RolloutEngine,
    SamplingParams,
)

CONFIG = EngineConfig(kv_cache_memory="1MiB", block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
PROMPT = [7, 3, 99, 14, 5, 62, 8, 31, 4, 4, 90, 17]
PARAMS = SamplingParams(max_tokens=6, seed=1)
GATE = "model.layers.0.mlp.gate_proj.weight"


def small() -> Any:
    return make_model("llama", num_hidden_layers=2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def assert_matches(engine: RolloutEngine, model: PreTrainedModel) -> list[int]:
    (c,) = engine.generate_batch([PROMPT], PARAMS)[0].completions
    expected = oracle.logprobs(model, PROMPT, c.token_ids)
    torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)
    return c.weight_versions


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    ids = torch.randint(1, VOCAB, (2, 16), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()


def layers_of(model: Any) -> Any:
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's
    decoder = plain.get_decoder()
    return getattr(decoder, "model", decoder).layers  # Llama 4's has a head


# -- the ways to shard -------------------------------------------------------------------------------------------


def by_fsdp2(model: Any, *, reshard: bool = True) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def by_fsdp2_on_any_dimension(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(1 if parameter.ndim > 1 and parameter.shape[1] % dist.get_world_size() == 0 else 0)

    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, shard_placement_fn=placement)
    return fully_shard(model, mesh=mesh, shard_placement_fn=placement)


def by_fsdp2_of_copies(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_two_meshes(model: Any, ranks: Sequence[Sequence[int]] = ((0, 1), (2, 3))) -> nn.Module:
    """Tensor parallelism inside of FSDP2: q, k, v, gate, up split by rows twice, o and down by columns and rows."""
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
    columns, rows = ColwiseParallel, RowwiseParallel
    for layer in layers_of(model):
        plan = {f"self_attn.{n}_proj": columns() for n in "qkv"} | {"self_attn.o_proj": rows()}
        plan |= {"mlp.gate_proj": columns(), "mlp.up_proj": columns(), "mlp.down_proj": rows()}
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def by_fsdp1(model: Any, **fields: Any) -> nn.Module:
    policy = ModuleWrapPolicy({type(layers_of(model)[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **fields)


def by_checkpointing_fsdp1(model: Any) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    kind = type(layers_of(model)[0])
    wrapped = by_fsdp1(model, use_orig_params=True)
    apply_activation_checkpointing(wrapped, check_fn=lambda m: isinstance(m, kind))
    return wrapped


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


def by_ddp(model: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def by_composable_ddp(model: Any) -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(model)


WRAPPERS: dict[int, dict[str, Any]] = {
    2: {
        "fsdp2": by_fsdp2,
        "fsdp2 with images": by_fsdp2,
        "fsdp1": by_fsdp1,
        "fsdp1 of tied weights": by_fsdp1,
        "fsdp1 of tied original parameters": partial(by_fsdp1, use_orig_params=True),
        "fsdp1 with checkpointing": by_checkpointing_fsdp1,
        "fsdp1 not sharded": partial(by_fsdp1, sharding_strategy=ShardingStrategy.NO_SHARD),
        "ddp": by_ddp,
        "ddp, composable": by_composable_ddp,
    },
    3: {
        "fsdp2, uneven, not resharded": partial(by_fsdp2, reshard=False),
        "fsdp1 of original parameters": partial(by_fsdp1, use_orig_params=True),
    },
    4: {
        "fsdp2 on any dimension": by_fsdp2_on_any_dimension,
        "fsdp2 of copies": by_fsdp2_of_copies,
        "fsdp2 of tensor parallel": by_two_meshes,
        "fsdp2 of tensor parallel, ranks out of order": partial(by_two_meshes, ranks=((2, 3), (0, 1))),
    },
}


def follow_all(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Every way to shard over so many ranks, one after another."""
    found = {}
    for name, wrap in WRAPPERS[world_size].items():
        family = "llama" if "tensor" in name or "1" in name else "mistral+images" if "images" in name else "qwen3"
        with noted(name):
            found[name] = follow_training(rank, wrap, family, 2**16)
    return found


def follow_training(rank: int, wrap: Any, family: str, gather_memory: int) -> dict[str, Any]:
    """After every optimizer step the engine is the full model, which a twin without any wrapper is trained to be."""
    twin = make_model(family, num_hidden_layers=2)
    model = wrap(make_model(family, num_hidden_layers=2))
    theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin, model))
    sharded = wrap not in (by_ddp, by_composable_ddp)
    with RolloutEngine(model, config=replace(CONFIG, gather_memory=gather_memory)) as engine:
        assert set(assert_matches(engine, twin)) == {0}
        plain = engine._binding.shell.module
        assert type(plain) is type(twin)
        for step in range(1, 3):
            train(twin, theirs, step)
            train(model, ours, step)
            if sharded:
                assert not engine.verify_weights().ok, "the engine lags behind until it is told"
            assert engine.update_weights() == step
            assert set(assert_matches(engine, twin)) == {step}
            report = engine.verify_weights()
            assert report.ok and report.version == step, report
            names = {n for n, _ in (*twin.named_parameters(), *twin.named_buffers())}
            assert report.checked == len(names)
        stats = engine.stats()
        assert stats.fused_layers == stats.num_layers
        moved = stats.last_update_bytes
        assert engine.update_weights() == 3 and engine.stats().last_update_bytes == 0
    train(twin, theirs, 9)
    train(model, ours, 9)
    return {"moved": moved, "mirror": stats.mirror_bytes, "weights": sum(p.nbytes for p in twin.parameters())}


def packed(rank: int) -> None:
    """Gate and up of experts in one, as transformers' tensor parallelism splits them: each rank has its part of both."""
    twin, model = (make_model("qwen3_moe", num_hidden_layers=2) for _ in range(2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {"gate_up_proj": _StridedShard(1, split_factor=2), "down_proj": Shard(2)}
    for experts in [m for n, m in model.named_modules() if n.endswith("experts")]:
        for name, placement in placements.items():
            whole = getattr(experts, name).detach()
            setattr(experts, name, nn.Parameter(distribute_tensor(whole, mesh, [placement])))
    with RolloutEngine(model, config=replace(CONFIG, gather_memory="64KiB")) as engine:
        for step in range(2):
            assert set(assert_matches(engine, twin)) == {step} and engine.verify_weights().ok
            with torch.no_grad():
                for parameter in model.parameters():
                    if isinstance(parameter, DTensor):
                        local = parameter.to_local()
                        local.add_(0.1 * torch.randn(local.shape, generator=torch.Generator().manual_seed(rank)))
            twin.load_state_dict({n: _of_parts(n, t) for n, t in model.state_dict().items()})
            assert engine.verify_weights().mismatched
            engine.update_weights()


def _of_parts(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The whole of one of ``packed``, which torch 2.11 does not put together."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    if name.endswith("down_proj"):
        return torch.cat(parts, 2)
    return torch.cat([half for halves in zip(*(part.chunk(2, 1) for part in parts), strict=True) for half in halves], 1)
