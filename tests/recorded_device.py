"""A device on a CPU whose captured steps are, as a graph's, operations on the very tensors they were captured with.

``PretendDevice`` calls a captured step's code again, which sees what has changed on the host since. Here nothing does: a
number of the host is the one it was, a tensor that has been replaced since is the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from pretend_device import STATIC, PretendDevice
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from stoker.kernels.ops import Ops
from stoker.kernels.reference.lora import AdapterRows

_WAITS = (
    "aten::item",
    "aten::is_nonzero",
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
)  # for the device
# Operations of the table that look at numbers on a CPU, and would be a few kernels on a device.
_WHOLE = ("gumbel_noise", "lora", "lora_embedding", "experts", "route", "truncate", "constrain", "follow")
_WHOLE += ("causal_conv", "gated_delta_rule", "selective_scan")


class _Recording(TorchDispatchMode):
    """Runs what is launched within, notes it, and can undo what it wrote: a capture runs nothing."""

    now: _Recording | None = None

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self._before: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _WAITS:
            raise RuntimeError(f"{func} waits for the device")
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
        self.keep([given.get(a.name) for a in func._schema.arguments if a.is_write])
        out = func(*args, **kwargs or {})
        if not (isinstance(out, Tensor) and _storage(out) in [_storage(t) for t in _tensors(args)] and func.is_view):
            self.done.append((func, args, kwargs or {}, out))
        return out

    def whole(self, operation: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Note an operation of the table as one."""
        _Recording.now = None
        try:
            with _disable_current_modes():
                self.keep((args, kwargs))
                out = operation(*args, **kwargs)
        finally:
            _Recording.now = self
        self.done.append((operation, args, kwargs, out))
        return out

    def keep(self, written: Any) -> None:
        for tensor in _tensors(written):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf):
            yield from _tensors([getattr(leaf, f.name, None) for f in fields(leaf)])


def _noted(operation: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        now = _Recording.now
        return operation(*args, **kwargs) if now is None else now.whole(operation, args, kwargs)

    return call


def _of_these_rows(operation: Callable[..., Any]) -> Callable[..., Any]:
    """A CPU keeps what it has seen of the rows of a batch."""
    return lambda x, out, table, rows, *args: operation(x, out, table, AdapterRows(rows.slots), *args)


RECORDED: Ops = replace(STATIC, lora=_of_these_rows(STATIC.lora), lora_embedding=_of_these_rows(STATIC.lora_embedding))
RECORDED = replace(RECORDED, **{name: _noted(getattr(RECORDED, name)) for name in _WHOLE})


@contextmanager
def launches_recorded() -> Iterator[None]:
    """Within, the launch of a kernel that Triton interprets is an operation, with the numbers that the host gave it."""
    launch = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        now = _Recording.now
        if now is None:
            launch(self, *args, **kwargs)
        else:
            now.whole(partial(launch, self), args, kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", call)
        yield


class _StableBuffer:
    """Comes back where it was, with NaN in it."""

    stable_addresses = True

    def __init__(self, nbytes: int) -> None:
        self.tensor = torch.full((nbytes,), 255, dtype=torch.uint8)

    def release(self) -> None:
        self.tensor.fill_(255)

    def restore(self) -> None:
        pass


@dataclass(frozen=True)
class RecordedDevice(PretendDevice):
    """For engines whose operations are ``RECORDED``, or kernels within ``launches_recorded``."""

    def allocate(self, nbytes: int) -> Any:
        return _StableBuffer(nbytes)

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        _Recording.now = recording = _Recording()
        try:
            with recording:
                body()
        finally:
            _Recording.now = None
            recording.undo()

        def replay() -> None:
            with torch.inference_mode():
                for operation, args, kwargs, out in recording.done:
                    for old, new in zip(_tensors(out), _tensors(operation(*args, **kwargs)), strict=True):
                        if old.data_ptr() != new.data_ptr():
                            old.copy_(new)

        return replay
