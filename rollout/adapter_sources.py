"""All adapters an engine knows, and when they change: those on the live model, and those loaded from elsewhere.

A loaded adapter comes from another live model, a folder or a state dict.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stoker.engine.adapters.slab import Packed, lies_on, pack
from stoker.engine.device import runtime_for
from stoker.engine.model import ModelShell
from stoker.kernels.errors import EngineStateError, UnsupportedModelError
from stoker.kernels.reference.adapter_weights import AdapterWeights
from stoker.weight_sync.adapter_files import model_of, read_adapter
from stoker.weight_sync.aliased_source import AliasedSource
from stoker.weight_sync.naming import unwrap
from stoker.weight_sync.other_model_adapters import AdapterCopies, AdapterOfModel
from stoker.weight_sync.peft_adapters import (
    active_adapters,
    check_adapters,
    layout,
    live_adapters,
    mismatches,
    numbers,
    sum_of,
)
from stoker.weight_sync.rank_agreement import agree, ranks_of, telling
from stoker.weight_sync.source import WeightSource

# What is known of adapters, each by their names.
_BY_NAME = ("_others", "_copies", "packed", "weights", "_layout", "_numbers")


class AdapterSources:
    """Knows adapters by name, and notices when they change.

    ``weights``: all adapters as of the last look. ``active``: the names that the model ran then, in order; None where its
    layers ran different ones. ``packed``: of the adapters that were copied, those that are not on the engine's device.
    gathering: options of ``MirroredSource``, for adapters of other models that are sharded.
    """

    def __init__(self, model: nn.Module, *, deterministic: bool, gathering: Mapping[str, Any]) -> None:
        self._model, self._deterministic, self._gathering = model, deterministic, gathering
        self.weights: dict[str, AdapterWeights] = {}
        self.active: tuple[str, ...] | None = ()
        self.packed: dict[str, Packed] = {}
        self._others: dict[str, AdapterOfModel] = {}
        self._in_step = True  # with the base: the last pull did not fail
        self._copies: dict[str, AdapterWeights] = {}  # loaded from no model: from a folder or a state dict
        # Adapters of the model that were active together, by their joint name ("a+b").
        self._sums: dict[str, tuple[str, ...]] = {}
        # As of the last look: the shell that runs them, where all but the copies lie, and their checksums where these were read.
        # ``_changed``: whether they changed and nobody was told yet.
        self._shell: ModelShell | None = None
        self._layout: dict[str, object] | None = None
        self._numbers: dict[str, list[int]] | None = None
        self._changed = False

    def is_loaded(self, name: str) -> bool:
        return name in self._others or name in self._copies

    def look(self, shell: ModelShell, source: WeightSource, *, announced: bool, same: bool = False) -> None:
        """Take the adapters as they are now; ``take_changed`` then says whether there was a change.

        source: of the shell's weights. announced: the caller treats them as changed anyway, so their numbers need not be read
        now; that happens at the next look, before anything is sampled. same: the model has not changed since the last look,
        so its adapters are the same tensors. Raises ``UnsupportedModelError``, and takes nothing, where the shell
        cannot run them.
        """
        if not announced:
            self._check_copies(source)
        before, moved = self._layout, False
        found = self._changing() if same else self._find(source.adapters, announced)
        if self._others or not same:
            found |= {name: other.read() for name, other in self._others.items()}
            moved = self._take(shell, found)
        if announced:
            self._changed, self._numbers = False, None
            return
        if isinstance(source, AliasedSource):  # which looks at the model's own
            found = {name: adapter for name, adapter in found.items() if name in self._others}
        known, self._numbers = self._numbers, numbers(found, source.device)
        self._changed |= (before is not None and moved) or (known is not None and known != self._numbers)

    def name_of(self, active: tuple[str, ...]) -> str | None:
        """The active adapters' name, joined by "+"; None for none. Raises ``UnsupportedModelError`` where another one has it."""
        name = "+".join(active)
        if len(active) > 1 and name in self.weights and self._sums.get(name) != active:
            raise UnsupportedModelError(
                f"the active adapters {list(active)} would go by the name {name!r}, as another one does: give that one another "
                "name, or activate one adapter"
            )
        return name or None

    def take_changed(self) -> bool:
        """Whether there was a change that nobody announced, since this was asked last."""
        changed, self._changed = self._changed, False
        return changed

    def lie_elsewhere(self) -> None:
        """Note that a mirror, and the adapters among its weights, now lie in other memory."""
        if self._layout is not None:
            self._layout = layout(self._changing())

    # -- copies of adapters of sharded models -------------------------------------------------------------------

    @property
    def _gathered(self) -> dict[str, AdapterCopies]:
        return {name: other.copies for name, other in self._others.items() if other.copies is not None}

    @property
    def gathered(self) -> list[str]:
        """The names of adapters that are gathered, in the order they are pulled in: it has to be the same on all ranks."""
        return list(self._gathered)

    def pull(self) -> int:
        """Gather what has changed in other models' adapters, on all ranks together; returns the bytes written."""
        self._in_step = False
        written = sum(copies.pull((name,)) for name, copies in self._gathered.items())
        self._in_step = True
        return written

    def refuse(self, error: Exception) -> None:
        """Make other ranks fail too, which would wait for this one in ``pull`` or ``mismatches``."""
        if (first := next(iter(self._gathered.values()), None)) is not None:
            first.refuse(error)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Context manager for what comes before ``pull`` or ``mismatches``: where it fails here, other ranks are told.

        Where the base is whole on each rank, nothing else would tell them.
        """
        try:
            yield
        except Exception as error:
            self.refuse(error)
            raise

    @property
    def complete(self) -> bool:
        return self._in_step and all(copies.complete for copies in self._gathered.values())

    @property
    def resident(self) -> bool:
        return all(copies.resident for copies in self._gathered.values())

    @property
    def stable_addresses(self) -> bool:
        return all(copies.stable_addresses for copies in self._gathered.values())

    @property
    def nbytes(self) -> int:
        return sum(copies.nbytes for copies in self._gathered.values())

    def mismatches(self, used: Mapping[str, AdapterWeights], source: WeightSource) -> tuple[int, list[str]]:
        """How many tensors were compared, and the names of those that differ from what their models hold now.

        Sharded adapters of the engine's own model are compared by ``source``. used: the adapters in slots, by name; any other
        is compared as ``weights`` has it, from which its slot would be filled. Names of other models' tensors begin with the
        adapter's. Where a model is sharded, all ranks call this together.
        """
        checked, wrong = 0, list[str]()
        for name, copies in self._gathered.items():
            compared, different = copies.mismatches((name,))  # first, as other ranks wait for it
            different += copies.replaced_adapters()
            checked, wrong = checked + compared, wrong + [f"{name}: {tensor}" for tensor in different]
        wrong += source.replaced_adapters()
        live = {n: a for n, a in live_adapters(unwrap(self._model), source.adapters).items() if n in self.weights}
        for name, held in live.items():
            mine = used.get(name, self.weights[name])
            compared, different = mismatches(self._model, held, mine, source.adapters, source.device)
            checked, wrong = checked + compared, wrong + different
        for name, other in self._others.items():
            compared, different = other.mismatches(used.get(name, self.weights[name]), source.device)
            checked, wrong = checked + compared, wrong + [f"{name}: {tensor}" for tensor in different]
        return checked, wrong

    def give_back(self, *, drop: bool) -> None:
        for copies in self._gathered.values():
            copies.give_back(drop=drop)

    def take_again(self) -> None:
        for copies in self._gathered.values():
            copies.take_again()

    def release(self) -> None:
        """Let go of all adapters, and of the shell."""
        self.weights, self.packed, self._others, self._copies, self._shell = {}, {}, {}, {}, None

    # -- internals ----------------------------------------------------------------------------------------------

    def _changing(self) -> dict[str, AdapterWeights]:
        """All adapters that can change: all but copies."""
        return {name: adapter for name, adapter in self.weights.items() if name not in self._copies}

    def _check_copies(self, source: WeightSource) -> None:
        """Raise ``UnsupportedModelError`` where a copy is of an adapter that another one has replaced since the last pull."""
        if replaced := source.replaced_adapters():
            raise UnsupportedModelError(
                f"{replaced[0]} was replaced since the last update, and the engine has a copy of what was there before: call "
                "update_weights() on every rank; where that is refused, build a new engine"
            )
        for name, copies in self._gathered.items():
            if replaced := copies.replaced_adapters():
                raise UnsupportedModelError(
                    f"adapter {name!r}: {replaced[0]} was replaced on its model since the last update, and the engine has a copy of "
                    "what was there before: call update_weights() on every rank; where that is refused, load the adapter again"
                )

    def _find(self, whole: Mapping[str, Tensor], announced: bool) -> dict[str, AdapterWeights]:
        """The live model's adapters, and the sums of those that were active together. whole: as for ``live_adapters``."""
        check_adapters(self._model)
        model = unwrap(self._model)
        adapters = live_adapters(model, whole)
        try:
            self.active = active_adapters(model)
        except UnsupportedModelError:
            if announced:
                raise
            self.active = None  # another thread may be switching them right now; requests for the live one are refused
        sums = {n: names for n, names in self._sums.items() if adapters.keys() >= set(names)}
        if self.active and len(self.active) > 1:
            sums.setdefault("+".join(self.active), self.active)
        sums = {name: names for name, names in sums.items() if name not in adapters}
        adapters |= {name: sum_of(names, adapters) for name, names in sums.items()}
        for name in filter(self.is_loaded, adapters):
            raise UnsupportedModelError(
                f"adapter {name!r} is on the model, and was loaded too: unload_adapter({name!r})"
            )
        self._sums = sums
        return adapters

    def _take(self, shell: ModelShell, found: dict[str, AdapterWeights]) -> bool:
        """Check and keep adapters that differ from those before; returns whether they do."""
        before, self._layout = self._layout, layout(found)
        moved = before != self._layout or shell is not self._shell
        if moved:
            everything = found | self._copies
            try:
                for name, adapter in everything.items():
                    self._check(shell, name, adapter, everything)
            except UnsupportedModelError:
                self._layout = None
                raise
            self.weights, self._shell = everything, shell
            if not self._deterministic:  # or what is loaded meanwhile would change the bits of others
                shell.lora.know(everything.values())
        return moved

    def _check(
        self, shell: ModelShell, name: str, adapter: AdapterWeights, known: Mapping[str, AdapterWeights]
    ) -> None:
        shell.lora.check(name, adapter)
        shell.recurrent.check(name, adapter)
        if not self._deterministic:
            return
        if outside := shell.lora.outside(adapter):
            raise UnsupportedModelError(
                f"adapter {name!r} changes {outside[0]}, whose matmul is the model's own, and its bits depend on the batch: "
                "not with deterministic=True"
            )
        mine = dtypes_of(adapter)  # all adapters that run together have to have one dtype
        for other in known.values():
            if len(kinds := mine | dtypes_of(other)) > 1:
                raise UnsupportedModelError(
                    f"adapter {name!r} would run beside one in another dtype, {' and '.join(sorted(map(str, kinds)))}: not with "
                    "deterministic=True, cast it"
                )

    def load(self, name: str, given: Any, shell: ModelShell, source: WeightSource) -> None:
        """Know one more adapter, in place of a loaded one of that name. Raises ``UnsupportedModelError``.

        given: as for ``read_adapter``. ``EngineStateError`` where weights are asleep, and cannot be read. For a sharded model
        all ranks call this together, and where one of them refuses, none has the adapter.
        """
        sampled = self._numbers is not None
        ranks = ranks_of(model_of(given))
        with telling(*ranks):
            new, adapter, packed = self._read(name, given, shell, source)
            # Refusals come from here; and what has changed until now would be forgotten below.
            self.look(shell, source, announced=not sampled)
        agree(*ranks, alike=(name,))
        if isinstance(new, AdapterOfModel) and new.copies is not None:
            with telling(*ranks):  # its parts may be over fewer ranks than those of the model
                new.copies.pull((name,))
        before = {of_names: vars(self)[of_names] for of_names in _BY_NAME}
        vars(self).update({of_names: copy.copy(known) for of_names, known in before.items()})
        try:
            with telling(*ranks):
                self.unload(name)
                if isinstance(new, AdapterOfModel):
                    self._others[name] = new
                else:
                    if packed is not None:
                        self.packed[name], adapter = packed, packed.adapter
                    self._copies[name] = adapter
                self._layout = self._numbers = None  # they are of the adapters before
                self.look(shell, source, announced=not sampled)
            agree(*ranks)  # or a rank that ran out of memory here would be alone in trying again
        except BaseException:
            vars(self).update(before)
            raise

    def _read(
        self, name: str, given: Any, shell: ModelShell, source: WeightSource
    ) -> tuple[AdapterWeights | AdapterOfModel, AdapterWeights, Packed | None]:
        """What ``read_adapter`` gives, its weights, and these packed where they are not on the device."""
        if (source.adapters and not source.resident) or not self.resident:
            raise EngineStateError("the weights are asleep: call wake_up(['weights']) first")
        dims = {n: tensor.dim() for n, tensor in source.tensors().items()}
        parameters = {n: dim for n, dim in dims.items() if dim == 3 or (dim == 2 and not n.endswith(".weight"))}
        new = read_adapter(name, given, parameters, source.device, self._gathering)
        if isinstance(new, AdapterOfModel):
            new.check_base(self._model)
        adapter = new.read() if isinstance(new, AdapterOfModel) else new
        live = live_adapters(unwrap(self._model), source.adapters)
        if name in live or (name in self.weights and not self.is_loaded(name)):  # or several that were active at once
            raise UnsupportedModelError(f"adapter {name!r} is on the live model already: choose another name")
        others = {known: weights for known, weights in self.weights.items() if known != name}
        self._check(shell, name, adapter, others | {name: adapter})
        adapter.bases.clear()  # they are those of the model
        elsewhere = not isinstance(new, AdapterOfModel) and not lies_on(adapter, source.device)
        packed = pack(adapter, runtime_for(source.device)) if elsewhere else None
        return new, adapter, packed

    def unload(self, name: str) -> None:
        """Forget a loaded adapter."""
        for of_names in _BY_NAME:
            if (known := vars(self)[of_names]) is not None:
                known.pop(name, None)


def dtypes_of(adapter: AdapterWeights) -> set[torch.dtype]:
    """Of its matrices, and of those on top."""
    return {matrix.dtype for link in adapter.links for matrix in link.matrices()}
