"""Finds by checksums which of the trainer's tensors on this rank have changed since the last look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.weight_sync.checksum import prepare
from stoker.weight_sync.held import Held, Shards
from stoker.weight_sync.mirror import Mirror

# By the names of what is looked at together: its checksum, and where it belongs, if it is a part (``Shards.pieces``).
Seen = dict[tuple[str, ...], tuple[int, object]]
Glances = dict[tuple[str, ...], int]  # checksums of the first numbers of parts

_GLANCE = 1024  # numbers


@dataclass(frozen=True)
class Changes:
    """What a look found.

    now: as of ``Seen``, without what is looked at ``later``. glances: of parts that may be expected to change the next time.
    changed: names of what changed since the last look. written: by name, the bytes of what was taken already. refusal: why not to
    take the rest; None: nothing is wrong.
    """

    held: Held
    now: Seen
    glances: Glances
    changed: set[tuple[str, ...]]
    written: Mapping[str, int]
    later: Later
    refusal: Exception | None


class Look:
    """Compares what this rank holds with the last look. It is prepared once, and valid while all tensors stay where they are.

    Of what is ``expected`` to have changed, whole tensors are written to the mirror in the same pass, unless they may still be
    refused; and parts are looked at while they are gathered, if a glance shows that they did change.
    """

    def __init__(self, held: Held, mirror: Mirror, expected: Set[tuple[str, ...]]) -> None:
        """expected: names of tensors; none, where what is held may still be refused."""
        self._of = mirror.consumer, mirror.data.data_ptr(), expected
        if mirror.consumer is None and mirror.passing:
            held = held.of(lambda name: name not in mirror.passing)
        self._held, self._mirror, self._expected = held, mirror, expected
        full = dict(held.full)
        written: list[str] = []
        if not (held.shards or mirror.passing):  # else other ranks may refuse, or a consumer reads layer by layer
            written = [name for name, t in full.items() if (name,) in expected and t.device == mirror.device]
        self._written = {name: mirror.tensors[name].nbytes for name in written}
        looked_at = {name: full.pop(name) for name in written} | full
        self._names = [(name,) for name in looked_at]
        self._checksums = prepare(list(looked_at.values()), mirror.device, [mirror.tensors[name] for name in written])

    def fits(self, expected: Set[tuple[str, ...]]) -> bool:
        """Whether it is still valid for the mirror, at its address, and for these expectations."""
        return (self._mirror.consumer, self._mirror.data.data_ptr(), expected) == self._of

    def find_changes(self, before: Seen, glanced: Glances, refusal: Exception | None) -> Changes:
        """before, glanced: of the last look."""
        device, shards = self._mirror.device, self._held.shards
        glances = _at_a_glance([s for s in shards if s.names in self._expected], device)
        later = {names for names, number in glances.items() if glanced.get(names, number) != number}
        parts = [s for s in shards if s.names not in later]
        if not self._mirror.complete:
            before = {}
        if self._written:
            self._mirror.complete = False
        sums = [self._checksums(), prepare([s.local for s in parts], device)()]
        places = [*((names, None) for names in self._names), *((s.names, s.pieces) for s in parts)]
        now: Seen = {
            names: (number, place) for (names, place), number in zip(places, torch.cat(sums).tolist(), strict=True)
        }
        changed = {names for names, seen in now.items() if before.get(names) != seen} | later
        glances |= _at_a_glance([s for s in parts if s.names in changed and s.names not in glances], device)
        rest = Later([s for s in shards if s.names in later], device)
        return Changes(self._held, now, glances, changed, self._written, rest, refusal)


class Later:
    """Looks at parts while they are gathered, which memory has time for: it is several times faster than what joins ranks."""

    def __init__(self, shards: Sequence[Shards], device: torch.device) -> None:
        self._shards, self._device = shards, device
        self._sums: list[Tensor] = []  # of the first of them, int64
        self._done = 0

    def go_on(self, share: float) -> None:
        """Look at more, up to this share of all; waits for no device."""
        end = int(share * len(self._shards))
        if lot := [s.local for s in self._shards[self._done : end]]:
            self._sums.append(prepare(lot, self._device)())
            self._done = end

    def seen(self) -> Seen:
        """Look at the rest, if any; returns what was seen."""
        self.go_on(1)
        numbers = torch.cat(self._sums).tolist() if self._sums else []
        return {s.names: (number, s.pieces) for s, number in zip(self._shards, numbers, strict=True)}


def _at_a_glance(shards: Sequence[Shards], device: torch.device) -> Glances:
    """Of contiguous parts only: of others a glance would take a copy."""
    parts = {s.names: s.local for s in shards}
    some = {names: part.view(-1)[:_GLANCE] for names, part in parts.items() if part.is_contiguous()}
    return dict(zip(some, prepare(list(some.values()), device)().tolist(), strict=True))
