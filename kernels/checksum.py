"""Checksums of many tensors in one kernel. Torch takes a dozen for each, and reads large ones below memory speed.

The kernel can also cast what it reads and write it elsewhere, so that a copy and its checksum read the source once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, repeat
from operator import and_, attrgetter

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.kernels import launch
from stoker.kernels.host_memory import to_device
from stoker.kernels.reference.checksum import APART, FEW_WORDS, PIECE_BYTES, SET

# A program reads 127 rows of so many words, side by side, eight rows at a time, the next eight on their way meanwhile: up to 256
# bytes a thread, and 160 KiB a multiprocessor, which is several times memory's speed times its latency.
_COLUMNS, _ROWS, _WARPS = 256, 8, 4
_PER_SET = -(-APART // _COLUMNS)  # programs
_MUCH = 2**28  # bytes
_dtype, _nbytes = attrgetter("dtype"), attrgetter("nbytes")


@triton.jit
def _mixed(words):
    words = (words ^ (words >> 29)) * 0x3C79AC492BA7B653
    return words ^ (words >> 32)


@triton.jit
def _element(words, shift: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr):
    """The element of each word that begins at a bit, cast to 16 bits, as the low bits of an int64."""
    bits = words >> shift
    if SOURCE.primitive_bitwidth == 32:
        value = bits.to(tl.int32).to(SOURCE, bitcast=True)
    else:
        value = bits.to(tl.int16).to(SOURCE, bitcast=True)
    return value.to(TARGET).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF


@triton.jit
def _write(target, at, words, mask, SOURCE: tl.constexpr, TARGET: tl.constexpr):
    """Words of elements, cast to 16 bits each, where the words at those places belong: in one store a word."""
    if SOURCE is not None:
        low = _element(words, 0, SOURCE, TARGET)
        if SOURCE.primitive_bitwidth == 32:
            low = (low | _element(words, 32, SOURCE, TARGET) << 16).to(tl.int32)
            tl.store(target.to(tl.pointer_type(tl.int32)) + at, low, mask=mask)
        else:
            low |= _element(words, 16, SOURCE, TARGET) << 16 | _element(words, 32, SOURCE, TARGET) << 32
            low |= _element(words, 48, SOURCE, TARGET) << 48
            tl.store(target.to(tl.pointer_type(tl.int64)) + at, low, mask=mask)


@triton.jit
def _as_numbers(bits, DTYPE: tl.constexpr):
    """Elements of 16 or 32 bits as integers that are not negative, of which 127 can be added up."""
    if DTYPE.primitive_bitwidth == 32:
        return bits.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    else:
        return bits.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _in_words(sums, DTYPE: tl.constexpr):
    """Sums of elements, side by side, as the sums of the words that these elements are: int64."""
    even, odd = tl.split(sums.reshape(sums.shape[0] // 2, 2))
    if DTYPE.primitive_bitwidth == 32:
        return even + (odd << 32)
    else:
        low, high = tl.split((even.to(tl.int64) + (odd.to(tl.int64) << 16)).reshape(sums.shape[0] // 4, 2))
        return low + (high << 32)


@triton.jit
def _checksums_kernel(
    owners, table, sums, SOURCE: tl.constexpr, TARGET: tl.constexpr, ALIGNED: tl.constexpr, PIECE_BYTES: tl.constexpr,
    JOBS: tl.constexpr, FEW_WORDS: tl.constexpr, APART: tl.constexpr, SET: tl.constexpr, PER_SET: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Job 0 of a piece is the words that are in no set, and the bytes beyond them; the others, a few columns of a set.

    SOURCE, TARGET: the dtypes of what is read and of what is written, of which the latter has 16 bits; None: nothing is.
    ALIGNED: all tensors begin at multiples of 16 bytes.
    """
    owner = tl.load(owners + tl.program_id(0))
    address, nbytes, first = tl.load(table + 4 * owner), tl.load(table + 4 * owner + 1), tl.load(table + 4 * owner + 2)
    job = tl.program_id(0) - first
    piece = job // JOBS
    job -= piece * JOBS
    length = tl.minimum(nbytes - piece * PIECE_BYTES, PIECE_BYTES)
    start = (address + piece * PIECE_BYTES).to(tl.pointer_type(tl.int64))
    target = tl.load(table + 4 * owner + 3)
    if SOURCE is not None:
        target += piece * (PIECE_BYTES * 16 // SOURCE.primitive_bitwidth)
    if ALIGNED:
        start, target = tl.multiple_of(start, 16), tl.multiple_of(target, 16)
    count = length // 8
    rows = tl.where(count > FEW_WORDS, count // APART, 0)
    sets = rows // SET
    left = rows - sets * SET
    odd = tl.maximum(left - 1 + left % 2, 0)
    row = tl.arange(0, ROWS)[:, None]
    if job == 0:
        begin = (sets * SET + odd) * APART
        place = tl.where(count > FEW_WORDS, (sets + 1) * APART, 0)  # of the first, among all that is weighted
        at = tl.arange(0, 2 * COLUMNS).to(tl.int64)
        alone = tl.zeros([2 * COLUMNS], tl.int64)
        for _ in range(0, count - begin, 2 * COLUMNS):
            words = tl.load(start + begin + at, mask=begin + at < count, other=0)
            _write(target, begin + at, words, begin + at < count, SOURCE, TARGET)
            alone += _mixed(words) * (2 * (place + at) + 1)
            at += 2 * COLUMNS
        rest = tl.arange(0, 8)
        data = tl.load((start + count).to(tl.pointer_type(tl.uint8)) + rest, mask=count * 8 + rest < length, other=0)
        total = tl.sum(alone, 0) + tl.sum(data.to(tl.int64) * (2 * rest + 1), 0)
        if SOURCE is not None:  # elements beyond the last whole word
            width: tl.constexpr = SOURCE.primitive_bitwidth // 8
            mask = count * 8 + rest * width < length
            last = tl.load((start + count).to(tl.pointer_type(SOURCE)) + rest, mask=mask, other=0)
            tl.store((target + count * 16 // width).to(tl.pointer_type(TARGET)) + rest, last.to(TARGET), mask=mask)
    else:
        which = (job - 1) // PER_SET
        column = (job - 1) % PER_SET * COLUMNS
        size = tl.where(which < sets, SET, odd)
        if SOURCE is None:
            here = column + tl.arange(0, COLUMNS)[None, :]
            known = here < APART
            here = start + which * SET * APART + here
            words = tl.load(here + row * APART, mask=(row < size) & known, other=0)
            added = tl.zeros([COLUMNS], tl.int64)
            for done in range(0, size, ROWS):
                after = done + ROWS + row
                following = tl.load(here + after * APART, mask=(after < size) & known, other=0)
                added += tl.sum(words, 0)
                words = following
        else:
            each: tl.constexpr = 64 // SOURCE.primitive_bitwidth  # elements of a word
            here = each * column + tl.arange(0, each * COLUMNS)[None, :]
            known = here < each * APART
            here += which * (each * SET * APART)
            source, out = start.to(tl.pointer_type(SOURCE)), target.to(tl.pointer_type(TARGET))
            if ALIGNED:
                source, out = tl.multiple_of(source, 16), tl.multiple_of(out, 16)
            some = tl.load(source + here + row * (each * APART), mask=(row < size) & known, other=0.0)
            of_elements = tl.zeros([each * COLUMNS], tl.int64 if each == 2 else tl.int32)
            for done in range(0, size, ROWS):
                after = done + ROWS + row
                following = tl.load(source + here + after * (each * APART), mask=(after < size) & known, other=0.0)
                mask = (done + row < size) & known
                tl.store(out + here + (done + row) * (each * APART), some.to(TARGET), mask=mask)
                of_elements += tl.sum(_as_numbers(some, SOURCE), 0)
                some = following
            added = _in_words(of_elements, SOURCE)
        total = tl.sum(_mixed(added) * (2 * (which * APART + column + tl.arange(0, COLUMNS)) + 1), 0)
    for _ in range(piece + 1, (nbytes + PIECE_BYTES - 1) // PIECE_BYTES):
        total *= 31
    tl.atomic_add(sums + owner, total, sem="relaxed")


def _jobs(nbytes: int) -> int:
    """How many programs a tensor takes."""
    whole, rest = divmod(nbytes, PIECE_BYTES)
    return whole * _jobs_of_piece(PIECE_BYTES) + (_jobs_of_piece(rest) if rest else 0)


def _jobs_of_piece(nbytes: int) -> int:
    words = nbytes // 8
    return 1 if words <= FEW_WORDS else 1 + _PER_SET * (words // APART // SET + 1)


@lru_cache(maxsize=512)  # weights seldom move; with each bucket of a gather a few of them are looked at
def _plan(places: tuple[tuple[int, int, int], ...], device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """Which tensor each program works on, int32 [programs], and for each tensor, int64 [n, 4]: address, bytes, first
    program, and address that it is written to.
    """
    counts = torch.tensor([_jobs(nbytes) for _, nbytes, _ in places], device="cpu")
    ends = counts.cumsum(0)
    address, nbytes, target = torch.tensor(places, device="cpu").unbind(1)
    table = torch.stack([address, nbytes, ends - counts, target], 1)
    owners = torch.repeat_interleave(torch.arange(len(places), dtype=torch.int32, device="cpu"), counts)
    return to_device(owners, device), to_device(table, device)


_plan_of_much = lru_cache(maxsize=8)(_plan.__wrapped__)  # whose tables take memory, also of weights that do move


def checksums(tensors: Sequence[Tensor], targets: Sequence[Tensor] = ()) -> Tensor:
    """As the reference, with the same numbers. A tensor that is not contiguous, or begins inside a word, is copied."""
    return prepare_checksums(tensors, targets)()


def prepare_checksums(tensors: Sequence[Tensor], targets: Sequence[Tensor] = ()) -> Callable[[], Tensor]:
    """As the reference."""
    if not all(_plain(tensors)):  # a copy lies elsewhere each time
        return lambda: checksums(
            [t if plain else _made_plain(t) for t, plain in zip(tensors, _plain(tensors), strict=True)], targets
        )
    if not targets:
        return _prepare(tensors)
    kinds: dict[tuple[torch.dtype, torch.dtype, bool], list[int]] = {}
    for i, kind in enumerate(zip(map(_dtype, tensors), map(_dtype, targets), _plain(targets), strict=True)):
        kinds.setdefault(kind, []).append(i)
    parts = [
        _prepare([tensors[i] for i in chosen], [targets[i] for i in chosen], by_kernel=_is_written(*kind))
        for kind, chosen in kinds.items()
    ]
    if len(parts) == 1:
        return parts[0]
    order = torch.tensor([*chain.from_iterable(kinds.values())], device="cpu").argsort()
    places = to_device(order, tensors[0].device)
    return lambda: torch.cat([part() for part in parts]).index_select(0, places)


def _plain(tensors: Sequence[Tensor]) -> Iterator[bool]:
    """Whether each tensor is contiguous, and begins at the start of a word."""
    begins = (address % 8 == 0 for address in map(Tensor.data_ptr, tensors))
    return map(and_, map(Tensor.is_contiguous, tensors), begins)


def _made_plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().contiguous()
    return tensor.clone() if tensor.data_ptr() % 8 else tensor


def _is_written(source: torch.dtype, target: torch.dtype, plain: bool) -> bool:
    """Whether the kernel can write such tensors to such targets. plain: of the targets."""
    return plain and source in launch.TYPES and target in (torch.bfloat16, torch.float16)


def _prepare(
    data: Sequence[Tensor], targets: Sequence[Tensor] = (), *, by_kernel: bool = False
) -> Callable[[], Tensor]:
    """Checksums of plain tensors. targets: where they are written to, all of one dtype to one other."""
    device = data[0].device
    written = map(Tensor.data_ptr, targets) if by_kernel else repeat(0, len(data))
    places = tuple(zip(map(Tensor.data_ptr, data), map(_nbytes, data), written, strict=True))
    plan = _plan if sum(map(_nbytes, data)) < _MUCH else _plan_of_much
    owners, table = plan(places, device, launch.stream(device))
    aligned = PIECE_BYTES % 64 == 0 and all(address % 16 == 0 and target % 16 == 0 for address, _, target in places)
    source, target = (launch.TYPES[t[0].dtype] if by_kernel else None for t in (data, targets))

    def run() -> Tensor:
        if targets and not by_kernel:
            torch._foreach_copy_([t.detach() for t in targets], [t.detach() for t in data])
        sums = torch.zeros(len(data), dtype=torch.int64, device=device)
        if len(owners):
            with torch.accelerator.device_index(device.index):
                _checksums_kernel[(len(owners),)](
                    owners,
                    table,
                    sums,
                    SOURCE=source,
                    TARGET=target,
                    ALIGNED=aligned,
                    PIECE_BYTES=PIECE_BYTES,
                    JOBS=_jobs_of_piece(PIECE_BYTES),
                    FEW_WORDS=FEW_WORDS,
                    APART=APART,
                    SET=SET,
                    PER_SET=_PER_SET,
                    COLUMNS=_COLUMNS,
                    ROWS=_ROWS,
                    num_warps=_WARPS,
                    **launch.options(device, waits=False),
                )
        return sums

    return run
