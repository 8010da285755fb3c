"""The trainer's side of a transfer of weights, and an engine's. Each can run in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from families import make_model
from torch import Tensor

from stoker.kernels.errors import WeightsMismatchError, WeightTransferError
from stoker.rollout import EngineConfig, RolloutEngine, SamplingParams
from stoker.weight_sync.receiving import receive
from stoker.weight_sync.staging import Known, Staging, copy_each
from stoker.weight_sync.transport import BroadcastTransfer, SharedMemoryTransfer, send_weights

CONFIG = EngineConfig(kv_cache_memory="1MiB", max_model_len=64)
BUCKET_BYTES = 10_000  # several buckets, and weights that are cut in two


def trained(steps: int) -> Any:
    """The model after so many steps of a training that every process can repeat."""
    torch.manual_seed(7)
    model = make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    ids = torch.randint(1, 100, (2, 12))
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def check(engine: RolloutEngine, model: Any, version: int) -> None:
    (completion,) = engine.generate_batch([[5, 4, 3]], SamplingParams(max_tokens=6, seed=1))[0].completions
    assert set(completion.weight_versions) == {version}
    expected = oracle.logprobs(model, [5, 4, 3], completion.token_ids)
    torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4)


class Failing(dict[str, Any]):
    """Tensors of which one cannot be read, after others have been."""

    def __getitem__(self, name: str) -> Any:
        if name in ("half", "model.layers.1.mlp.down_proj.weight"):
            raise OSError("no half here")
        return super().__getitem__(name)


class Counted:
    """A transfer of a user's own: it counts the bytes that pass, and notes what is agreed on."""

    def __init__(self, transfer: Any) -> None:
        self.transfer, self.passed = transfer, 0
        self.coming: set[str] = set()

    def begin(self, manifest: Any = None, judge: Any = None) -> Any:
        self.passed = 0
        manifest = self.transfer.begin(manifest, judge)
        self.coming = {spec.name for spec in manifest.specs}
        return manifest

    def bucket(self, data: Any = None) -> Any:
        data = self.transfer.bucket(data)
        self.passed += data.numel()
        return data

    def finish(self, error: str | None = None) -> None:
        self.transfer.finish(error)


FEW = ("model.layers.1.mlp.down_proj.weight", "model.norm.weight")
ONE = "model.layers.0.self_attn.q_proj.weight"


def changed(model: Any, *names: str) -> Any:
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).mul_(1.5)
    return model


def size(model: Any, *names: str) -> int:
    """Bytes of the named parameters; without names, of all that are sent."""
    return sum(p.nbytes for n, p in model.named_parameters() if n in names or not names)


def broadcast_few(rank: int, transfer: BroadcastTransfer, engine: RolloutEngine | None) -> None:
    """Two engines that hold different weights, of which one does not answer once."""
    counted, version = Counted(transfer), 10
    models = [changed(trained(3), *names) for names in ((), FEW, FEW, FEW)]
    for number, model in enumerate(models):
        if engine is None:
            with suppress(WeightTransferError) if number == 2 else nullcontext():
                send_weights(dict(model.named_parameters()), counted, bucket_bytes=1000)
                assert number != 2, "sent to one who did not answer"
        else:
            if rank == 2:
                for name in [(), (ONE, *FEW), (ONE,), ()][number]:
                    engine._binding.source.tensors()[name].detach().mul_(1.5)
            with pytest.MonkeyPatch.context() as patch:
                if number == 2 and rank == 1:
                    patch.setattr(Staging, "wanted", interrupted)
                try:
                    version = engine.update_weights(counted, version=version + 1)
                    assert number != 2
                except (KeyboardInterrupt, WeightTransferError) as error:
                    told = "a receiver refuses: KeyboardInterrupt" in str(error)
                    assert number == 2 and (isinstance(error, KeyboardInterrupt) if rank == 1 else told)
            if number != 2 or rank == 1:
                check(engine, model, version)
        expected = [0, size(model, *FEW, ONE), 0, size(model, ONE)][number]
        assert counted.passed == expected, (rank, number, counted.passed, expected)


