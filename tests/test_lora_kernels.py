"""Adapters over a projection: the kernel and the reference against dense products in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_oracle import DEVICE, DTYPES, assert_close, randn, unwritten_is_nan  # noqa: F401

from stoker.kernels.ops import REFERENCE, Ops
from stoker.kernels.reference import lora_stacks
from stoker.kernels.reference.lora import AdapterRows, LoraTable, LoraWeights, expert_slots
from stoker.kernels.reference.lora_stacks import OneByOne, Stacks, Together
from stoker.kernels.triton_ops import DETERMINISTIC, TRITON
from stoker.weight_sync.adapters import by_expert

NUM_SLOTS = 5
OPS = {"reference": REFERENCE, "triton": TRITON, "deterministic": DETERMINISTIC}


def make_table(
    widths: list[int],
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
    table = LoraTable(widths, [randn(w, dtype=dtype) if biased else None for w in widths], NUM_SLOTS, DEVICE)
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
def test_biases_of_adapters(ops: str) -> None:
    """With DoRA and without, and of a linear that has nothing but a bias."""
    table = make_table([24, 70], 33, {1: 3, 2: 8, 3: 0, 5: 2}, torch.float32, biased=True, gains=(1,), shifts=(1, 2, 3))
    check(OPS[ops].lora, table, 33, torch.tensor([1, 2, 3, 0, 5, 3], device=DEVICE), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ops", OPS)
def test_matrices_that_lie_column_after_column(ops: str, dtype: torch.dtype) -> None:
    """As those of a head that is tied to an embedding; and beside some that do not."""
    table = make_table([24, 40], 33, {1: 3, 2: 8, 3: 20}, dtype, columns=True)
    check(OPS[ops].lora, table, 33, torch.tensor([1, 2, 3, 0, 1], device=DEVICE), dtype)


@pytest.mark.parametrize("tokens", [5, 300])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
def test_an_embedding_is_a_linear_of_one_hot_rows(ops: Ops, columns: bool, tokens: int) -> None:
    table = make_table([72], 19, {1: 4, 2: 17, 3: 2}, torch.float32, gains=(2,), shifts=(3,), columns=columns)
    slots = torch.tensor([1, 0, 2, 4, 3], device=DEVICE).repeat(tokens // 5)
    ids, out = torch.randint(19, (tokens,), device=DEVICE), randn(tokens, 72)
    expected = dense(F.one_hot(ids, 19), out, table, slots)
    assert ops.lora_embedding(ids, out, table, AdapterRows(slots)) is out
    assert_close(out, expected, torch.float32)


@pytest.mark.parametrize("ops", OPS)
def test_a_table_of_experts(ops: str) -> None:
    """As PEFT lays them side by side, of which every expert has a part that is neither rows nor columns."""
    experts, slots = 3, torch.tensor([2, 0, 1, 2, 5, 1, 3], device=DEVICE)
    chosen = torch.tensor([2, 1, 0, 0, 1, 2, 2], device=DEVICE)
    table, weights = LoraTable([20], [None], NUM_SLOTS, DEVICE, experts), {}
    for slot, rank, shifted in ((1, 2, False), (2, 5, True), (3, 0, True)):
        side_by_side = LoraWeights(randn(experts * rank, 9), randn(20, experts * rank), 0.3 * slot)
        shift = randn(experts, 20) if shifted else None
        weights[slot] = by_expert(side_by_side, experts)._replace(shift=shift)
        table.put(0, slot, weights[slot])
    x, out = randn(7, 9), randn(7, 20)
    expected = out.double()
    for row, (slot, expert) in enumerate(zip(slots.tolist(), chosen.tolist(), strict=True)):
        if slot in weights:
            a, b = weights[slot].a[expert].double(), weights[slot].b[expert].double()
            shift = 0 if weights[slot].shift is None else weights[slot].shift[expert].double()
            expected[row] += 0.3 * slot * (b @ (a @ x[row].double())) + shift
    rows = AdapterRows(expert_slots(slots, chosen, experts))
    OPS[ops].lora(x, out, table, rows)
    assert_close(out, expected, torch.float32)
    table.put(0, 2, None)
    changed = OPS[ops].lora(x, out.clone(), table, rows)
    assert (changed != out).any(1).tolist() == ((slots == 1) | (slots == 3)).tolist()


@pytest.mark.parametrize("ops", OPS)
def test_a_high_rank_over_a_deep_input(ops: str) -> None:
    """Several blocks of ranks, and the input in several spans."""
    table = make_table([20], 1100, {1: 512, 2: 5}, torch.float32)
    check(OPS[ops].lora, table, 1100, torch.tensor([2, 1, 0], device=DEVICE), torch.float32)


@pytest.mark.parametrize("ops", ["reference", "triton"])
def test_many_tokens(ops: str) -> None:
    """Tiles of several tokens, of one adapter, of several and of none."""
    table = make_table([24], 16, {1: 4, 2: 7, 5: 1}, torch.float32)
    slots = torch.cat(
        [torch.tensor([1, 0, 2, 5] * 5), torch.full((150,), 2), torch.zeros(90).long(), torch.tensor([5])]
    )
    check(OPS[ops].lora, table, 16, slots.to(DEVICE), torch.float32)


# Slots of each token, and whether the tokens that have an adapter are taken as they lie.
MIXED = {
    "slot by slot": ([4] * 2 + [1] * 2 + [2] * 2 + [5] * 2, True),
    "between tokens without": ([0] + [4] * 2 + [1] * 2 + [2] * 2 + [0], True),
    "in any order": ([1, 4, 2, 0, 5, 2, 0, 1, 4, 3, 5], False),
    "in full pieces, and one without": ([1, 4, 2, 0, 4, 1, 2], False),
    "one that has most": ([2, 1, 2, 2, 4, 2, 2, 0, 2, 2, 2, 2], False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", MIXED)
@pytest.mark.parametrize("largest", [0, 1 << 20])
def test_few_tokens_of_many_adapters(
    largest: int, case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed ranks, scales, gains and shifts, slots that change one of the linears or none, and a linear that none changes.

    largest: block-diagonal matrix.
    """
    monkeypatch.setattr(lora_stacks, "_BLOCK_DIAGONAL", largest)
    slots, as_they_lie = MIXED[case]
    rows = AdapterRows(torch.tensor(slots))
    found = rows.through(Stacks())
    assert isinstance(found, Together) and (found.gather is None) == as_they_lie
    assert found.count < 2 * len(set(slots) - {0})
    for options in ({}, {"biased": True, "gains": (1, 4), "shifts": (2, 4)}):
        table = make_table([24, 9, 16], 33, {1: 3, 2: 8, 4: 1}, dtype, **options)
        table.put(0, 5, LoraWeights(randn(2, 33, dtype=dtype), randn(24, 2, dtype=dtype), 0.7))
        for slot in (1, 2, 4):
            table.put(1, slot, None)
        check(OPS["reference"].lora, table, 33, rows.slots, dtype)


