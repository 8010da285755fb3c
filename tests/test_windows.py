"""Engines whose layers with a window hold no more keys than they see: numbers of the plain forward, in less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import oracle
import pytest
import torch
from families import HYBRIDS, draw, make_model

from stoker.engine.block_layout import BlockLayout
from stoker.engine.device import CpuRuntime
from stoker.engine.kv_cache import KVCache, LayerShape, block_layout
from stoker.kernels.errors import InvalidConfigError, InvalidRequestError, UnsupportedModelError
from stoker.kernels.reference.attention_plan import Visibility
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams

WINDOW = Visibility(window=12)
FULL, SLIDING = (
    LayerShape(heads=2, key_dim=8, value_dim=8),
    LayerShape(heads=2, key_dim=8, value_dim=8, visibility=WINDOW),
)
WIDE = LayerShape(heads=4, key_dim=8, value_dim=8, visibility=WINDOW)
FULL_WIDE = LayerShape(heads=1, key_dim=32, value_dim=32)
FAMILIES = ["gemma3", "gpt_oss", "llama4", "cohere2", "gemma4", "gemma4+experts", "mistral", "starcoder2", "lfm3"]
# Of Gemma 4, where a layer that sees all keys keeps as much as two with a window (as E2B), and one of these as two of it (31B).
_FIELDS: dict[str, dict[str, Any]] = {
    "gemma4": {"global_head_dim": 32},
    "gemma4+experts": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
}


@cache
def model_of(family: str) -> Any:
    return make_model(family, **_FIELDS.get(family, {}))


def engine_of(family: str, blocks: int | None = None, device: str = "cpu", **fields: Any) -> RolloutEngine:
    """blocks: so much memory as so many blocks of all layers take."""
    model = model_of(family) if device == "cpu" else copy.deepcopy(model_of(family)).to(device)
    config = {"block_size": 4, "kv_cache_memory": "1MiB", "max_num_seqs": 8} | fields
    if blocks is not None:
        with RolloutEngine(model, config=EngineConfig(**config)) as probe:
            stats = probe.stats()
            config["kv_cache_memory"] = blocks * stats.kv_block_bytes + stats.recurrent_state_bytes
    return RolloutEngine(model, config=EngineConfig(**config))


@contextmanager
def poisoned(engine: RolloutEngine) -> Iterator[None]:
    """Before every step all memory that is free, and has no content, is NaN: who reads what was given up gives NaN."""
    plan = engine.core.scheduler.plan

    def poisoning() -> Any:
        empty = torch.tensor(engine.core.scheduler.tables.pool.empty_pages, device=engine.runtime.device)
        pages = engine._kv.num_blocks
        for kept in (kept for pair in engine._kv.layers for kept in pair if len(kept) % pages == 0 and len(empty)):
            kept.unflatten(0, (pages, -1)).index_fill_(0, empty, torch.nan)
        return plan()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine.core.scheduler), "plan", lambda _: poisoning())
        yield


def check(family: str, prompts: list[list[int]], batch: Any, temperature: float = 1.0) -> None:
    batch.raise_for_errors()
    for given, output in zip(prompts, batch, strict=True):
        for c in output.completions:
            wanted = oracle.logprobs(model_of(family), given, c.token_ids, temperature)
            torch.testing.assert_close(torch.tensor(c.logprobs).double(), wanted, rtol=0, atol=1e-4)


def check_on_poisoned_memory(family: str, blocks: int | None, device: str = "cpu") -> None:
    """Groups, prompts in chunks, preemption, cached prefixes, a next turn, scores; by captured steps too, where there are."""
    prompts = [draw(1, 45), draw(2, 3), draw(3, 20), draw(1, 45)[:30] + draw(4, 5)]
    params = SamplingParams(n=4, max_tokens=24, seed=0, ignore_eos=True)
    settings = {"max_num_batched_tokens": 16, "decode_window": 4}
    with engine_of(family, blocks, device, **settings) as engine, poisoned(engine):
        assert engine.core.scheduler.tables.windowed
        first = engine.generate_batch(prompts, params)
        check(family, prompts, first)
        turns = [given + output.completions[0].token_ids + [7, 8] for given, output in zip(prompts, first, strict=True)]
        second = engine.generate_batch(turns, SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
        check(family, turns, second)
        if blocks is None:
            # A state is kept at the end of the last full block of a prompt.
            ends = [
                (len(p) - 1) // 4 * 4 if family in HYBRIDS else len(t) - 7 for p, t in zip(prompts, turns, strict=True)
            ]
            assert all(output.cached_tokens >= end for end, output in zip(ends, second, strict=True))
        else:
            assert engine.stats().num_preemptions > 0
        for given, scores in zip(turns, engine.score(turns, start=2), strict=True):
            wanted = oracle.logprobs(model_of(family), given[:2], given[2:])
            torch.testing.assert_close(scores.logprobs.double(), wanted, rtol=0, atol=1e-4)
        engine.core.scheduler.check()
        assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks
        assert engine.core.runner.has_graphs == (device == "cuda")


@pytest.mark.parametrize("blocks", [None, 26])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_read_that_was_given_up(family: str, blocks: int | None) -> None:
    check_on_poisoned_memory(family, blocks)


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_a_long_sequence_holds_what_its_windows_see(family: str) -> None:
    """200 tokens, of which layers with a window hold 12 and what a block and a plan make of it."""
    most = 0
    with engine_of(family, block_size=4, max_model_len=200, decode_window=4, max_num_batched_tokens=16) as engine:
        scheduler = engine.core.scheduler
        plan: Callable[[], Any] = scheduler.plan

        def counting() -> Any:
            nonlocal most
            made = plan()
            most = max(most, *(sum(map(bool, r.window_ids)) for r in scheduler.running), 0)
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(scheduler), "plan", lambda _: counting())
            engine.generate_batch([draw(1, 100)], SamplingParams(max_tokens=100, ignore_eos=True)).raise_for_errors()
    assert 4 <= most <= 8  # ceil((12 + 16) / 4) and one in part


@pytest.mark.parametrize(("family", "blocks"), [("gemma3", 24), ("mistral", 18)])
def test_the_longest_sequence_that_fits_runs_and_no_longer_one_is_taken(family: str, blocks: int) -> None:
    """Alone, in memory that other sequences have left in pieces."""
    with engine_of(family, blocks, max_num_batched_tokens=16) as engine:
        others = [draw(seed, 9) for seed in range(12)]
        params = SamplingParams(max_tokens=11, ignore_eos=True)
        engine.generate_batch(others, params).raise_for_errors()
        room = engine._kv.most_tokens(16)
        assert blocks * 4 < room < 256, "more than blocks of all layers would hold"
        longest = SamplingParams(max_tokens=room - 50, ignore_eos=True, temperature=0)
        prompts = [*others, draw(5, 50)]
        check(family, prompts, engine.generate_batch(prompts, [*[params] * 12, longest]))
        with pytest.raises(InvalidRequestError, match=f"the KV cache holds {room}"):
            engine.generate_batch([draw(5, 51)], longest)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([SLIDING, FULL] * 3, (1, 1)),
        ([SLIDING] * 22 + [FULL] * 4, (1, 6)),
        ([FULL] * 5 + [SLIDING], (5, 1)),
        ([FULL] * 3, (1, 0)),
        ([SLIDING] * 3, (1, 3)),
        ([SLIDING], (1, 0)),
        ([SLIDING, WIDE], (1, 0)),
        ([FULL, LayerShape(heads=1, key_dim=16, value_dim=16, visibility=WINDOW)], (1, 1)),
        ([WIDE] * 2 + [FULL] * 3, (1, 1)),
        ([WIDE] * 7 + [FULL] * 3, (1, 4)),
        ([WIDE, *[FULL] * 5], (3, 1)),
        ([SLIDING] * 5 + [FULL_WIDE], (1, 3)),
        ([SLIDING] * 3 + [FULL_WIDE] * 4, (2, 1)),
        ([FULL_WIDE, LayerShape(heads=3, key_dim=8, value_dim=8, visibility=WINDOW)], (1, 0)),
        ([FULL_WIDE, LayerShape(heads=2, key_dim=8, value_dim=24, visibility=WINDOW)], (1, 0)),
        ([FULL_WIDE, *[SLIDING] * 3, FULL], (1, 0)),
        ([FULL, SLIDING, LayerShape(heads=2, key_dim=8, value_dim=8, same_as=1)], (1, 0)),
        ([FULL, SLIDING, LayerShape(heads=2, key_dim=8, value_dim=8, same_as=1, visibility=WINDOW)], (1, 1)),
    ],
)
def test_a_layer_has_memory_of_its_own_in_every_block(shapes: list[LayerShape], expected: tuple[int, int]) -> None:
    layout = block_layout(shapes, 4, 256)
    assert (layout.pages, layout.window_pages) == expected
    kv = KVCache(shapes, 4 * layout.span, 4, CpuRuntime(torch.device("cpu")), None, layout)
    assert kv.nbytes == 4 * layout.span * KVCache.block_bytes(shapes, 4, layout)
    # Two blocks, of either kind, written by every layer that keeps keys of its own: nobody's numbers are another's.
    whole, window = (layout.span, 2 * layout.span) if layout.window_pages else (1, 1)
    at = whole * layout.beside[0], window * layout.beside[1]
    own = [i for i, shape in enumerate(shapes) if shape.same_as is None]
    for i in own:
        for kept, number in zip(kv.layers[i], (i + 1, -i - 1), strict=True):
            kept[at[shapes[i].visibility == WINDOW]] = number
    for i in own:
        for kept, number in zip(kv.layers[i], (i + 1, -i - 1), strict=True):
            assert (kept[at[shapes[i].visibility == WINDOW]] == number).all()
            assert (kept[0] == 0).all()


def test_blocks_of_their_own_are_for_sequences_longer_than_the_window() -> None:
    shapes = [SLIDING, FULL] * 3
    assert block_layout(shapes, 4, 16) == BlockLayout() != block_layout(shapes, 4, 64)


def test_a_model_whose_windows_are_in_other_layers_does_not_take_another_s_place() -> None:
    wrapper: Any = torch.compile(model_of("gemma3"))
    with RolloutEngine(wrapper, config=EngineConfig(block_size=4, kv_cache_memory="1MiB")) as engine:
        wrapper._orig_mod = make_model("gemma3", seed=1)
        assert engine.update_weights() == 1
        wrapper._orig_mod = make_model("gemma3", layer_types=["full_attention", "sliding_attention", "full_attention"])
        with pytest.raises(UnsupportedModelError, match="another shape than the engine was built for"):
            engine.update_weights()


def test_memory_for_no_block_is_refused() -> None:
    model, config = model_of("gemma3"), {"block_size": 4, "max_model_len": 64, "max_num_batched_tokens": 16}
    with pytest.raises(InvalidConfigError, match=r"two blocks of 4 tokens take (\d+) bytes") as refused:
        RolloutEngine(model, config=EngineConfig(kv_cache_memory=1000, **config))
    least = int(str(refused.value).split(" take ")[1].split(" ")[0])
    with pytest.raises(InvalidConfigError, match="holds no block"):
        RolloutEngine(model, config=EngineConfig(kv_cache_memory=least - 1, **config))
    with RolloutEngine(model, config=EngineConfig(kv_cache_memory=least, **config)) as engine:
        engine.generate_batch([[1, 2]], SamplingParams(max_tokens=2)).raise_for_errors()
        with pytest.raises(InvalidRequestError, match="the KV cache holds 4"):
            engine.generate_batch([[1, 2, 3, 4]], SamplingParams(max_tokens=1))
