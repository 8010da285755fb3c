"""New weights from elsewhere: checked against the ones in service, and held beside them until they are complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from stoker.kernels.errors import WeightsMismatchError
from stoker.weight_sync.checksum import unfit

_UNCHANGED = "No weight was changed: the engine keeps its version"


@dataclass(frozen=True)
class TensorSpec:
    """What is to come under a name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass
class Staging:
    """The second of two buffers: what arrives is written here, in the dtypes of the engine, and put in service at once.

    So a transfer that dies half-way has changed nothing. It costs the memory of a second copy of the weights while a
    transfer is under way (none for tensors the caller holds anyway), and one copy at memory speed at its end.

    targets: the tensors in service, tied ones under each name. optional: names that need not come.
    """

    targets: Mapping[str, Tensor]
    optional: Collection[str]
    check_finite: bool = False
    _new: dict[str, Tensor] = field(default_factory=dict)
    _came: dict[str, int] = field(default_factory=dict)  # elements, of what does not fit none
    _problems: list[str] = field(default_factory=list)

    def check(self, specs: Sequence[TensorSpec]) -> str | None:
        """Why these cannot be taken, naming every one that is missing, unknown, twice there, or of another shape or kind."""
        problems = [problem for spec in specs if (problem := self._problem(spec)) is not None]
        problems += [f"{name} is sent twice" for name, count in Counter(s.name for s in specs).items() if count > 1]
        problems += self._missing({spec.name for spec in specs})
        return f"the weights do not fit: {'; '.join(problems)}. {_UNCHANGED}" if problems else None

    def _problem(self, spec: TensorSpec) -> str | None:
        target = self.targets.get(spec.name)
        if target is None:
            return f"unknown {spec.name}"
        if tuple(target.shape) != tuple(spec.shape):
            transposed = len(spec.shape) > 1 and tuple(target.shape) == tuple(reversed(spec.shape))
            hint = " (transposed?)" if transposed else ""
            return f"{spec.name} has shape {tuple(spec.shape)}, not {tuple(target.shape)}{hint}"
        if target.dtype.is_floating_point != spec.dtype.is_floating_point:
            return f"{spec.name} is {spec.dtype}, not {target.dtype}"
        return None

    def _missing(self, names: Collection[str]) -> list[str]:
        there = {id(self.targets[name]) for name in names if name in self.targets}
        return [
            f"missing {name}" for name, t in self.targets.items() if id(t) not in there and name not in self.optional
        ]

    def hold(self, name: str, tensor: Tensor) -> None:
        """A whole tensor that stays as it is until ``commit``, and is copied before only where that will write to it."""
        tensor, target = tensor.detach(), self.targets[name]
        if tensor.untyped_storage().data_ptr() in self._written and not same_place(tensor, target):
            tensor = tensor.clone()
        self._new[name], self._came[name] = tensor, tensor.numel()
        self._look(name, tensor)

    @cached_property
    def _written(self) -> set[int]:
        """Addresses of the storages that ``commit`` writes to."""
        return {target.untyped_storage().data_ptr() for target in self.targets.values()}

    def expect(self, spec: TensorSpec) -> bool:
        """Make room for a tensor that is to be written. False where it does not fit: ``finish`` then names it."""
        problem = f"{spec.name} is sent twice" if spec.name in self._came else self._problem(spec)
        if problem is not None:
            self._problems.append(problem)
        else:
            like = self.targets[spec.name]
            self._new[spec.name] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        self._came.setdefault(spec.name, 0)
        return problem is None

    def write(self, name: str, start: int, flat: Tensor) -> None:
        """Elements of an expected tensor from ``start`` on, to be copied now."""
        self._look(name, flat)
        self._new[name].view(-1)[start : start + flat.numel()].copy_(flat)
        self._came[name] += flat.numel()

    def _look(self, name: str, tensor: Tensor) -> None:
        self._problems += unfit([(name, tensor, self.targets[name].dtype)], finite=self.check_finite)

    def finish(self) -> None:
        """Raise ``WeightsMismatchError``, naming all that is wrong, unless all there has to be has come and can be taken."""
        problems = list(dict.fromkeys(self._problems))
        problems += self._missing(self._came)
        problems += [f"{name} came in part" for name, new in self._new.items() if self._came[name] != new.numel()]
        first: dict[int, str] = {}
        for name, new in self._new.items():
            other = first.setdefault(id(self.targets[name]), name)
            if other != name and not torch.equal(self._new[other].to(new), new):
                problems.append(f"{other} and {name} are one tensor in the model, and came with different values")
        if problems:
            raise WeightsMismatchError(f"the weights do not fit: {'; '.join(problems)}. {_UNCHANGED}")

    def commit(self) -> int:
        """Put everything in service. Returns the bytes that were written."""
        targets = [self.targets[name].detach() for name in self._new]
        with torch.no_grad():
            torch._foreach_copy_(targets, list(self._new.values()))
        self._new = {}
        return sum(t.nbytes for t in targets)


def same_place(a: Tensor | None, b: Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    return a is not None and (a.data_ptr(), a.dtype, a.shape, a.stride()) == (
        b.data_ptr(),
        b.dtype,
        b.shape,
        b.stride(),
    )
