"""Adapters on a CPU, which copies matrices side by side for a few tokens of many adapters, against dense products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lora_oracle import check, dense, make_table
from torch import Tensor
from triton_oracle import DEVICE, assert_close, randn, unwritten_is_nan  # noqa: F401

from stoker.kernels.ops import CPU, REFERENCE
from stoker.kernels.reference import lora_stacks
from stoker.kernels.reference.adapter_weights import LoraWeights
from stoker.kernels.reference.lora import AdapterRows, LoraTable
from stoker.kernels.reference.lora_pieces import Bags, OneByOne, Sums, Together
from stoker.kernels.reference.lora_stacks import Stacks
from stoker.kernels.reference.norm_rotary import Activation, act_mul

# Slots of each token, and whether the tokens that have an adapter are taken as they lie.
MIXED = {
    "slot by slot": ([4] * 2 + [1] * 2 + [2] * 2 + [5] * 2, True),
    "between tokens without": ([0] + [4] * 2 + [1] * 2 + [2] * 2 + [0], True),
    "in any order": ([1, 4, 2, 0, 5, 2, 0, 1, 4, 3, 5], False),
    "in full pieces, and one without": ([1, 4, 2, 0, 4, 1, 2], False),
    "one that has most": ([2, 1, 2, 2, 4, 2, 2, 0, 2, 2, 2, 2], False),
}

# By the widths of linears, how many sums each part that is summed has: where there is no block-diagonal matrix, and where there is.
SUMS = {(24, 9, 16): ([1, 1], [1]), (16, 16, 16): ([3], [3]), (32, 16, 16): ([1, 1], [2])}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", MIXED)
@pytest.mark.parametrize("largest", [0, 1 << 20])
@pytest.mark.parametrize("widths", SUMS, ids=str)
@pytest.mark.parametrize("way", [Bags, Together])
def test_few_tokens_of_many_adapters(
    way: type,
    widths: tuple[int, ...],
    largest: int,
    case: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mixed ranks, scales, gains and shifts, slots that change one of the linears or none, and a linear that none changes.

    widths: of linears; those that are equal are all changed. largest: block-diagonal matrix.
    """
    monkeypatch.setattr(lora_stacks, "_BLOCK_DIAGONAL", largest)
    if way is Together:
        monkeypatch.setattr(lora_stacks, "_FEW", 0)
    slots, as_they_lie = MIXED[case]
    rows = AdapterRows(torch.tensor(slots, device=DEVICE))
    found = rows.through(Stacks())
    assert isinstance(found, way)
    if isinstance(found, Together):
        assert (found.gather is None) == as_they_lie and found.count < 2 * len(set(slots) - {0})
    for options in ({}, {"biased": True, "gains": (1, 4), "shifts": (2, 4)}):
        table = make_table(widths, 33, {1: 3, 2: 8, 4: 1}, dtype, **options)
        table.put(0, 5, LoraWeights(randn(2, 33, dtype=dtype), randn(widths[0], 2, dtype=dtype), 0.7))
        for slot in (1, 2, 4):
            if len(set(widths)) > 1:
                table.put(1, slot, None)
        check(REFERENCE.lora, table, 33, rows.slots, dtype)
        assert [len(part.sums) for part in table.stacks.of(table).for_sums] == SUMS[widths][largest > 0]


