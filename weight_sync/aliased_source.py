"""The trainer's own tensors, borrowed: an update moves no byte."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn

from stoker.kernels.errors import WeightsMismatchError, WeightsMovedError
from stoker.weight_sync.bitsandbytes_state import is_packed, scales_of
from stoker.weight_sync.checksum import checksums, prepare, unfit
from stoker.weight_sync.form import Form
from stoker.weight_sync.mirror import Consumer
from stoker.weight_sync.module_tree import Tree
from stoker.weight_sync.naming import main_dtype, named_tensors, unwrap
from stoker.weight_sync.staging import copy_each

# A name, its tensor, and where that lies: address, dtype, shape, stride.
_Place = tuple[str, Tensor, tuple[Any, ...]]
# The memory in which parameters were laid side by side, by address. An entry lives as long as a parameter lies in it.
_WHOLES: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
_BOUND: WeakSet[AliasedSource] = WeakSet()  # several may run on one model


class _Look(NamedTuple):
    """How to make the checksums of tensors, as long as these stay at their addresses."""

    tensors: Sequence[Tensor]
    addresses: list[int]
    checksums: Callable[[], Tensor]


class AliasedSource:
    """Full parameters in the engine's dtype, on the engine's device. Nothing is written to them but by ``write``.

    ``rehome`` lays parameters that are used together side by side in one memory, by setting their ``.data`` to rows of it:
    the parameter objects stay, so the optimizer's in-place updates, gradients and checkpoints go on as before.
    """

    kind = "aliased"
    nbytes = 0
    adapters: Mapping[str, Tensor] = MappingProxyType({})  # none of them is sharded
    wider: Mapping[torch.dtype, torch.dtype] = MappingProxyType({})
    passing: frozenset[str] = frozenset()
    resident = stable_addresses = at_hand = True

    def __init__(self, model: nn.Module, *, check_finite: bool = False) -> None:
        self.module = unwrap(model)
        self._check_finite = check_finite
        self._rehomed: list[tuple[nn.Parameter, int]] = []  # with the address it was given
        self._bound: list[_Place] = []
        self._look: _Look | None = None
        self._tree: Tree | None = None  # as of ``bind``
        self.bound: Mapping[str, Tensor] = {}
        self.places = object()
        self.optional: Collection[str] = ()
        self._scaled: list[tuple[nn.Module, Any]] = []  # modules with quantised weights, and these
        self._sums: list[int] | None = None
        self.complete = True
        self.device = next(self.module.parameters()).device
        # Quantised weights say nothing of what they are computed in.
        plain = (p for p in self.module.parameters() if p.is_floating_point() and not is_packed(p))
        self.dtype = main_dtype((p.dtype, p.numel()) for p in plain)

    def tensors(
        self, groups: Sequence[tuple[str, ...]] = (), layers: Sequence[Collection[str]] = ()
    ) -> dict[str, Tensor]:
        """Every parameter and buffer by name, tied ones under each of their names."""
        return {name: tensor for name, tensor, _ in named_tensors(self.module)}

    def keep(self, names: Collection[str]) -> None:
        """Does nothing: all are there."""

    def hand_over(self, consumer: Consumer) -> None:
        """Does nothing: no weights pass through."""

    def write(self, new: Mapping[str, Tensor], form: Form | None = None) -> int:
        return copy_each([self.bound[name] for name in new], new.values(), form)

    def refuse(self, error: Exception) -> bool:
        """False: nobody waits for this rank."""
        return False

    def names(self) -> set[str]:
        return set(self.tensors())

    def replaced_adapters(self) -> list[str]:
        return []

    def rehome(self, groups: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], Tensor]:
        """For each group of names one tensor of all their rows; groups that must not be moved are left out.

        A parameter is moved only if it owns its whole storage. It does not if that is a sharding library's flat buffer, or a
        mapped file; nor if a tied weight, another model that was given this one's ``state_dict``, or another process uses it too,
        which would not follow. But a parameter that was put somewhere by this method before may be moved again, when others of
        its group got other memory. A parameter that is in several groups becomes part of one. Parameters that lie side by side
        already are just viewed.
        """
        named = self.tensors()
        owners: dict[int, int] = {}
        for _, parameter in self.module.named_parameters():
            address = parameter.untyped_storage().data_ptr()
            owners[address] = owners.get(address, 0) + 1
        self._forget_replaced()
        put = {address for _, address in self._rehomed}
        fused = {}
        placed: set[int] = (
            set()
        )  # tensors of groups so far: moving them again would take them out of their group's tensor
        for group in groups:
            parts = [named[name] for name in group]
            ids = {id(p) for p in parts}
            whole = _view_side_by_side(parts)
            movable = all(_owns_storage(p, owners) or _was_put(p, put, owners) for p in parts)
            if whole is None and movable and _alike(parts) and len(ids) == len(parts) and placed.isdisjoint(ids):
                whole = torch.cat([p.detach() for p in parts])
                _WHOLES[whole.data_ptr()] = whole
                for part, rows in zip(parts, torch.split(whole, [p.shape[0] for p in parts]), strict=True):
                    if isinstance(part, nn.Parameter):
                        self._rehomed.append((part, rows.data_ptr()))
                    part.data = _with_storage(rows)
            if whole is not None:
                fused[group] = whole
                placed |= ids
        self._rehomed[:] = [(p, address) for p, address in self._rehomed if p.data_ptr() == address]
        return fused

    def _forget_replaced(self) -> None:
        """Let go of moved parameters that nobody else has any more: a trainer may replace all of its parameters at every step.

        By counts, since ``torch.utils.swap_tensors`` refuses parameters with weak references.
        """
        self._rehomed[:] = [entry for entry in self._rehomed if sys.getrefcount(entry[0]) > _ONLY_OURS]

    def bind(self) -> None:
        """Remember where every tensor lies now, so that ``moved`` can tell."""
        self._tree, named = Tree(self.module), list(named_tensors(self.module))
        self.bound, self.places = {name: tensor for name, tensor, _ in named}, object()
        self.optional = {name for name, _, in_checkpoints in named if not in_checkpoints}
        self._bound, self._look = list(self._places()), None
        pairs = ((m, weight) for m in self.module.modules() for weight in m._parameters.values())
        self._scaled = [(m, weight) for m, weight in pairs if any(True for _ in _scales_of(m, weight))]
        _BOUND.add(self)

    def _places(self) -> Iterator[_Place]:
        for path, module in self.module.named_modules():
            for registry in (module._parameters, module._buffers):
                for name, tensor in registry.items():
                    if tensor is not None:
                        layout = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
                        yield f"{path}.{name}", tensor, layout
                        for scales in _scales_of(module, tensor):
                            yield f"{path}.{name}", scales, (scales.data_ptr(), scales.dtype, scales.shape)

    def moved(self, module: nn.Module) -> bool:
        """Whether a tensor was added, taken away, renamed or replaced since ``bind``, or lies elsewhere.

        module: the trainer's now, which may be another one altogether.
        """
        if module is self.module and not self._scaled and self._tree is not None and self._tree.same():
            return False  # a tree has no scales, but there are none
        now = list(self._places())
        return (
            module is not self.module
            or len(now) != len(self._bound)
            or any(
                name != bound_name or tensor is not bound or layout != bound_layout
                for (name, tensor, layout), (bound_name, bound, bound_layout) in zip(now, self._bound, strict=True)
            )
        )

    def pull(self, alike: Sequence[str] = ()) -> int:
        """Moves nothing: the engine reads the trainer's tensors."""
        if self._check_finite:
            tensors = {name: t for name, t in self.tensors().items() if not is_packed(t)}  # whose bits are no numbers
            wrong = list(unfit(((name, t, t.dtype) for name, t in tensors.items()), finite=True))
            if wrong:
                raise WeightsMismatchError(f"{'; '.join(wrong)}: the model has to hold finite numbers")
        self._sums = None
        self.complete = True
        return 0

    def catch_up(self) -> bool:
        """Whether the tensors hold other numbers than at the last look, if there was no ``pull`` since."""
        self._forget_replaced()
        before, self._sums = self._sums, self.checksums()
        return before is not None and before != self._sums

    def overwritten(self) -> None:
        """Note that the tensors have been written to on purpose."""
        self._sums = None
        self.complete = True

    def spoil(self) -> None:
        self.complete = False

    def mismatches(self, alike: Sequence[str] = ()) -> tuple[int, list[str]]:
        """No mismatches: these are the trainer's tensors."""
        return len({id(t) for t in self.tensors().values()}), []

    def checksums(self) -> list[int]:
        """One number for each bound tensor; other content has the same number only by rare chance.

        Autograd's version counters would cost nothing, but miss fused optimizers and whatever writes through ``.data`` or a flat
        buffer. This reads all weights once, as a decode step does, at the same speed.
        """
        if self._scaled:
            scales = (t for m, weight in self._scaled for t in _scales_of(m, weight))  # of now: no registry has them
            return checksums(_once(chain((t for _, t, _ in self._bound), scales)), self.device)
        if self._look is None or list(map(Tensor.data_ptr, self._look.tensors)) != self._look.addresses:
            tensors = _once(t for _, t, _ in self._bound)
            self._look = _Look(tensors, [t.data_ptr() for t in tensors], prepare(tensors, self.device))
        numbers: list[int] = self._look.checksums().tolist()
        return numbers

    def check(self) -> None:
        """Raise ``WeightsMovedError`` where a bound parameter changed its dtype or device."""
        for name, tensor, (_, dtype, *_rest) in self._bound:
            moved = tensor.device != self.device or (tensor.dtype != dtype and tensor.is_floating_point())
            if moved and isinstance(tensor, nn.Parameter):
                raise WeightsMovedError(
                    f"parameter {name} is now {tensor.dtype} on {tensor.device}; the engine was built for "
                    f"{dtype} on {self.device}. Move the model back, or build a new engine on it"
                )

    def succeed(self, former: AliasedSource) -> None:
        """Share the duty to give moved parameters storages of their own again: of the two sources one will be ``superseded``."""
        self._rehomed = former._rehomed

    def superseded(self) -> None:
        """Give up all duties: the other source has taken this one's place. (An exception may keep this object alive.)"""
        _BOUND.discard(self)

    def give_back(self, *, drop: bool) -> None:
        """Does nothing: the memory is the trainer's."""

    def take_again(self) -> None:
        pass

    def fill(self) -> bool:
        return False

    def release(self) -> None:
        """Give every re-homed parameter a storage of its own again. If another engine runs on it, that will be done by its release.

        It is not done where the trainer has another tensor in the same memory by now: the two would no longer be one.
        """
        self._bound, self._scaled, self._look, self._tree, self.bound = [], [], None, None, {}
        users = {(id(t), layout[0]): source for source in list(_BOUND) for _, t, layout in source._bound}
        while self._rehomed:  # an entry goes when it is done: after an error or Ctrl-C, another call can go on
            parameter, address = self._rehomed[-1]
            if parameter.data_ptr() == address:
                if (other := users.get((id(parameter), address))) is not None:
                    other._rehomed.append((parameter, address))
                elif not _has_other_users(parameter):
                    parameter.data = parameter.detach().clone()
            self._rehomed.pop()


