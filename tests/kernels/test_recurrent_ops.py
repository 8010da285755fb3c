"""Operations of layers with a state for each sequence, as torch: against fp64, and against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recurrent_oracle import (
    BATCHES,
    CASES,
    OPERATIONS,
    OPTIONS,
    check,
    check_padding,
    check_pieces,
    make_rows,
)
from torch import Tensor
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from triton_oracle import DEVICE, assert_close

from stoker.kernels.ops import CPU, REFERENCE, Ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
TABLES = {"reference": REFERENCE} | ({"cpu": CPU} if DEVICE.type == "cpu" else {})
tables = pytest.mark.parametrize("ops", TABLES.values(), ids=TABLES)


@tables
@dtypes
@pytest.mark.parametrize("lengths", BATCHES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_packed_batch(name: str, lengths: list[int], dtype: torch.dtype, ops: Ops) -> None:
    check(ops, name, lengths, dtype)


@tables
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_other_layers(name: str, options: dict[str, Any], ops: Ops) -> None:
    for lengths in ([1, 1], [4, 0, 9]):
        check(ops, name, lengths, torch.float32, **options)


@tables
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_several_chunks_long(name: str, options: dict[str, Any], ops: Ops) -> None:
    check(ops, name, [64, 130, 1, 65, 0, 192, 2], torch.float32, **options)


@tables
@dtypes
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_sequence_in_pieces_gives_what_it_gives_whole(name: str, dtype: torch.dtype, ops: Ops) -> None:
    check_pieces(ops, name, dtype, exact=False)


@tables
@pytest.mark.parametrize("name", OPERATIONS)
def test_padding_rows_change_no_others(name: str, ops: Ops) -> None:
    check_padding(ops, name, torch.float32)


# transformers' operations take one sequence, or several of one length: [1, T, ...] here.
def their_conv(x: Tensor, state: Tensor, *, weight: Tensor, bias: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    inputs = torch.cat((state, x))
    out = bamba.causal_conv1d_fn(inputs.T[None], weight, bias, activation=activation)
    return out[0, :, len(state) :].T, inputs[len(x) :]


def their_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, *, normalise: bool
) -> tuple[Tensor, Tensor]:
    shared = value.shape[1] // key.shape[1]  # which older versions leave to their layers
    query, key = (t.repeat_interleave(shared, dim=1) for t in (query, key))
    out, new = qwen3_next.torch_chunk_gated_delta_rule(
        *(t[None] for t in (query, key, value, decay, beta)),
        initial_state=state[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=normalise,
    )
    return out[0], new[0]


def their_scan(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, state: Tensor, *, A: Tensor, D: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    out, new = bamba.mamba2_chunk_scan(
        *(t[None] for t in (x, dt)), A, B[None], C[None], 16, D=D, initial_states=state[None], dt_softplus=True,
        return_final_states=True, **options,
    )  # fmt: skip
    return out[0].to(x.dtype), new[0]


THEIRS = dict(zip(OPERATIONS, (their_conv, their_delta_rule, their_scan), strict=True))


@tables
@dtypes
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_transformers_computes(name: str, dtype: torch.dtype, ops: Ops) -> None:
    """By the operations that run a prompt, which are those a trainer runs."""
    lengths = [1, 66, 0, 20, 13]  # of longer ones their chunks round more
    options: dict[str, Any] = {"limit": (0.3, 1.4)} if name == "selective_scan" else {}
    by_token, given, make_state = CASES[name](sum(lengths), dtype, **options)
    state, rows = make_state(7), make_rows(lengths)
    before = state.clone()
    out = getattr(ops, name)(**by_token, **given, state=state, rows=rows)
    sequences = [
        dict(zip(by_token, part, strict=True))
        for part in zip(*(t.split(lengths) for t in by_token.values()), strict=True)
    ]
    for slot, took, sequence in zip(rows.slots.tolist(), out.split(lengths), sequences, strict=True):
        if len(took):
            wanted, wanted_state = THEIRS[name](**sequence, state=before[slot], **given)
            assert_close(took, wanted.double(), dtype)
            assert_close(state[slot], wanted_state.double(), state.dtype)
            if dtype != torch.float32:  # it rounds where they do
                assert (took == wanted).float().mean() > 0.99
