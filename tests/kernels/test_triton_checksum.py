"""Checksums by one kernel equal the torch reference's, for tensors of any kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
from torch import Tensor
from triton_oracle import DEVICE

from stoker.kernels import checksum as by_triton
from stoker.kernels import launch
from stoker.kernels.host_memory import to_device
from stoker.kernels.ops import REFERENCE
from stoker.kernels.reference import checksum as by_torch
from stoker.kernels.triton_ops import TRITON

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.bool, torch.int64]


def content(nbytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Any bits there are, NaN and the highest ones too."""
    data = torch.randint(256, (nbytes,), dtype=torch.uint8)
    return (data % 2 if dtype is torch.bool else data).to(DEVICE).view(dtype)


def agree(tensors: list[Tensor]) -> list[int]:
    numbers = TRITON.checksums(tensors)
    expected = REFERENCE.checksums(tensors)
    assert numbers.dtype == expected.dtype == torch.int64 and numbers.tolist() == expected.tolist()
    return expected.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_any_dtype_length_shape_and_place(dtype: torch.dtype) -> None:
    size = dtype.itemsize
    tensors = [content(n * size, dtype) for n in (0, 1, 3, 7, 8, 9, 1000, 4099)]
    tensors += [content(48 * size, dtype).view(6, 8).t(), content(60 * size, dtype).view(3, 4, 5)[:, 1:3]]
    tensors += [content(0, dtype).view(0, 3), content(size, dtype)[0]]
    long = content(5000 * size, dtype)
    tensors += [long[i : i + 2000] for i in (1, 2, 3, 4, 8)]
    numbers = agree(tensors)
    assert numbers[0] == 0 and len(set(numbers)) >= len(numbers) - 3


# Words that are all alone or summed in sets: none, some or all of which are whole, and rows of the last one from 1 to 126.
@pytest.mark.parametrize("rows", [8, 9, 10, 126, 127, 128, 129, 253, 254, 300])
def test_of_any_number_of_sets(rows: int) -> None:
    ends = (0, 5, 8 * 1020) if rows % 2 else (3, 8 * 600 + 1)
    tensors = [content(8 * 1018 * rows + more) for more in ends]
    tensors += [content(8 * n + more) for n in (2**13, 2**13 + 1) for more in (0, 1)]
    agree(tensors)


