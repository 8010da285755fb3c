"""Decides how much of a request's beginning need not be computed, and what it computes is kept for others."""

from __future__ import annotations

from stoker.engine.cache.block_tables import BlockTables
from stoker.engine.cache.prefix_cache import PrefixCache
from stoker.engine.cache.state_cache import StateCache
from stoker.engine.request import Request
from stoker.engine.request_scores import Scoring


class PrefixReuse:
    """Finds blocks a request can begin with, of another sample of its prompt or of the prefix cache, and offers new ones."""

    def __init__(self, tables: BlockTables, states: StateCache, enabled: bool, weight_version: int) -> None:
        """enabled: whether blocks serve others after their request has ended. weight_version: of what is computed now."""
        self.tables, self.states, self.block_size = tables, states, tables.block_size
        self.cache = PrefixCache(tables.pool, tables.block_size, enabled)
        self.weight_version = weight_version
        # Blocks in the cache that only the plan being made will fill: how many tokens of their sequence were there before.
        self._unwritten: dict[int, int] = {}
        # Since anything was forgotten. Of ranks that make the same plans, those that made as many know the same.
        self.plans = 0

    def begin_plan(self) -> None:
        self._unwritten.clear()
        self.plans += 1

    def forget(self) -> None:
        """Have nothing that was computed before serve other requests any more."""
        self.cache.clear()
        self.states.clear()
        self.plans = 0

    def already_computed(self, request: Request, other: Request | None) -> tuple[list[int], list[int], int, bool]:
        """(blocks with the request's beginning, those of windows, how many tokens that is, whether they come from the cache).

        other: a running sample of the same prompt that has computed all of it. At least one token is left to compute, which
        gives a hidden state to sample from, and so are all those that still need scores. The last block may be shared although
        only part of it is the request's: it is copied before the request writes to it.
        """
        scoring = _still_to_score(request)
        cache, computed = self.cache, 0
        if other is not None and not self.states.enabled:
            blocks, window_blocks, from_cache = other.block_ids, other.window_ids, False
            computed = min(other.num_prompt, _most(request, scoring))
        if not computed or self.tables.seen_upto(window_blocks, computed) < computed:
            if cache.enabled:
                self.extend_keys(request, request.total)
            blocks = cache.lookup(request.block_keys)
            window_blocks = cache.lookup_window(request.block_keys[: len(blocks)]) if self.tables.windowed else []
            if scoring is not None:
                cache.take_scores(request.block_keys[: len(blocks)], request.tokens, scoring, bool(request.remaining))
            computed, from_cache = len(blocks) * self.block_size, other is None
        computed = min(computed, _most(request, scoring))
        if self.states.enabled:
            known = (n * self.block_size for n in self.states.known(request.block_keys[: computed // self.block_size]))
            computed = next((end for end in known if self.tables.seen_upto(window_blocks, end) == end), 0)
        part, last = computed % self.block_size, computed // self.block_size
        if part and any(computed > self._unwritten.get(ids[last], computed) for ids in (blocks, window_blocks) if ids):
            computed -= part  # a copy would come too early: before the plan writes the block
        computed = self.tables.seen_upto(window_blocks, computed)
        end = -(-computed // self.block_size)
        return blocks[:end], window_blocks[:end], computed, from_cache

    def claim(self, request: Request, num_new: int) -> range:
        """The tokens of a request to score in a plan that computes ``num_new`` of its tokens.

        What the plan computes of a prompt can be used at once by requests that it admits next: layers write before they read.
        """
        scoring = _still_to_score(request)
        scored = scoring.claim(request.computed + num_new) if scoring else range(0)
        if num_new > 1:
            known = min(request.computed + num_new, len(request.tokens))
            self._unwritten |= dict.fromkeys(self.offer(request, known), request.computed)
            if scoring:  # not scores that were complete before: they may be of older weights
                self.keep_scores(request, scoring, request.computed)
        border = self.states.border(request.num_prompt)
        if request.computed + num_new == border and self.cache.enabled and not request.older_kv:
            self.states.keep(request.slot, request.block_keys[border // self.block_size - 1])
        return scored

    def offer(self, request: Request, known: int) -> list[int]:
        """Offer the full blocks of the first ``known`` tokens to other requests; returns those that the cache took."""
        full, cache = known // self.block_size, self.cache
        if not cache.enabled or full <= request.offered_blocks or request.older_kv:
            return []
        self.extend_keys(request, known)
        new = slice(request.offered_blocks, full)
        request.offered_blocks = full
        keys = request.block_keys[new]
        serving = [b for key, b in zip(keys, request.block_ids[new], strict=True) if cache.insert(key, b)]
        in_window = zip(keys, request.window_ids[new], strict=False)
        return serving + [b for key, b in in_window if b and cache.insert(key, b, window=True)]

    def keep_scores(self, request: Request, scoring: Scoring, since: int) -> None:
        """As ``PrefixCache.keep_scores``, with the request's blocks."""
        self.cache.keep_scores(request.block_keys, request.tokens, scoring, since)

    def extend_keys(self, request: Request, upto: int) -> None:
        """Give a request the keys of the full blocks of its first ``upto`` tokens."""
        root = self.cache.root(self.weight_version, request.adapter.key if request.adapter else None)
        salts = () if request.images is None else request.images.salts
        self.cache.extend(request.block_keys, root, request.tokens, upto, salts)


def _still_to_score(request: Request) -> Scoring | None:
    return None if request.scoring is None or request.scoring.launched else request.scoring


def _most(request: Request, scoring: Scoring | None) -> int:
    """The most tokens that a request can skip: one is left to compute, and those whose scores are still missing."""
    return (request.total if scoring is None else scoring.next) - 1
