"""Divides a step's attention into pieces of work. For decode rows this happens on the device.

A decode row's keys are cut into splits. Their borders follow from the row's length (and the layer's visibility) alone, so
its result does not depend on its neighbours. Small kernels write the splits of all rows into a work list, from which a
grid of fixed size takes its work: a captured step serves every length. Lists and partial results belong to the static
block table they were made for, and stay where they are until its owner clears their workspace.

Neighbouring rows whose tables begin alike (samples of one prompt) form a unit. The keys they share are read once for
all of them, and merged with the rest by log-sum-exp ("Hydragen", Juravsky et al., 2024). Units, too, are found on the
device, once for each plan: the blocks a row begins with do not change while it decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.attention.splits import common_blocks_kernel, units_kernel, work_list_kernel
from stoker.kernels.host_memory import to_device
from stoker.kernels.reference.attention_plan import PLAIN, Segment, Tables, Visibility, segments

UNIT_ROWS = 16  # rows of a unit at most
LEAST_SHARED = 128  # keys: below it, merging costs more than reading them again
_FEW_QUERIES = 8  # a chunk of no more is cheaper as so many decode rows, which are split, than as a tile, which is not
_MAX_SPLITS = 32  # of a row; a window or a shared beginning that starts inside a split adds one


ListKey = tuple[Visibility, int, int]  # what a layer's queries see, and the arguments of ``work_list``


@dataclass(slots=True)
class WorkList:
    """What the programs of a launch work on.

    items: int32 [2, capacity], runs of rows' own splits, and splits of shared beginnings. counts: int32 [3], how many of
    each there are, and how many keys are a program's share.
    """

    items: Tensor
    counts: Tensor
    used: bool = False  # since it was written. If so, the launch before this one did not write it.


@dataclass(frozen=True, slots=True)
class Buffers:
    """What the plans of one static block table need on the device, made once and never moved.

    rows: most decode rows at a time; max_parts: pieces a row's keys are cut into, at most.
    """

    rows: int
    max_parts: int
    common: Tensor  # int32 [rows], blocks shared with the row before
    prefix: Tensor  # int32 [rows], keys shared with the row's unit
    unit_rows: Tensor  # int32 [rows], rows of the unit a row is the first of, else 0
    lists: dict[ListKey, WorkList] = field(default_factory=dict)  # of pure decode steps
    _partials: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    _arrived: dict[int, Tensor] = field(default_factory=dict)

    def new_list(self) -> WorkList:
        items = torch.zeros(2, self.rows * self.max_parts, dtype=torch.int32, device=self.common.device)
        return WorkList(items, torch.zeros(3, dtype=torch.int32, device=self.common.device))

    def partials(self, heads: int, value_dim: int) -> tuple[Tensor, Tensor]:
        """Where splits leave their sums, fp32 [rows, max_parts, heads, value_dim], and their largest score and normaliser, 2.

        All layers of that shape share them. ``workspace_bytes`` says how large they are.
        """
        if (heads, value_dim) not in self._partials:
            size = (self.rows, self.max_parts, heads)
            device = self.common.device
            self._partials[heads, value_dim] = (
                torch.empty(*size, value_dim, dtype=torch.float32, device=device),
                torch.empty(*size, 2, dtype=torch.float32, device=device),
            )
        return self._partials[heads, value_dim]

    def arrived(self, tiles: int) -> Tensor:
        """int32 [rows, tiles]: how many pieces of a row's tile are done. Whoever completes the tile sets it to zero again."""
        if tiles not in self._arrived:
            self._arrived[tiles] = torch.zeros(self.rows, tiles, dtype=torch.int32, device=self.common.device)
        return self._arrived[tiles]


