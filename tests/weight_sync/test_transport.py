"""Weights that come from elsewhere: all of them or none, and the engine says what was wrong."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import ranks
import sender
import torch
from families import make_model
from safetensors.torch import save_file
from sender import over_a_pipe, sending, take
from torch import Tensor

from stoker.kernels.errors import InvalidRequestError, WeightsMismatchError, WeightTransferError
from stoker.rollout import RolloutEngine
from stoker.weight_sync.manifest import TensorSpec
from stoker.weight_sync.staging import Staging
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


def test_a_file_of_a_checkpoint_with_other_names_is_refused_and_its_folder_taken(tmp_path: Path) -> None:
    """Experts are one tensor in memory, and transformers saves one each."""
    model, source = (make_model("qwen3_moe", seed=seed) for seed in (0, 1))
    source.save_pretrained(tmp_path)
    with RolloutEngine(model, config=sender.CONFIG) as engine:
        with pytest.raises(
            WeightsMismatchError, match=r"unknown .*experts\.0\.up_proj.*save_pretrained.*give the folder"
        ):
            engine.update_weights(tmp_path / "model.safetensors")
        assert engine.update_weights(tmp_path) == 1
    assert all(torch.equal(t, source.state_dict()[name]) for name, t in model.state_dict().items())


def test_what_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "text.safetensors").write_text("no tensors in here")
    (tmp_path / "empty").mkdir()
    (tmp_path / "index").mkdir()
    saved = sender.trained(0)
    saved.save_pretrained(tmp_path / "index", max_shard_size="20KB")
    (tmp_path / "index" / "model.safetensors.index.json").write_text('{"metadata": {}}')
    save_file({"model.norm.weight": saved.model.norm.weight.detach()}, tmp_path / "empty" / "model.safetensors")
    cases: list[tuple[Any, type[Exception], str]] = [
        (3, InvalidRequestError, "weights=int: give None, named tensors"),
        ([torch.ones(2)], InvalidRequestError, "give None, named tensors"),
        ([3], InvalidRequestError, "weights=int: give None, named tensors"),
        (["ab"], InvalidRequestError, "give None, named tensors"),
        ([("lm_head.weight", torch.ones(1), 5)], InvalidRequestError, "weights=tuple: give None, named tensors"),
        ({"lm_head.weight": [1.0]}, InvalidRequestError, "give None, named tensors"),
        (tmp_path / "text.safetensors", WeightTransferError, "cannot be read.*keeps"),
        (tmp_path / "nowhere.safetensors", WeightTransferError, "cannot be read.*keeps"),
        (tmp_path / "empty", WeightTransferError, "cannot be loaded: no config.json in it.*keeps"),
        (tmp_path / "index", WeightTransferError, "cannot be loaded: 'weight_map'.*keeps"),
    ]
    with RolloutEngine(sender.trained(0), config=sender.CONFIG) as engine:
        for given, error, message in cases:
            with pytest.raises(error, match=message):
                engine.update_weights(given)
        sender.check(engine, sender.trained(0), 0)


@pytest.mark.parametrize("as_pairs", [False, True])
@pytest.mark.parametrize("kind", ["meta", "sparse", "mkldnn"])
def test_tensors_without_data_to_copy_are_refused_before_a_byte_is_written(kind: str, as_pairs: bool) -> None:
    """As of an offloaded model: the others are on their way to the trainer's own tensors."""
    model = sender.trained(0)
    new: dict[str, Any] = {name: 1.1 * p.detach() for name, p in model.named_parameters()}
    change = {"meta": lambda t: t.to("meta"), "sparse": torch.Tensor.to_sparse, "mkldnn": torch.Tensor.to_mkldnn}[kind]
    new[LAYER] = change(new[LAYER])
    with RolloutEngine(model, config=sender.CONFIG) as engine:
        with pytest.raises(InvalidRequestError, match=rf"{LAYER} is .*: give plain tensors that are in memory"):
            engine.update_weights(list(new.items()) if as_pairs else new)
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
    sharing = {"embed": tied, "head": tied.view(2, 3)}  # as after ``head.data = embed.data``
    with pytest.raises(WeightsMismatchError, match=r"embed and head are one tensor .* different values\. No weight"):
        take(given(embed=torch.ones(2, 3), head=other), sharing)
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
    assert "a is sent twice" in (Staging(targets, ())(specs) or "")


def test_an_update_while_the_cache_sleeps() -> None:
    with RolloutEngine(sender.trained(0), config=sender.CONFIG) as engine:
        engine.sleep()
        assert engine.update_weights(weights(1)) == 1
        engine.wake_up()
        sender.check(engine, sender.trained(1), 1)


