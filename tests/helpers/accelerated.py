"""What each rank does in the tests of sharded models under accelerate and TRL: importable by name, for the processes."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import zero
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DeepSpeedPlugin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from trl_setup import LOGPROB_TOLERANCE, build, logged, make_model, plain_logprobs, worst_difference

from stoker.integrations.accelerate import AcceleratedEngine
from stoker.rollout import EngineConfig, SamplingParams

PROMPTS = [[3, 4, 5], [6] * 20]
PARAMS = SamplingParams(n=2, max_tokens=8, ignore_eos=True)
AUTO = {"train_micro_batch_size_per_gpu": "auto"}


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


def follow(rank: int, how: str) -> dict[str, Any]:
    launched()
    accelerator = by_fsdp2() if how == "fsdp2" else by_deepspeed(int(how[-1]))
    model = make_model()
    model = BesideACritic(model) if how == "zero 3" else model
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    asleep, versions = [], []
    given = accelerator.unwrap_model(model).policy if how == "zero 3" else model
    with AcceleratedEngine(accelerator, given, sleep=True) as engine:
        first = engine.generate_batch(PROMPTS, PARAMS)
        assert worst_difference(whole(given), first) < LOGPROB_TOLERANCE
        for step in range(3):
            tokens = torch.tensor([[3 + rank, 4, 5, 6, 7 - step]])
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
            asleep.append(is_asleep(engine.engine))
            for _ in range(1 + rank):  # a collective in the second one would never end
                batch = engine.generate_batch(PROMPTS, PARAMS)
            versions.append(engine.engine.weight_version)
            assert worst_difference(whole(given), batch) < LOGPROB_TOLERANCE
        assert worst_difference(whole(given), first) > 100 * LOGPROB_TOLERANCE, "the check can tell"
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        engine.engine.wake_up()
        engine.engine.update_weights()
        for _ in range(rank):  # nor in the first one, once the loop has taken the weights itself
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


def is_kept(engine: Any) -> bool:
    """With a copy of the mirror in host memory."""
    mirror = getattr(engine._binding.source, "mirror", None)
    return mirror is not None and mirror._host is not None


def trl(
    rank: int,
    how: str,
    folder: str,
    kind: str = "grpo",
    adapter: bool = False,
    by_config: bool = False,
    beta: float = 0.0,
) -> dict[str, Any]:
    """A trainer of TRL over two ranks' weights, or of an adapter, with GRPO's groups cut between them.

    by_config: the trainer makes the adapter. beta: of its divergence from a reference.
    """
    from stoker.integrations.trl import attach, detach

    launched()
    model = adapted(make_model()) if adapter and not by_config else make_model()
    settings: dict[str, Any] = {"per_device_train_batch_size": 2, "vllm_enable_sleep_mode": True, "model": model}
    if kind in ("grpo", "rloo"):
        settings |= {"per_device_eval_batch_size": 2, "beta": beta}
    if by_config:
        settings["more"] = {"peft_config": lora()}
    if how.startswith("zero"):
        deepspeed_on_a_cpu()
        trainer = build(kind, folder, use_cpu=False, deepspeed=zero.settings(int(how[-1])) | AUTO, **settings)
    else:
        trainer = build(kind, folder, ddp_backend="gloo", **settings)
    if how.startswith("fsdp"):
        shard(trainer.accelerator.state, int(how[-1]))
        trainer.is_fsdp_enabled = True
        Accelerator.device = torch.device("cpu")  # of which FSDP1 knows no index
    engine = attach(trainer)
    sample, backward = engine.generate_batch, trainer.accelerator.backward
    asleep: list[bool] = []
    kept: list[bool] = []
    differences: list[float] = []
    prompts: list[list[int]] = []

    def keep(*arguments: Any, **fields: Any) -> Any:
        for _ in range(1 + 2 * rank):  # a collective in one of them would never end
            batch = sample(*arguments, **fields)
        differences.append(worst_difference(whole(trainer.model_wrapped), batch, trainer.args.temperature))
        prompts.extend(output.prompt_token_ids for output in batch)
        return batch

    def look(*arguments: Any, **fields: Any) -> None:
        asleep.append(is_asleep(engine))
        kept.append(is_kept(engine))
        backward(*arguments, **fields)

    engine.generate_batch, trainer.accelerator.backward = keep, look  # type: ignore[method-assign]
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    kept.append(is_kept(engine))
    version = engine.weight_version
    engine.generate_batch = sample  # type: ignore[method-assign]
    for _ in range(rank):  # nor in this one
        trainer.vllm_generation.sample([[3, 4, 5]], None, 1)
    after = list(whole(trainer.model_wrapped).parameters())
    found = {
        "source": engine._binding.source.kind,
        "version": version,
        "asleep": asleep,
        "kept": kept,
        "worst": max([*differences, *logged(trainer, "sampling/sampling_logp_difference/max")]),
        "moved": max((a - b).abs().max().item() for a, b in zip(after, before, strict=True)),
        "prompts": prompts,
    }
    detach(trainer)
    return found


class _OfTwoFaces(torch.optim.SGD):
    """As a schedule-free one: what is evaluated are other weights than those that are trained, and no step is between them."""

    evaluates = False

    def train(self) -> None:
        self._turn(False)

    def eval(self) -> None:
        self._turn(True)

    @torch.no_grad()
    def _turn(self, evaluates: bool) -> None:
        if evaluates != self.evaluates:
            self.evaluates = evaluates
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5 if evaluates else 2.0)


def evaluate_others(rank: int, folder: str) -> list[tuple[bool, float]]:
    """Of each rollout of a run under FSDP2: whether it was one to train on, and how far its log-probabilities are from the weights'."""
    from stoker.integrations.trl import attach, detach

    launched()
    model = make_model()
    optimizer = _OfTwoFaces(model.parameters(), lr=0.05)
    settings = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    trainer = build(
        "grpo", folder, model=model, more={"optimizers": (optimizer, None)}, ddp_backend="gloo", max_steps=2, **settings
    )
    shard(trainer.accelerator.state)
    trainer.is_fsdp_enabled = True
    engine = attach(trainer)
    sample = engine.generate_batch
    found = []

    def keep(*arguments: Any, **fields: Any) -> Any:
        batch = sample(*arguments, **fields)
        found.append((trainer.model.training, worst_difference(whole(trainer.model_wrapped), batch)))
        return batch

    engine.generate_batch = keep  # type: ignore[method-assign]
    trainer.train()
    assert engine._binding.source.kind == "mirror"
    detach(trainer)
    return found


