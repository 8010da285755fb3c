"""The manifest of a transfer, by which its sender announces it, and a receiver's answer: a refusal, or what it lacks."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from stoker.kernels.errors import InvalidRequestError
from stoker.weight_sync.checksum import checksums

_LOT_BYTES = 2**30  # of tensors whose checksums are made together: some are copied for it, or made when asked for


@dataclass(frozen=True)
class TensorSpec:
    """What is to come under a name. checksum: of its content, where the sender made one."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int | None = None

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """What a transfer brings, and how it is cut into buckets.

    specs: one of each tensor. bucket_bytes: the most that goes at a time. transfer_id: a number that no other transfer has.
    """

    specs: tuple[TensorSpec, ...]
    bucket_bytes: int
    transfer_id: int = field(default_factory=lambda: secrets.randbits(62))

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return min(self.bucket_bytes, sum(s.nbytes for s in self.specs))

    def only(self, numbers: Collection[int]) -> Manifest:
        """The same transfer with only the tensors of these numbers."""
        return replace(self, specs=tuple(self.specs[number] for number in sorted(numbers)))

    def buckets(self) -> Iterator[list[tuple[TensorSpec, int, int]]]:
        """(spec, first element, elements) of each bucket. Widest dtypes first, so that all are aligned."""
        bucket: list[tuple[TensorSpec, int, int]] = []
        room = self.bucket_bytes
        for spec in sorted(self.specs, key=lambda s: -s.dtype.itemsize):
            start = 0
            while start < spec.numel:
                if room < spec.dtype.itemsize:
                    yield bucket
                    bucket, room = [], self.bucket_bytes
                count = min(spec.numel - start, room // spec.dtype.itemsize)
                bucket.append((spec, start, count))
                start, room = start + count, room - count * spec.dtype.itemsize
        if bucket:
            yield bucket


class Judge(Protocol):
    """A receiver's judgement of what is announced to it."""

    def __call__(self, specs: Sequence[TensorSpec], /) -> str | None:
        """Why these cannot be taken; None where they can."""

    def wanted(self, specs: Sequence[TensorSpec], /) -> list[int]:
        """The places among ``specs`` of what has to come, as the receiver holds something else. The others may come too."""


Answer = tuple[str | None, Collection[int]]  # a refusal, or what is wanted


def announce(tensors: Mapping[str, Tensor], bucket_bytes: int) -> Manifest:
    """The manifest of all of them, with a checksum of each, for which they are read once."""
    specs: list[TensorSpec] = []
    for lot in _in_lots(tensors):
        sums = checksums(tensor for _, tensor in lot)
        specs += [replace(spec, checksum=number) for (spec, _), number in zip(lot, sums, strict=True)]
    return Manifest(tuple(specs), max(8, bucket_bytes, *(spec.dtype.itemsize for spec in specs)))


def _in_lots(tensors: Mapping[str, Tensor]) -> Iterator[list[tuple[TensorSpec, Tensor]]]:
    lot: list[tuple[TensorSpec, Tensor]] = []
    room = _LOT_BYTES
    for name, tensor in tensors.items():
        spec = spec_of(name, tensor)
        if lot and spec.nbytes > room:
            yield lot
            lot, room = [], _LOT_BYTES
        lot.append((spec, tensor))
        room -= spec.nbytes
    if lot:
        yield lot


def answer(judge: Judge | None, manifest: Manifest) -> Answer:
    """A receiver's answer to a manifest. One without a judge takes everything."""
    if judge is None:
        return None, range(len(manifest.specs))
    refusal = judge(manifest.specs)
    return refusal, judge.wanted(manifest.specs) if refusal is None else ()


def not_weights(given: Any) -> InvalidRequestError:
    return InvalidRequestError(
        f"weights={type(given).__name__}: give None, named tensors (a mapping, or (name, tensor) pairs), the path of a "
        "safetensors file or folder, or a WeightTransfer"
    )


def spec_of(name: Any, tensor: Any) -> TensorSpec:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise not_weights(tensor)
    if (
        type(tensor) is not Tensor
        and not isinstance(tensor, torch.nn.Parameter)
        and type(tensor.detach()) is not Tensor
    ):
        raise InvalidRequestError(
            f"{name} is a {type(tensor).__name__}: give plain tensors (full_tensor() of a DTensor)"
        )
    if tensor.is_meta or tensor.layout is not torch.strided:  # found before others are written, and not while they are
        raise InvalidRequestError(
            f"{name} is {'on the meta device' if tensor.is_meta else tensor.layout}, with no data to copy: give plain tensors "
            "that are in memory"
        )
    return TensorSpec(name, tuple(tensor.shape), tensor.dtype)
