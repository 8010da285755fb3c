"""Which device a tensor's memory belongs to, and graphs of operations, on an emulated device.

A graph is a list of operations, with the memory they were given. A capture runs none of them. A replay runs all on that same
memory, and fails if that was given away or back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
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


def storage_of(tensor: Tensor) -> Any:
    """The same object for the same memory, as long as that is held."""
    try:
        return tensor.untyped_storage()
    except RuntimeError:  # within vmap, as where masks are made
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        return tensor.untyped_storage()


def place(tensor: Tensor) -> torch.device:
    return tensor.device if tensor.is_meta else getattr(storage_of(tensor), "emulated", HOST)


def put(tensor: Tensor, device: torch.device) -> Tensor:
    if not tensor.is_meta:  # an attribute stays for as long as the storage does
        storage_of(tensor).emulated = CUDA if device == CUDA else HOST
    return tensor


def memory_of(tensor: Tensor) -> int:
    cdata: int = storage_of(tensor)._cdata
    return cdata


def tensors_in(tree: Any) -> list[Tensor]:
    """Of arguments; of messages among them, too."""
    found: list[Tensor] = []
    _gather(tree, found)
    return found


def _gather(tree: Any, found: list[Tensor]) -> None:
    kind = type(tree)
    if kind in _PLAIN:
        return
    if kind is Tensor or isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            if type(each) is Tensor:
                found.append(each)
            elif type(each) not in _PLAIN:
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


def new_in(out: Any, given: Iterable[Any]) -> list[Tensor]:
    """Results that are no views of what was given. given: its storages."""
    if type(out) is Tensor:
        own = storage_of(out)
        for each in given:
            if each is own:
                return []
        return [out]
    if made := tensors_in(out):
        known = {id(each) for each in given}
        made = [each for each in made if id(storage_of(each)) not in known]
    return made


def poison(tensor: Tensor) -> None:
    """All of its memory, as whoever gets it next finds it."""
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(POISON)


class _Memory:
    """Not the graph's own: an address, and whether it is still whose it was."""

    def __init__(self, storage: Any) -> None:
        self._ref, self._nbytes = StorageWeakRef(storage), storage.nbytes()

    def now(self) -> Any:
        if self._ref.expired():
            raise DeviceFault("a graph is replayed whose memory is another's by now")
        storage = torch.UntypedStorage._new_with_weak_ptr(self._ref.cdata)
        if storage.nbytes() != self._nbytes:
            raise DeviceFault("a graph is replayed whose memory was given back")
        return storage


class _At:
    """A tensor as a graph remembers it whose memory is not its own."""

    tensor: Tensor  # during a replay, and else not there

    def __init__(self, memory: int, tensor: Tensor) -> None:
        self.memory = memory
        self._view, self._dtype = (tensor.storage_offset(), tensor.size(), tensor.stride()), tensor.dtype

    def begin(self, storage: Any) -> None:
        self.tensor = torch.empty(0, dtype=self._dtype).set_(storage, *self._view)

    def end(self) -> None:
        del self.tensor


