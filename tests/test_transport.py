"""Weights that come from elsewhere: all of them or none, and the engine says what was wrong."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ranks
import sender
import torch
from safetensors.torch import save_file
from sender import over_a_pipe, sending, take
from torch import Tensor

from stoker.kernels.errors import InvalidRequestError, WeightsMismatchError, WeightTransferError
from stoker.rollout import RolloutEngine
from stoker.weight_sync.transport import SharedMemoryTransfer


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
