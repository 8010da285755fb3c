"""Finds by checksums which of the trainer's tensors on this rank have changed since the last look."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from torch import Tensor

from stoker.weight_sync.checksum import prepare
from stoker.weight_sync.mirror import Mirror
from stoker.weight_sync.shards import Held


@dataclass(frozen=True)
class Changes:
    """What a look found. now: checksums. changed: names, since the last look. written: bytes of those taken already, by name.
    refusal: why not to take the rest."""

    held: Held
    now: dict[tuple[str, ...], int]
    changed: set[tuple[str, ...]]
    written: Mapping[str, int]
    refusal: Exception | None


class Look:
    """A look at what this rank holds; how to take it is found out once, for as long as all that lies where it does.

    Tensors that are ``expected`` to have changed are written to the mirror on the way, in one pass, where nothing can refuse it.
    """

    def __init__(self, held: Held, mirror: Mirror, expected: Set[tuple[str, ...]]) -> None:
        """expected: none, where what is held may be refused."""
        self._of = mirror.consumer, mirror.data.data_ptr(), expected
        if mirror.consumer is None and mirror.passing:
            held = held.of(lambda name: name not in mirror.passing)
        self._held, self._mirror = held, mirror
        full = dict(held.full)
        written: list[str] = []
        if not (held.shards or mirror.passing):  # or others may refuse, or read it layer by layer
            written = [name for name, t in full.items() if (name,) in expected and t.device == mirror.device]
        self._written = {name: mirror.tensors[name].nbytes for name in written}
        looked_at: dict[tuple[str, ...], Tensor] = {(name,): full.pop(name) for name in written}
        looked_at.update(((name,), tensor) for name, tensor in full.items())
        looked_at.update((s.names, s.local) for s in held.shards)
        self._names = list(looked_at)
        targets = [mirror.tensors[name] for name in written]
        self._checksums = prepare(list(looked_at.values()), mirror.device, targets)

    def fits(self, expected: Set[tuple[str, ...]]) -> bool:
        """Whether it is one for the mirror as it is now, and where it lies, with these expectations."""
        return (self._mirror.consumer, self._mirror.data.data_ptr(), expected) == self._of

    def find_changes(self, before: Mapping[tuple[str, ...], int], refusal: Exception | None) -> Changes:
        """before: the checksums of the last look."""
        if not self._mirror.complete:
            before = {}
        if self._written:
            self._mirror.complete = False
        now = dict(zip(self._names, self._checksums(), strict=True))
        changed = {names for names, number in now.items() if before.get(names) != number}
        return Changes(self._held, now, changed, self._written, refusal)
