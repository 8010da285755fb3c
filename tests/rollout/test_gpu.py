"""The same engine on a CUDA device: tokens, log-probabilities, captured steps, and memory that comes back."""

from __future__ import annotations

import copy
import re
from typing import Any

import oracle
import pytest
import ranks
import together_gpu
import torch
import vision
import windowed
from families import make_model
from family_fields import FAMILIES, VOCAB
from tokenizer_kinds import tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stoker.engine.graphs import GraphStep
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

pytestmark = pytest.mark.gpu

NEW_TOKENS = 24
# bf16 rounds each of a few dozen matmuls to 8 bits; the oracle is the fp32 forward of the same (rounded) weights.
BF16_LOGPROB_TOLERANCE = 0.25


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in (1, 5, 17, 33, 40, 8)]


@pytest.mark.parametrize(
    "family",
    [
        *FAMILIES,
        "deepseek_v32",
        "qwen3_5",
        "bamba",
        "falcon_h1",
        "nemotron_h",
        "lfm2",
        "lfm3",
        "qwen3_5_moe",
        "lfm2_moe",
        "granitemoehybrid",
    ],
)
def test_greedy_tokens_in_fp32_are_those_of_the_cpu_oracle(family: str) -> None:
    model = make_model(family)
    expected = [oracle.greedy(model, prompt, NEW_TOKENS) for prompt in prompts()]
    config = EngineConfig(block_size=4, max_num_batched_tokens=16, max_num_seqs=8, kv_cache_memory="8MiB")
    with RolloutEngine(model.cuda(), config=config) as engine:
        batch = engine.generate_batch(prompts(), SamplingParams(temperature=0, max_tokens=NEW_TOKENS))
    assert [output.completions[0].token_ids for output in batch] == expected


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava", "gemma3"])
def test_images_in_fp32_are_what_they_are_to_the_cpu_oracle(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.backends.cudnn, "allow_tf32", False
    )  # of convolutions over patches, which it is by default
    model = vision.make_model(kind)
    layouts = [(5, (2, 3), 4, (1, 2), 6), ((2, 2), 7), (9, (3, 4), 2)]
    given = [*(vision.make_prompt(kind, layout) for layout in layouts), [3, 4, 5]]
    placeholders = [vision.IMAGE, vision.VIDEO]
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, suppress_token_ids=placeholders)
    tokens = 64 if kind == "gemma3" else 16  # whose images are computed whole
    config = EngineConfig(block_size=4, max_num_batched_tokens=tokens, max_num_seqs=8, kv_cache_memory="8MiB")
    with RolloutEngine(copy.deepcopy(model).cuda(), config=config) as engine:
        for _ in range(2):  # replayed, the second time
            batch = engine.generate_batch(given, greedy)
            for prompt, output in zip(given, batch, strict=True):
                (completion,) = output.completions
                expected = vision.logprobs(model, prompt, completion.token_ids)
                torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-3)
        assert engine.core.runner.has_graphs


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_layers_are_fused_where_a_trainer_multiplies_in_tf32(family: str) -> None:
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32"
    try:
        with RolloutEngine(make_model(family).cuda(), config=EngineConfig(kv_cache_memory="8MiB")) as engine:
            stats = engine.stats()
            assert stats.fused_layers == stats.num_layers
            assert settings.fp32_precision == "tf32"
    finally:  # pytest's monkeypatch deletes what is no entry of an object's __dict__, and what follows would be in tf32
        settings.fp32_precision = before


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "qwen3_moe"])
def test_bf16_logprobs_are_near_the_fp32_forward(family: str) -> None:
    model = make_model(family).bfloat16().cuda()
    with RolloutEngine(model, config=EngineConfig(kv_cache_memory="8MiB")) as engine:
        batch = engine.generate_batch(prompts(), SamplingParams(seed=1, max_tokens=NEW_TOKENS))
    reference = model.float().cpu()
    for output in batch:
        completion = output.completions[0]
        expected = oracle.logprobs(reference, output.prompt_token_ids, completion.token_ids)
        difference = (torch.tensor(completion.logprobs) - torch.tensor(expected)).abs()
        assert difference.mean() < BF16_LOGPROB_TOLERANCE


