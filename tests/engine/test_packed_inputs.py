"""A plan's numbers in one block of memory, sent in one copy, while the device still reads those of the plan before."""

from __future__ import annotations

from itertools import count
from typing import Any

import live_setup
import numpy as np
import pytest
import torch
from family_fields import VOCAB
from live_setup import PROMPTS, long, same
from numpy.typing import NDArray
from pretend_device import PretendDevice, build, close, params, prompts
from torch import Tensor

from stoker.engine.device import CpuRuntime, CudaRuntime
from stoker.engine.packed_inputs import Channel, PackedInputs, PinnedChannel, arrays_in, place, tensors_in
from stoker.engine.step_inputs import StepInputs
from stoker.rollout import RolloutEngine, SamplingParams

CPU = torch.device("cpu")
SPECS = [
    (np.float32, (3,)),
    (np.bool_, (5,)),
    (np.int64, (2, 3)),
    (np.int64, (0,)),
    (np.bool_, (1,)),
    (np.float32, (7, 1)),
]


def filled() -> list[NDArray[Any]]:
    generator = np.random.default_rng(0)
    return [(100 * generator.random(shape) - 50).astype(dtype) for dtype, shape in SPECS]


def test_arrays_lie_apart_from_each_other_where_kernels_want_them() -> None:
    spans, nbytes = place(SPECS)
    block = torch.zeros(nbytes, dtype=torch.uint8)
    for packed, array in zip(arrays_in(block.numpy(), SPECS), filled(), strict=True):
        packed[:] = array
    for tensor, array, at in zip(tensors_in(block, SPECS), filled(), spans, strict=True):
        assert at.start % 16 == 0 and at.stop - at.start == array.nbytes
        assert torch.equal(tensor, torch.from_numpy(array))


def layout(rows: int, tokens: int) -> dict[str, Any]:
    return {"flags": (np.bool_, (rows,)), "ids": (np.int64, (tokens,)), "weights": (np.float32, (rows, 3))}


def test_arrays_of_the_same_sizes_are_always_the_same_tensors_of_one_memory() -> None:
    packed = PackedInputs(layout, (8, 100), lambda nbytes: Channel(nbytes, CPU))
    seen: dict[tuple[int, int], list[int]] = {}
    for turn in range(3):
        for sizes in [(1, 7), (8, 100), *((3, n) for n in range(80)), (1, 7)]:  # more than are remembered
            arrays, send = packed.open(*sizes)
            for name, array in arrays.items():
                array[:] = turn + len(name)
            tensors = send()
            for name, tensor in tensors.items():
                assert (
                    tensor.shape == arrays[name].shape
                    and (tensor == (turn + len(name) if name != "flags" else 1)).all()
                )
            places = [t.data_ptr() for t in tensors.values()]
            assert seen.setdefault(sizes, places) == places
            assert len(packed._views) <= 64, "what long prompts leave is given up"
    assert len(seen) == 82


def test_no_more_is_sent_than_was_asked_for() -> None:
    sent: list[int] = []

    class Noting(Channel):
        def send(self, block: int, nbytes: int) -> None:
            sent.append(nbytes)

    packed = PackedInputs(layout, (8, 100), lambda nbytes: Noting(nbytes, CPU))
    for sizes in ((1, 7), (8, 100)):
        packed.open(*sizes)[1]()
    assert sent == [16 + 64 + 12, 16 + 800 + 96]


Log = list[tuple[str, int]]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """What is asked of events, by their numbers, where a CPU stands in for a CUDA device."""
    log: Log = []
    numbers = count()

    class Event:
        def __init__(self) -> None:
            self.number = next(numbers)

        def record(self, stream: object) -> None:
            log.append(("sent", self.number))

        def synchronize(self) -> None:
            log.append(("waited", self.number))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(CudaRuntime, "staging_memory", CpuRuntime.staging_memory)
    return log


def test_a_block_is_written_again_only_when_its_copy_is_over(log: Log) -> None:
    channel = PinnedChannel(64, CPU, depth=3)
    blocks = [b.ctypes.data for b in channel.blocks]
    assert len(set(blocks)) == 3 and channel.static.data_ptr() not in blocks
    for turn in range(7):
        block = channel.open()
        assert block == turn % 3 and log[-1] == ("waited", block)
        channel.blocks[block][:] = turn + 1
        channel.static.fill_(100)
        channel.send(block, 40)
        assert log[-1] == ("sent", block)
        assert channel.static.tolist() == [turn + 1] * 40 + [100] * 24


def test_what_is_uploaded_besides_is_one_block_of_memory(log: Log) -> None:
    tensors = CudaRuntime(CPU).upload(*filled())
    assert len({t.untyped_storage().data_ptr() for t in tensors if t.numel()}) == 1
    for tensor, array in zip(tensors, filled(), strict=True):
        assert torch.equal(tensor, torch.from_numpy(array)) and tensor.dtype == torch.from_numpy(array).dtype


