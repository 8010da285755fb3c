"""What compute-sanitizer looks for on a GPU, in kernels that Triton interprets.

The interpreter runs programs one after another, all lanes of each at once. It fills masked loads with zeros, and reads on
behind the end of a tensor. So none of the following shows in its results:

- An access outside of what the launch was given (or of any tensor, where addresses come from a table).
- Two accesses to one address, one of them a store, in no order: of two programs, neither of which waited for the other by an
  atomic, before which all lanes' stores have to meet at a barrier; or of two lanes of one program, with no barrier between.
- Lanes masked out of a load without ``other``, which hold anything on a GPU: here NaN, and large integers.
- ``tl.multiple_of`` of a number that is not.
- A NaN that ``tl.minimum`` and ``tl.maximum`` lose on a GPU, which return the other operand: so it does here.
- A launch that leaves it to the version of Triton whether ``a * b + c`` is rounded once or twice.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

LOAD, STORE, ATOMIC = range(3)
DOES = ("loads", "stores", "updates")
# What is known of an access to an address, beside it.
PROGRAM, TIME, KIND, BARRIERS, LANE = range(5)
# Rows of padding all have one slot, and nobody reads what they leave there: where slots are, and what has a row for each.
SLOTS = {
    "_advance_kernel": ("kept_slots_ptr", ["newest_ptr"]),
    "write_kernel": ("slots", ["key_cache", "value_cache"]),
    "_qk_norm_rotary_write_kernel": ("slots_ptr", ["key_cache_ptr", "value_cache_ptr"]),
    "_latent_heads_write_kernel": ("slots_ptr", ["key_cache_ptr", "value_cache_ptr"]),
    "_causal_conv_kernel": ("slots_ptr", ["state_ptr"]),
    "_gated_delta_rule_kernel": ("slots_ptr", ["state_ptr"]),
    "_selective_scan_kernel": ("slots_ptr", ["state_ptr"]),
}

# Kernels that are given addresses of tensors.
BY_ADDRESS = {
    "_checksums_kernel",
    "_copies_kernel",
    "look_up_kernel",
    "shrink_kernel",
    "expand_kernel",
    "expand_gated_kernel",
    "expand_ahead_kernel",
}


class Everything:
    """Where all tensors lie, as last looked for: kernels that are given addresses may be there."""

    def __init__(self) -> None:
        self._all = self._known = _extents(())

    def holds(self, addresses: NDArray[np.int64], width: int) -> bool:
        """If they are at none that is known, it looks again: first among the objects that are new, which are few."""
        if _all_within(addresses, width, self._known):
            return True
        self._known = _extents(_tensors(0), self._all)
        if not _all_within(addresses, width, self._known):
            self._all = self._known = _extents(_tensors())
        return _all_within(addresses, width, self._known)


def _tensors(generation: int | None = None) -> Iterator[Tensor]:
    return (each for each in gc.get_objects(generation) if issubclass(type(each), Tensor))


class Launch:
    """What the programs of one launch access, in the order in which they are run."""

    def __init__(self, kernel: str, arguments: dict[str, Any], everything: Everything) -> None:
        self.kernel, self.faults, self._everything = kernel, set[str](), everything
        given = (each.base if isinstance(each, TensorDescriptor) else each for each in arguments.values())
        tensors = [each for each in given if isinstance(each, Tensor)]
        self._allowed = _extents(tensors)
        self._starts, self._ends = self._allowed.T.tolist()
        slots, by_slot = SLOTS.get(kernel, (None, []))
        rows = [] if slots is None else _shared(arguments[slots])
        # One that has no use for slots is given anything in their place.
        found = (_row(name, arguments[name], slot) for name in by_slot for slot in rows)
        self._padding = _extents(row for row in found if row is not None)
        self._program, self._time, self._barriers = -1, 0, 0
        self._loose: int | None = None  # when several lanes first stored something after the last barrier
        self._seen: dict[int, int] = {}  # of programs, up to which time this one comes behind them
        self._released: dict[int, dict[int, int]] = defaultdict(dict)  # by address of an atomic
        self._waits: dict[int, list[tuple[int, dict[int, int]]]] = defaultdict(list)  # by program: when, and then seen
        self._accesses: list[tuple[NDArray[np.int64], NDArray[Any], tuple[int, ...]]] = []  # addresses, lanes, the rest

    def begin_program(self) -> None:
        self._program += 1
        self._time = self._barriers = 0
        self._loose = None
        self._seen = {}

    def barrier(self) -> None:
        self._barriers += 1
        self._loose = None

    def access(self, kind: int, pointers: Any, mask: NDArray[np.bool_]) -> None:
        shape = pointers.data.shape
        lanes = (mask if mask.shape == shape else np.broadcast_to(mask, shape)).reshape(-1).nonzero()[0]
        if lanes.size == 0:
            return
        self._time += 1
        if kind == STORE and pointers.data.size > 1 and self._loose is None:
            self._loose = self._time
        addresses = pointers.data.reshape(-1).astype(np.int64)
        if lanes.size < addresses.size:
            addresses = addresses[lanes]
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        # Mostly all are in one tensor, as the first and the last show.
        start = bisect_right(self._starts, int(addresses.min())) - 1
        apart = int(addresses.max()) + width > self._ends[start]
        if apart and not _within(addresses, width, self._allowed).all() and not self._is_known(addresses, width):
            raise IndexError(f"{self.kernel} {DOES[kind]} outside of every tensor")  # before it harms this process
        self._accesses.append((addresses, lanes, (self._program, self._time, kind, self._barriers)))

    def _is_known(self, addresses: NDArray[np.int64], width: int) -> bool:
        """Whether a kernel that is given addresses is at those of tensors."""
        return self.kernel in BY_ADDRESS and self._everything.holds(addresses, width)

    def wait(self, address: int) -> None:
        """One atomic that both acquires and releases, of one lane: not what other lanes stored after the last barrier."""
        for program, time in self._released[address].items():
            self._seen[program] = max(time, self._seen.get(program, 0))
        own = self._time if self._loose is None else self._loose - 1
        self._released[address] |= self._seen | {self._program: own}
        self._waits[self._program].append((self._time, dict(self._seen)))
        self.barrier()  # for its result goes from one thread to all

    def end(self) -> None:
        contested = self._contested()
        if contested.size:
            kept = []
            for addresses, lanes, known in self._accesses:
                (chosen,) = among(addresses, contested).nonzero()
                about = np.empty((chosen.size, 5), np.int64)
                about[:, :LANE], about[:, LANE] = known, lanes[chosen]
                kept.append((addresses[chosen], about))
            addresses, about = (np.concatenate(each) for each in zip(*kept, strict=True))
            order = np.argsort(addresses, kind="stable")
            addresses, about = addresses[order], about[order]
            firsts = np.flatnonzero(np.diff(addresses, prepend=-1))
            counts = np.diff(firsts, append=len(addresses))
            several = np.zeros(len(firsts), np.bool_)  # programs or lanes: what one does is in order
            for column in PROGRAM, LANE:
                least, most = (each.reduceat(about[:, column], firsts) for each in (np.minimum, np.maximum))
                several |= least != most
            for first in np.flatnonzero(several & ~_within(addresses[firsts], 1, self._padding)):
                self._compare(about[firsts[first] : firsts[first] + counts[first]])
        self._accesses.clear()

    def _contested(self) -> NDArray[np.int64]:
        """Addresses that are stored to and accessed once more, in order: most are neither read and written nor written twice."""
        stores = [addresses for addresses, _, about in self._accesses if about[KIND] == STORE]
        if not stores:
            return np.empty(0, np.int64)
        stored = np.sort(np.concatenate(stores))
        found = [stored[1:][stored[1:] == stored[:-1]]]
        for addresses, _, about in self._accesses:
            if about[KIND] != STORE and addresses.max() >= stored[0] and stored[-1] >= addresses.min():
                found.append(addresses[among(addresses, stored)])
        return np.sort(np.concatenate(found))

    def _compare(self, about: NDArray[np.int64]) -> None:
        """All accesses to one address, in their order."""
        stores = np.flatnonzero(about[:, KIND] == STORE)
        for a, b in {(min(i, j), max(i, j)) for i in stores for j in range(len(about)) if i != j}:
            one, two = about[a].tolist(), about[b].tolist()
            if one[PROGRAM] == two[PROGRAM]:
                if one[LANE] != two[LANE] and one[BARRIERS] == two[BARRIERS]:
                    self.faults.add(
                        f"{DOES[one[KIND]]}, then {DOES[two[KIND]]} in another lane, with no barrier between"
                    )
            elif self._seen_by(two).get(one[PROGRAM], 0) < one[TIME]:
                self.faults.add(f"one program {DOES[one[KIND]]} what another {DOES[two[KIND]]}, and neither waits")

    def _seen_by(self, access: list[int]) -> dict[int, int]:
        return next((seen for time, seen in reversed(self._waits[access[PROGRAM]]) if time < access[TIME]), {})


def wrapping(patch: pytest.MonkeyPatch) -> Callable[[Any, str, Callable[..., Any]], None]:
    """What puts a function around a method, or one more around those; it gets what runs within first."""

    def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        run = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **kwargs: around(run, *args, **kwargs))

    return wrap


@contextmanager
def sanitized() -> Iterator[set[str]]:
    """Kernels interpreted within are looked at; gives what was found, filled until the end."""
    found: set[str] = set()
    running: list[Launch] = []
    everything = Everything()

    def call(run: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        running.append(Launch(self.fn.__name__, arguments, everything))
        if "enable_fp_fusion" not in kwargs:
            running[-1].faults.add("does not say whether products and sums are fused")
        try:
            run(self, *args, **kwargs)
            running[-1].end()
        finally:
            launch = running.pop()
            found.update(f"{launch.kernel} {fault}" for fault in launch.faults)

    def begin_program(run: Callable[..., None], self: Any, *at: int) -> None:
        running[-1].begin_program()
        run(self, *at)

    def barrier(run: Callable[..., None], self: Any) -> None:
        running[-1].barrier()
        run(self)

    def load(run: Callable[..., Any], self: Any, pointers: Any, mask: Any, other: Any, *more: Any, **named: Any) -> Any:
        # Of a descriptor's tile the interpreter makes a mask that is an array itself.
        running[-1].access(LOAD, pointers, mask if isinstance(mask, np.ndarray) else mask.data)
        loaded = run(self, pointers, mask, other, *more, **named)
        if other is None and not mask.data.all():
            data = np.array(loaded.data)
            anything = {"f": np.nan, "b": True}.get(data.dtype.kind) or np.iinfo(data.dtype).max // 3
            loaded.data = np.where(np.broadcast_to(mask.data, data.shape), data, anything).astype(data.dtype)
        return loaded

    def store(run: Callable[..., Any], self: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        running[-1].access(STORE, pointers, mask.data)
        return run(self, pointers, value, mask, *more)

    def atomic(
        run: Callable[..., Any], self: Any, what: Any, pointers: Any, value: Any, mask: Any, order: Any, scope: Any
    ) -> Any:
        running[-1].access(ATOMIC, pointers, mask.data)
        if pointers.data.size == 1 and "ACQUIRE_RELEASE" in str(order) and mask.data.all():
            running[-1].wait(int(pointers.data.item()))
        return run(self, what, pointers, value, mask, order, scope)

    def hint(run: Callable[..., Any], self: Any, name: str, values: Any) -> Any:
        if name == "tt.divisibility" and self.data.ndim <= 1 and (self.data % values[0]).any():
            running[-1].faults.add(f"calls a number a multiple of {values[0]} that is none")
        return run(self, name, values)

    with pytest.MonkeyPatch.context() as patch:
        wrap = wrapping(patch)
        wrap(interpreter.GridExecutor, "__call__", call)
        builder = interpreter.InterpreterBuilder
        wrap(builder, "set_grid_idx", begin_program)
        wrap(builder, "create_barrier", barrier)
        wrap(builder, "create_masked_load", load)
        wrap(builder, "create_masked_store", store)
        wrap(builder, "create_atomic_rmw", atomic)
        wrap(interpreter.TensorHandle, "set_attr", hint)
        for name, number in ("create_minnumf", np.fmin), ("create_maxnumf", np.fmax):
            patch.setattr(builder, name, partialmethod(builder.binary_op, op=number))
        yield found


def among(some: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which are among the others, of which there are some, in order."""
    return np.asarray(others[np.searchsorted(others[:-1], some)] == some)


