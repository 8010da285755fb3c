"""Checksums of tensors, made on the device they are on, and what a comparison by them found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

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


@torch.no_grad()
def checksums(
    tensors: Iterable[Tensor],
    device: torch.device | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    targets: Sequence[Tensor] = (),
) -> list[int]:
    """One number for each tensor, which other content of its shape has by rare chance only (see ``kernels.reference.checksum``).

    Made where the tensors are, and read by one copy from ``device``; None: where the first of them is. dtypes: of each
    content after a cast, whose number it then is; casts take a temporary of at most 64 MiB. targets: on ``device``, where
    the first of the tensors, which are there too, are written to while they are read, cast.
    """
    tensors = list(tensors)
    if not tensors:
        return []
    device = tensors[0].device if device is None else device
    whole: dict[torch.device, list[int]] = {}
    cast: list[tuple[int, Tensor, torch.dtype]] = []
    owners = list(range(len(targets)))  # of the numbers, in their order
    sums = [ops_for(device).checksums(tensors[: len(targets)], targets)] if targets else []
    for i, tensor in enumerate(tensors[len(targets) :], len(targets)):
        if dtypes is None or dtypes[i] == tensor.dtype:
            whole.setdefault(tensor.device, []).append(i)
        else:
            cast.append((i, tensor, dtypes[i]))
    for place, indices in whole.items():
        owners += indices
        sums.append(ops_for(place).checksums([tensors[i] for i in indices]).to(device))
    found = [0] * len(tensors)
    in_pieces = len(owners)
    for lot in _casts(cast):
        owners += [i for i, _ in lot]
        sums.append(ops_for(lot[0][1].device).checksums([piece for _, piece in lot]).to(device))
    numbers = torch.cat(sums).tolist()
    for i, number in zip(owners[:in_pieces], numbers, strict=False):
        found[i] = number
    for i, number in zip(owners[in_pieces:], numbers[in_pieces:], strict=True):
        found[i] = (31 * found[i] + number + 2**63) % 2**64 - 2**63
    return found


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
        if (finite and tensor.is_floating_point()) or _narrows(tensor.dtype, dtype)
        if tensor.numel()
    ]
    if not looked_at:
        return
    norms = partial(torch._foreach_norm, ord=float("inf"))
    wide = [t for _, t, _ in looked_at if t.itemsize > 1]
    of_wide = iter(norms(wide) if wide else ())
    # Of 8 bits torch has no norm; one after the other, so that they take the memory of one.
    maxima = [next(of_wide) if t.itemsize > 1 else norms([t.bfloat16()])[0] for _, t, _ in looked_at]
    device = looked_at[0][1].device
    largest = torch.stack([m.to(device, torch.float64) for m in maxima]).tolist()
    for (name, _, dtype), value in zip(looked_at, largest, strict=True):
        number = torch.tensor(value, dtype=torch.float64, device="cpu")
        if not number.isfinite():
            if finite:
                yield f"{name} holds NaN or Inf"
        elif not number.to(dtype).isfinite():
            yield f"{name} has values up to {value:.3g}, beyond what {dtype} can hold"


@cache
def _narrows(source: torch.dtype, target: torch.dtype) -> bool:
    floating = source.is_floating_point and target.is_floating_point
    return floating and 2 * torch.finfo(target).max < torch.finfo(source).max
