"""Which block holds the KV of which token prefix."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from stoker.engine.block_pool import BlockPool


class PrefixCache:
    """Full blocks by the chained hash of all tokens up to their end.

    The chain starts from what else the KV depends on: weight version and adapter. Two prefixes that differ in any of
    these never share a key. Blocks without a holder stay until the pool needs them (least recently used first).
    """

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        pool.on_evict = self._evicted

    @staticmethod
    def root(weight_version: int, adapter: str | None = None) -> bytes:
        return repr((weight_version, adapter)).encode()

    def extend(self, keys: list[bytes], root: bytes, tokens: Sequence[int], upto: int) -> None:
        """Append the keys of the full blocks of ``tokens[:upto]`` that ``keys`` does not have yet."""
        size = self.block_size
        for end in range((len(keys) + 1) * size, upto + 1, size):
            parent = keys[-1] if keys else root
            keys.append(blake2b(parent + array("q", tokens[end - size : end]).tobytes(), digest_size=16).digest())

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix. They are not held yet: share them before anything is allocated."""
        blocks: list[int] = []
        if self.enabled:
            for key in keys:
                block = self._block_of.get(key)
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def insert(self, key: bytes, block: int) -> None:
        """Offer a full, held block. The first block offered under a key serves it."""
        if self.enabled and key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key
            self.pool.retain(block)

    def clear(self) -> None:
        """Forget every prefix: what the blocks hold is no longer what their tokens mean."""
        self._block_of.clear()
        self._key_of.clear()
        self.pool.forget()

    def __len__(self) -> int:
        return len(self._block_of)

    def _evicted(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]
