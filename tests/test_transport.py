"""Weights that come from elsewhere: all of them or none, and the engine says what was wrong."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import ranks
import sender
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.kernels.errors import InvalidRequestError, WeightsMismatchError, WeightTransferError
from stoker.rollout import RolloutEngine
from stoker.weight_sync.receiving import receive
from stoker.weight_sync.staging import Staging, TensorSpec
from stoker.weight_sync.transport import Manifest, SharedMemoryTransfer, send_weights


def weights(steps: int) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in sender.trained(steps).named_parameters()}


def as_file(folder: Path, model: Any) -> Path:
    save_file({n: p.detach().contiguous() for n, p in model.named_parameters()}, folder / "new.safetensors")
    return folder / "new.safetensors"


def as_folder(folder: Path, model: Any, shard: str) -> Path:
    model.save_pretrained(folder / "checkpoint", max_shard_size=shard)
    count = len(list((folder / "checkpoint").glob("*.safetensors")))
    assert (count > 1) == (shard == "40KB")
    return folder / "checkpoint"


FORMS: dict[str, Callable[[Path, Any], Any]] = {
    "mapping": lambda folder, model: dict(model.named_parameters()),
    "state dict": lambda folder, model: model.state_dict(),
    "pairs": lambda folder, model: iter(model.named_parameters()),
    "double": lambda folder, model: {n: p.detach().double() for n, p in model.named_parameters()},
    "file": as_file,
    "folder": lambda folder, model: as_folder(folder, model, "1GB"),
    "sharded folder": lambda folder, model: as_folder(folder, model, "40KB"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["auto", "float64"])
def test_weights_in_every_form(form: str, dtype: str, tmp_path: Path) -> None:
    """Into the model's own tensors, or into a mirror, which leaves the model alone."""
    model, source = sender.trained(0), sender.trained(2)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    config = type(sender.CONFIG)(kv_cache_memory="1MiB", max_model_len=64, dtype=dtype)
    with RolloutEngine(model, config=config) as engine:
        sender.check(engine, model, 0)
        assert engine.update_weights(FORMS[form](tmp_path, source), version=5) == 5
        sender.check(engine, source, 5)
        changed = any(not torch.equal(p, before[n]) for n, p in model.named_parameters())
        assert changed == (dtype == "auto")
        assert engine.verify_weights().ok == (dtype == "auto")


def broken(change: Callable[[dict[str, Tensor]], object]) -> dict[str, Tensor]:
    new = weights(1)
    change(new)
    return new


LAYER = "model.layers.1.mlp.down_proj.weight"
OTHER = "model.layers.0.mlp.down_proj.weight"
WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], object], list[str]]] = {
    "missing": (lambda w: [w.pop(LAYER), w.pop("model.norm.weight")], [LAYER, "model.norm.weight"]),
    "extra": (lambda w: w.update({"model.more.weight": torch.ones(3)}), ["model.more.weight"]),
    "misnamed": (lambda w: w.update({"model.layers.1.mlp.down.weight": w.pop(LAYER)}), [LAYER, "mlp.down.weight"]),
    "transposed": (lambda w: w.update({LAYER: w[LAYER].T.contiguous()}), [LAYER]),
    "shape": (lambda w: w.update({LAYER: w[LAYER][:-1]}), [LAYER]),
    "integers": (lambda w: w.update({LAYER: w[LAYER].long()}), [LAYER, "int64"]),
    "all at once": (
        lambda w: [w.pop("model.norm.weight"), w.update({LAYER: w[LAYER][1:], "first": torch.ones(1)}), w.pop(OTHER)],
        ["missing model.norm.weight", f"{LAYER} has shape", "unknown first", f"missing {OTHER}"],
    ),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("form", ["mapping", "pairs", "file"])
def test_what_does_not_fit_is_named_and_changes_nothing(kind: str, form: str, tmp_path: Path) -> None:
    change, names = WRONG[kind]
    new: Any = broken(change)
    if form == "pairs":
        new = iter(new.items())
    if form == "file":
        save_file(new, tmp_path / "new.safetensors")
        new = tmp_path / "new.safetensors"
    model = sender.trained(0)
    with RolloutEngine(model, config=sender.CONFIG) as engine:
        with pytest.raises(WeightsMismatchError) as caught:
            engine.update_weights(new)
        assert [name for name in names if name not in str(caught.value)] == [], caught.value
        assert engine.weight_version == 0
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), sender.trained(0).parameters(), strict=True))
        sender.check(engine, sender.trained(0), 0)
        assert engine.update_weights(weights(1)) == 1
        sender.check(engine, sender.trained(1), 1)


