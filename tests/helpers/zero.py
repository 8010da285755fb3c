"""What each rank does in the tests of models that DeepSpeed trains. The processes import it by name."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from families import make_model
from family_fields import VOCAB
from ranks import noted
from sharded import CONFIG, PARAMS, PROMPT
from torch import nn
from transformers import PreTrainedModel

from stoker.rollout import RolloutEngine, UnsupportedModelError

STEPS = 3
# (ranks, ZeRO's stage, the trainer's dtype, more of ZeRO's settings)
CASES: dict[str, tuple[int, int, torch.dtype, dict[str, Any]]] = {
    "stage 3": (2, 3, torch.float32, {}),
    "stage 3 in bfloat16": (2, 3, torch.bfloat16, {"stage3_param_persistence_threshold": 0}),
    "stage 3, offloaded": (2, 3, torch.float32, {"offload_param": {"device": "cpu"}}),
    "stage 3, parts kept twice": (2, 3, torch.float32, {"zero_hpz_partition_size": 2}),
    "stage 2": (2, 2, torch.float32, {}),
    "stage 1 in bfloat16": (2, 1, torch.bfloat16, {}),
    "stage 3, uneven": (3, 3, torch.float32, {}),
}


def deepspeed_on_a_cpu() -> Any:
    """DeepSpeed, told not to compile the operation by which ranks on one machine share memory."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def settings(stage: int, dtype: torch.dtype = torch.float32, **zero: Any) -> dict[str, Any]:
    # Norms and biases stay whole after a forward, and matrices do not.
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype is torch.bfloat16},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 50} | zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def small(**overrides: Any) -> PreTrainedModel:
    return make_model("qwen3", num_hidden_layers=2, **overrides)


def initialize(model: nn.Module, config: dict[str, Any]) -> Any:
    """DeepSpeed's engine over the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer, *_ = deepspeed_on_a_cpu().initialize(model=model, optimizer=optimizer, config=config)
    return trainer


def train(trainer: Any, step: int) -> float:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    ids = torch.randint(1, VOCAB, (1, 16), generator=generator)
    loss = trainer(input_ids=ids, labels=ids, use_cache=False).loss
    trainer.backward(loss)
    trainer.step()
    return float(loss.detach())


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole weights, as DeepSpeed itself puts them together."""
    with deepspeed_on_a_cpu().zero.GatheredParameters(list(model.parameters())):
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def whole(model: nn.Module) -> PreTrainedModel:
    """A plain model of those, in float32."""
    twin = small()
    twin.load_state_dict(gathered(model))
    return twin


def statuses(model: nn.Module) -> list[Any]:
    return [(getattr(p, "ds_status", None), p.data_ptr(), p.shape) for p in model.parameters()]


def assert_matches(engine: RolloutEngine, twin: PreTrainedModel, version: int) -> None:
    for _ in range(1 + dist.get_rank()):  # a collective in one of them would never end
        (c,) = engine.generate_batch([PROMPT], PARAMS)[0].completions
    expected = oracle.logprobs(twin, PROMPT, c.token_ids)
    torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-4)
    assert set(c.weight_versions) == {version}


def follow(stage: int, dtype: torch.dtype, zero: dict[str, Any]) -> dict[str, Any]:
    """After every step the engine is the full model, and the training is bit for bit what it is without an engine."""
    alone = initialize(small(), settings(stage, dtype, **zero))
    losses = [train(alone, step) for step in range(STEPS)]
    trainer = initialize(small(), settings(stage, dtype, **zero))
    before = statuses(trainer.module)
    # In the trainer's bfloat16 rounding would hide differences, so the engine computes in float32 with its numbers.
    with RolloutEngine(trainer, config=replace(CONFIG, dtype="float32")) as engine:
        assert_matches(engine, whole(trainer.module), 0)
        assert statuses(trainer.module) == before
        for step in range(STEPS):
            assert train(trainer, step) == losses[step]
            before = statuses(trainer.module)
            if stage == 3:
                assert not engine.verify_weights().ok, "the engine lags behind until it is told"
            assert engine.update_weights() == step + 1
            assert statuses(trainer.module) == before
            assert engine.verify_weights().ok
            assert_matches(engine, whole(trainer.module), step + 1)
        stats, before = engine.stats(), statuses(trainer.module)
    assert statuses(trainer.module) == before
    return {"moved": stats.last_update_bytes, "fused": stats.fused_layers == stats.num_layers}


def follow_all(rank: int) -> dict[str, dict[str, Any]]:
    found = {}
    for name, (ranks, *case) in CASES.items():
        if ranks == dist.get_world_size():
            with noted(name):
                found[name] = follow(*case)
    return found


def made_in_pieces(rank: int) -> None:
    """A model that was never whole on any rank, and parts that cannot be read."""
    config = settings(3)
    with deepspeed_on_a_cpu().zero.Init(config_dict_or_path=config):
        model = small(pad_token_id=None)  # transformers would write to the row of that token
    trainer = initialize(model, config)
    with RolloutEngine(trainer.module, config=CONFIG) as engine:
        train(trainer, 1)
        engine.update_weights()
        assert_matches(engine, whole(model), 1)
        name, parameter = next((n, p) for n, p in model.named_parameters() if len(p.ds_shape) > 1)
        part = parameter.ds_tensor.data
        parameter.ds_tensor.data = torch.empty(1)  # what it is while its numbers are in a file
        with pytest.raises(
            UnsupportedModelError, match=f"{name} is partitioned by ZeRO-3 and its part is not in memory"
        ):
            engine.update_weights()
        parameter.ds_tensor.data = part
        parameter.ds_tensor.ds_quant_scale = torch.ones(1)
        with pytest.raises(UnsupportedModelError, match=f"{name} is partitioned by ZeRO-3 and quantised"):
            engine.update_weights()


def weights_from_a_folder(rank: int, folder: str) -> None:
    """While transformers is told that models are made in pieces, as by its Trainer: a folder's weights come whole."""
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

    config = settings(3)
    other = small(seed=5)
    other.save_pretrained(folder)  # on the first rank, that is
    dist.barrier()
    trainer = initialize(small(), config)
    alive = HfDeepSpeedConfig(config)
    with RolloutEngine(trainer, config=CONFIG) as engine:
        before = statuses(trainer.module)
        assert engine.update_weights(folder) == 1
        assert_matches(engine, other, 1)
        assert statuses(trainer.module) == before, "the trainer goes on with its own"
        with RolloutEngine.from_pretrained(folder, config=CONFIG) as loaded:
            assert_matches(loaded, other, 0)
        assert is_deepspeed_zero3_enabled() and alive.is_zero3()
        del alive  # which the twin that follows must not be made under
        train(trainer, 1)
        assert engine.update_weights() == 2
        assert_matches(engine, whole(trainer.module), 2)
