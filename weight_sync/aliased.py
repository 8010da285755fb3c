"""The trainer's own tensors, borrowed: an update moves no byte."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stoker.kernels.errors import WeightsMovedError


class AliasedSource:
    """Full parameters in the engine's dtype, on the engine's device. Nothing is ever written to them.

    ``rehome`` lets parameters that are used together share one storage, by setting their ``.data`` to row views of it:
    the parameter objects stay, so the optimizer's in-place updates, gradients and checkpoints go on as before.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._rehomed: list[nn.Parameter] = []
        self._bound: list[tuple[dict[str, Tensor | None], str, Tensor, int, int]] = []
        weight = next(module.parameters())
        self.dtype, self.device = weight.dtype, weight.device

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter and buffer by name, tied ones under each of their names."""
        found: dict[str, Tensor] = dict(self.module.named_parameters(remove_duplicate=False))
        found.update(self.module.named_buffers(remove_duplicate=False))
        return found

    def rehome(self, groups: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], Tensor]:
        """For each group of names one tensor of all their rows; groups that must not be moved are left out.

        A parameter that does not own its whole storage (a flat buffer of a sharding library, a tied weight) is never
        moved. Parameters that lie side by side already are only viewed.
        """
        named = self.tensors()
        owners: dict[int, int] = {}
        for _, parameter in self.module.named_parameters():
            address = parameter.untyped_storage().data_ptr()
            owners[address] = owners.get(address, 0) + 1
        fused = {}
        for group in groups:
            parts = [named[name] for name in group]
            whole = _view_side_by_side(parts)
            if whole is None and all(_owns_storage(p, owners) for p in parts) and _alike(parts):
                whole = torch.cat([p.detach() for p in parts])
                for part, rows in zip(parts, torch.split(whole, [p.shape[0] for p in parts]), strict=True):
                    part.data = rows
                    if isinstance(part, nn.Parameter):
                        self._rehomed.append(part)
            if whole is not None:
                fused[group] = whole
        return fused

    def bind(self) -> None:
        """Remember where every tensor lies now, so that ``moved`` and ``changed`` can tell."""
        self._bound = []
        for module in self.module.modules():
            for registry in (module._parameters, module._buffers):
                for name, tensor in registry.items():
                    if tensor is not None:
                        self._bound.append((registry, name, tensor, tensor.data_ptr(), tensor._version))  # type: ignore[arg-type]

    def moved(self) -> bool:
        """Whether any tensor is another object, or lies elsewhere, than when it was bound."""
        return any(
            registry.get(name) is not tensor or tensor.data_ptr() != address
            for registry, name, tensor, address, _ in self._bound
        )

    def changed(self) -> bool:
        """Whether a tensor has moved or was written to in place (as autograd counts it) since ``bind``."""
        return self.moved() or any(tensor._version != version for _, _, tensor, _, version in self._bound)

    def check(self) -> None:
        """Raise ``WeightsMovedError`` where the parameters can no longer be borrowed."""
        for name, parameter in self.module.named_parameters():
            if (parameter.dtype != self.dtype and parameter.is_floating_point()) or parameter.device != self.device:
                raise WeightsMovedError(
                    f"parameter {name} is now {parameter.dtype} on {parameter.device}; the engine was built for "
                    f"{self.dtype} on {self.device}. Move the model back, or build a new engine on it"
                )

    def release(self) -> None:
        """Give every re-homed parameter a storage of its own again."""
        for parameter in self._rehomed:
            if parameter.untyped_storage().nbytes() != parameter.nbytes:
                parameter.data = parameter.detach().clone()
        self._rehomed, self._bound = [], []


def _owns_storage(tensor: Tensor, owners: dict[int, int]) -> bool:
    storage = tensor.untyped_storage()
    return (
        tensor.is_contiguous()
        and tensor.storage_offset() == 0
        and storage.nbytes() == tensor.nbytes
        and owners.get(storage.data_ptr()) == 1
    )


def _alike(tensors: Sequence[Tensor]) -> bool:
    return len({(t.dtype, t.device, t.shape[1:]) for t in tensors}) == 1


def _view_side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """One tensor over all rows where they follow each other in one storage, else None."""
    first = tensors[0]
    if not _alike(tensors) or not all(t.is_contiguous() for t in tensors):
        return None
    offset = first.storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or tensor.storage_offset() != offset:
            return None
        offset += tensor.numel()
    whole = first.detach().new_empty(0)
    rows = sum(t.shape[0] for t in tensors)
    return whole.set_(first.untyped_storage(), first.storage_offset(), (rows, *first.shape[1:]), first.stride())
