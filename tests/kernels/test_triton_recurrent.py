"""Triton kernels of layers with a state for each sequence, against fp64."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from recurrent_oracle import (
    BATCHES,
    CASES,
    OPERATIONS,
    OPTIONS,
    check,
    check_alone,
    check_padding,
    check_pieces,
    make_rows,
    run,
)
from torch import Tensor
from triton_oracle import (
    DEVICE,
    DTYPES,
    assert_early_starts_change_nothing,
    randn,
    unwritten_is_nan,  # noqa: F401
)

from stoker.kernels.ops import REFERENCE, Ops
from stoker.kernels.recurrent.chunks import CHUNK, MOST_WALKED
from stoker.kernels.reference.recurrent import StateRows
from stoker.kernels.triton_ops import DETERMINISTIC, TRITON

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
tables = pytest.mark.parametrize("ops", [TRITON, DETERMINISTIC], ids=["fast", "deterministic"])
names = pytest.mark.parametrize("name", OPERATIONS)


def exactness(ops: Ops, dtype: torch.dtype) -> torch.dtype:
    """Of states: chunks multiply what is fp32 in two parts, which of bf16 are 16 bits together."""
    return dtype if ops is TRITON and dtype == torch.bfloat16 else torch.float32


def walked(ops: Ops, name: str, dtype: torch.dtype) -> bool:
    """Token after token, however many: longer than what chunks begin at, a sequence has no other border to come to."""
    return name != "causal_conv" and (ops is DETERMINISTIC or dtype == torch.float32)


@tables
@names
@dtypes
@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_a_packed_batch(name: str, lengths: list[int], dtype: torch.dtype, ops: Ops) -> None:
    check(ops, name, lengths, dtype, exactness(ops, dtype))


@tables
@pytest.mark.parametrize("length", [1, 4])
def test_a_bound_of_the_step_hides_no_nan(length: int, ops: Ops) -> None:
    by_token, given, make_state = CASES["selective_scan"](length, torch.float32, limit=(0.001, 2.0))
    by_token["dt"][-1] = float("nan")
    out = run(ops, "selective_scan", by_token, given, make_state(3), make_rows([length]))
    assert out[-1].isnan().all() and not out[:-1].isnan().any()


def test_a_gated_convolution_has_the_same_bits_in_any_pieces_and_among_any_others() -> None:
    for dtype in (torch.float32, torch.float16):
        options = {"gated": True, "activation": None, "width": 3}
        check_pieces(DETERMINISTIC, "causal_conv", dtype, exact=True, **options)
        check_alone(DETERMINISTIC, "causal_conv", dtype, **options)


@dtypes
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_other_layers(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    for lengths in ([1, 1], [4, 0, 9]):
        check(TRITON, name, lengths, dtype, **options)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("options", [{}, {"gated": True, "activation": None}, {"gated": True}], ids=str)
def test_a_convolution_rounds_where_the_reference_does(options: dict[str, Any], dtype: torch.dtype) -> None:
    by_token, given, make_state = CASES["causal_conv"](60, dtype, **options)
    if "before" in by_token:
        by_token["before"] = by_token["before"].contiguous()  # which need not lie as the others do
    rows, state = make_rows([40, 20]), make_state(4)
    mine, theirs = (run(ops, "causal_conv", by_token, given, state.clone(), rows) for ops in (TRITON, REFERENCE))
    assert (mine == theirs).float().mean() > 0.98


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(("name", "options"), [o for o in OPTIONS if o[0] != "causal_conv"], ids=str)
def test_several_chunks_long(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    assert MOST_WALKED == 16 and CHUNK == 64
    check(TRITON, name, [17, 130, 1, 16, 0, 64], dtype, exactness(TRITON, dtype), **options)


@names
@dtypes
def test_what_chunks_take_is_what_they_say(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, made, empty = 40, [], torch.empty

    def note(*args: Any, **kwargs: Any) -> Tensor:
        made.append(empty(*args, **kwargs))
        return made[-1]

    by_token, given, make_state = CASES[name](tokens, dtype)
    state, rows = make_state(3), make_rows([tokens])
    monkeypatch.setattr(torch, "empty", note)
    run(TRITON, name, by_token, given, state, rows)
    if name == "causal_conv":
        said = 0
    else:
        rule = name == "gated_delta_rule"
        assert TRITON.recurrent_workspace is not None
        said = TRITON.recurrent_workspace(tokens, state.shape[1], state.shape[2 if rule else 3], dtype, rule=rule)
        assert bool(said) == (dtype != torch.float32)
    assert sum(t.nbytes for t in made) == said


@names
@dtypes
def test_a_sequence_in_pieces_gives_what_it_gives_whole(name: str, dtype: torch.dtype) -> None:
    for ops in (DETERMINISTIC, TRITON):
        fewer = {"longest": MOST_WALKED + 6} if walked(ops, name, dtype) else {}
        check_pieces(ops, name, dtype, exact=ops is DETERMINISTIC, kept=exactness(ops, dtype), **fewer)


@tables
@names
@dtypes
def test_a_sequence_has_the_same_bits_among_any_others(name: str, dtype: torch.dtype, ops: Ops) -> None:
    fewer = {"longest": (MOST_WALKED + 2, MOST_WALKED + 4)} if walked(ops, name, dtype) else {}
    check_alone(ops, name, dtype, **fewer)


@names
@dtypes
def test_padding_rows_change_no_others(name: str, dtype: torch.dtype) -> None:
    check_padding(TRITON, name, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1, 1, 1], [40, 3, 150]], ids=str)
def test_kernels_that_come_up_early_see_all_that_was_written(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long chain of steps, each of the inputs that the one before gave."""
    dtype, rows, tokens = torch.bfloat16, len(lengths), sum(lengths)
    starts = torch.tensor([0, *accumulate(lengths)], device=DEVICE)
    at = StateRows(torch.arange(rows, device=DEVICE), starts, max(lengths))
    weight, start, a = randn(512, 4, dtype=dtype), randn(tokens, 512, dtype=dtype), -torch.ones(2, device=DEVICE)

    def chain() -> Tensor:
        sizes = (3, 512), (2, 128, 128), (2, 128, 128)
        taken, rule, scan = (torch.zeros(rows, *size, device=DEVICE) for size in sizes)
        taken, x = taken.to(dtype), start
        for _ in range(20):
            x = TRITON.causal_conv(x, weight, None, taken, at, activation="silu")
            q, k, v = x.view(tokens, 4, 128).split([1, 1, 2], dim=1)
            decay, beta = -v[:, 0, :2].float().abs(), v[:, 1, :2].sigmoid()
            v = TRITON.gated_delta_rule(q, k, v, decay, beta, rule, at, normalise=True)
            y = TRITON.selective_scan(
                v, v[:, 0, :2], a, q / 16, k / 16, None, scan, at, dt_bias=None, dt_limit=(0.0, 1.0)
            )
            x = torch.cat((v.flatten(1), y.flatten(1).tanh()), dim=1)
        return torch.cat([t.flatten().float() for t in (x, taken, rule, scan)])

    assert_early_starts_change_nothing(chain, monkeypatch)
