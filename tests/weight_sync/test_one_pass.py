"""A mirror whose tensors all changed the last time takes them as it reads them, and loses nothing by having guessed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from families import make_model
from mirrored import PARAMS, PROMPT, assert_matches, copies, engine_on, step

from stoker.rollout import RolloutEngine, WeightsMismatchError
from stoker.weight_sync import change_detection, checksum
from stoker.weight_sync.gather import Gatherer
from stoker.weight_sync.held import Held, Shards
from stoker.weight_sync.mirror import Mirror

Look = Callable[[], torch.Tensor]
CPU = torch.device("cpu")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors were taken on the way, each time."""
    counts: list[int] = []
    prepare = change_detection.prepare

    def counting(tensors: list[torch.Tensor], device: torch.device, targets: Sequence[torch.Tensor] = ()) -> Look:
        look = prepare(tensors, device, targets)

        def counted() -> torch.Tensor:
            counts.extend([len(targets)] if targets else [])
            return look()

        return counted

    monkeypatch.setattr(change_detection, "prepare", counting)
    return counts


def test_what_changed_the_last_time_is_read_once(taken: list[int]) -> None:
    model = make_model("llama")
    parameters = list(model.parameters())
    nbytes = 8 * sum(p.numel() for p in parameters)
    with engine_on(model) as engine:
        for version in (1, 2, 3):
            step(model)
            assert engine.update_weights() == version and engine.stats().last_update_bytes == nbytes
            assert assert_matches(engine, model) == {version}
        assert taken == [len(parameters)] * 2, "the first of them is a guess at nothing"
        weight = parameters[3]
        weight.data.mul_(2)
        assert engine.update_weights() == 4 and engine.stats().last_update_bytes == 8 * weight.numel()
        assert engine.update_weights() == 5 and engine.stats().last_update_bytes == 0, "as nothing is new"
        assert taken == [len(parameters)] * 3 + [1], "and then only what did change"
        step(model)
        assert engine.update_weights() == 6 and engine.stats().last_update_bytes == nbytes
        assert len(taken) == 4 and assert_matches(engine, model) == {6} and engine.verify_weights().ok


def test_where_all_was_written_on_the_way_nothing_is_gathered_or_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    with engine_on(model) as engine:
        for _ in range(2):
            step(model)
            engine.update_weights()
        step(model)
        with monkeypatch.context() as patch:
            patch.setattr(Gatherer, "prepare", None)
            patch.setattr(Mirror, "write", None)
            assert engine.update_weights() == 3
        assert engine.stats().last_update_bytes == 8 * sum(p.numel() for p in model.parameters())
        assert assert_matches(engine, model) == {3} and engine.verify_weights().ok


def engine_that_guesses(model: torch.nn.Module, dtype: str = "float64") -> RolloutEngine:
    engine = engine_on(model, dtype)
    for parameter in model.parameters():
        parameter.data.mul_(1.01)
    engine.update_weights()
    return engine


def test_what_breaks_off_is_made_good_though_the_model_is_as_it_was(
    taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else numbers that are known from before would pass for those that the mirror has."""
    model = make_model("llama")
    with engine_that_guesses(model) as engine:
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        step(model)
        prepare = change_detection.prepare

        def half(tensors: list[torch.Tensor], device: torch.device, targets: Sequence[torch.Tensor] = ()) -> Look:
            def look() -> torch.Tensor:
                if not targets:
                    return prepare(tensors, device)()
                prepare(tensors[: len(targets) : 2], device, targets[::2])()
                raise MemoryError("no memory")

            return look

        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(change_detection, "prepare", half)
            engine.update_weights()
        assert taken, "it had begun"
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])
        assert_matches(engine, model)
        assert engine.verify_weights().ok


def test_what_breaks_off_while_it_is_written_is_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, of what is written after it was looked at."""
    model = make_model("llama")
    with engine_on(model) as engine:
        assert assert_matches(engine, model) == {0}
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        step(model)
        write = Mirror.write

        def half(mirror: Mirror, new: Mapping[str, torch.Tensor]) -> int:
            write(mirror, dict(list(new.items())[::2]))
            raise MemoryError("no memory")

        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(Mirror, "write", half)
            engine.update_weights()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])
        assert_matches(engine, model)
        assert engine.verify_weights().ok


