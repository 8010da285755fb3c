"""What each of two ranks does that run models together on one CUDA device, over Gloo. The processes import it by name."""

from __future__ import annotations

import copy

import oracle
import torch
from families import make_model
from ranks import noted

from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

FAMILIES = ("llama", "phi3", "gpt_neox", "gpt_oss", "qwen3_moe", "deepseek_v3", "olmo2", "qwen3")


def families(rank: int) -> None:
    """Greedy tokens are those of the CPU's forward, in fp32, before and after an update, and a sleep."""
    # Gloo waits on the host for every sum, which no graph can.
    config = EngineConfig(
        kv_cache_memory="8MiB", block_size=4, max_num_batched_tokens=16, use_graphs=False, tensor_parallel_size=2
    )
    prompts = [[7, 3, 99, 14, 5, 62, 8, 31, 4 + rank, 4, 90, 17], [5, 6, 7 + rank]]
    for family in FAMILIES:
        with noted(family):
            twin = make_model(family)
            with RolloutEngine(copy.deepcopy(twin).cuda(), config=config) as engine:
                for turn in range(2):
                    batch = engine.generate_batch(prompts, SamplingParams(temperature=0, max_tokens=12))
                    for output in batch:
                        (c,) = output.completions
                        assert c.token_ids == oracle.greedy(twin, output.prompt_token_ids, 12, c.token_ids)
                        expected = oracle.logprobs(twin, output.prompt_token_ids, c.token_ids)
                        torch.testing.assert_close(torch.tensor(c.logprobs).double(), expected, rtol=0, atol=1e-3)
                    if turn == 0:
                        with torch.no_grad():
                            for parameter in (*twin.parameters(), *engine.model.parameters()):
                                parameter.mul_(1.01)
                        engine.update_weights()
                        with engine.sleeping(2):
                            pass
                assert engine.verify_weights().ok
