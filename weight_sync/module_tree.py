"""Tells quickly whether a model is as it was: its modules, its tensors by name, and their addresses. Most of it runs in C."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from gc import get_referents
from itertools import chain
from operator import attrgetter, eq, is_, itemgetter
from random import Random
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_T = TypeVar("_T")
_GLANCE = 256  # how many modules' registries, or other things, a glance looks at
_TOP = 64  # how many of these are the first ones: wrappers, and the beginning of the model
_dtype, _shape, _modules = attrgetter("dtype"), attrgetter("shape"), itemgetter("_modules")
_local, _spec = attrgetter("_local_tensor"), attrgetter("_spec")  # of a DTensor: this rank's part, and its layout


def at_a_glance(things: Sequence[_T]) -> list[_T]:
    """All things, if there are few; of many the first ones, and others at random (at even steps, all might be of one kind)."""
    if len(things) <= _GLANCE:
        return list(things)
    return [*things[:_TOP], *Random(0).sample(things[_TOP:], _GLANCE - _TOP)]


def layout_of(tensors: Iterable[Tensor]) -> Callable[[Tensor], Any]:
    """What to ask tensors of known shapes for, to see whether they are still laid out as these are now.

    The strides; or where all are contiguous whether they are, which takes a fourth of the time.
    """
    return Tensor.is_contiguous if all(map(Tensor.is_contiguous, tensors)) else Tensor.stride


class Tree:
    """A model as it is now, with all its wrappers, to be compared with later.

    A walk over names would run Python code for every module, which takes milliseconds for a thousand parameters. This keeps
    flat lists of dictionaries and tensors, and compares them by calls that stay in C. What remains is reading some ten cache
    lines a module: 0.2 us each. Tensors are compared by ``is``, since ``==`` would compute. Of DTensors it does not keep the parts.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(map(vars, model.modules()))
        # A module is equal only to itself, so dictionaries of modules can be compared directly.
        self._parents = [m for m in modules if m["_modules"]]
        self._children = [dict(m["_modules"]) for m in self._parents]
        registries = [m[name] for m in modules for name in ("_modules", "_parameters", "_buffers")]
        self._some = tuple(at_a_glance([r for r in registries if r]))
        self._held = get_referents(*self._some)
        self._lying = _Placed(t for t in self._held if isinstance(t, Tensor))
        self._at = list(map(Tensor.data_ptr, self._lying.now()))
        held = [(m, name) for m in modules for name in ("_parameters", "_buffers")]
        self._owners, self._keys = zip(*((m, name) for m, name in held if m[name]), strict=True)
        members = [m[name] for m, name in held if m[name]]
        self._members = list(map(dict, members))
        self._contents = _contents(members)
        self._empty = tuple(r for r in registries if not r)  # most are
        self._nothing = get_referents(*self._empty)  # nothing; but a registry of another class refers to its class
        self._tensors = _Placed(t for one in self._members for t in one.values() if isinstance(t, Tensor))
        tensors = self._tensors.now()
        self._addresses = list(map(Tensor.data_ptr, tensors))
        self._dtypes = list(map(_dtype, tensors))
        self._shapes = list(map(_shape, tensors))
        self._layout_of = layout_of(tensors)
        self._layouts = list(map(self._layout_of, tensors))

    @property
    def has_parts(self) -> bool:
        """Whether some tensors are DTensors."""
        return bool(self._tensors.parts)

    def looks_same(self) -> bool:
        """``same`` at a glance, in a time that does not grow with the model. It may miss details, not a change of the whole.

        Of a large model it looks at only a part. It misses the first tensor or child of a module that had none; another name,
        dtype or layout at the same address; and a registry that was replaced by another.
        """
        same = same_objects(get_referents(*self._some), self._held)
        return same and list(map(Tensor.data_ptr, self._lying.now())) == self._at

    def same(self) -> bool:
        """Whether no module or tensor was added, removed, renamed, replaced or moved, or got another dtype or layout."""
        tensors = self._tensors.now()
        return (
            get_referents(*self._empty) == self._nothing
            and list(map(_modules, self._parents)) == self._children
            and self._same_members()
            and self._tensors.laid_out_as_before()
            and list(map(Tensor.data_ptr, tensors)) == self._addresses
            and list(map(_dtype, tensors)) == self._dtypes
            and all(map(eq, map(_shape, tensors), self._shapes))
            and all(map(eq, map(self._layout_of, tensors), self._layouts))
        )

    def _same_members(self) -> bool:
        """Whether registries of parameters and buffers that were not empty hold the same."""
        registries = list(map(dict.__getitem__, self._owners, self._keys))
        counts, names, values = contents = _contents(registries)
        if (counts, names) != self._contents[:2] or not same_objects(values, self._contents[2]):
            if list(map(_ids, registries)) != list(map(_ids, self._members)):
                return False
            self._contents = contents  # only the order is another, as PEFT's forwards leave it for experts
        return True


class _Placed:
    """Tensors, of which the memory of some is another's: ``parts`` are the DTensors among them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        self._plain = [t for t in tensors if not isinstance(t, DTensor)]
        self.parts = [t for t in tensors if isinstance(t, DTensor)]
        self._layouts = list(map(_spec, self.parts))

    def now(self) -> list[Tensor]:
        """The tensors in which the numbers are now."""
        return [*self._plain, *map(_local, self.parts)] if self.parts else self._plain

    def laid_out_as_before(self) -> bool:
        return same_objects(list(map(_spec, self.parts)), self._layouts)


def _ids(registry: dict[str, Any]) -> dict[str, int]:
    return {name: id(value) for name, value in registry.items()}


def _contents(registries: Sequence[dict[str, Any]]) -> tuple[list[int], list[str], list[Any]]:
    """(how many entries each registry has, all names, all values)."""
    values = chain.from_iterable(map(dict.values, registries))
    return list(map(len, registries)), list(chain.from_iterable(registries)), list(values)


def same_objects(things: Sequence[object], others: Sequence[object]) -> bool:
    """Whether they are the same objects. Does not read them."""
    return len(things) == len(others) and all(map(is_, things, others))
