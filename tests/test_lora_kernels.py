"""Adapters over a projection: the kernel and the reference against dense products in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_oracle import DEVICE, DTYPES, assert_close, randn, unwritten_is_nan  # noqa: F401

from stoker.kernels.ops import REFERENCE
from stoker.kernels.reference.lora import AdapterRows, LoraTable, LoraWeights
from stoker.kernels.triton_ops import DETERMINISTIC, TRITON

NUM_SLOTS = 5
OPS = {"reference": REFERENCE, "triton": TRITON, "deterministic": DETERMINISTIC}


def make_table(
    widths: list[int], depth: int, ranks: dict[int, int], dtype: torch.dtype, *, biased: bool = False, gains: Any = ()
) -> LoraTable:
    """ranks: of each slot's adapter. The first linear has nothing of the last slot. gains: slots with DoRA."""
    table = LoraTable(widths, [randn(w, dtype=dtype) if biased else None for w in widths], NUM_SLOTS, DEVICE)
    for slot, rank in ranks.items():
        for index, width in enumerate(widths):
            a, b = randn(rank, depth, dtype=dtype, scale=depth**-0.5), randn(width, rank, dtype=dtype)
            gain = 1 + 0.3 * randn(width) if slot in gains else None
            table.put(index, slot, LoraWeights(a, b, 0.3 * slot, gain))
    if len(widths) > 1:
        table.put(0, max(ranks), None)
    return table


def dense(x: Tensor, out: Tensor, table: LoraTable, slots: Tensor) -> Tensor:
    """Token by token, in fp64."""
    expected, start = out.double(), 0
    for width, bias, by_slot in zip(table.widths, table.biases, table.weights, strict=True):
        columns = slice(start, start + width)
        start += width
        for token, slot in enumerate(slots.tolist()):
            if slot in by_slot:
                a, b, scale, gain, _ = by_slot[slot]
                y = expected[token, columns]
                delta = scale * (b.double() @ (a.double() @ x[token].double()))
                shift = 0 if bias is None else bias.double()
                expected[token, columns] = (1 if gain is None else gain.double()) * (y - shift + delta) + shift
    return expected


def check(op: Callable[..., Tensor], table: LoraTable, depth: int, slots: Tensor, dtype: torch.dtype) -> None:
    x, out = randn(len(slots), depth, dtype=dtype), randn(len(slots), sum(table.widths), dtype=dtype)
    expected = dense(x, out, table, slots)
    untouched = out.clone()
    result = op(x, out, table, AdapterRows(slots))
    assert result is out
    assert_close(out, expected, dtype)
    assert torch.equal(out[slots == 0], untouched[slots == 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ops", OPS)
def test_mixed_ranks_in_a_ragged_batch(ops: str, dtype: torch.dtype) -> None:
    table = make_table([72, 16, 16], 40, {1: 4, 2: 1, 4: 33, 5: 16}, dtype)
    slots = torch.tensor([1, 0, 5, 5, 2, 0, 4, 3, 1, 1, 4], device=DEVICE)
    check(OPS[ops].lora, table, 40, slots, dtype)


@pytest.mark.parametrize("ops", OPS)
def test_magnitudes_and_biases(ops: str) -> None:
    table = make_table([24, 70], 33, {1: 3, 2: 8, 3: 2}, torch.float32, biased=True, gains=(1, 3))
    check(OPS[ops].lora, table, 33, torch.tensor([1, 2, 3, 0, 1], device=DEVICE), torch.float32)


@pytest.mark.parametrize("ops", OPS)
def test_a_high_rank_over_a_deep_input(ops: str) -> None:
    """Several blocks of ranks, and the input in several spans."""
    table = make_table([20], 1100, {1: 130, 2: 5}, torch.float32)
    check(OPS[ops].lora, table, 1100, torch.tensor([2, 1, 0], device=DEVICE), torch.float32)


@pytest.mark.parametrize("ops", ["reference", "triton"])
def test_many_tokens(ops: str) -> None:
    """Tiles of several tokens, of one adapter, of several and of none."""
    table = make_table([24], 16, {1: 4, 2: 7, 5: 1}, torch.float32)
    slots = torch.cat(
        [torch.tensor([1, 0, 2, 5] * 5), torch.full((150,), 2), torch.zeros(90).long(), torch.tensor([5])]
    )
    check(OPS[ops].lora, table, 16, slots.to(DEVICE), torch.float32)


def test_through_the_tables() -> None:
    """An emptied slot does nothing; a slot filled anew does what it was filled with, at the same addresses of the table."""
    table = make_table([24], 16, {1: 4, 2: 7}, torch.float32)
    where, slots = table.pointers.data_ptr(), torch.tensor([1, 2, 1], device=DEVICE)
    x, out = randn(3, 16), randn(3, 24)
    for change in (None, LoraWeights(randn(40, 16), randn(24, 40), 2.0), LoraWeights(randn(2, 16), randn(24, 2), -1.0)):
        table.put(0, 1, change)
        for ops in (TRITON, REFERENCE):
            assert_close(
                ops.lora(x, out.clone(), table, AdapterRows(slots)), dense(x, out, table, slots), torch.float32
            )
    assert table.pointers.data_ptr() == where
    result = TRITON.lora(x, out.clone(), table, AdapterRows(slots))
    assert not torch.equal(result[0], out[0])


def test_a_row_has_the_same_bits_alone() -> None:
    table = make_table([24], 600, {1: 4, 2: 7}, torch.float32)
    slots = torch.tensor([1, 2, 0, 1, 2, 2, 1], device=DEVICE).repeat(4)
    x, out = randn(len(slots), 600), randn(len(slots), 24)
    together = DETERMINISTIC.lora(x, out.clone(), table, AdapterRows(slots))
    for row in (0, 5, 27):
        one = slice(row, row + 1)
        alone = DETERMINISTIC.lora(x[one], out[one].clone(), table, AdapterRows(slots[one].clone()))
        assert torch.equal(alone[0], together[row])


def test_part_of_the_rows() -> None:
    rows = AdapterRows(torch.tensor([3, 0, 0, 1, 3]))
    assert rows.select(torch.tensor([4, 1])).slots.tolist() == [3, 0]
    tokens, spans = rows.by_slot
    assert {slot: tokens[start:end].tolist() for slot, start, end in spans} == {1: [3], 3: [0, 4]}
    assert AdapterRows(torch.tensor([0, 2, 2, 4, 0])).by_slot == (slice(1, 4), [(2, 0, 2), (4, 2, 3)])
    assert AdapterRows(torch.tensor([2, 2])).by_slot == (slice(0, 2), [(2, 0, 2)])
