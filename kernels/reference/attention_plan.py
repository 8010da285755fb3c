"""What a step's attention over a paged KV cache reads: which keys a query sees, and in which blocks they are.

A row's block table names its blocks in order. Rows with one query are batched: they are sorted by length and gathered a few
at a time, so that there is little padding, and what is gathered is still in cache when it is read. Rows with several
queries (chunks of prompts) are worked on one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

_T = TypeVar("_T")
# Keys and values gathered at a time: enough to amortise the calls, little enough to be in cache when it is read.
_GATHER_BYTES = 8 * 2**20
_MAX_QUERIES = 1024  # of one row at a time: bounds the mask, and skips keys that none of them may see


class Visibility(NamedTuple):  # which is hashed at every layer
    """Which earlier keys a query sees, besides causality.

    window: the last ``window`` keys, its own among them (sliding-window attention); chunk: only keys of the query's
    own chunk of ``chunk`` positions (Llama 4).
    """

    window: int | None = None
    chunk: int | None = None

    def first(self, query: int) -> int:
        """The first key that the query at this position sees."""
        first = 0 if self.window is None else max(0, query - self.window + 1)
        return first if self.chunk is None else max(first, query - query % self.chunk)

    def hidden(self, query: Tensor, key: Tensor, newest: Tensor | None = None) -> Tensor:
        """True where the key may not be seen; ``query`` and ``key`` are positions that broadcast.

        newest: the last key that each query may see, as ``query`` is, where that is not its own.
        """
        hidden = key > (query if newest is None else newest)
        if self.window is not None:
            hidden |= key <= query - self.window
        if self.chunk is not None:
            hidden |= key < query - query % self.chunk
        return hidden


PLAIN = Visibility()


class Tables(NamedTuple):
    """Block tables of the same rows, int64 [..., blocks]: of layers that see all keys, and of those with a window.

    Of a window's table, the entries of blocks that no query sees any more are undefined.
    """

    whole: Tensor
    window: Tensor

    def of(self, visibility: Visibility) -> Tensor:
        return self.whole if visibility == PLAIN else self.window

    def map(self, change: Callable[[Tensor], Tensor]) -> Tables:
        whole = change(self.whole)
        return Tables(whole, whole if self.window is self.whole else change(self.window))


@dataclass(frozen=True, slots=True)
class Decode:
    """Rows with one query each. rows: [r], token index of each, None for all in order; tables: of [r, n] blocks.

    key_lens: keys that each row sees in the first of the steps, without rows of padding.
    """

    rows: Tensor | None
    tables: Tables
    key_lens: Sequence[int]
    num_steps: int
    block_size: int
    _seen: dict[Visibility, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def seen(self, visibility: Visibility) -> tuple[Tensor, Tensor]:
        """Blocks of the keys that rows see in these steps, int64 [r, k], and where each row's begin, int64 [r, 1]."""
        if visibility not in self._seen:
            self._seen[visibility] = self._find_seen(visibility)
        return self._seen[visibility]

    def _find_seen(self, visibility: Visibility) -> tuple[Tensor, Tensor]:
        table, size = self.tables.of(visibility), self.block_size
        firsts = [visibility.first(n - 1) // size for n in self.key_lens]
        start = torch.zeros(table.shape[0], 1, dtype=torch.long, device=table.device)
        if not any(firsts):
            return table, start
        width = (
            max((n + self.num_steps - 2) // size - first for n, first in zip(self.key_lens, firsts, strict=True)) + 1
        )
        start[: len(firsts), 0] = torch.tensor(firsts, device=table.device)
        at = (start + torch.arange(width, device=table.device)).clamp_(max=table.shape[1] - 1)
        return table.gather(1, at), start * size


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several queries of one row: tokens ``start`` to ``start + num_queries``; tables: of [n] blocks.

    position: of the first of them in its sequence; whole: each sees all ``length`` keys that the last one sees. A row may
    come in several chunks: ``most`` is the number of queries of the largest, ``last`` the position where the last begins.
    """

    start: int
    num_queries: int
    position: int
    length: int
    whole: bool
    most: int
    last: int
    tables: Tables


class Gather(Protocol):
    def __call__(
        self,
        plan: AttentionPlan,
        number: int,
        visibility: Visibility,
        key_cache: Tensor,
        value_cache: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values in the blocks that the rows of piece ``number`` see, [r, H, L, D] of ``dtype`` each.

        Where a row has none, anything finite.
        """


# Of query [B, H, Q, Dk], key [B, H, L, Dk], value [B, H, L, Dv], a bias of the scores, and their scale; [B, H, Q, Dv].
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attention as torch has it. No bias means causal."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, is_causal=bias is None, scale=scale)


@dataclass(slots=True)
class AttentionPlan:
    """What every layer of a step does alike. ``seq_lens`` advances in place between the steps of a decode window."""

    decodes: list[Decode]
    chunks: list[Chunk]
    seq_lens: Tensor  # int64 [R]: keys each row's last query sees, its own included
    block_size: int
    gather: Gather
    local_spans: bool = False
    attend: Attend = attend  # for the rows of ``decodes``, whose bias is [B, 1, 1, L]
    _masks: dict[object, Any] = field(default_factory=dict)

    def next_step(self) -> None:
        self._masks.clear()

    def last_seen(self, number: int, visibility: Visibility) -> Tensor:
        """Place of the newest key of each row of a piece, int64 [r, 1], counted from where the blocks begin that the row sees.

        It is 0 for a row that is over, and at place 0.
        """

        def last() -> Tensor:
            piece = self.decodes[number]
            lens = self.seq_lens if piece.rows is None else self.seq_lens.index_select(0, piece.rows)
            return (lens[:, None] - 1 - piece.seen(visibility)[1]).clamp_(min=0)

        return self.once((number, visibility, "last"), last)

    def once(self, key: object, make: Callable[[], _T]) -> _T:
        """What ``make`` returns, made once a step for all layers."""
        if key not in self._masks:
            self._masks[key] = make()
        return self._masks[key]  # type: ignore[no-any-return]


def written_keys(last: Tensor, length: int) -> Tensor:
    """Positions 0 to ``length``, and 0 where a row has no key: what no one has written may be NaN, which no mask on the
    scores would hide. last: int64 [r, 1], position of each row's newest key; returns int64 [r, length]."""
    keys = torch.arange(length, device=last.device)
    return torch.where(keys > last, 0, keys)


def key_slots(table: Tensor, keys: Tensor, block_size: int) -> Tensor:
    """Where keys stand in a cache. table: int64 [r, n] block ids; keys: int64 [r, k] positions; returns int64 [r, k]."""
    return table.gather(1, keys // block_size) * block_size + keys % block_size


def gather_keys(
    plan: AttentionPlan,
    number: int,
    visibility: Visibility,
    key_cache: Tensor,
    value_cache: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """A ``Gather`` that reads the blocks of every row at every step."""
    (table, _), last, size = plan.decodes[number].seen(visibility), plan.last_seen(number, visibility), plan.block_size

    def slots() -> Tensor:
        return key_slots(table, written_keys(last, table.shape[1] * size), size)

    def gather(cache: Tensor) -> Tensor:
        at = plan.once((number, visibility, "slots"), slots)
        found = cache.flatten(0, 1).index_select(0, at.flatten()).to(dtype)
        return found.view(*at.shape, *cache.shape[2:]).transpose(1, 2)

    return gather(key_cache), gather(value_cache)


class Segment(NamedTuple):
    """Queries of one row, the first of them at ``token`` in the step. keys: that the last one sees; whole: so does each."""

    row: int
    token: int
    queries: int
    keys: int
    whole: bool


def segments(query_lens: Sequence[int], key_lens: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[Segment]:
    """The rows of a step, cut where spans begin and end. Arguments as those of ``plan_attention``."""
    found: list[Segment] = []
    first, rest = 0, deque(spans)
    for row, (queries, keys) in enumerate(zip(query_lens, key_lens, strict=True)):
        end = first + queries
        while first < end:
            begin, until = rest[0] if rest else (end, end)
            whole = begin == first
            assert not whole or until <= end, "a span is of one row"
            if whole:
                rest.popleft()
            stop = until if whole else min(begin, end)
            found.append(Segment(row, first, stop - first, keys - (end - stop), whole))
            first = stop
    return found


def plan_attention(
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    block_size: int,
    token_bytes: int,
    num_steps: int = 1,
    shared: bool = True,
    deterministic: bool = False,
    spans: Sequence[tuple[int, int]] = (),
    local_spans: bool = False,
    workspace: dict[str, Any] | None = None,
    window_tables: Tensor | None = None,
) -> AttentionPlan:
    """Group the rows of a step.

    query_lens: queries of each real row, laid out one row after the other. key_lens: keys that its last query sees in the
    first of ``num_steps`` steps; in each later step it sees at most one more, as far as its table reaches. block_tables:
    int64 [R, M]. seq_lens: int64 [R], the same as key_lens, on the device. (Both may end with rows of padding.)
    token_bytes: what one layer keeps of a token. workspace: where an implementation keeps what later plans use again (this
    one keeps nothing); whoever clears it gives that memory back. window_tables: as ``block_tables``, for layers with a
    window or chunks, where these keep their keys in other blocks. A block in which no query sees a key is not read.

    shared: whether neighbouring rows may have so many first keys in common that it pays to read those together (not done
    here). deterministic: avoid whatever makes a row's numbers depend on its neighbours (here only torch's products could,
    which promise nothing). spans: ranges of the step's tokens, (from, to), in order, each of two tokens or more of one
    row. Each token of a span sees all keys that the span's last token sees, except those before its window. local_spans:
    only in layers with a window.
    """
    tables = Tables(block_tables, block_tables if window_tables is None else window_tables)
    most = max(1, _GATHER_BYTES // token_bytes)
    max_lens = [n + num_steps - 1 for n in key_lens]
    longest = max(max_lens)
    if all(n == 1 for n in query_lens) and len(seq_lens) * longest <= most:
        tables = tables.map(lambda table: table[:, : -(-longest // block_size)])
        piece = Decode(None, tables, key_lens, num_steps, block_size)
        return AttentionPlan([piece], [], seq_lens, block_size, gather_keys)
    single = sorted((row for row, n in enumerate(query_lens) if n == 1), key=lambda row: max_lens[row])
    decodes, begin = [], 0
    while begin < len(single):
        end = begin + 1
        while end < len(single) and (end - begin + 1) * max_lens[single[end]] <= most:
            end += 1
        rows = torch.tensor(single[begin:end], device=block_tables.device)
        num_blocks = -(-max_lens[single[end - 1]] // block_size)
        theirs = tables.map(lambda table, rows=rows, n=num_blocks: table.index_select(0, rows)[:, :n])  # type: ignore[misc]
        decodes.append(Decode(rows, theirs, [key_lens[row] for row in single[begin:end]], num_steps, block_size))
        begin = end
    several = [segment for segment in segments(query_lens, key_lens, spans) if query_lens[segment.row] > 1]
    chunks = [chunk for segment in several for chunk in _chunks(segment, tables, block_size)]
    if chunks and decodes:  # a decode row's token index is its row index only where every row has one query
        *starts, tokens = accumulate(query_lens, initial=0)
        index = torch.tensor(starts, device=block_tables.device)
        decodes = [replace(d, rows=index[d.rows], _seen={}) for d in decodes if d.rows is not None]
        seq_lens = torch.zeros(tokens, dtype=seq_lens.dtype, device=seq_lens.device).index_copy_(
            0, index, seq_lens[: len(starts)]
        )
    return AttentionPlan(decodes, chunks, seq_lens, block_size, gather_keys, local_spans)


def _chunks(segment: Segment, tables: Tables, block_size: int) -> Iterator[Chunk]:
    """A segment in chunks of at most ``_MAX_QUERIES`` queries."""
    row, token, n, keys, whole = segment
    most, last = min(n, _MAX_QUERIES), keys - n + (n - 1) // _MAX_QUERIES * _MAX_QUERIES
    for done in range(0, n, _MAX_QUERIES):
        count = min(n - done, _MAX_QUERIES)
        position = keys - n + done
        length = keys if whole else position + count
        blocks = row, slice(-(-length // block_size))
        theirs = tables.map(lambda table, at=blocks: table[at].contiguous())  # type: ignore[misc]
        yield Chunk(token + done, count, position, length, whole, most, last, theirs)
