"""A transfer of weights whose sender or receiver fails, gives up, is interrupted or is gone: the other one hears, and both go on."""

from __future__ import annotations

import os
import signal
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import sender
import torch
from sender import over_a_pipe, sending, some_tensors, take
from torch import Tensor

from stoker.kernels.errors import WeightsMismatchError, WeightTransferError
from stoker.weight_sync.manifest import Manifest, TensorSpec, announce
from stoker.weight_sync.staging import Staging
from stoker.weight_sync.transport import OLD_STAYS, reason_of, send_weights


def test_a_sender_that_fails_and_lives_says_why_and_sends_again() -> None:
    here, there = over_a_pipe()
    tensors = some_tensors()
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for _ in range(2):
        with sending(there, sender.Failing(tensors)) as sent:
            with pytest.raises(
                WeightTransferError, match=r"the sender gave up: OSError: no half here\. .*keeps the weights"
            ):
                take(here, targets)
            with pytest.raises(OSError, match="no half here"):
                sent.result()
        assert not any(t.any() for t in targets.values())
    with ThreadPoolExecutor(1) as pool:  # that fails after the last of its buckets
        one = Manifest((TensorSpec("scalar", (), torch.int64),), 64)
        pool.submit(lambda: [there.begin(one), there.bucket(torch.ones(8).byte()), there.finish("of no use")])
        with pytest.raises(WeightTransferError, match="the sender gave up: of no use"):
            take(here, {"scalar": torch.tensor(0)})
    with sending(there, tensors) as sent:
        take(here, targets)
        sent.result()
    assert all(torch.equal(targets[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("at", ["wanted", "second __call__", "bucket", "second bucket", "finish", "end", "write"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_receiver_that_gives_up_tells_its_sender_and_both_go_on(
    at: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its last bucket, with the only handle of the memory, was never taken."""
    here, there = over_a_pipe()
    targets = {"a": torch.zeros(40)}
    name = "_expect" if at == "end" else at.split()[-1]
    owner = Staging if name in ("wanted", "__call__", "write") else here
    original = getattr(owner, name)
    for value in (1.0, 2.0):
        calls: list[None] = []

        def fail(*given: Any, calls: list[None] = calls) -> Any:
            calls.append(None)
            wanted = given == ("end",) if at == "end" else len(calls) == 1 + at.startswith("second")
            if wanted and not (at == "finish" and given):
                raise error("enough")
            return original(*given)

        with sending(there, {"a": torch.full((40,), -value)}) as sent:
            with monkeypatch.context() as patch, pytest.raises(error):
                patch.setattr(owner, name, fail)
                take(here, targets)
            who = "the receiver" if at == "wanted" else f"the receiver, process {os.getpid()},"
            gave_up = rf"{who} gave up: {error.__name__}: enough\."
            with pytest.raises(WeightTransferError, match=gave_up):
                sent.result(60)
        with sending(there, {"a": torch.full((40,), value)}) as sent:
            take(here, targets)
            sent.result(60)
        assert targets["a"].eq(value).all()


def test_a_transfer_that_was_given_up_before_anyone_took_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver does not stay a transfer behind: it takes the next one, also where that has begun before it looks."""
    here, there = over_a_pipe()
    targets = {"a": torch.zeros(40)}
    for value in (1.0, 2.0):
        with monkeypatch.context() as patch:
            patch.setattr(there, "timeout", 0.01)
            for _ in range(2):
                with pytest.raises(WeightTransferError, match="no 'judged' from the receiver"):
                    send_weights({"a": torch.full((40,), -value)}, there)
        with sending(there, {"a": torch.full((40,), value)}) as sent:
            if value == 2.0:
                assert here.connection.poll(60) and not sent.done()
            take(here, targets)
            sent.result(60)
        assert targets["a"].eq(value).all()


def test_who_waits_for_the_next_transfer_passes_over_the_end_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the receiver gave up first, and the sender only while it waits again."""
    here, there = over_a_pipe()
    targets, waits, poll = {"a": torch.zeros(40)}, threading.Event(), here._poll
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(there.begin, announce({"a": -torch.ones(40)}, 64))
        with monkeypatch.context() as patch:
            patch.setattr(here, "timeout", 0.5)
            with pytest.raises(WeightTransferError, match="no 'bucket' from the sender"):
                take(here, targets)
        begun.result()
        monkeypatch.setattr(here, "_poll", lambda seconds: (seconds and waits.set(), poll(seconds))[1])
        taken = pool.submit(take, here, targets)
        assert waits.wait(60)
        there.finish("late")
        send_weights({"a": torch.ones(40)}, there)
        taken.result()
    assert targets["a"].eq(1).all()


def test_a_sender_that_is_interrupted_before_it_takes_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = over_a_pipe()
    targets = {"a": torch.zeros(40)}
    poll = there.connection.poll
    monkeypatch.setattr(there, "connection", Interrupting(there.connection))
    with sending(there, {"a": torch.ones(40)}) as sent:
        with pytest.raises(WeightTransferError, match="the sender gave up: KeyboardInterrupt"):
            take(here, targets)
        with pytest.raises(KeyboardInterrupt):
            sent.result(60)
    assert poll(0), "the answer to what nobody waits for any more"
    with sending(there, {"a": torch.ones(40)}) as sent:
        take(here, targets)
        sent.result(60)
    assert targets["a"].all()


class Interrupting:
    """A connection whose first wait is interrupted, when there is an answer."""

    def __init__(self, connection: Any) -> None:
        self.connection, self.polls = connection, 0

    def poll(self, timeout: float) -> bool:
        self.polls += 1
        there = bool(self.connection.poll(timeout))
        if self.polls == 1:
            raise KeyboardInterrupt
        return there

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)


def test_a_message_is_neither_cut_nor_lost_by_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives with it is there at the next call."""
    here, there = over_a_pipe()
    targets = {"a": torch.zeros(40)}
    receive_message = here.connection.recv
    seen: list[Any] = []

    class Recv:
        def __getattr__(self, name: str) -> Any:
            return getattr(there_to_here, name)

        def recv(self) -> Any:
            if not seen:
                signal.raise_signal(signal.SIGINT)
            seen.append(receive_message())
            return seen[-1]

    there_to_here = here.connection
    monkeypatch.setattr(here, "connection", Recv())
    with sending(there, {"a": torch.ones(40)}) as sent:
        with pytest.raises(KeyboardInterrupt):
            take(here, targets)
        assert [kind for kind, _, _ in seen] == ["begin"] and not targets["a"].any()
        take(here, targets)
        sent.result(60)
    assert targets["a"].all()


def test_an_interrupt_while_a_message_is_sent_cuts_it_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the other end would take what is sent next for the rest of it."""
    here, there = over_a_pipe()
    targets = {"a": torch.zeros(40)}
    descriptor = here.connection.fileno()

    def send_in_two(message: Any) -> None:
        data = bytes(ForkingPickler.dumps(message))
        data = struct.pack("!i", len(data)) + data
        assert os.write(descriptor, data[:9]) == 9
        if message[0] == "judged":
            signal.raise_signal(signal.SIGINT)
        assert os.write(descriptor, data[9:]) == len(data) - 9

    with sending(there, {"a": torch.ones(40)}) as sent:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(here.connection, "send", send_in_two)
            take(here, targets)
        with pytest.raises(WeightTransferError, match="gave up: KeyboardInterrupt"):
            sent.result(60)
    assert not targets["a"].any()
    with sending(there, {"a": torch.ones(40)}) as sent:
        take(here, targets)
        sent.result(60)
    assert targets["a"].all()


def test_a_receiver_that_is_gone() -> None:
    here, there = over_a_pipe()
    bucket = here.bucket

    def last(data: Tensor | None = None) -> Tensor:
        bucket()
        here.connection.close()
        raise SystemExit

    here.bucket = last  # type: ignore[method-assign]
    with sending(there, {"a": torch.ones(40)}) as sent:
        with pytest.raises(SystemExit):
            take(here, {"a": torch.zeros(40)})
        with pytest.raises(WeightTransferError, match=rf"the receiver, process {os.getpid()}, is gone"):
            sent.result(60)


@pytest.mark.parametrize("end", [0, 1])
def test_a_sender_that_is_gone_before_it_began(end: int) -> None:
    """Of which this process may hold the other end."""
    ends = over_a_pipe()
    ends[end].connection.close()
    with pytest.raises(WeightTransferError, match=r"the sender is gone.*keeps the weights"):
        take(ends[0], {"a": torch.zeros(40)})


def test_a_transfer_that_was_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a sender who did not hear the answer to the first one, and could not say so."""
    here, there = over_a_pipe()
    old, new = ({"a": torch.full((40,), value)} for value in (1.0, 2.0))
    targets = {"a": torch.zeros(40)}
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(take, here, targets)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(there, "connection", Interrupting(there.connection))
            patch.setattr(there, "_tell", lambda error: None)
            send_weights(old, there)
        with sending(there, new) as sent:
            anew = "gave this transfer up and began another: call update_weights again"
            with pytest.raises(WeightTransferError, match=anew):
                taken.result(60)
            assert not targets["a"].any()
            take(here, targets)
            sent.result()
    assert torch.equal(targets["a"], new["a"])


def test_what_the_other_end_is_told() -> None:
    """It says itself what its engine keeps, and an error may have no words."""
    kept = "No weight was changed: the engine keeps its version"
    assert reason_of(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert reason_of(WeightsMismatchError(f"the weights do not fit: a is new. {kept}")) == (
        "WeightsMismatchError: the weights do not fit: a is new"
    )
    assert (
        reason_of(WeightTransferError(f"the sender gave up. {OLD_STAYS}")) == "WeightTransferError: the sender gave up"
    )
    assert reason_of(OSError("a. b. the end")) == "OSError: a. b. the end"
