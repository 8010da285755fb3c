"""What each rank does in the tests of models that several ranks run together. The processes import it by name."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import oracle
import sharded
import torch
import torch.distributed as dist
from families import make_model
from peft import LoraConfig, PeftModel, get_peft_model
from ranks import noted

from stoker.benchmarks.footprint import Peak, keep_nothing
from stoker.rollout import (
    LIVE,
    EngineConfig,
    RolloutEngine,
    SamplingParams,
)

CONFIG = EngineConfig(kv_cache_memory="1MiB", block_size=4, max_num_seqs=8, max_num_batched_tokens=32)
PARAMS = SamplingParams(max_tokens=4, n=2)
SHARED = [7, 3, 99, 14, 5, 62, 8, 31, 4, 4, 90, 17]
# Of each kind of layer that is cut in its own way.
FAMILIES = {
    2: (
        "llama",
        "qwen2",  # biases of queries, keys and values
        "qwen3",  # norms of heads
        "phi3",  # packed projections
        "gpt_neox",  # packed by head; biases of all; attention and MLP side by side
        "gpt2",  # weights column by column, position embeddings
        "starcoder2",  # an MLP without a gate
        "gemma2",  # norms after branches
        "cohere2",  # one norm for both branches
        "granite",  # branches that count less than what they are added to
        "gpt_oss",  # sinks, experts whose gates alternate, with biases
        "glm4_moe",  # an MLP beside the experts
        "afmoe",  # a gate behind attention
        "qwen3+images",  # the text of a multimodal model
    ),
    4: ("gpt_neox", "afmoe"),  # more ranks than key heads
}
Prompts = list[list[int]]


def parallel(**fields: Any) -> EngineConfig:
    return replace(CONFIG, tensor_parallel_size=dist.get_world_size(), **fields)


def prompts_of(rank: int) -> Prompts:
    """Of each rank fewer ones, and of the fourth none; some begin alike on all ranks."""
    return [[*SHARED, 20 + rank], [5, 6, 7 + rank], [5, 6, 7 + rank]][: 3 - rank]


def worst(batch: Any, model: Any) -> float:
    """The largest difference of a log-probability from the plain forward's."""
    found = [0.0]
    for output in batch:
        for c in output.completions:
            expected = oracle.logprobs(model, output.prompt_token_ids, c.token_ids)
            found.append(float((torch.tensor(c.logprobs).double() - expected).abs().max()))
    return max(found)


def assert_matches(engine: RolloutEngine, model: Any, prompts: Prompts | None = None) -> list[list[int]]:
    """What is sampled, and what is scored, against a whole model. Returns the completions' tokens."""
    prompts = prompts_of(dist.get_rank()) if prompts is None else prompts
    batch = engine.generate_batch(prompts, PARAMS)
    assert [output.prompt_token_ids for output in batch] == prompts
    assert worst(batch, model) < 1e-4
    completions = [c for output in batch for c in output.completions]
    for scores, c in zip(engine.score(batch), completions, strict=True):
        torch.testing.assert_close(scores.logprobs, torch.tensor(c.logprobs), rtol=0, atol=1e-5)
    return [c.token_ids for c in completions]


def all_free(engine: RolloutEngine) -> bool:
    stats = engine.stats()
    return stats.num_free_kv_blocks == stats.num_kv_blocks


def families(rank: int) -> None:
    """A step of training between two rollouts; each rank holds little more than its part."""
    size = dist.get_world_size()
    for family in FAMILIES[size]:
        with noted(family):
            model = make_model(family)
            with RolloutEngine(model, config=parallel()) as engine:
                assert_matches(engine, model)
                sharded.train(model, sharded.sgd(model), 1)
                assert engine.update_weights() == 1
                assert_matches(engine, model)
                assert engine.verify_weights().ok
                own, whole = engine.stats().mirror_bytes, sum(p.nbytes for p in model.parameters())
                assert 0 < own < 1.25 * whole / size