def test_sampled_tokens_are_the_same_alone_and_among_neighbours() -> None:
    model = make_model("qwen3").cuda()
    params = [SamplingParams(seed=i, max_tokens=NEW_TOKENS) for i in range(6)]
    with RolloutEngine(model, config=EngineConfig(kv_cache_memory="8MiB")) as engine:
        together = engine.generate_batch(prompts(), params)
        alone = [engine.generate_batch([p], s)[0] for p, s in zip(prompts(), params, strict=True)]
    assert [o.completions[0].token_ids for o in together] == [o.completions[0].token_ids for o in alone]


def test_patterns_are_followed_inside_captured_steps() -> None:
    """New ones under the graphs that are there, and beside rows without."""
    one = tokenizer("byte-level")
    model = make_model("llama", vocab_size=len(one))
    patterns = [
        "yes|no",
        r"\w{3,9}",
        None,
        r"<answer>\n[^<]{1,20}</answer>",
        "(?i)(the|cat){2,5}",
        "[ab]{4,8}",
        None,
        r"\d+",
    ]
    params = [SamplingParams(regex=pattern, temperature=0, max_tokens=NEW_TOKENS) for pattern in patterns]
    config = EngineConfig(kv_cache_memory="8MiB", max_num_seqs=4)
    found = []
    for device in ("cpu", "cuda"):
        with RolloutEngine(copy.deepcopy(model).to(device), config=config, tokenizer=one) as engine:
            batches = [engine.generate_batch([[5, 6, 7]] * 4, params[at : at + 4]) for at in (0, 4, 0)]
            found.append([[o.completions[0].token_ids for o in batch] for batch in batches])
            for batch, at in zip(batches, (0, 4, 0), strict=True):
                for output, pattern in zip(batch, patterns[at:], strict=False):
                    (completion,) = output.completions
                    if pattern is not None and completion.finish_reason == "stop":
                        assert re.fullmatch(pattern, completion.text)
    assert found[0] == found[1]


@pytest.mark.alone
def test_sleep_gives_device_memory_back() -> None:
    model = make_model("llama").cuda()
    with RolloutEngine(model, config=EngineConfig(kv_cache_memory="1GiB")) as engine:
        before = engine.generate_batch(prompts(), SamplingParams(temperature=0))
        torch.cuda.synchronize()
        awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] - awake >= 2**30 - 2**21  # less at most a page of the allocator
        engine.wake_up()
        after = engine.generate_batch(prompts(), SamplingParams(temperature=0))
    assert [o.completions[0].token_ids for o in before] == [o.completions[0].token_ids for o in after]


def mixed() -> list[SamplingParams]:
    """Every way of sampling, in lengths that differ."""
    kinds = (
        {},
        {"temperature": 0},
        {"top_k": 7, "top_p": 0.9},
        {"repetition_penalty": 1.2},
        {"min_tokens": 4},
        {"logprobs": 2},
    )
    return [SamplingParams(seed=i, max_tokens=9 + 5 * i, n=2, **kind) for i, kind in enumerate(kinds)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_5", "bamba", "lfm2"]
)
def test_captured_steps_give_the_bits_of_eager_ones(family: str, dtype: torch.dtype) -> None:
    found = []
    for use_graphs in (False, True):
        config = EngineConfig(kv_cache_memory="8MiB", use_graphs=use_graphs, decode_window=4)
        with RolloutEngine(make_model(family).to(dtype).cuda(), config=config) as engine:
            for _ in range(2):  # the second time all steps are replayed
                batch = engine.generate_batch(prompts(), mixed())
                batch.raise_for_errors()
                engine.update_weights()
            found.append([[(c.token_ids, c.logprobs, c.finish_reason) for c in o.completions] for o in batch])
            if use_graphs:
                assert isinstance(engine.core.runner, GraphStep)
                assert engine.core.runner._graphs and all(engine.core.runner._graphs.values()), "a capture failed"
    assert found[0] == found[1]


