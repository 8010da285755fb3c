"""Shards gathered bucket by bucket straight to where they belong, the next gather running while one is put in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stoker.kernels.errors import WeightsMismatchError, WeightTransferError, first_line
from stoker.weight_sync.shards import Piece, Shards, by_group, groups_of

# Collectives reach their bandwidth from some 10 MB a rank on; more only takes memory.
MEMORY_BYTES = 256 * 2**20
GRACE_S = 5.0  # for ranks to tell each other that they lost touch, when one of them did

Parts = Mapping[dist.ProcessGroup, Sequence[tuple[str, ...]]]  # names of what is gathered together, by group

# torch 2.13 renamed it, and warns of the older name.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_AGREEING = "agreeing on what to gather"
_KNOWN = "_is_known_to_all_ranks"  # of an error
_E = TypeVar("_E", bound=Exception)
_BESIDES = 1 / 32  # of the memory, for what allocators and sockets take besides the buffers
_ALIGNMENT = 16  # bytes: parts of different dtypes lie in one buffer


@dataclass(frozen=True)
class _Part:
    """Rows ``low`` to ``high`` of one local tensor, in a slot of every rank's share of the bucket."""

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
        """Whether a piece lies in it: of a flat parameter others than those that are gathered may."""
        return any(p.within(self.low, self.high) for of_rank in self.shards.pieces for p in of_rank)

    def pack(self, share: Tensor) -> None:
        """Cast this rank's rows into its share, uint8 [bytes]."""
        rows = self.shards.local[self.low : self.high]
        if rows.numel():
            end = self.offset + rows.numel() * self.dtype.itemsize
            share[self.offset : end].view(self.dtype).view(rows.shape).copy_(rows)

    def place(self, gathered: Tensor, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """(where it belongs, what came) of every rank's rows in ``gathered``, uint8 [ranks, bytes]."""
        if self.shards.even:  # as nearly all are: two calls in place of some for each rank
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
    """The same buckets on every rank. A tensor that does not fit is split by rows, and a row is the least that is sent.

    dtypes: of the tensors in the engine; a part whose tensors all have one is cast before it is sent. memory_bytes: all
    that ``gather`` may take, with what Gloo takes for it.
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
    """The most that each rank can send at a time, two of which are under way."""
    copies = 2 if group._get_backend(device).name() == "gloo" else 1  # Gloo gathers into memory of its own
    return int(memory_bytes * (1 - _BESIDES)) // (2 * copies * group.size())


def buffers_for(buckets: Sequence[Bucket], device: torch.device) -> Tensor:
    """What ``gather`` needs besides: two of the largest bucket, uint8 [2, bytes]."""
    return torch.empty(2, max((b.share * b.group.size() for b in buckets), default=0), dtype=torch.uint8, device=device)


def gather(
    buckets: Sequence[Bucket], buffers: Tensor, tensors: Mapping[str, Tensor], then: Callable[[int], None]
) -> Exception | None:
    """Fill ``tensors`` with the full contents, and tell ``then`` of each bucket that is in place. All ranks have one plan.

    buffers: as of ``buffers_for``; this rank's share lies where it is gathered to. Returns what went wrong on this rank
    alone, a lack of memory say: it takes part to the end all the same, as the others would wait for it.

    Raises ``WeightTransferError`` naming what was being gathered when a rank failed, or was not heard of in the time its
    process group allows. ``tensors`` are part old, part new after either.
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


def parts_of(shards: Iterable[Shards]) -> Parts:
    return {group: [s.names for s in of_group] for group, of_group in by_group(shards).items()}


def ranks_of(model: nn.Module | None, device: torch.device | None = None) -> tuple[Parts, torch.device]:
    """What ``agree`` and ``telling`` need among the ranks that hold a model, whatever it is that they hold of it.

    device: an engine's, where it is not to be the model's.
    """
    groups = {} if model is None else groups_of(model)
    return dict.fromkeys(groups, ()), device or next(iter(groups.values()), torch.device("cpu"))


def agree(
    parts: Parts,
    device: torch.device,
    refusal: Exception | None = None,
    *,
    has_news: bool = False,
    half_way: bool = False,
) -> bool:
    """Raise ``refusal``, and on all ranks where one has any. What ranks do together begins with it, and goes on with it
    wherever one of them may have failed by itself since. Returns whether any rank ``has_news``.

    half_way: weights may have been written to. Raises ``WeightsMismatchError``, or half-way ``WeightTransferError``, where
    another rank refuses; the first of them also where ranks have parts of other tensors each, which one that refuses may
    have: it has to know the groups alone. ``WeightTransferError`` where a rank does not answer.
    """
    numbers = {group: crc32(repr(names).encode()) for group, names in parts.items()}
    refused, differ = refusal is not None, False
    for _ in numbers:  # so often that what is found in one group reaches every other
        for group, number in numbers.items():
            said = torch.tensor([refused, differ, has_news, number, -number], dtype=torch.int64, device=device)
            try:
                if dist.get_backend(group) == "gloo":  # the first rank can then name the one that is missing
                    dist.monitored_barrier(group, _timeout(group), wait_all_ranks=True)
                dist.all_reduce(said, dist.ReduceOp.MAX, group=group)
            except RuntimeError as error:
                raise lost(group, _AGREEING, error) from error
            any_refused, any_differ, any_news, largest, smallest = said.tolist()
            refused, differ = bool(any_refused), bool(any_differ) or largest != -smallest
            has_news = bool(any_news)
    if refusal is not None:
        raise _known_to_all(refusal) if parts else refusal
    if refused and half_way:
        raise _known_to_all(WeightTransferError("another rank failed half-way; its error says why"))
    if refused:
        raise _known_to_all(WeightsMismatchError("another rank refused; its error says why. No weight was changed"))
    if differ:
        raise _known_to_all(
            WeightsMismatchError(
                "the ranks hold parts of other tensors each, as after one of them alone changed its model: change it on "
                "all of them, and build a new engine"
            )
        )
    return has_news


def refuse(parts: Parts, device: torch.device, error: Exception) -> None:
    """Have the others, who wait in ``agree`` or will come to it, fail too, but where they know of this error."""
    cause: BaseException | None = error
    while cause is not None:
        if _KNOWN in vars(cause):
            return
        cause = cause.__cause__
    with suppress(type(error), WeightTransferError, ValueError):  # of groups that are no more
        agree(parts, device, error)


@contextmanager
def telling(parts: Parts, device: torch.device) -> Iterator[None]:
    """For what a rank does by itself while others wait for it in ``agree``, or will: where it fails, so do they."""
    try:
        yield
    except Exception as error:
        refuse(parts, device, error)
        raise


def _known_to_all(error: _E) -> _E:
    vars(error)[_KNOWN] = True
    return error


def unite(parts: Parts, changed: set[tuple[str, ...]], device: torch.device) -> None:
    """Add to ``changed`` those of the parts that are in any other rank's, once all have agreed that they have the same."""
    for group, of_group in parts.items():
        flags = torch.tensor([names in changed for names in of_group], dtype=torch.int64, device=device)
        try:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        except RuntimeError as error:
            raise lost(group, _AGREEING, error) from error
        changed |= {names for names, flag in zip(of_group, flags.tolist(), strict=True) if flag}


def lost(group: dist.ProcessGroup, doing: str, error: BaseException) -> WeightTransferError:
    """What to raise where a collective failed: what hung, with whom, and which of them it was, as far as can be known."""
    others = [r for r in dist.get_process_group_ranks(group) if r != dist.get_rank()]
    named = "failed to pass" in str(error)  # a barrier, before the others can know that it failed
    silent = _silent(group, [] if named else others)
    broken = WeightTransferError(
        f"rank {dist.get_rank()} lost touch while {doing} with ranks {others} over {dist.get_backend(group)}: {first_line(error)}. "
        + (f"Nothing was heard in {GRACE_S:g} s of {silent}. " if silent else "")
        + "One of them has failed, or did not call update_weights, verify_weights or load_adapter when the others did: every "
        "rank has to. This group of processes stays broken: start them again"
    )
    return _known_to_all(broken)


def _silent(group: dist.ProcessGroup, others: list[int]) -> list[int]:
    """Which of them do not say in the store of the processes that the group is broken for them too.

    That is the one that broke it, and whoever has not noticed in so short a time, as in a large group with a long time-out.
    Each says so once, for good: a group that lost a rank is never whole again.
    """
    keys = {r: f"stoker/lost/{group.group_name}/{r}" for r in others}
    with suppress(RuntimeError):  # the store itself may be gone, with the rank that kept it
        store = dist.distributed_c10d._get_default_store()
        store.set(f"stoker/lost/{group.group_name}/{dist.get_rank()}", "1")
        with suppress(RuntimeError):
            if keys:
                store.wait(list(keys.values()), timedelta(seconds=GRACE_S))
        return [r for r, key in keys.items() if not store.check([key])]
    return []


def _timeout(group: dist.ProcessGroup) -> timedelta:
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
