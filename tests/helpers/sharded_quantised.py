"""What each rank does in the tests of sharded models in 4 bits. The processes import it by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zero
from accelerated import launched, shard
from peft import LoraConfig
from quantised_bases import adapted, quantised
from ranks import noted
from sharded import CONFIG, by_fsdp1, by_fsdp2
from sharded_adapters import assert_like, by_peft_policy, optimizer_of, train
from sharded_gathers import watched
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trl_setup import build, logged

from stoker.benchmarks.footprint import Peak, keep_nothing
from stoker.kernels.reference import checksum
from stoker.rollout import RolloutEngine, UnsupportedModelError, WeightsMismatchError
from stoker.weight_sync.source import source_for

by_fsdp1_of_originals = partial(by_fsdp1, use_orig_params=True)
FSDP2_TAKES_INTEGERS = torch.__version__ >= (2, 13)  # torch 2.11 raises, as no parameter of integers has gradients
# By ranks and name: how to shard, the quantisation, in what it is stored, and the adapter.
CASES: dict[int, dict[str, tuple[Callable[[Any], nn.Module], str, torch.dtype, dict[str, Any]]]] = {
    2: {
        "fsdp2, bfloat16": (by_fsdp2, "nf4", torch.bfloat16, {}),
        "fsdp2, float32, DoRA": (by_fsdp2, "fp4", torch.float32, {"use_dora": True}),
        "fsdp1 of original parameters": (by_fsdp1_of_originals, "nf4", torch.float32, {}),
        "fsdp1, adapters apart": (by_peft_policy, "fp4", torch.float32, {}),
    },
    3: {"fsdp2, uneven": (by_fsdp2, "nf4", torch.uint8 if FSDP2_TAKES_INTEGERS else torch.bfloat16, {})},
}


def follow_all(rank: int, folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for name, case in CASES[dist.get_world_size()].items():
        with noted(name):
            found[name] = follow(folder, *case)
    return found


def follow(
    folder: Path, wrap: Callable[[Any], nn.Module], kind: str, storage: torch.dtype, options: dict[str, Any]
) -> dict[str, Any]:
    """After every step of training the adapter the engine is what a twin without any wrapper is trained to be."""

    def make() -> Any:
        return adapted(quantised(folder, kind, bnb_4bit_quant_storage=storage), **options)

    twin = make()
    sizes = {True: 0, False: 0}
    for parameter in twin.parameters():
        sizes[hasattr(parameter, "quant_state")] += parameter.nbytes
    trained = sum(p.nbytes for p in twin.parameters() if p.requires_grad)
    model = wrap(make())
    theirs, ours = optimizer_of(twin), optimizer_of(model)
    with RolloutEngine(model, config=replace(CONFIG, gather_memory=2**16, check_finite_weights=True)) as engine:
        assert_like(engine, twin, 0)
        for step in (1, 2):
            train(twin, theirs, step)
            train(model, ours, step)
            assert engine.verify_weights().mismatched
            assert engine.update_weights() == step
            moved = engine.stats().last_update_bytes
            assert_like(engine, twin, step)
            assert engine.verify_weights().ok
        stats = engine.stats()
    train(twin, theirs, 9)
    train(model, ours, 9)
    return {
        "mirror": stats.mirror_bytes,
        "moved": moved,
        "trained": trained,
        "packed": sizes[True],
        "plain": sizes[False],
    }


@torch.no_grad()
def odds_and_ends(rank: int, folder: Path) -> None:
    """Another base, by its bits or its scales, comes with an update and not before; what cannot be is refused by name."""

    def make() -> Any:
        return adapted(quantised(folder, "nf4", bnb_4bit_quant_storage=torch.bfloat16))

    before, twin, model = make(), make(), by_fsdp2(make())
    mlp, other = (m.get_base_model().model.layers[0].mlp for m in (model, twin))
    name = "model.layers.0.mlp.up_proj.weight"
    with RolloutEngine(model, config=CONFIG) as engine:
        for quantised_layer in (mlp.up_proj, other.up_proj):
            quantised_layer.quant_state.state2.absmax.mul_(3)
            quantised_layer.quant_state.quant_type = "fp4"
        assert engine.verify_weights().mismatched == (f"{name}.nested_absmax",)
        assert_like(engine, before, 0)
        assert engine.update_weights() == 1
        assert engine.stats().last_update_bytes == other.up_proj.quant_state.state2.absmax.nbytes
        assert_like(engine, twin, 1)
        mlp.up_proj.weight.to_local().copy_(mlp.gate_proj.weight.to_local())
        other.up_proj.weight.copy_(other.gate_proj.weight)
        assert engine.verify_weights().mismatched == (name,)
        assert engine.update_weights() == 2
        assert engine.stats().last_update_bytes == other.up_proj.weight.nbytes
        assert_like(engine, twin, 2)
        for level in (1, 2):
            engine.sleep(level=level)
            engine.wake_up()
        assert_like(engine, twin, 2)
        engine.sleep(level=3)
        engine.wake_up()
        assert engine.update_weights() == 3
        assert_like(engine, twin, 3)
        with pytest.raises(UnsupportedModelError, match="is quantised, and runs where it is as it is"):
            RolloutEngine(model, config=replace(CONFIG, dtype="bfloat16"))
        mlp.up_proj.quant_state.packing_format_for_cpu = rank == 0  # as a forward in eval() does where the CPU has bf16
        with pytest.raises(
            UnsupportedModelError if rank == 0 else WeightsMismatchError, match="the model is spoilt|another rank"
        ):
            engine.update_weights()
        assert_like(engine, twin, 3)


def take_little(rank: int, memory_bytes: int) -> tuple[int, int, int]:
    """(what an update takes at the most besides the mirror, largest gather, bytes of the mirror), of a base alone."""
    from bitsandbytes.nn import Linear4bit

    keep_nothing()
    checksum._LOT_BYTES = 2**13
    layers = [Linear4bit(1024, 4096, quant_storage=torch.bfloat16, quant_type="nf4") for _ in range(4)]
    model = fully_shard(nn.Sequential(*layers).to("cpu"), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    source = source_for(model, gather_bytes=memory_bytes)
    tensors = source.tensors()
    for _ in range(2):  # at first some things are made that stay
        with torch.no_grad():
            for layer in layers:
                layer.weight.to_local().view(torch.int16).add_(1)
        peak = Peak("cpu")
        with watched(rank) as gathered:
            source.pull()
        took = peak.extra()
    assert source.mismatches()[1] == [] and {t.dtype for t in tensors.values()} == {torch.bfloat16, torch.float32}
    return took, max(gathered), source.nbytes


def zero3(rank: int, folder: Path) -> None:
    """DeepSpeed cuts the packed weights too, and what is left of them here has no elements."""

    def make() -> Any:
        return adapted(quantised(folder, "nf4", bnb_4bit_quant_storage=torch.bfloat16))

    twin, model = make(), make()
    trainable = [p for p in model.parameters() if p.requires_grad]
    trainer, *_ = zero.deepspeed_on_a_cpu().initialize(
        model=model, optimizer=torch.optim.AdamW(trainable, lr=0.01), config=zero.settings(3)
    )
    with RolloutEngine(trainer, config=replace(CONFIG, check_finite_weights=True)) as engine:
        assert_like(engine, twin, 0)
        for step in (1, 2):
            zero.train(trainer, step)
            twin.load_state_dict({n: t for n, t in zero.gathered(model).items() if "lora_" in n}, strict=False)
            assert engine.update_weights() == step
            assert engine.stats().last_update_bytes == sum(p.ds_numel * 4 for p in trainable)
            assert_like(engine, twin, step)
            assert engine.verify_weights().ok


def finite(rank: int, folder: Path) -> None:
    """Numbers are looked at among bits that are none, of which most are not finite as floats."""
    for wrap, storage in ((by_fsdp2, torch.bfloat16), (by_fsdp1_of_originals, torch.float32)):
        model = wrap(adapted(quantised(folder, "nf4", bnb_4bit_quant_storage=storage)))
        with RolloutEngine(model, config=replace(CONFIG, check_finite_weights=True)) as engine:
            with torch.no_grad():
                for n, parameter in model.named_parameters():
                    if n.endswith("lora_A.default.weight") and parameter.numel():
                        parameter.fill_(torch.nan)
            with pytest.raises(WeightsMismatchError, match=r"lora_A.default.weight holds NaN or Inf"):
                engine.update_weights()


def grpo(rank: int, folder: Path, out: str) -> dict[str, Any]:
    """TRL's trainer, which accelerate shards after ``attach``: its own forward says what each token's log-probability is."""
    from stoker.integrations.trl import attach, detach

    launched()
    model = quantised(folder, "nf4", bnb_4bit_quant_storage=torch.float32)
    more = {"peft_config": LoraConfig(r=4, target_modules="all-linear")}
    trainer = build("grpo", out, model=model, more=more, learning_rate=0.05, ddp_backend="gloo")
    shard(trainer.accelerator.state)
    trainer.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = ["LlamaDecoderLayer"]
    trainer.is_fsdp_enabled = True
    engine = attach(trainer)
    trainer.train()
    found = {
        "differences": logged(trainer, "sampling/sampling_logp_difference/max"),
        "source": engine._binding.source.kind,
        "sharded": isinstance(trainer.model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight, DTensor),
        "version": engine.weight_version,
        "moved": engine.stats().last_update_bytes,
    }
    detach(trainer)
    return found
