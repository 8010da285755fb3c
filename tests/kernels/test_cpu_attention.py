"""A CPU's own attention against the reference: rows that begin alike are read once, and nothing else changes."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from paged_rows import FEATURES, LAYOUTS, SHAPES, Rows, Shape, name, options_of

from stoker.kernels.cpu import attention as cpu_attention
from stoker.kernels.ops import CPU, REFERENCE, Ops
from stoker.kernels.reference import attention_plan
from stoker.kernels.reference.attention_plan import Visibility

HEADS, KV_HEADS, DIM = 4, 2, 16


def make_step(block_size: int, groups: list[tuple[int, int, list[int]]], padded: int, seed: int = 0):
    """groups: (samples, shared blocks, keys of each sample); unwritten slots hold NaN. Rows are dealt in turn."""
    generator = torch.Generator().manual_seed(seed)
    rows = [(number, keys) for number, (_, _, lens) in enumerate(groups) for keys in lens]
    rows = [rows[i] for i in torch.randperm(len(rows), generator=generator)]
    steps = 3
    columns = max(-(-(keys + steps) // block_size) for _, keys in rows)
    free = iter(range(1, 4000))
    shared = {number: [next(free) for _ in range(blocks)] for number, (_, blocks, _) in enumerate(groups)}
    tables = torch.zeros(len(rows) + padded, columns, dtype=torch.long)
    for row, (number, keys) in enumerate(rows):
        own = -(-(keys + steps) // block_size) - len(shared[number])
        ids = shared[number] + [next(free) for _ in range(own)]
        tables[row, : len(ids)] = torch.tensor(ids)
    caches = [torch.full((4000, block_size, KV_HEADS, DIM), math.nan) for _ in range(2)]
    for cache in caches:
        cache[0] = 0.0
        for row, (_, keys) in enumerate(rows):
            for at in range(keys + steps):  # the keys that later steps see are there already
                cache[tables[row, at // block_size], at % block_size] = torch.randn(KV_HEADS, DIM, generator=generator)
    key_lens = [keys for _, keys in rows]
    return key_lens, tables, torch.tensor(key_lens + [1] * padded), caches, steps


def plans(key_lens, tables, seq_lens, block_size, steps):
    arguments = {
        "block_size": block_size,
        "token_bytes": 2**20,
        "num_steps": steps,
    }  # so large that groups are looked for
    ones = [1] * len(key_lens)
    return [ops.plan_attention(ones, key_lens, tables, seq_lens, **arguments) for ops in (CPU, REFERENCE)]


def take(ways: str, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Attend in products, or not, or by torch's own attention, whatever is faster; returns what was asked."""
    least, most = {"products": (0, 1 << 20), "torch": (1 << 20, 0)}[ways]
    monkeypatch.setattr(cpu_attention, "_LEAST_MATRICES", {False: least, True: least})
    monkeypatch.setattr(cpu_attention, "_FEW_KEYS", {False: most, True: most})
    asked: list[bool] = []
    ask = cpu_attention._in_products
    monkeypatch.setattr(cpu_attention, "_in_products", lambda *tensors: asked.append(ask(*tensors)) or asked[-1])
    return asked


