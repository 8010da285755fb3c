"""Counts what a device would get to do: operations of the engine's table, one launch each, and torch's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from stoker.kernels.ops import REFERENCE, Ops


class Launches(TorchDispatchMode):
    """Names of the operations that are no views of what there is."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if not func.is_view and "reshape" not in str(func):
            self.names.append(str(func))
        return out


def named(launched: list[str]) -> Ops:
    """The reference's operations, of which each is one."""

    def call(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            before = len(launched)
            out = real(*args, **options)
            launched[before:] = [name]
            return out

        return run

    names = [f.name for f in fields(Ops) if callable(getattr(REFERENCE, f.name))]
    return replace(REFERENCE, **{name: call(name, getattr(REFERENCE, name)) for name in names})
