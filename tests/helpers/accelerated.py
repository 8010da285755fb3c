"""What each rank does in tests of models that accelerate prepares. The processes import it by name."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import zero
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
from accelerate.utils import DeepSpeedPlugin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from trl_setup import LOGPROB_TOLERANCE, make_model, worst_difference

from stoker.integrations.accelerate import AcceleratedEngine
from stoker.rollout import EngineConfig, InvalidRequestError, SamplingParams

PROMPTS = [[3, 4, 5], [6] * 20]
PARAMS = SamplingParams(n=2, max_tokens=8, ignore_eos=True)


def launched() -> None:
    """The environment that ``accelerate launch`` makes."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # in no use: the group exists


def by_fsdp2() -> Accelerator:
    accelerator = Accelerator(cpu=True)
    shard(accelerator.state)
    return accelerator


def shard(state: Any, version: int = 2) -> None:
    """Have accelerate shard by FSDP, which by itself it does on accelerators only."""
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
    )


def deepspeed_on_a_cpu() -> None:
    """Have accelerate know its processes: with cpu=True it refuses DeepSpeed, and without it looks for no CPU backend."""
    zero.deepspeed_on_a_cpu()
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)


def by_deepspeed(stage: int) -> Accelerator:
    deepspeed_on_a_cpu()
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=zero.settings(stage)))


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)


def adapted(model: Any) -> Any:
    from peft import get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, lora())


def whole(model: Any) -> Any:
    """A plain model of the weights, as the sharding library itself puts them together; PEFT's where there is an adapter."""
    twin = make_model()
    if any("lora_" in name for name, _ in model.named_parameters()):
        twin = adapted(twin).eval()
    if any(".ref." in name for name, _ in model.named_parameters()):  # TRL's copy of what the adapter was
        twin.add_adapter("ref", lora())
    if any(isinstance(p, DTensor) for p in model.parameters()):
        twin.load_state_dict({name: tensor.full_tensor() for name, tensor in model.state_dict().items()})
    elif isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            named = {n.replace("_fsdp_wrapped_module.", ""): p.detach() for n, p in model.named_parameters()}
            twin.load_state_dict(named)
    elif any(hasattr(p, "ds_id") for p in model.parameters()):
        twin.load_state_dict(zero.gathered(getattr(model, "module", model)))
    else:
        twin.load_state_dict(getattr(model, "module", model).state_dict())
    return twin


