"""Small engines for the tests of scoring, and the expected scores: of the plain forward and torch's own operations."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from families import make_model
from transformers import PreTrainedModel

from stoker.rollout import EngineConfig, RolloutEngine, TokenLogprobs

BLOCK = 4
EXACT = {"rtol": 0, "atol": 1e-4}


@cache
def model_of(family: str) -> PreTrainedModel:
    return make_model(family)


@torch.no_grad()
def plain(model: PreTrainedModel, ids: list[int], start: int, temperature: float = 1.0) -> torch.Tensor:
    """The whole log_softmax that each token from ``start`` on was drawn from, float64 [T - start, vocabulary]."""
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, start - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1)


def check(
    scores: TokenLogprobs, model: PreTrainedModel, ids: list[int], start: int, temperature: float = 1.0, top_k: int = 0
) -> None:
    """Everything ``scores`` says of ``ids[start:]``."""
    expected = plain(model, ids, start, temperature)
    targets = torch.tensor(ids[start:], dtype=torch.long)
    chosen = expected.gather(1, targets[:, None])
    assert scores.error is None
    assert torch.equal(scores.token_ids, targets)
    torch.testing.assert_close(scores.logprobs.double(), chosen[:, 0], **EXACT)
    # A rank may go either way where another token is as likely as the rounding tells.
    low, high = ((expected > chosen + d).sum(1) + 1 for d in (1e-5, -1e-5))
    assert ((scores.ranks >= low) & (scores.ranks <= high - 1)).all()
    if scores.entropy is not None:
        entropy = torch.distributions.Categorical(logits=expected).entropy()
        torch.testing.assert_close(scores.entropy.double(), entropy, **EXACT)
    if not top_k:
        assert scores.top_ids is None and scores.top_logprobs is None
        return
    values = expected.topk(top_k, dim=1).values
    assert scores.top_ids is not None and scores.top_logprobs is not None
    assert scores.top_ids.shape == values.shape
    torch.testing.assert_close(scores.top_logprobs.double(), values, **EXACT)
    torch.testing.assert_close(expected.gather(1, scores.top_ids), values, **EXACT)


@cache
def block_bytes(model: PreTrainedModel) -> int:
    with RolloutEngine(model, config=EngineConfig(block_size=BLOCK, kv_cache_memory="1MiB")) as probe:
        return probe.stats().kv_block_bytes


def engine_of(model: PreTrainedModel, *, blocks: int | None = None, **fields: object) -> RolloutEngine:
    """In chunks of 16 tokens and 5 rows of logits, unless told otherwise."""
    settings = {"block_size": BLOCK, "max_num_batched_tokens": 16, "score_chunk_tokens": 5} | fields
    memory = "1MiB" if blocks is None else blocks * block_bytes(model)
    return RolloutEngine(model, config=EngineConfig(kv_cache_memory=memory, **settings))


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[RolloutEngine]:
    with engine_of(model_of("qwen3"), max_num_seqs=8, max_model_len=64) as engine:
        yield engine


@pytest.fixture(name="engine")
def clean_engine(shared_engine: RolloutEngine) -> Iterator[RolloutEngine]:
    """With nothing in its prefix cache; all blocks have to be free when a test is over."""
    shared_engine.update_weights()
    yield shared_engine
    assert shared_engine.stats().num_free_kv_blocks == shared_engine.stats().num_kv_blocks
    shared_engine.core.scheduler.check()


def computed(engine: RolloutEngine, call: Callable[[], object]) -> int:
    """Tokens whose hidden states a call computes, padding aside."""
    tokens, fill = 0, engine.core.inputs.fill

    def counting(plan):
        nonlocal tokens
        tokens += sum(plan.num_new)
        return fill(plan)

    engine.core.inputs.fill = counting
    try:
        call()
    finally:
        del engine.core.inputs.fill
    return tokens
