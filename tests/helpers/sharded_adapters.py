"""What each rank does in the tests of adapters whose A and B are sharded. The processes import it by name."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
import zero
from adapted import assert_kernels_find, lora, running, shake, with_lora
from families import make_model
from peft import PeftModel
from ranks import noted
from sharded import CONFIG, by_fsdp1, by_fsdp2, by_fsdp2_of_copies, by_fsdp2_on_any_dimension, train
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from stoker.rollout import (
    LIVE,
    EngineStateError,
    RolloutEngine,
    SamplingParams,
)

PROMPT = [7, 3, 99, 14, 5, 62, 8, 31, 4, 4, 90, 17]
GREEDY = SamplingParams(temperature=0, max_tokens=6)
EVERYWHERE: dict[str, Any] = {
    "target_modules": ["q_proj", "v_proj", "down_proj", "embed_tokens"],
    "modules_to_save": ["model.norm"],
}


def by_peft_policy(model: PeftModel) -> nn.Module:
    """FSDP1 as PEFT advises: every A and B is a unit of its own, beside those of the layers."""
    from peft.utils.other import fsdp_auto_wrap_policy

    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = type(model.get_base_model().model.layers[0]).__name__
    return FullyShardedDataParallel(model, auto_wrap_policy=fsdp_auto_wrap_policy(model), device_id=torch.device("cpu"))


def in_one_unit(model: PeftModel) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


# By ranks and name: how to shard, the family, and the adapter.
CASES: dict[int, dict[str, tuple[Callable[[Any], nn.Module], str, dict[str, Any]]]] = {
    1: {"fsdp2": (by_fsdp2, "qwen3", EVERYWHERE)},
    2: {
        "fsdp2": (by_fsdp2, "qwen3", {"use_rslora": True} | EVERYWHERE),
        "fsdp2, DoRA": (by_fsdp2, "qwen3", {"use_dora": True}),
        "fsdp2, tokens and biases": (
            by_fsdp2,
            "qwen3",
            {"lora_bias": True, "trainable_token_indices": {"embed_tokens": [3, 17, 99]}},
        ),
        "fsdp2, experts": (
            by_fsdp2,
            "qwen3_moe",
            {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        ),
        "fsdp1 of original parameters": (partial(by_fsdp1, use_orig_params=True), "llama", EVERYWHERE),
        "fsdp1, adapters apart": (by_peft_policy, "llama", {}),
        "fsdp1 of original parameters, one unit": (in_one_unit, "llama", {}),
    },
    3: {
        "fsdp2, uneven": (by_fsdp2, "qwen3", {"r": 5} | EVERYWHERE),
        "fsdp2, DoRA of uneven ranks": (
            by_fsdp2,
            "qwen3",
            {"r": 5, "use_dora": True, "rank_pattern": {"q_proj": 2, "down_proj": 7}, "alpha_pattern": {"v_proj": 31}},
        ),
    },
    4: {
        "fsdp2 on any dimension": (by_fsdp2_on_any_dimension, "qwen3", {"r": 8}),
        "fsdp2 of copies": (by_fsdp2_of_copies, "qwen3", {}),
    },
}


# The same, of a model that is not the engine's.
OTHERS: dict[int, dict[str, tuple[Callable[[Any], nn.Module], str, dict[str, Any]]]] = {
    1: {"fsdp2": (by_fsdp2, "qwen3", EVERYWHERE)},  # whose tensors are sharded over one rank
    2: {
        "fsdp2": (by_fsdp2, "qwen3", {"use_dora": True} | EVERYWHERE),
        "fsdp2, biases of the base": (by_fsdp2, "qwen2", {"bias": "all", "target_modules": ["q_proj", "down_proj"]}),
        "fsdp2, tokens": (by_fsdp2, "qwen3", {"trainable_token_indices": {"embed_tokens": [3, 17, 99]}}),
        "fsdp1 of original parameters": (partial(by_fsdp1, use_orig_params=True), "llama", EVERYWHERE),
        "fsdp1, adapters apart": (by_peft_policy, "llama", {}),
    },
    4: {"fsdp2 of copies": (by_fsdp2_of_copies, "qwen3", {"r": 5, "rank_pattern": {"q_proj": 2}})},
}


def adapted(family: str, options: dict[str, Any], seed: int = 1) -> PeftModel:
    return with_lora(make_model(family, num_hidden_layers=2), seed, **options)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def assert_like(
    engine: RolloutEngine,
    twin: PeftModel,
    version: int,
    others: Mapping[str, tuple[PeftModel, Any]] = MappingProxyType({}),
) -> None:
    """With the live adapter and on the bare base, in one batch; on one rank more often, so that a collective would hang.

    others: by the engine's names of more adapters, whose they are, and by which name.
    """
    expecting = {LIVE: (twin, "default"), None: (twin, None), **others}
    for _ in range(1 + dist.get_rank() % 2):
        batch = engine.generate_batch([PROMPT] * len(expecting), GREEDY, adapter=list(expecting))
    for output, (twin, adapter) in zip(batch, expecting.values(), strict=True):
        (c,) = output.completions
        with running(twin, adapter):
            expected = oracle.greedy_logprobs(twin, PROMPT, c.token_ids, GREEDY.max_tokens)
        torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)
        assert set(c.weight_versions) == {version}


def follow_all(rank: int, of_others: bool) -> dict[str, dict[str, Any]]:
    found = {}
    cases, each = (OTHERS, follow_another_model) if of_others else (CASES, follow)
    for name, case in cases[dist.get_world_size()].items():
        with noted(name):
            found[name] = each(*case)
    return found


def follow(wrap: Callable[[Any], nn.Module], family: str, options: dict[str, Any]) -> dict[str, Any]:
    """After every step of training the adapter the engine is what a twin without any wrapper is trained to be."""
    twin, model = adapted(family, options), wrap(adapted(family, options))
    theirs, ours = optimizer_of(twin), optimizer_of(model)
    trained = sum(p.nbytes for p in twin.parameters() if p.requires_grad)
    with RolloutEngine(model, config=replace(CONFIG, gather_memory=2**16)) as engine:
        assert list(engine.adapters) == ["default"]
        assert_like(engine, twin, 0)
        for step in (1, 2):
            train(twin, theirs, step)
            train(model, ours, step)
            report = engine.verify_weights()
            assert report.mismatched and not report.missing and not report.extra
            assert engine.update_weights() == step
            moved = engine.stats().last_update_bytes
            assert_like(engine, twin, step)
            assert engine.verify_weights().ok
        engine.sleep(level=2)
        with pytest.raises(
            EngineStateError, match="the weights are asleep"
        ):  # and so are those of the adapter there is
            engine.load_adapter("other", adapted(family, options))
        engine.wake_up()
        assert_like(engine, twin, 2)
        engine.sleep(level=3)
        engine.wake_up()
        assert engine.update_weights() == 3
        assert_like(engine, twin, 3)
        stats = engine.stats()
    train(model, ours, 9)
    return {"fused": stats.fused_layers == stats.num_layers, "moved": moved, "trained": trained}


def follow_another_model(wrap: Callable[[Any], nn.Module], family: str, options: dict[str, Any]) -> dict[str, Any]:
    """An adapter that was loaded from another sharded model is what that is trained to be, as of the last update."""
    twin, model = adapted(family, {}), wrap(adapted(family, {}))
    their_twin, theirs = adapted(family, options, seed=7), wrap(adapted(family, options, seed=7))
    optimizers = optimizer_of(their_twin), optimizer_of(theirs)
    trained = sum(p.nbytes for p in their_twin.parameters() if p.requires_grad)
    others = {"theirs": (their_twin, "default")}
    with RolloutEngine(model, config=replace(CONFIG, gather_memory=2**16)) as engine:
        alone = engine.stats().mirror_bytes
        engine.load_adapter("theirs", theirs)
        mirrored = engine.stats().mirror_bytes - alone
        assert engine.adapters == ("default", "theirs")
        assert_like(engine, twin, 0, others)
        before = copy.deepcopy(their_twin)
        for step in (1, 2):
            train(their_twin, optimizers[0], step)
            train(theirs, optimizers[1], step)
            if step == 1:
                assert_like(engine, twin, 0, {"theirs": (before, "default")})
            report = engine.verify_weights()
            assert report.mismatched and all(name.startswith("theirs: model.") for name in report.mismatched)
            assert engine.update_weights() == step
            moved = engine.stats().last_update_bytes
            assert_like(engine, twin, step, others)
            again = engine.verify_weights()
            assert again.ok and again.checked == report.checked > len(report.mismatched)
        assert engine.update_weights() == 3 and not engine.stats().last_update_bytes
        engine.sleep(level=2)
        assert all(not copies.resident for copies in engine._binding.adapters._gathered.values())
        engine.wake_up()
        assert_like(engine, twin, 3, others)
        engine.sleep(level=3)
        engine.wake_up()
        assert engine.update_weights() == 4
        assert_like(engine, twin, 4, others)
        engine.unload_adapter("theirs")
        assert engine.stats().mirror_bytes == alone
        assert engine.update_weights() == 5
        assert_like(engine, twin, 5)
    train(theirs, optimizers[1], 9)
    return {"mirrored": mirrored, "moved": moved, "trained": trained}


BOTH = ["default", "other"]


@contextmanager
def alone(model: PeftModel, adapter: str) -> Iterator[None]:
    """One of the two active adapters."""
    model.base_model.set_adapter(adapter)
    try:
        yield
    finally:
        model.base_model.set_adapter(BOTH)


def several(rank: int) -> None:
    """Two adapters in parts, trained together: both at once, each alone, and each of them loaded by another engine."""

    def make() -> PeftModel:
        model = adapted("qwen3", {})
        model.add_adapter("other", lora(r=3, target_modules=["k_proj", "up_proj", "q_proj"], use_rslora=True))
        shake(model, seed=2)
        model.base_model.set_adapter(BOTH)
        return model

    twin, model = make(), by_fsdp2(make())
    ours, theirs = optimizer_of(model), optimizer_of(twin)
    loaded = {"first": (twin, "default"), "second": (twin, "other")}
    plain = make_model("qwen3", num_hidden_layers=2)
    with RolloutEngine(model, config=CONFIG) as engine, RolloutEngine(plain, config=CONFIG) as of_base:
        for name, (_, adapter) in loaded.items():
            of_base.load_adapter(name, (model, adapter))
        of_base.load_adapter("both", model)
        assert of_base._binding.source.kind == "aliased"
        for step in range(3):
            live, both = engine.generate_batch([PROMPT] * 2, GREEDY, adapter=[LIVE, "default+other"])
            (again,) = of_base.generate_batch([PROMPT], GREEDY, adapter="both")
            expected = live.completions[0].token_ids
            logprobs = oracle.greedy_logprobs(twin, PROMPT, expected, GREEDY.max_tokens)
            for (c,) in (output.completions for output in (live, both, again)):
                assert c.token_ids == expected
                torch.testing.assert_close(torch.tensor(c.logprobs).double(), logprobs, rtol=0, atol=1e-4)
            train(twin, theirs, step)
            train(model, ours, step)
            assert engine.update_weights() == of_base.update_weights() == step + 1
        for of_one, names in ((engine, BOTH), (of_base, list(loaded))):
            batch = of_one.generate_batch([PROMPT] * 2, GREEDY, adapter=names)
            for output, (_, adapter) in zip(batch, loaded.values(), strict=True):
                with alone(twin, adapter):
                    assert output.completions[0].token_ids == oracle.greedy(twin, PROMPT, GREEDY.max_tokens)
        sleeping = of_base.stats().mirror_bytes
        of_base.sleep(level=3)
        elsewhere = [torch.empty(size, dtype=torch.uint8) for size in (sleeping // 2, sleeping, sleeping // 3) * 4]
        of_base.wake_up()
        del elsewhere  # until then another's memory
        for name, weights in of_base._adapters.in_slots.items():
            slot = next(adapter.slot for adapter in of_base._adapters.slots if adapter.name == name)
            matrices = [t for link in weights.links for w in link.linears.values() for t in (w.a, w.b)]
            assert_kernels_find(of_base, slot, matrices)
        with pytest.raises(EngineStateError, match=r"sleep\(level=3\) dropped them"):
            of_base.generate_batch([PROMPT], GREEDY)
        of_base.update_weights()
        (again,) = of_base.generate_batch([PROMPT], GREEDY, adapter="second")
        with alone(twin, "other"):
            assert again.completions[0].token_ids == oracle.greedy(twin, PROMPT, GREEDY.max_tokens)


def zero3(rank: int) -> None:
    """DeepSpeed cuts every matrix into a piece a rank, and its optimizer has the adapter alone."""
    model = adapted("qwen3", EVERYWHERE)
    trainable = [p for p in model.parameters() if p.requires_grad]
    trainer, *_ = zero.deepspeed_on_a_cpu().initialize(
        model=model, optimizer=torch.optim.AdamW(trainable, lr=0.01), config=zero.settings(3)
    )
    plain = adapted("qwen3", {})
    with RolloutEngine(trainer, config=CONFIG) as engine, RolloutEngine(plain, config=CONFIG) as another:
        another.load_adapter("theirs", trainer)
        for step in range(3):
            twin = adapted("qwen3", EVERYWHERE)
            twin.load_state_dict(zero.gathered(model))
            assert_like(engine, twin, step)
            assert_like(another, plain, step, {"theirs": (twin, "default")})
            zero.train(trainer, step)
            before = zero.statuses(model)
            assert not engine.verify_weights().ok
            assert engine.update_weights() == step + 1
            assert another.update_weights() == step + 1
            for one in (engine, another):
                assert one.stats().last_update_bytes == sum(p.ds_numel * 4 for p in trainable)
            assert zero.statuses(model) == before


def in_a_wider_dtype(rank: int) -> None:
    """The engine's copy of the parts is in the trainer's dtype, and what a slot holds in the engine's."""
    twin, model = adapted("qwen3", EVERYWHERE).bfloat16().float(), by_fsdp2(adapted("qwen3", EVERYWHERE).bfloat16())
    with RolloutEngine(model, config=replace(CONFIG, dtype="float32")) as engine:
        for level in (0, 2, 3):
            if level:
                engine.sleep(level)
                engine.wake_up()
                engine.update_weights()
            assert_like(engine, twin, engine.weight_version)
            assert engine.verify_weights().ok
        engine.sleep(3)
        engine.wake_up()
        engine.update_weights(dict(make_model("qwen3", num_hidden_layers=2).named_parameters()))  # without the adapter
        with pytest.raises(EngineStateError, match="the weights are incomplete"):
            engine.generate_batch([PROMPT], GREEDY)
        engine.update_weights()
        assert_like(engine, twin, engine.weight_version)
