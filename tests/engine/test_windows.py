"""Engines whose layers with a window keep only the keys they see: the plain forward's numbers, in less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import draw, make_model
from windowed import FAMILIES, check, check_on_poisoned_memory, engine_of, model_of

from stoker.engine.cache.block_layout import BlockLayout
from stoker.engine.cache.kv_cache import KVCache, LayerShape, block_layout
from stoker.engine.device import CpuRuntime
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


@pytest.mark.parametrize(
    ("family", "blocks"),
    # In much memory, one whose windows are chunks, one with states, and pages of either size.
    [*((family, 26) for family in FAMILIES), *((f, None) for f in ("gemma3", "llama4", "lfm3", "gemma4+experts"))],
)
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