@pytest.mark.parametrize("piece", [2**15, 2**17, 3 * 2**16 + 8])
def test_of_several_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a tensor above 64 MiB; the factors of many pieces are beyond 64 bits."""
    for module in (by_triton, by_torch):
        monkeypatch.setattr(module, "PIECE_BYTES", piece)
    by_triton._plan.cache_clear()
    tensors = [content(n) for n in (piece - 1, piece, piece + 1, 3 * piece + 70_001, 15 * 2**15 + 9)]
    swapped = torch.cat([tensors[3][piece : 2 * piece], tensors[3][:piece], tensors[3][2 * piece :]])
    assert len(set(agree([*tensors, swapped]))) == 6
    by_triton._plan.cache_clear()


def test_many_tensors_are_one_launch_and_the_next_look_sees_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [content(8 * (50 + 7 * i), torch.bfloat16) for i in range(60)] + [content(400_000)]
    kernel, grids, plans = by_triton._checksums_kernel, [], []

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return kernel[grid]

    plan = by_triton._plan
    monkeypatch.setattr(by_triton, "_checksums_kernel", Counted())
    monkeypatch.setattr(by_triton, "_plan", lambda *key: plans.append(plan(*key)) or plans[-1])
    before = agree(tensors)
    tensors[7][3:4].view(torch.int16).bitwise_xor_(1)
    tensors[60].copy_(tensors[60].roll(8))
    after = agree(tensors)
    assert [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b] == [7, 60]
    assert len(grids) == 2 and grids[0] == grids[1] and plans[0] is plans[1], "one kernel each, planned once"
    tensors[7] = tensors[7].clone()
    assert agree(tensors) == after and plans[2] is not plans[1], "planned anew for what lies elsewhere"
    agree([t[3:] for t in tensors])
    assert not (plans[3][1][:, 0] % 8).any(), "words are read whole"
    assert TRITON.checksums([content(0)] * 3).tolist() == [0] * 3 and len(grids) == 4, "nothing to launch"
    monkeypatch.setattr(launch, "stream", lambda device: 1)
    assert agree(tensors) == after and plans[5] is not plans[2], "another stream would not wait for its table"


def test_tables_are_of_the_stream_that_is_the_present_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (0, 7):
        present = SimpleNamespace(cuda_stream=number)
        monkeypatch.setattr(torch.cuda, "current_stream", {torch.device("cuda", 1): present}.get)
        assert launch.stream(torch.device("cuda", 1)) == number


def test_many_tables_are_kept_of_little_and_few_of_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer may move its weights before each look, and tables of whole models take memory."""
    sent = list[ReferenceType[Tensor]]()

    def sending(host: Tensor, device: torch.device) -> Tensor:
        there = to_device(host, device)
        sent.append(ref(there))
        return there

    def tables_of(nbytes: int) -> int:
        """How many are there after a look at so many bytes at each of 40 places, twice."""
        before = len(sent)
        for at in [*range(0, 640, 16)] * 2:
            TRITON.prepare_checksums([memory[at : at + nbytes]])
        return sum(table() is not None for table in sent[before:])

    memory = torch.empty(2**28 + 640, dtype=torch.uint8, device=DEVICE)
    monkeypatch.setattr(by_triton, "to_device", sending)
    assert tables_of(2**20) == len(sent) == 80, "two of each place, sent once"
    assert tables_of(2**28) < 20


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_is_read_is_cast_and_written_on_the_way(
    source: torch.dtype, target: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of lengths with and without sets, beyond the last word and over several pieces; wherever source and target lie."""
    for module in (by_triton, by_torch):
        monkeypatch.setattr(module, "PIECE_BYTES", 3 * 2**16 + 8)
    by_triton._plan.cache_clear()
    words = [0, 1, 2, 1000, 2**13, 2**13 + 1, 1018 * 128 + 300]
    sizes = [8 // source.itemsize * n + more for n in words for more in (0, 1, 3)]
    tensors = [torch.randn(n, device=DEVICE).mul(100).to(source) for n in sizes]
    tensors += [torch.randn(60, 40, device=DEVICE).to(source).t(), torch.randn(2003, device=DEVICE).to(source)[3:]]
    room = [torch.zeros(t.numel() + 8, dtype=target, device=DEVICE) for t in tensors]
    targets = [r[4:-4].view(t.shape) for r, t in zip(room, tensors, strict=True)]
    targets[3], targets[5] = room[3][1 : sizes[3] + 1], torch.zeros(sizes[5], 2, dtype=target, device=DEVICE)[:, 0]
    numbers = TRITON.checksums(tensors, targets)
    assert numbers.tolist() == REFERENCE.checksums(tensors).tolist()
    # The interpreter cuts off what does not fit into bf16, where a device rounds.
    rtol = 2**-7 if DEVICE.type == "cpu" and torch.bfloat16 in (source, target) else 0
    for t, to in zip(tensors, targets, strict=True):
        torch.testing.assert_close(to, t.to(target), rtol=rtol, atol=0)
    whole = [r for i, r in enumerate(room) if i not in (3, 5)]
    assert not any(torch.cat([r[:4], r[-4:]]).any() for r in whole), "written beyond its end"
    again = [torch.zeros_like(t) for t in targets]
    assert REFERENCE.checksums(tensors, again).tolist() == numbers.tolist()
    assert all(torch.equal(to, t.to(target)) for to, t in zip(again, tensors, strict=True))
    by_triton._plan.cache_clear()


def test_what_the_kernel_writes_nothing_else_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(n, device=DEVICE) for n in (7, 9000)]
    targets = [torch.zeros_like(t, dtype=torch.float16) for t in tensors]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", None)
        TRITON.checksums(tensors, targets)
    assert all(torch.equal(to, t.half()) for to, t in zip(targets, tensors, strict=True))


@pytest.mark.parametrize("plain", [True, False])
def test_what_was_prepared_reads_and_writes_what_there_is_then(plain: bool) -> None:
    """Each time, tensors of several dtypes together; also those that the kernel reads from a copy, which lies elsewhere."""
    tensors = [torch.randn(n, device=DEVICE) for n in (5, 4000, 90_000)]
    tensors += [torch.randn(700, device=DEVICE).bfloat16(), torch.randn(6, device=DEVICE).double()]
    if not plain:
        tensors += [torch.randn(30, 40, device=DEVICE).t(), torch.randn(2003, device=DEVICE)[3:]]
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    to_triton, to_torch = (
        [torch.zeros(t.shape, dtype=dtypes[i % 3], device=DEVICE) for i, t in enumerate(tensors)] for _ in range(2)
    )
    looks = [TRITON.prepare_checksums(tensors), REFERENCE.prepare_checksums(tensors)]
    takes = [TRITON.prepare_checksums(tensors, to_triton), REFERENCE.prepare_checksums(tensors, to_torch)]
    seen = []
    for _ in range(3):
        for t in tensors:
            t.mul_(-1.5).add_(1)
        numbers = [made().tolist() for made in (*looks, *takes)]
        assert all(n == numbers[0] for n in numbers[1:]) and numbers[0] not in seen
        seen.append(numbers[0])
        for a, b in zip(to_triton, to_torch, strict=True):
            torch.testing.assert_close(a, b, rtol=2**-7 if DEVICE.type == "cpu" else 0, atol=0)
