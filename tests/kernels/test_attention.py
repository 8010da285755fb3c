"""Paged attention against one token at a time in float64."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_rows import FEATURES, LAYOUTS, SHAPES, TOLERANCE, Rows, Shape, naive, name, options_of
from torch import Tensor

from stoker.kernels.cpu import attention as cpu_attention
from stoker.kernels.ops import CPU, REFERENCE
from stoker.kernels.reference import attention_plan
from stoker.kernels.reference.attention import paged_attention, write_kv
from stoker.kernels.reference.attention_plan import Visibility


@pytest.mark.parametrize("small_pieces", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_query_sees_its_own_keys(
    layout: str, shape: Shape, small_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All options in one plan, as the layers of a model mix them."""
    if small_pieces:
        monkeypatch.setattr(attention_plan, "_MAX_QUERIES", 4)
    history, new = map(list, zip(*LAYOUTS[layout], strict=True))
    decode = set(new) == {1}
    rows = Rows(shape, history, new, num_steps=1, padded_rows=2)
    plan = rows.plan(20 if small_pieces else 8192)
    if small_pieces:
        assert len(plan.decodes) + len(plan.chunks) > 1 or layout == "one row"
    for feature in FEATURES:
        padding = rows.check(plan, 0, 2 if decode else 3, **options_of(feature, shape))
        if not decode:
            assert not padding.any()


WINDOW = 6


def layers_of(shape: Shape, seed: int, padded_rows: int) -> list[Rows]:
    """The keys of two layers, the same whatever rows are padded."""
    torch.manual_seed(seed)
    history, new = map(list, zip(*LAYOUTS["decode"], strict=True))
    layers = [Rows(shape, history, new, num_steps=WINDOW, padded_rows=padded_rows) for _ in range(2)]
    layers[1].take_blocks_of(layers[0])
    return layers


@functools.cache
def answers(shape: Shape, seed: int) -> list[list[tuple[list[Tensor], Tensor]]]:
    """Of each step and layer of a window, the queries and what they are to get, of every feature."""
    layers = layers_of(shape, seed, 0)

    def of(layer: Rows, step: int) -> tuple[list[Tensor], Tensor]:
        queries = [layer.queries(0) for _ in FEATURES]
        asked = zip(queries, FEATURES, strict=True)
        wanted = [layer.wanted(query, step, **options_of(feature, shape)) for query, feature in asked]
        return queries, torch.stack(wanted)

    return [[of(layer, step) for layer in layers] for step in range(WINDOW)]


@pytest.mark.parametrize("gather_tokens", [20, 8192])  # in five pieces, and at once
@pytest.mark.parametrize("padded_rows", [0, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=name)
@pytest.mark.parametrize("hold_bytes", [None, 0, 2500, 2**20])  # the reference; a CPU's: nothing, some of it, all of it
def test_a_decode_window_advances_in_place(
    shape: Shape, padded_rows: int, gather_tokens: int, hold_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers take turns, as in a model, and the next window in the memory of the one before."""
    monkeypatch.setattr(cpu_attention, "_HOLD_BYTES", hold_bytes or 0)
    ops = REFERENCE if hold_bytes is None else CPU
    workspace: dict[str, Any] = {}
    for seed in range(2):
        layers = layers_of(shape, seed, padded_rows)
        plan = layers[0].plan(gather_tokens, ops, workspace=workspace)
        for step, of_layers in enumerate(answers(shape, seed)):
            if step:
                layers[0].seq_lens.add_(1)
                plan.next_step()
            for layer, (queries, wanted) in zip(layers, of_layers, strict=True):
                if step:
                    for row, n in enumerate(layer.lengths):
                        layer.write(row, n + step - 1, n + step)
                found = []
                for query, feature in zip(queries, FEATURES, strict=True):
                    padded = torch.cat((query.transpose(0, 1), layer.numbers(padded_rows)), dim=1).transpose(0, 1)
                    found.append(layer.attend(padded, plan, ops, **options_of(feature, shape))[0])
                torch.testing.assert_close(torch.stack(found).double(), wanted, rtol=0, atol=TOLERANCE[shape.dtype])
        if ops is CPU and hold_bytes != 2500:
            assert bool(plan.held.parts) == bool(hold_bytes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["decode", "mixed"])
def test_half_precision(layout: str, dtype: torch.dtype) -> None:
    history, new = map(list, zip(*LAYOUTS[layout], strict=True))
    shape = replace(SHAPES[1], dtype=dtype)
    rows = Rows(shape, history, new, num_steps=1, padded_rows=0)
    plan = rows.plan()
    for feature in FEATURES:
        rows.check(plan, 0, 0, **options_of(feature, shape))


def test_one_plan_serves_layers_of_different_heads_and_dtypes() -> None:
    history, new = map(list, zip(*LAYOUTS["mixed"], strict=True))
    rows = Rows(SHAPES[1], history, new, num_steps=1, padded_rows=0)
    plan = rows.plan()
    for shape in (SHAPES[1], SHAPES[3], replace(SHAPES[1], dtype=torch.float16)):
        layer = Rows(shape, history, new, num_steps=1, padded_rows=0)
        layer.take_blocks_of(rows)
        layer.check(plan, 0, 0, **options_of({"visibility": Visibility(window=7)}, shape))


def test_what_is_longer_than_a_split_is_still_causal() -> None:
    """The split of the real size, with keys before it and a piece left over."""
    shape = Shape(kv_heads=1, group=1, key_dim=4, value_dim=4, block_size=16)
    count = 2 * attention_plan._MAX_QUERIES + 5
    rows = Rows(shape, [9], [count], num_steps=1, padded_rows=0)
    query = torch.randn(count, 1, 4)
    options = options_of({"visibility": Visibility(window=1500)}, shape)
    out = paged_attention(query, rows.key_cache, rows.value_cache, rows.plan(), **options)
    for token in (0, 1022, 1023, 1024, 1500, 2047, 2048, count - 1):
        wanted = naive(query[token], rows.keys[0], rows.values[0], 9 + token, **options)
        torch.testing.assert_close(out[token].double(), wanted, rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.parametrize("window", [None, 20])
def test_the_pieces_of_a_long_chunk_have_one_mask(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "_MAX_QUERIES", 8)
    shape = Shape(kv_heads=1, group=1, key_dim=4, value_dim=4, block_size=4)
    rows = Rows(shape, [30, 3], [67, 9], num_steps=1, padded_rows=0)
    plan = rows.plan()
    rows.check(plan, 0, 0, **options_of({"visibility": Visibility(window=window)}, shape))
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plan._masks.values() if t is not None}
    seen = [30 + 67, 3 + 9] if window is None else [window + shape.block_size] * 2
    assert sum(held.values()) <= sum(4 * 8 * (keys + 8) for keys in seen)


def test_keys_and_values_go_to_their_slots_and_nowhere_else() -> None:
    key_cache, value_cache = torch.zeros(3, 4, 2, 6), torch.zeros(3, 4, 2, 5)
    key, value = torch.randn(3, 2, 6), torch.randn(3, 2, 5)
    write_kv(key, value, key_cache, value_cache, torch.tensor([9, 0, 7]))
    for cache, new in ((key_cache, key), (value_cache, value)):
        assert torch.equal(torch.stack((cache[2, 1], cache[0, 0], cache[1, 3])), new)
        assert cache.ne(0).any(-1).any(-1).sum() == 3
