"""Gives requests their blocks: for layers that see all keys, and for layers with a window only while it sees them."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.engine.cache.block_layout import BlockLayout
from stoker.engine.cache.block_pool import BlockPool
from stoker.engine.request import Request, Status


class BlockTables:
    """Takes blocks from the pool for requests, and gives them up; those of windows as soon as no query sees them.

    A request's ``window_ids`` are as many as its ``block_ids``, 0 where it has given one up.
    """

    def __init__(self, num_pages: int, block_size: int, layout: BlockLayout) -> None:
        self.block_size = block_size
        self.layout = layout
        self.windowed = layout.window_pages > 0
        self.pool = BlockPool(num_pages, layout.span)

    def fits(self, blocks: int) -> bool:
        """Whether sequences can have ``blocks`` more blocks."""
        return self.pool.fits(*self.layout.sizes(blocks, blocks))

    def reserve(self, request: Request, num_new: int, copies: tuple[dict[int, int], dict[int, int]]) -> bool:
        """Take blocks for the request's next ``num_new`` tokens; False where they do not fit.

        The block they begin in becomes the request's own, by a copy where it is shared. copies: for both kinds of blocks, the
        source by target; copies to be made now are added.
        """
        first = request.computed // self.block_size
        missing = max(0, -(-(request.computed + num_new) // self.block_size) - len(request.block_ids))
        ids = (request.block_ids, request.window_ids) if self.windowed else (request.block_ids,)
        if not missing and all(self.pool.refs(held[first]) == 1 for held in ids):
            return True  # the usual case, and nothing to do
        self._give_up_unseen(request, keep_prompt=True)
        shared = [first < len(held) and self.pool.refs(held[first]) > 1 for held in ids]
        wanted = self.layout.sizes(missing + shared[0], missing + shared[-1])
        if not self.pool.fits(*wanted):
            self._give_up_unseen(request, keep_prompt=False)
            if not self.pool.fits(*wanted):
                return False
        for kind in self._kinds:
            held = ids[kind]
            if shared[kind]:  # copy on write; from the original, where the block itself is a copy still to be made
                own = self._allocate(kind, held[first])
                copies[kind][own] = copies[kind].get(held[first], held[first])
                self.pool.free((held[first],))
                held[first] = own
            self._extend(kind, held, missing)
        return True

    def reserve_steps(self, requests: Sequence[Request], remaining: Sequence[int], most: int) -> int:
        """Take blocks for as many decode steps in a row as fit, up to ``most``, for each request up to its ``remaining`` tokens.

        Returns how many steps. Blocks for the first one are there already.
        """
        steps, size = most, self.block_size

        def missing(request: Request, left: int) -> int:
            return max(0, -(-(request.computed + min(steps, left)) // size) - len(request.block_ids))

        while not self.fits(sum(counts := list(map(missing, requests, remaining)))):
            steps -= 1
        for kind in self._kinds:
            for request, count in zip(requests, counts, strict=True):
                if count:
                    self._extend(kind, request.window_ids if kind else request.block_ids, count)
        return steps

    def hold(self, request: Request, blocks: Sequence[int], window_blocks: Sequence[int]) -> None:
        """Begin with these blocks, which hold the ``computed`` tokens. window_blocks: as many, or none."""
        first = self.first_seen(request.computed) if self.windowed else 0
        request.block_ids, request.unseen_blocks = list(blocks), first
        request.window_ids = [0] * first + list(window_blocks[first:])
        for block in (*blocks, *request.window_ids[first:]):
            self.pool.share(block)

    def release(self, request: Request) -> None:
        """Give up all blocks of a request."""
        self.pool.free(reversed(request.block_ids))
        self.pool.free(block for block in reversed(request.window_ids) if block)
        request.block_ids, request.window_ids, request.unseen_blocks = [], [], 0

    def first_seen(self, position: int) -> int:
        """Index of the first block that a query at ``position`` sees through a window."""
        return self.layout.first_seen(position) // self.block_size

    def seen_upto(self, window_ids: Sequence[int], computed: int) -> int:
        """The most tokens, up to ``computed``, with which a sequence can begin: all that the next one sees of a window is there.

        window_ids: of a sequence's first blocks, 0 where there is none.
        """
        if not self.windowed:
            return computed
        together, run = [], 0  # how many blocks in a row, up to each, are there
        for block in window_ids[: -(-computed // self.block_size)]:
            run = run + 1 if block else 0
            together.append(run)
        while computed:
            end = -(-computed // self.block_size)
            if end - self.first_seen(computed) <= together[end - 1]:
                break
            computed = (end - 1) * self.block_size
        return computed

    @property
    def _kinds(self) -> tuple[int, ...]:
        """The kinds of blocks, 0 (layers that see all keys) and 1 (with a window); slabs before pieces, as the pool expects."""
        if not self.windowed:
            return (0,)
        return (0, 1) if self.layout.pages > 1 else (1, 0)

    def _allocate(self, kind: int, near: int) -> int:
        is_slab = (self.layout.window_pages if kind else self.layout.pages) == self.layout.span
        return self.pool.allocate() if is_slab else self.pool.allocate_piece(near)

    def _extend(self, kind: int, held: list[int], missing: int) -> None:
        for _ in range(missing):
            held.append(self._allocate(kind, held[-1] if held else 0))

    def _give_up_unseen(self, request: Request, *, keep_prompt: bool) -> None:
        """Give up those of a request's window blocks that no later token sees.

        keep_prompt: but keep what the prompt's last block sees while other samples of the prompt wait, as they begin there.
        """
        if not self.windowed:
            return
        first = min(self.first_seen(request.computed), len(request.window_ids))
        if first <= request.unseen_blocks:
            return
        if keep_prompt and any(other.status is Status.WAITING for other in request.group):
            first = min(first, self.first_seen((request.num_prompt - 1) // self.block_size * self.block_size))
        for index in range(request.unseen_blocks, first):
            self.pool.free((request.window_ids[index],))
            request.window_ids[index] = 0
        request.unseen_blocks = max(request.unseen_blocks, first)

    def check(self, running: Sequence[Request]) -> None:
        """Prove that blocks, holders and tables agree. Raises AssertionError."""
        self.pool.check(ids for r in running for ids in (r.block_ids, [block for block in r.window_ids if block]))
        for r in running:
            assert len(r.block_ids) * self.block_size >= r.computed
            if self.windowed:
                assert len(r.window_ids) == len(r.block_ids)
                assert not any(r.window_ids[: r.unseen_blocks]) and all(r.window_ids[r.unseen_blocks :])
                assert r.unseen_blocks <= self.first_seen(r.computed), "a block that is still seen was given up"