def test_values_that_are_not_finite_where_that_is_asked_for() -> None:
    config = type(sender.CONFIG)(kv_cache_memory="1MiB", max_model_len=64, check_finite_weights=True)
    with RolloutEngine(sender.trained(0), config=config) as engine:
        new = weights(1)
        new[LAYER][3, 3] = float("nan")
        with pytest.raises(WeightsMismatchError, match=LAYER):
            engine.update_weights(new)
        sender.check(engine, sender.trained(0), 0)


@pytest.mark.parametrize("form", ["mapping", "pairs", "file", "transfer"])
def test_values_that_the_engines_dtype_cannot_hold_are_refused_by_name(form: str, tmp_path: Path) -> None:
    """float16 ends at 65504: a larger one would become infinite, and nothing is put in service."""
    config = type(sender.CONFIG)(kv_cache_memory="1MiB", max_model_len=64, dtype="float16")
    new = weights(1)
    new[LAYER][3, 3] = -1e5
    with RolloutEngine(sender.trained(0), config=config) as engine:
        before = {n: t.clone() for n, t in engine._binding.source.tensors().items()}
        here, there = over_a_pipe()
        given: Any = {
            "mapping": new,
            "pairs": iter(new.items()),
            "file": tmp_path / "new.safetensors",
            "transfer": here,
        }
        save_file({n: t.contiguous() for n, t in new.items()}, tmp_path / "new.safetensors")
        sent = sending(there, new, 10_000) if form == "transfer" else nullcontext()
        with sent, pytest.raises(WeightsMismatchError, match=rf"{LAYER} has values up to 1e\+05, beyond .*float16"):
            engine.update_weights(given[form])
        assert engine.weight_version == 0
        assert all(torch.equal(t, before[n]) for n, t in engine._binding.source.tensors().items())
        new[LAYER][3, 3] = -6e4
        assert engine.update_weights(new) == 1
        assert engine._binding.source.tensors()[LAYER][3, 3] == -6e4


def test_an_interrupt_while_weights_arrive_changes_nothing() -> None:
    def interrupted() -> Iterator[tuple[str, Tensor]]:
        for number, pair in enumerate(weights(1).items()):
            if number == 5:
                signal.raise_signal(signal.SIGINT)
            yield pair

    with RolloutEngine(sender.trained(0), config=sender.CONFIG) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.update_weights(interrupted())
        sender.check(engine, sender.trained(0), 0)
        assert engine.update_weights(weights(1)) == 1
        sender.check(engine, sender.trained(1), 1)


def test_an_iterator_that_fails_half_way_changes_nothing() -> None:
    def pairs() -> Iterator[tuple[str, Tensor]]:
        for count, pair in enumerate(weights(1).items()):
            if count == 5:
                raise KeyboardInterrupt
            yield pair

    with RolloutEngine(sender.trained(0), config=sender.CONFIG) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.update_weights(pairs())
        sender.check(engine, sender.trained(0), 0)


def test_what_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "text.safetensors").write_text("no tensors in here")
    (tmp_path / "empty").mkdir()
    cases: list[tuple[Any, type[Exception], str]] = [
        (3, InvalidRequestError, "weights=int: give None, named tensors"),
        ([torch.ones(2)], InvalidRequestError, "give None, named tensors"),
        ({"lm_head.weight": [1.0]}, InvalidRequestError, "give None, named tensors"),
        (tmp_path / "text.safetensors", WeightTransferError, "cannot be read.*keeps"),
        (tmp_path / "nowhere.safetensors", WeightTransferError, "cannot be read.*keeps"),
        (tmp_path / "empty", WeightTransferError, "cannot be loaded.*keeps"),
    ]
    with RolloutEngine(sender.trained(0), config=sender.CONFIG) as engine:
        for given, error, message in cases:
            with pytest.raises(error, match=message):
                engine.update_weights(given)
        sender.check(engine, sender.trained(0), 0)


