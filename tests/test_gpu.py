"""The same engine on a CUDA device, eager: tokens, log-probabilities, and memory that comes back."""

from __future__ import annotations

import oracle
import pytest
import torch
from families import FAMILIES, VOCAB, make_model

from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

pytestmark = pytest.mark.gpu

NEW_TOKENS = 24
# bf16 rounds each of a few dozen matmuls to 8 bits; the oracle is the fp32 forward of the same (rounded) weights.
BF16_LOGPROB_TOLERANCE = 0.25


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in (1, 5, 17, 33, 40, 8)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_in_fp32_are_those_of_the_cpu_oracle(family: str) -> None:
    model = make_model(family)
    expected = [oracle.greedy(model, prompt, NEW_TOKENS) for prompt in prompts()]
    config = EngineConfig(block_size=4, max_num_batched_tokens=16, kv_cache_memory="8MiB")
    with RolloutEngine(model.cuda(), config=config) as engine:
        batch = engine.generate_batch(prompts(), SamplingParams(temperature=0, max_tokens=NEW_TOKENS))
    assert [output.completions[0].token_ids for output in batch] == expected


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
