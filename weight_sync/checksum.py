"""Checksums of tensors, made on the device they are on, and what a comparison by them found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from stoker.kernels.ops import ops_for
from stoker.kernels.reference.checksum import PIECE_BYTES


@dataclass(frozen=True, kw_only=True)
class WeightReport:
    """What ``verify_weights`` found; ``ok`` where the engine runs on the trainer's numbers.

    version: the engine's weight version. source: "aliased" (the engine reads the trainer's own tensors) or "mirror" (a
    copy in the engine's dtype). checked: tensors that were compared. mismatched: names whose content, or place, is not
    the trainer's; of an adapter that was loaded from another model, ``"its name: the tensor's"``, where it is not that
    model's. missing: names the trainer has and the engine does not. extra: names only the engine has.
    """

    source: str
    version: int
    checked: int
    mismatched: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is mismatched, missing or extra."""
        return not (self.mismatched or self.missing or self.extra)


def checksums(
    tensors: Iterable[Tensor], device: torch.device | None = None, dtypes: Sequence[torch.dtype] | None = None
) -> list[int]:
    """One number for each tensor, which other content of its shape has by rare chance only (see ``kernels.reference.checksum``).

    Made where the tensors are, and read by one copy from ``device``; None: where the first of them is. dtypes: of each
    content after a cast, whose number it then is; casts take a temporary of at most 64 MiB.
    """
    tensors = [t.detach() for t in tensors]
    if not tensors:
        return []
    device = tensors[0].device if device is None else device
    numbered = list(zip(count(), tensors, [t.dtype for t in tensors] if dtypes is None else dtypes, strict=False))
    whole: dict[torch.device, list[int]] = {}
    owners: list[int] = []  # of the numbers, in their order
    sums: list[Tensor] = []
    with torch.no_grad():
        for i, tensor, dtype in numbered:
            if tensor.dtype == dtype:
                whole.setdefault(tensor.device, []).append(i)
        for place, indices in whole.items():
            owners += indices
            sums.append(ops_for(place).checksums([tensors[i] for i in indices]).to(device))
        for lot in _casts([(i, t, dtype) for i, t, dtype in numbered if t.dtype != dtype]):
            owners += [i for i, _ in lot]
            sums.append(ops_for(lot[0][1].device).checksums([piece for _, piece in lot]).to(device))
        numbers = torch.cat(sums).tolist()
    found = [0] * len(tensors)
    for i, number in zip(owners, numbers, strict=True):
        found[i] = (31 * found[i] + number + 2**63) % 2**64 - 2**63
    return found


def take(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> list[int]:
    """Write each source to its target, cast, and return the sources' checksums: they are read once. On one device."""
    with torch.no_grad():
        return ops_for(targets[0].device).checksums([s.detach() for s in sources], targets).tolist()


def _casts(tensors: Iterable[tuple[int, Tensor, torch.dtype]]) -> Iterator[list[tuple[int, Tensor]]]:
    """Pieces of tensors after their casts, in lots on one device, each with the number of its tensor."""
    lot: list[tuple[int, Tensor]] = []
    room = PIECE_BYTES
    for i, tensor, dtype in tensors:
        for piece in torch.split(tensor.reshape(-1), PIECE_BYTES // dtype.itemsize):
            nbytes = piece.numel() * dtype.itemsize
            if lot and (nbytes > room or lot[0][1].device != piece.device):
                yield lot
                lot.clear()  # before there is another
                room = PIECE_BYTES
            lot.append((i, piece.to(dtype)))
            room -= nbytes
    if lot:
        yield lot


def unfit(tensors: Iterable[tuple[str, Tensor, torch.dtype]], *, finite: bool) -> Iterator[str]:
    """What is wrong with values of (name, tensor, dtype it is to have): beyond the range of the dtype, or not finite.

    Range is looked at where the dtype has a much smaller one (float16): bfloat16 holds every float32 that weights have.
    finite: also name what holds NaN or Inf. One pass over what is looked at, one copy to the host.
    """
    looked_at = [
        (name, tensor.detach(), dtype)
        for name, tensor, dtype in tensors
        if tensor.is_floating_point() and tensor.numel() and (finite or _narrows(tensor.dtype, dtype))
    ]
    if not looked_at:
        return
    wide = [t if t.itemsize > 1 else t.bfloat16() for _, t, _ in looked_at]  # of 8 bits torch has no norm
    maxima = torch._foreach_norm(wide, ord=float("inf"))
    device = looked_at[0][1].device
    largest = torch.stack([m.to(device, torch.float64) for m in maxima]).tolist()
    for (name, _, dtype), value in zip(looked_at, largest, strict=True):
        number = torch.tensor(value, dtype=torch.float64, device="cpu")
        if not number.isfinite():
            if finite:
                yield f"{name} holds NaN or Inf"
        elif not number.to(dtype).isfinite():
            yield f"{name} has values up to {value:.3g}, beyond what {dtype} can hold"


def _narrows(source: torch.dtype, target: torch.dtype) -> bool:
    return target.is_floating_point and 2 * torch.finfo(target).max < torch.finfo(source).max
