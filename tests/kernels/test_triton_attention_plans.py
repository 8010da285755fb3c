"""Plans of Triton's attention: which rows share a beginning, what is refilled and advanced, and what numbers depend on."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from cases_attention import DEVICE, GPU_ONLY, NARROW, PLAIN, SMALL, Heads, Paged, Row, check, family, options_of, units
from paged_rows import TOLERANCE

from stoker.kernels import launch
from stoker.kernels.attention.decode import _own_keys
from stoker.kernels.attention.paged import attend
from stoker.kernels.attention.plan import UNIT_ROWS, workspace_bytes
from stoker.kernels.reference.attention_plan import Visibility
from stoker.kernels.triton_ops import TRITON

# -- rows that share a beginning ---------------------------------------------------------------------------------


SHARED = {
    "one prompt": (family(304, [310, 320, 305, 350], 0), [(0, 4, 304)]),
    "two prompts": (family(144, [150, 190], 0) + family(304, [305, 310, 400], 2), [(0, 2, 144), (2, 3, 304)]),
    "with strangers": (
        [Row(200), *family(128, [129, 129, 129], 1), Row(20), Row(129), Row(150)],
        [(1, 3, 128)],
    ),
    "not enough": (family(112, [200, 130], 0), []),
    "unlike": ([Row(400), Row(400, parent=0, shared=320), Row(400, parent=1, shared=256)], [(0, 3, 256)]),
    "a system prompt": (
        [*family(320, [321, 330], 0), Row(340, parent=0, shared=128), Row(350, parent=2, shared=320)],
        [(0, 2, 320), (2, 2, 320)],
    ),
    "one table": ([Row(160), Row(160, parent=0, shared=160)], [(0, 2, 144)]),
    "many": (family(128, [129 + i // 4 for i in range(18)], 0), [(0, 16, 128), (16, 2, 128)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, *GPU_ONLY])
@pytest.mark.parametrize("rows", SHARED)
def test_rows_that_begin_alike_are_read_together(rows: str, dtype: torch.dtype) -> None:
    given, wanted = SHARED[rows]
    case = Paged(NARROW, given, dtype)
    plan = case.plan(TRITON)
    assert units(case, plan) == wanted
    check(case, plan, PLAIN | {"sinks": True, "softcap": 3.0})
    assert units(case, case.plan(TRITON, deterministic=True)) == wanted, "what was found stays; nobody looks at it"


def test_a_plan_that_is_told_of_none_looks_for_no_rows_that_begin_alike() -> None:
    case = Paged(NARROW, family(304, [310, 320, 305], 0))
    plan = case.plan(TRITON, shared=False)
    assert not units(case, plan) and not plan.lanes[0].shares(Visibility())
    check(case, plan, PLAIN)


def test_units_wider_than_a_tile() -> None:
    """Rows times heads that share a key are more queries than one tile holds."""
    case = Paged(Heads(1, 7, 64, 64), family(128, [129 + 3 * i for i in range(UNIT_ROWS)], 0), padded=0)
    plan = case.plan(TRITON)
    assert units(case, plan) == [(0, UNIT_ROWS, 128)]
    check(case, plan, PLAIN)


def test_shared_keys_come_from_the_first_row_alone() -> None:
    """If the tables of the others named other blocks there by now, nobody would read them."""
    case = Paged(SMALL, family(304, [310, 320, 305], 0))
    plan = case.plan(TRITON)
    case.table[1:3, :19] = 1
    check(case, plan, PLAIN)


def test_a_row_that_ended_in_a_window_disturbs_nobody() -> None:
    """It shrinks to one key, less than its unit shares."""
    case = Paged(SMALL, family(144, [150, 160, 170], 0), later=1)
    plan = case.plan(TRITON)
    case.advance(1)
    case.seq_lens[1] = 1
    plan.next_step()
    query, options = case.query(), options_of(case, PLAIN)
    out, _ = attend(query, case.key_cache, case.value_cache, plan, **options)
    wanted, _ = case.dense(query, 1, **options)
    assert out.isfinite().all()
    torch.testing.assert_close(out[[0, 2]].cpu().double(), wanted[[0, 2]], rtol=0, atol=TOLERANCE[torch.float32])


# -- plans --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_window_advances_as_fresh_plans_would(deterministic: bool) -> None:
    """Across the borders of blocks, splits and windows, with two kinds of layers taking turns."""
    case = Paged(NARROW, [*family(128, [129, 142], 0), Row(127), Row(15)], later=2, padded=1)
    plan = case.plan(TRITON, num_steps=3, deterministic=deterministic)
    options = [options_of(case, feature) for feature in (PLAIN, {"visibility": Visibility(window=127)})]
    for step in range(3):
        if step:
            case.advance(step)
            plan.next_step()
        query = case.query()
        found = [attend(query, case.key_cache, case.value_cache, plan, **o)[0] for o in options]
        fresh = case.plan(TRITON, deterministic=deterministic)
        for out, o in zip(found, options, strict=True):
            assert torch.equal(out, attend(query, case.key_cache, case.value_cache, fresh, **o)[0])
            wanted, _ = case.dense(query, step, **o)
            torch.testing.assert_close(out[: len(wanted)].cpu().double(), wanted, rtol=0, atol=TOLERANCE[torch.float32])


def test_a_plan_serves_what_its_buffers_are_refilled_with() -> None:
    """What a captured step would do: the first plan's tensors, after another batch was put in their place."""
    case = Paged(SMALL, [*family(144, [150, 160], 0), Row(300), Row(20)], spare_rows=0)
    other = Paged(SMALL, [Row(40), Row(280), *family(256, [270, 300], 2)], spare_rows=0)
    first = case.plan(TRITON)
    features = (PLAIN, {"visibility": Visibility(window=100)})
    for feature in features:
        check(case, first, feature)
    columns = min(case.table.shape[1], other.table.shape[1])
    case.table[:, :columns] = other.table[:, :columns]
    case.seq_lens.copy_(other.seq_lens)
    other.table, other.seq_lens, other.workspace = case.table, case.seq_lens, case.workspace
    assert units(other, other.plan(TRITON)) == [(2, 2, 256)]
    for feature in features:
        check(other, first, feature)


