"""Gathers shards bucket by bucket, straight to where they belong. While one bucket is put in place, the next is gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.kernels.collectives import all_gather
from stoker.kernels.errors import EngineStateError
from stoker.weight_sync.held import Piece, Shards
from stoker.weight_sync.mirror import Mirror
from stoker.weight_sync.module_tree import same_objects
from stoker.weight_sync.rank_agreement import lost

# Collectives reach their full bandwidth from some 10 MB a rank on; larger buckets only take memory.
MEMORY_BYTES = 256 * 2**20

# Gathers, and calls its argument with the names of each layer whose tensors pass through.
Gathering = Callable[[Callable[[Collection[str]], object]], None]

_BESIDES = 1 / 32  # of the memory, for what allocators and sockets take besides the buffers
_ALIGNMENT = 16  # bytes: copies are fastest where both sides begin at such


@dataclass(frozen=True)
class _Part:
    """Rows ``low`` to ``high`` of one local tensor, at the same place in every rank's share of a bucket."""

    shards: Shards
    dtype: torch.dtype
    low: int
    high: int

    @cached_property
    def numel(self) -> int:
        """Elements from each rank, to whole 16 bytes."""
        unit = _ALIGNMENT // self.dtype.itemsize
        return -(-(self.high - self.low) * self.shards.row_numel // unit) * unit

    @property
    def is_wanted(self) -> bool:
        """Whether it has a part of any piece. A flat parameter may have rows that are not gathered."""
        return any(p.within(self.low, self.high) for of_rank in self.shards.pieces for p in of_rank)

    def pack(self, share: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(where in ``share``, [elements], they belong, this rank's rows), if it has any."""
        rows = self.shards.local
        if self.low or self.high < rows.shape[0]:  # of a flat parameter not all may be wanted
            rows = rows[self.low : self.high]
        if count := rows.numel():
            share = share if count == self.numel else share[:count]
            yield (share if rows.dim() == 1 else share.view(rows.shape)), rows

    def place(self, shares: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """(where it belongs, what came) of every rank's rows in its share, [elements]."""
        if self.shards.even:  # nearly always: few calls in place of several for each rank
            rows, count = self.shards.rows, self.high - self.low
            by_rank = tensors[self.shards.names[0]].view(-1, rows).unbind()
            if count < rows:
                by_rank = tuple(of_rank[self.low : self.high] for of_rank in by_rank)
            if count < self.numel:
                shares = [share[:count] for share in shares]
            yield from zip(by_rank, shares, strict=True)
            return
        for share, pieces in zip(shares, self.shards.pieces, strict=True):
            for whole in pieces:
                if (piece := whole.within(self.low, self.high)) is not None:
                    yield piece.view(tensors[piece.name]), self._came(share, piece)

    def _came(self, share: Tensor, piece: Piece) -> Tensor:
        shape = [high - low for low, high in piece.box]
        return share.narrow(0, (piece.start - self.low) * piece.row_numel, math.prod(shape)).view(shape)


@dataclass(frozen=True)
class Bucket:
    """Parts of one dtype that are gathered together."""

    group: dist.ProcessGroup
    dtype: torch.dtype
    parts: list[_Part]

    @property
    def share(self) -> int:
        """Bytes from each rank."""
        return sum(part.numel for part in self.parts) * self.dtype.itemsize

    @property
    def names(self) -> str:
        names = [name for part in self.parts for name in part.shards.names]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"

    def pack(self, share: Tensor) -> None:
        """Cast this rank's rows into its share, uint8 [bytes]."""
        _copy(pair for part, to in zip(self.parts, self._split(share), strict=True) for pair in part.pack(to))

    def place(self, gathered: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Put what came, uint8 [ranks, bytes], where it belongs."""
        shares = zip(*map(self._split, gathered.unbind()), strict=True)
        _copy(pair for part, came in zip(self.parts, shares, strict=True) for pair in part.place(came, tensors))

    @cached_property
    def _sizes(self) -> list[int]:
        return [part.numel for part in self.parts]

    def _split(self, share: Tensor) -> Sequence[Tensor]:
        """A rank's share, cut into those of the parts."""
        return share.view(self.dtype).split_with_sizes(self._sizes)


def plan(
    shards: Sequence[Shards], dtypes: Mapping[str, torch.dtype], memory_bytes: int, device: torch.device
) -> list[Bucket]:
    """The buckets, the same on every rank. A tensor that does not fit is split by rows; a single row is never split.

    dtypes: of the tensors in the engine; a part is cast before it is sent, if all its tensors have the same. memory_bytes: all
    that ``gather`` may take, including Gloo's own buffers.
    """
    buckets: list[Bucket] = []
    # The last bucket of each kind, and the bytes that are left in it.
    room: dict[tuple[dist.ProcessGroup, torch.dtype], tuple[Bucket, int]] = {}
    for one in shards:
        limit = max(_ALIGNMENT, share_bytes(one.group, memory_bytes, device) // _ALIGNMENT * _ALIGNMENT)
        wanted = {dtypes[name] for name in one.names}
        dtype = wanted.pop() if len(wanted) == 1 else one.dtype
        row = max(1, one.row_numel * dtype.itemsize)
        step = max(1, limit // row)
        for low in range(0, one.rows, step):
            part = _Part(one, dtype, low, min(low + step, one.rows))
            if not part.is_wanted:
                continue
            nbytes = part.numel * dtype.itemsize
            bucket, left = room.get((one.group, dtype), (None, 0))
            if bucket is None or nbytes > left:
                bucket, left = Bucket(one.group, dtype, []), limit
                buckets.append(bucket)
            bucket.parts.append(part)
            room[one.group, dtype] = bucket, left - nbytes
    return buckets


def share_bytes(group: dist.ProcessGroup, memory_bytes: int, device: torch.device) -> int:
    """The most that each rank can send in a bucket, with two buckets under way."""
    copies = 2 if group._get_backend(device).name() == "gloo" else 1  # Gloo gathers into memory of its own
    return int(memory_bytes * (1 - _BESIDES)) // (2 * copies * group.size())


def buffers_for(buckets: Sequence[Bucket], device: torch.device) -> Tensor:
    """The memory that ``gather`` needs: two of the largest bucket, uint8 [2, bytes]."""
    return torch.empty(2, max((b.share * b.group.size() for b in buckets), default=0), dtype=torch.uint8, device=device)


def gather(
    buckets: Sequence[Bucket],
    buffers: Tensor,
    tensors: Mapping[str, Tensor],
    then: Callable[[int], None],
    meanwhile: Callable[[float], object] = lambda _: None,
) -> Exception | None:
    """Fill ``tensors`` with their full contents, and call ``then`` for each bucket that is in place. All ranks have one plan.

    buffers: of ``buffers_for``; this rank's share is made where it is gathered to. meanwhile: called while each bucket is
    on its way, with the share of the buckets that were sent. Returns what went wrong on this rank alone, such as a lack of memory:
    it still takes part to the end, since the others would wait for it.

    Raises ``WeightTransferError`` naming what was being gathered when a rank failed, or was not heard of within the time-out of
    its process group. In both cases ``tensors`` are partly old and partly new. (Over NCCL a host does not wait for a gather: a rank
    that is lost shows where results are next read, or to torch's watchdog, which ends the process.)
    """
    failures: list[Exception] = []

    @contextmanager
    def alone() -> Iterator[None]:
        try:
            yield
        except Exception as error:
            failures.append(error)

    def put_in_place(index: int, work: Any, gathered: Tensor) -> None:
        bucket = buckets[index]
        try:
            work.wait()
        except RuntimeError as error:
            raise lost(bucket.group, f"gathering {bucket.names}", error) from error
        with alone():
            bucket.place(gathered, tensors)
            then(index)

    under_way: list[tuple[int, Any, Tensor]] = []
    for index, bucket in enumerate(buckets):
        flat = buffers[index % 2, : bucket.share * bucket.group.size()]
        gathered = flat.view(bucket.group.size(), -1)
        share = gathered[bucket.group.rank()]
        with alone():
            bucket.pack(share)
        try:
            work = all_gather(flat, share, group=bucket.group, async_op=True)
        except RuntimeError as error:
            raise lost(bucket.group, f"gathering {bucket.names}", error) from error
        with alone():
            meanwhile((index + 1) / len(buckets))
        under_way.append((index, work, gathered))
        if len(under_way) == 2:
            put_in_place(*under_way.pop(0))
    for rest in under_way:
        put_in_place(*rest)
    return failures[0] if failures else None


class Gatherer:
    """Gathers shards into a mirror, in at most ``memory_bytes``. It keeps the plan, for the next time that the shards are the same."""

    def __init__(self, mirror: Mirror, memory_bytes: int) -> None:
        self._mirror, self._memory_bytes = mirror, memory_bytes
        self._of: tuple[bool, list[Shards]] | None = None  # what the plan is of
        self._buckets: list[Bucket] = []
        self._after: dict[int, list[str]] = {}  # the names of a layer that passes through, by its last bucket

    def prepare(
        self,
        memory: ExitStack,
        shards: Sequence[Shards],
        *,
        kept: bool = True,
        meanwhile: Callable[[float], object] = lambda _: None,
    ) -> Gathering:
        """Prepare a gather; returns a function that does it. ``memory`` gives back what it takes. meanwhile: as for ``gather``.

        All ranks call that function together. It first gathers what the mirror keeps, if ``kept``; then, layer by layer, what
        passes through, and calls its argument with the names of each layer while their numbers are in memory. What goes wrong
        on this rank alone it raises at the end.

        Raises ``EngineStateError`` where there is no memory for it.
        """
        mirror = self._mirror
        if self._of is None or self._of[0] != kept or not same_objects(self._of[1], shards):
            self._plan(shards, kept)
            self._of = kept, [*shards]
        buckets, after = self._buckets, self._after
        try:
            memory.enter_context(mirror.room())
            buffers = buffers_for(buckets, mirror.device)
        except (RuntimeError, MemoryError) as error:
            raise EngineStateError(
                f"no memory to gather weights in: {error}. Nothing was changed: free some, or set a smaller "
                "EngineConfig.gather_memory"
            ) from error

        def gathering(then: Callable[[Collection[str]], object]) -> None:
            def then_of(index: int) -> None:
                if index in after:
                    then(after[index])

            if (failure := gather(buckets, buffers, mirror.tensors, then_of, meanwhile)) is not None:
                raise failure

        return gathering

    def _plan(self, shards: Sequence[Shards], kept: bool) -> None:
        mirror = self._mirror
        parts: dict[int | None, list[Shards]] = {layer: [] for layer in (None, *range(len(mirror.layers)))}
        for s in shards:
            for layer in dict.fromkeys(map(mirror.layer_of.get, s.names)):
                parts[layer].append(s.of(lambda name, layer=layer: mirror.layer_of.get(name) == layer))  # type: ignore[misc]
        self._of, self._buckets, self._after = None, [], {}
        for layer, of_layer in parts.items():
            if not kept and layer is None:
                continue
            more = plan(of_layer, mirror.dtypes, self._memory_bytes, mirror.device)
            self._buckets += more
            if more and layer is not None:
                self._after[len(self._buckets) - 1] = [name for s in of_layer for name in s.names]


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair to the first."""
    if found := list(pairs):
        torch._foreach_copy_([to for to, _ in found], [came for _, came in found])
