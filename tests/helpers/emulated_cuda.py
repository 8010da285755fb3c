"""A CUDA device that is emulated on a CPU: what it computes is right, and what a real one refuses, or gets wrong, fails.

Tensors are a CPU's; whose they are is written on their storages. Functions of torch are told ``cuda:0``, and every operation
is looked at:

- Tensors of both devices in one operation fail, and so does a Triton kernel that is given a host's.
- Where the host has to wait (``item``, ``nonzero``, copies of memory that is not pinned) is noted in ``waits``.
- A copy without blocking has arrived once the host waited for an event behind it, and not before. What it reads has to stay
  as it is until then.
- A graph is a list of operations, with the memory they were given. A capture runs none of them, and no host may wait in it.
  A replay runs all on that same memory; where this was given away, or back, it fails.
- Memory that nothing was written to yet is NaN, of the host too, and -1 where it is of integers.
- A kernel of Triton has to have been launched before it is captured, in the form that it is then compiled in.

Triton's kernels are interpreted. There is one stream: what happens in two at once does not show.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_graph import CUDA, HOST, POISON, DeviceFault, Graph, new_in, place, poison, put, tensors_in
from torch import Tensor
from torch.overrides import TorchFunctionMode
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


def _caller() -> str:
    """The function of the package that is running."""
    frame: Any = sys._getframe()
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("stoker."):
        frame = frame.f_back
    return "" if frame is None else f" in {frame.f_globals['__name__']}.{frame.f_code.co_name}"


def _is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "pinned", False)


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
            raise DeviceFault(f"{what} in a capture{_caller()}")
        self.waits.append(what + _caller())
        self.wait()

    def copy(self, to: Tensor, source: Tensor, non_blocking: bool) -> None:
        if self.capturing is not None:
            raise DeviceFault(f"a copy between host and device in a capture{_caller()}")
        on_its_way = non_blocking and _is_pinned(to if place(to) == HOST else source)
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
        return SimpleNamespace(synchronize=self.wait, wait_stream=lambda *_: None, wait_event=lambda *_: None)

    # -- operations ----------------------------------------------------------------------------------------------

    def operate(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        is_meta = "device" in kwargs and str(kwargs["device"]) == "meta"
        if is_meta or any(each.is_meta for each in tensors) or func in (aten.detach.default, aten.lift_fresh.default):
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
        compared = tensors
        if func in _INDEXES and place(args[0]) == CUDA:
            if any(i is not None and (place(i) == HOST or i.dtype == torch.bool) for i in args[1]):
                self.wait_unasked("places of the host, or what is true of places, for an index")
            compared = [args[0], *args[2:3]]
        where = self._of_all(func, compared)
        unsized = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if where == CUDA and (func in _READS_NUMBERS or unsized):
            self.wait_unasked(str(func))
        run = self.capturing.operate if self.capturing is not None and where == CUDA else _call
        out = run(func, args, kwargs)
        for each in (made := new_in(out, tensors)):
            put(each, where)
        if "empty" in func.__name__ and self.capturing is None:
            with self.off(), torch.inference_mode():
                for each in made:
                    poison(each)
        return out

    def _of_all(self, func: Any, tensors: list[Tensor]) -> torch.device:
        # Single numbers may be a host's.
        places = {at for each in tensors if (at := place(each)) == CUDA or each.dim()}
        if len(places) > 1:
            of = [(str(place(each)), list(each.shape)) for each in tensors]
            raise DeviceFault(f"{func} of tensors on {of}{_caller()}")
        return places.pop() if places else HOST if tensors else self.making

    def load(self, kernel: Any, args: Any, kwargs: Any) -> None:
        """Of a kernel of Triton that is about to be launched: its code, which not every driver loads in a capture."""
        code = kernel.fn, _compiled_for(kernel, args, kwargs)
        if self.capturing is not None and code not in self._loaded:
            raise DeviceFault(f"{kernel.__name__} is first launched so in a capture{_caller()}")
        self._loaded.add(code)

    def launch(self, run: Callable[..., None], executor: Any, *args: Any, **kwargs: Any) -> None:
        """Of a kernel of Triton, interpreted."""
        for each in () if self.is_off else tensors_in((args, kwargs)):
            if place(each) != CUDA and each.numel():
                raise DeviceFault(f"{executor.fn.__name__} is given a host's tensor, {list(each.shape)}{_caller()}")
        with self.off():
            if self.capturing is None:
                run(executor, *args, **kwargs)
            else:
                self.capturing.launch(partial(run, executor), *args, **kwargs)


def _call(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


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


class _Functions(TorchFunctionMode):
    """What Python is told of a tensor's device, and where it asks for tensors."""

    def __init__(self, device: EmulatedCuda) -> None:
        super().__init__()
        self._device = device
        own = torch.Tensor
        self._known: dict[Any, Callable[..., Any]] = {
            own.device.__get__: place,
            own.is_cuda.__get__: lambda t: place(t) == CUDA,
            own.is_cpu.__get__: lambda t: place(t) == HOST,
            own.get_device: lambda t: 0 if place(t) == CUDA else -1,
            own.to: self._to,
            own.cpu: lambda t, **_: self._move(t, HOST),
            own.cuda: lambda t, device=0, non_blocking=False, **_: self._move(t, CUDA, non_blocking),
            own.is_pinned: lambda t, *_: _is_pinned(t),
            own.pin_memory: lambda t, *_: _pin(put(t.clone(), HOST)),
            own.numpy: self._numpy,
            own.__array__: lambda t, *args, **kwargs: self._numpy(t).__array__(*args, **kwargs),
            own.tolist: self._tolist,
            own.new_tensor: self._new_tensor,
            torch.as_tensor: self._as_tensor,
            torch.asarray: self._as_tensor,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._known:
            return self._known[func](*args, **kwargs)
        pinned = kwargs.pop("pin_memory", False)
        asked = kwargs.get("device")
        if asked is None or _named(asked).type == "meta":
            out = func(*args, **kwargs)
        else:
            before, self._device.making = self._device.making, _named(asked)
            try:
                out = put(func(*args, **(kwargs | {"device": HOST})), _named(asked))
            finally:
                self._device.making = before
            if func is torch.tensor and place(out) == CUDA:
                self._device.wait_unasked("numbers of the host, for a tensor")
        return _pin(out) if pinned else out

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            args = place(args[0]), args[0].dtype, *args[1:]
        device, dtype, flags = kwargs.pop("device", None), kwargs.pop("dtype", None), list[bool]()
        for each in args:
            if isinstance(each, bool):
                flags.append(each)
            elif isinstance(each, torch.dtype):
                dtype = each
            elif each is not None:
                device = each
        wanted = place(tensor) if device is None else _named(device)
        dtype = tensor.dtype if dtype is None else dtype
        non_blocking = bool(kwargs.pop("non_blocking", flags[0] if flags else False))
        if flags[1:]:
            kwargs["copy"] = flags[1]
        if "meta" in (wanted.type, tensor.device.type):
            return tensor.to(wanted, dtype, **kwargs)
        return self._move(tensor, wanted, non_blocking).to(dtype, **kwargs)

    def _move(self, tensor: Tensor, to: torch.device, non_blocking: bool = False) -> Tensor:
        if place(tensor) == to:
            return tensor
        moved = put(torch.empty_like(tensor.detach()), to)
        self._device.copy(moved, tensor.detach(), non_blocking)
        return moved

    def _numpy(self, tensor: Tensor, **kwargs: Any) -> Any:
        if place(tensor) == CUDA:
            raise DeviceFault(f"a device's tensor as one of numpy{_caller()}")
        with self._device.off():
            return tensor.numpy(**kwargs)

    def _tolist(self, tensor: Tensor) -> Any:
        if place(tensor) == CUDA:
            self._device.wait_unasked("tolist")
        return tensor.tolist()

    def _new_tensor(self, tensor: Tensor, data: Any, **kwargs: Any) -> Tensor:
        settings = {"device": place(tensor), "dtype": tensor.dtype} | kwargs
        return self.__torch_function__(torch.tensor, (), (data,), settings)

    def _as_tensor(self, data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        tensor = data if isinstance(data, Tensor) else torch.as_tensor(data, **kwargs)
        return self._to(tensor, device=device, **kwargs)


def _named(device: Any) -> torch.device:
    named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return CUDA if named.type == "cuda" else named


def _pin(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().pinned = True
    return tensor


class _Generator(torch.Generator):
    def __new__(cls, *_: Any, **__: Any) -> torch.Generator:  # type: ignore[misc]
        return torch._C.Generator()


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
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(torch.Tensor, "record_stream", lambda memory, _: device.let_go.append(memory))
        patch.setattr(torch.utils.dlpack, "from_dlpack", sharing)
        patch.setattr(interpreter.InterpretedFunction, "run", launching)
        patch.setattr(interpreter.GridExecutor, "__call__", lambda *args, **kwargs: device.launch(run, *args, **kwargs))
        patch.setattr(EmulatedCuda, "now", device)
        with _Functions(device), _Operations(device):
            yield device
