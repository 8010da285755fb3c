"""Named tensors that an engine took before: they are written at once, and not where anything but their numbers is another."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import sender
import torch
from torch import Tensor, nn

from stoker.kernels import copies
from stoker.kernels.errors import StokerError
from stoker.kernels.triton_ops import TRITON
from stoker.rollout import RolloutEngine
from stoker.rollout.external_weights import ExternalWeights
from stoker.weight_sync import staging
from stoker.weight_sync.aliased_source import AliasedSource

DOWN, NORM = "model.layers.0.mlp.down_proj.weight", "model.norm.weight"
New = dict[str, Tensor]


class Updated:
    """An engine that has taken the same named tensors several times, the last time at once, and those tensors with other numbers.

    received: how often any were received anew. planned: how often the kernel's copies were.
    """

    def __init__(self, patch: pytest.MonkeyPatch, dtype: str) -> None:
        self.received = self.planned = 0
        receive, prepare = ExternalWeights.receive, copies.prepare_copies

        def received(external: ExternalWeights, weights: Any) -> Any:
            self.received += 1
            return receive(external, weights)

        def planned(*tensors: Any) -> Any:
            self.planned += 1
            return prepare(*tensors)

        patch.setattr(ExternalWeights, "receive", received)
        # A CPU's copies ask each tensor where it lies, and a kernel's remember it.
        patch.setattr(staging, "ops_for", lambda device: replace(TRITON, prepare_copies=planned))
        patch.setattr(copies, "_PART_BYTES", 2**14)  # of which it takes as long to interpret as if it were full
        self.model = sender.trained(0)
        self.new = {name: torch.empty_like(p) for name, p in self.model.named_parameters()}
        self.engine = RolloutEngine(self.model, config=replace(sender.CONFIG, dtype=dtype))

    def give(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.new.values():
            # Numbers that bfloat16 holds: the interpreter cuts off what it does not.
            tensor.copy_(torch.randint(1, 100, tensor.shape, generator=generator))
        expected = {name: tensor.clone() for name, tensor in self.new.items()}
        self.engine.update_weights(self.new)
        self.check(expected)

    def check(self, expected: New) -> None:
        now = self.engine._binding.source.tensors()
        for name, tensor in expected.items():
            assert torch.equal(now[name].detach(), tensor.to(now[name].dtype)), name


@pytest.fixture(autouse=True)
def _plans_are_made_anew() -> Iterator[None]:
    """Of parts as small as here, as no other test may find them."""
    for known in (copies._plan, copies._owners):
        known.cache_clear()
    yield
    for known in (copies._plan, copies._owners):
        known.cache_clear()


@contextmanager
def updated(dtype: str = "float32") -> Iterator[Updated]:
    with pytest.MonkeyPatch.context() as patch:
        one = Updated(patch, dtype)
        with one.engine:
            for seed in (1, 2, 3):
                one.give(seed)
            assert (one.received, one.planned) == (1, 1)
            yield one


DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # the model's own tensors, and a mirror

GIVEN: dict[str, Callable[[New], object]] = {
    "elsewhere": lambda new: new.update({DOWN: new[DOWN].clone()}),
    "other memory": lambda new: setattr(new[DOWN], "data", new[DOWN].clone()),
    "of another dtype": lambda new: new.update({DOWN: new[DOWN].half()}),
    "retyped": lambda new: setattr(new[DOWN], "data", new[DOWN].view(torch.bfloat16)[:, ::2]),
    "laid otherwise": lambda new: setattr(new[DOWN], "data", new[DOWN].view(-1).view(new[DOWN].shape[::-1]).T),
    "in another order": lambda new: new.update({DOWN: new.pop(DOWN)}),
}


@DTYPES
@pytest.mark.parametrize("kind", GIVEN)
def test_tensors_that_are_given_otherwise_are_received_anew(kind: str, dtype: str) -> None:
    with updated(dtype) as one:
        GIVEN[kind](one.new)
        for seed in (4, 5, 6):
            one.give(seed)
        assert (one.received, one.planned) == (2, 2)


@DTYPES
def test_only_a_dict_is_taken_at_once(dtype: str) -> None:
    with updated(dtype) as one:
        one.engine.update_weights(iter([*one.new.items()]))
        assert one.received == 2
        one.give(4)
        assert (one.received, one.planned) == (2, 1), "what is known of the dict stays"


def _replace(model: Any) -> None:
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach().clone())


def _moved(model: Any, name: str, move: Callable[[Tensor], Tensor]) -> None:
    parameter = model.get_parameter(name)
    parameter.data = move(parameter.detach())


TARGETS: dict[str, Callable[[Any], object]] = {
    "replaced": _replace,
    "elsewhere": lambda model: _moved(model, NORM, Tensor.clone),
    "laid otherwise": lambda model: _moved(model, DOWN, lambda t: t.t().contiguous().t()),
    "laid otherwise in place": lambda model: _moved(model, DOWN, lambda t: t.view(t.shape[::-1]).T),
    "of another setting": lambda model: setattr(model.model.norm, "variance_epsilon", 1e-3),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_a_model_whose_tensors_lie_otherwise_gets_them_all(kind: str) -> None:
    with updated() as one:
        TARGETS[kind](one.model)
        for seed in (4, 5, 6):
            one.give(seed)
            assert all(torch.equal(p, one.new[name]) for name, p in one.model.named_parameters())
        assert one.received == 2
        sender.check(one.engine, one.model, one.engine.weight_version)


def test_a_source_that_is_bound_anew_has_other_places() -> None:
    source = AliasedSource(sender.trained(0))
    source.bind()
    before = source.places
    assert source.places is before
    source.bind()
    assert source.places is not before


def test_memory_that_a_model_shares_with_what_is_given() -> None:
    with updated() as one:
        one.model.model.norm.weight.data = one.new[NORM]
        for seed in (4, 5):
            one.give(seed)
        assert one.received == 3, "some of it is copied first, each time"


def test_a_mirror_that_slept_lies_elsewhere() -> None:
    with updated("bfloat16") as one:
        mirror = one.engine._binding.source.mirror  # type: ignore[attr-defined]
        before = mirror.places
        one.engine.sleep(level=2)
        kept = torch.ones(2**16, dtype=torch.uint8)  # of what was given back, maybe
        one.engine.wake_up()
        assert mirror.places is not before
        for seed in (4, 5):
            one.give(seed)
        assert one.received == 2 and kept.eq(1).all()


REFUSED: dict[str, tuple[Callable[[New], object], str]] = {
    "missing": (lambda new: new.pop(DOWN), f"missing {DOWN}"),
    "unknown": (lambda new: new.update(more=torch.ones(1)), "unknown more"),
    "renamed": (lambda new: new.update(more=new.pop(DOWN)), "unknown more"),
    "of another shape": (lambda new: setattr(new[DOWN], "data", new[DOWN][1:]), f"{DOWN} has shape"),
    "of another shape in place": (lambda new: setattr(new[DOWN], "data", new[DOWN][:-1]), f"{DOWN} has shape"),
    "transposed": (lambda new: new[DOWN].t_(), "transposed"),
    "integers": (lambda new: setattr(new[DOWN], "data", new[DOWN].view(torch.int32)), f"{DOWN} is torch.int32"),
    "sparse": (lambda new: new.update({DOWN: new[DOWN].to_sparse()}), "torch.sparse_coo"),
    "on no device": (lambda new: new.update({DOWN: new[DOWN].to("meta")}), "meta device"),
    "no tensor": (lambda new: new.update({DOWN: 3}), "give None, named tensors"),  # type: ignore[dict-item]
}


@DTYPES
@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_any_more_is_refused_before_anything_is_written(kind: str, dtype: str) -> None:
    with updated(dtype) as one:
        change, message = REFUSED[kind]
        right, before = {**one.new}, {name: tensor.clone() for name, tensor in one.new.items()}
        change(one.new)
        for tensor in (
            t for t in one.new.values() if isinstance(t, Tensor) and t.is_floating_point() and not t.is_meta
        ):
            tensor.mul_(2)
        for _ in range(2):
            with pytest.raises(StokerError, match=message):
                one.engine.update_weights(one.new)
            one.check(before)
        assert one.engine.weight_version == 3
        one.new = {name: tensor if tensor.dtype.is_floating_point else before[name] for name, tensor in right.items()}
        one.new |= {name: torch.empty_like(t) for name, t in before.items() if one.new[name].shape != t.shape}
        one.give(4)


def test_a_tensor_that_a_model_got_meanwhile_has_to_come() -> None:
    with updated() as one:
        before = {name: tensor.clone() for name, tensor in one.new.items()}
        one.model.model.norm.register_parameter("bias", nn.Parameter(torch.zeros(3)))
        one.new[NORM].mul_(2)
        with pytest.raises(StokerError, match="bias"):
            one.engine.update_weights(one.new)
        one.check(before)


def test_nothing_that_was_given_is_kept() -> None:
    with updated() as one:
        each = [weakref.ref(tensor) for tensor in one.new.values()]
        one.new.clear()
        gc.collect()
        assert not any(ref() is not None for ref in each)


def test_finite_numbers_are_looked_for_each_time() -> None:
    model = sender.trained(0)
    new = {name: p.detach().clone() for name, p in model.named_parameters()}
    with RolloutEngine(model, config=replace(sender.CONFIG, check_finite_weights=True)) as engine:
        for _ in range(3):
            engine.update_weights(new)
        new[NORM][1] = torch.nan
        with pytest.raises(StokerError, match=f"{NORM} holds NaN"):
            engine.update_weights(new)
        assert engine.weight_version == 3 and model.model.norm.weight.isfinite().all()