# -- from other processes ------------------------------------------------------------------------------------------------


def test_a_broadcast_from_a_trainer_to_two_engines() -> None:
    ranks.run(sender.broadcast, 3)


def test_a_broadcast_that_one_of_two_engines_refuses() -> None:
    ranks.run(sender.broadcast_what_is_refused, 3, timeout=20.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_in_a_broadcast_leaves_both_ends_in_step(rank: int) -> None:
    ranks.run(sender.broadcast_through_interrupts, 2, rank)


def test_a_trainer_that_dies_half_way_leaves_the_old_weights_in_service() -> None:
    (message,) = [m for m in ranks.run(sender.broadcast_and_die, 2, dead=1) if m is not None]
    assert "the sender, rank 0, was lost while waiting for a bucket" in message and "keeps the weights" in message


def test_a_receiver_that_dies_is_named_by_the_sender() -> None:
    (message,) = [m for m in ranks.run(sender.broadcast_to_one_who_dies, 2, dead=1) if m is not None]
    assert "a receiver was lost while agreeing on what is to come" in message


@contextmanager
def from_process(function: Callable[..., None], *arguments: Any) -> Iterator[sender.Counted]:
    """The end here of a transfer from a process that runs the function."""
    context = ranks.context()
    here, there = context.Pipe()
    process = context.Process(target=function, args=(there, *arguments))
    process.start()
    there.close()
    try:
        yield sender.Counted(SharedMemoryTransfer(here, timeout=60))
    finally:
        process.join(60)
        process.kill()


@pytest.mark.parametrize("dies", [False, True])
def test_shared_memory_between_two_processes(dies: bool) -> None:
    with from_process(sender.share, dies) as transfer, RolloutEngine(sender.trained(0), config=sender.CONFIG) as engine:
        assert engine.update_weights(transfer) == 1
        sender.check(engine, sender.trained(1), 1)
        if dies:
            with pytest.raises(WeightTransferError, match=r"the sender is gone.*keeps the weights"):
                engine.update_weights(transfer)
            sender.check(engine, sender.trained(1), 1)
        else:
            assert engine.update_weights(transfer) == 2
            sender.check(engine, sender.trained(2), 2)
            assert (engine.update_weights(transfer), engine.stats().last_update_bytes) == (3, 0)
            sender.check(engine, sender.trained(2), 3)


@pytest.mark.parametrize("dtype", ["auto", "float64"])
def test_only_what_an_engine_does_not_hold_is_moved(dtype: str) -> None:
    """Whoever wrote it, through ends of either side, into the model's own tensors or casts of the sender's."""
    config = type(sender.CONFIG)(kv_cache_memory="1MiB", max_model_len=64, dtype=dtype)
    held, few = sender.trained(1), sender.changed(sender.trained(1), *sender.FEW)
    everything, part, one = sender.size(few), sender.size(few, *sender.FEW), sender.size(few, sender.ONE)
    with RolloutEngine(sender.trained(0), config=config) as engine:

        def update(transfer: Any, moved: int, model: Any) -> None:
            version = engine.update_weights(transfer)
            written = moved * (2 if dtype == "float64" else 1)
            assert (transfer.passed, engine.stats().last_update_bytes) == (moved, written)
            sender.check(engine, model, version)

        with from_process(sender.share_few, 1, False) as transfer:
            update(transfer, everything, held)
            update(transfer, 0, held)
            with pytest.raises(WeightTransferError, match=r"the sender is gone.*keeps the weights"):
                engine.update_weights(transfer)
            sender.check(engine, held, 2)
        with from_process(sender.share_few, 5, True) as transfer:
            update(transfer, part, few)
            engine._binding.source.tensors()[sender.ONE].detach().neg_()
            update(transfer, one, few)
            engine.update_weights(weights(0))
            update(transfer, everything, few)
            engine.update_weights(None if dtype == "float64" else weights(2))
            update(transfer, everything, few)
            with RolloutEngine(few, config=config) as engine:
                update(transfer, everything if dtype == "float64" else 0, few)


def test_a_sender_that_is_not_heard_of() -> None:
    here, there = multiprocessing.get_context("forkserver").Pipe()
    with RolloutEngine(sender.trained(0), config=sender.CONFIG) as engine:
        with pytest.raises(WeightTransferError, match=r"no 'begin' from the sender in 0.2 s"):
            engine.update_weights(SharedMemoryTransfer(here, timeout=0.2))
        sender.check(engine, sender.trained(0), 0)
    there.close()
