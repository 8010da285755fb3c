"""Named tensors that are given step after step: what was found to fit is not judged again, and whatever is another is."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import sender
import torch
from torch import Tensor, nn

from stoker.kernels.errors import InvalidRequestError, WeightsMismatchError
from stoker.rollout import RolloutEngine
from stoker.weight_sync import receiving
from stoker.weight_sync.receiving import receive
from stoker.weight_sync.staging import Known, copy_each


class Judged:
    """Which tensors were judged one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        spec_of = receiving.spec_of

        def seen(name: str, tensor: Tensor) -> object:
            self.names.append(name)
            return spec_of(name, tensor)

        monkeypatch.setattr(receiving, "spec_of", seen)

    def take(self) -> list[str]:
        names, self.names = self.names, []
        return names


def some() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    given = {"a": torch.randn(4, 6), "b": torch.randn(6, 6), "c": torch.randn(3)}
    return given, {name: torch.zeros_like(tensor) for name, tensor in given.items()}


def update(given: dict[str, Tensor], targets: dict[str, Tensor], known: Known, *, finite: bool = False) -> None:
    staged = receive(given, targets, (), check_finite=finite, known=known)

    def write(new: dict[str, Tensor]) -> int:
        return copy_each([targets[name] for name in new], new.values())

    staged.commit(write)  # type: ignore[arg-type]
    for name, tensor in given.items():
        assert torch.equal(targets[name], tensor.to(targets[name].dtype)), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_tensors_with_other_numbers_are_not_judged_again(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Judged(monkeypatch)
    model = sender.trained(0)
    new = {name: p.detach().clone() for name, p in model.named_parameters()}
    with RolloutEngine(model, config=replace(sender.CONFIG, dtype=dtype)) as engine:
        for steps in (1, 2, 3):
            after = sender.trained(steps)
            for name, tensor in after.named_parameters():
                new[name].copy_(tensor.detach())
            assert engine.update_weights(new) == steps
            assert judged.take() == ([*new] if steps == 1 else [])
            if dtype == "float32":
                sender.check(engine, after, steps)
        model.get_parameter("model.norm.weight").data = torch.ones_like(model.model.norm.weight)  # moved
        engine.update_weights(new)
        assert judged.take() == ([*new] if dtype == "float32" else [])  # a mirror stays
        with pytest.raises(WeightsMismatchError, match=r"missing model\.norm\.weight"):
            engine.update_weights({name: t for name, t in new.items() if name != "model.norm.weight"})


def _in_targets(given: dict[str, Tensor], targets: dict[str, Tensor]) -> None:
    targets["a"].copy_(torch.arange(24.0).view(4, 6))
    given["a"] = targets["a"].flip(0).clone()
    shared = torch.empty(2, 4, 6)
    given["a"], targets["a"] = shared[0].copy_(given["a"]), shared[1]


CHANGES: dict[str, Callable[[dict[str, Tensor], dict[str, Tensor]], object]] = {
    "a tensor elsewhere": lambda given, targets: given.update(a=given["a"].clone()),
    "another order": lambda given, targets: given.update(a=given.pop("a")),
    "another dtype": lambda given, targets: given.update(b=given["b"].double()),
    "none, but for the object": lambda given, targets: given.update(b=given["b"].detach()),
    "its own transpose": lambda given, targets: given.update(b=given["b"].T),
    "a parameter": lambda given, targets: given.update(b=nn.Parameter(given["b"])),
    "a target elsewhere": lambda given, targets: targets.update(b=targets["b"].clone()),
    "a target of another dtype": lambda given, targets: targets.update(b=targets["b"].bfloat16()),
    "a target's new memory": lambda given, targets: setattr(targets["b"], "data", targets["b"].clone()),
    "in a target's storage": _in_targets,
}


@pytest.mark.parametrize("kind", CHANGES)
def test_whatever_is_another_is_judged(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judged, known = Judged(monkeypatch), Known()
    given, targets = some()
    update(given, targets, known)
    update(given, targets, known)
    assert judged.take() == [*given]
    CHANGES[kind](given, targets)
    update(given, targets, known)
    assert judged.take() == ([] if kind.startswith("none") else [*given])


REFUSED: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, Tensor]], object], str]] = {
    "missing": (lambda given, targets: given.pop("b"), "missing b"),
    "unknown": (lambda given, targets: given.update(d=torch.ones(1)), "unknown d"),
    "transposed": (lambda given, targets: given.update(a=given["a"].T), r"\(6, 4\), not \(4, 6\) \(transposed\?\)"),
    "a view": (lambda given, targets: given.update(a=given["a"][:2]), r"a has shape \(2, 6\), not \(4, 6\)\. No"),
    "integers in its memory": (lambda given, targets: given.update(b=given["b"].view(torch.int32)), "b is torch.int32"),
    "a target's shape": (lambda given, targets: targets.update(c=torch.zeros(5)), r"c has shape \(3,\), not \(5,\)"),
    "a new target": (lambda given, targets: targets.update(d=torch.zeros(5)), "missing d"),
    "no tensor": (lambda given, targets: given.update(b=3), "give None, named tensors"),  # type: ignore[arg-type]
    "sparse": (lambda given, targets: given.update(b=given["b"].to_sparse()), "b is torch.sparse_coo"),
    "meta": (lambda given, targets: given.update(b=given["b"].to("meta")), "b is on the meta device"),
    "beyond the range": (lambda given, targets: targets.update(b=targets["b"].half()) or given["b"].fill_(1e6), "1e"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_after_what_did(kind: str) -> None:
    known = Known()
    given, targets = some()
    update(given, targets, known)
    change, message = REFUSED[kind]
    change(given, targets)
    before = {name: target.clone() for name, target in targets.items()}
    for _ in range(2):
        with pytest.raises((WeightsMismatchError, InvalidRequestError), match=message):
            update(given, targets, known)
    assert all(torch.equal(targets[name], was) for name, was in before.items())


@pytest.mark.parametrize("why", ["finite", "range"])
def test_numbers_that_matter_are_looked_at_each_time(why: str) -> None:
    known = Known()
    given, targets = some()
    if why == "range":
        targets["b"] = targets["b"].half()
    for _ in range(2):
        update(given, targets, known, finite=why == "finite")
    given["b"][2, 3] = torch.inf if why == "finite" else 1e6
    with pytest.raises(WeightsMismatchError, match=re.escape("b ")):
        update(given, targets, known, finite=why == "finite")


def test_what_is_empty_has_to_be_in_memory_too() -> None:
    known = Known()
    given, targets = some()
    given["d"], targets["d"] = torch.empty(0), torch.empty(0)
    update(given, targets, known)
    given["d"] = torch.empty(0, device="meta")  # at the same address, if it has any
    with pytest.raises(InvalidRequestError, match="d is on the meta device"):
        update(given, targets, known)


def test_targets_that_are_exchanged_are_so_each_time() -> None:
    known = Known()
    first, second = torch.randn(6, 6), torch.randn(6, 6)
    for step in range(4):
        before = [first.clone(), second.clone()]
        staged = receive(
            {"a": second, "b": first}, targets := {"a": first, "b": second}, (), check_finite=False, known=known
        )
        staged.commit(lambda new, targets=targets: copy_each([targets[name] for name in new], new.values()))
        assert torch.equal(first, before[1]) and torch.equal(second, before[0]), step


def test_the_names_of_a_tied_tensor_bring_the_same_values_each_time() -> None:
    known = Known()
    given, targets = some()
    targets["d"], given["d"] = targets["a"], given["a"].clone()
    for _ in range(2):
        update(given, targets, known)
    given["d"][0, 0] += 1
    with pytest.raises(WeightsMismatchError, match="a and d are one tensor in the model"):
        update(given, targets, known)


def test_a_target_that_is_untied_has_to_come() -> None:
    known = Known()
    given, targets = some()
    targets["d"] = targets["a"]
    update(given, targets, known)
    targets["d"] = targets["a"].view(4, 6)  # in the same memory, and a tensor of its own
    with pytest.raises(WeightsMismatchError, match="missing d"):
        update(given, targets, known)


def test_a_target_that_need_not_come_has_to_when_checkpoints_have_it() -> None:
    known = Known()
    given, targets = some()
    targets["d"] = torch.zeros(2)
    receive(given, targets, {"d"}, check_finite=False, known=known)
    assert known.form is not None
    with pytest.raises(WeightsMismatchError, match="missing d"):
        update(given, targets, known)


def test_what_is_known_keeps_no_tensor() -> None:
    known = Known()
    given, targets = some()
    update(given, targets, known)
    assert known.form is not None
    each = [weakref.ref(t) for t in (*given.values(), *targets.values())]
    del given, targets
    gc.collect()
    assert not any(ref() is not None for ref in each)
