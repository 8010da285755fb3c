"""What a transfer of weights is made of: buckets and messages, of which none is lost, cut or taken for another."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from sender import Kept, over_a_pipe, sending, some_tensors, take
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.kernels.errors import WeightTransferError
from stoker.weight_sync.manifest import announce
from stoker.weight_sync.transport import SharedMemoryTransfer, send_weights


@pytest.mark.parametrize("bucket_bytes", [1, 9, 50, 1001])
@pytest.mark.parametrize("way", ["transfer", "pairs"])
def test_tensors_of_any_size_and_dtype_travel_together(bucket_bytes: int, way: str) -> None:
    """Into tensors of other floating-point dtypes and other strides as well. Integers are finite, too."""
    tensors = some_tensors()
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    targets["half"] = targets["half"].double()
    targets["single"] = torch.zeros(3, 5).t()
    if way == "pairs":
        take(iter(tensors.items()), targets, finite=True)
    else:
        here, there = over_a_pipe()
        with sending(there, tensors, bucket_bytes) as sent:
            take(here, targets, finite=True)
            sent.result()
    assert [name for name in tensors if not torch.equal(targets[name], tensors[name].to(targets[name]))] == []


def test_the_device_is_waited_for_before_the_other_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose process does not see the streams of this one: of what is written to the bucket, and of what reads it."""
    done: dict[str, list[str]] = {}
    send, ends = SharedMemoryTransfer._send, {threading.get_ident(): "receiver"}

    def note(what: str) -> None:
        done.setdefault(ends.get(threading.get_ident(), "sender"), []).append(what)

    def noted(self: SharedMemoryTransfer, kind: str, content: Any) -> None:
        note(kind)
        send(self, kind, content)

    monkeypatch.setattr(SharedMemoryTransfer, "_send", noted)
    monkeypatch.setattr(torch.cpu, "synchronize", lambda device=None: note("waits"))
    here, there = over_a_pipe()
    with sending(there, {"a": torch.ones(5)}, 8) as sent:
        take(here, {"a": torch.zeros(5)})
        sent.result()
    assert done["sender"] == ["begin", *["waits", "bucket"] * 3, "end"]
    assert done["receiver"] == ["judged", *["waits", "taken"] * 3, "ended"]


