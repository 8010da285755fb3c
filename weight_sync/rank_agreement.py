"""Lets ranks agree to begin, continue or refuse what they do together. If one fails or falls silent, the others are told."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import count
from typing import TypeVar
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

from stoker.kernels.errors import WeightsMismatchError, WeightTransferError, first_line
from stoker.kernels.interrupts import uninterrupted
from stoker.weight_sync.held import Shards, by_group
from stoker.weight_sync.shards import groups_of, is_sharded

GRACE_S = 5.0  # for ranks to tell each other that they lost touch, when one of them did

Parts = Mapping[dist.ProcessGroup, Sequence[tuple[str, ...]]]  # names of what is gathered together, by group
Ranks = tuple[Parts, torch.device]  # the arguments of ``agree`` and ``telling``
ALONE: Ranks = ({}, torch.device("cpu"))

_AGREEING = "agreeing on what to gather"
_KNOWN = "_is_known_to"  # attribute of an error: the groups whose ranks know of it; None: nobody is to be told
# Counts what ranks have begun to gather, by the first of their groups.
_BEGUN: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
_E = TypeVar("_E", bound=Exception)


def parts_of(shards: Iterable[Shards]) -> Parts:
    return {group: [s.names for s in of_group] for group, of_group in by_group(shards).items()}


def in_step(model: nn.Module | None) -> AbstractContextManager[None]:
    """Context manager around what the ranks of a sharded model do together. It delays Ctrl-C, which would get them out of step."""
    return uninterrupted() if model is not None and is_sharded(model) else nullcontext()


def ranks_of(model: nn.Module | None, device: torch.device | None = None) -> Ranks:
    """The ranks that hold a sharded model, as ``agree`` and ``telling`` take them.

    device: the engine's, if it is not the model's.
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
    alike: Sequence[str] = (),
) -> bool:
    """Raise ``refusal`` if there is one, and raise on all ranks if any rank has one. Returns whether any rank ``has_news``.

    Whatever ranks do together begins with this, and comes here again wherever one of them may have failed by itself since.

    half_way: weights may have been written to. alike: texts that have to be the same on all ranks. Raises
    ``WeightsMismatchError`` where another rank refuses (``WeightTransferError`` if half-way), and where ranks have parts of
    different tensors, or differ in ``alike``. A rank that refuses needs to know only the groups. Raises
    ``WeightTransferError`` where a rank does not answer.
    """
    numbers = {group: crc32(repr((names, *alike)).encode()) for group, names in parts.items()}
    refused, differ = refusal is not None, False
    for _ in numbers:  # often enough that news from one group reaches all others
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
        raise _known_to(parts, refusal)
    if refused and half_way:
        raise _known_to(parts, WeightTransferError("another rank failed half-way; its error says why"))
    if refused:
        raise _known_to(parts, WeightsMismatchError("another rank refused; its error says why. No weight was changed"))
    if differ:
        raise _known_to(
            parts,
            WeightsMismatchError(
                "the ranks hold parts of other tensors each, as after one of them alone changed its model: change it on "
                "all of them, and build a new engine; or other adapters, as after one of them alone loaded or unloaded one: do "
                "so on all of them, in one order; or other settings (dtype, quantization, gather_memory): give all the same; or they "
                "call update_weights and verify_weights, of one engine or of several, in other orders"
            ),
        )
    return has_news


def number_of(parts: Parts) -> int | None:
    """A number for what ranks begin to gather, the same on all ranks that have just agreed to it, and used for nothing else.

    None where no other rank has parts.
    """
    first = next(iter(parts), None)
    return None if first is None else next(_BEGUN.setdefault(first, count()))


def refuse(parts: Parts, device: torch.device, error: Exception) -> None:
    """Make other ranks, which wait in ``agree`` or will, fail too, unless they know of this error."""
    cause: BaseException | None = error
    while cause is not None:
        known = vars(cause).get(_KNOWN, ())
        if known is None or (known and parts.keys() <= known):
            return
        cause = cause.__cause__
    with suppress(type(error), WeightTransferError, ValueError):  # ValueError: a group is gone
        agree(parts, device, error)


@contextmanager
def telling(parts: Parts, device: torch.device) -> Iterator[None]:
    """Context manager around what a rank does by itself while others wait in ``agree``, or will: if it fails, they fail too."""
    try:
        yield
    except Exception as error:
        refuse(parts, device, error)
        raise


def _known_to(parts: Parts | None, error: _E) -> _E:
    """parts: of the ranks that have been told, who may be fewer than those that will wait; None: nobody is to be told."""
    vars(error)[_KNOWN] = None if parts is None else {*parts}
    return error


def unite(parts: Parts, changed: set[tuple[str, ...]], device: torch.device) -> None:
    """Add to ``changed`` the parts that changed on other ranks. All must have agreed before that they have the same parts."""
    for group, of_group in parts.items():
        flags = torch.tensor([names in changed for names in of_group], dtype=torch.int64, device=device)
        try:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        except RuntimeError as error:
            raise lost(group, _AGREEING, error) from error
        changed |= {names for names, flag in zip(of_group, flags.tolist(), strict=True) if flag}


def lost(group: dist.ProcessGroup, doing: str, error: BaseException) -> WeightTransferError:
    """The error to raise where a collective failed: it says what was being done, with whom, and which rank failed, if known."""
    ranks = dist.get_process_group_ranks(group)
    others = [r for r in ranks if r != dist.get_rank()]
    # A barrier may have named them, before the others could know that it failed.
    named = re.search(r"([\d, ]+) failed to pass", str(error))
    silent = _silent(group, [] if named else others)
    missing = [ranks[int(place)] for place in named[1].split(",")] if named else []  # torch counts within the group
    broken = WeightTransferError(
        f"rank {dist.get_rank()} lost touch while {doing} with ranks {others} over {dist.get_backend(group)}: {first_line(error)}. "
        + (f"Nothing was heard in {GRACE_S:g} s of {silent}. " if silent else "")
        + (f"In the whole world these are {missing}. " if missing and ranks != [*range(len(ranks))] else "")
        + "One of them has failed, has closed its engine or unloaded an adapter alone, or did not call update_weights, "
        "verify_weights or load_adapter when the others did: every rank has to. This group of processes stays broken: start them again"
    )
    return _known_to(None, broken)


def _silent(group: dist.ProcessGroup, others: list[int]) -> list[int]:
    """The other ranks that do not say in the processes' store that the group is broken for them too.

    Among them is the one that broke it; others may just not have noticed yet, as in a large group with a long time-out. Each rank
    says so once and for all, since a group that lost a rank stays broken.
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
