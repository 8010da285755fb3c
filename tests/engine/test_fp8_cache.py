"""A KV cache in 8 bits: the engine computes what a model does whose attention gets rounded keys and values.

The oracle is the plain Hugging Face forward with that rounding before its attention. A number on the border between two fp8
numbers may be rounded to either. What that changes is next to nothing compared with the rounding of all numbers.
"""

import pytest
import torch
from families import make_model
from hybrids import make_model as make_hybrid
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from stoker.kernels.errors import InvalidConfigError
from stoker.kernels.ops import ops_for
from stoker.kernels.reference.attention import write_kv
from stoker.kernels.reference.fp8 import FP8
from stoker.rollout import EngineConfig, RolloutBatch, RolloutEngine, SamplingParams

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 5, [2, 7, 1], [8, 2] * 11]
PARAMS = SamplingParams(n=3, max_tokens=20, seed=5, ignore_eos=True)


def config(**settings) -> EngineConfig:
    return EngineConfig(**{"kv_cache_memory": "4MiB", "max_model_len": 96, "kv_cache_dtype": "fp8"} | settings)


def _rounded(module, query, key, value, attention_mask, **options):
    key, value = (t.clamp(-448, 448).to(torch.float8_e4m3fn).to(t.dtype) for t in (key, value))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


AttentionInterface.register("rounded_keys", _rounded)
AttentionMaskInterface.register("rounded_keys", sdpa_mask)


@torch.no_grad()
def expected(model, batch: RolloutBatch) -> list[Tensor]:
    """The log-probability of each sampled token."""
    found = []
    for output in batch:
        for completion in output.completions:
            ids = torch.tensor([output.prompt_token_ids + completion.token_ids])
            logprobs = model(ids.to(model.device), use_cache=False).logits.float().log_softmax(-1)[0, :-1].cpu()
            found.append(logprobs.gather(1, ids[0, 1:, None])[-len(completion.token_ids) :, 0])
    return found


def sampled(batch: RolloutBatch) -> list[Tensor]:
    return [torch.tensor(c.logprobs) for output in batch for c in output.completions]


def apart(one: list[Tensor], other: list[Tensor]) -> float:
    return (torch.cat(one) - torch.cat(other)).abs().mean().item()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gemma4", "deepseek_v3", "qwen3_5", "falcon_h1"])
def test_the_plain_forward_with_rounded_keys_and_values(family, device):
    """Prompts of several chunks, groups, and scores, which read what the prefix cache has kept."""
    model = (make_hybrid(family) if family in ("qwen3_5", "falcon_h1") else make_model(family)).to(device)
    with RolloutEngine(model, config=config(max_num_batched_tokens=16, kv_cache_memory="16MiB")) as engine:
        batch = engine.generate_batch(PROMPTS, PARAMS)
        scored = [s.logprobs for s in engine.score(batch)]
    plain = expected(model, batch)
    model.set_attn_implementation("rounded_keys")
    rounded = expected(model, batch)
    rounding = apart(plain, rounded)
    assert rounding > 1e-3
    assert apart(sampled(batch), rounded) < 0.03 * rounding and apart(scored, rounded) < 0.03 * rounding


def test_a_block_takes_a_quarter_of_fp32():
    blocks = {}
    for kind in ("auto", "fp8"):
        with RolloutEngine(make_model("llama"), config=config(kv_cache_dtype=kind)) as engine:
            blocks[kind] = engine.stats().kv_block_bytes
    assert blocks["auto"] == 4 * blocks["fp8"]


def test_the_schedule_changes_nothing():
    """Alone, with copied blocks, preempted, through sleep, and with other tokens beside it."""
    model = make_model("qwen3")
    with RolloutEngine(model, config=config()) as engine:
        wanted = [c.token_ids for o in engine.generate_batch(PROMPTS, PARAMS) for c in o.completions]
        with engine.sleeping():
            pass
        again = [c.token_ids for p in PROMPTS for o in engine.generate_batch([p], PARAMS) for c in o.completions]
    room = 8 * 16 * 96  # bytes of 8 blocks, of which the longest request needs 4
    with RolloutEngine(model, config=config(kv_cache_memory=room, max_num_batched_tokens=9)) as engine:
        preempted = [c.token_ids for o in engine.generate_batch(PROMPTS, PARAMS) for c in o.completions]
        assert engine.stats().num_preemptions
    assert again == wanted and preempted == wanted


def test_what_is_beyond_the_largest_number_is_that_and_nan_stays():
    new = torch.tensor([1e4, -1e4, 448, 0.3, float("nan"), 0]).view(1, 1, 6)
    caches = [torch.zeros(2, 4, 1, 6).to(FP8) for _ in range(2)]
    write_kv(new, new, *caches, torch.tensor([5]))
    kept = caches[0][1, 1, 0].float()
    assert kept[:4].tolist() == [448, -448, 448, 0.3125] and kept[4].isnan() and kept[5] == 0


@pytest.mark.parametrize("wrong", ["fp16", "int8", None, 8, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(wrong):
    with pytest.raises(InvalidConfigError, match=r"kv_cache_dtype=.*: give 'auto' or 'fp8'"):
        EngineConfig(kv_cache_dtype=wrong)


def test_a_gpu_without_such_numbers_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(InvalidConfigError, match=r"needs a GPU of compute capability 8.9 or more, and cuda:0 has 8.0"):
        ops_for(torch.device("cuda:0"), kv_dtype=FP8)
