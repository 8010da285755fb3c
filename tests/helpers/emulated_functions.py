"""What Python sees of tensors on an emulated device: their device, and their numbers when it asks for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from emulated_graph import CUDA, HOST, DeviceFault, place, put
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from emulated_cuda import EmulatedCuda


def caller() -> str:
    """The function of the package that is running."""
    frame: Any = sys._getframe()
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("stoker."):
        frame = frame.f_back
    return "" if frame is None else f" in {frame.f_globals['__name__']}.{frame.f_code.co_name}"


def is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "pinned", False)


class Functions(TorchFunctionMode):
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
            own.is_pinned: lambda t, *_: is_pinned(t),
            own.pin_memory: lambda t, *_: _pin(put(t.clone(), HOST)),
            own.numpy: self._numpy,
            own.__array__: lambda t, *args, **kwargs: self._numpy(t).__array__(*args, **kwargs),
            own.tolist: self._tolist,
            own.new_tensor: self._new_tensor,
            torch.as_tensor: self._as_tensor,
            torch.asarray: self._as_tensor,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = self._known.get(func)
        if known is not None:
            return known(*args, **(kwargs or {}))
        if not kwargs:
            return func(*args)
        kwargs = dict(kwargs)
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
            raise DeviceFault(f"a device's tensor as one of numpy{caller()}")
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
    return {"cuda": CUDA, "cpu": HOST}.get(named.type, named)


def _pin(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().pinned = True
    return tensor


class Generator(torch.Generator):
    def __new__(cls, *_: Any, **__: Any) -> torch.Generator:  # type: ignore[misc]
        return torch._C.Generator()
