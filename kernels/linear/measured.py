"""A projection in the way that is fastest on this device, measured when a weight's shape first meets some dozens of rows.

For few rows, the vendor's library comes near the memory's speed for some shapes and not for others, and the best cut of a
weight among the programs that stream it differs, too. A way whose numbers are wrong is not taken. Where nothing can be
measured, because it does not compile or there is no memory, the library multiplies.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.linear.cuts import MOST_ROWS, Cut, cuts_to_try
from stoker.kernels.linear.invariant import linear as in_tiles
from stoker.kernels.linear.linear import FEWEST_FOR_TORCH, MOST_SKINNY, skinny
from stoker.kernels.linear.linear import linear as by_torch
from stoker.kernels.linear.streamed import describable, streamed, sums_of_splits
from stoker.kernels.lora.ahead import goes_ahead
from stoker.kernels.lora.lora import AHEAD_SHARED, SHRINK_SHARED, ahead, lora, shrink
from stoker.kernels.norm_rotary import rms_norm
from stoker.kernels.reference.fp8 import FP8
from stoker.kernels.reference.lora import AdapterRows, LoraTable
from stoker.kernels.reference.norm_rotary import Activation, Norm

_log = logging.getLogger("stoker")
_LEAST_BYTES = 2**22  # with a smaller weight, launches take most of the time
_MOST_OF_FP8 = 1024  # rows; beyond it a plain copy of the weight costs little beside the product
_STEP = 16  # rows are rounded up to a multiple of it for measuring; above MOST_ROWS, to a multiple of that
_MOST_ADAPTED = 512  # rows with adapters; with more, it matters little where in a step these run
_ROUNDS = 7
_CYCLES = 10_000_000  # about 5 ms, in which the host launches the round that is then timed
_MOST_CYCLES = 16 * _CYCLES  # for a slow host
_ERROR = {torch.float16: 4e-3, torch.bfloat16: 3e-2}  # relative to the largest number: other orders of the same sums


class _Found(NamedTuple):
    """way: the fastest way to multiply. cuts: of a streamed weight, the fastest first."""

    way: Callable[..., Tensor]
    cuts: Sequence[Cut] = ()


class _Adapted(NamedTuple):
    """A projection that adapters follow. options: residual and row_scales, of the projection. in_place: it may write to the residual."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    table: LoraTable
    rows: AdapterRows
    gated: Activation | None
    options: dict[str, Any]
    in_place: bool = False


def _described(given: _Adapted) -> _Adapted:
    """With x as the chip can read it before a product's turn."""
    if describable(given.x):
        return given
    return given._replace(x=given.x.clone(memory_format=torch.contiguous_format))