def broadcast(rank: int) -> None:
    """Rank 0 trains, the others generate with it, through a misnamed tensor, a failure and an interrupt."""
    transfer = BroadcastTransfer(0)
    if rank == 0:
        for steps in (1, 2):
            send_weights(dict(trained(steps).named_parameters()), transfer, bucket_bytes=BUCKET_BYTES)
        wrong = {n.replace("q_proj", "query"): p for n, p in trained(3).named_parameters()}
        try:
            send_weights(wrong, transfer, bucket_bytes=BUCKET_BYTES)
        except WeightTransferError as error:
            assert "a receiver refuses" in str(error) and "query" in str(error)
        else:
            raise AssertionError("sent what nobody can take")
        with suppress(OSError):
            send_weights(Failing(trained(3).named_parameters()), transfer, bucket_bytes=BUCKET_BYTES)
        try:
            send_weights(dict(trained(3).named_parameters()), transfer, bucket_bytes=2 * BUCKET_BYTES)
        except WeightTransferError as error:
            assert "a receiver gave up: KeyboardInterrupt" in str(error)
        else:
            raise AssertionError("sent to one who was interrupted")
        send_weights(dict(trained(3).named_parameters()), transfer, bucket_bytes=2 * BUCKET_BYTES)
        return broadcast_few(rank, transfer, None)
    with RolloutEngine(trained(0), config=CONFIG) as engine:
        for steps in (1, 2):
            assert engine.update_weights(transfer) == steps
            check(engine, trained(steps), steps)
            assert not transfer._buffer.numel(), "a bucket's memory is kept between updates"
        try:
            engine.update_weights(transfer)
        except ValueError as error:
            assert "query" in str(error) and "q_proj" in str(error)
        else:
            raise AssertionError("took what does not fit")
        try:
            engine.update_weights(transfer)
        except WeightTransferError as error:
            assert "gave up: OSError: no half here" in str(error) and "keeps the weights" in str(error)
        else:
            raise AssertionError("took a part")
        if rank == 1:  # is interrupted, and takes what is left of that transfer for the others' sake
            original, transfer.bucket = transfer.bucket, interrupted  # type: ignore[method-assign]
            try:
                engine.update_weights(transfer)
            except KeyboardInterrupt:
                transfer.bucket = original  # type: ignore[method-assign]
        check(engine, trained(2), 2)
        assert engine.update_weights(transfer) == 3
        if rank == 2:
            assert engine.update_weights(transfer) == 4
        check(engine, trained(3), 2 + rank)
        broadcast_few(rank, transfer, engine)


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def broadcast_and_die(rank: int) -> str:
    """Rank 0 is gone after its first bucket; the receiver says so in time and keeps what it had."""
    transfer = BroadcastTransfer(0)
    if rank == 0:
        original = transfer.bucket

        def last(data: Any = None) -> Any:
            original(data)
            os._exit(1)

        transfer.bucket = last  # type: ignore[method-assign]
        send_weights(dict(trained(1).named_parameters()), transfer, bucket_bytes=BUCKET_BYTES)
    with RolloutEngine(trained(0), config=CONFIG) as engine:
        try:
            engine.update_weights(transfer)
        except WeightTransferError as error:
            check(engine, trained(0), 0)
            return str(error)
        raise AssertionError("took weights from nobody")


def broadcast_through_interrupts(rank: int, interrupted_rank: int) -> None:
    """Ctrl-C comes in each collective of a transfer in turn, at one end: the other end hears, and both go on."""
    transfer, targets, left = BroadcastTransfer(0), {"a": torch.zeros(5)}, 0

    def interrupting(collective: Any) -> Any:
        def call(*given: Any) -> None:
            nonlocal left
            collective(*given)
            left -= 1
            if left == 0 and rank == interrupted_rank:
                signal.raise_signal(signal.SIGINT)

        return call

    for name in ("broadcast", "broadcast_object_list", "all_gather_object"):
        setattr(dist, name, interrupting(getattr(dist, name)))
    for number in range(1, 11):  # there are nine
        left = number
        if rank == 0:
            with suppress(KeyboardInterrupt, WeightTransferError):
                send_weights({"a": torch.full((5,), -float(number))}, transfer, bucket_bytes=16)
            assert left <= 0 or number == 10, left
            left = 0
            send_weights({"a": torch.full((5,), float(number))}, transfer, bucket_bytes=16)
        while rank and not targets["a"].eq(number).all():
            try:
                take(transfer, targets)
            except (KeyboardInterrupt, WeightTransferError) as error:
                assert rank == interrupted_rank or "gave up: KeyboardInterrupt" in str(error)
            left = 0


def broadcast_what_is_refused(rank: int) -> None:
    """What one of two receivers can only refuse when it is there: the sender hears so at once, and the other one takes it."""
    transfer, targets = BroadcastTransfer(0), {"a": torch.zeros(5), "b": torch.zeros(5)}
    wrong = {"a": torch.full((5,), torch.nan), "b": torch.ones(5)}
    if rank == 0:
        with pytest.raises(WeightTransferError, match="a receiver gave up: WeightsMismatchError: .*a holds NaN or Inf"):
            send_weights(wrong, transfer, bucket_bytes=8)
    elif rank == 1:
        with pytest.raises(WeightsMismatchError, match="a holds NaN or Inf"):
            _commit(receive(transfer, targets, (), check_finite=True))
    else:
        take(transfer, targets)
    dist.barrier()  # nobody waits in the transfer any more
    assert targets["b"].eq(rank == 2).all()
    if rank == 0:
        send_weights({"a": torch.ones(5), "b": torch.ones(5)}, transfer)
    else:
        take(transfer, targets)
        assert targets["a"].eq(1).all() and targets["b"].eq(1).all()


