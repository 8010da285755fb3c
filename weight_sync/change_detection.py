"""What a rank sees by itself of the trainer's tensors: which are others than at the last look, by their checksums."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from stoker.weight_sync.checksum import checksums, take
from stoker.weight_sync.mirror import Mirror
from stoker.weight_sync.shards import Held


@dataclass(frozen=True)
class Changes:
    """now: checksums; changed: since the last look; written: already; refusal: why not to take it."""

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
    """before: checksums of the last look. Where that can be, what is expected to have changed is taken on the way."""
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
