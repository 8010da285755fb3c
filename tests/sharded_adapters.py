"""What each rank does in the tests of adapters whose A and B are sharded: importable by name, as the processes have to import it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
import zero
from adapted import lora, running, shake
from families import VOCAB, make_model
from peft import PeftModel, get_peft_model
from sharded import CONFIG, by_fsdp1, by_fsdp2, by_fsdp2_of_copies, by_fsdp2_on_any_dimension
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from stoker.rollout import LIVE, EngineStateError, RolloutEngine, SamplingParams, UnsupportedModelError

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


# By ranks and name: how to shard, the family, and the adapter.
CASES: dict[int, dict[str, tuple[Callable[[Any], nn.Module], str, dict[str, Any]]]] = {
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
    },
    3: {"fsdp2, uneven": (by_fsdp2, "qwen3", {"r": 5} | EVERYWHERE)},
    4: {
        "fsdp2 on any dimension": (by_fsdp2_on_any_dimension, "qwen3", {"r": 8}),
        "fsdp2 of copies": (by_fsdp2_of_copies, "qwen3", {}),
    },
}


def adapted(family: str, options: dict[str, Any]) -> PeftModel:
    model = get_peft_model(make_model(family, num_hidden_layers=2), lora(**options)).eval()
    shake(model)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    ids = torch.randint(1, VOCAB, (2, 16), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()


def assert_like(engine: RolloutEngine, twin: PeftModel, version: int) -> None:
    """With the live adapter and on the bare base, in one batch; on one rank more often, so that a collective would hang."""
    for _ in range(1 + dist.get_rank() % 2):
        live, base = engine.generate_batch([PROMPT] * 2, GREEDY, adapter=[LIVE, None])
    for output, adapter in ((live, "default"), (base, None)):
        (c,) = output.completions
        with running(twin, adapter):
            assert c.token_ids == oracle.greedy(twin, PROMPT, GREEDY.max_tokens)
            expected = oracle.logprobs(twin, PROMPT, c.token_ids)
        torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)
        assert set(c.weight_versions) == {version}


def follow_all(rank: int) -> dict[str, dict[str, Any]]:
    found = {}
    for name, case in CASES[dist.get_world_size()].items():
        try:
            found[name] = follow(*case)
        except BaseException as error:
            error.add_note(f"({name})")
            raise
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


def zero3(rank: int) -> None:
    """DeepSpeed cuts every matrix into a piece a rank, and its optimizer has the adapter alone."""
    model = adapted("qwen3", EVERYWHERE)
    trainable = [p for p in model.parameters() if p.requires_grad]
    trainer, *_ = zero.deepspeed_on_a_cpu().initialize(
        model=model, optimizer=torch.optim.AdamW(trainable, lr=0.01), config=zero.settings(3)
    )
    with RolloutEngine(trainer, config=CONFIG) as engine:
        for step in range(3):
            twin = adapted("qwen3", EVERYWHERE)
            twin.load_state_dict(zero.gathered(model))
            assert_like(engine, twin, step)
            zero.train(trainer, step)
            before = zero.statuses(model)
            assert not engine.verify_weights().ok
            assert engine.update_weights() == step + 1
            assert engine.stats().last_update_bytes == sum(p.ds_numel * 4 for p in trainable)
            assert zero.statuses(model) == before


def odds_and_ends(rank: int) -> None:
    """Switched off, scrambled, another model's, added and deleted: as with whole adapters, or refused by name."""
    twin, model = adapted("qwen3", {}), by_fsdp2(adapted("qwen3", {}))
    with RolloutEngine(model, config=CONFIG) as engine:
        (with_adapter,) = engine.generate_batch([PROMPT], GREEDY)
        with running(twin, None):
            base = oracle.greedy(twin, PROMPT, GREEDY.max_tokens)
        with model.disable_adapter():
            assert engine.generate_batch([PROMPT], GREEDY)[0].completions[0].token_ids == base
        assert with_adapter.completions[0].token_ids != base
        (again,) = engine.generate_batch([PROMPT], GREEDY)
        assert again.completions[0].token_ids == with_adapter.completions[0].token_ids
        name, copy = next(iter(sorted(engine._binding.source.adapters.items())))
        copy.add_(1)
        assert engine.verify_weights().mismatched == (name,)
        with pytest.raises(UnsupportedModelError, match="only the engine's own model is gathered"):
            engine.load_adapter("theirs", model)
        engine.load_adapter("theirs", twin)
        (theirs,) = engine.generate_batch([PROMPT], GREEDY, adapter="theirs")
        assert theirs.completions[0].token_ids == with_adapter.completions[0].token_ids
        for one in (twin, model):
            torch.manual_seed(3)
            one.add_adapter("late", lora(r=2, init_lora_weights=False))  # which nothing has sharded
        engine.update_weights()
        (late,) = engine.generate_batch([PROMPT], GREEDY, adapter="late")
        with running(twin, "late"):
            assert late.completions[0].token_ids == oracle.greedy(twin, PROMPT, GREEDY.max_tokens)
        model.delete_adapter("default")
        with pytest.raises(UnsupportedModelError, match="build a new engine"):
            engine.update_weights()