def as_alone(rank: int) -> None:
    """The same tokens as one rank samples, given all prompts: seeds, groups, penalties, patterns and all."""
    model = make_model("qwen3")
    everyones = [prompts_of(r) for r in range(dist.get_world_size())]
    variants = [
        SamplingParams(max_tokens=9, n=3, temperature=0.8, top_p=0.9, seed=4),
        SamplingParams(max_tokens=9, temperature=1.3, top_k=20, repetition_penalty=1.2, logprobs=3),
        SamplingParams(max_tokens=9, temperature=0, prompt_logprobs=2, min_tokens=9),
    ]
    config = replace(CONFIG, max_num_batched_tokens=16, max_num_seqs=3)  # prompts in pieces, requests that wait
    with RolloutEngine(model, config=config) as alone:
        expected = [alone.generate_batch([p for ps in everyones for p in ps], v) for v in variants]
    # Each rank has a seed of its own, and the first one's counts.
    config = replace(config, tensor_parallel_size=dist.get_world_size(), seed=rank)
    start = sum(map(len, everyones[:rank]))
    with RolloutEngine(model, config=config) as engine:
        for params, whole in zip(variants, expected, strict=True):
            batch = engine.generate_batch(everyones[rank], params)
            for output, other in zip(batch, list(whole)[start : start + len(everyones[rank])], strict=True):
                for c, theirs in zip(output.completions, other.completions, strict=True):
                    assert c.token_ids == theirs.token_ids
                    torch.testing.assert_close(c.logprobs, theirs.logprobs, rtol=0, atol=2e-5)
                assert (output.prompt_logprobs is None) == (params.prompt_logprobs is None)
        # Each rank has parameters of its own, one for each prompt.
        mine = [SamplingParams(max_tokens=1 + rank + row, seed=row) for row in range(len(everyones[rank]))]
        batch = engine.generate_batch(everyones[rank], mine)
        assert [len(o.completions[0].token_ids) for o in batch] == [p.max_tokens for p in mine]
        heard: list[tuple[int, int]] = []
        scores = engine.score(
            batch, temperature=0.5 + rank, on_scored=lambda row, s: heard.append((row, len(s.logprobs)))
        )
        assert heard == [(row, len(s.logprobs)) for row, s in enumerate(scores)]
        assert worst(batch, model) < 1e-4 and all_free(engine)


def follow_a_sharded_trainer(rank: int) -> None:
    """FSDP2's steps, weights from elsewhere, and sleep at every level; no KV of old weights, no weight that is out of date."""
    for family, wrap in {"qwen2": sharded.by_fsdp2, "phi3": sharded.by_fsdp1, "qwen3_moe": sharded.by_fsdp2}.items():
        with noted(family):
            twin, model = make_model(family), wrap(make_model(family))
            theirs, ours = sharded.sgd(twin), sharded.sgd(model)
            with RolloutEngine(model, config=parallel(gather_memory="64KiB")) as engine:
                assert_matches(engine, twin)
                for step, level in enumerate((1, 2, 3), 1):
                    sharded.train(twin, theirs, step)
                    sharded.train(model, ours, step)
                    assert engine.verify_weights().mismatched, "the engine lags behind until it is told"
                    with engine.sleeping(level):
                        pass
                    assert engine.update_weights() == step
                    assert_matches(engine, twin)
                    assert engine.verify_weights().ok
                cut = engine._binding.derived
                assert cut is not None
                name = sorted(cut.by_name)[rank]
                cut.by_name[name].made[0].view(-1)[0] += 1
                assert engine.verify_weights().mismatched == (name,), "each rank finds what is wrong in its own part"
                other = make_model(family, seed=7)
                assert engine.update_weights(dict(other.state_dict())) == 4
                assert_matches(engine, other)


def whole_trainers(rank: int, folder: str) -> None:
    """Weights that every rank has whole: as they are, in another dtype, changed without a word, replaced, and from a file."""
    model = make_model("llama")
    with RolloutEngine(model, config=parallel()) as engine:
        assert_matches(engine, model)
        with torch.no_grad():
            model.model.layers[0].self_attn.o_proj.weight.mul_(1.5)
            model.model.layers[1].mlp.up_proj.weight.mul_(0.5)
        assert_matches(engine, model)  # whoever trains the model may tell nobody
        assert engine.weight_version == 1
        model.load_state_dict({n: t.clone() for n, t in make_model("llama", seed=5).state_dict().items()}, assign=True)
        model.tie_weights()
        engine.update_weights()
        assert_matches(engine, model)
        other = make_model("llama", seed=6)
        for layer in (*model.model.layers, *other.model.layers):
            layer.self_attn.scaling *= 1.3
        assert_matches(engine, model)  # a setting of a module
        if rank == 0:
            other.save_pretrained(folder)
        dist.barrier()
        engine.update_weights(folder)
        assert_matches(engine, other)
        assert engine.verify_weights().ok and all_free(engine)
    with RolloutEngine(model, config=parallel(dtype="float64")) as engine:
        assert_matches(engine, model)
        sharded.train(model, sharded.sgd(model), 1)
        engine.update_weights()
        assert_matches(engine, model)
    model(input_ids=torch.tensor([SHARED]))  # the trainer's model is its own again