@pytest.mark.parametrize("how", ["short", "long", "lost", "twice"])
def test_a_bucket_of_another_size_than_announced(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = over_a_pipe()
    whole, passed = here.bucket, list[Tensor]()
    # Of buckets of 16, 16 and 4 bytes: the second one, cut or doubled, the third in its place, or again in place of the third.
    of_second = {"short": lambda d: d[:-3], "long": lambda d: torch.cat([d, d]), "lost": lambda _: whole()}

    def bucket() -> Tensor:
        data = passed[1] if how == "twice" and len(passed) == 2 else whole().clone()
        passed.append(of_second[how](data) if how != "twice" and len(passed) == 1 else data)
        return passed[-1]

    monkeypatch.setattr(here, "bucket", bucket)
    target = {"a": torch.zeros(9)}
    with sending(there, {"a": torch.ones(9)}, 16) as sent:
        with pytest.raises(WeightTransferError, match=r"a bucket has \d+ bytes, and (4|16) were announced"):
            take(here, target)
        with pytest.raises(WeightTransferError, match="were announced"):
            sent.result()
    assert not target["a"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_that_come_in_another_order(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one size, with no way to tell them but by what is in them."""
    here, there = over_a_pipe()
    send, kept = there.bucket, list[Tensor]()

    def swapped(data: Tensor) -> Tensor:
        kept.append(data.clone())
        if len(kept) == 2:
            send(kept[1])
            send(kept[0])
        return data

    monkeypatch.setattr(there, "bucket", swapped)
    target = {"a": torch.zeros(4, dtype=dtype), "b": torch.zeros(4, dtype=dtype)}
    with sending(there, {"a": torch.ones(4), "b": torch.ones(4) * 2}, 16) as sent:
        with pytest.raises(WeightTransferError, match="a, b came otherwise than announced"):
            take(here, target)
        with pytest.raises(WeightTransferError, match="came otherwise than announced"):
            sent.result()
    assert not target["a"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_written_to_while_they_are_sent(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a trainer that goes on: half of a tensor would be of one step, half of the next."""
    here, there = over_a_pipe()
    send, tensor, target = there.bucket, torch.ones(8), {"a": torch.zeros(8, dtype=dtype)}

    def step_behind(data: Tensor) -> Tensor:
        try:
            return send(data)
        finally:
            tensor.add_(1)

    monkeypatch.setattr(there, "bucket", step_behind)
    with sending(there, {"a": tensor}, 16) as sent:
        with pytest.raises(WeightTransferError, match="a came otherwise than announced: the sender wrote to them"):
            take(here, target)
        with pytest.raises(WeightTransferError, match="came otherwise"):
            sent.result()
    assert not target["a"].any()


def test_a_transfer_without_any_element() -> None:
    here, there = over_a_pipe()
    for tensors in ({"none": torch.empty(0, 4)}, {}, {"none": torch.empty(0, 4)}):
        with sending(there, tensors) as sent:
            take(here, dict(tensors))
            sent.result()


def test_a_tensor_is_made_contiguous_once_for_all_its_buckets() -> None:
    tensors = {"turned": torch.randn(64, 48).t(), "expanded": torch.randn(1, 300).expand(7, 300), "b": torch.randn(500)}

    class Counting(TorchDispatchMode):
        copied = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
                self.copied += args[0].numel()
            return func(*args, **(kwargs or {}))

    transfer = Kept()
    with Counting() as counting:
        send_weights(tensors, transfer, bucket_bytes=100)
    sent_bytes = sum(t.nbytes for t in tensors.values())
    came = torch.cat(transfer.came)
    assert came.nbytes == sent_bytes, "which the transfer here copies as well"
    assert counting.copied == 2 * (64 * 48 + 7 * 300) + sent_bytes, "and once for their checksums"
    assert torch.equal(came.view(torch.float32), torch.cat([t.reshape(-1) for t in tensors.values()]))


def test_buckets_hold_a_number_of_the_widest_dtype_whatever_they_are_to_take() -> None:
    transfer = Kept()
    send_weights({"a": torch.randn(3, dtype=torch.complex128)}, transfer, bucket_bytes=1)
    assert [len(bucket) for bucket in transfer.came] == [16] * 3


def test_what_is_to_travel_comes_in_one_order_at_both_ends() -> None:
    """Whichever a transfer of a user's own has for what is wanted: of tensors that are cast no checksum would tell."""
    manifest = announce({name: torch.zeros(2) for name in "abc"}, 8)
    assert [[s.name for s in manifest.only(numbers).specs] for numbers in ([2, 0], (0, 2), {2, 0})] == [["a", "c"]] * 3


def test_memory_is_opened_once_and_kept_for_later_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first bucket is not the largest."""
    here, there = over_a_pipe()
    handles: list[int] = []
    send = there._send

    def note(kind: str, content: Any) -> None:
        if kind == "bucket":
            handles.append(0 if content[0] is None else content[0].numel())
        send(kind, content)

    monkeypatch.setattr(there, "_send", note)
    tensors = {"wide": torch.randn(3, dtype=torch.float64), "narrow": torch.arange(20).to(torch.uint8)}
    for number in range(3):
        targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        with sending(there, tensors, 9) as sent:
            take(here, targets)
            sent.result(60)
        assert all(torch.equal(targets[name], tensors[name]) for name in tensors)
        assert handles == [9] + [0] * (6 * number + 5), "8 bytes, three times, then 9, 9, 2"
        assert here._shared is not None and there._shared is not None
    place = here._shared.data_ptr()
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with sending(there, tensors, 44) as sent:
        take(here, targets)
        sent.result(60)
    assert handles[18:] == [44] and here._shared.data_ptr() != place, "a larger one"
