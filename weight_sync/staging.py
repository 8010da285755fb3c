"""Holds new weights from elsewhere, checked, beside those in service until they are complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

import torch
from torch import Tensor

from stoker.kernels.errors import WeightsMismatchError, WeightTransferError
from stoker.kernels.ops import ops_for
from stoker.weight_sync.checksum import checksums, in_doubt, unfit
from stoker.weight_sync.form import Form
from stoker.weight_sync.manifest import TensorSpec

_UNCHANGED = "No weight was changed: the engine keeps its version"
_nbytes = attrgetter("nbytes")
_PLAIN = {Tensor, torch.nn.Parameter}  # and no class that does more than hold numbers


@dataclass
class Known:
    """What is learnt from weights that come, for the next that do.

    casts: by name, of what came last in another dtype than the engine's: what it was, the engine's dtype, its checksum in that.
    A content's checksum does not change, so this is never out of date. form: of named tensors that fitted, where their numbers
    had no part in that.
    """

    casts: dict[str, tuple[TensorSpec, torch.dtype, int]] = field(default_factory=dict)
    form: Form | None = None


@dataclass
class Staging:
    """The second of two buffers: what arrives is written here, in the dtypes of the engine, and put in service at once.

    So a transfer that dies half-way has changed nothing. It costs the memory of a second copy of what arrives while a
    transfer is under way (none for tensors the caller holds anyway), and one copy at memory speed at its end. A tensor that
    comes in parts and is cast also lies there as it was sent, until its last part has come: it is compared with its announcement.

    As the judge of a transfer it wants what the engine does not hold at that moment, whoever wrote that: the sender's
    checksum of a tensor is compared with one of the tensor in service. Where dtypes differ, the latter has to be that
    which the sender's content has after the cast: known if that content came before.

    targets: the tensors in service, tied ones under each name. optional: names that need not come. passing: those whose
    numbers are not in memory, so that they always come.
    """

    targets: Mapping[str, Tensor]
    optional: Collection[str]
    check_finite: bool = False
    known: Known = field(default_factory=Known)
    passing: Collection[str] = ()
    _new: dict[str, Tensor] = field(default_factory=dict)
    _came: dict[str, int] = field(default_factory=dict)  # elements, of what does not fit none
    _problems: list[str] = field(default_factory=list)
    _coming: dict[str, TensorSpec] = field(default_factory=dict)
    _held: dict[str, int] = field(default_factory=dict)  # checksums of what the engine has already
    _parts: dict[str, Tensor] = field(default_factory=dict)  # flat, as sent, of what comes in parts and is to be cast
    _as_sent: dict[str, int] = field(default_factory=dict)  # checksums of what was cast, before that

    def __call__(self, specs: Sequence[TensorSpec]) -> str | None:
        """Why these cannot be taken (which are missing, unknown, doubled, of another shape or kind); None where they can."""
        problems = [problem for spec in specs if (problem := self._problem(spec)) is not None]
        problems += [f"{name} is sent twice" for name, count in Counter(s.name for s in specs).items() if count > 1]
        problems += self._missing({spec.name for spec in specs}.union(self._held))
        return f"the weights do not fit: {'; '.join(problems)}. {_UNCHANGED}" if problems else None

    def wanted(self, specs: Sequence[TensorSpec]) -> list[int]:
        """The places in ``specs`` of those whose content is not known to be the one in service."""
        sums = {spec.name: number for spec in specs if (number := self._in_service(spec)) is not None}
        found = self._sums(sums)
        self._held = {name: number for name, number in sums.items() if found[name] == number}
        return [place for place, spec in enumerate(specs) if spec.name not in self._held]

    def _in_service(self, spec: TensorSpec) -> int | None:
        """The checksum that the content would have in the engine's dtype, where that is known."""
        dtype = self.targets[spec.name].dtype
        if spec.name in self.passing:
            return None
        if spec.dtype == dtype:
            return spec.checksum
        known = self.known.casts.get(spec.name)
        return known[2] if known is not None and known[:2] == (spec, dtype) else None

    def _sums(self, names: Collection[str]) -> dict[str, int]:
        """The checksums of tensors in service, by name."""
        tensors = {id(self.targets[name]): self.targets[name] for name in names}
        numbers = dict(zip(tensors, checksums(tensors.values()), strict=True))
        return {name: numbers[id(self.targets[name])] for name in names}

    def _problem(self, spec: TensorSpec) -> str | None:
        target = self.targets.get(spec.name)
        if target is None:
            return f"unknown {spec.name}"
        if target.shape != spec.shape:
            hint = " (transposed?)" if tuple(target.shape) == tuple(reversed(spec.shape)) else ""
            return f"{spec.name} has shape {tuple(spec.shape)}, not {tuple(target.shape)}{hint}"
        if target.dtype != spec.dtype and target.dtype.is_floating_point != spec.dtype.is_floating_point:
            return f"{spec.name} is {spec.dtype}, not {target.dtype}"
        return None

    def _missing(self, names: Collection[str]) -> list[str]:
        there = {id(self.targets[name]) for name in names if name in self.targets}
        return [
            f"missing {name}" for name, t in self.targets.items() if id(t) not in there and name not in self.optional
        ]

    def hold(self, tensors: Mapping[str, Tensor]) -> bool:
        """Take whole tensors that stay as they are until ``commit``. Copied now are those that ``commit`` will write to.

        Returns whether others of the same form can be held by ``hold_as_before``.
        """
        apart = len({self.targets[name].data_ptr() for name in tensors}) == len(tensors)  # none is there by two names
        for name, tensor in tensors.items():
            if tensor.untyped_storage().data_ptr() in self._written:
                apart = False
                if not same_place(tensor, self.targets[name]):
                    tensor = tensor.detach().clone()
            self._new[name], self._came[name] = tensor, tensor.numel()
        self._look(self._new)
        return apart and not any(in_doubt(self._as_cast(tensors), finite=self.check_finite))

    def hold_as_before(self, tensors: dict[str, Tensor]) -> None:
        """As ``hold`` and ``finish``, of what is known to fit whatever the numbers."""
        self._new = tensors

    @cached_property
    def _written(self) -> set[int]:
        """Addresses of the storages that ``commit`` writes to."""
        return {target.untyped_storage().data_ptr() for target in self.targets.values()}

    def expect(self, spec: TensorSpec) -> bool:
        """Make room for a tensor that is to be written; returns False where it does not fit, and ``finish`` then names it."""
        problem = f"{spec.name} is sent twice" if spec.name in self._came else self._problem(spec)
        if problem is not None:
            self._problems.append(problem)
        else:
            like = self.targets[spec.name]
            self._new[spec.name] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            self._coming[spec.name] = spec
        self._came.setdefault(spec.name, 0)
        return problem is None

    def write(self, name: str, start: int, flat: Tensor) -> None:
        """Copy elements of an expected tensor from ``start`` on."""
        self._look({name: flat})
        spec, new = self._coming[name], self._new[name].view(-1)
        into, end = new, start + flat.numel()
        cast = spec.checksum is not None and spec.dtype != new.dtype  # and what was announced is compared before
        if cast and flat.numel() < new.numel():
            if name not in self._parts:
                self._parts[name] = torch.empty(new.shape, dtype=spec.dtype, device=new.device)
            into = self._parts[name]
        into[start:end].copy_(flat)
        self._came[name] += flat.numel()
        if cast and self._came[name] == new.numel():
            whole = self._parts.pop(name, flat)
            self._as_sent[name] = checksums([whole])[0]
            if whole is not flat:
                new.copy_(whole)

    def _look(self, tensors: Mapping[str, Tensor]) -> None:
        self._problems += unfit(self._as_cast(tensors), finite=self.check_finite)

    def _as_cast(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, torch.dtype]]:
        return ((name, tensor, self.targets[name].dtype) for name, tensor in tensors.items())

    def finish(self) -> None:
        """Raise ``WeightsMismatchError``, naming all that is wrong, unless all there has to be is here and can be taken.

        ``WeightTransferError`` where something that was not to come is no longer what it was, or came otherwise than announced.
        """
        stays = self._stays
        problems = list(dict.fromkeys(self._problems))
        problems += unfit(((n, self.targets[n], self.targets[n].dtype) for n in stays), finite=self.check_finite)
        problems += self._missing({*self._came, *stays})
        problems += [f"{name} came in part" for name, new in self._new.items() if self._came[name] != new.numel()]
        first: dict[object, tuple[str, Tensor]] = {}
        there = self._new | {name: self.targets[name] for name in stays}
        addresses = {self.targets[name].data_ptr() for name in there}
        for name, new in there.items() if len(addresses) < len(there) else ():
            other, value = first.setdefault(self._memory_of(name), (name, new))
            if value is not new and not torch.equal(value.to(new), new):
                problems.append(f"{other} and {name} are one tensor in the model, and came with different values")
        if problems:
            raise WeightsMismatchError(f"the weights do not fit: {'; '.join(problems)}. {_UNCHANGED}")
        self.check_stays()
        self._check_arrived()

    @property
    def _stays(self) -> dict[str, int]:
        """Checksums of what was not to come, as it is in service already."""
        return {name: number for name, number in self._held.items() if name not in self._came}

    def check_stays(self) -> None:
        """Raise ``WeightTransferError`` where something that was not to come is no longer what it was."""
        stays = self._stays
        changed = [name for name, number in self._sums(stays).items() if number != stays[name]]
        if changed:
            raise WeightTransferError(
                f"{', '.join(changed[:4])} changed in this process while the other weights arrived, and did not come: send "
                "again, and call update_weights again. What arrived was not taken"
            )

    def _memory_of(self, name: str) -> object:
        """What is equal for names whose content is written to one place: a tied tensor's, and those of two that share memory."""
        target = self.targets[name]
        if name in self.passing:  # whose memory is that of others, too
            return id(target)
        return target.data_ptr(), target.shape, target.dtype

    def _check_arrived(self) -> None:
        """Raise ``WeightTransferError`` where a content is not the one that was announced.

        Of one that was cast it is learnt what became of it by the cast to the engine's dtype.
        """
        announced = {name: spec for name, spec in self._coming.items() if spec.checksum is not None}
        sums = dict(zip(announced, checksums(self._new[name] for name in announced), strict=True))
        cast = {n for n, spec in announced.items() if spec.numel and spec.dtype != self._new[n].dtype}
        came = sums | {name: self._as_sent[name] for name in cast}
        if wrong := [name for name, spec in announced.items() if came[name] != spec.checksum]:
            raise WeightTransferError(
                f"{', '.join(wrong[:4])} came otherwise than announced: the sender wrote to them while it sent, or the transfer "
                "gave its buckets in another order. Send again, and call update_weights again. What arrived was not taken"
            )
        self.known.casts.update({n: (announced[n], self._new[n].dtype, sums[n]) for n in cast})

    def commit(self, write: Callable[[Mapping[str, Tensor]], int]) -> int:
        """Put everything in service. write: a source's. Returns the bytes that were written."""
        new, self._new = self._new, {}
        return write(new)


def copy_each(targets: Sequence[Tensor], sources: Iterable[Tensor], form: Form | None = None) -> int:
    """Cast-copies, on a device one kernel for all of like kind. Returns the bytes that were written.

    form: of sources and targets that are known to be like it now; it keeps how they are copied.
    """
    if targets:
        to, came = map(_plain, (targets, list(sources)))
        if form is None:
            ops_for(to[0].device).copy_each(to, came)
        else:
            form.copy = form.copy or ops_for(to[0].device).prepare_copies(to, came)
            form.copy(to, came)
    return sum(map(_nbytes, targets))


def _plain(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    if _PLAIN.issuperset(map(type, tensors)):
        return tensors
    return [t if type(t) in _PLAIN else t.detach() for t in tensors]


def same_place(a: Tensor | None, b: Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    return a is not None and (a.data_ptr(), a.dtype, a.shape, a.stride()) == (
        b.data_ptr(),
        b.dtype,
        b.shape,
        b.stride(),
    )
