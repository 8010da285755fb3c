"""Which adapters have one of the slots in which the device reads their weights: first come, first served, in turns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stoker.engine.request import Adapter, Request


class AdapterSlots:
    """An adapter needs a slot while requests with it run, and keeps it until another adapter needs it.

    A request whose adapter has none waits until one is free; requests behind it may go first. It does not wait for ever: while it
    waits, the adapter whose turn began first takes no requests that came after its turn began, so its slot becomes free.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        # The adapters with a slot, in the order their turns began, and the newest request at that time.
        self._turns: dict[Adapter, int] = {}

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._turns)

    def drop(self, adapter: Adapter) -> bool:
        """Take its slot from an adapter that nothing uses; False where it had none."""
        return self._turns.pop(adapter, None) is not None

    def admissible(self, waiting: Sequence[Request], running: Iterable[Request]) -> Iterator[Request]:
        """The waiting requests that need no slot, or whose adapter has one; an adapter may begin its turn here."""
        used = {r.adapter for r in running if r.adapter is not None}
        closing: Adapter | None = None
        for request in waiting:
            adapter = request.adapter
            if adapter is not None and adapter not in used:
                if len(used) == self.count:
                    closing = closing or next(iter(self._turns))  # all of them are used
                    continue
                self._begin_turn(adapter, used, waiting[-1].id)
                used.add(adapter)
            elif adapter is not None and adapter is closing and request.id > self._turns[adapter]:
                continue
            yield request

    def _begin_turn(self, adapter: Adapter, used: set[Adapter], newest: int) -> None:
        if self._turns.pop(adapter, None) is None:
            if len(self._turns) == self.count:
                del self._turns[next(a for a in self._turns if a not in used)]
            adapter.slot = min(set(range(1, self.count + 1)) - {a.slot for a in self._turns})
        self._turns[adapter] = newest
