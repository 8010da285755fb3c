"""Adapters over a projection: the kernels and the reference against dense products in fp64.

Without a CUDA device kernels are interpreted, in fp32 and fp16; with one the same cases run compiled, in bf16 too.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lora_oracle import NUM_SLOTS, check, dense, make_table
from torch import Tensor
from triton_oracle import (
    DEVICE,
    DTYPES,
    assert_close,
    assert_early_starts_change_nothing,
    randn,
    unwritten_is_nan,  # noqa: F401
)

from stoker.kernels.grouping import most_tiles, order_by_group
from stoker.kernels.lora.tiles import tiles_by_slot
from stoker.kernels.ops import REFERENCE, Ops
from stoker.kernels.reference.adapter_weights import LoraWeights
from stoker.kernels.reference.lora import AdapterRows, LoraTable, PointerBlock, expert_slots
from stoker.kernels.reference.norm_rotary import ACTIVATIONS, Activation, Norm
from stoker.kernels.triton_ops import DETERMINISTIC, TRITON
from stoker.weight_sync.peft_adapters import by_expert

OPS = {"reference": REFERENCE, "triton": TRITON, "deterministic": DETERMINISTIC}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ops", OPS)
def test_mixed_ranks_in_a_ragged_batch(ops: str, dtype: torch.dtype) -> None:
    table = make_table([72, 16, 16], 40, {1: 4, 2: 1, 4: 33, 5: 16}, dtype)
    slots = torch.tensor([1, 0, 5, 5, 2, 0, 4, 3, 1, 1, 4], device=DEVICE)
    check(OPS[ops].lora, table, 40, slots, dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("ops", OPS)
def test_adapters_in_fp32_over_a_model_in_16_bits(ops: str, dtype: torch.dtype) -> None:
    """As PEFT makes them."""
    table = make_table([72, 16], 40, {1: 8, 2: 1, 4: 33}, torch.float32, gains=(1,), shifts=(2,))
    check(OPS[ops].lora, table, 40, torch.tensor([1, 0, 2, 4, 3, 1], device=DEVICE), dtype)


@pytest.mark.parametrize("ops", OPS)
def test_magnitudes_and_biases(ops: str) -> None:
    table = make_table([24, 70], 33, {1: 3, 2: 8, 3: 2}, torch.float32, biased=True, gains=(1, 3))
    check(OPS[ops].lora, table, 33, torch.tensor([1, 2, 3, 0, 1], device=DEVICE), torch.float32)


@pytest.mark.parametrize("ops", OPS)
def test_biases_that_lie_elsewhere_than_before(ops: str) -> None:
    """As those of a mirror that has slept do."""
    table = make_table([24, 70], 33, {1: 3, 2: 8}, torch.float32, biased=True, gains=(1, 2))
    slots = torch.tensor([1, 2, 0, 1], device=DEVICE)
    check(OPS[ops].lora, table, 33, slots, torch.float32)
    for bias in table.biases:
        assert bias is not None
        before, bias.data = bias.data, bias.clone()
        before.fill_(torch.nan)
    check(OPS[ops].lora, table, 33, slots, torch.float32)


@pytest.mark.parametrize("ops", OPS)
def test_biases_of_adapters(ops: str) -> None:
    """With DoRA and without, and of a linear that has nothing but a bias."""
    table = make_table([24, 70], 33, {1: 3, 2: 8, 3: 0, 5: 2}, torch.float32, biased=True, gains=(1,), shifts=(1, 2, 3))
    check(OPS[ops].lora, table, 33, torch.tensor([1, 2, 3, 0, 5, 3], device=DEVICE), torch.float32)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_bias_alone_says_nothing_of_the_dtype_of_matrices(ops: str, dtype: torch.dtype) -> None:
    table = LoraTable([24], [None], NUM_SLOTS, DEVICE)
    other = torch.float32 if dtype == torch.float16 else torch.float16
    table.put(0, 1, LoraWeights(randn(0, 33, dtype=other), randn(24, 0, dtype=other), 1.0, shift=randn(24)))
    table.put(0, 2, LoraWeights(randn(4, 33, dtype=dtype), randn(24, 4, dtype=dtype), 0.7))
    check(OPS[ops].lora, table, 33, torch.tensor([1, 2, 0, 2], device=DEVICE), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ops", OPS)
def test_matrices_that_lie_column_after_column(ops: str, dtype: torch.dtype) -> None:
    """As those of a head that is tied to an embedding; and beside some that do not."""
    table = make_table([24, 40], 33, {1: 3, 2: 8, 3: 20}, dtype, columns=True)
    check(OPS[ops].lora, table, 33, torch.tensor([1, 2, 3, 0, 1], device=DEVICE), dtype)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("which", ["a", "b"])
def test_one_matrix_that_lies_column_after_column(which: str, ops: str) -> None:
    table = LoraTable([24], [None], NUM_SLOTS, DEVICE)
    a, b = randn(8, 33), randn(24, 8)
    a, b = (a.T.contiguous().T, b) if which == "a" else (a, b.T.contiguous().T)
    table.put(0, 1, LoraWeights(a, b, 0.5))
    check(OPS[ops].lora, table, 33, torch.tensor([1, 0, 1], device=DEVICE), torch.float32)


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


@pytest.mark.parametrize("depth", [96, 1025, 1100, 2304, 5000])
@pytest.mark.parametrize("ops", OPS)
def test_adapters_in_16_bits_over_a_deep_input(ops: str, depth: int) -> None:
    """Of which each program reads a block at once, and several, and some a part of one; low ranks, and one with blocks of its own."""
    dtype = torch.float16 if DEVICE.type == "cpu" else torch.bfloat16
    slots = torch.tensor([2, 1, 0, 4, 2, 2], device=DEVICE)
    for ranks in ({1: 16, 2: 5}, {1: 24, 2: 32}, {1: 40, 2: 16}):
        check(OPS[ops].lora, make_table([40], depth, ranks, dtype), depth, slots, dtype)


@pytest.mark.parametrize("name", ["triton", "deterministic"])
def test_sums_of_parts_of_the_depth_are_added_before_they_are_rounded(name: str) -> None:
    """Of two parts that nearly cancel, whose difference is lost where each has 16 bits."""
    half = {"dtype": torch.float16, "device": DEVICE}
    a, table = torch.ones(8, 1024, **half), LoraTable([32], [None], NUM_SLOTS, DEVICE)
    a[:, 512:], a[:, 0] = -1, 1 + 1 / 16
    table.put(0, 1, LoraWeights(a, torch.ones(32, 8, **half), 1.0))
    rows = AdapterRows(torch.ones(4, dtype=torch.long, device=DEVICE))
    assert OPS[name].lora(torch.ones(4, 1024, **half), torch.zeros(4, 32, **half), table, rows).eq(0.5).all()


@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("ops", OPS)
def test_rows_that_lie_apart(ops: str, act: Activation | None) -> None:
    table, slots = make_table([24, 24], 40, {1: 8, 2: 3, 3: 2}, torch.float32), torch.arange(5, device=DEVICE)
    x, out = randn(5, 56)[:, 8:48], randn(5, 64)[:, 8:56]
    gate, up = (expected := dense(x, out, table, slots)).chunk(2, dim=1)
    found = OPS[ops].lora(x, out, table, AdapterRows(slots), act)
    assert_close(found, expected if act is None else F.silu(gate) * up, torch.float32)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", ["a", "b"])
@pytest.mark.parametrize("ops", OPS)
def test_an_adapter_of_nan_fails_its_own_tokens_and_no_others(ops: str, which: str, bad: float) -> None:
    """Zero times NaN is NaN, and tokens of experts go through a tile together. Those of no adapter stay to the bit."""
    slots, x, out = torch.arange(40, device=DEVICE) % 5, randn(40, 304), randn(40, 64)
    dense_table = make_table([64], 304, {1: 4, 2: 8, 4: 16}, torch.float32)
    experts = LoraTable([64], [None], NUM_SLOTS, DEVICE, experts=2)
    for slot, rank in ((1, 4), (2, 8), (4, 16)):
        experts.put(0, slot, by_expert(LoraWeights(randn(2 * rank, 304), randn(64, 2 * rank), 0.5), 2))
    of_pairs = expert_slots(slots, torch.arange(40, device=DEVICE) // 5 % 2, 2)
    for table, rows in ((dense_table, slots), (experts, of_pairs)):
        before = OPS[ops].lora(x, out.clone(), table, AdapterRows(rows))
        matrix = getattr(table.weights[0][2], which)
        matrix[..., 3, :] = bad
        table.put(0, 2, table.weights[0][2])  # as after an update
        after = OPS[ops].lora(x, out.clone(), table, AdapterRows(rows))
        its_own = slots == 2
        assert torch.equal(after[~its_own], before[~its_own])
        assert not after[its_own].isfinite().all(-1).any()
        assert torch.equal(after[(slots == 0) | (slots == 3)], out[(slots == 0) | (slots == 3)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ops", OPS)
def test_an_input_that_was_just_written(ops: str, dtype: torch.dtype) -> None:
    """After the output, say, by whom it may be copied; which the shrink then waits for."""
    table, slots = make_table([24], 64, {1: 4, 2: 7}, dtype), torch.tensor([1, 0, 2, 2], device=DEVICE)
    rows = AdapterRows(slots)
    for _ in range(3):
        norm = randn(64, dtype=dtype), 1e-6
        x, out = randn(4, 64, dtype=dtype), randn(4, 24, dtype=dtype)
        normed = OPS[ops].rms_norm(x, *norm)
        expected = dense(normed, out, table, slots)
        normed = OPS[ops].rms_norm(x, *norm)
        assert_close(OPS[ops].lora(normed, out, table, rows), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ops", OPS)
def test_many_tokens(ops: str, dtype: torch.dtype) -> None:
    """Full tiles, others, and tokens of none; an adapter's as they lie, then anywhere, in low tiles and in tall ones."""
    table = make_table([24], 16, {1: 4, 2: 7, 5: 1}, dtype)
    slots = torch.cat(
        [torch.tensor([1, 0, 2, 5] * 5), torch.full((150,), 2), torch.zeros(90).long(), torch.tensor([5])]
    )
    anywhere = slots[torch.randperm(len(slots))]
    for mixed in (slots, anywhere, anywhere.repeat(5)):
        check(OPS[ops].lora, table, 16, mixed.to(DEVICE), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ops", OPS)
def test_matrices_of_which_16_bytes_at_a_time_can_be_read(ops: str, dtype: torch.dtype) -> None:
    """And beside some of which they cannot."""
    slots = torch.tensor([1, 0, 2, 4, 4, 1], device=DEVICE)
    for odd_a, odd_b in ((1, 0), (0, 1)):
        table = make_table([32, 48], 64, {1: 8, 2: 16, 4: 24}, dtype)
        assert table.aligned
        check(OPS[ops].lora, table, 64, slots, dtype)
        a = randn(16 * 64 + odd_a, dtype=dtype)[odd_a:].view(16, 64)
        b = randn(48 * 16 + odd_b, dtype=dtype)[odd_b:].view(48, 16)
        table.put(1, 2, LoraWeights(a, b, 0.5))
        assert not table.aligned
        check(OPS[ops].lora, table, 64, slots, dtype)
    odd = make_table([32], 64, {1: 8, 2: 3}, dtype)
    assert not odd.aligned
    check(OPS[ops].lora, odd, 64, slots, dtype)
    of_experts = LoraTable([32], [None], NUM_SLOTS, DEVICE, experts=4)
    of_experts.put(0, 1, by_expert(LoraWeights(randn(4 * 8, 64, dtype=dtype), randn(32, 8 * 4, dtype=dtype), 0.5), 4))
    assert not of_experts.aligned, "B of the second expert begins one number after that of the first"


def test_a_device_of_its_own_memory_is_told_of_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that a slot does nothing any more: its matrices may be gone."""
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    tables = [LoraTable([24, 9], [None, None], 3, DEVICE) for _ in range(2)]
    block = PointerBlock(tables)
    block._rows = torch.zeros_like(block._host)
    for table, rows in zip(tables, block._rows.split(block._rows.numel() // 2), strict=True):
        table.rows = rows.view(table.rows.shape)
    weights = [LoraWeights(randn(4, 16), randn(n, 4), 0.5) for n in (24, 9)]
    changes = [(0, 0, 2, weights[0]), (1, 1, 1, weights[1]), (0, 0, 2, None), (0, 0, 2, weights[0]), (1, 1, 1, None)]
    for number, linear, slot, given in changes:
        tables[number].put(linear, slot, given)
        a, b = (0, 0) if given is None else (given.a.data_ptr(), given.b.data_ptr())
        assert tables[number].pointers[linear, slot, :2].tolist() == [a, b]
        assert torch.equal(block._rows, block._host)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ops", OPS)
def test_gate_and_up_with_what_comes_after_them(ops: str, dtype: torch.dtype) -> None:
    """Of all tokens. Two linears, of which an adapter may change one, or one that gives both."""
    slots = torch.tensor([1, 0, 5, 5, 2, 0, 4, 3, 1, 1, 4], device=DEVICE)
    for act in ACTIVATIONS if dtype == torch.float32 else ("silu",):
        for widths in ([40, 40], [80]):
            table = make_table(widths, 33, {1: 4, 2: 1, 4: 20, 5: 16}, dtype, gains=(2,), shifts=(4,), biased=True)
            x, gate_up = randn(len(slots), 33, dtype=dtype), randn(len(slots), 80, dtype=dtype)
            gate, up = dense(x, gate_up, table, slots).chunk(2, dim=-1)
            found = OPS[ops].lora(x, gate_up, table, AdapterRows(slots), act)
            assert_close(found, ACTIVATIONS[act](gate) * up, dtype)
        empty = LoraTable([40, 40], [None, None], NUM_SLOTS, DEVICE)
        assert torch.equal(OPS[ops].lora(x, gate_up, empty, AdapterRows(slots), act), OPS[ops].act_mul(gate_up, act))


@pytest.mark.parametrize(("tokens", "num_slots", "height"), [(1, 1, 16), (24, 6, 16), (300, 40, 16), (5000, 6, 64)])
def test_tokens_in_tiles_of_one_slot_each(tokens: int, num_slots: int, height: int) -> None:
    """In their own order; those of none come last, and are in no tile that a shrink has a program for beyond those of others."""
    slots = torch.randint(num_slots + 1, (tokens,), device=DEVICE)
    slots[: tokens // 2][slots[: tokens // 2] == 3] = 0
    rows, of_tile = tiles_by_slot(slots, num_slots, height)
    assert rows.shape == (len(of_tile), height)
    expected = []
    for slot in (*range(1, num_slots + 1), 0):
        mine = torch.nonzero(slots == slot).flatten().tolist()
        for first in range(0, len(mine), height):
            some = mine[first : first + height]
            expected.append((slot, some + [-1] * (height - len(some))))
    assert len(expected) <= len(of_tile)
    expected += [(-1, [-1] * height)] * (len(of_tile) - len(expected))
    assert list(zip(of_tile.tolist(), rows.tolist(), strict=True)) == expected
    assert sum(slot > 0 for slot, _ in expected) <= most_tiles(tokens, num_slots, height)


@pytest.mark.parametrize("tokens", [1, 24, 5000])
def test_rows_in_the_order_of_their_groups(tokens: int) -> None:
    groups = torch.randint(6, (tokens,), device=DEVICE)
    order, starts = order_by_group(groups, 7)
    assert order.tolist() == groups.sort(stable=True).indices.tolist()
    assert starts.tolist() == [int((groups < group).sum()) for group in range(8)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "deterministic"])
def test_a_capture_serves_other_tokens_and_adapters(name: str) -> None:
    """Of which none waits for the device, nor is read where it was when that was captured."""
    op, dtype = OPS[name].lora, torch.bfloat16
    table = make_table([256, 64], 512, {1: 16, 2: 8}, dtype)
    x, out, slots = randn(40, 512, dtype=dtype), randn(40, 320, dtype=dtype), torch.randint(4, (40,), device=DEVICE)
    op(x, out.clone(), table, AdapterRows(slots))
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(x, out.clone(), table, AdapterRows(slots))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op(x, out.clone(), table, AdapterRows(slots))
    for slot in (1, 2, 3):
        for index, width in enumerate(table.widths):
            table.put(index, slot, LoraWeights(randn(16, 512, dtype=dtype), randn(width, 16, dtype=dtype), 0.1))
        assert table.pointers.is_cuda  # and up to date
        slots.copy_(torch.randint(4, (40,)))
        x.normal_()
        graph.replay()
        assert_close(captured, dense(x, out, table, slots), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4])
def test_kernels_of_adapters_that_come_up_early_see_all_that_was_written(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long chain gives the bits it gives where each kernel starts when the one before has ended, captured or not."""
    dtype = torch.bfloat16
    norm = Norm(torch.ones(1024, dtype=dtype, device=DEVICE), 1e-6)
    first, second = (randn(*size, dtype=dtype, scale=1 / 32) for size in ((4096, 1024), (1024, 2048)))
    gate_up, down = (
        make_table(widths, depth, {1: 16, 2: 8, 4: 16}, dtype, gains=(2,))
        for widths, depth in (([2048, 2048], 1024), ([1024], 2048))
    )
    start, slots = randn(tokens, 1024, dtype=dtype), torch.randint(NUM_SLOTS, (tokens,), device=DEVICE)

    def chain() -> Tensor:
        x = start
        for _ in range(30):
            rows = AdapterRows(slots)
            normed = TRITON.rms_norm(x, *norm)
            hidden = TRITON.lora(normed, TRITON.linear(normed, first), gate_up, rows, "silu")
            x = TRITON.lora(hidden, TRITON.linear(hidden, second, residual=x), down, rows)
            x = TRITON.rms_norm(x, *norm)
        return x

    assert_early_starts_change_nothing(chain, monkeypatch)


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
    """And beside an adapter of a higher rank."""
    table = make_table([24], 1100, {1: 4, 2: 7}, torch.float32)
    slots = torch.tensor([1, 2, 0, 1, 2, 2, 1], device=DEVICE).repeat(4)
    x, out = randn(len(slots), 1100), randn(len(slots), 24)
    together = DETERMINISTIC.lora(x, out.clone(), table, AdapterRows(slots))
    table.put(0, 3, LoraWeights(randn(40, 1100), randn(24, 40), 1.0))
    for row in (0, 5, 27):
        one = slice(row, row + 1)
        alone = DETERMINISTIC.lora(x[one], out[one].clone(), table, AdapterRows(slots[one].clone()))
        assert torch.equal(alone[0], together[row])