@dataclass(frozen=True, slots=True)
class Lanes:
    """Queries that are worked on as decode rows, each alone on its row's keys.

    lengths: int64 [n], keys each sees; tokens and rows: int64 [n], its place in the batch and its row of the table, both
    None where they are 0 to n; shared: whether units of rows are looked for.
    """

    buffers: Buffers
    lengths: Tensor
    tokens: Tensor | None
    rows: Tensor | None
    shared: bool
    lists: dict[ListKey, WorkList]

    def shares(self, visibility: Visibility) -> bool:
        """Whether shared beginnings are read once.

        Not in layers with a window, which hides a different part of a beginning from each row.
        """
        return self.shared and visibility == PLAIN

    def work_list(self, visibility: Visibility, width: int = 1, programs: int = 0) -> WorkList:
        """The list for layers with this visibility.

        width: how many programs work on the same key, for different heads. programs: of the launch that takes its work from
        the list, if its programs can read several splits in a row; otherwise 0.
        """
        key = visibility, width, programs
        if key not in self.lists:
            self.lists[key] = self.buffers.new_list()
            self._build(key)
        return self.lists[key]

    def build(self) -> None:
        """Write the lists of every layer seen so far, for the lengths as they are on the device now."""
        for key in self.lists:
            self._build(key)

    def _build(self, key: ListKey) -> None:
        visibility, width, programs = key
        work, count, shared = self.lists[key], len(self.lengths), self.shares(visibility)
        work.used = False
        work_list_kernel[(count, 2 if shared else 1)](
            self.lengths,
            self.buffers.prefix,
            self.buffers.unit_rows,
            work.items,
            work.counts,
            count,
            work.items.shape[1],
            width,
            programs,
            WINDOW=visibility.window or 0,
            CHUNK=visibility.chunk or 0,
            SHARED=shared,
            MAX_PARTS=self.buffers.max_parts,
            PARTS_BLOCK=triton.next_power_of_2(self.buffers.max_parts),
            BLOCK=max(16, triton.next_power_of_2(self.buffers.rows)),
            **launch.options(self.lengths.device),
        )


