"""Transfers weights from a trainer in another process: over a process group, or through shared memory.

A trainer calls ``send_weights(tensors, transfer)``; an engine takes the other end: ``engine.update_weights(transfer)``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.multiprocessing  # registers how tensors travel through a Connection: by handle, not by value
from torch import Tensor

from stoker.kernels.errors import WeightTransferError, first_line
from stoker.kernels.interrupts import uninterrupted
from stoker.weight_sync.manifest import Answer, Judge, Manifest, announce, answer

BUCKET_BYTES = 256 * 2**20
OLD_STAYS = "The engine keeps the weights and the version it had"


@runtime_checkable
class WeightTransfer(Protocol):
    """One end of a way for weights.

    Each end calls ``begin``, then ``bucket`` as often as there are buckets, then ``finish``. All raise
    ``WeightTransferError`` where the other end has failed, refuses, or is not heard of in time.
    """

    def begin(self, manifest: Manifest | None = None, judge: Judge | None = None) -> Manifest:
        """The sender gives ``manifest``, of all there is; a receiver gets it, and may refuse it by ``judge``.

        Returns what is to travel, the same at all ends: ``manifest``, or of it ``only`` what ``judge.wanted`` says
        at any of the receivers.
        """

    def bucket(self, data: Tensor | None = None) -> Tensor:
        """The sender passes on ``data``, uint8 [n]; a receiver gets it, to be read before its next call."""

    def finish(self, error: str | None = None) -> None:
        """No more to come, or never: ``error`` says why this end gives up, for the other one to know where it can be told."""


def send_weights(tensors: Mapping[str, Tensor], transfer: WeightTransfer, *, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Send named tensors to the engine at the other end of ``transfer``, whose ``update_weights`` is given that end.

    tensors: all of the model's, by its names, in any floating-point dtype. Only tensors that some receiver does not hold
    already are sent, in flat buckets of at most ``bucket_bytes``. Both ends read their weights once, at memory speed, and
    compare checksums. If by rare chance (see ``stoker.kernels.reference.checksum``) a changed tensor has the same checksum, it
    is not sent. Where an engine has another dtype, a tensor has to be sent once before it can be recognised.

    Raises ``WeightTransferError`` where the other end refuses, fails, or is not heard of in time.
    """
    manifest = transfer.begin(announce(tensors, bucket_bytes))
    try:
        device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
        buffer = torch.empty(manifest.largest, dtype=torch.uint8, device=device)
        name, flat = "", buffer
        for bucket in manifest.buckets():
            end = 0
            for spec, start, count in bucket:
                if spec.name != name:  # what is not contiguous is copied here, once for all its buckets
                    name, flat = spec.name, tensors[spec.name].detach().contiguous().view(-1)
                size = count * spec.dtype.itemsize
                buffer[end : end + size].copy_(flat[start : start + count].view(torch.uint8))
                end += size
            transfer.bucket(buffer[:end])
    except WeightTransferError:
        raise
    except BaseException as error:
        transfer.finish(reason_of(error))
        raise
    transfer.finish()


def reason_of(error: BaseException) -> str:
    """For the other end, which says itself what its engine keeps."""
    said = re.sub(r"\. [^.]*\bthe engine keeps [^.]*$", "", str(error), flags=re.IGNORECASE)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


class _Conversation:
    """The messages (kind, transfer id, content) of one transfer at a time. What an earlier transfer left behind is skipped."""

    _id = 0
    _sends = False
    _other = "the sender"
    _ahead: tuple[str, int, Any] | None = None  # a message that came before it was waited for

    def _next(self, kind: str) -> tuple[str, int, Any]:
        """The next message, which should be of that kind."""
        raise NotImplementedError

    def _expect(self, kind: str) -> Any:
        """The content of this transfer's next message. Raises ``WeightTransferError`` where it is of another kind."""
        while True:
            came, transfer_id, content = self._ahead or self._next(kind)
            self._ahead = None
            if came == kind == "begin" or (came, transfer_id) == (kind, self._id):
                return content
            if kind == "begin":
                continue
            if came == "begin":
                self._ahead = came, transfer_id, content
                raise WeightTransferError(
                    f"the sender gave this transfer up and began another: call update_weights again for it. {OLD_STAYS}"
                )
            if transfer_id == self._id:
                raise WeightTransferError(f"{self._other} gave up: {content or came}. {OLD_STAYS}")


