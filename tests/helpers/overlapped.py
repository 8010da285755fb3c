"""Runs interpreted kernels as badly timed as a GPU may: each begins as early as it can, and memory is used again at once.

``early_starts`` looks at what each launch touches; here launches do overlap, and whoever reads too early, or what is no longer
there, gets other numbers. Programs are threads that run by turns, as chance has it. By the rules of programmatic dependent launch a
kernel that may start early does so when all programs of the one before let it, or have ended; ``gdc_wait`` then waits until all
of the one before have ended, and for no earlier ones. A kernel that may not waits for the one before in the same way.

What is allocated lies, where it fits, over what was freed last, though launches may still use that: as torch's allocator has it
on a device, where all is in the order of one stream. Of torch's other operations each waits for all launches.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from sanitizer import wrapping
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

from stoker.kernels import launch

_UNIT = 512  # bytes that allocations are rounded up to
_SWITCHES = 0.02  # the chance that a program lets others go on before it reads or writes


class _Memory:
    """A device's memory."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = np.full(nbytes, 0xFF, np.uint8)  # NaN, until it is written
        self._taken: dict[int, int] = {}  # sizes, by place
        self._freed: list[tuple[int, int]] = []  # places and sizes, the last one last
        self.again = 0  # how often something was allocated where something else had been

    def take(self, nbytes: int) -> Tensor:
        size = -(-nbytes // _UNIT) * _UNIT
        beside = (
            at for start, n in reversed(self._freed[-20:]) for at in (start, start + n - size) if self._fits(at, size)
        )
        at = next(beside, None)
        self.again += at is not None
        if at is None:
            at = next(at for at in range(0, len(self._bytes), _UNIT) if self._fits(at, size))
        self._taken[at] = size
        block: Any = type("Block", (ctypes.c_char * nbytes,), {}).from_address(self._bytes.ctypes.data + at)
        weakref.finalize(block, self._free, at)
        return torch.frombuffer(block, dtype=torch.uint8)

    def _fits(self, at: int, size: int) -> bool:
        apart = (at + size <= start or start + n <= at for start, n in self._taken.items())
        return 0 <= at <= len(self._bytes) - size and all(apart)

    def _free(self, at: int) -> None:
        self._freed.append((at, self._taken.pop(at)))


class _Program:
    def __init__(self, of: _Launch, index: tuple[int, ...]) -> None:
        self.of, self.index = of, index
        self.thread: threading.Thread | None = None
        self.turn = threading.Semaphore(0)
        self.waits = self.lets_up = self.ended = False
        self.error: BaseException | None = None


class _Launch:
    def __init__(self, function: Any, arguments: dict[str, Any], grid: Sequence[int], before: _Launch | None) -> None:
        self.function, self.arguments, self.grid, self.before = function, arguments, grid, before
        self.early = bool(arguments.get("DEPENDENT"))
        self.programs = [_Program(self, index) for index in np.ndindex(*grid)]
        self.begun = False

    @property
    def ended(self) -> bool:
        return all(program.ended for program in self.programs)

    @property
    def may_begin(self) -> bool:
        before = self.before
        if before is None or before.ended:
            return True
        return self.early and before.begun and all(program.lets_up or program.ended for program in before.programs)


class _GivenUp(BaseException):
    """Ends the threads of programs that are not to go on."""


class Overlapped:
    """most: how many launches were under way at a time. again: how often memory was used again."""

    def __init__(self, seed: int, newest: bool) -> None:
        self._chance, self._newest = random.Random(seed), newest
        self.memory = _Memory(2**24)
        self.most = 0
        self.running: _Program | None = None
        self.kept: list[object] = []  # what torch allocates by itself is not used again
        self._under_way: list[_Launch] = []
        self._last: _Launch | None = None
        self._back, self._over = threading.Semaphore(0), False

    def launch(self, executor: Any, given: Sequence[Any], options: dict[str, Any]) -> None:
        """It runs later, when it has to."""
        names = inspect.getfullargspec(executor.fn).args
        interpreter._patch_lang(executor.fn)
        called = inspect.getcallargs(executor.fn, *given, **{n: v for n, v in options.items() if n in names})
        plain = executor.constexprs
        arguments = {n: v if n in plain else interpreter._implicit_cvt(v) for n, v in called.items()}
        grid = executor.grid(arguments) if callable(executor.grid) else executor.grid
        self._last = _Launch(executor.fn, arguments, (*grid, 1, 1)[:3], self._last)
        self._under_way.append(self._last)

    def settle(self) -> None:
        """Run all that was launched."""
        while self._under_way:
            ready = [launch for launch in self._under_way if launch.may_begin]
            programs = [p for each in ready for p in each.programs if not p.ended and self._may_go_on(p)]
            assert programs, "each program waits for another"
            if self._newest:
                programs = [p for p in programs if p.of is programs[-1].of]
            self._run(self._chance.choice(programs))
            self._under_way = [each for each in self._under_way if not each.ended]
            self.most = max(self.most, sum(each.begun for each in self._under_way))

    @staticmethod
    def _may_go_on(program: _Program) -> bool:
        return not program.waits or program.of.before is None or program.of.before.ended

    def _run(self, program: _Program) -> None:
        builder = interpreter.interpreter_builder
        builder.grid_dim, builder.grid_idx = program.of.grid, program.index
        self.running, program.of.begun, program.waits = program, True, False
        if program.thread is None:
            program.thread = threading.Thread(target=self._body, args=(program,), daemon=True)
            program.thread.start()
        program.turn.release()
        self._back.acquire()
        self.running = None
        if program.error is not None:
            raise program.error
        if program.of.ended:
            program.of.before = None  # and what was before that

    def _body(self, program: _Program) -> None:
        program.turn.acquire()
        try:
            program.of.function(**program.of.arguments)
        except _GivenUp:
            pass
        except BaseException as error:
            program.error = error
        program.ended = True
        self._back.release()

    def let_others_go_on(self) -> None:
        program = self.running
        assert program is not None
        self._back.release()
        program.turn.acquire()
        if self._over:
            raise _GivenUp

    def sometimes(self) -> None:
        if self._chance.random() < _SWITCHES:
            self.let_others_go_on()

    def wait(self) -> None:
        assert self.running is not None
        self.running.waits = True
        self.let_others_go_on()

    def let_up(self) -> None:
        assert self.running is not None
        self.running.lets_up = True
        self.let_others_go_on()

    def give_up(self) -> None:
        self._over = True
        for program in (p for each in self._under_way for p in each.programs if p.thread is not None and not p.ended):
            program.turn.release()
            self._back.acquire()


class _Operations(TorchDispatchMode):
    def __init__(self, launches: Overlapped) -> None:
        super().__init__()
        self._launches = launches

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in ``early_starts``

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in ("empty", "new_empty") and (size := args[-1]) and math.prod(size):
            dtype = kwargs.get("dtype") or (args[0].dtype if name == "new_empty" else torch.get_default_dtype())
            with _disable_current_modes():  # type: ignore[no-untyped-call]
                return self._launches.memory.take(math.prod(size) * dtype.itemsize).view(dtype).view(size)
        if not func.is_view or name == "reshape":  # which may copy
            self._launches.settle()
        out = func(*args, **kwargs)
        self._launches.kept.append(out if not func.is_view or name == "reshape" else None)
        return out


@contextmanager
def overlapped(seed: int, *, newest: bool = True) -> Iterator[Overlapped]:
    """Kernels interpreted within overlap. newest: those that were launched last go on first; else it is chance who does."""
    launches = Overlapped(seed, newest)

    def call(run: Callable[..., None], self: Any, *given: Any, **options: Any) -> None:
        launches.launch(self, given, options)

    def access(run: Callable[..., Any], self: Any, *given: Any, **options: Any) -> Any:
        launches.sometimes()
        return run(self, *given, **options)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        wrap = wrapping(patch)
        wrap(interpreter.GridExecutor, "__call__", call)
        for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw"):
            wrap(interpreter.InterpreterBuilder, name, access)
        patch.setattr(launch, "starts_early", lambda device: True)
        patch.setattr(launch, "cuda", SimpleNamespace(gdc_wait=launches.wait, gdc_launch_dependents=launches.let_up))
        patch.setattr(tl, "inline_asm_elementwise", lambda *given, **options: None)
        try:
            with _Operations(launches):
                yield launches
                launches.settle()
        finally:
            launches.give_up()
