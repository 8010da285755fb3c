"""Counts who holds each KV block, and hands out free ones. Knows no tensors and no tokens."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from itertools import count


class BlockPool:
    """Reference counts over blocks of one memory, in pages. A block's number is that of its first page.

    Blocks may have two sizes: one page, and a slab, which is ``span`` pages from a multiple of it on. A slab is one block, or
    in pieces, which are blocks of a page each, or empty. Slab 0 is the null block that padding writes to, never handed out.

    A block with no holder is free. A free block may still carry content worth keeping (``retain``): those are handed
    out last, least recently used first, and ``on_evict`` is told when their content is about to go.
    """

    def __init__(self, num_pages: int, span: int = 1) -> None:
        self.span = span
        self.num_slabs = num_pages // span
        assert self.num_slabs > 1, "a pool needs a block besides the null block"
        self.on_evict: Callable[[int], None] = lambda block: None
        self._refs = [0] * (self.num_slabs * span)
        self._held = [0] * self.num_slabs  # blocks in the slab with a holder
        self._empty = list(range(self.num_slabs - 1, 0, -1))  # slabs
        self._broken: set[int] = set()  # slabs in pieces
        self._loose: dict[int, None] = {}  # empty pieces
        # What is free and has content, oldest first, with since when: pieces, and slabs of which nothing is held.
        self._cached: OrderedDict[int, int] = OrderedDict()
        self._idle: OrderedDict[int, int] = OrderedDict()
        self._num_idle_broken = 0
        self._retained: set[int] = set()  # blocks whose content is worth keeping, held or free
        self._clock = count()

    @property
    def num_free(self) -> int:
        """Pages that are free, with content or without."""
        return len(self._empty) * self.span + len(self._idle) * self.span + self._num_free_pieces

    @property
    def _num_free_pieces(self) -> int:
        """Free pages in slabs of which something is held."""
        return len(self._loose) + len(self._cached) - self._num_idle_broken * self.span

    def fits(self, slabs: int, pieces: int = 0) -> bool:
        """Whether so many blocks of both sizes can be allocated."""
        left = len(self._empty) + len(self._idle) - slabs
        return left >= 0 and pieces <= left * self.span + self._num_free_pieces

    def refs(self, block: int) -> int:
        return self._refs[block]

    def allocate(self) -> int:
        """A slab with one holder. The caller has checked ``fits``."""
        slab = self._empty.pop() if self._empty else self._clear(next(iter(self._idle)))
        self._refs[slab * self.span] = 1
        self._held[slab] = 1
        return slab * self.span

    def allocate_piece(self, near: int = 0) -> int:
        """A page with one holder: next to page ``near`` or in a slab of its own if possible, so that slabs empty as a whole.

        The caller has checked ``fits``.
        """
        if near + 1 in self._loose and (near + 1) % self.span:
            block = near + 1
            del self._loose[block]
        elif self._empty:
            block = self._break(self._empty.pop())
        elif self._loose:
            block, _ = self._loose.popitem()
        else:
            slab, since = next(iter(self._idle.items()), (0, -1))
            block, own = next(iter(self._cached.items()), (0, -1))
            if slab and (not block or since < own):
                block = self._break(self._clear(slab))
            else:
                del self._cached[block]
                self._evict(block)
        self._refs[block] = 1
        self._hold(block // self.span)
        return block

    def share(self, block: int) -> None:
        """One more holder, of a held block or of a free one with content."""
        if self._refs[block] == 0:
            assert block in self._retained, f"block {block} has no content to share"
            self._cached.pop(block, None)
            self._hold(block // self.span)
        self._refs[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One holder less of each. The tail of a sequence goes first, so that its head is evicted last."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} freed twice"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._let_go(block)

    def retain(self, block: int) -> None:
        """Keep the content of a held block for as long as possible after its last holder has gone."""
        assert self._refs[block] > 0
        self._retained.add(block)

    def forget(self) -> None:
        """No content is worth keeping any more; holders keep their blocks."""
        self._retained.clear()
        self._loose |= dict.fromkeys(self._cached)
        self._cached.clear()
        for slab in self._idle:
            self._mend(slab)
        self._empty.extend(self._idle)
        self._idle.clear()

    # -- slabs -------------------------------------------------------------------------------------------------------

    def _hold(self, slab: int) -> None:
        self._held[slab] += 1
        if slab in self._idle:
            del self._idle[slab]
            self._num_idle_broken -= slab in self._broken

    def _let_go(self, block: int) -> None:
        slab = block // self.span
        self._held[slab] -= 1
        kept = block in self._retained
        if slab in self._broken:
            if kept:
                self._cached[block] = next(self._clock)
            else:
                self._loose[block] = None
        if not self._held[slab]:
            if kept or any(page in self._cached for page in self._pages(slab)):
                self._idle[slab] = next(self._clock)
                self._num_idle_broken += slab in self._broken
            else:
                self._mend(slab)
                self._empty.append(slab)

    def _break(self, slab: int) -> int:
        """Cut an empty slab into pieces; returns the first, and all others are loose."""
        self._broken.add(slab)
        first, *others = self._pages(slab)
        self._loose |= dict.fromkeys(others)
        return first

    def _mend(self, slab: int) -> None:
        """Make a slab without content whole again, if it is in pieces."""
        if slab in self._broken:
            self._broken.discard(slab)
            self._num_idle_broken -= slab in self._idle
            for page in self._pages(slab):
                del self._loose[page]

    def _clear(self, slab: int) -> int:
        """Evict an idle slab's content. The slab is neither idle nor empty then."""
        for block in self._pages(slab):
            if self._cached.pop(block, None) is not None:
                self._loose[block] = None
            self._evict(block)
        self._mend(slab)
        del self._idle[slab]
        return slab

    def _evict(self, block: int) -> None:
        if block in self._retained:
            self._retained.discard(block)
            self.on_evict(block)

    def _pages(self, slab: int) -> range:
        return range(slab * self.span, (slab + 1) * self.span)

    # -- for tests -------------------------------------------------------------------------------------------------------

    @property
    def empty_pages(self) -> list[int]:
        """Pages that are free, with no content worth keeping."""
        return [*self._loose, *(page for slab in self._empty for page in self._pages(slab))]

    def check(self, held: Iterable[Iterable[int]]) -> None:
        """Prove the books: every block is free once or held, with exactly the holders given. Raises AssertionError."""
        counts = [0] * len(self._refs)
        for blocks in held:
            for block in blocks:
                counts[block] += 1
        assert counts == self._refs, "reference counts differ from the holders"
        assert counts[0] == 0, "the null block is held"
        empty, broken, idle = set(self._empty), self._broken, self._idle.keys()
        assert len(self._empty) == len(empty), "a slab is free twice"
        assert empty.isdisjoint(broken), "an empty slab is in pieces"
        used = {page for page, count in enumerate(counts) if count}
        kept = self._retained - used
        pieces = {page for slab in broken for page in self._pages(slab)}
        whole = {slab * self.span for slab in range(1, self.num_slabs) if slab not in broken}
        assert used | kept <= pieces | whole, "a page of a block is held by itself"
        by_slab = Counter(page // self.span for page in used)
        assert self._held == [by_slab[slab] for slab in range(self.num_slabs)], (
            "holders of a slab differ from those of its blocks"
        )
        with_content = {page // self.span for page in kept} - by_slab.keys()
        assert idle == with_content, "free blocks with content do not add up"
        assert empty == set(range(1, self.num_slabs)) - by_slab.keys() - with_content, "free and held do not add up"
        assert self._loose.keys() == pieces - used - kept, "a piece is lost"
        assert self._cached.keys() == pieces & kept, "a free piece is cached without content"
        assert self._num_idle_broken == len(broken & idle)
