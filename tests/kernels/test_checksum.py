"""Checksums see what plausibly goes wrong with a weight, in tensors of any size, and are those of the content alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from checksummed import CPU, checksum
from torch import Tensor

from stoker.kernels.reference import checksum as module
from stoker.weight_sync import checksum as by_weight_sync
from stoker.weight_sync.checksum import checksums


def swapped(first: int, second: int) -> Callable[[Tensor], Tensor]:
    def swap(x: Tensor) -> Tensor:
        rows = list(range(x.shape[0]))
        rows[first], rows[second] = rows[second], rows[first]
        return x[rows]

    return swap


def negated(rows: slice, columns: slice) -> Callable[[Tensor], Tensor]:
    def negate(x: Tensor) -> Tensor:
        x = x.clone()
        x[rows, columns] *= -1
        return x

    return negate


EVERY = slice(None)
CORRUPTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "two rows": swapped(0, 1),
    "two rows in the middle": swapped(100, 102),
    "first and last row": swapped(0, -1),
    "rows upside down": lambda x: x.flip(0),
    "columns mirrored": lambda x: x.flip(1),
    "two columns": lambda x: swapped(0, 4)(x.t()).t(),
    "halves of every row": lambda x: x.roll(x.shape[1] // 2, 1),  # of a rotary embedding, say
    "one element on": lambda x: x.flatten().roll(1).view(x.shape),
    "eight bytes on": lambda x: x.flatten().roll(8 // x.dtype.itemsize).view(x.shape),
    "one row on": lambda x: x.roll(1, 0),
    "heads in another order": lambda x: x.view(4, -1, x.shape[1]).transpose(0, 1).reshape(x.shape),
    "transposed": lambda x: x.t().reshape(x.shape),
    "another sign": torch.neg,
    "another sign in a row": negated(slice(7, 8), EVERY),
    "another sign in odd columns": negated(EVERY, slice(1, None, 2)),
    "another sign in the words' highest bits": negated(EVERY, slice(3, None, 4)),
    "another sign in a row's highest bits": negated(slice(7, 8), slice(3, None, 4)),
    "one bit": lambda x: torch.cat([x[:-1], x[-1:].nextafter(torch.zeros_like(x[-1:]))]),
    "one value twice": lambda x: torch.cat([x[:5], x[4:5], x[6:]]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 128), (2048, 64), (256, 256), (512, 512), (1024, 1024), (160, 6144)])
def test_they_see_every_plausible_corruption(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    seen = checksum(x)
    assert checksum(x.clone()) == checksum(x.t().contiguous().t()) == seen
    unseen = [name for name, corrupt in CORRUPTIONS.items() if checksum(corrupt(x)) == seen]
    assert unseen == []


def test_they_see_rows_exchanged_at_any_distance() -> None:
    x = torch.randn(2100, 32, dtype=torch.bfloat16)
    sums = [checksum(swapped(3, other)(x)) for other in range(4, 2100, 13)]
    assert len({*sums, checksum(x)}) == len(sums) + 1


@pytest.mark.parametrize("rows", [10, 127, 256])
def test_they_see_every_word_and_every_highest_bit(rows: int) -> None:
    """Where all words are in sets, and where some are left over."""
    for more in (0, 1, 700):
        x = torch.randn(1018 * rows + more, 2)
        seen = checksum(x)
        y = x.clone()
        y[:, 1] *= -1
        assert checksum(y) != seen
        for row in {0, 1, len(x) // 2, *range(len(x) - 2050, len(x), 41), len(x) - more - 1, -more, -1}:
            y = x.clone()
            y[row, 0] += 1
            assert checksum(y) != seen, row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk", [2**16, 2**18, 2**26])
def test_they_are_those_of_the_content_after_a_cast(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a trainer's fp32 and the engine's own dtype, however many pieces a tensor is looked at in."""
    for place in (module, by_weight_sync):
        monkeypatch.setattr(place, "PIECE_BYTES", chunk)
    x = torch.randn(311, 997)
    assert checksum(x, dtype) == checksum(x.to(dtype)) != checksum(x.flip(0), dtype)
    halves = torch.randn(2, 2**16 // dtype.itemsize)
    assert checksum(halves, dtype) != checksum(halves.flip(0), dtype)


def test_tensors_of_one_kind_are_looked_at_together_and_each_has_its_own_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of any shape and dtype, in any order, below and above the size that is stacked; and few calls for many tensors."""
    shapes: list[tuple[int, ...]] = [(), (0,), (7,), (40, 50), (1018, 257), (1021, 260), (700, 800)]
    kinds = [(shape, dtype) for shape in shapes for dtype in (torch.float32, torch.bfloat16, torch.bool)]
    tensors = [torch.randn(shape).mul(50).to(dtype) for shape, dtype in kinds for _ in range(3)]
    tensors += [
        torch.randn(50, 40).t(),
        torch.randn(2003).bfloat16()[3:].view(40, 50),
        torch.zeros(20, 100),
        torch.zeros(80, 50).half(),
    ]
    tensors = [tensors[i] for i in torch.randperm(len(tensors))]
    expected = [checksum(t) for t in tensors]
    assert checksums(tensors, CPU) == expected
    monkeypatch.setattr(module, "_LOT_BYTES", 2**20)  # and in lots
    assert checksums(tensors, CPU) == [checksum(t) for t in tensors]

    calls: list[int] = []
    weigh = module._weighted_sums
    monkeypatch.setattr(module, "_weighted_sums", lambda data: calls.append(len(data)) or weigh(data))
    checksums([torch.randn(300 + i % 2) for i in range(400)], CPU)
    assert calls == [200, 200]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(5, 6), (1030, 600)])
def test_they_are_those_of_the_content_however_it_lies(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Every other column lies at equal distances, as gates that take turns with values do."""
    x = torch.randn(shape).mul(50).to(dtype)
    for view in (
        x[:, ::2],
        x[:, 1::2],
        x[:, 0],
        x[:, :1],
        x[::2],
        x.t(),
        x.t()[::2],
        x.flatten()[1:],
        x[0].expand(3, -1),
    ):
        assert checksum(view) == checksum(view.clone(memory_format=torch.contiguous_format))
    assert checksum(x[:1, :1].expand(3, 4)) == checksum(x[:1, :1].expand(3, 4).clone())


def test_casts_are_made_in_lots_of_a_piece_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_weight_sync, "PIECE_BYTES", 1000)
    sizes = [100, 300, 300, 2, 1700, 0, 250, 250]
    tensors = [(i, torch.randn(n, device="meta" if i == 3 else "cpu"), torch.bfloat16) for i, n in enumerate(sizes)]
    lots, before = [], []
    for lot in by_weight_sync._casts(tensors):
        assert all(old is lot or not old for old in before), "an earlier lot is still there"
        assert len({piece.device for _, piece in lot}) == 1
        lots.append([(i, len(piece)) for i, piece in lot])
        before.append(lot)
    wanted = [[(0, 100), (1, 300)], [(2, 300)], [(3, 2)], [(4, 500)], [(4, 500)], [(4, 500)]]
    assert lots == [*wanted, [(4, 200), (5, 0), (6, 250)], [(7, 250)]]


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (40, 50), (300, 500), (3000, 4000)])
def test_checksums_depend_on_order_and_on_every_value(shape):
    x = torch.randn(shape)
    seen = checksum(x)
    assert checksum(x.clone()) == seen
    if x.ndim == 2:
        assert checksum(x.flip(0)) != seen
        assert checksum(x.t().contiguous().view(shape)) != seen
        assert checksum(x.t().contiguous().t()) == seen
    flat = x.view(-1)
    for i in {0, flat.numel() // 2, flat.numel() - 1}:
        kept = flat[i].clone()
        flat[i] += 1
        assert checksum(x) != seen
        flat[i] = kept
    assert checksum(x, torch.bfloat16) == checksum(x.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [64, 200_000])
def test_checksums_see_the_highest_bits(dtype, count):
    """Signs in the highest bit of two words, which weighted sums alone cancel."""
    x = torch.randn(count, dtype=dtype)
    seen = checksum(x)
    last = 8 // dtype.itemsize - 1
    x[[last, count // 2 + last]] *= -1
    assert checksum(x) != seen
