"""Checksums of tensors, as plain torch. They find weights that changed without notice, or that are not the trainer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

PIECE_BYTES = 64 * 2**20  # of a tensor, the most that one weighted sum covers
FEW_WORDS = 2**13  # up to 64 KiB every word is weighted by itself
# Beyond it words are summed in sets first. Rows have lengths that the prime in this, 509, does not divide, so rows or columns
# that changed places are in other sets than before; and of an odd number of words, flips of all their highest bits are seen.
# It is even, so that words are read two at a time.
APART, SET = 1018, 127
_STACKED_BYTES = 2**20  # up to so much, tensors of one kind are stacked and looked at together: launching costs more
_LOT_BYTES = 2**20  # the most that is stacked at a time: it takes its memory again, twice, and is to stay in cache


def checksums(tensors: Sequence[Tensor], targets: Sequence[Tensor] = ()) -> Tensor:
    """One number for each tensor, which other content of its shape has by rare chance only.

    tensors: of any shapes, dtypes and strides, on one device. targets: where each is also written to, cast to the
    target's dtype, on the same device; without targets nothing is written. Returns int64 [tensors]; 0 for an empty one.

    Content is little-endian bytes, in the order of the elements. It is cut into pieces of 64 MiB, whose sums s are
    combined as 31 * before + s, modulo 2**64. A piece is 64-bit words w[i]. Where it has more than 8192 of them, words
    1018 apart are first added up in sets of 127. (The last set is what is left, less one where that is even; words beyond
    it stay as they are.) The sum is that of (2 i + 1) * mix(w[i]), and of (2 i + 1) * b[i] over the bytes beyond the last
    whole word. A change that only exchanges words within such sets, or leaves all their sums as they are, is not seen.
    """
    return prepare_checksums(tensors, targets)()


def prepare_checksums(tensors: Sequence[Tensor], targets: Sequence[Tensor] = ()) -> Callable[[], Tensor]:
    """A function that gives the ``checksums`` of these tensors each time it is called, as long as they stay where they are."""
    lots = _lots(tensors)
    order = torch.tensor([*chain.from_iterable(lots)], device=tensors[0].device if tensors else None)

    def run() -> Tensor:
        with torch.no_grad():
            if targets:
                torch._foreach_copy_(list(targets), list(tensors))
            numbers = torch.cat([_of_alike([tensors[i] for i in lot]) for lot in lots])
            return torch.empty_like(numbers).index_copy_(0, order, numbers)

    return run


def _lots(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Groups of tensors that are worked on together, by their indices."""
    alike: dict[object, list[int]] = {}
    for index, tensor in enumerate(tensors):
        stacked = tensor.nbytes <= _STACKED_BYTES
        alike.setdefault((tensor.shape, tensor.dtype) if stacked else index, []).append(index)
    lots = []
    for indices in alike.values():
        size = max(1, _LOT_BYTES // max(1, tensors[indices[0]].nbytes))
        lots += [indices[start : start + size] for start in range(0, len(indices), size)]
    return lots


def _of_alike(tensors: Sequence[Tensor]) -> Tensor:
    """The checksums of tensors of one shape and dtype, int64 [tensors]."""
    data = tensors[0].reshape(1, -1) if len(tensors) == 1 else torch.stack(list(tensors)).view(len(tensors), -1)
    data = data.contiguous().view(torch.uint8)  # of every other element, reshaping makes a view
    total = torch.zeros(len(data), dtype=torch.int64, device=data.device)
    for piece in torch.split(data, PIECE_BYTES, dim=1):
        total = 31 * total + _weighted_sums(piece)
    return total


def _weighted_sums(data: Tensor) -> Tensor:
    """The weighted sum of each row of bytes, int64 [rows]. data: uint8 [rows, bytes]."""
    count, whole = len(data), data.shape[1] // 8 * 8
    words, rest = data[:, :whole].contiguous().view(-1), data[:, whole:]
    if words.storage_offset() % 8:
        words = words.clone()
    words = words.view(torch.int64).view(count, whole // 8)
    if words.shape[1] > FEW_WORDS:
        rows = words.shape[1] // APART
        whole_sets = rows // SET * SET
        odd = max(0, (rows - whole_sets - 1) // 2 * 2 + 1)  # rows of one more set, if there are any
        end = (whole_sets + odd) * APART
        body = words[:, :end].view(count, -1, APART)
        sums = body[:, :whole_sets].view(count, -1, SET, APART).sum(2)
        words = torch.cat([sums.flatten(1), body[:, whole_sets:].sum(1), words[:, end:]], dim=1)
    weights = torch.arange(1, 2 * max(words.shape[1], 7), 2, device=data.device)
    total = _mixed(words).mul_(weights[: words.shape[1]]).sum(1)
    return total + (rest * weights[: rest.shape[1]]).sum(1) if rest.shape[1] else total


def _mixed(words: Tensor) -> Tensor:
    """Words with their high bits mixed into the low ones.

    Alone they would be lost: 2**63 times any two odd numbers adds up to 0.
    """
    mixed = words >> 29
    mixed ^= words
    mixed *= 0x3C79AC492BA7B653
    mixed ^= mixed >> 32
    return mixed