def test_stacks_are_right_until_they_are_forgotten() -> None:
    """And of two tables they do not meet, though these share them."""
    table, slots = make_table([24], 16, {1: 4, 2: 7, 3: 4}, torch.float32), torch.tensor([1, 2, 3, 3])
    x, out = randn(4, 16), randn(4, 24)
    other = make_table([24], 16, {1: 2, 2: 3}, torch.float32)
    other.stacks = table.stacks
    before = table.weights[0][1].b.clone()
    for _ in range(2):
        expected = dense(x, out, table, slots)
        for _ in range(2):  # windows
            rows = AdapterRows(slots)
            for _ in range(2):  # steps
                assert_close(OPS["reference"].lora(x, out.clone(), table, rows), expected, torch.float32)
            again = OPS["reference"].lora(x, out.clone(), other, rows)
            assert_close(again, dense(x, out, other, slots), torch.float32)
        assert torch.equal(table.weights[0][1].b, before)
        before = table.weights[0][1].b.mul_(3).clone()
        table.weights[0][2].a.add_(1)
        table.stacks.forget()
    for change in (LoraWeights(randn(2, 16), randn(24, 2), 5.0), LoraWeights(randn(1, 16), randn(24, 1), 1.0), None):
        table.put(0, 3, change)
        result = OPS["reference"].lora(x, out.clone(), table, AdapterRows(slots))
        assert_close(result, dense(x, out, table, slots), torch.float32)
    assert OPS["reference"].lora(x, out.clone(), LoraTable([24], [None], 5, DEVICE), AdapterRows(slots)).equal(out)