def test_what_is_refused_is_not_written(taken: list[int]) -> None:
    model = make_model("llama")
    with engine_that_guesses(model, "float16") as engine:
        before = {n: t.clone() for n, t in copies(engine).items()}
        step(model)
        weight = model.model.layers[1].mlp.down_proj.weight
        weight.data[3, 5] = 7e4
        with pytest.raises(WeightsMismatchError, match="beyond what"):
            engine.update_weights()
        assert not taken and all(torch.equal(t, before[n]) for n, t in copies(engine).items())
        weight.data[3, 5] = 1
        assert engine.update_weights() == 2 and taken
        assert engine.verify_weights().ok


def test_what_nobody_announced_is_looked_at_before_it_is_written(taken: list[int]) -> None:
    """A call that finds nothing new must write nothing: steps under way may be reading it."""
    model = make_model("llama")
    with engine_that_guesses(model) as engine:
        assert_matches(engine, model)
        step(model)
        assert assert_matches(engine, model) == {2}
        engine.generate_batch([PROMPT], PARAMS)
        assert not taken


def test_checksums_of_several_devices_come_in_the_order_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that they are made in is not its own inverse."""
    devices = ["meta", "cpu", "cpu", "meta"]

    class Counts:
        @staticmethod
        def prepare_checksums(tensors: list[torch.Tensor], targets: Sequence[torch.Tensor]) -> Look:
            return lambda: torch.tensor([len(t) for t in tensors])

    monkeypatch.setattr(checksum, "ops_for", lambda place: Counts)
    look = checksum.prepare([torch.empty(i, device=device) for i, device in enumerate(devices)], CPU)
    assert look().tolist() == [0, 1, 2, 3]


def parts_of(parts: Mapping[str, torch.Tensor]) -> list[Shards]:
    group: Any = None
    return [Shards((name,), group, CPU, t.dtype, lambda t=t: t, ()) for name, t in parts.items()]  # type: ignore[misc]


def test_whole_tensors_among_shards_are_not_written_before_all_ranks_agreed() -> None:
    """Another one may refuse, and the old weights stay."""
    whole = torch.ones(4)
    shards = parts_of({"part": torch.ones(3)})
    shapes = {"whole": whole.shape, "part": torch.Size([6])}
    mirror = Mirror(shapes, dict.fromkeys(shapes, torch.float64), {}, (), CPU, (), lambda *_: None)
    for tensor in mirror.tensors.values():
        tensor.zero_()
    mirror.complete = True
    held = Held(full={"whole": whole}, shards=shards)
    found = change_detection.Look(held, mirror, {("whole",), ("part",)}).find_changes({}, {}, None)
    assert found.changed == {("whole",), ("part",)} and not found.written
    assert mirror.complete and not any(tensor.any() for tensor in mirror.tensors.values())


def test_parts_are_looked_at_as_their_gather_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {f"part {i}": torch.full((10 + i,), float(i)) for i in range(7)}
    prepare, looked = change_detection.prepare, list[int]()

    def watched(tensors: list[torch.Tensor], device: torch.device) -> Look:
        looked.extend(len(t) - 10 for t in tensors)
        return prepare(tensors, device)

    monkeypatch.setattr(change_detection, "prepare", watched)
    later = change_detection.Later(parts_of(parts), CPU)
    for share, end in ((0.1, 0), (0.5, 3), (0.5, 3), (0.9, 6)):
        later.go_on(share)
        assert looked == [*range(end)]
    numbers = checksum.checksums(parts.values())
    for _ in range(2):
        assert later.seen() == {(name,): (number, ()) for name, number in zip(parts, numbers, strict=True)}
        assert looked == [*range(7)], "each once"


def test_parts_that_are_not_contiguous_are_looked_at_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """And before the gather: a glance at all of them would take a copy of each."""
    parts = {name: torch.ones(80, 30) for name in ("a", "b")}
    shards = parts_of({name: part.t() for name, part in parts.items()})
    mirror = Mirror({}, {}, {}, (), CPU, (), lambda *_: None)
    mirror.complete = True
    prepare, handed = change_detection.prepare, list[int]()

    def watched(tensors: list[torch.Tensor], *arguments: Any) -> Look:
        handed.extend(t.untyped_storage().data_ptr() for t in tensors)
        return prepare(tensors, *arguments)

    monkeypatch.setattr(change_detection, "prepare", watched)
    look = change_detection.Look(Held(shards=shards), mirror, {s.names for s in shards})
    found = look.find_changes({}, {}, None)
    for part in parts.values():
        part += 1
        found = look.find_changes(found.now, found.glances, None)
        assert len(found.changed) == 1 and len(found.now) == 2
    assert {*handed} == {part.data_ptr() for part in parts.values()}
