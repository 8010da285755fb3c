"""Finds the blocks that hold the KV of a sequence's beginning, by its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from stoker.engine.cache.block_pool import BlockPool
from stoker.engine.request_scores import Scoring, Variant

_VARIANTS = 4  # of scores that are kept with a block, the latest ones


class PrefixCache:
    """Full blocks by the chained hash of all tokens up to their end.

    The chain starts from what else the KV depends on: weight version and adapter. Two prefixes that differ in any of
    these never share a key. Blocks without a holder stay until the pool needs them (least recently used first).

    With a block are kept the scores of its tokens, by variant, and of the token after it. A cached position has no hidden state
    to score the next token from, so a request with scores would otherwise have to compute the position again.
    """

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self._block_of: dict[bytes, int] = {}
        self._window_of: dict[bytes, int] = {}  # blocks of layers with a window, where these have their own
        self._key_of: dict[int, bytes] = {}
        self._scores: dict[bytes, dict[Variant, tuple[Scoring, Sequence[int]]]] = {}  # with the tokens they are of
        pool.on_evict = self._evicted

    @staticmethod
    def root(weight_version: int, adapter: str | None = None) -> bytes:
        return repr((weight_version, adapter)).encode()

    def extend(
        self,
        keys: list[bytes],
        root: bytes,
        tokens: Sequence[int],
        upto: int,
        salts: Sequence[tuple[int, bytes]] = (),
    ) -> None:
        """Append the keys of the full blocks of ``tokens[:upto]`` that ``keys`` does not have yet.

        salts: (first token, what KV depends on besides tokens from there on), in order.
        """
        size = self.block_size
        for end in range((len(keys) + 1) * size, upto + 1, size):
            parent = keys[-1] if keys else root
            own = array("q", tokens[end - size : end]).tobytes()
            own += next((what for first, what in reversed(salts) if first < end), b"")
            keys.append(blake2b(parent + own, digest_size=16).digest())

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix. Nobody holds them yet: share them before anything is allocated."""
        blocks: list[int] = []
        if self.enabled:
            for key in keys:
                block = self._block_of.get(key)
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def lookup_window(self, keys: Sequence[bytes]) -> list[int]:
        """One block of layers with a window for each key, 0 where there is none."""
        return [self._window_of.get(key, 0) for key in keys]

    def insert(self, key: bytes, block: int, *, window: bool = False) -> bool:
        """Offer a full, held block; False where the key has another block, or the block another key."""
        blocks = self._window_of if window else self._block_of
        if not self.enabled or key in blocks or block in self._key_of:
            return False
        blocks[key] = block
        self._key_of[block] = key
        self.pool.retain(block)
        return True

    def keep_scores(self, keys: Sequence[bytes], tokens: Sequence[int], scoring: Scoring, since: int) -> None:
        """Keep a sequence's scores with those of its blocks that are cached. keys: of its blocks, in order.

        since: the first token that the plan computes; no block before it is new.
        """
        for key in keys[max(scoring.first, since) // self.block_size : scoring.next // self.block_size]:
            if key in self._block_of:
                kept = self._scores.setdefault(key, {})
                known = kept.get(scoring.variant)
                if known is None or known[0].first > scoring.first:
                    kept[scoring.variant] = scoring, tokens
                    if len(kept) > _VARIANTS:
                        del kept[next(iter(kept))]

    def take_scores(self, keys: Sequence[bytes], tokens: Sequence[int], scoring: Scoring, whole: bool) -> None:
        """Give a sequence the scores of its cached blocks, up to the first that lacks one it needs.

        A block's last position also scores the token after it, if that is the same. whole: take even the last score, as there is
        something else left to compute.
        """
        for end, key in enumerate(keys, 1):
            end *= self.block_size
            lender, theirs = self._scores.get(key, {}).get(scoring.variant, (None, ()))
            if not scoring.borrow(lender, end, whole):
                break
            if lender is not None and end < min(lender.next, len(tokens)) and theirs[end] == tokens[end]:
                scoring.borrow(lender, end + 1, whole)

    def clear(self) -> None:
        """Forget every prefix: what the blocks hold is no longer what their tokens mean."""
        self._scores.clear()
        self._block_of.clear()
        self._window_of.clear()
        self._key_of.clear()
        self.pool.forget()

    def __len__(self) -> int:
        return len(self._block_of)

    def _evicted(self, block: int) -> None:
        key = self._key_of.pop(block)
        if self._window_of.get(key) == block:
            del self._window_of[key]
        else:
            del self._block_of[key]
            self._scores.pop(key, None)