class Garbled(PinnedChannel):
    """Blocks come with garbage in them, and the device's copy of the last plan is overwritten before the next is sent."""

    def open(self) -> int:
        block = super().open()
        self.blocks[block][:] = 0xA5
        return block

    def send(self, block: int, nbytes: int) -> None:
        self.static.fill_(0x5A)
        super().send(block, nbytes)


class CountingDevice(PretendDevice):
    def channel(self, nbytes: int) -> Channel:
        return Garbled(nbytes, self.device, self.ahead + 1)

    def upload(self, *arrays: NDArray[Any]) -> list[Tensor]:
        return CudaRuntime(CPU).upload(*arrays)


def test_a_rollout_reads_nothing_it_was_not_sent(log: Log) -> None:
    with build(runtime=CpuRuntime) as plain:
        expected = plain.generate_batch(prompts(17), params(17))
        scores = plain.score(prompts(5), top_k=2)
    with build(runtime=CountingDevice, max_num_batched_tokens=24) as engine:
        for _ in range(2):
            close(engine.generate_batch(prompts(17), params(17)), expected)
        for one, other in zip(engine.score(prompts(5), top_k=2), scores, strict=True):
            torch.testing.assert_close(one.logprobs, other.logprobs)
            assert torch.equal(one.top_ids, other.top_ids) and torch.equal(one.ranks, other.ranks)


def copies_of_plans(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Whether each plan brings new blocks, and how many copies it is sent in."""
    found: list[tuple[bool, int]] = []
    copies: list[int] = []  # bytes of each
    fill, upload, send = engine.core.inputs.fill, CountingDevice.upload, Garbled.send

    def filled(plan: Any) -> Any:
        new = any(r.first_new_block < len(r.block_ids) for r in plan.requests)
        copies.clear()
        batch = fill(plan)
        found.append((new, sum(size > 0 for size in copies)))
        return batch

    def uploaded(self: CountingDevice, *arrays: NDArray[Any]) -> list[Tensor]:
        copies.append(sum(a.nbytes for a in arrays))
        return upload(self, *arrays)

    def sent(self: Garbled, block: int, nbytes: int) -> None:
        copies.append(nbytes)
        send(self, block, nbytes)

    monkeypatch.setattr(engine.core.inputs, "fill", filled)
    monkeypatch.setattr(CountingDevice, "upload", uploaded)
    monkeypatch.setattr(Garbled, "send", sent)
    return found


def test_a_plan_is_one_copy_and_one_more_where_it_has_new_blocks(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    with build(runtime=CountingDevice, block_size=8, max_num_batched_tokens=24) as engine:
        found = copies_of_plans(engine, monkeypatch)
        settings = SamplingParams(seed=1, max_tokens=30, stop_token_ids=list(range(0, VOCAB, 30)))
        engine.generate_batch(prompts(9), settings).raise_for_errors()
        assert set(found) == {(False, 1), (True, 2)}
        found.clear()
        engine.score(prompts(3))
        assert max(copies for _, copies in found) == 2


def test_a_list_of_many_ids_is_sent_with_no_plan_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, widths = StepInputs._sampling, list[tuple[int, int]]()

    def noted(self: StepInputs, plan: Any, tensors: Any) -> Any:
        rows = sent(self, plan, tensors)
        widths.append((rows.stop_ids.shape[1], rows.biased.shape[1]))
        assert rows.bias.shape == rows.biased.shape
        return rows

    monkeypatch.setattr(StepInputs, "_sampling", noted)
    many = long(suppress_token_ids=range(5, 125), stop_token_ids=range(3))
    with live_setup.build() as engine:
        first = engine.generate_batch(PROMPTS, long())
        assert {*widths} == {(1, 1)}
        limited = engine.generate_batch(PROMPTS, many)
        assert {t for o in limited for t in o.completions[0].token_ids} <= {*range(5), *range(125, 128)}
        assert widths[-1] == (4, 128)
        assert same(engine.generate_batch(PROMPTS, long()), first)
        assert widths[-1] == (4, 64)
        mixed = engine.generate_batch(PROMPTS, [many, *[long()] * 3])
        assert same(mixed, [limited[0], *list(first)[1:]])


def test_lists_that_find_no_room_leave_none_wider_than_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias that is narrower than its ids would be added to all of them."""
    many = long(logit_bias={t: float(t % 7) for t in range(30)})
    with live_setup.build() as engine:
        expected = engine.generate_batch(PROMPTS, many)
    with live_setup.build() as engine:
        first = engine.generate_batch(PROMPTS, long())
        with monkeypatch.context() as patch:
            patch.setattr(StepInputs, "_new_packed", lambda *_: (_ for _ in ()).throw(MemoryError("none left")))
            with pytest.raises(MemoryError, match="none left"):
                engine.generate_batch(PROMPTS, many)
        assert same(engine.generate_batch(PROMPTS, long()), first)
        assert same(engine.generate_batch(PROMPTS, many), expected)