class MeasuredLinear:
    """``Ops.linear`` of one engine, whose steps follow one another on the device."""

    def __init__(self) -> None:
        # By what is measured: the ways to multiply and their times, the fastest first (``Ops.matmuls``).
        self.chosen: dict[str, str] = {}
        self._ways: dict[tuple[Any, ...], _Found] = {}
        self._with_adapters: dict[tuple[Any, ...], Callable[[_Adapted], Tensor] | None] = {}
        self._arrived: dict[tuple[torch.device, Cut | None, int], Tensor] = {}

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
        gated: Activation | None = None,
        residual: Tensor | None = None,
        scale: float = 1.0,
        in_place: bool = False,
        row_scales: Tensor | None = None,
    ) -> Tensor:
        """As the reference's. x: [T, D]; weight: [N, D]."""
        options: dict[str, Any] = {"norm": norm, "gated": gated, "residual": residual, "scale": scale}
        options["row_scales"] = row_scales
        multiply = by_torch
        if self._has_ways(x, weight, residual):
            multiply = self._fastest(x, weight, bias, options).way
        if multiply is by_torch:
            return by_torch(x, weight, bias, in_place=in_place, **options)
        return multiply(x, weight, bias, **options)

    def adapted(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        table: LoraTable,
        rows: AdapterRows,
        *,
        gated: Activation | None = None,
        residual: Tensor | None = None,
        in_place: bool = False,
        row_scales: Tensor | None = None,
    ) -> Tensor:
        """The projection and then ``lora``, in the fastest way that was measured.

        Adapters run after the projection, or around it, their shrink before and their expand after it; or the shrink runs beside a
        streamed product, or all of them ahead of one.
        """
        options = {"residual": residual, "row_scales": row_scales}
        given = _Adapted(x, weight, bias, table, rows, gated, options, in_place)
        way: Callable[[_Adapted], Tensor] = self._after
        if x.shape[0] <= _MOST_ADAPTED and self._has_ways(x, weight, residual, _MOST_ADAPTED):
            way = self._fastest_with_adapters(given) or way
        return way(given)

    def _after(self, given: _Adapted) -> Tensor:
        out = self(given.x, given.weight, given.bias, in_place=given.in_place, **given.options)
        return lora(given.x, out, given.table, given.rows, given.gated, settled=True)

    def _around(self, given: _Adapted) -> Tensor:
        hidden = shrink(given.x, given.table, given.rows, given.gated)
        out = self(given.x, given.weight, given.bias, in_place=given.in_place, **given.options)
        return lora(given.x, out, given.table, given.rows, given.gated, shrunk=hidden)

    def _beside(self, cut: Cut, given: _Adapted) -> Tensor:
        out = self._streamed(cut, SHRINK_SHARED, given, gated=None, **given.options)
        return lora(given.x, out, given.table, given.rows, given.gated, settled=True)

    def _ahead(self, cut: Cut, room: int, given: _Adapted) -> Tensor:
        given = _described(given)
        sums = sums_of_splits(given.x, given.weight, cut, gated=given.gated is not None, beside=room)
        options = given.options | {"residual": None, "arrived": self._arrived_on(given.x.device, cut, room)}
        added = ahead(given.x, given.options["residual"], given.table, given.rows)
        return self._streamed(cut, room, given, gated=given.gated, added=added, sums=sums, **options)

    def _streamed(self, cut: Cut, room: int, given: _Adapted, **options: Any) -> Tensor:
        """A streamed product that leaves so many bytes of a multiprocessor's shared memory to adapters."""
        settings: dict[str, Any] = {
            "norm": None,
            "scale": 1.0,
            "beside": room,
            "arrived": self._arrived_on(given.x.device),
        }
        return streamed(given.x, given.weight, given.bias, cut=cut, **settings | options)

    @staticmethod
    def _has_ways(x: Tensor, weight: Tensor, residual: Tensor | None, most: int = MOST_ROWS) -> bool:
        """Whether there is a choice. For fp8 weights there is one up to more rows, as torch has to make a copy of them first."""
        narrow = weight.dtype == FP8
        return (
            FEWEST_FOR_TORCH <= x.shape[0] <= (_MOST_OF_FP8 if narrow else most)
            and x.dtype in _ERROR
            and (narrow or (weight.dtype == x.dtype and weight.nbytes >= _LEAST_BYTES))
            and all(t is None or t.stride(1) == 1 for t in (x, weight, residual))
        )

    @staticmethod
    def _what(x: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> tuple[tuple[Any, ...], str]:
        """The key of a measurement, and its name."""
        step = _STEP if x.shape[0] <= MOST_ROWS else MOST_ROWS
        rows = -(-x.shape[0] // step) * step
        given = {"bias": bias, **options}
        what = [n for n in ("bias", "norm", "gated", "residual", "row_scales") if given.get(n) is not None]
        name = ", ".join([f"{rows} x {weight.shape[0]} x {weight.shape[1]}", *what])
        return (rows, weight.shape, *what, x.dtype, describable(weight)), name

    def _fastest(self, x: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> _Found:
        key, name = self._what(x, weight, bias, options)
        if key not in self._ways:
            if is_capturing(x.device):  # nothing can be measured now
                return _Found(by_torch)
            self.chosen[name], self._ways[key] = self._measured(x, weight, bias, options)
        return self._ways[key]

    def _measured(self, x: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> tuple[str, _Found]:
        ways: dict[str, Callable[..., Tensor]] = {"torch": by_torch}
        in_order: list[Cut] = []
        try:
            cuts = self._cuts(x, weight, options["gated"] is not None)
            ways |= self._others(x, cuts)
            calls = {name: partial(way, x, weight, bias, **options) for name, way in ways.items()}
            expected = calls["torch"]()
            timed = {}
            if options["residual"] is not None:  # the sum mostly takes its place, which saves a copy
                timed["torch"] = partial(calls["torch"], residual=options["residual"].clone(), in_place=True)
            order, found = by_time(calls, "torch", expected, weight, timed)
            best, in_order = order[0], [cuts[name] for name in order if name in cuts]
        except Exception as error:  # whatever the compiler, the driver or the allocator says
            size = list(weight.shape)
            _log.warning("torch multiplies %s rows by %s, as nothing could be measured: %s", x.shape[0], size, error)
            best = found = "torch"
        return found, _Found(ways[best], in_order)

    def _fastest_with_adapters(self, given: _Adapted) -> Callable[[_Adapted], Tensor] | None:
        """A projection with adapters around it, or a streamed one with the shrink beside or all of them ahead of it; None where adapters
        after it are faster.

        Measured with the adapters that there are, each for as many rows.
        """
        x, weight, bias, table, rows, gated, options, _ = given
        key, name = self._what(x, weight, bias, options | {"gated": gated})
        key = *key, *table.widths, table.traits
        if key in self._with_adapters:
            return self._with_adapters[key]
        if is_capturing(x.device) or table.empty:
            return None
        slots = torch.tensor(sorted(set().union(*table.weights)), device=x.device)
        of_all = AdapterRows(slots[torch.arange(len(rows.slots), device=x.device) % len(slots)])
        given = given._replace(rows=of_all, in_place=False)
        ways: dict[str, Callable[[_Adapted], Tensor]] = {"after": self._after, "around": self._around}
        order = ["after"]
        try:
            ways |= self._ways_with_adapters(given)
            calls = {name: partial(way, given) for name, way in ways.items()}
            expected = calls["after"]()
            timed = {}
            if (residual := options["residual"]) is not None:  # as in ``_measured``
                again = given._replace(options=options | {"residual": residual.clone()}, in_place=True)
                timed = {way: partial(ways[way], again) for way in ("after", "around")}
            order, self.chosen[f"{name}, adapters"] = by_time(calls, "after", expected, weight, timed)
        except Exception as error:
            size = list(weight.shape)
            _log.warning("%s rows of %s are not measured with adapters: %s", x.shape[0], size, error)
        self._with_adapters[key] = None if order[0] == "after" else ways[order[0]]
        return self._with_adapters[key]

    def _ways_with_adapters(self, given: _Adapted) -> dict[str, Callable[[_Adapted], Tensor]]:
        """The ways that stream the weight, by name."""
        x, weight, bias, table, _, gated, options, _ = given
        ways: dict[str, Callable[[_Adapted], Tensor]] = {}
        if x.shape[0] > MOST_ROWS:
            return ways
        cuts = self._fastest(x, weight, bias, {"norm": None, "gated": None, "scale": 1.0, **options}).cuts
        if cuts:
            ways["beside"] = partial(self._beside, cuts[0])
        if gated is not None:  # the fastest cut of a gated product is not known
            cuts = list(self._cuts(x, weight, True).values())
        if goes_ahead(table, x.dtype):
            for cut in cuts[:2]:
                for room in AHEAD_SHARED:
                    name = f"ahead, {cut.rows} rows in {cut.splits} splits, {room // 1024} KiB left"
                    ways[name] = partial(self._ahead, cut, room)
        return ways

    def _cuts(self, x: Tensor, weight: Tensor, gated: bool) -> dict[str, Cut]:
        if x.shape[0] > MOST_ROWS or not describable(weight):
            return {}
        size, processors = (weight.shape[0], weight.shape[1]), launch.multiprocessors(x.device)
        narrow = weight.dtype == FP8
        cuts = cuts_to_try(x.shape[0], size, x.dtype.itemsize, gated, processors, narrow=narrow)
        return {f"streamed, {cut.rows} rows in {cut.splits} splits": cut for cut in cuts}

    def _others(self, x: Tensor, cuts: Mapping[str, Cut]) -> dict[str, Callable[..., Tensor]]:
        """The ways to multiply other than torch's, by name."""
        if x.shape[0] > MOST_ROWS:
            return {"in tiles": in_tiles}
        arrived = self._arrived_on(x.device)
        others: dict[str, Callable[..., Tensor]] = {
            name: partial(streamed, cut=cut, arrived=arrived) for name, cut in cuts.items()
        }
        if x.shape[0] <= MOST_SKINNY:
            others["skinny"] = skinny
        return others

    def _arrived_on(self, device: torch.device, cut: Cut | None = None, room: int = 0) -> Tensor:
        """Zeros that splits of a product are counted by.

        Only products of several splits count, and these have fewer tiles than there are multiprocessors. cut, room: of a product that
        adapters run ahead of, which counts before its turn: where threads launch what is measured, right behind any other product.
        """
        key = device, cut, room
        if key not in self._arrived:
            self._arrived[key] = torch.zeros(launch.multiprocessors(device), dtype=torch.int32, device=device)
        return self._arrived[key]


def by_time(
    calls: Mapping[str, Callable[[], Tensor]],
    first: str,
    expected: Tensor,
    weight: Tensor,
    timed: Mapping[str, Callable[[], Tensor]],
) -> tuple[list[str], str]:
    """The names of all ways whose result is right, the fastest first, and a text with their times.

    first: the way that is right by definition. expected: its result. timed: calls of some ways that are timed in place of theirs,
    as only the first one's result is right: they write to what they read.
    """
    rows, dtype, expected = expected.shape[0], expected.dtype, expected.float()
    if not expected.isfinite().all():
        raise ValueError("the product is not finite")
    most = _ERROR[dtype] * expected.abs().max()
    if weight.device.type == "cuda":  # an interpreter runs one at a time
        run_at_once([call for name, call in calls.items() if name != first], weight.device)
    right = {
        name: timed.get(name, call)
        for name, call in calls.items()
        if name == first or bool((call().float() - expected).abs().max() <= most)
    }
    for name in calls.keys() - right.keys():
        _log.warning("%s is wrong for %s rows of %s, and not used", name, rows, list(weight.shape))
    del expected
    taken = microseconds(right, weight.device)
    order = sorted(taken, key=lambda name: taken[name])
    return order, " < ".join(f"{name} {taken[name]:.1f} us" for name in order)


def run_at_once(calls: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Run each in a thread, for what it compiles: some seconds of a first start, most of which other cores can take.

    An error is left to whoever calls it again.
    """
    inference = torch.is_inference_mode_enabled()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    if stream is not None:
        launch.load_one_at_a_time()

    def run(call: Callable[[], object]) -> None:
        on_it = torch.cuda.stream(stream) if stream is not None else nullcontext()
        with torch.inference_mode(inference), on_it, suppress(Exception):
            if stream is not None:
                stream.query()  # a new thread has no context of the device before its first call
            call()

    with ThreadPoolExecutor(max(len(calls), 1), "stoker-compiles") as threads:
        list(threads.map(run, calls))


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def microseconds(calls: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Device time that each call adds to a step, by medians.

    What a call reads is not in cache, as a whole model runs between two calls, and it may start early, while the small
    kernel before it runs.
    """
    event: Any = partial(torch.cuda.Event, enable_timing=True)
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    other = torch.zeros(cache // 2, dtype=torch.float32, device=device)  # twice as large
    small = torch.ones(1, 1024, dtype=torch.bfloat16, device=device)
    rms_norm(small, small[0], 1.0)
    calls = {"": lambda: None, **calls}
    times: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    cycles, rounds = _CYCLES, 0
    while rounds < _ROUNDS:
        slept = event()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        slept.record()
        pairs: dict[str, tuple[Any, Any]] = {}
        for name, call in calls.items():
            other.sum()
            start, end = event(), event()
            start.record()
            rms_norm(small, small[0], 1.0)
            call()
            end.record()
            pairs[name] = start, end
        if slept.query() and cycles < _MOST_CYCLES:  # the device has waited for the host: that was timed, too
            cycles *= 2
            continue
        rounds += 1
        for name, pair in pairs.items():
            times[name].append(pair)
    end.synchronize()
    taken = {name: statistics.median(1e3 * s.elapsed_time(e) for s, e in each) for name, each in times.items()}
    before = taken.pop("")
    return {name: time - before for name, time in taken.items()}