def from_a_folder(rank: int, folder: str) -> None:
    with RolloutEngine.from_pretrained(folder, config=parallel()) as engine:
        assert_matches(engine, make_model("qwen3"))
        assert engine.generate_batch([], PARAMS).outputs == []


# -- adapters ---------------------------------------------------------------------------------------------------------


def adapted(family: str, seed: int = 3, **options: Any) -> PeftModel:
    torch.manual_seed(seed)
    base = make_model(family)
    settings = {"r": 4, "lora_alpha": 9, "target_modules": "all-linear", "init_lora_weights": False} | options
    return get_peft_model(base, LoraConfig(**settings))


ADAPTERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3": {"use_rslora": True},  # over packed projections: rows of B that do not lie side by side
    "qwen2": {"bias": "all"},
    "gpt_neox": {"bias": "lora_only"},
    "qwen3": {"lora_bias": True},  # which one rank adds to a sum
    "starcoder2": {"target_modules": ["c_fc", "c_proj", "o_proj", "embed_tokens"]},
    "gpt_oss": {"target_modules": ["q_proj", "v_proj", "o_proj"], "rank_pattern": {"q_proj": 7}},
    "gemma4": {},  # with a projection beside the layers, which is whole
    "deepseek_v2": {"target_modules": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]},
}


def assert_of(output: Any, model: Any, adapter: Any) -> None:
    """Against a model, or its base where the adapter is None."""
    with model.disable_adapter() if adapter is None else nullcontext():
        assert worst([output], model) < 1e-4


def adapters(rank: int) -> None:
    """The live adapter, the bare base and a loaded one in a batch, before and after a step."""
    for family, options in ADAPTERS.items():
        with noted(family):
            targets = options.get("target_modules", "all-linear")
            model, other = adapted(family, **options), adapted(family, seed=8, r=3, target_modules=targets)
            with RolloutEngine(model, config=parallel()) as engine:
                engine.load_adapter("other", other if rank else (other, "default"))
                for step in range(2):
                    if step:
                        trained = [p for p in model.parameters() if p.requires_grad]
                        sharded.train(model, torch.optim.SGD(trained, lr=0.1), step)
                        engine.update_weights()
                        if any("lora" not in n for n, p in model.named_parameters() if p.requires_grad):
                            engine.unload_adapter("other")  # whose base has the biases of before
                            break
                    prompts = prompts_of(rank)
                    chosen = [(LIVE, None, "other")[(row + rank) % 3] for row in range(len(prompts))]
                    batch = engine.generate_batch(prompts, PARAMS, adapter=chosen)
                    for output, adapter in zip(batch, chosen, strict=True):
                        assert_of(output, other if adapter == "other" else model, adapter)
                assert_matches(engine, model)
                assert engine.verify_weights().ok


def sharded_adapters(rank: int) -> None:
    twin, model = adapted("phi3"), sharded.by_fsdp2(adapted("phi3"))
    theirs, ours = (torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (twin, model))
    with RolloutEngine(model, config=parallel()) as engine:
        assert_matches(engine, twin)
        sharded.train(twin, theirs, 1)
        sharded.train(model, ours, 1)
        engine.update_weights()
        assert_matches(engine, twin)


def take_little(rank: int) -> tuple[int, int, int, int]:
    """What making an engine on a sharded model takes at the most besides what it holds; that; its layers' and all weights."""
    keep_nothing()
    size = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    model = sharded.by_fsdp2(make_model("llama", **size))
    RolloutEngine(sharded.by_fsdp2(make_model("llama", **size | {"num_hidden_layers": 1})), config=parallel()).close()
    peak = Peak("cpu")
    engine = RolloutEngine(model, config=parallel(gather_memory="256KiB"))
    built, held = peak.extra(), engine.stats().mirror_bytes
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    peak = Peak("cpu")
    engine.update_weights()
    took = peak.extra()
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    return built - held, took, held, whole
