"""The small Triton kernels that cut rows into splits and find rows that begin alike; see ``plan``."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from stoker.kernels.launch import await_turn


@triton.jit
def split_size(keys):
    """Keys in a split of a row that sees so many.

    Small enough to spread one short row over the chip, large enough that what a split writes for the merge (4 bytes
    a query head and value) is a few percent of what it reads.
    """
    # From 256 on, the power of two that makes no more than 32 splits: its exponent is that of a float below 2^24.
    most = tl.maximum((keys - 1) // 32, 255)
    exponent = (most.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    return tl.where(keys > 1024, 1 << exponent, 128)


@triton.jit
def row_splits(length, prefix, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """First key a row reads alone, the size of its splits, the number of the first of them, and their count.

    Split i holds keys ``i * size`` to ``(i + 1) * size``. There is always one: it writes the row's output.
    """
    first = prefix
    if WINDOW > 0:
        first = tl.maximum(first, length - WINDOW)
    if CHUNK > 0:
        first = tl.maximum(first, tl.maximum(length - 1, 0) // CHUNK * CHUNK)
    size = split_size(length - first)
    begin = first // size
    count = tl.maximum((length + size - 1) // size - begin, 1)
    return first, size, begin, count


@triton.jit
def row_runs(keys, size, splits, share):
    """How many runs a row that sees so many keys is read in, each by one program, and how many splits a run has at most.

    share: keys a program has to read.

    What each split leaves for others to merge costs as much as some dozens of keys, and waiting for them as some hundreds. A
    row that is a program's share, or little more, is read whole; a longer one in pieces of half a share, so that programs
    end together, and of 512 keys at the least, if there are as many for everyone. Runs have equally many splits, but the first
    may have fewer: it is the last one that may end with part of a split. None of this changes a bit of the result, but of
    rows that share a beginning, to which the splits of the first run are added together.
    """
    piece = tl.maximum(tl.minimum(share, 512), share // 2)
    together = tl.maximum((piece + size - 1) // size, 1)
    together = tl.where(keys <= share + share // 8, splits, together)
    runs = (splits + together - 1) // together
    return runs, (splits + runs - 1) // runs


@triton.jit(do_not_specialize=["num_rows", "width", "programs"])
def work_list_kernel(
    lengths,
    prefix,
    unit_rows,
    items,
    counts,
    num_rows,
    capacity,
    width,
    programs,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARED: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a row (and list: 0 runs of the rows' own splits, 1 splits of shared beginnings): ``row * MAX_PARTS + number``.

    Rows whose pieces are the longest come first, so that those who take from the list by turns end together. Every program counts
    what all rows before its own have, so the list is dense without a second pass. Behind the two counts, a program's share of
    the rows' own keys, if each is read by ``width`` of the attention's ``programs``; none, and no runs, if ``programs`` is 0.
    """
    await_turn(DEPENDENT)
    row = tl.program_id(0)
    which = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    real = at < num_rows
    length = tl.load(lengths + at, mask=real, other=1).to(tl.int32)
    shared = tl.zeros([BLOCK], tl.int32)
    if SHARED:
        shared = tl.load(prefix + at, mask=real, other=0)
    first, size, _, count = row_splits(length, shared, WINDOW, CHUNK)
    keys = tl.where(real, length - first, 0)
    share = tl.minimum(tl.sum(keys.to(tl.int64)) * width // tl.maximum(programs, 1), 1 << 30).to(tl.int32)
    piece = tl.minimum(keys, size)
    if programs > 0:
        count, together = row_runs(keys, size, count, share)
        piece = tl.minimum(keys, together * size)
    if SHARED:
        size = split_size(shared)
        leads = tl.load(unit_rows + at, mask=real, other=0) > 0
        count = tl.where(which == 1, tl.where(leads, (shared + size - 1) // size, 0), count)
    count = tl.where(real, count, 0)
    own = tl.sum(tl.where(at == row, piece, 0))
    before = tl.sum(tl.where((piece > own) | ((piece == own) & (at < row)), count, 0))
    mine = tl.sum(tl.where(at == row, count, 0))
    split = tl.arange(0, PARTS_BLOCK)
    tl.store(items + which * capacity + before + split, row * MAX_PARTS + split, mask=split < mine)
    if row == 0:
        tl.store(counts + which, tl.sum(count))
        tl.store(counts + 2, share, mask=which == 0)


@triton.jit
def common_blocks_kernel(table, lengths, common, stride, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Full blocks that a row's table begins with in common with the row before. Each keeps a key of its own."""
    row = tl.program_id(0)
    same = 0
    if row > 0:
        length = tl.minimum(tl.load(lengths + row), tl.load(lengths + row - 1)).to(tl.int32)
        same = tl.maximum(length - 1, 0) // BLOCK_SIZE
        start = 0
        while start < same:
            at = start + tl.arange(0, BLOCK)
            entry = table + row.to(tl.int64) * stride + at
            mine = tl.load(entry, mask=at < same, other=0)
            other = tl.load(entry - stride, mask=at < same, other=0)
            same = tl.min(tl.where((mine != other) & (at < same), at, same))
            start += BLOCK
    tl.store(common + row, same)


@triton.jit(do_not_specialize=["num_rows"])
def units_kernel(
    common, prefix, unit_rows, num_rows, BLOCK_SIZE: tl.constexpr, LEAST: tl.constexpr, UNIT: tl.constexpr
):
    """One program a row: keys it shares with its unit, and, where it is the first of it, the unit's rows.

    A row joins the one before if they share enough, and not much less than either neighbour does with the next: rows of
    two prompts that both begin with a system prompt do not. A unit never crosses a multiple of UNIT rows.
    """
    row = tl.program_id(0)
    base = row // UNIT * UNIT
    at = base + tl.arange(0, UNIT)
    real = at < num_rows
    blocks = tl.load(common + at, mask=real, other=0)
    around = tl.maximum(
        tl.load(common + at - 1, mask=real & (at > 0), other=0),
        tl.load(common + at + 1, mask=at + 1 < num_rows, other=0),
    )
    joins = (at > base) & (blocks * BLOCK_SIZE >= LEAST) & (2 * blocks >= around)
    leads = real & ~joins
    first = tl.max(tl.where(leads & (at <= row), at, base))
    end = tl.min(tl.where((leads | ~real) & (at > row), at, base + UNIT))
    least = tl.min(tl.where((at > first) & (at < end), blocks, 1 << 30))
    rows = end - first
    tl.store(prefix + row, tl.where(rows > 1, least * BLOCK_SIZE, 0))
    tl.store(unit_rows + row, tl.where((rows > 1) & (row == first), rows, 0))
