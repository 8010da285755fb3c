"""The adapters an engine knows by name, which of them are in its slots, and which one a request means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import count
from typing import Any, Final

from stoker.engine.request import Adapter, Request
from stoker.kernels.errors import EngineStateError, InvalidRequestError
from stoker.kernels.reference.lora import AdapterWeights
from stoker.rollout.binding import ModelBinding


class Live(Enum):
    """Type of ``LIVE``."""

    LIVE = "LIVE"

    def __repr__(self) -> str:
        return "LIVE"


LIVE: Final = Live.LIVE
"""The model as the trainer would run it now: with its active adapters, or the base where it has none."""

AdapterChoice = Live | str | None


class Adapters:
    """Names, slots, and what is in them. Those on the live model are known by themselves."""

    def __init__(self, binding: ModelBinding) -> None:
        self._binding = binding
        self._serials = count()
        self._known: dict[str, Adapter] = {}
        self._weights: dict[str, AdapterWeights] = {}
        self._on_device: dict[
            str, tuple[AdapterWeights, AdapterWeights]
        ] = {}  # of a slot: what was copied, and its copy
        self._slotted: list[Adapter] = []  # least recently used first
        self._placed: dict[int, tuple[object, AdapterWeights]] = {}  # by slot: in which shell, and what

    @property
    def names(self) -> list[str]:
        return list(self._known)

    def refresh(self) -> None:
        """Take the live model's adapters as they are, and fill the slots of a shell that may be new. Nothing may be pending."""
        live = self._binding.adapters
        for name in self._known.keys() - live.keys():
            self._forget(name)
        for name in live.keys() - self._known.keys():
            self._known[name] = Adapter(name, next(self._serials))
        self._weights = live
        shell = self._binding.shell
        for adapter in self._slotted:
            placed, weights = self._placed[adapter.slot], live[adapter.name]
            if placed[0] is not shell or placed[1] is not weights or shell.lora.derives(weights):
                self._put(adapter)

    def knows(self, adapter: Adapter) -> bool:
        """Whether it is still there, and no other one under its name."""
        return self._known.get(adapter.name) is adapter

    def load(self, name: str, source: Any, under_way: Iterable[Request]) -> EngineStateError | None:
        """Know an adapter that is not the live model's. Returns an error, and has changed nothing, where one is in use.

        Raises ``UnsupportedModelError`` before anything is changed.
        """
        error = self._in_use(name, under_way, "replaced")
        if error is None:
            self._binding.load_adapter(name, source)
            if name in self._known:
                self._forget(name)
            self.refresh()
        return error

    def unload(self, name: str, under_way: Iterable[Request]) -> EngineStateError | None:
        error = self._in_use(name, under_way, "unloaded")
        if error is None:
            self._binding.unload_adapter(name)
            self._forget(name)
        return error

    def check_loaded(self, name: str) -> None:
        """Raise ``InvalidRequestError`` where that is no adapter that was loaded."""
        if not self._binding.is_loaded(name):
            where = "is the live model's: delete_adapter() there removes it" if name in self._known else "is not known"
            raise InvalidRequestError(f"adapter {name!r} {where}")

    def _in_use(self, name: str, under_way: Iterable[Request], action: str) -> EngineStateError | None:
        count = sum(r.adapter is not None and r.adapter.name == name for r in under_way)
        if not count:
            return None
        return EngineStateError(
            f"adapter {name!r} cannot be {action} while {count} requests use it: wait for or abort them"
        )

    def _put(self, adapter: Adapter) -> None:
        weights = self._weights[adapter.name]
        copied = self._on_device.get(adapter.name)
        if copied is None or copied[0] is not weights:
            copied = weights, weights.to(self._binding.source.device)
            if copied[1] is not weights:
                self._on_device[adapter.name] = copied
        self._binding.shell.lora.put(adapter.slot, copied[1])
        self._placed[adapter.slot] = self._binding.shell, weights

    def _forget(self, name: str) -> None:
        adapter = self._known.pop(name)
        self._on_device.pop(name, None)
        if adapter in self._slotted:
            self._slotted.remove(adapter)
            self._binding.shell.lora.put(adapter.slot, None)
            self._placed.pop(adapter.slot, None)

    def resolve(self, choice: AdapterChoice | Sequence[AdapterChoice], rows: int) -> list[Adapter | None]:
        """Each row's adapter. choice: one for all, or one for each. Raises ``InvalidRequestError`` for an unknown name."""
        several = isinstance(choice, Sequence) and not isinstance(choice, str)
        choices: list[Any] = list(choice) if several else [choice] * rows  # type: ignore[arg-type]
        if len(choices) != rows:
            raise InvalidRequestError(f"{len(choices)} adapters for {rows} rows: give one, or one per row")
        return [self._find(c) for c in choices]

    def _find(self, choice: AdapterChoice) -> Adapter | None:
        if choice is LIVE:
            choice = self._binding.active_adapter()
        if choice is None:
            return None
        if not isinstance(choice, str) or choice not in self._known:
            known = ", ".join(map(repr, self.names)) or "none"
            raise InvalidRequestError(f"adapter={choice!r} is not known: there are {known}; None is the bare base")
        return self._known[choice]

    def that_fit(self, requests: Iterable[Request], queued: Iterable[Request]) -> list[Request]:
        """Those whose adapters have slots, or could get one beside the adapters of ``queued``, in their order."""
        fitting = {r.adapter for r in queued if r.adapter is not None}
        found = []
        for request in requests:
            if request.adapter is not None and request.adapter not in fitting:
                if len(fitting) >= self._binding.max_loras:
                    continue
                fitting.add(request.adapter)
            found.append(request)
        return found

    def check_room(self, requests: list[Request], queued: list[Request]) -> None:
        """Raise ``InvalidRequestError`` where none of a call's requests can start."""
        if requests and not self.that_fit(requests, queued):
            raise self._too_many({r.adapter for r in (*requests[:1], *queued) if r.adapter is not None})

    def _too_many(self, adapters: set[Adapter]) -> InvalidRequestError:
        return InvalidRequestError(
            f"{len(adapters)} adapters would be in use at one time and EngineConfig.max_loras is {self._binding.max_loras}: "
            "raise it, or wait for the requests under way"
        )

    def place(self, requests: Iterable[Request], under_way: Iterable[Request]) -> InvalidRequestError | None:
        """Bring the adapters of new requests into slots, instead of those that were not used for longest.

        Those of requests under way stay. Returns an error, and has changed nothing, where there are too few slots.
        """
        wanted = {r.adapter for r in requests if r.adapter is not None}
        pinned = wanted | {r.adapter for r in under_way if r.adapter is not None}
        limit = self._binding.max_loras
        if wanted and len(pinned) > limit:
            return self._too_many(pinned)
        for adapter in sorted(wanted, key=lambda a: a.serial):
            if adapter in self._slotted:
                self._slotted.remove(adapter)
            else:
                adapter.slot = self._free_slot(pinned)
                self._put(adapter)
            self._slotted.append(adapter)
        return None

    def _free_slot(self, pinned: set[Adapter]) -> int:
        free = set(range(1, self._binding.max_loras + 1)) - {a.slot for a in self._slotted}
        if free:
            return min(free)
        oldest = next(a for a in self._slotted if a not in pinned)
        self._slotted.remove(oldest)
        self._on_device.pop(oldest.name, None)
        slot, oldest.slot = oldest.slot, 0
        return slot
