"""Which device a tensor's memory belongs to, and graphs of operations, on an emulated device.

A graph is a list of operations, with the memory they were given. A capture runs none of them. A replay runs all on that same
memory, and fails if that was given away or back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from emulated_cuda import EmulatedCuda

CUDA, HOST = torch.device("cuda", 0), torch.device("cpu")
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
POISON = 0xFF  # a byte: NaN in floats, -1 in integers


class DeviceFault(RuntimeError):
    """What a CUDA device refuses."""


def _storage(tensor: Tensor) -> Any:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # within vmap, as where masks are made
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()


def place(tensor: Tensor) -> torch.device:
    return tensor.device if tensor.is_meta else getattr(_storage(tensor), "emulated", HOST)


def put(tensor: Tensor, device: torch.device) -> Tensor:
    if not tensor.is_meta:
        _storage(tensor).emulated = device  # an attribute stays for as long as the storage does
    return tensor


def memory_of(tensor: Tensor) -> int:
    return _storage(tensor)._cdata


def tensors_in(tree: Any) -> list[Tensor]:
    """Of arguments; of messages among them, too."""
    found: list[Tensor] = []
    _gather(tree, found)
    return found


def _gather(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif type(tree) in _PLAIN:
        return
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            _gather(each, found)
    elif isinstance(tree, dict):
        for each in tree.values():
            _gather(each, found)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            _gather(getattr(tree, field.name, None), found)


def _changed(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, kind):
        return change(tree)
    if type(tree) in _PLAIN:
        return tree
    if isinstance(tree, (tuple, list)):
        made = [_changed(each, kind, change) for each in tree]
        return made if isinstance(tree, list) else type(tree)(*made) if hasattr(tree, "_fields") else tuple(made)
    return {key: _changed(each, kind, change) for key, each in tree.items()} if isinstance(tree, dict) else tree


def new_in(out: Any, given: Iterable[Tensor]) -> list[Tensor]:
    """Results that are no views of what was given."""
    made = tensors_in(out)
    if made:
        known = {memory_of(each) for each in given}
        made = [each for each in made if memory_of(each) not in known]
    return made


def poison(tensor: Tensor) -> None:
    """All of its memory, as whoever gets it next finds it."""
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(POISON)


class _At:
    """A tensor as a graph remembers it: an address, and not the memory there unless that is the graph's own."""

    def __init__(self, tensor: Tensor, *, own: bool) -> None:
        storage = tensor.untyped_storage()
        self._tensor = tensor if own else None
        self._ref, self._nbytes = StorageWeakRef(storage), storage.nbytes()
        self._view, self._dtype = (tensor.storage_offset(), tensor.size(), tensor.stride()), tensor.dtype

    def tensor(self) -> Tensor:
        if self._tensor is not None:
            return self._tensor
        if self._ref.expired():
            raise DeviceFault("a graph is replayed whose memory is another's by now")
        storage = torch.UntypedStorage._new_with_weak_ptr(self._ref.cdata)
        if storage.nbytes() != self._nbytes:
            raise DeviceFault("a graph is replayed whose memory was given back")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._view)


class Graph:
    """In place of ``torch.cuda.CUDAGraph``."""

    def __init__(self, device: EmulatedCuda) -> None:
        self._device = device
        self._calls: list[tuple[Callable[..., Any], Any, list[_At]]] = []  # with where results go that are no views
        self._own: dict[int, Tensor] = {}  # what was made within

    def capture_begin(self, **_: Any) -> None:
        assert self._device.capturing is None, "two captures at once"
        self._device.capturing = self

    def capture_end(self) -> None:
        self._device.capturing = None
        with self._device.off(), torch.inference_mode():
            for tensor in self._own.values():
                poison(tensor)

    def launch(self, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._calls.append((run, self._remembered((args, kwargs)), []))

    def operate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Gives tensors of the right sizes. What is not the graph's own stays what it is."""
        remembered = self._remembered((args, kwargs))
        if func._schema.is_mutable:
            self._calls.append((func, remembered, []))
            written = [
                kwargs[each.name] if each.kwarg_only else args[number]
                for number, each in enumerate(func._schema.arguments)
                if each.alias_info is not None and each.alias_info.is_write
            ]
            if all(memory_of(each) in self._own for each in tensors_in(written)):
                func(*args, **kwargs)  # nobody else's: what comes next may be within bounds only now
            return written[0] if len(written) == 1 else tuple(written)
        out = func(*args, **kwargs)
        made = new_in(out, tensors_in((args, kwargs)))
        self._own |= {memory_of(each): each for each in made}
        if "empty" in func.__name__:
            for each in made:
                each.zero_()  # it may be for indices, which have to be within bounds to get on
                self._calls.append((poison, self._remembered(((each,), {})), []))
        elif made:
            self._calls.append((func, remembered, [_At(each, own=True) for each in made]))
        return out

    def as_one(self, operation: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A function of torch's operations that looks at numbers on the host, as one operation on what it was given."""
        with self._device.off():
            given = list(tensors_in((args, kwargs)))
            before = {memory_of(each): (each.untyped_storage(), each.untyped_storage().clone()) for each in given}
            out = operation(*args, **kwargs)
            for storage, was in before.values():
                storage.copy_(was)
            made = [put(each, CUDA) for each in new_in(out, given)]
        self._own |= {memory_of(each): each for each in made}
        self._calls.append((operation, (args, kwargs), [_At(each, own=True) for each in made]))
        return out

    def _remembered(self, tree: Any) -> Any:
        return _changed(tree, Tensor, lambda each: _At(each, own=memory_of(each) in self._own))

    def replay(self) -> None:
        self._device.replays += 1
        with self._device.off(), torch.inference_mode():
            for func, remembered, results in self._calls:
                args, kwargs = _changed(remembered, _At, _At.tensor)
                for at, made in zip(results, new_in(func(*args, **kwargs), tensors_in((args, kwargs))), strict=True):
                    at.tensor().copy_(made)