def test_the_models_own_tensors_under_other_names() -> None:
    """Each is read before it is written to: swapped, transposed, or views of one storage, as q, k and v are."""
    changed, heads = sender.trained(1), "model.layers.1.self_attn."
    new = dict(changed.named_parameters())
    swaps = [(LAYER, OTHER), (f"{heads}k_proj.weight", f"{heads}v_proj.weight")]
    with RolloutEngine(changed, config=sender.CONFIG) as engine:
        for one, other in swaps:
            new[one], new[other] = new[other], new[one]
        expected = {name: tensor.detach().clone() for name, tensor in new.items()}
        engine.update_weights(new)
        assert [n for n, p in changed.named_parameters() if not torch.equal(p, expected[n])] == []
        sender.check(engine, changed, 1)
    square = torch.randn(5, 5)
    transposed = square.t().clone()
    take({"square": square.t()}, {"square": square})
    assert torch.equal(square, transposed)


def test_an_update_while_the_cache_sleeps() -> None:
    with RolloutEngine(sender.trained(0), config=sender.CONFIG) as engine:
        engine.sleep()
        assert engine.update_weights(weights(1)) == 1
        engine.wake_up()
        sender.check(engine, sender.trained(1), 1)


# -- what a transfer is made of ------------------------------------------------------------------------------------------


def over_a_pipe(timeout: float = 10) -> tuple[SharedMemoryTransfer, SharedMemoryTransfer]:
    return tuple(SharedMemoryTransfer(end, timeout=timeout) for end in multiprocessing.Pipe())  # type: ignore[return-value]


def take(transfer: Any, targets: dict[str, Tensor]) -> None:
    receive(transfer, targets, (), check_finite=False).commit()


