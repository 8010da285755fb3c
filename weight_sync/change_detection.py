"""Finds by checksums which of the trainer's tensors on this rank have changed since the last look."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from torch import Tensor

from stoker.weight_sync.checksum import prepare
from stoker.weight_sync.held import Held
from stoker.weight_sync.mirror import Mirror

# By the names of what is looked at together: its checksum, and where it belongs, if it is a part (``Shards.pieces``).
Seen = Mapping[tuple[str, ...], tuple[int, object]]


@dataclass(frozen=True)
class Changes:
    """What a look found.

    now: as of ``Seen``. changed: names of what changed since the last look. written: by name, the bytes of what was taken already.
    refusal: why not to take the rest; None: nothing is wrong.
    """

    held: Held
    now: Seen
    changed: set[tuple[str, ...]]
    written: Mapping[str, int]
    refusal: Exception | None


class Look:
    """Compares what this rank holds with the last look. It is prepared once, and valid while all tensors stay where they are.

    Tensors that are ``expected`` to have changed are written to the mirror in the same pass, unless they may still be refused.
    """

    def __init__(self, held: Held, mirror: Mirror, expected: Set[tuple[str, ...]]) -> None:
        """expected: names of tensors; none, where what is held may still be refused."""
        self._of = mirror.consumer, mirror.data.data_ptr(), expected
        if mirror.consumer is None and mirror.passing:
            held = held.of(lambda name: name not in mirror.passing)
        self._held, self._mirror = held, mirror
        full = dict(held.full)
        written: list[str] = []
        if not (held.shards or mirror.passing):  # else other ranks may refuse, or a consumer reads layer by layer
            written = [name for name, t in full.items() if (name,) in expected and t.device == mirror.device]
        self._written = {name: mirror.tensors[name].nbytes for name in written}
        looked_at: dict[tuple[str, ...], Tensor] = {(name,): full.pop(name) for name in written}
        looked_at.update(((name,), tensor) for name, tensor in full.items())
        looked_at.update((s.names, s.local) for s in held.shards)
        self._names = list(looked_at)
        pieces = {s.names: s.pieces for s in held.shards}
        self._pieces = [pieces.get(names) for names in looked_at]
        targets = [mirror.tensors[name] for name in written]
        self._checksums = prepare(list(looked_at.values()), mirror.device, targets)

    def fits(self, expected: Set[tuple[str, ...]]) -> bool:
        """Whether it is still valid for the mirror, at its address, and for these expectations."""
        return (self._mirror.consumer, self._mirror.data.data_ptr(), expected) == self._of

    def find_changes(self, before: Seen, refusal: Exception | None) -> Changes:
        """before: of the last look."""
        if not self._mirror.complete:
            before = {}
        if self._written:
            self._mirror.complete = False
        now = dict(zip(self._names, zip(self._checksums(), self._pieces, strict=True), strict=True))
        changed = {names for names, seen in now.items() if before.get(names) != seen}
        return Changes(self._held, now, changed, self._written, refusal)