class Gone(dict[str, Any]):
    """Tensors of an engine whose process ends when they are looked at."""

    def get(self, *_: Any) -> Any:
        os._exit(1)


def broadcast_to_one_who_dies(rank: int) -> str:
    """Rank 1 is gone when it is asked what it takes; the sender says so in time."""
    transfer = BroadcastTransfer(0)
    if rank == 1:
        receive(transfer, Gone(), (), check_finite=False)
    try:
        send_weights({"a": torch.ones(3)}, transfer)
    except WeightTransferError as error:
        return str(error)
    raise AssertionError("sent to nobody")


def share(connection: Connection, die: bool, device: str = "cpu") -> None:
    """Sends through memory that both have open, on the device, thrice, the last two times the same; it may die in these."""
    torch.set_num_threads(1)
    transfer = SharedMemoryTransfer(connection, timeout=60)
    original = transfer.bucket

    def last(data: Any = None) -> Any:
        original(data)
        os._exit(1)

    for steps in (1, 2, 2):
        if die and steps == 2:
            transfer.bucket = last  # type: ignore[method-assign]
        send_weights(dict(trained(steps).to(device).named_parameters()), transfer, bucket_bytes=BUCKET_BYTES)


def share_few(connection: Connection, states: int, last: bool) -> None:
    """Sends the same twice, and that with a few tensors changed as often as ``states`` says, or is gone half-way."""
    torch.set_num_threads(1)
    transfer = SharedMemoryTransfer(connection, timeout=60)
    original, buckets = transfer.bucket, 0

    def gone(data: Any = None) -> Any:
        nonlocal buckets
        buckets += 1
        if buckets == 2:
            os._exit(1)
        return original(data)

    if not last:
        for _ in range(2):
            send_weights(dict(trained(1).named_parameters()), transfer)
        transfer.bucket = gone  # type: ignore[method-assign]
    for _ in range(states):
        send_weights(dict(changed(trained(1), *FEW).named_parameters()), transfer, bucket_bytes=1000)


# -- both ends in one process --------------------------------------------------------------------------------------


def some_tensors() -> dict[str, Tensor]:
    """Narrow before wide ones, and some without elements."""
    return {
        "flags": torch.rand(3) > 0.5,
        "none": torch.empty(0, 4),
        "half": torch.randn(7, dtype=torch.bfloat16),
        "single": torch.randn(5, 3),
        "turned": torch.randn(4, 6).t(),
        "gaps": torch.randn(4, 6)[:, ::2],
        "double": torch.randn(9, dtype=torch.float64),
        "scalar": torch.tensor(5),
    }


class Kept:
    """A way of a user's own: one end after the other, and what is sent lies between."""

    def __init__(self) -> None:
        self.came: list[Tensor] = []
        self.manifest: Any = None

    def begin(self, manifest: Any = None, judge: Any = None) -> Any:
        self.manifest = manifest or self.manifest
        assert judge is None or judge(self.manifest.specs) is None
        return self.manifest

    def bucket(self, data: Tensor | None = None) -> Tensor:
        if data is None:
            return self.came.pop(0)
        self.came.append(data.clone())
        return data

    def finish(self, error: str | None = None) -> None: ...


def over_a_pipe(timeout: float = 60) -> tuple[SharedMemoryTransfer, SharedMemoryTransfer]:
    return tuple(SharedMemoryTransfer(end, timeout=timeout) for end in multiprocessing.Pipe())  # type: ignore[return-value]


def _commit(staged: Staging) -> None:
    staged.commit(lambda new: copy_each([staged.targets[name] for name in new], new.values()))


def take(transfer: Any, targets: dict[str, Tensor], *, finite: bool = False) -> None:
    _commit(receive(transfer, targets, (), check_finite=finite))


@contextmanager
def sending(transfer: SharedMemoryTransfer, tensors: Any, bucket_bytes: int = 64) -> Iterator[Future[None]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(send_weights, tensors, transfer, bucket_bytes=bucket_bytes)


def passed(tensors: Any, targets: dict[str, Tensor], known: Known | None = None, *, finite: bool = False) -> set[str]:
    """What travels in a transfer, after which the targets hold what was sent."""
    here, there = over_a_pipe()
    counted = Counted(here)
    with sending(there, tensors, 8) as sent:
        try:
            _commit(receive(counted, targets, (), check_finite=finite, known=known))
        except WeightsMismatchError as refused:
            with pytest.raises(WeightTransferError, match=re.escape(str(refused).partition(". ")[0])):
                sent.result(60)
            raise
        sent.result(60)
    assert [name for name in tensors if not torch.equal(targets[name], tensors[name].to(targets[name]))] == []
    assert counted.passed == sum(tensors[name].nbytes for name in counted.coming)
    return counted.coming
