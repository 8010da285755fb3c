"""Keeps a mirror up to date with a trainer whose tensors have another dtype, lie on another device, or are sharded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stoker.kernels.errors import (
    StokerError,
    UnsupportedModelError,
    WeightsMismatchError,
    WeightTransferError,
)
from stoker.kernels.host_memory import StableBuffers
from stoker.weight_sync.bitsandbytes_state import give_state, with_scales
from stoker.weight_sync.change_detection import Changes, Glances, Look, Seen
from stoker.weight_sync.checksum import in_doubt, unfit
from stoker.weight_sync.form import Form
from stoker.weight_sync.gather import MEMORY_BYTES, Gatherer
from stoker.weight_sync.held import Held, by_group
from stoker.weight_sync.mirror import Consumer, Mirror
from stoker.weight_sync.mirror_comparison import compare
from stoker.weight_sync.naming import engine_dtypes, main_dtype, named_tensors, unwrap, walk_adapters
from stoker.weight_sync.rank_agreement import agree, number_of, parts_of, refuse, telling, unite
from stoker.weight_sync.shards import Reader, is_sharded
from stoker.weight_sync.staging import copy_each


@dataclass
class _Known:
    """What was found out about what a trainer holds: that it fits, and how to look at it."""

    held: Held
    in_doubt: list[tuple[str, Tensor, torch.dtype]] | None = (
        None  # tensors whose range may not fit; None: not looked yet
    )
    looks: dict[bool, Look] = field(default_factory=dict)  # the last one with expectations, and the last without


class MirroredSource:
    """Keeps a mirror of what the trainer holds: whole tensors in another dtype or on another device, or shards of any kind.

    Of adapters it holds those that are sharded, in the trainer's dtype; the engine reads whole ones where they are. Weights in 4
    bits are held packed, with their scales.

    A pull reads what this rank holds, and writes only tensors whose checksum, or place, changed since. Of what the last pull
    found changed, whole tensors are written in the same pass, and parts are looked at while they are gathered, if a glance shows
    that they changed again. Shards are gathered bucket by bucket straight into the mirror; while one bucket is put in place, the
    next is gathered. Both together take at most ``gather_bytes`` besides the mirror, Gloo's own buffers included (but at least
    one row of a tensor that is sharded along another dimension than its first); checksums that are made before that take some
    5 MiB on a CPU. Ranks take part in each other's gathers where they find different tensors changed.

    Whatever can be refused is refused before the first byte is written. A gather that fails half-way leaves the mirror partly
    old and partly new, and ``complete`` False until a pull succeeds. (A second mirror could keep the old version, for twice the
    memory.)

    Weights that are handed over pass through: they are in memory one layer after the other, while they are handed over.
    """

    kind = "mirror"

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        device: torch.device | None,
        *,
        check_finite: bool = False,
        gather_bytes: int = MEMORY_BYTES,
        stable: StableBuffers = lambda *_: None,
    ) -> None:
        """stable: makes memory that keeps its addresses through a sleep, where that is possible."""
        self.model = model
        self._stable = stable
        self._gather_bytes = gather_bytes
        self._wanted = dtype
        self._check_finite = check_finite
        self._reader = Reader(model)
        self._known: _Known | None = None  # of what was read last
        held = self._read()
        self._shapes, self._aliases = held.shapes, held.aliases
        self._adapters, self._beside, self._packed = held.adapters, held.beside, held.states
        self._homes = held.homes
        self._parts = parts_of(held.shards)  # kept, so that a rank knows them even when it cannot read its own
        parameters = held.parameters - held.adapters  # these stay in the trainer's dtype
        self._dtypes = engine_dtypes(model, held.dtypes, parameters, dtype)
        kinds = {(held.dtypes[name], self._dtypes[name]) for name in parameters}
        self.wider = {own: wide for own, wide in kinds if own != wide == torch.promote_types(own, wide)}
        self.optional = held.optional
        own = [*(s.device for s in held.shards), *(t.device for t in held.full.values()), torch.device("cpu")][0]
        device = device or own
        self.converts = (
            self._dtypes != held.dtypes or device.type != own.type
        )  # whether it holds other bits than the trainer
        self.device = torch.empty(0, device=device).device  # with an index, which "cuda" lacks
        plain = parameters - self._packed.keys()  # a packed weight's dtype is not the one it computes in
        self.dtype = main_dtype((self._dtypes[name], held.shapes[name].numel()) for name in plain)
        self.mirror: Mirror | None = None
        self._gatherer: Gatherer | None = None  # to the mirror
        self._kept: set[str] = set()  # weights that could pass through, and must not
        self._seen: Seen = {}
        self._glances: Glances = {}
        self._expected: set[tuple[str, ...]] = set()  # what is expected to change again, as it did the last time
        self._from_elsewhere = False
        self._number: int | None = None  # of ``number_of``: tells apart several sources of the same model

    @property
    def module(self) -> nn.Module:
        return unwrap(self.model)

    @property
    def nbytes(self) -> int:
        return self.mirror.nbytes if self.mirror is not None else 0

    @property
    def complete(self) -> bool:
        return self.mirror is not None and self.mirror.complete

    def names(self) -> set[str]:
        held = self._read()
        return held.names - held.beside

    def tensors(
        self, groups: Sequence[tuple[str, ...]] = (), layers: Sequence[Collection[str]] = ()
    ) -> dict[str, Tensor]:
        """The mirror's tensors. The first call makes it, with the layout that ``groups`` and ``layers`` ask for."""
        if self.mirror is None:
            tied = self._aliases.keys() | {*self._aliases.values()}
            may_pass = {n for n in self._shapes if self._dtypes[n] == self.dtype} - tied - self._kept
            passing = [layer for layer in (frozenset(may_pass.intersection(names)) for names in layers) if layer]
            self.mirror = Mirror(self._shapes, self._dtypes, self._aliases, groups, self.device, passing, self._stable)
            self._gatherer = Gatherer(self.mirror, self._gather_bytes)
            self.mirror.fill_room()
            self._give_states(self.mirror)
        return {name: tensor for name, tensor in self.mirror.tensors.items() if name not in self._beside}

    @property
    def bound(self) -> dict[str, Tensor]:
        return self.tensors()

    @property
    def places(self) -> object:
        return None if self.mirror is None else self.mirror.places

    @property
    def passing(self) -> frozenset[str]:
        return frozenset() if self.mirror is None else self.mirror.passing

    def keep(self, names: Collection[str]) -> None:
        """Always keep these in memory, in tensors that the next call of ``tensors`` makes."""
        self._kept |= {*names}
        self.release()

    def hand_over(self, consumer: Consumer) -> None:
        assert self.mirror is not None
        self.mirror.consumer = consumer
        self.mirror.close_room()
        if self.mirror.passing:
            self.pull()

    def _give_states(self, mirror: Mirror) -> None:
        for name, state in self._packed.items():
            give_state(mirror.tensors[name], with_scales(state, f"{name}.", mirror.tensors, self.device))

    @property
    def adapters(self) -> dict[str, Tensor]:
        return {name: self.mirror.tensors[name] for name in self._adapters} if self.mirror is not None else {}

    def replaced_adapters(self) -> list[str]:
        if not self._homes:
            return []
        now = dict(walk_adapters(self.model))
        homes = ((name, now.get(name.rpartition(".")[0]), home()) for name, home in self._homes.items())
        return sorted(name for name, module, home in homes if module is not None and module is not home)

    def rehome(self, groups: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], Tensor]:
        assert self.mirror is not None
        return {group: self.mirror.fused[group] for group in groups if group in self.mirror.fused}

    def bind(self) -> None:
        """Does nothing: what the trainer holds is read anew at every pull."""

    def moved(self, module: nn.Module) -> bool:
        return False

    def check(self) -> None:
        """Does nothing: a mirror's tensors do not move."""

    def overwritten(self) -> None:
        """Note that the mirror was filled from elsewhere: the model here is not looked at before the next pull."""
        assert self.mirror is not None
        if not self.mirror.complete:  # dropped: buffers that no checkpoint has did not come either
            own: list[tuple[str, Any]] = [(n, t) for n, t, _ in named_tensors(self.model) if n in self.optional]
            whole = [t.to_local() if isinstance(t, DTensor) else t for _, t in own]
            copy_each([self.mirror.tensors[name] for name, _ in own], whole)
        self.mirror.complete |= not self._adapters  # adapters did not come, and may have been dropped
        self._from_elsewhere, self._seen = True, {}

    def write(self, new: Mapping[str, Tensor], form: Form | None = None) -> int:
        assert self.mirror is not None
        return self.mirror.write(new, form)

    def spoil(self) -> None:
        assert self.mirror is not None
        self.mirror.complete = False

    def lies_as_read(self) -> bool:
        """Whether the model has the same tensors at the same places as when it was read last, with nothing gathered."""
        return self._reader.lies_as_read()

    def catch_up(self) -> bool:
        if self._reader.has_parts or (held := self._reader.remembered()) is None:
            if is_sharded(self.model) and not (dist.is_initialized() and dist.get_world_size() == 1):
                return False  # do not even read: that would reshard what FSDP2 has gathered, on this rank alone
            held = self._read()
        return not held.shards and not self._from_elsewhere and self._take(self._look(held)) > 0

    def pull(self, alike: Sequence[str] = ()) -> int:
        """Take what changed; returns the bytes written. alike: as for ``agree``."""
        follows = self.complete
        with self._telling():
            found = self._look(self._read(), self._expected)
        written = self._take(found, alike)
        self._expected = found.changed if follows else set()  # the first filling does not tell what will change
        return written

    def refuse(self, error: Exception) -> bool:
        refuse(self._parts, self.device, error)
        return bool(self._parts)

    def _telling(self) -> AbstractContextManager[None]:
        return telling(self._parts, self.device)

    def mismatches(self, alike: Sequence[str] = ()) -> tuple[int, list[str]]:
        assert self.mirror is not None
        return compare(self._read, self.mirror, self._parts, self._gather_bytes, (*alike, f"verify {self._number}"))

    @property
    def resident(self) -> bool:
        return self.mirror is not None and self.mirror.resident

    @property
    def stable_addresses(self) -> bool:
        return self.mirror is not None and self.mirror.stable_addresses

    def give_back(self, *, drop: bool) -> None:
        assert self.mirror is not None
        if drop:
            self.mirror.release()
        else:
            self.mirror.offload()

    def take_again(self) -> None:
        assert self.mirror is not None
        self.mirror.restore()

    @property
    def at_hand(self) -> bool:
        return not self._from_elsewhere and not is_sharded(self.model)

    def fill(self) -> bool:
        before, held = self._seen, self._read()
        if not held.shards:
            with suppress(UnsupportedModelError, WeightsMismatchError):  # the next pull raises it again
                self._take(self._look(held))
        return before != self._seen

    def release(self) -> None:
        """Drop the mirror. The trainer was never touched."""
        self.mirror = self._gatherer = self._known = None
        self._reader.forget()

    # -- internals ----------------------------------------------------------------------------------------------

    def _read(self) -> Held:
        """What the trainer holds now."""
        return self._reader.read()

    def _look(self, held: Held, expected: Set[tuple[str, ...]] = frozenset()) -> Changes:
        assert self.mirror is not None and self.mirror.resident
        known = self._known if self._known is not None and self._known.held is held else _Known(held)
        self._known = known if self._reader.held is held else None
        refusal = self._refusal(known)
        expected = expected if refusal is None else frozenset()
        look = known.looks.get(bool(expected))
        if look is None or not look.fits(expected):
            look = Look(held, self.mirror, expected)
            if not self._reader.has_parts:  # which it would keep in memory when the trainer no longer does
                known.looks[bool(expected)] = look
        return look.find_changes(self._seen, self._glances, refusal)

    def _take(self, found: Changes, alike: Sequence[str] = ()) -> int:
        mirror, held, changed = self.mirror, found.held, found.changed
        assert mirror is not None
        parts = parts_of(held.shards)
        alike = (*alike, f"update {self._number}")
        has_news = agree(parts, self.device, found.refusal, has_news=bool(changed), alike=alike)
        self._number = number_of(parts) if self._number is None else self._number
        self._packed, self._parts = held.states, parts
        written = 0
        if has_news:
            unite(parts, changed, self.device)
            written = self._bring(found)
        else:
            self._give_states(mirror)
        mirror.complete, self._from_elsewhere, self._homes = True, False, held.homes
        self._seen, self._glances = found.now, found.glances
        return written

    def _bring(self, found: Changes) -> int:
        """Write what has changed, on all ranks together; returns the bytes written. Where one of them fails, all do."""
        mirror, held, changed, written = self.mirror, found.held, found.changed, 0
        assert mirror is not None
        there = sum(nbytes for name, nbytes in found.written.items() if (name,) in changed)
        new = {name: tensor for name, tensor in held.full.items() if name not in found.written and (name,) in changed}
        if not (new or self._parts):
            self._give_states(mirror)
            return there
        # Group by group, so that a group's buckets depend only on what that group has agreed on.
        shards = [s for of_group in by_group(held.shards).values() for s in of_group if s.names in changed]

        def refresh(names: Collection[str]) -> None:
            nonlocal written
            assert mirror.consumer is not None
            written += mirror.consumer.refresh(names)

        with ExitStack() as memory:
            with self._telling():
                self._give_states(mirror)
                assert self._gatherer is not None
                gathering = self._gatherer.prepare(memory, shards, meanwhile=found.later.go_on)
            agree(self._parts, self.device)  # all ranks have the memory for it; nothing was written so far
            mirror.complete = False
            try:
                with self._telling():
                    gathering(refresh)
                    written += mirror.write(new)
                    found.now.update(found.later.seen())
                agree(self._parts, self.device, half_way=True)
            except Exception as error:
                if not self._parts:
                    raise
                reason = error if isinstance(error, StokerError) else f"{type(error).__name__}: {error}"
                raise WeightTransferError(
                    f"{reason}. The weights are now in parts old and new: the engine refuses to generate until an update "
                    "succeeds"
                ) from error
        moved = (name for s in shards for name in s.names if name not in mirror.passing)
        return there + written + sum(mirror.tensors[name].nbytes for name in moved)

    def _refusal(self, known: _Known) -> Exception | None:
        doubtful = known.in_doubt
        if doubtful is None:
            if (misfit := self._misfit(known.held)) is not None:
                return misfit
            doubtful = list(in_doubt(known.held.numbers(self._dtypes), finite=self._check_finite))
            if not (doubtful and self._reader.has_parts):
                known.in_doubt = doubtful
        wrong = list(unfit(doubtful, finite=self._check_finite))
        if wrong:
            return WeightsMismatchError(f"{'; '.join(wrong)}. No weight was changed: the engine keeps its version")
        return None

    def _misfit(self, held: Held) -> Exception | None:
        if held.spoilt:
            return UnsupportedModelError(
                f"parameter {held.spoilt[0]} is sharded, and bitsandbytes' forward in eval() takes its parts for laid out as "
                "some CPUs like them: the model is spoilt. Load it anew, with support_avx512bf16_for_cpu = False on its layers"
            )
        if held.names == self._shapes.keys() | self._aliases.keys() and held.aliases != self._aliases:
            shared = sorted(name for name in held.names if held.aliases.get(name) != self._aliases.get(name))
            return UnsupportedModelError(
                f"the model shares other tensors than when the engine was built ({shared[:4]}), as after "
                "load_state_dict(assign=True): call tie_weights() on it, or build a new engine"
            )
        if held.shapes != self._shapes or held.aliases != self._aliases:
            names = held.shapes.keys() ^ self._shapes.keys() or {
                n for n in held.shapes if held.shapes[n] != self._shapes[n]
            }
            return UnsupportedModelError(
                f"the model has another shape than the engine was built for: build a new engine (tensors {sorted(names)[:4]})"
            )
        return None