@dataclass(frozen=True, slots=True)
class Chunks:
    """Rows with several queries. spans: whether some of these see keys after their own; local: only in layers with a window."""

    segments: tuple[Segment, ...]
    spans: bool
    local: bool
    device: torch.device
    _tiles: dict[tuple[int, bool], Tensor] = field(default_factory=dict)

    def has_spans(self, visibility: Visibility) -> bool:
        return self.spans and not (self.local and visibility.window is None)

    def tiles(self, queries: int, spans: bool) -> Tensor:
        """int32 [n, 4], tiles of at most so many queries: row, first token, queries, position of the first.

        With spans [n, 5]: the end of the keys that all of a tile's queries see, 0 where there is none.
        """
        if (queries, spans) not in self._tiles:
            pieces = [
                (row, token + done, min(queries, count - done), keys - count + done, keys if whole else 0)
                for row, token, count, keys, whole in self.segments
                for done in range(0, count, queries)
            ]
            pieces.sort(key=lambda piece: -max(piece[3:]))  # what takes longest first
            tiles = torch.tensor([piece if spans else piece[:4] for piece in pieces], dtype=torch.int32, device="cpu")
            self._tiles[queries, spans] = to_device(tiles, self.device)
        return self._tiles[queries, spans]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What every layer of a step does alike."""

    tables: Tables
    block_size: int
    lanes: tuple[Lanes, ...]
    chunks: Chunks | None

    @property
    def decode(self) -> bool:
        """Whether every row has one query, so that all tokens have a lane."""
        return len(self.lanes) == 1 and self.lanes[0].tokens is None

    def next_step(self) -> None:
        """Rebuild the plan for lengths that were advanced in place. Launches kernels only, so it can be captured."""
        for lanes in self.lanes:
            lanes.build()


def _max_parts(rows: int, columns: int, block_size: int) -> int:
    """The most pieces of one row: splits of its own keys, and those of shared keys if there is a row to share them with."""
    splits = min(-(-columns * block_size // 128), _MAX_SPLITS) + 1
    return splits if rows == 1 else 2 * splits


def workspace_bytes(rows: int, columns: int, block_size: int, heads: int, value_dim: int) -> int:
    """Device memory that attention takes, once, for a static block table of that size and layers of that shape.

    Set aside when such a layer first runs, and kept in the workspace of ``plan_attention``.
    """
    return 4 * rows * _max_parts(rows, columns, block_size) * heads * (value_dim + 2)


def _buffers_of(block_tables: Tensor, block_size: int) -> Buffers:
    """Buffers for a static table, of which ``block_tables`` is the upper left corner."""
    rows = block_tables.untyped_storage().nbytes() // (block_tables.stride(0) * block_tables.element_size())
    parts = _max_parts(rows, block_tables.stride(0), block_size)
    common, prefix, unit_rows = torch.zeros(3, rows, dtype=torch.int32, device=block_tables.device)
    return Buffers(rows, parts, common, prefix, unit_rows)


def plan_attention(
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    block_size: int,
    token_bytes: int,
    num_steps: int = 1,
    shared: bool = True,
    deterministic: bool = False,
    spans: Sequence[tuple[int, int]] = (),
    local_spans: bool = False,
    workspace: dict[str, Any] | None = None,
    window_tables: Tensor | None = None,
) -> AttentionPlan:
    """As the reference's.

    Where every row has one query, only device tensors are read, and plans of the same static buffers, workspace, number of
    rows and ``shared`` are the same tensors: a step captured with one of them serves them all.

    deterministic: a query's numbers depend on its own keys alone. Shared beginnings, which depend on the neighbours, are
    not used, and each query of a chunk is worked on as the decode row it would have been: a prompt's keys are read once
    for each query, mostly from cache. Spans are not decode rows but always tiles, whose queries do not affect each other.

    window_tables: with the strides of ``block_tables``. workspace: belongs to one static table. Once it is cleared, no step
    that was captured with it may run.
    """
    workspace = {} if workspace is None else workspace
    tables = Tables(block_tables, block_tables if window_tables is None else window_tables)
    if "buffers" not in workspace:
        workspace["buffers"] = _buffers_of(block_tables, block_size)
    buffers: Buffers = workspace["buffers"]
    device = block_tables.device
    if all(n == 1 for n in query_lens):
        shared = shared and not deterministic and len(seq_lens) > 1
        every = Lanes(buffers, seq_lens, None, None, shared, buffers.lists)
        if shared:
            grid, options = (len(seq_lens),), launch.options(device, waits=False)
            common_blocks_kernel[grid](
                block_tables,
                seq_lens,
                buffers.common,
                block_tables.stride(0),
                BLOCK_SIZE=block_size,
                BLOCK=64,
                **options,
            )
            units_kernel[grid](
                buffers.common,
                buffers.prefix,
                buffers.unit_rows,
                len(seq_lens),
                BLOCK_SIZE=block_size,
                LEAST=LEAST_SHARED,
                UNIT=UNIT_ROWS,
                **options,
            )
        every.build()
        return AttentionPlan(tables, block_size, (every,), None)

    single: list[tuple[int, int, int]] = []  # token, row, keys it sees
    several: list[Segment] = []
    for segment in segments(query_lens, key_lens, spans):
        row, token, queries, keys, whole = segment
        if not whole and (deterministic or queries <= _FEW_QUERIES):
            single += [(token + i, row, keys - queries + 1 + i) for i in range(queries)]
        else:
            several.append(segment)
    lanes: list[Lanes] = []
    if single:  # one copy for all; a list holds as many lanes as there are rows
        where = to_device(torch.tensor(tuple(zip(*single, strict=True)), device="cpu"), device)
        for begin in range(0, len(single), buffers.rows):
            tokens, rows, lengths = where[:, begin : begin + buffers.rows]
            lanes.append(Lanes(buffers, lengths, tokens, rows, False, {}))
    chunks = Chunks(tuple(several), bool(spans), local_spans, device) if several else None
    return AttentionPlan(tables, block_size, tuple(lanes), chunks)