def test_the_workspace_is_made_once_and_as_large_as_it_says() -> None:
    case = Paged(NARROW, [Row(300), Row(20)], spare_rows=3)
    check(case, case.plan(TRITON), PLAIN)
    buffers = case.plan(TRITON).lanes[0].buffers
    partials = buffers.partials(2, 16)
    check(case, case.plan(TRITON, deterministic=True), {"visibility": Visibility(window=200)})
    assert all(a is b for a, b in zip(partials, buffers.partials(2, 16), strict=True)) and len(buffers._partials) == 1
    rows, columns = case.static_table.shape
    assert sum(t.nbytes for t in partials) == workspace_bytes(rows, columns, 16, heads=2, value_dim=16)


def test_buffers_live_as_long_as_their_workspace() -> None:
    case = Paged(SMALL, [Row(20)])
    buffers = case.plan(TRITON).lanes[0].buffers
    assert case.plan(TRITON, deterministic=True).lanes[0].buffers is buffers
    gone = weakref.ref(buffers.common)
    case.workspace.clear()
    del buffers
    assert gone() is None and case.plan(TRITON).lanes[0].buffers.rows == len(case.static_table)


# -- numbers that depend on a row alone ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, *GPU_ONLY])
def test_a_row_gets_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    heads = NARROW
    lengths = [300, *torch.randint(1, 30, (63,)).tolist(), 290]
    rows = [Row(n) for n in lengths]
    rows[1] = Row(310, parent=0, shared=288)  # a neighbour that begins like it
    case = Paged(heads, rows, dtype)
    query = case.query()
    options, attention = options_of(case, PLAIN | {"sinks": True}), (case.key_cache, case.value_cache)
    together, _ = attend(query, *attention, case.plan(TRITON, deterministic=True), **options)
    for row in (0, 64):
        table, lens = case.table[row : row + 1].clone(), case.seq_lens[row : row + 1].clone()
        plan = TRITON.plan_attention([1], [lengths[row]], table, lens, block_size=16, token_bytes=1)
        alone, _ = attend(query[row : row + 1], *attention, plan, **options)
        assert torch.equal(alone[0], together[row])
    both = TRITON.plan_attention([1] * 2, lengths[:2], case.table[:2], case.seq_lens[:2], block_size=16, token_bytes=1)
    regrouped, _ = attend(query[:2], *attention, both, **options)
    if dtype == torch.float32:  # rounded to bf16, they may be equal by chance
        assert not torch.equal(together[0], regrouped[0]), "sharing changes the bits, or this test shows nothing"


