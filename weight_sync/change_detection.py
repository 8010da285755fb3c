"""Finds by checksums which of the trainer's tensors on this rank have changed since the last look."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from stoker.weight_sync.checksum import checksums
from stoker.weight_sync.mirror import Mirror
from stoker.weight_sync.shards import Held


@dataclass(frozen=True)
class Changes:
    """What a look found. now: checksums. changed: names, since the last look. written: names taken already. refusal: why not to
    take the rest."""

    held: Held
    now: dict[tuple[str, ...], int]
    changed: set[tuple[str, ...]]
    written: set[str]
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
    full = {name: tensor for name, tensor in held.full.items() if name in mirror.tensors}
    written: list[str] = []
    if refusal is None and not (held.shards or mirror.passing):  # or others may refuse, or read it layer by layer
        written = [name for name, t in full.items() if (name,) in expected and t.device == mirror.device]
    if written:
        mirror.complete = False
    looked_at: dict[tuple[str, ...], Tensor] = {(name,): full.pop(name) for name in written}
    looked_at.update(((name,), tensor) for name, tensor in full.items())
    looked_at.update((s.names, s.local) for s in held.shards)
    targets = [mirror.tensors[name] for name in written]
    now = dict(zip(looked_at, checksums(looked_at.values(), mirror.device, targets=targets), strict=True))
    changed = {names for names, number in now.items() if before.get(names) != number}
    return Changes(held, now, changed, set(written), refusal)
