"""Of weights that are sent, only those travel that a receiver does not hold."""

from __future__ import annotations

import pytest
import torch
from sender import Kept, over_a_pipe, passed, sending, some_tensors, take

from stoker.kernels.errors import WeightsMismatchError, WeightTransferError
from stoker.weight_sync import manifest
from stoker.weight_sync.staging import Known
from stoker.weight_sync.transport import send_weights


def test_what_the_engine_holds_does_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_LOT_BYTES", 64)
    tensors = some_tensors()
    targets = {name: tensor.clone() for name, tensor in tensors.items()}
    targets["turned"] = tensors["turned"].contiguous()
    assert passed(tensors, targets) == set()
    tensors["half"][2] = 5
    tensors["flags"].logical_not_()
    targets["double"][3] = 0
    assert passed(tensors, targets) == {"half", "flags", "double"}


def test_what_a_cast_makes_of_a_content_is_known_once_it_came() -> None:
    tensors = {"a": torch.randn(9), "b": torch.randn(5), "c": torch.arange(4), "d": torch.randn(3).half()}
    targets = {n: torch.zeros(t.shape, dtype=torch.bfloat16) for n, t in tensors.items()} | {"c": torch.zeros(4).int()}
    known = Known()
    assert passed(tensors, targets, known) == {*tensors}
    assert passed(tensors, targets, known) == set()
    targets["a"][2] += 1
    targets["c"][0] += 1
    assert passed(tensors, targets, known) == {"a", "c"}
    tensors["b"] = tensors["b"] * 2
    assert passed(tensors, targets, known) == {"b"}
    targets["b"] = targets["b"].view(torch.float16)
    assert passed(tensors, targets, known) == {"b"}
    assert passed(tensors, targets, Known()) == {*tensors}, "an engine that began anew"


def test_what_was_refused_is_never_known() -> None:
    targets = {"a": torch.zeros(3, dtype=torch.float16)}
    known = Known()
    for _ in range(2):
        with pytest.raises(WeightsMismatchError, match="a has values up to"):
            passed({"a": torch.full((3,), 1e5)}, targets, known)
        targets["a"].fill_(float("inf"))
    nan = {"a": torch.full((3,), float("nan")), "b": torch.ones(2)}
    with pytest.raises(WeightsMismatchError, match="a holds NaN"):
        passed(nan, {"a": nan["a"].clone(), "b": torch.ones(2)}, finite=True)


def test_the_names_of_a_tied_tensor_of_which_one_changed() -> None:
    tied = torch.ones(2, 3)
    targets = {"embed": tied, "head": tied}
    twos = torch.full((2, 3), 2.0)
    for one in ("embed", "head"):
        with pytest.raises(WeightsMismatchError, match="one tensor in the model, and came with different values"):
            passed({"embed": tied.clone(), "head": tied.clone()} | {one: twos}, targets)
        assert tied.eq(1).all()
    assert passed({"embed": twos, "head": twos}, targets) == {"embed", "head"}
    assert passed({"head": twos}, targets) == set()


def test_what_did_not_change_is_told_from_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)}
    new = {"a": torch.zeros(3), "b": torch.ones(2), "c": torch.ones(1)}
    here, there = over_a_pipe()
    with sending(there, {"a": new["a"], "b": new["b"]}) as sent:
        with pytest.raises(WeightsMismatchError, match=r"do not fit: missing c\. "):
            take(here, targets)
        with pytest.raises(WeightTransferError, match="missing c"):
            sent.result(60)
    kept = Kept()
    send_weights(new, kept)
    begin = kept.begin
    with monkeypatch.context() as patch, pytest.raises(WeightsMismatchError, match=r"do not fit: missing b\. "):
        patch.setattr(
            kept,
            "begin",
            lambda judge: (begin(judge=judge), judge.wanted(kept.manifest.specs)) and kept.manifest.only([2]),
        )
        take(kept, targets)
    assert not any(t.any() for t in targets.values())
    take(kept, targets)  # by a way that asks for refusals alone, and brings everything
    assert kept.came == [] and all(torch.equal(targets[name], new[name]) for name in new)


def test_what_changes_here_while_others_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {"a": torch.zeros(3), "b": torch.zeros(2)}
    new = {"a": torch.zeros(3), "b": torch.ones(2)}
    here, there = over_a_pipe()
    bucket = here.bucket
    monkeypatch.setattr(here, "bucket", lambda: (bucket(), targets["a"].fill_(3))[0])
    with sending(there, new) as sent:
        with pytest.raises(WeightTransferError, match="a changed in this process while .* What arrived was not taken"):
            take(here, targets)
        with pytest.raises(WeightTransferError, match="a changed in this process"):
            sent.result(60)
    assert not targets["b"].any()
    assert passed(new, targets) == {"a", "b"}
