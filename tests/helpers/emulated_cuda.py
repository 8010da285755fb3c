"""An emulated CUDA device on a CPU. Its results are right; what a real device refuses, or would get wrong, fails.

Tensors are a CPU's, and a mark on their storage says which device they belong to. Torch's functions are told ``cuda:0``, and
every operation is checked:

- Tensors of both devices in one operation fail, and so does a Triton kernel that gets a host's tensor.
- Where the host has to wait (``item``, ``nonzero``, copies of memory that is not pinned) is noted in ``waits``.
- A copy without blocking arrives when the host waits for an event after it, not before. What it reads must not change until
  then.
- A graph is a list of operations, with the memory they were given. A capture runs none of them, and the host must not wait in
  one. A replay runs all on that same memory, and fails if that was given away or back.
- Memory that was not written yet is NaN, the host's too, and -1 where it is of integers.
- A Triton kernel has to be launched before it is captured, in the form that is compiled for the capture.

Triton's kernels are interpreted. There is one stream: what happens in two at once does not show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_functions import Functions, Generator, caller, is_pinned
from emulated_graph import CUDA, HOST, POISON, DeviceFault, Graph, new_in, place, poison, put, storage_of, tensors_in
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

aten = torch.ops.aten
_READS_NUMBERS = {  # of the device, be it only to know how many results there are
    aten._local_scalar_dense.default,
    aten.allclose.default,
    aten.argwhere.default,
    aten.bincount.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.item.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.nonzero_numpy.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
}
_INDEXES = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}
_TREATED = {  # each by itself, in ``EmulatedCuda.operate``
    aten._foreach_copy_.default,
    aten.copy_.default,
    aten.detach.default,
    aten.histc.default,
    aten.lift_fresh.default,
    aten.repeat_interleave.Tensor,
}
# By an operation's id, as its own hash is slow: the operation, and whether there is more to it than places.
_SEEN: dict[int, tuple[Any, bool]] = {}


class EmulatedCuda:
    """The device. ``waits``: where the host waited for it unasked; ``replays``: of graphs; ``let_go``: memory that is not
    given to anybody before all that was launched is over."""

    now: EmulatedCuda | None = None

    def __init__(self) -> None:
        self.capturing: Graph | None = None
        self.waits: list[str] = []
        self.replays = 0
        self.let_go: list[Tensor] = []
        self.making = HOST  # whose the tensors are that are made of nothing
        self.is_off = False
        self._copies: list[Callable[[], object]] = []  # what is left to do at the end of each that is under way
        self._over = 0  # copies
        self._loaded: set[Any] = set()  # kernels of Triton, and what each was compiled for

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within, torch is what it is."""
        before, self.is_off = self.is_off, True
        try:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                yield
        finally:
            self.is_off = before

    def adopt(self, model: Any) -> Any:
        """As if it had been moved here."""
        for tensor in (*model.parameters(), *model.buffers()):
            put(tensor, CUDA)
        return model

    # -- the host, the device, and what is on its way between them -------------------------------------------------

    def wait(self, upto: int | None = None) -> None:
        """The host waits for all that was launched, or for so many copies."""
        if self.capturing is not None:
            raise DeviceFault("the host waits in a capture")
        upto = self._over + len(self._copies) if upto is None else upto
        with self.off(), torch.inference_mode():
            while self._over < upto:
                self._over += 1
                self._copies.pop(0)()

    def wait_unasked(self, what: str) -> None:
        if self.capturing is not None:
            raise DeviceFault(f"{what} in a capture{caller()}")
        self.waits.append(what + caller())
        self.wait()

    def copy(self, to: Tensor, source: Tensor, non_blocking: bool) -> None:
        if self.capturing is not None:
            raise DeviceFault(f"a copy between host and device in a capture{caller()}")
        on_its_way = non_blocking and is_pinned(to if place(to) == HOST else source)
        if not on_its_way:
            self.wait_unasked("a copy of memory that is not pinned")
        with self.off(), torch.inference_mode():
            value = source.clone()
            if not on_its_way:
                to.copy_(value)
            elif place(to) == HOST:
                garbage = torch.full((to.numel() * to.itemsize,), POISON, dtype=torch.uint8)
                to.copy_(garbage.view(to.dtype).view(to.shape))
                self._copies.append(partial(to.copy_, value))
            else:
                to.copy_(value)
                self._copies.append(partial(_has_stayed, source.detach(), value))

    def event(self, **_: Any) -> Any:
        event = SimpleNamespace(at=0, elapsed_time=lambda end: 1.0, wait=lambda *_: None)
        event.record = lambda *_: setattr(event, "at", self._over + len(self._copies))
        event.synchronize = lambda: self.wait(event.at)
        event.query = lambda: event.at <= self._over
        return event

    def stream(self, *_: Any, **__: Any) -> Any:
        waits = {"wait_stream": lambda *_: None, "wait_event": lambda *_: None}
        return SimpleNamespace(synchronize=self.wait, cuda_stream=0, **waits)

    # -- operations ----------------------------------------------------------------------------------------------

    def operate(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors, storages = tensors_in((args, kwargs) if kwargs else args), list[Any]()
        for each in tensors:
            if each.is_meta:
                return func(*args, **kwargs)
            storages.append(storage_of(each))
        if "device" in kwargs and str(kwargs["device"]) == "meta":
            return func(*args, **kwargs)
        if (seen := _SEEN.get(id(func))) is None:
            seen = _SEEN[id(func)] = func, func in _READS_NUMBERS | _INDEXES | _TREATED
        is_special = seen[1]
        compared = zip(tensors, storages, strict=True)
        if is_special:
            if func in (aten.detach.default, aten.lift_fresh.default):
                return func(*args, **kwargs)
            if func is aten.histc.default and not args[0].is_floating_point():  # which a CPU has no code for
                return put(func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype), place(args[0]))
            if func is aten.copy_.default and place(args[0]) != place(args[1]):
                self.copy(args[0], args[1], bool(kwargs.get("non_blocking", len(args) > 2 and args[2])))
                return args[0]
            if func is aten._foreach_copy_.default:  # one after the other, where they are of two devices
                for to, source in zip(*args[:2], strict=True):
                    self.operate(aten.copy_.default, (to, source, *args[2:]), kwargs)
                return None
            if func in _INDEXES and place(args[0]) == CUDA:
                if any(i is not None and (place(i) == HOST or i.dtype == torch.bool) for i in args[1]):
                    self.wait_unasked("places of the host, or what is true of places, for an index")
                compared = ((each, storage_of(each)) for each in (args[0], *args[2:3]))
        where = self._of_all(func, compared, tensors)
        if is_special and where == CUDA:
            unsized = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
            if func in _READS_NUMBERS or unsized:
                self.wait_unasked(str(func))
        if self.capturing is not None and where == CUDA:
            out = self.capturing.operate(func, args, kwargs, storages)
        else:
            out = func(*args, **kwargs)
        for each in (made := new_in(out, storages)):
            storage_of(each).emulated = where
        if made and self.capturing is None and "empty" in func.__name__:
            with self.off(), torch.inference_mode():
                for each in made:
                    poison(each)
        return out

    def _of_all(self, func: Any, compared: Iterable[tuple[Tensor, Any]], tensors: list[Tensor]) -> torch.device:
        at: torch.device | None = None
        for each, storage in compared:
            here = getattr(storage, "emulated", HOST)
            if here is not at and (here is CUDA or each.dim()):  # single numbers may be a host's
                if at is not None:
                    of = [(str(place(each)), list(each.shape)) for each in tensors]
                    raise DeviceFault(f"{func} of tensors on {of}{caller()}")
                at = here
        return at if at is not None else HOST if tensors else self.making

    def load(self, kernel: Any, args: Any, kwargs: Any) -> None:
        """Of a kernel of Triton that is about to be launched: its code, which not every driver loads in a capture."""
        code = kernel.fn, _compiled_for(kernel, args, kwargs)
        if self.capturing is not None and code not in self._loaded:
            raise DeviceFault(f"{kernel.__name__} is first launched so in a capture{caller()}")
        self._loaded.add(code)

    def launch(self, run: Callable[..., None], executor: Any, *args: Any, **kwargs: Any) -> None:
        """Of a kernel of Triton, interpreted."""
        for each in () if self.is_off else tensors_in((args, kwargs)):
            if place(each) != CUDA and each.numel():
                raise DeviceFault(f"{executor.fn.__name__} is given a host's tensor, {list(each.shape)}{caller()}")
        with self.off():
            if self.capturing is None:
                run(executor, *args, **kwargs)
            else:
                self.capturing.launch(partial(run, executor), *args, **kwargs)


