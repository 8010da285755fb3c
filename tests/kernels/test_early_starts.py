"""The checks of kernels that start early find each way to break the rules, and nothing where the rules are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases_attention import NARROW, PLAIN, Paged, Row, options_of
from early_starts import Found, early_starts
from lora_oracle import make_table
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("kernels run compiled here", allow_module_level=True)

import triton
import triton.language as tl

from stoker.kernels import launch
from stoker.kernels.attention.paged import attend
from stoker.kernels.launch import await_turn
from stoker.kernels.linear.cuts import Cut
from stoker.kernels.linear.streamed import streamed, sums_of_splits
from stoker.kernels.lora.lora import ahead, lora, shrink
from stoker.kernels.reference.attention_plan import Visibility
from stoker.kernels.reference.lora import AdapterRows
from stoker.kernels.triton_ops import TRITON

CPU = torch.device("cpu")


@triton.jit
def _plus_one(x, weight, out, size, WHEN: tl.constexpr, DEPENDENT: tl.constexpr):
    """WHEN it waits, or lets the next come up; ``weight`` is read before, x after that."""
    at = tl.arange(0, 8)
    if WHEN == "first":
        await_turn(DEPENDENT)
    added = tl.load(weight + at, mask=at < size, other=0.0)
    if WHEN == "between":
        await_turn(DEPENDENT)
    total = tl.load(x + at, mask=at < size, other=0.0) + added
    if WHEN == "before it writes":
        await_turn(DEPENDENT)
    tl.store(out + at, total, mask=at < size)
    if WHEN == "last":
        await_turn(DEPENDENT)


@triton.jit
def _plus_one_at_once(x, out, DEPENDENT: tl.constexpr):
    """Lets the next one up at once. Of its two programs one has nothing to do."""
    launch.let_next_up(DEPENDENT)
    if tl.program_id(0) == 1:
        return
    launch.await_end(DEPENDENT)
    tl.store(out, tl.load(x) + 1)


def plus(x: Tensor, weight: Tensor, when: str, **options: bool) -> Tensor:
    out = torch.empty_like(x)
    _plus_one[(2,)](x, weight, out, len(x), WHEN=when, **launch.options(CPU, **options))
    return out


def looked_at(*steps: tuple[str, int]) -> Found:
    """A chain of launches, each of which has as x what the one before wrote: when each waits, and how many launches ago its weight
    was written, 0 for never."""
    made, ready = [torch.ones(8)], torch.ones(8)
    with early_starts() as found:
        for when, ago in steps:
            made.append(plus(made[-1], made[-ago] if ago else ready, when))
    return found


def test_what_keeps_the_rules_is_as_it_is() -> None:
    found = looked_at(("first", 0), ("between", 0), ("first", 1), ("between", 2))
    assert not found.faults and found.early == {"_plus_one": 2}


@pytest.mark.parametrize(
    ("when", "ago", "fault"),
    [
        ("before it writes", 0, "_plus_one reads, before its turn, what _plus_one just wrote"),
        ("between", 1, "_plus_one reads, before its turn, what _plus_one just wrote"),
        ("last", 0, "_plus_one writes before its turn"),
        ("never", 0, "no program of _plus_one waits for its turn"),
    ],
)
def test_each_way_to_break_them_is_found(when: str, ago: int, fault: str) -> None:
    assert fault in looked_at(("first", 0), (when, ago)).faults


@pytest.mark.parametrize("ago", [1, 2, 3])
def test_what_comes_up_beside_two_reads_early_what_neither_writes(ago: int) -> None:
    """Where the one before it lets it up before its own turn. What comes after it starts beside it alone."""
    x = torch.ones(8)
    with early_starts() as found:
        made = [plus(x, x, "first"), plus(x, x, "first"), torch.empty(8)]
        _plus_one_at_once[(2,)](x, made[2], **launch.options(CPU))
        plus(x, made[-ago], "between")
        plus(x, made[-1], "between")
    wrote = {1: "_plus_one_at_once", 2: "_plus_one"}
    assert found.faults == (
        {f"_plus_one reads, before its turn, what {wrote[ago]} just wrote"} if ago in wrote else set()
    )


def test_what_torch_writes_counts() -> None:
    """Where kernels are given that; and what is poison to tests is none of it."""
    x, weight = torch.ones(8), torch.ones(8)
    said = {"_plus_one reads, before its turn, what torch's mul_ just wrote"}
    for write, faults in ((lambda: weight.mul_(2), said), (lambda: weight.fill_(torch.nan), set()), (x.sum, set())):
        with early_starts() as found:
            plus(x, weight, "first")
            write()
            plus(x, weight, "between")
        assert found.faults == faults
    with early_starts() as found:  # one between is far enough
        weight.mul_(2)
        plus(x, torch.ones(8), "first")
        plus(x, weight, "between")
    assert not found.faults


def test_what_is_launched_late_may_read_all() -> None:
    with early_starts() as found:
        weight = plus(torch.ones(8), torch.ones(8), "first")
        plus(torch.ones(8), weight, "before it writes", early=False)
    assert not found.faults and not found.early


@pytest.mark.parametrize("feature", [PLAIN, {"visibility": Visibility(window=33)}], ids=["all", "window"])
def test_attention_fetches_first_keys_by_lists_that_were_not_just_written(feature: dict[str, Any]) -> None:
    """And those only that a row has, of which there are tiles of several rows."""
    lengths = [1, 16, 17, 129, 300]
    case = Paged(NARROW, [Row(n) for n in lengths], torch.float32, padded=1)
    plan, query, options = case.plan(TRITON), case.query(), options_of(case, feature)
    caches = {"key": case.key_cache, "value": case.value_cache}

    def fetched() -> set[tuple[str, int, int]]:
        """Of each token whose keys or values the last launch asked for: the cache, block and place in it."""
        with early_starts() as found:
            attend(query, case.key_cache, case.value_cache, plan, **options)
        assert not found.faults
        places = set()
        for address in found.fetched.get("decode_kernel", ()):
            name = next(n for n, c in caches.items() if 0 <= address - c.data_ptr() < c.nbytes)
            place = int(address - caches[name].data_ptr()) // caches[name].itemsize // caches[name].stride(1)
            places.add((name, *divmod(place, case.block_size)))
        return places

    def places_of(row: int) -> set[tuple[str, int, int]]:
        slots = case.slots(row, 0, lengths[row]).tolist()
        return {(name, *divmod(slot, case.block_size)) for slot in slots for name in caches}

    first = fetched()
    assert feature is PLAIN or not first  # else the list was written before what rows share was read
    for _ in range(2):
        places, of_rows = fetched(), [places_of(row) for row in range(len(lengths))]
        assert places <= set().union(*of_rows, {("key", 0, 0), ("value", 0, 0)})  # of padding
        assert sum(not places.isdisjoint(each) for each in of_rows) >= 3
    plan.next_step()
    assert feature is PLAIN or not fetched()


@pytest.mark.parametrize(("depth", "columns"), [(304, False), (4200, False), (304, True)])
def test_a_shrink_fetches_the_matrices_of_its_tokens_and_nothing_else(depth: int, columns: bool) -> None:
    """All of these, each program its part; none where tiles were just made, nor of matrices that lie in columns."""
    table = make_table([64], depth, {1: 4, 2: 40, 3: 16}, torch.float32, columns=columns)
    assert table.pointers is not None  # sent before
    x, rows = torch.zeros(20, depth), AdapterRows(torch.arange(20) % 2 * 2 + 1)
    used = {slot: table.weights[0][slot].a for slot in (1, 3)}
    for fresh in (True, False):
        with early_starts() as found:
            shrink(x, table, rows)
        assert not found.faults
        lines = set()
        for address in found.fetched.get("shrink_kernel", ()):
            slot = next(n for n, a in used.items() if 0 <= address - a.data_ptr() < a.nbytes)
            lines.add((slot, int(address - used[slot].data_ptr()) // 128))
        every = {(n, line) for n, a in used.items() for line in range(-(-a.nbytes // 128))}
        assert lines == (set() if fresh or columns else every)


def test_an_expand_beside_two_kernels_reads_no_tiles_that_were_just_made() -> None:
    """Those of a gated projection are its own, where the shrink's are an earlier one's, and the shrink lets the expand up at once."""
    table = make_table([64, 64], 304, {1: 4, 2: 40, 3: 16}, torch.float32)
    assert table.pointers is not None  # sent before
    x, out, rows = torch.zeros(20, 304), torch.zeros(20, 128), AdapterRows(torch.arange(20) % 4)
    shrink(x, table, rows)
    for early in (0, 1):
        with early_starts() as found:
            lora(x, out, table, rows, "silu", settled=True)
        assert not found.faults and found.early.get("shrink_kernel", 0) == early


@pytest.mark.parametrize("splits", [1, 2])
def test_a_product_that_adapters_run_ahead_of_begins_before_its_turn(splits: int) -> None:
    """It reads x then, and writes the sums of several splits, to memory that was there before the adapters were launched."""
    table = make_table([64], 304, {1: 8, 2: 40, 3: 16}, torch.float32)
    assert table.pointers is not None  # sent before
    x, weight, arrived = torch.zeros(20, 304), torch.zeros(64, 304), torch.zeros(3, dtype=torch.int32)
    rows, cut, nothing = (
        AdapterRows(torch.arange(20) % 4),
        Cut(32, splits, 1),
        {"norm": None, "gated": None, "scale": 1.0},
    )
    given: dict[str, Any] = {"cut": cut, "arrived": arrived, "residual": None, **nothing}
    with early_starts() as found:
        streamed(x, weight, None, **given)
    assert not found.faults and not found.early
    for before in (True, False):
        with early_starts() as found:
            if before:
                sums = sums_of_splits(x, weight, cut, gated=False, beside=0)
            added = ahead(x, None, table, rows)
            if not before:
                sums = sums_of_splits(x, weight, cut, gated=False, beside=0)
            streamed(x, weight, None, added=added, sums=sums, **given)
        assert found.faults == (set() if before or splits == 1 else {"_streamed_kernel writes before its turn"})
        assert found.early["_streamed_kernel"] == 1
    if splits > 1:
        with pytest.raises(AssertionError, match="may still be read"):
            streamed(x, weight, None, added=added, **given)
