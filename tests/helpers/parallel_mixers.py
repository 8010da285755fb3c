"""Models whose layers have other mixers than plain attention, run by several ranks. Processes of ranks import it by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import families
import hybrids
import pytest
import torch
from families import draw
from hybrid_fields import HYBRIDS
from hybrids import assert_like_plain
from indexed_fields import INDEXED, KEPT
from ranks import noted
from sharded import by_fsdp2, train
from transformers import PreTrainedModel

from stoker.kernels.errors import UnsupportedModelError
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

CONFIG = EngineConfig(
    kv_cache_memory="4MiB",
    block_size=4,
    max_num_seqs=8,
    max_model_len=KEPT,
    max_num_batched_tokens=32,
    gather_memory=2**16,
)
PARAMS = SamplingParams(max_tokens=6, n=2, seed=3)

Case = tuple[str, dict[str, Any]]  # a family, and fields besides its own
_ONE_GROUP: dict[str, Any] = {"mamba_n_groups": 1}
_NORMED_FIRST: dict[str, Any] = {"mamba_rms_norm": True, "mamba_norm_before_gate": True}
OF_TWO: dict[str, tuple[Case, ...]] = {
    "delta nets": (("qwen3_next", {}), ("qwen3_5", {}), ("olmo_hybrid", {})),
    "latent attention": (("deepseek_v2", {}), ("deepseek_v3", {}), ("deepseek_v32", {})),
    "whole norms": (("olmo2", {}), ("olmoe", {})),
    "Mamba-2": (
        ("bamba", _ONE_GROUP),
        ("falcon_h1", _ONE_GROUP | _NORMED_FIRST),
        ("granitemoehybrid", {}),
        ("nemotron_h", {"use_bias": True}),
    ),
    "Mamba": (("jamba", {}), ("falcon_mamba", {})),
    "convolutions": (("lfm2", {}), ("lfm2_moe", {})),
    "dense experts": (("llama4", {}),),
    "inputs of layers": (("gemma4", {}),),
}
# They have two key heads; or two groups of B and C, and of heads that are normed together.
OF_FOUR: tuple[Case, ...] = (("qwen3_next", {}), ("olmo2", {}), ("bamba", {}))
LATER = ("kimi_linear", "bailing_hybrid")
SHARDED: tuple[Case, ...] = tuple((family, {}) for family in ("qwen3_next", "deepseek_v3", "falcon_h1", "llama4"))
_MOST = 1.2  # of a rank's even share of the weights: what heads have in common is whole on each


def make_model(family: str, **fields: Any) -> PreTrainedModel:
    if family in INDEXED:
        fields = {"max_position_embeddings": KEPT} | fields
    return (hybrids if family in HYBRIDS else families).make_model(family, **fields)


def follow(rank: int, size: int, cases: tuple[Case, ...], sharded: bool = False) -> None:
    """Before and after a training step, each engine is what a twin's plain forward is."""
    for family, fields in cases:
        with noted(f"{family} {fields}"):
            _follow(rank, size, family, fields, sharded)


def _follow(rank: int, size: int, family: str, fields: dict[str, Any], sharded: bool) -> None:
    twin, plain = make_model(family, **fields), make_model(family, **fields)
    model = by_fsdp2(plain) if sharded else plain
    theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin, model))
    with RolloutEngine(model, config=replace(CONFIG, tensor_parallel_size=size)) as engine:
        _check(engine, twin, rank)
        train(twin, theirs, 1)
        train(model, ours, 1)
        assert engine.verify_weights().mismatched
        assert engine.update_weights() == 1
        _check(engine, twin, rank)
        assert engine.verify_weights().ok
        if not sharded:
            copied = engine.stats().mirror_bytes / sum(p.nbytes for p in twin.parameters())
            assert copied < _MOST / size


def _check(engine: RolloutEngine, twin: PreTrainedModel, rank: int) -> None:
    """Ranks have other prompts, and not as many."""
    begin = draw(rank + 1, 23)
    first = engine.generate_batch([begin, draw(rank + 5, 5), draw(9, 1)][rank % 2 :], PARAMS)
    again = engine.generate_batch([begin, [*begin, 5, 6]][rank % 2 :], PARAMS)
    for batch in first, again:
        assert_like_plain(batch, twin, PARAMS)
    assert rank % 2 or sum(o.cached_tokens for o in again) > 0
    rows = [(o.prompt_token_ids, c) for o in again for c in o.completions]
    scores = engine.score([ids + c.token_ids for ids, c in rows], start=[len(ids) for ids, _ in rows])
    for score, (_, completion) in zip(scores, rows, strict=True):
        torch.testing.assert_close(score.logprobs, torch.tensor(completion.logprobs), rtol=0, atol=1e-4)


def refuse(rank: int) -> None:
    """Three ranks cannot share four heads with a state. The model then still runs on each of them."""
    fields = {"num_attention_heads": 3, "num_key_value_heads": 3}
    model, twin = (make_model("qwen3_5", **fields) for _ in range(2))
    with pytest.raises(UnsupportedModelError, match="heads with a state, 4, cannot be shared by 3 ranks"):
        RolloutEngine(model, config=replace(CONFIG, tensor_parallel_size=3))
    with RolloutEngine(model, config=CONFIG) as engine:
        _check(engine, twin, rank)
