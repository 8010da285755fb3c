"""Checksums of tensors, made on the device they are on, and what a comparison by them found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_CHUNK_BYTES = 64 * 2**20  # the most that one weighted sum covers, and the most a cast makes
_FEW_WORDS = 2**13  # up to 64 KiB every word is weighted by itself
# Beyond it words are summed in sets first. Rows have lengths that this prime does not divide, so rows or columns that
# changed places are in other sets than before; and of an odd number of words, flips of all their highest bits are seen.
_APART, _SET = 1021, 127
_WEIGHTS = 2**18  # more than sums of sets in a chunk, and words left over


@dataclass(frozen=True, kw_only=True)
class WeightReport:
    """What ``verify_weights`` found; ``ok`` where the engine runs on the trainer's numbers.

    version: the engine's weight version. source: "aliased" (the engine reads the trainer's own tensors) or "mirror" (a
    copy in the engine's dtype). checked: tensors that were compared. mismatched: names whose content, or place, is not
    the trainer's. missing: names the trainer has and the engine does not. extra: names only the engine has.
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


def checksum(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A number that another content of the same shape would not have, but by rare chance; int64 scalar.

    It depends on where a value lies: permuted, shifted or transposed content has another one. In tensors above 64 KiB,
    64-bit words that lie 8168 bytes apart are summed first, in sets of 127: what exchanges words inside such sets
    alone, or leaves all their sums as they are, is not seen. dtype: of the content after a cast, whose checksum it then
    is. Runs at memory speed; a cast takes a temporary of at most 64 MiB.
    """
    dtype = dtype or tensor.dtype
    data = tensor.detach().contiguous().view(-1)
    total: Tensor | None = None
    for part in torch.split(data, _CHUNK_BYTES // dtype.itemsize):
        number = _weighted_sum(part.to(dtype).view(torch.uint8))
        total = number if total is None else 31 * total + number
    return torch.zeros((), dtype=torch.int64, device=data.device) if total is None else total


def checksums(tensors: Iterable[Tensor], device: torch.device) -> list[int]:
    """One number each, with one copy to the host."""
    with torch.no_grad():
        sums = [checksum(t).to(device) for t in tensors]
        numbers: list[int] = torch.stack(sums).tolist() if sums else []
    return numbers


def _weighted_sum(data: Tensor) -> Tensor:
    whole = data.numel() // 8 * 8
    words, rest = data[:whole], data[whole:]
    if words.storage_offset() % 8:
        words = words.clone()
    words = words.view(torch.int64)
    if words.numel() > _FEW_WORDS:
        rows = words.numel() // _APART
        whole_sets = rows // _SET * _SET
        odd = max(0, (rows - whole_sets - 1) // 2 * 2 + 1)  # rows of one more set, if there are any
        body = words[: (whole_sets + odd) * _APART].view(-1, _APART)
        sums = body[:whole_sets].view(-1, _SET, _APART).sum(1)
        words = torch.cat([sums.view(-1), body[whole_sets:].sum(0), words[body.numel() :]])
    weights = _odd_numbers(data.device)
    total = (_mixed(words) * weights[: words.numel()]).sum()
    return total + (rest * weights[: rest.numel()]).sum() if rest.numel() else total


def _mixed(words: Tensor) -> Tensor:
    """The high bits brought into the low ones.

    Alone they would be lost: 2**63 times any two odd numbers adds up to 0.
    """
    words = (words ^ (words >> 29)) * 0x3C79AC492BA7B653
    return words ^ (words >> 32)


@cache
def _odd_numbers(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(1, 2 * _WEIGHTS, 2, device=device)


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
    maxima = torch._foreach_norm([t for _, t, _ in looked_at], ord=float("inf"))
    device = looked_at[0][1].device
    largest = torch.stack([m.to(device, torch.float64) for m in maxima]).tolist()
    for (name, tensor, dtype), value in zip(looked_at, largest, strict=True):
        number = torch.tensor(value, dtype=torch.float64)
        if not number.isfinite():
            if finite:
                yield f"{name} holds NaN or Inf"
        elif not number.to(tensor.dtype).to(dtype).isfinite():
            yield f"{name} has values up to {value:.3g}, beyond what {dtype} can hold"


def _narrows(source: torch.dtype, target: torch.dtype) -> bool:
    return target.is_floating_point and 2 * torch.finfo(target).max < torch.finfo(source).max
