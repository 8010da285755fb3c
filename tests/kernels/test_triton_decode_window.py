"""From one step of a decode window to the next: the kernel and the reference against a loop over rows."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from triton_oracle import DEVICE

from stoker.kernels.ops import REFERENCE, Ops
from stoker.kernels.reference.decode_window import Record
from stoker.kernels.triton_ops import TRITON

VOCAB, BLOCK_SIZE = 9, 4
FIELDS = ("token_ids", "positions", "slots", "seq_lens", "last_lens")


def advanced(row: dict[str, int], token: int, stops: list[int], first_stop: int, table: list[int]) -> dict[str, int]:
    stopped = token in stops and row["seq_lens"] >= first_stop
    if stopped or row["seq_lens"] + 1 > row["last_lens"]:
        return {"token_ids": token, "positions": 0, "slots": 0, "seq_lens": 1, "last_lens": 0}
    position = row["seq_lens"]
    slot = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
    return row | {"token_ids": token, "positions": position, "slots": slot, "seq_lens": position + 1}


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("stops", [1, 3])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("ops", [REFERENCE, TRITON], ids=["reference", "triton"])
def test_rows_advance_until_they_are_over(ops: Ops, rows: int, stops: int, windowed: bool) -> None:
    columns, steps = 5, 8
    table = torch.randint(1, 2**40, (rows + 3, columns + 2), device=DEVICE)[:rows, :columns]
    stop_ids = torch.randint(VOCAB + 1, (rows, stops), device=DEVICE)  # VOCAB: no id, as it is padded with
    first_stop = torch.randint(0, 20, (rows,), device=DEVICE)
    state = [{"token_ids": 0, "positions": 0, "slots": 0} for _ in range(rows)]
    for row in state:
        row["seq_lens"] = random.randint(1, columns * BLOCK_SIZE - steps)
        row["last_lens"] = row["seq_lens"] + random.randint(0, steps)
    found = {name: torch.tensor([row[name] for row in state], device=DEVICE) for name in FIELDS}
    over = 0
    windows: dict[str, torch.Tensor] = {}
    if windowed:  # as the other table, and 1000 blocks further
        more = torch.zeros(rows + 3, columns + 2, dtype=torch.long, device=DEVICE)[:rows, :columns].copy_(table + 1000)
        windows = {"window_tables": more, "window_slots": torch.zeros_like(found["slots"])}
    slots = torch.randperm(rows + 2, device=DEVICE)[:rows]
    slots[rows // 2 :] = rows + 2  # as of padded rows
    record = Record(
        torch.full((rows,), 2, device=DEVICE),
        torch.full((2 + steps, rows), -1, device=DEVICE),
        torch.full((2 + steps, rows), -1.0, device=DEVICE),
        torch.full((rows + 3,), -1, device=DEVICE),
        slots,
    )
    for step in range(steps):
        tokens = torch.randint(VOCAB, (rows,), device=DEVICE)
        if step % 2:  # the way of a step that is not captured
            ops.advance(tokens, stop_ids, first_stop, table, BLOCK_SIZE, **found, **windows)
        else:
            logprobs, before = torch.rand(3, rows, device=DEVICE)[1], copy.deepcopy(record)
            options = {"logprobs": logprobs, "record": record} | windows
            ops.advance(tokens, stop_ids, first_stop, table, BLOCK_SIZE, **found, **options)
            at = 2 + step // 2
            assert (record.step == at + 1).all()
            assert torch.equal(record.tokens[at], tokens) and torch.equal(record.logprobs[at], logprobs)
            assert (record.newest[slots[: rows // 2]] == tokens[: rows // 2]).all()
            for name in ("tokens", "logprobs"):
                kept = torch.arange(2 + steps, device=DEVICE) != at
                assert torch.equal(getattr(record, name)[kept], getattr(before, name)[kept])
            others = torch.ones(rows + 3, dtype=torch.bool, device=DEVICE).index_fill_(0, slots, False)
            assert (record.newest[others] == -1).all()
        arguments = (t.tolist() for t in (tokens, stop_ids, first_stop, table))
        state = [advanced(*given) for given in zip(state, *arguments, strict=True)]
        assert {name: t.tolist() for name, t in found.items()} == {name: [r[name] for r in state] for name in FIELDS}
        if windowed:
            moved = [r["slots"] + 1000 * BLOCK_SIZE if r["last_lens"] else 0 for r in state]
            assert windows["window_slots"].tolist() == moved
        over += sum(row["last_lens"] == 0 for row in state)
    assert rows == 1 or 0 < over < steps * rows
