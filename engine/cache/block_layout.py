"""How much of the KV cache a sequence takes, where layers that see all keys and layers with a window have blocks of two sizes."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.kernels.reference.attention_plan import Visibility


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How many pages a block takes: ``pages`` in layers that see all keys, ``window_pages`` in those with a window.

    One of the two is 1. window_pages: 0 where all layers keep their keys in the same blocks. windows: what layers with a window
    see. beside: for both kinds, how many layers fit in the place of one layer of the other kind; one of the two is 1.
    """

    pages: int = 1
    window_pages: int = 0
    windows: tuple[Visibility, ...] = ()
    beside: tuple[int, int] = (1, 1)

    @property
    def span(self) -> int:
        """Pages in a slab."""
        return max(self.pages, self.window_pages)

    def first_seen(self, position: int) -> int:
        """The first key that any layer with a window sees from there."""
        return min(window.first(position) for window in self.windows)

    def sizes(self, blocks: int, window_blocks: int) -> tuple[int, int]:
        """(slabs, pieces) that so many blocks of the two kinds take."""
        if not self.window_pages:
            return blocks, 0
        if self.pages == self.window_pages:
            return blocks + window_blocks, 0
        return (blocks, window_blocks) if self.pages > 1 else (window_blocks, blocks)

    def needed(self, tokens: int, block_size: int, chunk: int) -> int:
        """The most slabs that a sequence of ``tokens`` takes, with at most ``chunk`` tokens computed at a time."""
        blocks = window_blocks = -(-tokens // block_size)
        if self.window_pages:
            seen = max(min(v.window or tokens, v.chunk or tokens) for v in self.windows)
            window_blocks = min(blocks, -(-(seen + chunk) // block_size) + 1)
        slabs, pieces = self.sizes(blocks, window_blocks)
        # Pieces lie side by side from the sequence's first on; but a window that has moved on may begin anywhere in a slab.
        return slabs + min(-(-blocks // self.span), -(-(pieces - 1) // self.span) + 1)

    def most_tokens(self, num_pages: int, block_size: int, chunk: int) -> int:
        """The length of the longest sequence that fits alone, a multiple of the block size."""
        slabs = num_pages // self.span - 1
        low, high = 0, slabs * self.span
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.needed(middle * block_size, block_size, chunk) <= slabs
            low, high = (middle, high) if fits else (low, middle - 1)
        return low * block_size
