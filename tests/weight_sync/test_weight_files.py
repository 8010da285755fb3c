"""Files of weights that another process writes while they are read: one of its models is taken, or none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import sender
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import modeling_utils

from stoker.kernels.errors import WeightTransferError
from stoker.rollout import RolloutEngine
from stoker.rollout.external_weights import ExternalWeights
from stoker.weight_sync import receiving
from stoker.weight_sync.consistent_reads import not_rewritten
from stoker.weight_sync.staging import Staging


def save(path: Path, model: Any) -> Path:
    save_file({n: p.detach().contiguous() for n, p in model.named_parameters()}, path)
    return path


def at_opening(monkeypatch: pytest.MonkeyPatch, module: Any, number: int, happens: Callable[[], object]) -> None:
    """Let it happen when so many files have been opened."""
    left = [number]

    def opened(*arguments: Any, **fields: Any) -> Any:
        file = safe_open(*arguments, **fields)
        left[0] -= 1
        if left[0] == 0:
            happens()
        return file

    monkeypatch.setattr(module, "safe_open", opened)


def assert_refused_once(path: Path, then: Any) -> None:
    """An update by it is refused, with the old weights in service, and the next one is taken, which brings ``then``."""
    with RolloutEngine(sender.trained(0), config=sender.CONFIG) as engine:
        with pytest.raises(WeightTransferError, match=r"was written to while it was read \(.*old and new.*keeps"):
            engine.update_weights(path)
        sender.check(engine, sender.trained(0), 0)
        assert engine.update_weights(path) == 1
        sender.check(engine, then, 1)


def test_a_file_that_is_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = sender.trained(2)
    path, content = save(tmp_path / "new", sender.trained(1)), save(tmp_path / "later", later).read_bytes()

    def write() -> None:
        with path.open("r+b") as file:
            file.write(content)

    at_opening(monkeypatch, receiving, 1, write)
    assert_refused_once(path, later)


def test_a_file_that_is_replaced_was_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, later = save(tmp_path / "new", sender.trained(1)), save(tmp_path / "later", sender.trained(2))
    at_opening(monkeypatch, receiving, 1, lambda: later.replace(path))
    with RolloutEngine(sender.trained(0), config=sender.CONFIG) as engine:
        assert engine.update_weights(path) == 1
        sender.check(engine, sender.trained(1), 1)


def test_a_folder_of_which_files_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, later = tmp_path / "checkpoint", sender.trained(2)
    sender.trained(1).save_pretrained(folder, max_shard_size="40KB")
    at_opening(monkeypatch, modeling_utils, 2, lambda: later.save_pretrained(folder, max_shard_size="40KB"))
    assert_refused_once(folder, later)


def test_a_folder_whose_file_is_written_once_it_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is put in service, as where a step of others comes between: what arrived lies in no file any more."""
    folder, receive = tmp_path / "checkpoint", ExternalWeights.receive
    sender.trained(1).save_pretrained(folder)
    sender.trained(2).save_pretrained(tmp_path / "later")

    def then_written(self: ExternalWeights, weights: Any) -> Any:
        staged = receive(self, weights)
        with (folder / "model.safetensors").open("r+b") as file:
            file.write((tmp_path / "later" / "model.safetensors").read_bytes())
        return staged

    monkeypatch.setattr(ExternalWeights, "receive", then_written)
    with RolloutEngine(sender.trained(0), config=sender.CONFIG) as engine:
        assert engine.update_weights(folder) == 1
        sender.check(engine, sender.trained(1), 1)


def test_a_folder_whose_file_is_written_while_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, later, write = tmp_path / "checkpoint", sender.trained(2), Staging.write
    sender.trained(1).save_pretrained(folder)
    later.save_pretrained(tmp_path / "later")
    written: list[str] = []

    def while_written(self: Staging, name: str, *given: Any) -> None:
        if not written:
            with (folder / "model.safetensors").open("r+b") as file:
                file.write((tmp_path / "later" / "model.safetensors").read_bytes())
        written.append(name)
        write(self, name, *given)

    monkeypatch.setattr(Staging, "write", while_written)
    assert_refused_once(folder, later)


def replaced(file: Path) -> None:
    other = file.with_suffix(".other")
    other.write_bytes(file.read_bytes())
    other.replace(file)


@pytest.mark.parametrize(
    ("names", "happens", "is_refused"),
    [
        (["a", "b"], lambda folder: replaced(folder / "a.safetensors"), True),
        (["a", "b"], lambda folder: (folder / "a.safetensors").unlink(), True),
        (["a", "b"], lambda folder: (folder / "c.safetensors").touch(), True),
        (["a"], lambda folder: (folder / "b.safetensors").touch(), True),
        (["a"], lambda folder: (folder / "a.safetensors").rename(folder / "b.safetensors"), True),
        (["a", "b"], lambda folder: (folder / "b.safetensors").rename(folder / "a.safetensors"), True),
        (["a", "b"], lambda folder: (folder / "log.txt").touch(), False),
        (["a"], lambda folder: replaced(folder / "a.safetensors"), False),
        (["a"], lambda folder: (folder / "gone.safetensors").symlink_to("nowhere"), False),
    ],
    ids=[
        "one replaced",
        "one gone",
        "one more",
        "a second",
        "renamed",
        "over another",
        "a log",
        "the only one",
        "no file",
    ],
)
def test_what_happens_to_a_folder(
    names: list[str], happens: Callable[[Path], object], is_refused: bool, tmp_path: Path
) -> None:
    """Files that are replaced may be of another model than those beside them; a single one was read as a whole."""
    for name in names:
        (tmp_path / f"{name}.safetensors").write_text(name)
    refused = pytest.raises(WeightTransferError, match="in parts old and new") if is_refused else nullcontext()
    with refused, not_rewritten(str(tmp_path)):
        happens(tmp_path)