def test_stacks_serve_what_is_left_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is not copied again: not for requests that end one after the other, nor beside those that begin."""
    copied: list[int] = []
    write = lora_stacks._write

    def counted(a: Tensor, b: Tensor, entries: list[Any]) -> None:
        copied.extend(int(entry.scale / 0.3 + 0.5) for entry in entries)
        write(a, b, entries)

    monkeypatch.setattr(lora_stacks, "_write", counted)
    table = make_table([24], 16, {1: 4, 2: 4, 3: 4, 4: 4, 5: 4}, torch.float32)
    for slots, expected, held in (
        ([1] * 9, [1], "1"),
        ([1, 2, 3, 3, 3, 4, 5, 5, 5, 0], [1, 2, 3, 4, 5], "12345"),
        ([1, 2, 3, 3, 4, 5, 5, 0], [], "12345"),
        ([5, 4, 3, 1, 5], [], "12345"),
        ([3, 3, 5, 5, 5, 4, 0], [], "345"),  # too much was of nobody: what is left is moved
        ([5] * 9, [], "345"),  # one product for each
        ([5] * 40 + [3] * 40, [], "345"),
        ([4] * 3 + [3] * 3 + [1], [1], "341"),
        ([2] * 9, [2], "3412"),
        ([1] + [2] * 9, [], "12"),  # not in three pieces of five
        ([1] * 20 + [2, 3, 4, 5], [3, 4, 5], "12345111"),
        ([1] * 20 + [2, 2, 3, 3, 4, 4, 5, 5], [], "12345111"),
        ([1, 1, 2, 2, 3, 3, 4, 4, 5, 5], [], "12345111"),  # by the first five
        ([1] * 8 + [5], [], "15"),
    ):
        check(REFERENCE.lora, table, 16, torch.tensor(slots), torch.float32)
        assert (copied, "".join(map(str, table.stacks._slots))) == (expected, held), slots
        copied.clear()


def test_tokens_stay_as_they_lie_where_pieces_of_them_were_wanted_before() -> None:
    """The copies of a prompt's tokens in several pieces stay; those of a window of decoding are in one an adapter."""
    stacks = Stacks()
    AdapterRows(torch.tensor([1] * 20 + [2, 3, 4, 5])).through(stacks)
    assert len(stacks._slots) > 5
    found = AdapterRows(torch.arange(1, 6).repeat_interleave(2)).through(stacks)
    assert isinstance(found, Together) and (found.count, found.gather) == (5, None)


def test_rows_and_stacks_change_in_turns() -> None:
    """The rows of one window are right after others were run, and after their adapters changed."""
    table, x, out = make_table([24, 9], 16, {1: 4, 2: 4, 3: 4, 4: 4}, torch.float32), randn(6, 16), randn(6, 24 + 9)
    windows = [
        AdapterRows(torch.tensor(s)) for s in ([1, 2, 3, 3, 0, 4], [4] * 6, [4, 2, 2, 4, 4, 2], [2, 2, 1, 1, 2, 1])
    ]
    changes = [(0, 4, None), (1, 4, 4), (0, 4, 9), (1, 4, None), (0, 4, 4), (0, 2, 1)]
    changes += [(0, slot, None) for slot in range(1, 5)] + [(1, 1, None)]
    for linear, slot, rank in changes:
        for rows in (*windows, *windows):
            result = REFERENCE.lora(x, out.clone(), table, rows)
            assert_close(result, dense(x, out, table, rows.slots), torch.float32)
        width = table.widths[linear]
        table.put(linear, slot, None if rank is None else LoraWeights(randn(rank, 16), randn(width, rank), 0.7))


@pytest.mark.parametrize("largest", [0, 1 << 20])
@pytest.mark.parametrize("slots", [[1] * 5, [0, 2, 2, 2, 0], [3, 0, 3, 0], [1] * 40 + [0] + [2] * 50])
def test_tokens_of_few_adapters(slots: list[int], largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product for each of them."""
    monkeypatch.setattr(lora_stacks, "_BLOCK_DIAGONAL", largest)
    rows = AdapterRows(torch.tensor(slots))
    assert isinstance(rows.through(Stacks()), OneByOne)
    for options in ({}, {"biased": True, "gains": (1, 2), "shifts": (2, 3)}):
        table = make_table([24, 9, 16], 33, {1: 3, 2: 8, 3: 1, 4: 2}, torch.float32, **options)
        table.put(1, 2, None)
        check(REFERENCE.lora, table, 33, rows.slots, torch.float32)


@pytest.mark.parametrize("tokens", [4, 40])
def test_when_all_adapters_go_through_one_product(tokens: int) -> None:
    one, many = torch.full((tokens,), 3), torch.arange(1, 5).repeat_interleave(tokens)
    assert isinstance(AdapterRows(one).through(Stacks()), OneByOne)
    assert isinstance(AdapterRows(many).through(Stacks()), Together if tokens == 4 else OneByOne)
    assert AdapterRows(torch.zeros(tokens, dtype=torch.long)).through(Stacks()) is None


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
    assert AdapterRows(torch.tensor([4, 4, 2, 2])).by_slot == (slice(0, 4), [(4, 0, 2), (2, 2, 4)])