@pytest.mark.parametrize("ways", ["products", "torch"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(
    "groups",
    [
        [(4, 3, [50, 61, 49, 70]), (4, 2, [49, 50, 51, 60])],
        [(4, 3, [49, 49, 49, 49]), (3, 1, [49, 90, 55])],
        [(8, 3, [50 + i for i in range(8)])],
        [(5, 3, [50, 64, 65, 66, 49]), (4, 3, [52, 53, 54, 55]), (4, 2, [50, 60, 70, 80])],
    ],
)
@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("hold_bytes", [0, 2**30])
def test_shared_beginnings_change_nothing(block_size, groups, padded, hold_bytes, ways, monkeypatch):
    monkeypatch.setattr(cpu_attention, "_HOLD_BYTES", hold_bytes)
    asked = take(ways, monkeypatch)
    key_lens, tables, seq_lens, (key, value), steps = make_step(block_size, groups, padded)
    mine, reference = plans(key_lens, tables, seq_lens, block_size, steps)
    if block_size == 16:
        assert mine.shared is not None, "the rows' common beginnings were not found"
    for step in range(steps):
        if step:
            seq_lens[: len(key_lens)].add_(1)
            mine.next_step()
            reference.next_step()
        query = torch.randn(len(tables), HEADS, DIM, generator=torch.Generator().manual_seed(step))
        options = {"scale": 0.3, "visibility": Visibility()}
        found = CPU.paged_attention(query, key, value, mine, **options)
        expected = REFERENCE.paged_attention(query, key, value, reference, **options)
        torch.testing.assert_close(found[: len(key_lens)], expected[: len(key_lens)], rtol=1e-5, atol=1e-6)
        assert found.isfinite().all()
    assert bool(mine.held.parts) == (hold_bytes > 0 and (mine.shared is not None or bool(mine.plain.decodes)))
    assert asked and set(asked) == {ways == "products"}


@pytest.mark.parametrize("ways", ["products", "torch"])
@pytest.mark.parametrize("shape", SHAPES, ids=name)
@pytest.mark.parametrize("padded_rows", [0, 2])
def test_rows_alone_by_products_and_by_torch(
    shape: Shape, padded_rows: int, ways: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a decode window, with and without windows, softcaps and sinks, which go the way of the reference."""
    asked = take(ways, monkeypatch)
    history, new = map(list, zip(*LAYOUTS["decode"], strict=True))
    rows = Rows(shape, history, new, num_steps=4, padded_rows=padded_rows)
    plan = rows.plan(ops=CPU)
    for step in range(4):
        if step:
            rows.seq_lens.add_(1)
            plan.next_step()
            for row, n in enumerate(rows.lengths):
                rows.write(row, n + step - 1, n + step)
        for feature in FEATURES:
            rows.check(plan, step, padded_rows, CPU, **options_of(feature, shape))
    assert asked and set(asked) == {ways == "products"}


def test_in_16_bits_scores_are_not_rounded() -> None:
    query, key = torch.randn(64, 2, 4, 16), torch.randn(64, 2, 32, 16)
    assert cpu_attention._in_products(query, key)
    assert not cpu_attention._in_products(query.bfloat16(), key.bfloat16())


@pytest.mark.parametrize(
    ("options", "sinks"),
    [({"visibility": Visibility(window=20)}, False), ({"visibility": Visibility(), "softcap": 2.0}, False), ({}, True)],
)
def test_what_does_not_fit_goes_the_way_of_the_reference(options, sinks):
    key_lens, tables, seq_lens, (key, value), steps = make_step(16, [(4, 3, [50, 61, 49, 70])], 0)
    mine, reference = plans(key_lens, tables, seq_lens, 16, steps)
    assert mine.shared is not None
    options = {"scale": 0.3, "visibility": Visibility(), "sinks": torch.ones(HEADS) if sinks else None} | options
    query = torch.randn(len(tables), HEADS, DIM)
    found = CPU.paged_attention(query, key, value, mine, **options)
    assert torch.equal(found, REFERENCE.paged_attention(query, key, value, reference, **options))


def test_rows_with_little_in_common_are_not_grouped():
    apart = [(1, 0, [50]), (1, 0, [60]), (1, 0, [70])]
    barely = [(2, 1, [300, 300]), (2, 1, [300, 300])]
    uneven = [(6, 3, [50] * 6), (1, 0, [50]), (1, 0, [50]), (1, 0, [50])]
    short = [(4, 0, [1, 1, 1, 1])]
    for groups in (apart, barely, uneven, short):
        key_lens, tables, seq_lens, _, steps = make_step(16, groups, 1)
        assert plans(key_lens, tables, seq_lens, 16, steps)[0].shared is None


def test_the_next_window_gathers_into_the_memory_of_the_last(monkeypatch):
    monkeypatch.setattr(cpu_attention, "_HOLD_BYTES", 200_000)  # of one window, not of two
    workspace, addresses = {}, set()
    for seed in range(3):
        key_lens, tables, seq_lens, (key, value), steps = make_step(16, [(4, 3, [50, 61, 49, 70])], 0, seed)
        options = {"block_size": 16, "token_bytes": 2**20, "num_steps": steps, "workspace": workspace}
        plan = CPU.plan_attention([1] * 4, key_lens, tables, seq_lens, **options)
        CPU.paged_attention(torch.randn(4, HEADS, DIM), key, value, plan, scale=0.3, visibility=Visibility())
        assert plan.shared is not None and len(plan.held.parts) == 2
        addresses.add(tuple(t.data_ptr() for pair in plan.held.parts.values() for t in pair))
    assert len(addresses) == 1
    room = weakref.ref(workspace["room"]._bytes)
    del plan
    workspace.clear()
    assert room() is None


# Tokens of a step that see each other both ways, by the layout of its rows: whole rows, at their ends and within, side by side
# with and without queries between, one with the rest of its tokens in the cache, longer than the windows and than a piece.
SPANS = {
    "prompts": [(0, 9), (9, 11), (14, 23), (23, 30)],
    "one prompt": [(2, 15)],
    "chunks": [(0, 3), (7, 14), (14, 16)],
    "mixed": [(1, 3), (4, 13), (16, 20), (22, 24)],
}


@pytest.mark.parametrize("ops", [REFERENCE, CPU], ids=["reference", "cpu"])
@pytest.mark.parametrize("small_pieces", [False, True])
@pytest.mark.parametrize("layout", SPANS)
def test_spans_see_each_other_both_ways(
    layout: str, small_pieces: bool, ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small_pieces:
        monkeypatch.setattr(attention_plan, "_MAX_QUERIES", 4)
    history, new = map(list, zip(*LAYOUTS[layout], strict=True))
    rows = Rows(SHAPES[1], history, new, num_steps=1, padded_rows=2)
    spans = SPANS[layout]
    for local in (False, True):
        plan = rows.plan(ops=ops, spans=spans, local_spans=local)
        for feature in FEATURES:
            options = options_of(feature, SHAPES[1])
            seen = () if local and options["visibility"].window is None else spans
            assert not rows.check(plan, 0, 3, ops, seen, **options).any()


@pytest.mark.parametrize("ops", [REFERENCE, CPU], ids=["reference", "cpu"])
@pytest.mark.parametrize("shape", SHAPES, ids=name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_with_a_window_read_their_own_table_and_nothing_that_is_not_seen(
    layout: str, shape: Shape, ops: Ops
) -> None:
    """Through all steps of a decode window, in which a row may end."""
    history, new = map(list, zip(*LAYOUTS[layout], strict=True))
    decode = set(new) == {1}
    for feature in (f for f in FEATURES if "visibility" in f):
        rows = Rows(shape, history, new, num_steps=5 if decode else 1, padded_rows=2)
        plan = rows.plan_of_windows(feature["visibility"], ops)
        for step in range(rows.num_steps):
            if step:
                rows.seq_lens.add_(1)
                plan.next_step()
                for row, n in enumerate(rows.lengths):
                    rows.write(row, n + step - 1, n + step)
            padding = rows.check(plan, step, 2 if decode else 3, ops, **options_of(feature, shape))
            assert decode or not padding.any()
        if decode:  # over: it shrinks to one key, and gives something finite
            rows.seq_lens[len(history) // 2] = 1
            plan.next_step()
            query = torch.randn(len(rows.seq_lens), shape.kv_heads * shape.group, shape.key_dim)
            out = ops.paged_attention(query, rows.key_cache, rows.value_cache, plan, **options_of(feature, shape))
            assert out[: len(history)].isfinite().all()
