"""The other processes of ``benchmarks.weights``: trainers that send, and ranks that hold shards."""

from __future__ import annotations

import gc
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from stoker.benchmarks import ceilings
from stoker.benchmarks.footprint import Peak, keep_nothing
from stoker.benchmarks.gate import GateError
from stoker.benchmarks.workloads import ModelSpec
from stoker.kernels.collectives import all_gather
from stoker.rollout import EngineConfig, RolloutEngine
from stoker.weight_sync import gather
from stoker.weight_sync.checksum import checksums
from stoker.weight_sync.transport import BroadcastTransfer, SharedMemoryTransfer, send_weights

CONFIG = EngineConfig(kv_cache_memory="64MiB", max_num_seqs=4, max_model_len=64)
WAIT_S = 120.0


@torch.no_grad()
def train(model: nn.Module) -> None:
    """Stands in for an optimizer step: every number of the model becomes another one, in place."""
    torch._foreach_neg_([p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()])


def first_layer(model: nn.Module) -> list[torch.Tensor]:
    return [p for name, p in model.named_parameters() if ".layers.0." in name]


def sums(model: nn.Module) -> list[int]:
    """What tells whether two models have the same weights."""
    return checksums(model.parameters())


def join(store: str, rank: int, ranks: int, backend: str) -> None:
    """Be one of so many ranks, which meet at a file."""
    waits = timedelta(seconds=WAIT_S)
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=ranks, timeout=waits)


def send(
    spec: ModelSpec,
    device: str,
    dtype: torch.dtype,
    store: str,
    threads: int,
    updates: int,
    few: bool,
    connection: Connection,
) -> None:
    """A trainer: tells its checksums, then sends; through the connection, or by broadcast where there is a store.

    few: it trains one layer.
    """
    torch.set_num_threads(threads)
    model = spec.build(device, dtype)
    tensors = dict(model.named_parameters())
    transfer: Any = SharedMemoryTransfer(connection, timeout=WAIT_S)
    if store:
        join(store, 0, 2, "gloo")
        transfer = BroadcastTransfer(0)
    for _ in range(updates):
        if few:
            torch._foreach_neg_(first_layer(model))
        else:
            train(model)
        connection.send(sums(model))
        send_weights(tensors, transfer)
    connection.recv()  # CUDA memory that the other process has open has to outlive its use there
    if store:
        dist.destroy_process_group()


def hold_shards(
    rank: int,
    ranks: int,
    spec: ModelSpec,
    device: str,
    store: str,
    threads: int,
    repeats: int,
    gather_memory: int,
    quantization: Any,
    connection: Connection,
) -> None:
    """FSDP2 ranks of fp32 masters with an engine in the rollout's dtype on each; the first one tells what it measured."""
    torch.set_num_threads(threads)
    keep_nothing()
    if device == "cuda":
        torch.cuda.set_device(0)
    join(store, rank, ranks, "nccl" if device == "cuda" else "gloo")
    model: Any = spec.build(device, torch.float32)
    mesh = init_device_mesh(device, (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = replace(CONFIG, gather_memory=gather_memory, dtype=dtype, quantization=quantization)
    gathered = sum(p.numel() * dtype.itemsize for p in model.parameters())
    with RolloutEngine(model, config=config) as engine:
        seconds, extra, moved = [], 0, 0
        for repeat in range(-2, repeats):  # what is made once, then memory, then time
            gc.collect()  # before, as in ``weight_updates.race``
            train(model)
            dist.barrier()
            peak = Peak(device)
            took = ceilings.seconds(engine.update_weights, device)
            if repeat >= 0:
                seconds.append(took)
                moved = engine.stats().last_update_bytes
            elif repeat == -1:
                extra = peak.extra()
                keep_nothing(2**25)
        held = engine.stats().mirror_bytes
        if not engine.verify_weights().ok:
            raise GateError(f"rank {rank} does not hold what the trainer holds")
        assert dist.group.WORLD is not None
        length = gather.share_bytes(dist.group.WORLD, gather_memory, torch.device(device))
        share = torch.ones(length, dtype=torch.uint8, device=device)
        whole = share.new_empty(ranks * share.numel())
        rounds = []
        for _ in range(5):
            dist.barrier()
            four = ceilings.seconds(lambda: [all_gather(whole, share) for _ in range(4)], device)
            rounds.append(four / 4)
        if rank == 0:
            connection.send(
                {"seconds": seconds, "bytes": moved, "extra": extra, "held": held}
                | {"gathered": gathered, "collective": whole.numel() / min(rounds)}
            )
    dist.destroy_process_group()
