"""Launches that overlap as far as a GPU lets them give the numbers of launches one after another, and what breaks the rules does not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from adapted_linears import compare_only, pretended_times, table_of  # noqa: F401
from cases_attention import NARROW, PLAIN, Paged, Row, options_of
from linears import make_linear
from lora_oracle import NUM_SLOTS
from overlapped import overlapped
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("kernels run compiled here", allow_module_level=True)

import triton
import triton.language as tl

from stoker.kernels import launch
from stoker.kernels.attention.paged import attend
from stoker.kernels.launch import await_end, await_turn, let_next_up
from stoker.kernels.linear import measured as linear_measured
from stoker.kernels.linear.cuts import Cut
from stoker.kernels.linear.measured import MeasuredLinear
from stoker.kernels.linear.streamed import streamed
from stoker.kernels.norm_rotary import rms_norm
from stoker.kernels.reference.lora import AdapterRows, LoraTable
from stoker.kernels.reference.norm_rotary import Activation
from stoker.kernels.triton_ops import TRITON

CPU = torch.device("cpu")
GATED: tuple[Activation | None, ...] = (None, "silu")
_Input = tuple[dict[str, Any], LoraTable, Tensor, Activation | None]


@triton.jit
def _plus_one(x, out, size, WHEN: tl.constexpr, DEPENDENT: tl.constexpr):
    """WHEN it waits, or lets the next come up, and waits."""
    at = tl.program_id(0) * 8 + tl.arange(0, 8)
    if WHEN == "first":
        await_turn(DEPENDENT)
    if WHEN == "before it writes":
        let_next_up(DEPENDENT)
    total = tl.load(x + at, mask=at < size, other=0.0) + 1
    if WHEN == "before it writes":
        await_end(DEPENDENT)
    tl.store(out + at, total, mask=at < size)


def plus(x: Tensor, when: str = "first", out: Tensor | None = None) -> Tensor:
    out = torch.empty(len(x)) if out is None else out
    _plus_one[(2,)](x, out, len(x), WHEN=when, **launch.options(CPU))
    return out


@pytest.mark.parametrize("newest", [True, False])
def test_what_waits_first_overlaps_and_reads_what_was_written(newest: bool) -> None:
    with overlapped(0, newest=newest) as launches:
        x = torch.zeros(16)
        for _ in range(20):
            x = plus(x)  # whose memory is free then
    assert (x == 20).all() and launches.most > 1 and launches.memory.again > 10


def test_what_reads_too_early_reads_something_else() -> None:
    x = torch.zeros(16)
    for when, right in (("first", True), ("before it writes", False)):
        with overlapped(0):
            out = plus(plus(plus(x)), when)
        assert bool((out == 3).all()) == right
    with overlapped(0):  # what has ended when it begins it may read
        out = plus(x)
        plus(x)
        again = plus(out, "before it writes")
    assert (again == 2).all()


def test_what_comes_up_beside_two_reads_neither_ones() -> None:
    x = torch.zeros(16)
    for ago in (1, 2, 3):
        with overlapped(0):
            made = [plus(x), plus(x), plus(x, "before it writes")]
            out = plus(made[-ago], "before it writes")
        assert bool((out == 2).all()) == (ago == 3)


def _projected(linear: MeasuredLinear, inputs: Sequence[_Input], way: str) -> list[Tensor]:
    """Each projection between two norms, as in a layer. Nothing that is made in between is kept."""
    made = []
    for arguments, table, slots, gated in inputs:
        x = rms_norm(arguments["x"], *arguments["norm"])
        given = x, arguments["weight"], arguments["bias"], table, AdapterRows(slots)
        out = linear.adapted(*given, gated=gated, residual=arguments["residual"])
        made.append(rms_norm(out, arguments["norm"].weight[: out.shape[1]], 1e-6))
    assert all(found.startswith(way) for name, found in linear.chosen.items() if name.endswith("adapters"))
    return made


def _inputs() -> list[_Input]:
    """Of each of two projections twice, the second time with other numbers."""
    ranks = {1: 8, 2: 16, 4: 64}
    tables = table_of(32, 16, 16, ranks=ranks, depth=1024), table_of(64, 64, ranks=ranks, depth=1024)
    slots, inputs = torch.arange(20) % (NUM_SLOTS + 1), list[_Input]()
    for table, options, gated in zip(tables, ("nr", "nb"), GATED, strict=True):
        assert table.pointers is not None  # sent before
        for _ in range(2):
            arguments = make_linear(20, sum(table.widths), 1024, options, torch.float32)
            inputs.append((arguments, table, slots, gated))
    return inputs


@pytest.mark.parametrize("way", ["after", "around", "beside", "ahead"])
def test_adapters_of_projections_in_every_way(
    way: str, times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a product exchanges the sums of its splits before its turn."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 8)
    times[way] = times["streamed"] = 1.0
    compare_only(monkeypatch, way)
    linear, inputs = MeasuredLinear(), _inputs()
    wanted = _projected(linear, inputs, way)
    with overlapped(0) as launches:
        found = _projected(linear, inputs, way)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert launches.most > 1 and not any(counted.any() for counted in linear._arrived.values())


def test_sums_that_lie_where_adapters_still_work_are_lost(
    times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a product's splits, if their memory is taken after adapters were launched ahead of it."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 8)
    times["ahead"] = 1.0
    compare_only(monkeypatch, "ahead")
    linear, inputs = MeasuredLinear(), _inputs()[:2]
    wanted = _projected(linear, inputs, "ahead")
    take, asked = linear_measured.sums_of_splits, list[partial[Tensor | None]]()
    monkeypatch.setattr(
        linear_measured, "sums_of_splits", lambda *what, **how: asked.append(partial(take, *what, **how))
    )

    def multiplied(*given: Any, sums: None, **options: Any) -> Tensor:
        return streamed(*given, sums=asked.pop()(), **options)

    monkeypatch.setattr(linear_measured, "streamed", multiplied)
    with overlapped(0):
        found = _projected(linear, inputs, "ahead")
    assert not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("apart", [True, False])
def test_a_product_that_another_thread_launches_in_between_counts_for_itself(
    apart: bool, times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where all ways are compiled at once: it still counts its splits when the product begins that adapters run ahead of."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 8)
    times["ahead"] = 1.0
    compare_only(monkeypatch, "ahead")
    linear, inputs, ahead = MeasuredLinear(), _inputs()[:2], linear_measured.ahead
    wanted, own, others = _projected(linear, inputs, "ahead"), linear._arrived_on, list[Tensor]()

    def with_another(x: Tensor, *given: Any) -> Tensor:
        added, plain = ahead(x, *given), {"norm": None, "gated": None, "residual": None, "scale": 1.0}
        others.append(streamed(x, inputs[0][0]["weight"], None, cut=Cut(64, 2, 1), arrived=own(CPU), **plain))  # type: ignore[arg-type]
        return added

    monkeypatch.setattr(linear_measured, "ahead", with_another)
    if not apart:
        monkeypatch.setattr(linear, "_arrived_on", lambda device, *what: own(device))
    right = []
    for seed in range(3):
        with overlapped(seed, newest=False):
            found = _projected(linear, inputs, "ahead")
        right += [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)]
        right.append(not any(counted.any() for counted in linear._arrived.values()))
    assert others and all(right) == apart


@pytest.mark.parametrize("shared", [False, True])
def test_attention_of_rows_in_several_pieces(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And layers one after the other, which count pieces and leave them in the same memory."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 4)
    rows = [Row(700), Row(710, shared=320 * shared), Row(130), Row(1)]
    case = Paged(NARROW, rows, torch.float32, padded=1)
    weight = torch.ones(NARROW.key_dim)

    def layers() -> list[Tensor]:
        plan, made = case.plan(TRITON, shared=shared), []
        for _ in range(2):
            query = rms_norm(case.query() if not made else made[-1], weight, 1e-6)
            made.append(attend(query, case.key_cache, case.value_cache, plan, **options_of(case, PLAIN))[0])
            plan.next_step()
        return made

    torch.manual_seed(0)
    wanted = layers()
    for newest in (True, False):
        torch.manual_seed(0)
        with overlapped(0, newest=newest) as launches:
            found = layers()
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)) and launches.most > 1
        counters = case.workspace["buffers"]._arrived.values()
        assert counters and not any(counted.any() for counted in counters)