class BroadcastTransfer(_Conversation):
    """From one rank of a process group to all others, over NCCL or Gloo. Every rank makes one, and all use it together.

    A receiver that gives up takes what is left, for the others' sake, and the sender hears of it at the end.

    group: its ranks are the sender and the engines; its time-out bounds every wait. src: the sender's global rank.
    device: where the receivers' buckets lie (for NCCL: this rank's GPU).
    """

    _KINDS = ("begin", "bucket", "end", "abort")

    def __init__(
        self,
        src: int,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.src, self.group, self.device = src, group, torch.device(device)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._under_way = False  # a transfer, of which messages are to come

    def begin(self, manifest: Manifest | None = None, judge: Judge | None = None) -> Manifest:
        self._sends = manifest is not None
        if manifest is None:
            manifest = self._expect("begin")
            assert manifest is not None
        self._id = manifest.transfer_id
        failure: BaseException | None = None
        mine: Answer = (None, ())
        if not self._sends:
            try:
                mine = answer(judge, manifest)
            except BaseException as error:  # the others wait for an answer
                failure, mine = error, (reason_of(error), ())
        answers: list[Answer] = []
        try:
            with uninterrupted():  # as half of it would leave the ranks out of step
                if self._sends:
                    self._send("begin", manifest)
                answers = self._exchange("agreeing on what is to come", mine)
        except KeyboardInterrupt as error:
            if answers and not any(refusal for refusal, _ in answers):
                self._under_way = True
                self.finish(reason_of(error))
            raise
        if failure is not None:
            raise failure
        refused = [refusal for refusal, _ in answers if refusal is not None]
        if refused and mine[0] is None:
            raise WeightTransferError(f"a receiver refuses: {refused[0]}")
        self._under_way = not refused
        return manifest if refused else manifest.only(set().union(*(wanted for _, wanted in answers)))

    def bucket(self, data: Tensor | None = None) -> Tensor:
        if data is None:
            received: Tensor = self._expect("bucket")
            return received
        self._send("bucket", data)
        return data

    def finish(self, error: str | None = None) -> None:
        if self._sends and error is not None:
            self._send("abort", error)
            return
        with uninterrupted():
            if self._sends:
                self._send("end", None)
            elif error is None:
                self._expect("end")
            elif not self._skip_to_the_end():
                return
            outcomes = self._exchange("hearing whether all came", error)
            self._under_way = False
        self._buffer = self._buffer.new_empty(0)
        if self._sends and (reasons := [reason for reason in outcomes if reason is not None]):
            raise WeightTransferError(f"a receiver gave up: {reasons[0]}")

    def _skip_to_the_end(self) -> bool:
        """Take what is left of a transfer, as the others would wait for this receiver; returns whether there was an end."""
        with suppress(WeightTransferError):  # whoever was lost, the transfer was given up before
            while self._under_way:
                kind, transfer_id, _ = self._ahead or self._next("end")
                if kind == "begin":
                    return False
                self._ahead = None
                if (kind, transfer_id) == ("end", self._id):
                    return True
        return False

    def _send(self, kind: str, content: Any) -> None:
        size = content.numel() if kind == "bucket" else 0
        with uninterrupted():  # or the others would take what is sent next for the rest of it
            self._header("passing a bucket on", self._KINDS.index(kind), self._id, size)
            if kind == "bucket":
                self._with_others("passing a bucket on", lambda: dist.broadcast(content, self.src, self.group))
            elif kind != "end":
                self._object(content)

    def _next(self, kind: str) -> tuple[str, int, Any]:
        with uninterrupted():
            number, transfer_id, size = self._header(f"waiting for a {kind}", 0, 0, 0)
            came = self._KINDS[number]
            content: Any = None
            if came == "bucket":
                if self._buffer.numel() < size:
                    self._buffer = self._buffer.new_empty(size)
                content = self._buffer[:size]
                self._with_others("passing a bucket on", lambda: dist.broadcast(content, self.src, self.group))
            elif came != "end":
                content = self._object(None)
                self._under_way = False
            self._ahead = came, transfer_id, content  # and not lost where an interrupt comes now
        return self._ahead

    def _header(self, doing: str, *numbers: int) -> list[int]:
        """Broadcast or receive the sender's numbers: kind of message, id of its transfer, bytes of the bucket that follows."""
        header = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        self._with_others(doing, lambda: dist.broadcast(header, self.src, self.group))
        received: list[int] = header.tolist()
        return received

    def _object(self, content: Any) -> Any:
        there = [content]
        self._with_others(
            "agreeing on what is to come", lambda: dist.broadcast_object_list(there, self.src, self.group, self.device)
        )
        return there[0]

    def _exchange(self, doing: str, mine: Any) -> list[Any]:
        """What each rank says."""
        said = [mine] * dist.get_world_size(self.group)
        self._with_others(doing, lambda: dist.all_gather_object(said, mine, self.group))
        return said

    def _with_others(self, doing: str, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            self._under_way = False
            who = "a receiver" if dist.get_rank() == self.src else f"the sender, rank {self.src},"
            raise WeightTransferError(f"{who} was lost while {doing}: {first_line(error)}. {OLD_STAYS}") from error


class SharedMemoryTransfer(_Conversation):
    """Between two processes of one host, through one bucket of memory that both have open: CUDA IPC, or shared memory.

    connection: a ``multiprocessing`` Connection (of a Pipe, Client or Listener) to the other process; it carries the
    bucket's handle once and then only notices. timeout: seconds to wait for any of them. Keep the object for the next
    update: the bucket stays open. The sender's tensors decide where the bucket lies.
    """

    def __init__(self, connection: Connection, *, timeout: float = 60.0) -> None:
        self.connection, self.timeout = connection, timeout
        self._shared: Tensor | None = None  # the bucket, which the other process has open too
        self._largest = 0  # bytes of a bucket of this transfer
        self._in_use = False

    def begin(self, manifest: Manifest | None = None, judge: Judge | None = None) -> Manifest:
        self._in_use = False
        self._sends = manifest is not None
        if manifest is not None:
            self._other, self._id, self._largest = "the receiver", manifest.transfer_id, manifest.largest
            try:
                self._send("begin", manifest)
                process, refusal, wanted = self._expect("judged")
            except BaseException as error:
                self._tell(reason_of(error))
                raise
            self._other = f"the receiver, process {process},"
            if refusal is not None:
                raise WeightTransferError(f"{self._other} refuses: {refusal}")
            return manifest.only(wanted)
        self._other = "the sender"
        self._skip_given_up()
        manifest = self._expect("begin")
        assert manifest is not None
        self._id = manifest.transfer_id
        try:
            refusal, wanted = answer(judge, manifest)
            self._send("judged", (os.getpid(), refusal, wanted))
            return manifest if refusal is not None else manifest.only(wanted)
        except BaseException as error:
            self._tell(reason_of(error))
            raise

    def bucket(self, data: Tensor | None = None) -> Tensor:
        if data is None:
            self._taken()
            fresh, size = self._expect("bucket")
            self._shared = self._shared if fresh is None else fresh
            self._in_use = True
            assert self._shared is not None
            return self._shared[:size]
        shared = self._shared
        if shared is None or shared.numel() < data.numel() or shared.device != data.device:
            self._shared, shared = None, data.new_empty(max(self._largest, data.numel()))
            shared.share_memory_()  # type: ignore[no-untyped-call]
        shared[: data.numel()].copy_(data)
        _synchronize(data)
        self._send("bucket", (shared if self._shared is None else None, data.numel()))
        self._expect("taken")
        self._shared = shared
        return data

    def finish(self, error: str | None = None) -> None:
        if error is not None:
            self._tell(error)
        elif self._sends:
            self._send("end", None)
            self._expect("ended")
        else:
            self._taken()
            self._expect("end")
            self._send("ended", None)

    def _skip_given_up(self) -> None:
        """Skip transfers that the sender gave up before anyone took them: taking one late would make the next one late."""
        while self._poll(0):
            message = self._next("begin")
            self._ahead = message if message[0] == "begin" else None

    def _tell(self, error: str) -> None:
        with suppress(WeightTransferError):  # there may be nobody left to be told
            self._send("abort", error)

    def _taken(self) -> None:
        if self._in_use:
            assert self._shared is not None
            _synchronize(self._shared)
            self._in_use = False
            self._send("taken", None)

    def _send(self, kind: str, content: Any) -> None:
        try:
            with uninterrupted():  # half a message could not be told from the next one
                self.connection.send((kind, self._id, content))
        except (OSError, EOFError) as error:
            raise self._gone(error) from error

    def _next(self, kind: str) -> tuple[str, int, Any]:
        if not self._poll(self.timeout):
            raise WeightTransferError(f"no {kind!r} from {self._other} in {self.timeout} s. {OLD_STAYS}")
        try:
            with uninterrupted():
                self._ahead = self.connection.recv()  # kept there, so that an interrupt does not lose it
        except (OSError, EOFError) as error:
            raise self._gone(error) from error
        assert self._ahead is not None
        return self._ahead

    def _poll(self, seconds: float) -> bool:
        try:
            return self.connection.poll(seconds)
        except (OSError, EOFError) as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> WeightTransferError:
        return WeightTransferError(f"{self._other} is gone ({error!r}). {OLD_STAYS}")


def _synchronize(tensor: Tensor) -> None:
    """Wait for what was queued on the tensor's device: the other process does not see this one's streams."""
    torch.get_device_module(tensor.device).synchronize(tensor.device)  # which need not be the current one