@dataclass(frozen=True, slots=True)
class _Call:
    """Of an operation, in a graph. results: tensors that are to get what is new in its own."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]
    is_near: bool  # what is not the graph's own is among the arguments themselves
    is_one: bool  # the result is one tensor, and new

    def __call__(self) -> None:
        if self.is_near:
            out = self.func(*[each.tensor if type(each) is _At else each for each in self.args], **self.kwargs)
            if self.is_one:
                self.results[0].copy_(out)
                return
            given: Any = self.args, self.kwargs
        else:
            args, kwargs = given = _changed((self.args, self.kwargs), _At, attrgetter("tensor"))
            out = self.func(*args, **kwargs)
        if out is None and not self.results:
            return
        given = tensors_in(_changed(given, _At, attrgetter("tensor")))
        for result, made in zip(self.results, new_in(out, map(storage_of, given)), strict=True):
            result.copy_(made)


class Graph:
    """In place of ``torch.cuda.CUDAGraph``."""

    def __init__(self, device: EmulatedCuda) -> None:
        self._device = device
        self._calls: list[_Call] = []
        self._own: dict[int, Tensor] = {}  # what was made within
        self._memories: dict[int, _Memory] = {}  # all other
        self._given: dict[Any, _At] = {}

    def capture_begin(self, **_: Any) -> None:
        assert self._device.capturing is None, "two captures at once"
        self._device.capturing = self

    def capture_end(self) -> None:
        self._device.capturing = None
        with self._device.off(), torch.inference_mode():
            for tensor in self._own.values():
                poison(tensor)

    def launch(self, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._calls.append(self._call(run, args, kwargs, []))

    def operate(self, func: Any, args: Any, kwargs: Any, given: Sequence[Any]) -> Any:
        """Gives tensors of the right sizes. What is not the graph's own stays what it is."""
        if func._schema.is_mutable:
            self._calls.append(self._call(func, args, kwargs, []))
            written = [
                kwargs[each.name] if each.kwarg_only else args[number]
                for number, each in enumerate(func._schema.arguments)
                if each.alias_info is not None and each.alias_info.is_write
            ]
            if all(memory_of(each) in self._own for each in tensors_in(written)):
                func(*args, **kwargs)  # nobody else's: what comes next may be within bounds only now
            return written[0] if len(written) == 1 else tuple(written)
        out = func(*args, **kwargs)
        made = new_in(out, given)
        is_empty = "empty" in func.__name__
        if made and not is_empty:
            self._calls.append(self._call(func, args, kwargs, made, is_one=isinstance(out, Tensor)))
        self._own |= {memory_of(each): each for each in made}
        for each in made if is_empty else ():
            each.zero_()  # it may be for indices, which have to be within bounds to get on
            self._calls.append(self._call(poison, (each,), {}, []))
        return out

    def as_one(self, operation: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A function of torch's operations that looks at numbers on the host, as one operation on what it was given."""
        with self._device.off():
            given = list(tensors_in((args, kwargs)))
            before = {memory_of(each): (each.untyped_storage(), each.untyped_storage().clone()) for each in given}
            out = operation(*args, **kwargs)
            for storage, was in before.values():
                storage.copy_(was)
            made = [put(each, CUDA) for each in new_in(out, map(storage_of, given))]
        self._own |= {memory_of(each): each for each in made}
        self._calls.append(_Call(operation, args, kwargs, made, is_near=True, is_one=False))
        return out

    def _call(self, func: Any, args: Any, kwargs: Any, results: list[Tensor], is_one: bool = False) -> _Call:
        near = tuple(self._remembered(each) if isinstance(each, Tensor) else each for each in args)
        far = tensors_in(([each for each in args if not isinstance(each, Tensor)], kwargs))
        if is_near := all(memory_of(each) in self._own for each in far):
            return _Call(func, near, kwargs, results, is_near, is_one)
        args, kwargs = _changed((args, kwargs), Tensor, self._remembered)
        return _Call(func, args, kwargs, results, is_near, is_one)

    def _remembered(self, tensor: Tensor) -> Any:
        storage = storage_of(tensor)
        if (memory := storage._cdata) in self._own:
            return tensor
        if memory not in self._memories:
            self._memories[memory] = _Memory(storage)
        at = memory, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()
        if at not in self._given:
            self._given[at] = _At(memory, tensor)
        return self._given[at]

    def replay(self) -> None:
        self._device.replays += 1
        with self._device.off(), torch.inference_mode():
            now = {memory: each.now() for memory, each in self._memories.items()}
            try:
                for at in self._given.values():
                    at.begin(now[at.memory])
                for call in self._calls:
                    call()
            finally:
                for at in self._given.values():
                    at.end()