@pytest.mark.parametrize("blocks", [None, 26])
@pytest.mark.parametrize("family", windowed.FAMILIES)
def test_captured_steps_read_nothing_that_a_window_has_given_up(family: str, blocks: int | None) -> None:
    windowed.check_on_poisoned_memory(family, blocks, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "lfm2", "bamba", "qwen3_moe", "qwen3_5_moe"])
def test_deterministic_bits_do_not_depend_on_the_batch(family: str, dtype: torch.dtype) -> None:
    config = EngineConfig(kv_cache_memory="64MiB", deterministic=True, max_num_batched_tokens=24)
    with RolloutEngine(make_model(family).to(dtype).cuda(), config=config) as engine:
        crowd = prompts() * 11
        params = [SamplingParams(seed=i, max_tokens=NEW_TOKENS) for i in range(len(crowd))]

        def bits(prompts: list[list[int]], params: list[SamplingParams]) -> list[object]:
            batch = engine.generate_batch(prompts, params)
            return [(o.completions[0].token_ids, o.completions[0].logprobs) for o in batch]

        together = bits(crowd, params)
        assert bits(crowd, params) == together, "from the prefix cache"
        engine.update_weights()
        for i in (0, 5, 40):
            assert bits(crowd[i : i + 1], params[i : i + 1]) == together[i : i + 1]
        ids = [p + tokens for p, (tokens, _) in zip(crowd, together, strict=True)]  # type: ignore[misc]
        scored = engine.score(ids, start=[len(p) for p in crowd])
        assert [s.logprobs.tolist() for s in scored] == [logprobs for _, logprobs in together]  # type: ignore[misc]


def test_a_rollout_waits_for_the_device_only_where_it_reads_results() -> None:
    with RolloutEngine(make_model("llama").cuda(), config=EngineConfig(kv_cache_memory="8MiB")) as engine:
        params = SamplingParams(seed=1, max_tokens=40, ignore_eos=True)
        engine.generate_batch(prompts(), params)
        engine.update_weights()
        handles = [engine.submit(p, params) for p in prompts()]
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine.wait(handles)
        finally:
            torch.cuda.set_sync_debug_mode("default")