def _once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those that are not empty, each once."""
    return list({id(t): t for t in tensors if t.numel()}.values())


def _scales_of(module: Any, weight: Any) -> Iterator[Tensor]:
    """The scales of a quantised weight.

    In 8 bits, the first forward moves them to the state of the module.
    """
    yield from (scale for _, scale in scales_of(getattr(weight, "quant_state", None)))
    if hasattr(weight, "SCB"):
        scales = weight.SCB if weight.SCB is not None else module.state.SCB
        yield from (t for t in (scales,) if isinstance(t, Tensor))


def _owns_storage(tensor: Tensor, owners: Mapping[int, int]) -> bool:
    """Whether a tensor has a storage to itself. owners: how many parameters lie in the storage at an address."""
    storage = tensor.untyped_storage()
    return (
        tensor.is_contiguous()
        and not tensor.is_inference()  # its data cannot be set
        and storage.resizable()  # torch's own memory, no mapped file
        and not (tensor.is_cpu and storage.is_shared())  # with a process that has it open
        and storage.nbytes() == tensor.nbytes
        and owners.get(storage.data_ptr()) == 1
        and not _has_other_users(tensor)
    )


def _users(tensor: Tensor) -> int:
    """How many objects refer to a tensor's memory: tensors, and the one made to ask."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_ALONE = _users(torch.empty(0, device="cpu"))


