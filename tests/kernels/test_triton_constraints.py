"""Rows that follow automata: kernels and reference against a loop over rows and tokens."""

from __future__ import annotations

import random

import pytest
import torch
from triton_oracle import DEVICE, DTYPES, unwritten_is_nan  # noqa: F401

from stoker.kernels.ops import REFERENCE, Ops
from stoker.kernels.reference.constraints import FIRST, FREE, HEADER, MAY_END, REFUSED, ConstraintRows
from stoker.kernels.triton_ops import TRITON

OPS = pytest.mark.parametrize("ops", [REFERENCE, TRITON], ids=["reference", "triton"])


class Automata:
    """Automata of some states, each over classes of the vocabulary; and where slots are in them."""

    def __init__(self, vocab: int, slots: int, count: int = 3) -> None:
        self.vocab, self.kinds, self.tables = vocab, [], []
        parts, bases = [torch.full((5,), 77)], []
        for number in range(count):
            classes, states = 4 + 3 * number, 4 + number
            kinds = torch.randint(classes, (vocab,))
            table = torch.randint(FIRST + states, (states, classes))
            table[:, 0], table[:, 1] = REFUSED, MAY_END
            bases.append(sum(map(len, parts)))
            parts += [torch.tensor([classes] + [9] * (HEADER - 1)), kinds, table.flatten(), torch.full((number,), 77)]
            self.kinds.append(kinds.tolist())
            self.tables.append(table.tolist())
        self.of_slot = [random.randrange(count) for _ in range(slots)]
        self.states = random.sample(range(FIRST + 4), FIRST + 4) + [FREE] * (slots - FIRST - 4)
        self.first_end = [random.randrange(20) for _ in range(slots)]
        base = [bases[number] for number in self.of_slot]
        columns = (torch.tensor(column, device=DEVICE) for column in (base, self.states, self.first_end))
        self.rows = ConstraintRows(torch.cat(parts).to(DEVICE, torch.int16), *columns)

    def after(self, slot: int, token: int) -> int:
        state, number = self.states[slot], self.of_slot[slot]
        return state if state < FIRST else self.tables[number][state - FIRST][self.kinds[number][token]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "vocab"), [(1, 7), (8, 300), (3, 5000)])
@OPS
def test_tokens_that_may_not_come_are_masked(ops: Ops, count: int, vocab: int, dtype: torch.dtype) -> None:
    automata = Automata(vocab, slots=8)
    slots = torch.randperm(8, device=DEVICE)[:count]
    positions = automata.rows.first_end[slots] + torch.arange(count, device=DEVICE) % 3 - 1
    logits = torch.randn(count, vocab + 3).to(DEVICE, dtype)[:, :vocab]
    logits[0, 3] = float("nan")  # it has to reach the log-probability, by which it is found
    found = ops.constrain(logits, automata.rows, slots, positions)
    assert found.dtype == torch.float32
    columns = logits.t().contiguous().t()
    assert torch.equal(ops.constrain(columns, automata.rows, slots, positions).nan_to_num(), found.nan_to_num())
    for row, slot in enumerate(slots.tolist()):
        after = [automata.after(slot, token) for token in range(vocab)]
        early = int(positions[row]) < automata.first_end[slot]
        free = automata.states[slot] < FIRST
        taken = torch.tensor([free or not (a == REFUSED or (a == MAY_END and early)) for a in after], device=DEVICE)
        wanted = logits[row].float()
        wanted = torch.where(taken | wanted.isnan(), wanted, float("-inf"))
        torch.testing.assert_close(found[row], wanted, rtol=0, atol=0, equal_nan=True)


@OPS
def test_states_go_on_by_what_was_sampled(ops: Ops) -> None:
    vocab, count, slots = 40, 6, 9
    automata = Automata(vocab, slots)
    spare = slots - 1
    automata.states[spare] = FREE
    automata.rows.states[spare] = FREE
    rows = torch.randperm(spare, device=DEVICE)[:count]
    rows[4:] = spare  # whose tokens nobody reads
    for _ in range(12):
        tokens = torch.randint(vocab, (count,), device=DEVICE)
        others = automata.rows.base.clone(), automata.rows.first_end.clone(), automata.rows.automata.clone()
        ops.follow(tokens, automata.rows, rows, vocab)
        for slot, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            automata.states[slot] = automata.after(slot, token)
        assert automata.rows.states.tolist() == automata.states
        now = automata.rows.base, automata.rows.first_end, automata.rows.automata
        assert all(map(torch.equal, others, now))