def _extents(tensors: Iterable[Tensor], more: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Where each begins and ends, in the order of their beginnings; an end is that of all before it too. more: what this gave."""
    found = {(-1, -1)} if more is None else {*map(tuple, more.tolist())}
    for each in tensors:
        if each.device.type == "cpu" and each.layout == torch.strided and each.numel():
            last = sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))
            found.add((each.data_ptr(), each.data_ptr() + (last + 1) * each.element_size()))
    extents = np.array(sorted(found), np.int64)
    extents[:, 1] = np.maximum.accumulate(extents[:, 1])
    return extents


def _within(addresses: NDArray[np.int64], width: int, extents: NDArray[np.int64]) -> NDArray[np.bool_]:
    at = np.searchsorted(extents[:, 0], addresses, side="right") - 1
    return np.asarray(addresses + width <= extents[at, 1])


def _all_within(addresses: NDArray[np.int64], width: int, extents: NDArray[np.int64]) -> bool:
    """Mostly all are in one extent, as the first and the last show."""
    ends = np.array((addresses.min(), addresses.max()))
    start = np.searchsorted(extents[:, 0], ends[0], side="right") - 1
    return bool(ends[1] + width <= extents[start, 1] or _within(addresses, width, extents).all())


def _shared(slots: Tensor) -> list[int]:
    values, counts = slots.unique(return_counts=True)
    return [int(slot) for slot in values[counts > 1]]


def _row(name: str, tensor: Tensor, slot: int) -> Tensor | None:
    place = divmod(slot, tensor.shape[1]) if "cache" in name else (slot,)  # of [blocks, block size, heads, dim]
    return tensor[place] if place[0] < len(tensor) else None