# How many references there seem to be to a tensor in a list of pairs that nobody else has.
(_ONLY_OURS,) = (sys.getrefcount(pair[0]) for pair in [(torch.empty(0, device="cpu"), 0)])


def _has_other_users(tensor: Tensor) -> bool:
    """Whether there are other tensors in the storage, such as those saved for a backward."""
    return _users(tensor) > _ALONE


def _was_put(tensor: Tensor, addresses: Collection[int], owners: Mapping[int, int]) -> bool:
    """Whether a tensor is what ``_with_storage`` made, at one of the addresses. owners: as of ``_owns_storage``."""
    storage = tensor.untyped_storage()
    put = tensor.data_ptr() in addresses and not storage.resizable() and storage.nbytes() == tensor.nbytes
    return put and owners.get(storage.data_ptr()) == 1 and not _has_other_users(tensor)


def _alike(tensors: Sequence[Tensor]) -> bool:
    return len({(t.dtype, t.device, t.shape[1:]) for t in tensors}) == 1


def _with_storage(rows: Tensor) -> Tensor:
    """The same memory as a tensor whose storage is just these rows. It keeps the storage of ``rows`` alive.

    Views of one storage would look like tied weights: accelerate's ``save_state`` and ``save_model`` keep one tensor of
    a storage and drop the others, safetensors' ``save_model`` refuses, ``torch.save`` writes the whole storage.
    """
    return torch.utils.dlpack.from_dlpack(rows)


def _fills(whole: Tensor, tensors: Sequence[Tensor]) -> bool:
    ends = accumulate((t.nbytes for t in tensors), initial=whole.data_ptr())
    same = whole.nbytes == sum(t.nbytes for t in tensors) and _alike([whole, *tensors])
    return same and all(t.data_ptr() == at for t, at in zip(tensors, ends, strict=False))


def _view_side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """One tensor over all rows where they follow each other in one storage, else None."""
    first = tensors[0]
    if not _alike(tensors) or not all(t.is_contiguous() for t in tensors):
        return None
    known = _WHOLES.get(first.data_ptr())
    if known is not None and _fills(known, tensors):
        return known
    offset = first.storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or tensor.storage_offset() != offset:
            return None
        offset += tensor.numel()
    whole = first.detach().new_empty(0)
    rows = sum(t.shape[0] for t in tensors)
    return whole.set_(first.untyped_storage(), first.storage_offset(), (rows, *first.shape[1:]), first.stride())