def test_stacks_are_right_until_they_are_forgotten() -> None:
    """And of two tables they do not meet, though these share them."""
    table, slots = make_table([24], 16, {1: 4, 2: 7, 3: 4}, torch.float32), torch.tensor([1, 2, 3, 3], device=DEVICE)
    x, out = randn(4, 16), randn(4, 24)
    other = make_table([24], 16, {1: 2, 2: 3}, torch.float32)
    other.stacks = table.stacks
    before = table.weights[0][1].b.clone()
    for _ in range(2):
        expected = dense(x, out, table, slots)
        for _ in range(2):  # windows
            rows = AdapterRows(slots)
            for _ in range(2):  # steps
                assert_close(REFERENCE.lora(x, out.clone(), table, rows), expected, torch.float32)
            again = REFERENCE.lora(x, out.clone(), other, rows)
            assert_close(again, dense(x, out, other, slots), torch.float32)
        assert torch.equal(table.weights[0][1].b, before)
        before = table.weights[0][1].b.mul_(3).clone()
        table.weights[0][2].a.add_(1)
        table.stacks.forget()
    for change in (LoraWeights(randn(2, 16), randn(24, 2), 5.0), LoraWeights(randn(1, 16), randn(24, 1), 1.0), None):
        table.put(0, 3, change)
        result = REFERENCE.lora(x, out.clone(), table, AdapterRows(slots))
        assert_close(result, dense(x, out, table, slots), torch.float32)
    assert REFERENCE.lora(x, out.clone(), LoraTable([24], [None], 5, DEVICE), AdapterRows(slots)).equal(out)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")  # with which torch refuses sums of rows of no columns
