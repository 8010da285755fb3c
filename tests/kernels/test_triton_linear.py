"""Projections in Triton: skinny ones, those of torch between small kernels, and invariant ones."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from linears import expected_linear, make_linear
from torch import Tensor
from triton_oracle import DTYPES, assert_close, randn, unwritten_is_nan  # noqa: F401

from stoker.kernels import launch
from stoker.kernels.linear import invariant as linear_invariant
from stoker.kernels.linear import linear as triton_linear
from stoker.kernels.ops import REFERENCE, Ops
from stoker.kernels.triton_ops import DETERMINISTIC, TRITON

TABLES = [TRITON, DETERMINISTIC]
names = {id(TRITON): "triton", id(DETERMINISTIC): "deterministic"}
tables = pytest.mark.parametrize("ops", TABLES, ids=lambda ops: names[id(ops)])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
LINEARS = [
    # As q, k, v; out; gate and up; down; all at once; with sizes that divide no tile.
    (1, 64, 80, "nb"),
    (1, 36, 300, "r"),
    (2, 70, 96, "ng"),
    (3, 37, 129, "br"),
    (4, 62, 64, "bnrg"),
    (4, 33, 50, ""),
    (5, 48, 96, "n"),
    (17, 66, 80, "bnrg"),
    (9, 37, 300, "r"),
    (6, 40, 33, "br"),
    # As Gemma's gate and up, and its q, k, v; as granite's out and down; all at once.
    (1, 70, 96, "ot"),
    (3, 64, 80, "o"),
    (1, 37, 129, "s"),
    (4, 62, 64, "boe"),
    (2, 62, 64, "boes"),
    (5, 48, 96, "ot"),
    (17, 66, 80, "bots"),
    (9, 37, 96, "s"),
    # As GPT-NeoX's, whose norm is an operation of its own.
    (1, 64, 80, "cb"),
    (4, 62, 64, "cbrg"),
    (17, 66, 80, "c"),
]


@dtypes
@tables
@pytest.mark.parametrize("case", LINEARS, ids=str)
def test_linear(case: tuple[int, int, int, str], ops: Ops, dtype: torch.dtype) -> None:
    arguments = make_linear(*case, dtype)
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, Tensor)}
    assert_close(ops.linear(**arguments), expected_linear(**arguments), dtype)
    assert all(torch.equal(arguments[name], tensor) for name, tensor in before.items())


@tables
@pytest.mark.parametrize(
    ("case", "there"), [((1, 36, 80, "r"), False), ((9, 37, 60, "s"), True), ((7, 40, 33, "br"), True)]
)
def test_a_residual_that_nobody_reads_any_more_may_give_its_place(case: tuple, there: bool, ops: Ops) -> None:
    arguments = make_linear(*case, torch.float32)
    expected = expected_linear(**arguments)
    out = ops.linear(**arguments, in_place=True)
    assert_close(out, expected, torch.float32)
    if ops is not DETERMINISTIC:
        assert (out.data_ptr() == arguments["residual"].data_ptr()) == (there or ops is REFERENCE)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("options", ["n", "bnrg", "bots"])
@pytest.mark.parametrize("processors", [1, 132])
def test_skinny_linear_in_tall_and_low_tiles(
    processors: int, tokens: int, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a wide weight and a narrow one, and with a depth of several tiles."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: processors)
    rows, depth, _ = triton_linear.skinny_config(tokens, (68, 4400), 4, processors, 228 * 1024)
    low = processors > 1
    assert rows == ((2 if low else 8) if tokens == 1 else (16 if low else 32)) and depth < 4400
    arguments = make_linear(tokens, 68, 4400, options, torch.float32)
    assert_close(TRITON.linear(**arguments), expected_linear(**arguments), torch.float32)


@pytest.mark.parametrize("name", ["x", "weight", "residual"])
def test_a_linear_of_tensors_whose_rows_are_not_contiguous(name: str) -> None:
    arguments = make_linear(3, 20, 24, "nr", torch.float32)
    arguments[name] = arguments[name].t().contiguous().t()
    assert_close(TRITON.linear(**arguments), expected_linear(**arguments), torch.float32)


def test_a_large_activation_does_not_overflow_before_its_norm() -> None:
    arguments = make_linear(2, 32, 64, "n", torch.float16)
    arguments["norm"][0][7], arguments["x"][:, 7] = 4.0, 60000.0
    assert_close(TRITON.linear(**arguments), expected_linear(**arguments), torch.float16)


def test_the_skinny_kernels_fit_the_chip_and_fill_it() -> None:
    for tokens, width, depth, itemsize, shared in itertools.product(
        (1, 4), (256, 2048, 28672, 128256), (80, 2048, 8192), (2, 4), (100 * 1024, 228 * 1024)
    ):
        rows, columns, stages = triton_linear.skinny_config(tokens, (width, depth), itemsize, 132, shared)
        if tokens == 1:
            assert rows * columns <= 64 * 128  # fp32 products in the registers of 128 threads
            assert rows == 2 or width // rows >= 2 * 132
        else:  # a stage less is in shared memory
            assert (stages - 1) * (16 + rows) * columns * itemsize + (itemsize == 4) * 16 * 512 <= shared - 3 * 1024
            assert stages == 5 or (stages == 4 and rows == 32 and itemsize == 4 and shared == 100 * 1024)
            assert rows == 16 or width // rows >= 2 * 132


INVARIANT = [(200, 300, "nb"), (130, 700, "rg"), (96, 80, "bnrg"), (140, 600, "bots")]


@dtypes
@pytest.mark.parametrize("case", INVARIANT, ids=str)
@pytest.mark.parametrize("filled", [0, 128], ids=["segments in turn", "segments side by side"])
def test_a_row_of_the_invariant_linear_is_the_same_among_any_others(
    case: tuple[int, int, str], filled: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, depth, options = case
    arguments = make_linear(70, width, depth, options, dtype)

    def rows(where: slice) -> Tensor:
        some = {k: arguments[k][where] for k in ("x", "residual") if arguments[k] is not None}
        return DETERMINISTIC.linear(**(arguments | some))

    together = rows(slice(None))
    assert_close(together, expected_linear(**arguments), dtype)
    config = linear_invariant.matmul_config(width, depth, dtype)
    monkeypatch.setattr(linear_invariant, "matmul_config", lambda *_: config)
    monkeypatch.setattr(linear_invariant, "_FILLED", filled)
    for tokens in (1, 3, 17, 64):
        assert torch.equal(rows(slice(5, 5 + tokens)), together[5 : 5 + tokens])


def test_another_cut_of_the_depth_gives_other_bits() -> None:
    """What the check of invariance would see if the segments followed from the number of tokens."""
    x, weight = randn(3, 700), randn(130, 700)
    config = linear_invariant.matmul_config(*weight.shape, x.dtype)
    assert config.segments > 1
    whole = replace(config, segments=1, depth=704)
    cut, uncut = (linear_invariant._matmul(x, weight, None, None, None, 1.0, None, c) for c in (config, whole))
    assert_close(uncut, x.double() @ weight.double().T, x.dtype)
    assert not torch.equal(cut, uncut)


def test_the_fast_linear_is_not_invariant() -> None:
    x, weight = randn(17, 700), randn(64, 700)
    assert not torch.equal(TRITON.linear(x, weight)[:1], TRITON.linear(x[:1], weight))


def test_the_invariant_configuration_covers_the_depth_and_fits_the_chip() -> None:
    for width, depth, dtype in itertools.product(
        (16, 3072, 128256), (48, 2304, 14336), (torch.float32, torch.bfloat16)
    ):
        c = linear_invariant.matmul_config(width, depth, dtype)
        assert c.depth % c.block_k == 0 and (c.segments - 1) * c.depth < depth <= c.segments * c.depth
        assert 4 * (c.block_m + c.block_n) * c.block_k * dtype.itemsize <= 227 * 1024  # shared memory, four stages
