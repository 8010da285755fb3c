"""The trainer's own tensors, borrowed: an update moves no byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stoker.kernels.errors import WeightsMovedError

# A name, its tensor, and where that lies: address, dtype, shape, stride.
_Place = tuple[str, Tensor, tuple[Any, ...]]


class AliasedSource:
    """Full parameters in the engine's dtype, on the engine's device. Nothing is ever written to them.

    ``rehome`` lets parameters that are used together share one storage, by setting their ``.data`` to row views of it:
    the parameter objects stay, so the optimizer's in-place updates, gradients and checkpoints go on as before.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._rehomed: list[nn.Parameter] = []
        self._bound: list[_Place] = []
        weight = next(module.parameters())
        self.dtype, self.device = weight.dtype, weight.device

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter and buffer by name, tied ones under each of their names."""
        found: dict[str, Tensor] = dict(self.module.named_parameters(remove_duplicate=False))
        found.update(self.module.named_buffers(remove_duplicate=False))
        return found

    def rehome(self, groups: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], Tensor]:
        """For each group of names one tensor of all their rows; groups that must not be moved are left out.

        A parameter that does not own its whole storage (a flat buffer of a sharding library, a tied weight, a mapped
        file) is never moved. Parameters that lie side by side already are only viewed.
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
                    if isinstance(part, nn.Parameter):
                        self._rehomed.append(part)
                    part.data = rows
            if whole is not None:
                fused[group] = whole
        return fused

    def bind(self) -> None:
        """Remember where every tensor lies now, so that ``moved`` can tell."""
        self._bound = list(self._places())

    def _places(self) -> Iterator[_Place]:
        for path, module in self.module.named_modules():
            for registry in (module._parameters, module._buffers):
                for name, tensor in registry.items():
                    if tensor is not None:
                        layout = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
                        yield f"{path}.{name}", tensor, layout

    def moved(self) -> bool:
        """Whether a tensor was added, taken away, renamed or replaced since ``bind``, or lies elsewhere."""
        now = list(self._places())
        return len(now) != len(self._bound) or any(
            name != bound_name or tensor is not bound or layout != bound_layout
            for (name, tensor, layout), (bound_name, bound, bound_layout) in zip(now, self._bound, strict=True)
        )

    def checksums(self) -> list[int]:
        """One number for each bound tensor, which another content would not have, but by rare chance.

        Autograd's version counters would cost nothing, and miss fused optimizers and whatever writes through
        ``.data`` or a flat buffer. This reads the weights once, as one decode step does, and at the same speed.
        """
        with torch.no_grad():
            tensors = {id(t): t for _, t, _ in self._bound if t.numel()}
            sums: list[int] = torch.stack([_checksum(t).to(self.device) for t in tensors.values()]).tolist()
        return sums

    def check(self) -> None:
        """Raise ``WeightsMovedError`` where a bound parameter changed its dtype or device."""
        for name, tensor, _ in self._bound:
            moved = tensor.device != self.device or (tensor.dtype != self.dtype and tensor.is_floating_point())
            if moved and isinstance(tensor, nn.Parameter):
                raise WeightsMovedError(
                    f"parameter {name} is now {tensor.dtype} on {tensor.device}; the engine was built for "
                    f"{self.dtype} on {self.device}. Move the model back, or build a new engine on it"
                )

    def succeed(self, former: AliasedSource) -> None:
        """Take over the duty to give the parameters that another source has moved storages of their own again."""
        self._rehomed = former._rehomed

    def release(self) -> None:
        """Give every re-homed parameter a storage of its own again."""
        for parameter in self._rehomed:
            if parameter.untyped_storage().nbytes() != parameter.nbytes:
                parameter.data = parameter.detach().clone()
        self._rehomed, self._bound = [], []


def _checksum(tensor: Tensor) -> Tensor:
    """Sum of a tensor's bytes in words of 64 bits, which runs at memory speed; int64 scalar."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words, rest = data[:whole], data[whole:]
    if words.storage_offset() % 8:
        words = words.clone()
    return words.view(torch.int64).sum() + rest.sum()


def _owns_storage(tensor: Tensor, owners: dict[int, int]) -> bool:
    storage = tensor.untyped_storage()
    return (
        tensor.is_contiguous()
        and not tensor.is_inference()  # its data cannot be set
        and tensor.storage_offset() == 0
        and storage.resizable()  # torch's own memory, no mapped file
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
