"""Logits of many given tokens never exist together."""

from collections.abc import Callable

import pytest
import torch
from families import make_model
from torch.profiler import ProfilerActivity, profile

from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams


def peak_bytes(call: Callable[[], object]) -> int:
    """The most host memory that tensors made during the call held at one time, those inside of operations included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    held = peak = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def texts(count: int, length: int, vocab: int) -> torch.Tensor:
    return torch.randint(1, vocab, (count, length), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize(("family", "chunks"), [("qwen3", 1), ("gemma2", 2)])
def test_at_the_peak_there_are_the_logits_of_a_chunk(family, chunks):
    """Or two of them while the model's class scales or caps one; a sixteenth of all logits of the larger batch."""
    vocab, chunk = 16384, 64
    logits = 4 * vocab * chunk
    config = EngineConfig(max_num_batched_tokens=256, score_chunk_tokens=chunk, kv_cache_memory="4MiB")
    with RolloutEngine(make_model(family, vocab_size=vocab), config=config) as engine:
        prompts = texts(2, 100, vocab)
        for call in (
            lambda: engine.score(texts(2, 128, vocab)),
            lambda: engine.score(texts(8, 128, vocab), temperature=0.7, top_k=4, entropy=True),
            lambda: engine.generate_batch(prompts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2)),
        ):
            engine.score([[1, 2]])
            peak = peak_bytes(call)
            assert chunks * logits < peak < (chunks + 0.3) * logits


@pytest.mark.gpu
def test_a_large_batch_holds_the_logits_of_a_chunk():
    """512 sequences of 4096 tokens over 152,064 words are 638 GB of logits in bf16."""
    vocab, chunk = 152_064, 512
    model = make_model("qwen3", vocab_size=vocab, num_hidden_layers=2, max_position_embeddings=4096)
    config = EngineConfig(kv_cache_memory="64MiB", score_chunk_tokens=chunk)
    with RolloutEngine(model.to(torch.bfloat16).cuda(), config=config) as engine:
        engine.score(texts(2, 4096, vocab), top_k=4, entropy=True)  # what is allocated once
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        scores = engine.score(texts(512, 4096, vocab), top_k=4, entropy=True)
        peak = torch.cuda.max_memory_allocated() - before
    logits = 2 * vocab * chunk
    assert logits < peak < 1.5 * logits
    assert len(scores) == 512 and all(s.error is None and s.logprobs.shape == (4095,) for s in scores)