@contextmanager
def sending(transfer: SharedMemoryTransfer, tensors: Any, bucket_bytes: int = 64) -> Iterator[Future[None]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(send_weights, tensors, transfer, bucket_bytes=bucket_bytes)


def some_tensors() -> dict[str, Tensor]:
    """Narrow before wide ones, and some without elements."""
    return {
        "flags": torch.rand(3) > 0.5,
        "none": torch.empty(0, 4),
        "half": torch.randn(7, dtype=torch.bfloat16),
        "single": torch.randn(5, 3),
        "turned": torch.randn(4, 6).t(),
        "double": torch.randn(9, dtype=torch.float64),
        "scalar": torch.tensor(5),
    }


@pytest.mark.parametrize("bucket_bytes", [1, 9, 50, 1001])
@pytest.mark.parametrize("way", ["transfer", "pairs"])
def test_tensors_of_any_size_and_dtype_travel_together(bucket_bytes: int, way: str) -> None:
    """Into tensors of other floating-point dtypes and other strides as well."""
    tensors = some_tensors()
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    targets["half"] = targets["half"].double()
    targets["single"] = torch.zeros(3, 5).t()
    if way == "pairs":
        take(iter(tensors.items()), targets)
    else:
        here, there = over_a_pipe()
        with sending(there, tensors, bucket_bytes) as sent:
            take(here, targets)
            sent.result()
    assert [name for name in tensors if not torch.equal(targets[name], tensors[name].to(targets[name]))] == []


def test_a_transfer_that_brings_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = over_a_pipe()
    whole = here.bucket
    monkeypatch.setattr(here, "bucket", lambda: whole()[:-4])
    with sending(there, {"a": torch.ones(5)}) as sent:
        with pytest.raises(WeightsMismatchError, match="a came in part"):
            take(here, {"a": torch.zeros(5)})
        sent.result()


def test_a_transfer_without_any_element() -> None:
    here, there = over_a_pipe()
    for _ in range(2):
        with sending(there, {"none": torch.empty(0, 4)}) as sent:
            take(here, {"none": torch.empty(0, 4)})
            sent.result()


@pytest.mark.parametrize("as_pairs", [False, True])
def test_the_names_of_a_tied_tensor_bring_the_same_values(as_pairs: bool) -> None:
    tied = torch.zeros(2, 3)
    targets = {"embed": tied, "head": tied}

    def given(**tensors: Tensor) -> Any:
        return iter(tensors.items()) if as_pairs else tensors

    for new in ({"embed": torch.ones(2, 3)}, {"head": torch.ones(2, 3), "embed": torch.ones(2, 3, dtype=torch.double)}):
        take(given(**new), targets)
        assert torch.equal(tied, torch.ones(2, 3))
        tied.zero_()
    other = torch.ones(2, 3)
    other[1, 2] = 2
    with pytest.raises(WeightsMismatchError, match=r"embed and head are one tensor .* different values\. No weight"):
        take(given(embed=torch.ones(2, 3), head=other), targets)
    assert not tied.any()


def test_what_is_sent_twice_is_called_that() -> None:
    targets = {"a": torch.zeros(2), "b": torch.zeros(3)}
    pairs = [
        ("a", torch.ones(2)),
        ("a", torch.ones(2)),
        ("b", torch.ones(3)),
        ("c", torch.ones(1)),
        ("c", torch.ones(1)),
    ]
    with pytest.raises(WeightsMismatchError) as caught:
        take(iter(pairs), targets)
    for part in ("a is sent twice", "unknown c", "c is sent twice"):
        assert part in str(caught.value)
    assert "in part" not in str(caught.value) and "b" not in str(caught.value).partition("No weight")[0].split()
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in pairs[:3]]
    assert "a is sent twice" in (Staging(targets, ()).check(specs) or "")


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
        manifest = Manifest((TensorSpec("scalar", (), torch.int64),), 64)
        pool.submit(lambda: [there.begin(manifest), there.bucket(torch.ones(8).byte()), there.finish("of no use")])
        with pytest.raises(WeightTransferError, match="the sender gave up: of no use"):
            take(here, {"scalar": torch.tensor(0)})
    with sending(there, tensors) as sent:
        take(here, targets)
        sent.result()
    assert all(torch.equal(targets[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("at", ["bucket", "second bucket", "finish", "end", "write"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_receiver_that_gives_up_tells_its_sender_and_both_go_on(
    at: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its last bucket, with the only handle of the memory, was never taken."""
    here, there = over_a_pipe(timeout=30)
    targets = {"a": torch.zeros(40)}
    owner, name = (Staging, "write") if at == "write" else (here, "_expect" if at == "end" else at.split()[-1])
    original = getattr(owner, name)
    for value in (1.0, 2.0):
        calls: list[None] = []

        def fail(*given: Any, calls: list[None] = calls) -> Any:
            calls.append(None)
            wanted = given == ("end",) if at == "end" else len(calls) == 1 + (at == "second bucket")
            if wanted and not (at == "finish" and given):
                raise error("enough")
            return original(*given)

        with sending(there, {"a": torch.full((40,), -value)}) as sent:
            with monkeypatch.context() as patch, pytest.raises(error):
                patch.setattr(owner, name, fail)
                take(here, targets)
            gave_up = rf"the receiver, process {os.getpid()}, gave up: {error.__name__}: enough\."
            with pytest.raises(WeightTransferError, match=gave_up):
                sent.result(5)
        with sending(there, {"a": torch.full((40,), value)}) as sent:
            take(here, targets)
            sent.result(5)
        assert targets["a"].eq(value).all()


def test_a_sender_that_is_interrupted_before_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = over_a_pipe(timeout=30)
    targets = {"a": torch.zeros(40)}
    poll = there.connection.poll
    monkeypatch.setattr(there, "connection", Interrupting(there.connection))
    with sending(there, {"a": torch.ones(40)}) as sent:
        with pytest.raises(WeightTransferError, match="the sender gave up: KeyboardInterrupt"):
            take(here, targets)
        with pytest.raises(KeyboardInterrupt):
            sent.result(5)
    assert poll(0), "the answer to what nobody waits for any more"
    with sending(there, {"a": torch.ones(40)}) as sent:
        take(here, targets)
        sent.result(5)
    assert targets["a"].all()


class Interrupting:
    """A connection whose first wait is interrupted."""

    def __init__(self, connection: Any) -> None:
        self.connection, self.polls = connection, 0

    def poll(self, timeout: float) -> bool:
        self.polls += 1
        if self.polls == 1:
            raise KeyboardInterrupt
        return bool(self.connection.poll(timeout))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)


def test_a_message_is_neither_cut_nor_lost_by_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives with it is there at the next call."""
    here, there = over_a_pipe(timeout=30)
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
        sent.result(5)
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
            sent.result(5)


def test_a_tensor_is_made_contiguous_once_for_all_its_buckets() -> None:
    tensors = {"turned": torch.randn(64, 48).t(), "expanded": torch.randn(1, 300).expand(7, 300), "b": torch.randn(500)}

    class Counting(TorchDispatchMode):
        copied = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
                self.copied += args[0].numel()
            return func(*args, **(kwargs or {}))

    class Nowhere:
        """The other end of a transfer, which keeps what is sent."""

        def __init__(self) -> None:
            self.came: list[Tensor] = []

        def begin(self, manifest: Any = None, judge: Any = None) -> Any: ...
        def finish(self, error: str | None = None) -> None: ...
        def bucket(self, data: Tensor | None = None) -> Tensor:
            assert data is not None
            self.came += data.clone().view(-1, 4)
            return data

    transfer = Nowhere()
    with Counting() as counting:
        send_weights(tensors, transfer, bucket_bytes=100)
    sent_bytes = sum(t.nbytes for t in tensors.values())
    assert len(transfer.came) * 4 == sent_bytes, "which the transfer here copies as well"
    assert counting.copied == 64 * 48 + 7 * 300 + sent_bytes
    assert torch.equal(
        torch.stack(transfer.came).view(torch.float32).view(-1), torch.cat([t.reshape(-1) for t in tensors.values()])
    )


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
            sent.result(5)
        assert all(torch.equal(targets[name], tensors[name]) for name in tensors)
        assert handles == [9] + [0] * (6 * number + 5), "8 bytes, three times, then 9, 9, 2"
        assert here._shared is not None and there._shared is not None
    place = here._shared.data_ptr()
    with sending(there, tensors, 44) as sent:
        take(here, targets)
        sent.result(5)
    assert handles[18:] == [44] and here._shared.data_ptr() != place, "a larger one"


@pytest.mark.parametrize("told", [True, False])
def test_a_transfer_that_was_begun_anew(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver came too late for the first one, which it is told, and gets the second."""
    here, there = over_a_pipe()
    there.timeout = 0.1
    old, new = ({"a": torch.full((40,), value)} for value in (1.0, 2.0))
    targets = {"a": torch.zeros(40)}
    with monkeypatch.context() as patch, pytest.raises(WeightTransferError, match="no 'judged'"):
        if not told:
            patch.setattr(there, "_tell", lambda error: None)
        send_weights(old, there)
    there.timeout = 10
    anew = "gave this transfer up and began another: call update_weights again"
    gave_up = r"the sender gave up: WeightTransferError: no 'judged' from the receiver in 0.1 s\. The engine keeps"
    with sending(there, new) as sent:
        with pytest.raises(WeightTransferError, match=gave_up if told else anew):
            take(here, targets)
        assert not targets["a"].any()
        take(here, targets)
        sent.result()
    assert torch.equal(targets["a"], new["a"])


# -- from other processes ------------------------------------------------------------------------------------------------


def test_a_broadcast_from_a_trainer_to_two_engines() -> None:
    ranks.run(sender.broadcast, 3)


def test_a_trainer_that_dies_half_way_leaves_the_old_weights_in_service() -> None:
    (message,) = [m for m in ranks.run(sender.broadcast_and_die, 2, timeout=10, dead=1) if m is not None]
    assert "the sender, rank 0, was lost while waiting for a bucket" in message and "keeps the weights" in message


@pytest.mark.parametrize("dies", [False, True])
def test_shared_memory_between_two_processes(dies: bool) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks_preload"])
    here, there = context.Pipe()
    process = context.Process(target=sender.share, args=(there, dies))
    process.start()
    there.close()
    try:
        transfer = SharedMemoryTransfer(here, timeout=30)
        with RolloutEngine(sender.trained(0), config=sender.CONFIG) as engine:
            assert engine.update_weights(transfer) == 1
            sender.check(engine, sender.trained(1), 1)
            if dies:
                with pytest.raises(WeightTransferError, match=r"the sender is gone.*keeps the weights"):
                    engine.update_weights(transfer)
                sender.check(engine, sender.trained(1), 1)
            else:
                assert engine.update_weights(transfer) == 2
                sender.check(engine, sender.trained(2), 2)
    finally:
        process.join(20)
        process.kill()


def test_a_sender_that_is_not_heard_of() -> None:
    here, there = multiprocessing.get_context("forkserver").Pipe()
    with RolloutEngine(sender.trained(0), config=sender.CONFIG) as engine:
        with pytest.raises(WeightTransferError, match=r"no 'begin' from the sender in 0.2 s"):
            engine.update_weights(SharedMemoryTransfer(here, timeout=0.2))
        sender.check(engine, sender.trained(0), 0)
    there.close()
