"""Gathers shards bucket by bucket, straight to where they belong. While one bucket is put in place, the next is gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.kernels.errors import EngineStateError
from stoker.weight_sync.mirror import Mirror
from stoker.weight_sync.rank_agreement import lost
from stoker.weight_sync.shards import Piece, Shards

# Collectives reach their full bandwidth from some 10 MB a rank on; larger buckets only take memory.
MEMORY_BYTES = 256 * 2**20

# Gathers, and calls its argument with the names of each layer whose tensors pass through.
Gathering = Callable[[Callable[[Collection[str]], object]], None]

# torch 2.13 renamed it, and warns of the older name.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_BESIDES = 1 / 32  # of the memory, for what allocators and sockets take besides the buffers
_ALIGNMENT = 16  # bytes: parts of different dtypes lie in one buffer


@dataclass(frozen=True)
class _Part:
    """Rows ``low`` to ``high`` of one local tensor, at the same offset in every rank's share of a bucket."""

    shards: Shards
    dtype: torch.dtype
    low: int
    high: int
    offset: int  # bytes

    @property
    def nbytes(self) -> int:
        return _aligned((self.high - self.low) * self.shards.row_numel * self.dtype.itemsize)

    @property
    def is_wanted(self) -> bool:
        """Whether it has a part of any piece. A flat parameter may have rows that are not gathered."""
        return any(p.within(self.low, self.high) for of_rank in self.shards.pieces for p in of_rank)

    def pack(self, share: Tensor) -> None:
        """Cast this rank's rows into its share, uint8 [bytes]."""
        rows = self.shards.local[self.low : self.high]
        if rows.numel():
            end = self.offset + rows.numel() * self.dtype.itemsize
            share[self.offset : end].view(self.dtype).view(rows.shape).copy_(rows)

    def place(self, gathered: Tensor, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """(where it belongs, what came) of every rank's rows in ``gathered``, uint8 [ranks, bytes]."""
        if self.shards.even:  # nearly always: two calls in place of several for each rank
            came = gathered[:, self.offset : self.offset + (self.high - self.low) * self.dtype.itemsize]
            by_rank = tensors[self.shards.names[0]].view(len(gathered), -1)
            yield from zip(by_rank[:, self.low : self.high].unbind(), came.view(self.dtype).unbind(), strict=True)
            return
        for share, pieces in zip(gathered, self.shards.pieces, strict=True):
            for whole in pieces:
                if (piece := whole.within(self.low, self.high)) is not None:
                    yield piece.view(tensors[piece.name]), self._came(share, piece)

    def _came(self, share: Tensor, piece: Piece) -> Tensor:
        start = self.offset + (piece.start - self.low) * piece.row_numel * self.dtype.itemsize
        shape = [high - low for low, high in piece.box]
        return share[start : start + math.prod(shape) * self.dtype.itemsize].view(self.dtype).view(shape)


@dataclass(frozen=True)
class Bucket:
    group: dist.ProcessGroup
    parts: list[_Part]

    @property
    def share(self) -> int:
        """Bytes from each rank."""
        return self.parts[-1].offset + self.parts[-1].nbytes

    @property
    def names(self) -> str:
        names = [name for part in self.parts for name in part.shards.names]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def plan(
    shards: Sequence[Shards], dtypes: Mapping[str, torch.dtype], memory_bytes: int, device: torch.device
) -> list[Bucket]:
    """The buckets, the same on every rank. A tensor that does not fit is split by rows; a single row is never split.

    dtypes: of the tensors in the engine; a part is cast before it is sent, if all its tensors have the same. memory_bytes: all
    that ``gather`` may take, including Gloo's own buffers.
    """
    buckets: list[Bucket] = []
    for one in shards:
        limit = max(_ALIGNMENT, share_bytes(one.group, memory_bytes, device) // _ALIGNMENT * _ALIGNMENT)
        wanted = {dtypes[name] for name in one.names}
        dtype = wanted.pop() if len(wanted) == 1 else one.local.dtype
        row = max(1, one.row_numel * dtype.itemsize)
        step = max(1, limit // row)
        for low in range(0, one.rows, step):
            part = _Part(one, dtype, low, min(low + step, one.rows), 0)
            if not part.is_wanted:
                continue
            last = buckets[-1] if buckets else None
            if last is not None and last.group is one.group and last.share + part.nbytes <= limit:
                last.parts.append(_Part(one, dtype, low, part.high, last.share))
            else:
                buckets.append(Bucket(one.group, [part]))
    return buckets


def share_bytes(group: dist.ProcessGroup, memory_bytes: int, device: torch.device) -> int:
    """The most that each rank can send in a bucket, with two buckets under way."""
    copies = 2 if group._get_backend(device).name() == "gloo" else 1  # Gloo gathers into memory of its own
    return int(memory_bytes * (1 - _BESIDES)) // (2 * copies * group.size())


def buffers_for(buckets: Sequence[Bucket], device: torch.device) -> Tensor:
    """The memory that ``gather`` needs: two of the largest bucket, uint8 [2, bytes]."""
    return torch.empty(2, max((b.share * b.group.size() for b in buckets), default=0), dtype=torch.uint8, device=device)


def gather(
    buckets: Sequence[Bucket], buffers: Tensor, tensors: Mapping[str, Tensor], then: Callable[[int], None]
) -> Exception | None:
    """Fill ``tensors`` with their full contents, and call ``then`` for each bucket that is in place. All ranks have one plan.

    buffers: of ``buffers_for``; this rank's share is made where it is gathered to. Returns what went wrong on this rank alone,
    such as a lack of memory: it still takes part to the end, since the others would wait for it.

    Raises ``WeightTransferError`` naming what was being gathered when a rank failed, or was not heard of within the time-out of
    its process group. In both cases ``tensors`` are partly old and partly new.
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
            pairs = [pair for part in bucket.parts for pair in part.place(gathered, tensors)]
            torch._foreach_copy_([to for to, _ in pairs], [came for _, came in pairs])
            then(index)

    under_way: list[tuple[int, Any, Tensor]] = []
    for index, bucket in enumerate(buckets):
        flat = buffers[index % 2, : bucket.share * bucket.group.size()]
        gathered = flat.view(bucket.group.size(), -1)
        share = gathered[bucket.group.rank()]
        with alone():
            for part in bucket.parts:
                part.pack(share)
        try:
            work = all_gather(flat, share, group=bucket.group, async_op=True)
        except RuntimeError as error:
            raise lost(bucket.group, f"gathering {bucket.names}", error) from error
        under_way.append((index, work, gathered))
        if len(under_way) == 2:
            put_in_place(*under_way.pop(0))
    for rest in under_way:
        put_in_place(*rest)
    return failures[0] if failures else None


def prepare(
    memory: ExitStack, mirror: Mirror, shards: Sequence[Shards], memory_bytes: int, *, kept: bool = True
) -> Gathering:
    """Prepare a gather of these shards into a mirror; returns a function that does it. ``memory`` gives back what it takes.

    All ranks call that function together. It first gathers what the mirror keeps, if ``kept``; then, layer by layer, what passes
    through, and calls its argument with the names of each layer while their numbers are in memory. What goes wrong on this
    rank alone it raises at the end.

    Raises ``EngineStateError`` where there is no memory for it.
    """
    parts: dict[int | None, list[Shards]] = {layer: [] for layer in (None, *range(len(mirror.layers)))}
    for s in shards:
        for layer in dict.fromkeys(map(mirror.layer_of.get, s.names)):
            part = s.of(lambda name, layer=layer: mirror.layer_of.get(name) == layer)  # type: ignore[misc]
            parts[layer].append(s if part.names == s.names else part)
    buckets: list[Bucket] = []
    after: dict[int, list[str]] = {}
    for layer, of_layer in parts.items():
        more = plan(of_layer, mirror.dtypes, memory_bytes, mirror.device) if kept or layer is not None else []
        buckets += more
        if more and layer is not None:
            after[len(buckets) - 1] = [name for s in of_layer for name in s.names]
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

        if (failure := gather(buckets, buffers, mirror.tensors, then_of)) is not None:
            raise failure

    return gathering


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
