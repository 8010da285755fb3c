"""Adapters over a projection, and their results as dense products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton_oracle import DEVICE, assert_close, randn, unwatched

from stoker.kernels.reference.adapter_weights import LoraWeights
from stoker.kernels.reference.lora import AdapterRows, LoraTable

NUM_SLOTS = 5


def make_table(
    widths: Sequence[int],
    depth: int,
    ranks: dict[int, int],
    dtype: torch.dtype,
    *,
    biased: bool = False,
    gains: Any = (),
    shifts: Any = (),
    columns: bool = False,
) -> LoraTable:
    """ranks: of each slot's adapter. The first linear has nothing of the last slot.

    gains: slots with DoRA; shifts: those with biases; columns: matrices lie column after column in every other slot.
    """
    biases = [randn(w, dtype=dtype) if biased else None for w in widths]
    table = LoraTable(widths, biases, max(NUM_SLOTS, *ranks), DEVICE)
    for slot, rank in ranks.items():
        for index, width in enumerate(widths):
            a, b = randn(rank, depth, dtype=dtype, scale=depth**-0.5), randn(width, rank, dtype=dtype)
            if columns and slot % 2:
                a, b = (t.T.contiguous().T for t in (a, b))
            gain = 1 + 0.3 * randn(width) if slot in gains else None
            shift = randn(width) if slot in shifts else None
            table.put(index, slot, LoraWeights(a, b, 0.3 * slot, gain, shift))
    if len(widths) > 1:
        table.put(0, max(ranks), None)
    return table


@unwatched
def dense(x: Tensor, out: Tensor, table: LoraTable, slots: Tensor) -> Tensor:
    """Token by token, in fp64."""
    expected, start = out.double(), 0
    for width, bias, by_slot in zip(table.widths, table.biases, table.weights, strict=True):
        columns = slice(start, start + width)
        start += width
        for token, slot in enumerate(slots.tolist()):
            if slot in by_slot:
                a, b, scale, gain, constant = by_slot[slot]
                y = expected[token, columns]
                delta = scale * (b.double() @ (a.double() @ x[token].double()))
                shift = 0 if bias is None else bias.double()
                expected[token, columns] = (1 if gain is None else gain.double()) * (y - shift + delta) + shift
                expected[token, columns] += 0 if constant is None else constant.double()
    return expected


def check(op: Callable[..., Tensor], table: LoraTable, depth: int, slots: Tensor, dtype: torch.dtype) -> None:
    x, out = randn(len(slots), depth, dtype=dtype), randn(len(slots), sum(table.widths), dtype=dtype)
    expected = dense(x, out, table, slots)
    untouched = out.clone()
    result = op(x, out, table, AdapterRows(slots))
    assert result is out
    assert_close(out, expected, dtype)
    assert torch.equal(out[slots == 0], untouched[slots == 0])
