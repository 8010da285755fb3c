"""Adapters as requests use them: their names, the slots their weights are in, and which one a request means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from functools import reduce
from itertools import count
from typing import Any, Final

import torch

from stoker.engine.adapters.lora import Filling
from stoker.engine.adapters.slab import Slab, lies_on, pack
from stoker.engine.adapters.slots import AdapterSlots
from stoker.engine.device import runtime_for
from stoker.engine.images.adapters import ImageAdapter, image_adapter
from stoker.engine.request import Adapter, Request, Status
from stoker.kernels.errors import (
    EngineStateError,
    InvalidRequestError,
    RequestFailedError,
    StokerError,
)
from stoker.kernels.reference.adapter_weights import AdapterWeights
from stoker.rollout.adapter_sources import dtypes_of
from stoker.rollout.binding import ModelBinding
from stoker.rollout.user_values import shown
from stoker.weight_sync.adapter_files import model_of
from stoker.weight_sync.rank_agreement import ranks_of, telling


class Live(Enum):
    """Type of ``LIVE``."""

    LIVE = "LIVE"

    def __repr__(self) -> str:
        return "LIVE"


LIVE: Final = Live.LIVE
"""The model as the trainer would run it now: with its active adapters, or the base where it has none."""

AdapterChoice = Live | str | None


def deleted(request: Request) -> RequestFailedError:
    assert request.adapter is not None
    return RequestFailedError(
        f"adapter {request.adapter.name!r} was deleted from the model while this request used it: submit it again with "
        "another"
    )


class Adapters:
    """Adapters by name, and their weights in slots. Those on the live model are found without being loaded."""

    def __init__(self, binding: ModelBinding) -> None:
        self._binding = binding
        self.slots = AdapterSlots(binding.max_loras)
        self._serials = count()
        self._known: dict[str, Adapter] = {}
        self._weights: dict[str, AdapterWeights] = {}
        # By slot: the shell, the adapter's weights, and the same weights on the device, which may be a copy in a slab.
        self._placed: dict[int, tuple[object, AdapterWeights, AdapterWeights]] = {}
        self._slabs: dict[int, Slab] = {}
        self._aliased: dict[str, tuple[AdapterWeights, bool]] = {}
        self._fillings: dict[str, Filling] = {}  # of adapters that slots read in place
        self._dtypes: set[torch.dtype] = set()  # of all adapters' matrices
        self._casts: dict[torch.dtype, torch.dtype] = {}  # to what slots have instead
        # Names of those of which what was computed serves nothing any more, until ranks that run together told each other.
        self.outdated: set[str] = set()
        # From ``give_back`` until ``take_again``: the slots that were emptied, and the bytes of the copies that were freed.
        self.emptied: set[int] = set()
        self.given_back = 0

    @property
    def names(self) -> list[str]:
        return list(self._known)

    @property
    def in_slots(self) -> dict[str, AdapterWeights]:
        """The adapters that slots run, by name."""
        found = {}
        for adapter in self.slots:
            _, weights, here = self._placed.get(adapter.slot, (None, None, None))
            if here is not None and weights is self._weights.get(adapter.name):  # else its turn has just begun
                found[adapter.name] = here
        return found

    def refresh(self) -> None:
        """Take the live model's adapters, and fill the slots of the shell, which may be new. No step may be pending.

        An adapter that runs in another dtype than before gets another serial, as what was computed with it is not what it computes.
        """
        live = self._binding.adapters.weights
        for name in self._known.keys() - live.keys():
            self._forget(name)
        for name in (n for n in live if n not in self._known):  # in their order, which is the same in every run
            self._known[name] = Adapter(name, next(self._serials))
        shell = self._binding.shell
        if live is not self._weights:
            self._dtypes = set[torch.dtype]().union(*map(dtypes_of, live.values()))
        if (casts := self._casts_of(self._dtypes)) != self._casts:
            for adapter in self.slots:  # all of them first: no slot may have another dtype than its neighbours
                shell.lora.put(adapter.slot, None)
            for name, adapter in self._known.items():
                if any(casts.get(d, d) != self._casts.get(d, d) for d in dtypes_of(live[name])):
                    adapter.serial = next(self._serials)
                    self.outdated.add(name)
            self._placed.clear()
            self._aliased.clear()
            self._fillings.clear()
            self._casts = casts
        self._weights = live
        # What is known of adapters that are gone, or replaced, is dropped.
        self._aliased = {n: known for n, known in self._aliased.items() if known[0] is live.get(n)}
        self._fillings = {n: f for n, f in self._fillings.items() if f.is_of(shell.lora, live.get(n))}
        shell.lora.stacks.forget()
        asleep = bool(self.emptied) or not self._binding.resident
        for adapter in self.slots:
            if asleep:  # its weights may not be there: ``take_again`` fills the slot
                self.emptied.add(adapter.slot)
                self._placed.pop(adapter.slot, None)
            else:
                self.place(adapter, changed=True)

    @property
    def behind(self) -> bool:
        """Whether adapters changed since ``refresh``, as after a change that was interrupted."""
        there = self._binding.adapters.weights
        return self._weights is not there or self._known.keys() != there.keys()

    def knows(self, adapter: Adapter | None) -> bool:
        """Whether an adapter is still there, and has not been replaced by another of its name."""
        return adapter is None or self._known.get(adapter.name) is adapter

    def runnable(self, requests: Sequence[Request]) -> list[Request]:
        """The requests whose adapter is still there: another thread may have unloaded it. The others fail."""
        for request in requests:
            if not self.knows(request.adapter):
                request.fail(deleted(request))
        return [r for r in requests if r.status is not Status.FINISHED]

    def load(self, name: str, source: Any, under_way: Iterable[Request]) -> list[Exception]:
        """Know an adapter that is not the live model's. Returns the error, and has changed nothing, where it cannot.

        In a list to take it from, as in ``Loop.attempt``; it is empty where there is none.

        ``EngineStateError`` where one of that name is in use, ``UnsupportedModelError`` for one the engine does not run.
        """
        try:
            with telling(*ranks_of(model_of(source))):  # or the other ranks of a sharded model would wait
                self._check_unused(name, under_way, "replaced")
            self._binding.load_adapter(name, source)
        except Exception as refused:  # whatever somebody's object, given as a source, may raise
            return [refused]
        self._forget(name)
        self.refresh()
        return []

    def unload(self, name: str, under_way: Iterable[Request]) -> list[Exception]:
        """Forget one that was loaded. Returns as ``load``."""
        try:
            self._check_loaded(name)
            self._check_unused(name, under_way, "unloaded")
        except StokerError as refused:
            return [refused]
        self._binding.adapters.unload(name)
        self._forget(name)
        return []

    def _check_loaded(self, name: str) -> None:
        """Raise ``InvalidRequestError`` where no adapter was loaded under that name."""
        if not isinstance(name, str) or not self._binding.adapters.is_loaded(name):
            where = "is the live model's: delete_adapter() there removes it" if name in self.names else "is not known"
            raise InvalidRequestError(f"adapter {name!r} {where}")

    def _check_unused(self, name: str, under_way: Iterable[Request], action: str) -> None:
        """Raise ``EngineStateError`` where requests use the adapter."""
        if count := sum(r.adapter is not None and r.adapter.name == name for r in under_way):
            raise EngineStateError(
                f"adapter {name!r} cannot be {action} while {count} requests use it: wait for or abort them"
            )

    @torch.inference_mode(False)  # or what is copied here could not be written to later
    def place(self, adapter: Adapter, *, changed: bool = False) -> None:
        """Put an adapter's weights into its slot, in place of another adapter's or of older ones.

        changed: the base's numbers may have changed, and the adapter's too if it is live.
        """
        shell, weights, slot = self._binding.shell, self._weights[adapter.name], adapter.slot
        before = self._placed.get(slot, (None, None, None))
        there = before[0] is shell and before[1] is weights
        filling = self._fillings.get(adapter.name)
        if filling is not None and not filling.is_of(shell.lora, weights):
            filling = None
        if there and (filling is not None or not changed):
            return
        device, packed = self._binding.source.device, self._binding.adapters.packed.get(adapter.name)
        aliased = packed is None and self._is_aliased(adapter.name, weights)
        if there and (aliased or packed) and not shell.lora.derives(weights):
            return
        self._placed.pop(slot, None)  # after an exception below, the slot must not count as filled
        here = weights
        if aliased:
            self._drop_slab(slot)
        elif there and packed and before[2] is not None:
            here = before[2]
        else:
            slab = self._slabs.setdefault(slot, Slab(runtime_for(device)))
            if packed is None or self._casts:
                packed = pack(self._as_run(weights), runtime_for(device))
            here = slab.fill(packed)
        with torch.autocast(device.type, enabled=False):  # the caller's is not for what a slot derives
            filling = filling or shell.lora.prepare(here)
            shell.lora.put(slot, filling)
        if aliased and not filling.derived:
            self._fillings[adapter.name] = filling
        self._placed[slot] = shell, weights, here

    def over_images(self, adapter: Adapter) -> ImageAdapter:
        """What an adapter does to modules that only images go through."""
        shell = self._binding.shell
        with torch.autocast(shell.device.type, enabled=False):
            return image_adapter(shell, adapter.name, self._as_run(self._weights[adapter.name]))

    def give_back(self) -> None:
        """Free the copies on the device. Adapters keep their slots; those of the trainer's stay where they lie.

        Slots of adapters that lie among weights which are given back are emptied too.
        """
        self.given_back += sum(slab.nbytes for slab in self._slabs.values())
        known = self._binding.adapters
        mirrored = [
            a.slot
            for a in self.slots
            if a.name in known.gathered or (self._binding.source.adapters and not known.is_loaded(a.name))
        ]
        self.emptied.update(self._slabs, mirrored)
        for slot in self.emptied:
            self._binding.shell.lora.put(slot, None)
            self._placed.pop(slot, None)
        self._slabs.clear()
        self._fillings.clear()  # those weights may lie elsewhere afterwards

    def release(self) -> None:
        """Let go of all weights, and of the shell."""
        self._placed.clear()
        self._aliased.clear()
        self._fillings.clear()
        self._weights = {}

    def take_again(self) -> None:
        for adapter in self.slots:
            self.place(adapter)
        self.emptied.clear()
        self.given_back = 0

    def _is_aliased(self, name: str, weights: AdapterWeights) -> bool:
        """Whether slots read its tensors in place, without a copy. Found out once for each set of tensors."""
        known = self._aliased.get(name)
        if known is None or known[0] is not weights:
            source = self._binding.source
            as_run = not any(t.dtype in self._casts for t in weights.tensors())
            known = self._aliased[name] = weights, as_run and lies_on(weights, source.device)
        return known[1]

    def _casts_of(self, dtypes: Iterable[torch.dtype]) -> dict[torch.dtype, torch.dtype]:
        """The casts of adapters' tensors, by dtype. dtypes: of their matrices.

        Kernels take one dtype for all adapters that run together: the widest there is, and the engine's own where that is
        wider still.
        """
        wider = dict(self._binding.source.wider)
        as_run = {own: wider.get(own, own) for own in dtypes}
        one = reduce(torch.promote_types, as_run.values()) if as_run else None
        return wider | {own: one for own, run in as_run.items() if one is not None and run != one}

    def _as_run(self, weights: AdapterWeights) -> AdapterWeights:
        casts = self._casts
        return weights.map(lambda t: t.to(casts.get(t.dtype, t.dtype))) if casts else weights

    def _forget(self, name: str) -> None:
        adapter = self._known.get(
            name
        )  # known until all else of it is gone, so that an interrupted call can be repeated
        if adapter is None:
            return
        self.outdated.add(name)
        self._aliased.pop(name, None)
        self._fillings.pop(name, None)
        if self.slots.drop(adapter):
            self._binding.shell.lora.put(adapter.slot, None)
            self._placed.pop(adapter.slot, None)
            self._drop_slab(adapter.slot)
        del self._known[name]

    def _drop_slab(self, slot: int) -> None:
        if (slab := self._slabs.pop(slot, None)) is not None:
            slab.let_go()

    def chosen(self, choice: AdapterChoice | Sequence[AdapterChoice], rows: int) -> list[str | None]:
        """Each row's adapter by name. choice: one for all, or one for each. Raises ``InvalidRequestError`` for an unknown name."""
        several = isinstance(choice, Sequence) and not isinstance(choice, str)
        choices: list[Any] = list(choice) if several else [choice] * rows  # type: ignore[arg-type]
        if len(choices) != rows:
            raise InvalidRequestError(f"{len(choices)} adapters for {rows} rows: give one, or one per row")
        live = self._binding.active_adapter() if any(c is LIVE for c in choices) else None  # which looks at the model
        names = [live if c is LIVE else c for c in choices]
        self.found(names)
        return names

    def found(self, names: Iterable[str | None]) -> list[Adapter | None]:
        """The adapters of these names. Raises ``InvalidRequestError`` for an unknown one."""
        return [self._find(name) for name in names]

    def _find(self, choice: str | None) -> Adapter | None:
        if choice is None:
            return None
        if not isinstance(choice, str) or choice not in self._known:
            known = ", ".join(map(repr, self.names)) or "none"
            raise InvalidRequestError(f"adapter={shown(choice)} is not known: there are {known}; None is the bare base")
        return self._known[choice]