@pytest.mark.parametrize("way", [Bags, Together])
def test_biases_alone(way: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters without matrices, whose rank is 0."""
    if way is Together:
        monkeypatch.setattr(lora_stacks, "_FEW", 0)
    rows = AdapterRows(torch.tensor([2, 0, 1, 2], device=DEVICE))
    assert isinstance(rows.through(Stacks()), way)
    table = make_table([24], 16, {1: 0, 2: 0}, torch.float32, shifts=(1, 2))
    check(REFERENCE.lora, table, 16, rows.slots, torch.float32)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slots whose matrices were copied, whose scales are 0.3 each."""
    copied: list[int] = []
    write = lora_stacks._write

    def counted(a: Tensor, copies: list[Tensor], entries: list[Any]) -> None:
        copied.extend(int(entry.scale / 0.3 + 0.5) for entry in entries)
        write(a, copies, entries)

    monkeypatch.setattr(lora_stacks, "_write", counted)
    return copied


def test_bags_take_what_is_held(copied: list[int]) -> None:
    """However the tokens lie, and whatever else is there."""
    table = make_table([24], 16, {1: 4, 2: 4, 3: 4, 4: 4, 5: 4}, torch.float32)
    for slots, expected in (
        ([1, 2, 3, 3], [1, 2, 3]),
        ([3, 0, 2, 1, 3, 2], []),
        ([3, 2], []),
        ([1, 4, 2, 2], [4]),
        ([3, 5, 2, 3], [1, 2, 3, 4, 5]),  # where there is no more room
    ):
        rows = AdapterRows(torch.tensor(slots, device=DEVICE))
        assert isinstance(rows.through(table.stacks), Bags)
        check(REFERENCE.lora, table, 16, rows.slots, torch.float32)
        assert copied == expected, slots
        copied.clear()


def test_stacks_serve_what_is_left_of_a_batch(copied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is not copied again: not for requests that end one after the other, nor beside those that begin."""
    monkeypatch.setattr(lora_stacks, "_FEW", 0)
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
        ([5, 5, 4, 4, 2, 2, 3, 3, 1, 1], [], "12345111"),  # side by side, but not as the pieces are
        ([1] * 8 + [5], [], "15"),
    ):
        check(REFERENCE.lora, table, 16, torch.tensor(slots, device=DEVICE), torch.float32)
        assert (copied, "".join(map(str, table.stacks._slots))) == (expected, held), slots
        copied.clear()


def test_tokens_stay_as_they_lie_where_pieces_of_them_were_wanted_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of a prompt's tokens in several pieces stay; those of a window of decoding are in one an adapter."""
    monkeypatch.setattr(lora_stacks, "_FEW", 0)
    stacks = Stacks()
    AdapterRows(torch.tensor([1] * 20 + [2, 3, 4, 5])).through(stacks)
    assert len(stacks._slots) > 5
    found = AdapterRows(torch.arange(1, 6).repeat_interleave(2)).through(stacks)
    assert isinstance(found, Together) and (found.count, found.gather) == (5, None)


def test_rows_and_stacks_change_in_turns() -> None:
    """The rows of one window are right after others were run, and after their adapters changed."""
    table, x, out = make_table([24, 9], 16, {1: 4, 2: 4, 3: 4, 4: 4}, torch.float32), randn(6, 16), randn(6, 24 + 9)
    windows = [
        AdapterRows(torch.tensor(s, device=DEVICE))
        for s in ([1, 2, 3, 3, 0, 4], [4] * 6, [4, 2, 2, 4, 4, 2], [2, 2, 1, 1, 2, 1])
    ]
    changes = [(0, 4, None), (1, 4, 4), (0, 4, 9), (1, 4, None), (0, 4, 4), (0, 2, 1)]
    changes += [(0, slot, None) for slot in range(1, 5)] + [(1, 1, None)]
    for linear, slot, rank in changes:
        for rows in (*windows, *windows):
            result = REFERENCE.lora(x, out.clone(), table, rows)
            assert_close(result, dense(x, out, table, rows.slots), torch.float32)
        width = table.widths[linear]
        table.put(linear, slot, None if rank is None else LoraWeights(randn(rank, 16), randn(width, rank), 0.7))


@pytest.mark.parametrize("found", [[1, 0, 1], [1, 0, 2, 1]], ids=["one", "sums"])
@pytest.mark.parametrize("largest", [0, 1 << 20])
def test_an_adapter_that_changes_another_linear_than_before(
    largest: int, found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that comes in another dtype."""
    monkeypatch.setattr(lora_stacks, "_BLOCK_DIAGONAL", largest)
    table, slots = LoraTable([24, 24], [None, None], 5, DEVICE), torch.tensor(found, device=DEVICE)
    for linear, dtype in ((0, torch.bfloat16), (1, torch.bfloat16), (1, torch.float32), (0, torch.float32)):
        for slot in (1, 2):
            table.put(1 - linear, slot, None)
            table.put(linear, slot, LoraWeights(randn(4, 16, dtype=dtype), randn(24, 4, dtype=dtype), 1.5))
        check(REFERENCE.lora, table, 16, slots, dtype)


def test_copies_that_were_broken_off_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C, say, when one adapter is over another already."""
    table = make_table([24], 16, {1: 4, 2: 4, 3: 4, 4: 4}, torch.float32)
    write = lora_stacks._write

    def strike(*args: Any) -> None:
        write(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(lora_stacks, "_FEW", 0)
    some, others = (torch.tensor(slots, device=DEVICE) for slots in ([1, 1, 2, 2], [3, 3, 4, 4]))
    check(REFERENCE.lora, table, 16, some, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(lora_stacks, "_write", strike)
        with pytest.raises(KeyboardInterrupt):
            check(REFERENCE.lora, table, 16, others, torch.float32)
    assert table.stacks._slots == (3, 4)
    check(REFERENCE.lora, table, 16, some, torch.float32)


@pytest.mark.parametrize("way", [Bags, Together, OneByOne])
def test_adapters_in_fp32_over_a_model_in_16_bits(way: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_stacks, "_FEW", 4 if way is Bags else 0)
    monkeypatch.setattr(lora_stacks, "_TOKENS", 0 if way is OneByOne else 32)
    rows = AdapterRows(torch.tensor([2, 2, 1, 1], device=DEVICE))
    assert isinstance(rows.through(Stacks()), way)
    table = make_table([24], 33, {1: 3, 2: 8}, torch.float32)
    x, out = randn(4, 33, dtype=torch.bfloat16), randn(4, 24, dtype=torch.bfloat16)
    expected = dense(x, out, table, rows.slots)
    assert_close(REFERENCE.lora(x, out, table, rows), expected, torch.bfloat16)


@pytest.mark.parametrize("largest", [0, 1 << 20])
@pytest.mark.parametrize("slots", [[1] * 5, [0, 2, 2, 2, 0], [3, 0, 3, 0], [1] * 40 + [0] + [2] * 50])
def test_tokens_of_few_adapters(slots: list[int], largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product for each of them."""
    monkeypatch.setattr(lora_stacks, "_BLOCK_DIAGONAL", largest)
    rows = AdapterRows(torch.tensor(slots, device=DEVICE))
    assert isinstance(rows.through(Stacks()), OneByOne)
    for options in ({}, {"biased": True, "gains": (1, 2), "shifts": (2, 3)}):
        table = make_table([24, 9, 16], 33, {1: 3, 2: 8, 3: 1, 4: 2}, torch.float32, **options)
        table.put(1, 2, None)
        check(REFERENCE.lora, table, 33, rows.slots, torch.float32)


@pytest.mark.parametrize(("tokens", "way"), [(4, Bags), (16, Together), (40, OneByOne)])
def test_when_all_adapters_go_through_one_product(tokens: int, way: type) -> None:
    one, many = torch.full((tokens,), 3), torch.arange(1, 5).repeat_interleave(tokens)
    assert isinstance(AdapterRows(one).through(Stacks()), OneByOne)
    assert isinstance(AdapterRows(many).through(Stacks()), way)
    assert AdapterRows(torch.zeros(tokens, dtype=torch.long)).through(Stacks()) is None


def test_part_of_the_rows() -> None:
    rows = AdapterRows(torch.tensor([3, 0, 0, 1, 3]))
    assert rows.select(torch.tensor([4, 1])).slots.tolist() == [3, 0]
    tokens, spans = rows.by_slot
    assert {slot: tokens[start:end].tolist() for slot, start, end in spans} == {1: [3], 3: [0, 4]}
    assert AdapterRows(torch.tensor([0, 2, 2, 4, 0])).by_slot == (slice(1, 4), [(2, 0, 2), (4, 2, 3)])
    assert AdapterRows(torch.tensor([2, 2])).by_slot == (slice(0, 2), [(2, 0, 2)])
    assert AdapterRows(torch.tensor([4, 4, 2, 2])).by_slot == (slice(0, 4), [(4, 0, 2), (2, 2, 4)])


@pytest.mark.parametrize("way", ["plain", "gated", "residual", "bias", "bf16", "some without", "gain", "one by one"])
def test_a_product_is_added_to_what_adapters_add(way: str) -> None:
    """Where that is known without the product. A NaN of an adapter reaches no other adapter's tokens."""
    dtype = torch.bfloat16 if way == "bf16" else torch.float32
    table = make_table([16, 24], 33, {1: 3, 2: 8, 4: 1}, dtype, gains=(1,) if way == "gain" else ())
    slots = {"some without": [1, 0, 2, 4], "one by one": [2] * 4}.get(way, [1, 4, 2, 4])
    x, weight, rows = randn(4, 33), randn(40, 33), AdapterRows(torch.tensor(slots, device=DEVICE))
    bias, residual = randn(40) if way == "bias" else None, randn(4, 40) if way == "residual" else None
    product = x @ weight.T + (0 if bias is None else bias) + (0 if residual is None else residual)
    expected = dense(x, product, table, rows.slots)
    gated: Activation | None = "silu" if way == "gated" else None
    expected = expected if gated is None else act_mul(expected, gated)

    def run() -> Tensor:
        assert CPU.adapted_linear is not None
        out = CPU.adapted_linear(x, weight, bias, table, rows, gated=gated, residual=residual)
        return out.type(dtype)

    for _ in range(2):  # steps
        assert_close(run(), expected, dtype)
    table.weights[1][4].a.fill_(torch.nan)
    table.stacks.forget()
    out, others = run(), torch.tensor([slot != 4 for slot in slots], device=DEVICE)
    assert_close(out[others], expected[others], dtype)
    assert out[~others].isnan().any(1).all()
    assert isinstance(rows.change_of(table), Sums) == (way not in ("gain", "one by one"))
    none = rows.slots == 0  # as if there were no adapters
    assert way != "some without" or torch.equal(out[none], CPU.linear(x, weight, bias)[none])
