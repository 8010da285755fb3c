"""Whether a model is as it was: every module, every tensor under its name, and where each lies, in a few passes of C."""

from __future__ import annotations

from gc import get_referents
from operator import attrgetter, eq, itemgetter
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_dtype, _shape, _modules = attrgetter("dtype"), attrgetter("shape"), itemgetter("_modules")


class _Itself(TorchFunctionMode):
    """Within it a tensor is equal to itself alone: ``==`` of two computes nothing, and is False."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> bool:
        return False


class Tree:
    """A model as it is now, with all its wrappers, to be compared with later.

    A walk over names asks Python several times about every module, which takes milliseconds for a thousand parameters. This
    keeps flat lists of dictionaries and tensors, and compares them by calls that never come back to Python. What is left is
    reading some ten cache lines a module: 0.15 us each, layouts included.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(map(vars, model.modules()))
        # Modules are equal to themselves alone, being hashable; so dictionaries of them can be compared as they are.
        self._parents = [m for m in modules if m["_modules"]]
        self._children = [dict(m["_modules"]) for m in self._parents]
        held = [(m, name) for m in modules for name in ("_parameters", "_buffers")]
        self._owners, self._keys = zip(*((m, name) for m, name in held if m[name]), strict=True)
        self._members = [dict(m[name]) for m, name in held if m[name]]
        empty = [m[name] for m, name in held if not m[name]]  # most are
        self._empty = (*empty, *(m["_modules"] for m in modules if not m["_modules"]))
        self._nothing = get_referents(*self._empty)  # none, but of registries with a class of their own, that
        self._tensors = [t for members in self._members for t in members.values() if isinstance(t, Tensor)]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        self._dtypes = list(map(_dtype, self._tensors))
        self._shapes = list(map(_shape, self._tensors))
        self._strides = list(map(Tensor.stride, self._tensors))

    def same(self, *, layouts: bool = True) -> bool:
        """Whether no module or tensor was added, taken away, renamed, replaced or moved, nor has another dtype or layout.

        layouts: also look for other shapes and strides of the same tensor at the same address.
        """
        tensors = self._tensors
        return (
            get_referents(*self._empty) == self._nothing
            and list(map(_modules, self._parents)) == self._children
            and self._same_members()
            and list(map(Tensor.data_ptr, tensors)) == self._addresses
            and list(map(_dtype, tensors)) == self._dtypes
            and (not layouts or all(map(eq, map(_shape, tensors), self._shapes)))
            and (not layouts or all(map(eq, map(Tensor.stride, tensors), self._strides)))
        )

    def _same_members(self) -> bool:
        """Of the registries of parameters and of buffers in which there were any."""
        with _Itself():
            return list(map(dict.__getitem__, self._owners, self._keys)) == self._members
