"""Who holds which KV block. Knows no tensors and no tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """Reference counts over ``num_blocks`` blocks; block 0 is the null block that padding writes to, never handed out.

    A block with no holder is free. A free block may still carry content worth keeping (``retain``): those are handed
    out last, least recently used first, and ``on_evict`` is told when their content is about to go.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] = lambda block: None) -> None:
        assert num_blocks > 1, "a pool needs a block besides the null block"
        self.num_blocks = num_blocks
        self.on_evict = on_evict
        self._refs = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # free blocks with content, oldest first
        self._retained: set[int] = set()  # blocks whose content is worth keeping, held or free

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._cached)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def allocate(self) -> int:
        """A block with one holder. The caller has checked ``num_free``."""
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._retained.discard(block)
            self.on_evict(block)
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder, of a held block or of a free one with content."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One holder less of each. The tail of a sequence goes first, so that its head is evicted last."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} freed twice"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._retained:
                    self._cached[block] = None
                else:
                    self._empty.append(block)

    def retain(self, block: int) -> None:
        """Keep the content of a held block for as long as possible after its last holder has gone."""
        assert self._refs[block] > 0
        self._retained.add(block)

    def forget(self) -> None:
        """No content is worth keeping any more; holders keep their blocks."""
        self._empty.extend(self._cached)
        self._cached.clear()
        self._retained.clear()

    def check(self, held: Iterable[Iterable[int]]) -> None:
        """Prove the books: every block is free once or held, with exactly the holders given. Raises AssertionError."""
        counts = [0] * self.num_blocks
        for blocks in held:
            for block in blocks:
                counts[block] += 1
        assert counts == self._refs, "reference counts differ from the holders"
        free = [*self._empty, *self._cached]
        assert len(free) == len(set(free)), "a block is free twice"
        assert set(free) == {b for b in range(1, self.num_blocks) if counts[b] == 0}, "free and held do not add up"
        assert counts[0] == 0, "the null block is held"
        assert all(b in self._retained for b in self._cached), "a free block is cached without content"