class _Uploads(TorchDispatchMode):
    """How many operations give the device something of the host's, and whether each copies pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor) and not a.is_cuda]
        given = [t for t in tensors if t.dim() and t.numel()]  # a number travels with the launch
        if any(isinstance(o, torch.Tensor) and o.is_cuda for o in tree_leaves(out)):
            self.pinned += [a.is_pinned() for a in given]
        return out


def test_a_plan_of_decode_steps_is_sent_in_one_copy_and_new_blocks_in_another() -> None:
    config = EngineConfig(kv_cache_memory="8MiB", block_size=16, decode_window=4)
    with RolloutEngine(make_model("llama").cuda(), config=config) as engine:
        fill, found = engine.core.inputs.fill, []

        def counted(plan: Any) -> Any:
            with _Uploads() as uploads:
                batch = fill(plan)
            if batch.decode:
                found.append(len(uploads.pinned))
                assert all(uploads.pinned)
            return batch

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.core.inputs, "fill", counted)
            engine.generate_batch(prompts(), SamplingParams(seed=1, max_tokens=40, ignore_eos=True)).raise_for_errors()
    assert set(found) == {1, 2}


@pytest.mark.alone
def test_device_memory_does_not_grow_with_rollouts() -> None:
    with RolloutEngine(make_model("llama").cuda(), config=EngineConfig(kv_cache_memory="64MiB")) as engine:
        held = []
        for _ in range(40):
            engine.generate_batch(prompts(), mixed())
            engine.update_weights()
            torch.cuda.synchronize()
            held.append((torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]))
    assert len(set(held[10:])) == 1


@pytest.mark.alone
def test_graphs_give_all_of_their_memory_back() -> None:
    model, free = make_model("llama").cuda(), []
    for use_graphs in (False, True):
        with RolloutEngine(model, config=EngineConfig(kv_cache_memory="8MiB", use_graphs=use_graphs)) as engine:
            for _ in range(2):
                engine.generate_batch(prompts(), mixed())
                engine.update_weights()
            engine.sleep(level=2)
            free.append(torch.cuda.mem_get_info()[0])
    assert free[0] - free[1] < 2**24, "half of what cuBLAS takes for one stream"


def test_steps_are_captured_anew_for_an_adapter_of_a_higher_rank() -> None:
    """No graph is left when that begins."""
    pytest.importorskip("peft", reason="PEFT is not installed")
    from adapted import peft_model

    seen: list[set[object]] = []
    params, other = SamplingParams(seed=1, max_tokens=NEW_TOKENS), peft_model(r=16)
    with RolloutEngine(peft_model(r=4).cuda(), config=EngineConfig(kv_cache_memory="8MiB")) as engine:
        engine.load_adapter("other", other)
        for adapter in ("default", "other"):
            for _ in range(2):
                engine.generate_batch(prompts(), params, adapter=adapter).raise_for_errors()
            graphs = engine.core.runner._graphs  # type: ignore[attr-defined]
            assert graphs and all(graphs.values()), "a capture failed"
            seen.append(set(graphs))
    assert not seen[0] & seen[1]


def test_a_trainer_captures_graphs_of_its_own_after_the_engine_did() -> None:
    """Outside of inference mode, with random numbers and a matmul in it."""
    model = make_model("llama").cuda()
    with RolloutEngine(model, config=EngineConfig(kv_cache_memory="8MiB")) as engine:
        params = SamplingParams(seed=1, max_tokens=NEW_TOKENS)
        before = [o.completions[0].token_ids for o in engine.generate_batch(prompts(), params)]
        assert engine.core.runner._graphs  # type: ignore[attr-defined]
        x, weight, graph = torch.ones(64, 64, device="cuda"), torch.eye(64, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = torch.rand_like(x) @ weight
        graph.replay()
        first = out.clone()
        assert [o.completions[0].token_ids for o in engine.generate_batch(prompts(), params)] == before
        graph.replay()
        assert out.min() >= 0 and out.max() < 1 and not torch.equal(out, first)


@pytest.mark.alone
def test_the_cache_comes_back_where_it_was_and_graphs_still_hold() -> None:
    with RolloutEngine(make_model("llama").cuda(), config=EngineConfig(kv_cache_memory="1GiB")) as engine:
        assert engine._kv.stable_addresses, "cuda.bindings.driver is there, and this device has virtual memory"
        params = [SamplingParams(seed=i, max_tokens=NEW_TOKENS) for i in range(6)]
        before = [o.completions[0].token_ids for o in engine.generate_batch(prompts(), params)]
        places = [t.data_ptr() for pair in engine._kv.layers for t in pair]
        graphs = dict(engine.core.runner._graphs)  # type: ignore[attr-defined]
        assert graphs
        free = []
        for _ in range(100):
            engine.sleep()
            free.append(torch.cuda.mem_get_info()[0])
            engine.wake_up()
            assert [t.data_ptr() for pair in engine._kv.layers for t in pair] == places
            for pair in engine._kv.layers:
                for cache in pair:
                    cache[1:].fill_(float("nan"))  # whatever a page that was mapped anew may hold
            assert [o.completions[0].token_ids for o in engine.generate_batch(prompts(), params)] == before
        assert engine.core.runner._graphs == graphs, "nothing was captured again"  # type: ignore[attr-defined]
        assert max(free[10:]) - min(free[10:]) <= 2**21, "memory drifts"
        engine.sleep(level=2)
        assert not engine.core.runner._graphs  # type: ignore[attr-defined]


def test_two_ranks_run_one_model_on_one_device() -> None:
    ranks.run(together_gpu.families, 2, timeout=120.0)
