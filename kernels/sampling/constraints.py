"""Two Triton kernels for rows whose tokens an automaton constrains, so that the host has no part in a step.

``constrain`` reads two bytes for each token of the vocabulary, the same for all rows and so in L2, and one state's row of
the table: next to nothing beside the logits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.launch import await_turn
from stoker.kernels.reference import constraints as reference
from stoker.kernels.reference.constraints import ConstraintRows

_CHUNK = 2048
_REFUSED = tl.constexpr(reference.REFUSED)
_MAY_END = tl.constexpr(reference.MAY_END)
_FIRST = tl.constexpr(reference.FIRST)
_HEADER = tl.constexpr(reference.HEADER)


@triton.jit
def _constrain_kernel(
    logits_ptr, stride, vocab, automata_ptr, base_ptr, states_ptr, first_end_ptr, slots_ptr, positions_ptr, out_ptr,
    CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_turn(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    state = tl.load(states_ptr + slot)
    tokens = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = tokens < vocab
    x = tl.load(logits_ptr + row * stride + tokens, mask=inside, other=0.0).to(tl.float32)
    if state >= _FIRST:
        automaton_ptr = automata_ptr + tl.load(base_ptr + slot)
        early = tl.load(positions_ptr + row) < tl.load(first_end_ptr + slot)
        table_ptr = automaton_ptr + _HEADER + vocab + (state - _FIRST) * tl.load(automaton_ptr)
        kinds = tl.load(automaton_ptr + _HEADER + tokens, mask=inside, other=0)
        following = tl.load(table_ptr + kinds, mask=inside, other=0)
        taken = (following != _REFUSED) & ((following != _MAY_END) | (early == 0))
        x = tl.where(taken | (x != x), x, float("-inf"))
    tl.store(out_ptr + row * vocab + tokens, x, mask=inside)


def constrain(logits: Tensor, rows: ConstraintRows, slots: Tensor, positions: Tensor) -> Tensor:
    """As the reference."""
    logits = launch.in_rows(logits)
    count, vocab = logits.shape
    out = torch.empty(count, vocab, dtype=torch.float32, device=logits.device)
    chunk = min(_CHUNK, triton.next_power_of_2(vocab))
    _constrain_kernel[count, triton.cdiv(vocab, chunk)](
        logits, logits.stride(0), vocab, rows.automata, rows.base, rows.states, rows.first_end, slots, positions, out,
        CHUNK=chunk, num_warps=4, **launch.options(logits.device),
    )  # fmt: skip
    return out


@triton.jit
def _follow_kernel(tokens_ptr, vocab, automata_ptr, base_ptr, states_ptr, slots_ptr, DEPENDENT: tl.constexpr):
    await_turn(DEPENDENT)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    state = tl.load(states_ptr + slot)
    if state >= _FIRST:
        automaton_ptr = automata_ptr + tl.load(base_ptr + slot)
        kind = tl.load(automaton_ptr + _HEADER + tl.load(tokens_ptr + row))
        table_ptr = automaton_ptr + _HEADER + vocab + (state - _FIRST) * tl.load(automaton_ptr)
        tl.store(states_ptr + slot, tl.load(table_ptr + kind).to(tl.int64))


def follow(tokens: Tensor, rows: ConstraintRows, slots: Tensor, vocab: int) -> None:
    """As the reference."""
    _follow_kernel[tokens.shape](
        tokens, vocab, rows.automata, rows.base, rows.states, slots, num_warps=1, **launch.options(tokens.device)
    )
