"""Checksums of tensors, made on their device; and ``WeightReport``, the result of comparing weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, count
from operator import attrgetter

import torch
from torch import Tensor

from stoker.kernels.host_memory import to_device
from stoker.kernels.ops import ops_for
from stoker.kernels.reference.checksum import PIECE_BYTES

_dtype = attrgetter("dtype")


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
    tensors: Iterable[Tensor], device: torch.device | None = None, dtypes: Sequence[torch.dtype] | None = None
) -> list[int]:
    """One number for each tensor; other content has the same only by rare chance (see ``kernels.reference.checksum``).

    They are made where the tensors are, and read by one copy from ``device``; None: where the first tensor is. dtypes: to which
    tensors are cast first, as copies of at most 64 MiB at a time.
    """
    tensors = list(tensors)
    if not tensors:
        return []
    device = tensors[0].device if device is None else device
    numbered = list(zip(count(), tensors, map(_dtype, tensors) if dtypes is None else dtypes, strict=False))
    whole: dict[torch.device, list[int]] = {}
    owners: list[int] = []  # which tensor each number is of
    sums: list[Tensor] = []
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


def prepare(tensors: Sequence[Tensor], device: torch.device, targets: Sequence[Tensor] = ()) -> Callable[[], Tensor]:
    """A function that makes the ``checksums`` each time it is called, valid while all tensors stay where they are.

    It gives them as int64 [tensors] on ``device``, and waits for no device. targets: tensors there to which the first tensors,
    which are there too, are written, cast, as they are read.
    """
    lots: dict[torch.device | None, list[int]] = {None: list(range(len(targets)))} if targets else {}
    for i, tensor in enumerate(tensors[len(targets) :], len(targets)):
        lots.setdefault(tensor.device, []).append(i)
    parts = [
        ops_for(place or device).prepare_checksums([tensors[i] for i in lot], () if place else targets)
        for place, lot in lots.items()
    ]
    owners = torch.tensor([*chain.from_iterable(lots.values())], dtype=torch.int64, device="cpu")
    order = to_device(owners.argsort(), device) if len(parts) > 1 else None

    def checksums() -> Tensor:
        made = [part().to(device) for part in parts]
        if order is None:
            return made[0] if made else torch.zeros(0, dtype=torch.int64, device=device)
        return torch.cat(made)[order]

    return checksums


def _casts(tensors: Iterable[tuple[int, Tensor, torch.dtype]]) -> Iterator[list[tuple[int, Tensor]]]:
    """Cast pieces of tensors, in lots on one device, each with its tensor's number."""
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


_Number = tuple[str, Tensor, torch.dtype]  # a name, the tensor, and the dtype it is to have


def in_doubt(tensors: Iterable[_Number], *, finite: bool) -> Iterator[_Number]:
    """The tensors whose values ``unfit`` looks at: all if ``finite``, else those whose new dtype has a much smaller range.

    That is float16; bfloat16 can hold every float32 that weights have.
    """
    for name, tensor, dtype in tensors:
        doubtful = (finite and tensor.is_floating_point()) or _narrows(tensor.dtype, dtype)
        if doubtful and tensor.numel():
            yield name, tensor, dtype


def unfit(tensors: Iterable[_Number], *, finite: bool) -> Iterator[str]:
    """What is wrong with values of tensors: beyond the range of the dtype, or not finite.

    finite: also name what holds NaN or Inf. One pass over what is looked at, one copy to the host.
    """
    looked_at = [(name, tensor.detach(), dtype) for name, tensor, dtype in in_doubt(tensors, finite=finite)]
    if not looked_at:
        return
    norms = partial(torch._foreach_norm, ord=float("inf"))
    wide = [t for _, t, _ in looked_at if t.itemsize > 1]
    of_wide = iter(norms(wide) if wide else ())
    # Torch has no norm in 8 bits. One after the other, so that only one copy takes memory at a time.
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