FEW_AND_MANY = [{}, {"sinks": True}, {"visibility": Visibility(window=1000)}, {"visibility": Visibility(chunk=700)}]


@pytest.mark.parametrize("feature", FEW_AND_MANY, ids=["all keys", "sinks", "window", "chunk"])
@pytest.mark.parametrize("dtype", [torch.float32, *GPU_ONLY])
def test_a_row_gets_the_same_bits_from_one_program_and_from_several(
    dtype: torch.dtype, feature: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many splits a program reads in a row follows from how many there are for how many programs."""
    case = Paged(NARROW, [Row(n) for n in (1100, 1024, 513, 128, 1)], dtype, padded=0)
    query, options = case.query(), options_of(case, PLAIN | feature)
    found, items = [], []
    for processors in (1, 3, 100):  # the last: one split for each program, and some programs with none
        monkeypatch.setattr(launch, "multiprocessors", lambda _, n=processors: n)
        case.workspace.clear()
        plan = case.plan(TRITON, shared=False)
        out, _ = attend(query, case.key_cache, case.value_cache, plan, **options)
        found.append(out)
        items.append(sum(int(work.counts[0]) for work in plan.lanes[0].lists.values()))
    assert items[0] < items[1] < items[2]
    wanted, _ = case.dense(query, **options)
    torch.testing.assert_close(found[0].cpu().double(), wanted, rtol=0, atol=TOLERANCE[dtype])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", [torch.float32, *GPU_ONLY])
@pytest.mark.parametrize(("processors", "items"), [(1, 3), (3, 6), (100, 17)])
def test_shared_keys_and_runs_of_splits_are_merged(
    processors: int, items: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a row's own splits all are read by one program, or some by each of several, or one by each."""
    monkeypatch.setattr(launch, "multiprocessors", lambda _: processors)
    case = Paged(SMALL, family(256, [850, 900, 950], 0), dtype, padded=0)
    plan = case.plan(TRITON)
    check(case, plan, PLAIN)
    assert units(case, plan) == [(0, 3, 256)]
    (work,) = plan.lanes[0].lists.values()
    assert work.counts[0] == items


@triton.jit
def _runs(lengths, share, out, WINDOW: tl.constexpr):
    """Of each run of a row: its first key, the one after its last, and the splits before it. Behind them, how many runs."""
    run = tl.program_id(0)
    _, begin, end, before, _, _, runs = _own_keys(0, run, 0, share, lengths, WINDOW, 0, True)
    tl.store(out + 3 * run, begin)
    tl.store(out + 3 * run + 1, end)
    tl.store(out + 3 * run + 2, before)
    if run == 0:
        tl.store(out + 3 * tl.num_programs(0), runs)


@pytest.mark.parametrize(("window", "first"), [(0, 0), (500, 45)])
@pytest.mark.parametrize(
    ("share", "ends"),
    [(500, [545]), (400, [256, 545]), (264, [256, 545]), (200, [128, 384, 545]), (128, [128, 256, 384, 512, 545])],
)
def test_programs_that_share_a_row_read_as_much_as_each_other(
    share: int, ends: list[int], window: int, first: int
) -> None:
    """Of five splits, which begin and end as the row does, the first run has fewer than the others where not all have as many."""
    out = torch.zeros(16, dtype=torch.int32, device=DEVICE)
    _runs[(5,)](torch.tensor([545], device=DEVICE), share, out, WINDOW=window, **launch.options(DEVICE, waits=False))
    begins = [first, *ends[:-1]]
    wanted = [[begin, end, begin // 128] for begin, end in zip(begins, ends, strict=True)]
    assert out[: 3 * out[15]].view(-1, 3).tolist() == wanted


@pytest.mark.parametrize("programs", [0, 8])
def test_the_longest_pieces_are_worked_on_first(programs: int) -> None:
    """All pieces of all rows are in the list, and programs that take from it by turns end together."""
    lengths = [40, 700, 128, 0, 900, 90, 700]
    case = Paged(SMALL, [Row(max(n, 1)) for n in lengths], torch.float32, padded=0)
    case.seq_lens.copy_(torch.tensor(lengths))
    (lanes,) = case.plan(TRITON, shared=False).lanes
    work = lanes.work_list(Visibility(), 1, programs)
    items = work.items[0, : work.counts[0]].tolist()
    rows = [item // lanes.buffers.max_parts for item in items]
    if programs:  # whose share is 319 keys: a piece is three splits, and what is left
        assert rows == [1, 1, 4, 4, 4, 6, 6, 2, 5, 0, 3]
    else:
        assert rows == [1] * 6 + [2] + [4] * 8 + [6] * 6 + [5, 0, 3]
    assert sorted(items) == sorted(r * lanes.buffers.max_parts + i for r in range(7) for i in range(rows.count(r)))


@pytest.mark.parametrize("dtype", [torch.float32, *GPU_ONLY])
def test_a_deterministic_query_gets_the_same_bits_in_a_chunk_as_in_a_decode_step(dtype: torch.dtype) -> None:
    """Also where the queries are more than the buffers have rows for."""
    chunk, before = 21, 120
    case = Paged(NARROW, [Row(before + chunk, chunk), Row(50)], dtype, padded=0, spare_rows=2)
    plan = case.plan(TRITON, deterministic=True)
    assert len(plan.lanes) == 6 and plan.chunks is None
    query, options = case.query(), options_of(case, PLAIN)
    together, _ = attend(query, case.key_cache, case.value_cache, plan, **options)
    wanted, _ = case.dense(query, **options)
    torch.testing.assert_close(together[: chunk + 1].cpu().double(), wanted, rtol=0, atol=TOLERANCE[dtype])
    table, lens = case.table[:1].clone(), torch.ones(1, dtype=torch.long, device=DEVICE)
    for token in (0, 7, 8, 20):
        lens[0] = before + token + 1
        one = TRITON.plan_attention([1], [1], table, lens, block_size=16, token_bytes=1, deterministic=True)
        alone, _ = attend(query[token : token + 1], case.key_cache, case.value_cache, one, **options)
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("dtype", [torch.float32, *GPU_ONLY])
def test_the_rest_of_a_span_gets_the_bits_that_it_has_in_the_whole(dtype: torch.dtype) -> None:
    """Its beginning is in the cache; so it is in deterministic mode, where a span is worked on in tiles too."""
    case = Paged(NARROW, [Row(150, 30)], dtype, padded=0)
    query = case.query()

    def found(count: int, feature: dict[str, Any]) -> torch.Tensor:
        plan = TRITON.plan_attention(
            *([count], [150], case.table, case.seq_lens),
            block_size=16,
            token_bytes=1,
            spans=[(0, count)],
            deterministic=True,
        )
        options = options_of(case, feature)
        return attend(query[30 - count : 30], case.key_cache, case.value_cache, plan, **options)[0]

    for feature in (PLAIN, {"visibility": Visibility(window=17)}):
        assert torch.equal(found(30, feature)[20:], found(10, feature))