def train_one_policy(rank: int, folder: str) -> dict[str, Any]:
    """GRPO under DDP, of groups that are each cut in the middle: 2 rows a process and groups of 4."""
    from stoker.integrations.trl import attach, detach

    launched()
    trainer = build("grpo", folder, per_device_train_batch_size=2, per_device_eval_batch_size=2, ddp_backend="gloo")
    engine = attach(trainer)
    prompts, completions = [], []
    generate = trainer.vllm_generation.generate

    def keep(*args: Any, **kwargs: Any) -> Any:
        answer = generate(*args, **kwargs)
        prompts.append([list(p) for p in answer[0]])
        completions.append([list(c) for c in answer[1]])
        return answer

    trainer.vllm_generation.generate = keep
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    # A different number of calls on each: a collective in one of them would never end.
    for _ in range(1 + 2 * rank):
        _, ids, logprobs, _ = generate([[3, 4, 5]], None, 1)
    model = trainer.accelerator.unwrap_model(trainer.model)
    plain = plain_logprobs(model, [3, 4, 5], ids[0])
    detach(trainer)
    return {
        "wrapper": type(trainer.model_wrapped).__name__,
        "seed": engine.config.seed,
        "version": engine.weight_version,
        "prompts": prompts,
        "completions": completions,
        "differences": logged(trainer, "sampling/sampling_logp_difference/max"),
        "error": max(abs(a - b[0]) for a, b in zip(plain, logprobs[0], strict=True)),
        "moved": any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)),
        "weights": {name: tensor.numpy() for name, tensor in trainer.model.state_dict().items()},
    }


def assert_trained(found: dict[str, Any], source: str = "mirror", *, kept: bool = False) -> None:
    """kept: whether a mirror that sleeps is, though the next update comes before anything runs on it."""
    copies = source == "mirror"
    version = found["version"] - (copies and not kept)  # taken once more when training has ended
    assert (found["source"], version, found["asleep"]) == (source, 3, [True] * 3)
    assert found["kept"] == [copies and kept] * 3 + [copies]
    assert found["worst"] < LOGPROB_TOLERANCE < found["moved"] / 100


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


def trl_in_bfloat16(rank: int, how: str, folder: str) -> dict[str, Any]:
    """A trainer whose model, prepared, is in another dtype than before: DeepSpeed's in bfloat16, parameters of FSDP in float32."""
    from stoker.integrations.trl import attach, detach

    launched()
    settings: dict[str, Any] = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "bf16": True}
    if how.startswith("zero"):
        deepspeed_on_a_cpu()
        deepspeed = zero.settings(int(how[-1]), torch.bfloat16) | AUTO
        with mock.patch("transformers.training_args.is_torch_bf16_gpu_available", lambda: True):
            trainer = build("grpo", folder, model=make_model(), use_cpu=False, deepspeed=deepspeed, **settings)
    else:
        trainer = build("grpo", folder, model=make_model().bfloat16(), ddp_backend="gloo", **settings)
        shard(trainer.accelerator.state)
        trainer.accelerator.state.fsdp_plugin.set_mixed_precision("bf16")
        trainer.is_fsdp_enabled = True
    engine = attach(trainer)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    expected = {name: tensor.bfloat16() for name, tensor in whole(trainer.model_wrapped).state_dict().items()}
    held = engine._binding.shell.tensors()
    before = make_model().bfloat16().state_dict()
    found = {
        "dtypes": ({p.dtype for p in trainer.model.parameters()}, engine._binding.source.dtype),
        "same": all(torch.equal(held[name], tensor) for name, tensor in expected.items()),
        "trained": any(not torch.equal(before[name], tensor) for name, tensor in expected.items()),
        "verified": engine.verify_weights().ok,
    }
    detach(trainer)
    return found
