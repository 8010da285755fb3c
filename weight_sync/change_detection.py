"""Finds by checksums which of the trainer's tensors on this rank have changed since the last look."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from stoker.weight_sync.checksum import checksums, take
from stoker.weight_sync.mirror import Mirror
from stoker.weight_sync.shards import Held


@dataclass(frozen=True)
class Changes:
    """What a look found. now: checksums. changed: names, since the last look. written: names taken already. refusal: why not to
    take the rest."""

    held: Held
    now: dict[tuple[str, ...], int]
    changed: set[tuple[str, ...]]
    written: list[str]
    refusal: Exception | None


def find_changes(
    held: Held,
    mirror: Mirror,
    before: Mapping[tuple[str, ...], int],
    expected: Collection[tuple[str, ...]],
    refusal: Exception | None,
) -> Changes:
    """Look at what this rank holds. before: the checksums of the last look.

    Tensors that are ``expected`` to have changed are written to the mirror on the way, in one pass, where nothing can refuse it.
    """
    if mirror.consumer is None and mirror.passing:
        held = held.of(lambda name: name not in mirror.passing)
    if not mirror.complete:
        before = {}
    full = [name for name in held.full if name in mirror.tensors]
    now: dict[tuple[str, ...], int] = {}
    written: list[str] = []
    if refusal is None and not (held.shards or mirror.passing):  # or others may refuse, or read it layer by layer
        written = [name for name in full if (name,) in expected and held.full[name].device == mirror.device]
    if written:
        mirror.complete = False
        sums = take([mirror.tensors[n] for n in written], [held.full[n] for n in written])
        now.update(((name,), number) for name, number in zip(written, sums, strict=True))
    rest = [name for name in full if (name,) not in now]
    sums = checksums([*(held.full[n] for n in rest), *(s.local for s in held.shards)], mirror.device)
    now.update(zip([*((name,) for name in rest), *(s.names for s in held.shards)], sums, strict=True))
    changed = {names for names, number in now.items() if before.get(names) != number}
    return Changes(held, now, changed, written, refusal)