class BesideACritic(torch.nn.Module):
    """What DeepSpeed trains where there is a critic: it takes one module."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy, self.critic = policy, torch.nn.Linear(policy.config.vocab_size, 1)

    def forward(self, **inputs: Any) -> Any:
        out = self.policy(**inputs)
        out.loss = out.loss + self.critic(out.logits).square().mean()
        return out


def follow(rank: int, how: str, together: bool = False) -> dict[str, Any]:
    """together: both ranks run one model."""
    launched()
    accelerator = by_fsdp2() if how == "fsdp2" else by_deepspeed(int(how[-1]))
    model = make_model()
    model = BesideACritic(model) if how == "zero 3" else model
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    asleep, versions = [], []
    given = accelerator.unwrap_model(model).policy if how == "zero 3" else model
    config = EngineConfig(tensor_parallel_size=1 + together)
    with AcceleratedEngine(accelerator, given, sleep=True, config=config) as engine:
        first = engine.generate_batch(PROMPTS, PARAMS)
        assert worst_difference(whole(given), first) < LOGPROB_TOLERANCE
        for step in range(3):
            tokens = torch.tensor([[3 + rank, 4, 5, 6, 7 - step]])
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
            asleep.append(is_asleep(engine.engine))
            for _ in range(1 if together else 1 + rank):  # a collective in the second one would never end
                batch = engine.generate_batch(PROMPTS, PARAMS)
            versions.append(engine.engine.weight_version)
            assert worst_difference(whole(given), batch) < LOGPROB_TOLERANCE
        assert worst_difference(whole(given), first) > 100 * LOGPROB_TOLERANCE, "the check can tell"
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        engine.engine.wake_up()
        engine.engine.update_weights()
        for _ in range(0 if together else rank):  # nor in the first one, once the loop has taken the weights itself
            engine.generate_batch(PROMPTS, PARAMS)
        source = engine.engine._binding.source.kind
    return {"asleep": asleep, "versions": versions, "source": source, "seed": engine.engine.config.seed}


def train_on(accelerator: Accelerator, model: Any, optimizer: Any, ids: list[int]) -> None:
    with accelerator.accumulate(model):
        tokens = torch.tensor([ids])
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()


def follow_ddp(rank: int) -> dict[str, Any]:
    launched()
    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    with AcceleratedEngine(accelerator, model, config=EngineConfig(seed=5)) as engine:
        first = engine.generate_batch(PROMPTS, PARAMS)
        train_on(accelerator, model, optimizer, first[0].completions[0].token_ids)
        for _ in range(1 + 2 * rank):  # a collective in one of them would never end
            batch = engine.generate_batch(PROMPTS, PARAMS)
        inner = accelerator.unwrap_model(model)
        return {
            "wrapper": type(model).__name__,
            "seed": engine.engine.config.seed,
            "version": engine.engine.weight_version,
            "sampled": [c.token_ids for output in first for c in output.completions],
            "difference": worst_difference(whole(model), batch),
            "moved": worst_difference(whole(model), first),
            "weights": {name: tensor.numpy() for name, tensor in inner.state_dict().items()},
        }


def worst(scores: Any, sampled: list[float]) -> float:
    return float((scores.logprobs - torch.tensor(sampled)).abs().max())


def share_a_batch(rank: int, folder: str, together: bool) -> dict[str, Any]:
    """Two ranks that compute each batch together, by tensor parallelism: accelerate's loader gives both of them the same one.

    together: they run the model together in rollouts, too.
    """
    launched()
    with mock.patch.object(ParallelismConfig, "_validate_accelerator"):  # which knows accelerators only
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    sizes = {"vocab_size": 12}  # a head that some versions of transformers cannot cut otherwise
    model = make_model(**sizes)
    if rank == 0:
        model.save_pretrained(folder)
    dist.barrier()
    model = type(model).from_pretrained(folder, tp_plan="auto", device_mesh=accelerator.torch_device_mesh["tp"])
    model, loader = accelerator.prepare(
        model, torch.utils.data.DataLoader(torch.arange(3, 11).view(4, 2), batch_size=2)
    )
    (first, _) = loader
    config = EngineConfig(seed=5, tensor_parallel_size=1 + together)
    with AcceleratedEngine(accelerator, model, config=config) as engine:
        batch = engine.generate_batch(first.tolist(), PARAMS)
        if together:
            with pytest.raises(InvalidRequestError, match="compute each batch together, and their prompts differ"):
                engine.generate_batch([[3, 4 + rank]], PARAMS)
            scores = engine.engine.score(batch)
            sampled = [c.logprobs for output in batch for c in output.completions]
            assert max(map(worst, scores, sampled)) < LOGPROB_TOLERANCE
        return {
            "source": engine.engine._binding.source.kind,
            "prompts": first.tolist(),
            "sampled": [c.token_ids for output in batch for c in output.completions],
            "difference": worst_difference(make_model(**sizes), batch),
        }


def follow_past_a_forward(rank: int) -> list[int]:
    """Other tensors stand for the parameters at a step, where a forward without a backward has left the model gathered."""
    launched()
    model = fully_shard(
        make_model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tokens = torch.tensor([[3, 4, 5, 6]])
    versions = []
    with AcceleratedEngine(Accelerator(cpu=True), model) as engine:
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
            with torch.no_grad():
                model(input_ids=tokens)
            assert not any(isinstance(p, DTensor) for p in model.parameters())
            optimizer.step()
            batch = engine.generate_batch(PROMPTS, PARAMS)
            versions.append(engine.engine.weight_version)
            assert worst_difference(whole(model), batch) < LOGPROB_TOLERANCE
    return versions


def is_asleep(engine: Any) -> bool:
    """With all copies of weights that it has."""
    return bool(engine.is_sleeping and not (engine.stats().mirror_bytes and engine._binding.resident))


def offloaded(rank: int) -> None:
    """Parts that FSDP2 keeps in host memory, of a model that is computed with on a GPU: they say nothing of where that is."""
    launched()
    policy = CPUOffloadPolicy(pin_memory=False)
    model = fully_shard(make_model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)), offload_policy=policy)
    accelerator = Accelerator(cpu=True)
    with mock.patch.object(Accelerator, "device", torch.device("cuda:0")):
        engine = AcceleratedEngine(accelerator, model)
    with engine:
        assert worst_difference(whole(model), engine.generate_batch(PROMPTS, PARAMS)) < LOGPROB_TOLERANCE