def _compiled_for(kernel: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What Triton compiles a kernel anew for: constants, dtypes, numbers that are 1 or multiples of 16, as addresses may be."""
    plain, anywhere = (
        set(kernel.kwargs.get(key) or ()) for key in ("do_not_specialize", "do_not_specialize_on_alignment")
    )
    found: list[Any] = []
    for name, value in sorted((dict(zip(kernel.arg_names, args, strict=False)) | kwargs).items()):
        is_constant = name not in kernel.arg_names or "constexpr" in str(kernel.fn.__annotations__.get(name))
        if isinstance(value, Tensor):
            found.append((name, value.dtype, name in plain | anywhere or value.data_ptr() % 16 == 0))
        elif is_constant or type(value) not in (int, float):
            found.append((name, repr(value)))
        elif isinstance(value, int):
            found.append((name, abs(value) >= 2**31, name in plain or (value == 1, value % 16 == 0)))
    return tuple(found)


def _has_stayed(source: Tensor, before: Tensor) -> None:
    now, then = (each.reshape(-1).view(torch.uint8) for each in (source, before))  # NaN is as it was, too
    if not torch.equal(now, then):
        raise DeviceFault("the host wrote to what a copy was still reading")


class _Operations(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which takes as long as the operation: nothing here is compiled

    def __init__(self, device: EmulatedCuda) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._device.operate(func, args, kwargs or {})


@contextmanager
def emulated_cuda() -> Iterator[EmulatedCuda]:
    """Within, in this thread, there is a device ``cuda:0``. Where there is a real one, the test is skipped."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device, and nothing to emulate")
    device = EmulatedCuda()
    stream, properties = (
        device.stream(),
        SimpleNamespace(multi_processor_count=3, L2_cache_size=2**16, shared_memory_per_multiprocessor=100 * 2**10),
    )
    from_dlpack, run = torch.utils.dlpack.from_dlpack, interpreter.GridExecutor.__call__
    begin = interpreter.InterpretedFunction.run

    def launching(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not device.is_off:
            device.load(kernel, args, kwargs)
        return begin(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    def sharing(source: Tensor) -> Tensor:
        with device.off():
            return put(from_dlpack(source), place(source))

    of_cuda: dict[str, Any] = {
        "Stream": device.stream,
        "Event": device.event,
        "CUDAGraph": partial(Graph, device),
        "current_stream": lambda *_: stream,
        "current_device": lambda: 0,
        "stream": lambda *_: nullcontext(),
        "device": lambda *_: nullcontext(),
        "synchronize": lambda *_: device.wait(),
        "empty_cache": lambda: device.capturing and device.wait_unasked("emptying of the cache of memory"),
        "mem_get_info": lambda *_: (2**33, 2**34),
        "graph_pool_handle": lambda: (0, 1),
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (8, 9),
        "is_current_stream_capturing": lambda: device.capturing is not None,
        "_sleep": lambda *_: None,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in of_cuda.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
        patch.setattr(torch.accelerator, "device_index", lambda *_: nullcontext())
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(torch.Tensor, "record_stream", lambda memory, _: device.let_go.append(memory))
        patch.setattr(torch.utils.dlpack, "from_dlpack", sharing)
        patch.setattr(interpreter.InterpretedFunction, "run", launching)
        patch.setattr(interpreter.GridExecutor, "__call__", lambda *args, **kwargs: device.launch(run, *args, **kwargs))
        patch.setattr(EmulatedCuda, "now", device)
        with Functions(device), _Operations(device):
            yield device
