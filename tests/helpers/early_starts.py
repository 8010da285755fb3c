"""Whether kernels that start before the one before them has ended touch only what they may, in Triton's interpreter.

The interpreter runs one launch after another, so results never show that a kernel read too early. Here each launch is
checked as if it started early on a GPU, by the rules of ``stoker.kernels.launch``: until a program has called
``await_turn``, it reads nothing that the launch just before wrote, and writes only to memory that was there before that
launch, which was not given it; one program at least calls it; and what it fetches ahead is part of tensors that it was given,
or whose addresses it may have. Where the launch before let it start before its own turn, all this holds for those, too, that
that one started beside. A launch is one of
Triton's, or a torch operation on something that kernels are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from emulated_graph import tensors_in
from numpy.typing import NDArray
from sanitizer import BY_ADDRESS, Everything, among, wrapping
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from stoker.kernels import launch

_UNIT = 2  # bytes
Accessed = tuple[NDArray[np.int64], int]  # addresses, and how many bytes each is the first of
# Which launch nothing on a device.
_NO_LAUNCHES = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
    "resize_",
    "detach",
    "detach_",
}


@dataclass
class Found:
    """faults: what was found. early: how many launches of each kernel read something before their turn. fetched: the addresses that
    the last launch of each asked for ahead."""

    faults: set[str] = field(default_factory=set)
    early: dict[str, int] = field(default_factory=dict)
    fetched: dict[str, NDArray[np.int64]] = field(default_factory=dict)


class _Launch:
    def __init__(
        self,
        name: str,
        *,
        dependent: bool,
        beside: Sequence[_Launch] = (),
        number: int = -1,
        given: Sequence[Tensor] = (),
    ) -> None:
        """beside: the launches that may still run when it starts early. number: of launches before it; -1 of an operation of torch."""
        self.name, self.dependent, self.beside, self.number = name, dependent, beside, number
        self.given = [_extent(each) for each in given]
        self.waits = self.lets_up_early = False  # any of its programs
        self.waited: bool | None = None  # of the program that runs
        self.written: list[Accessed] = []
        self.filled: list[tuple[int, int]] = []  # by torch: units of memory, from one up to another
        self.early: list[Accessed] = []
        self.written_early: list[Accessed] = []
        self.fetched: list[NDArray[np.int64]] = []

    def begin_program(self) -> None:
        self.waited = not self.dependent

    def beside_the_next(self) -> list[_Launch]:
        return [self, *(self.beside if self.lets_up_early else ())]


@cache
def _about(func: Any) -> tuple[str, bool, list[int]]:
    """Of an operation of torch: its name, whether it may launch something, and the numbers of the arguments that it writes to."""
    name, arguments = func.overloadpacket.__name__, enumerate(func._schema.arguments)
    writes = [number for number, each in arguments if each.alias_info is not None and each.alias_info.is_write]
    return name, name not in _NO_LAUNCHES, writes


def _within(addresses: NDArray[np.int64], tensors: Sequence[Tensor]) -> bool:
    extents = [_extent(each) for each in tensors if each.device.type == "cpu" and each.numel()]
    return bool(
        np.any([(start * _UNIT <= addresses) & (addresses < end * _UNIT) for start, end in extents], axis=0).all()
    )


@contextmanager
def early_starts() -> Iterator[Found]:
    """Kernels interpreted within are looked at; gives what was found, filled until the end."""
    found, running = Found(), list[_Launch]()
    last = {"launch": _Launch("nothing", dependent=False)}
    given = set[int]()  # storages
    operations: list[tuple[_Launch, set[int]]] = []  # of torch, since the last launch, and the storages of each
    everything = Everything()
    launches, made = [0], dict[int, int]()  # how many; and how many there had been when a storage was made

    def call(run: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        values = (each.base if isinstance(each, TensorDescriptor) else each for each in arguments.values())
        tensors = [each for each in values if isinstance(each, Tensor)]
        given.update(map(_storage, tensors))
        operation = next((each for each, storages in reversed(operations) if storages & given), None)
        beside = last["launch"].beside_the_next() if operation is None else [operation]
        operations.clear()
        dependent, number = bool(arguments.get("DEPENDENT")), launches[0]
        running.append(_Launch(self.fn.__name__, dependent=dependent, beside=beside, number=number, given=tensors))
        launches[0] += 1
        try:
            run(self, *args, **kwargs)
        finally:
            now = last["launch"] = running.pop()
        if now.dependent and not now.waits:
            found.faults.add(f"no program of {now.name} waits for its turn")
        if now.fetched:
            found.fetched[now.name] = fetched = np.concatenate(now.fetched)
            if not _within(fetched, tensors) and not (now.name in BY_ADDRESS and everything.holds(fetched, 1)):
                found.faults.add(f"{now.name} fetches what is in no tensor that it was given")
        if now.written_early:
            first = min(each.number for each in beside)
            old = [each for each in tensors if made.get(_storage(each), 0) <= first]
            apart = not any(_meet(now.written_early, before.given, before.written) for before in beside)
            if not apart or not all(_within(addresses, old) for addresses, _ in now.written_early):
                found.faults.add(f"{now.name} writes before its turn")
        if now.early:
            found.early[now.name] = found.early.get(now.name, 0) + 1
            for before in beside:
                if _meet(now.early, before.filled, before.written):
                    found.faults.add(f"{now.name} reads, before its turn, what {before.name} just wrote")

    def begin_program(run: Callable[..., None], self: Any, *at: int) -> None:
        running[-1].begin_program()
        run(self, *at)

    def wait() -> None:
        running[-1].waited = running[-1].waits = True

    def launch_dependents() -> None:
        running[-1].lets_up_early |= not running[-1].waited

    def load(run: Callable[..., Any], self: Any, pointers: Any, mask: Any, *more: Any, **named: Any) -> Any:
        if not running[-1].waited:
            running[-1].early.append(_accessed(pointers, mask))
        return run(self, pointers, mask, *more, **named)

    def write(pointers: Any, mask: Any) -> None:
        accessed = _accessed(pointers, mask)
        running[-1].written.append(accessed)
        if not running[-1].waited:
            running[-1].written_early.append(accessed)

    def fetch(asm: str, constraints: str, arguments: Any, **options: Any) -> None:
        assert asm.startswith("prefetch.global.L2")
        running[-1].fetched.append(np.asarray(arguments[0].handle.data, np.int64).reshape(-1))

    def store(run: Callable[..., Any], self: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        write(pointers, mask)
        return run(self, pointers, value, mask, *more)

    def atomic(run: Callable[..., Any], self: Any, what: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        write(pointers, mask)
        return run(self, what, pointers, value, mask, *more)

    class Operations(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # which takes as long as the operation: nothing here is compiled

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **kwargs or {})
            name, launched, writes = _about(func)
            before, after = tensors_in((args, kwargs)), tensors_in(out)
            known = {_storage(each) for each in before}
            if func.is_view and all(_storage(each) in known for each in after):  # others copied: ``to`` may, say
                return out
            made.update((number, launches[0]) for number in map(_storage, after) if number not in known)
            poison = name == "fill_" and isinstance(args[1], float) and args[1] != args[1]  # of tests
            if running or not launched or poison:
                return out
            written = [*after, *tensors_in([args[number] for number in writes if number < len(args)])]
            operation = _Launch(f"torch's {name}", dependent=False)
            operation.filled = [_extent(each) for each in written if each.device.type == "cpu"]
            storages = {_storage(each) for each in (*before, *after) if each.device.type == "cpu"}
            operations.append((operation, storages))
            return out

    with pytest.MonkeyPatch.context() as patch, Operations():
        wrap = wrapping(patch)
        wrap(interpreter.GridExecutor, "__call__", call)
        builder = interpreter.InterpreterBuilder
        wrap(builder, "set_grid_idx", begin_program)
        wrap(builder, "create_masked_load", load)
        wrap(builder, "create_masked_store", store)
        wrap(builder, "create_atomic_rmw", atomic)
        patch.setattr(launch, "starts_early", lambda device: True)
        patch.setattr(launch, "cuda", SimpleNamespace(gdc_wait=wait, gdc_launch_dependents=launch_dependents))
        patch.setattr(tl, "inline_asm_elementwise", fetch)
        yield found


def _accessed(pointers: Any, mask: Any) -> Accessed:
    chosen = np.broadcast_to(mask if isinstance(mask, np.ndarray) else mask.data, pointers.data.shape).astype(np.bool_)
    return pointers.data[chosen].astype(np.int64), max(1, pointers.get_element_ty().primitive_bitwidth // 8)


def _meet(early: list[Accessed], filled: list[tuple[int, int]], written: list[Accessed]) -> bool:
    """Whether something that was read is in what was filled or written; mostly all of it is elsewhere, as its ends show."""
    at = np.sort(np.concatenate([_units(each) for each in written])) if written else np.empty(0, np.int64)
    ranges = [*filled, *([(at[0], at[-1] + 1)] if at.size else [])]
    for each in early:
        first, end = (each[0].min() // _UNIT, each[0].max() // _UNIT + each[1]) if each[0].size else (0, 0)
        if not any(first < other_end and other < end for other, other_end in ranges):
            continue
        units = _units(each)
        if any(((other <= units) & (units < other_end)).any() for other, other_end in filled):
            return True
        if at.size and among(units, at).any():
            return True
    return False


def _units(accessed: Accessed) -> NDArray[np.int64]:
    """Of memory: those that something is in."""
    addresses, width = accessed
    return ((addresses[:, None] + np.arange(0, width, _UNIT)) // _UNIT).reshape(-1)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _extent(tensor: Tensor) -> tuple[int, int]:
    if tensor.numel() == 0 or tensor.layout != torch.strided:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, end = tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
    return start // _UNIT, -(-end // _UNIT)
