"""Block pool and prefix cache."""

from __future__ import annotations

import pytest

from stoker.engine.cache.block_pool import BlockPool
from stoker.engine.cache.prefix_cache import PrefixCache


def test_blocks_are_counted() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(3)]
    assert sorted(blocks) == [1, 2, 3] and pool.num_free == 0, "block 0 is nobody's"
    pool.share(blocks[0])
    pool.check([blocks, blocks[:1]])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([blocks])
    pool.free(blocks)
    assert pool.num_free == 2 and pool.refs(blocks[0]) == 1
    pool.free(blocks[:1])
    pool.check([])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks[:1])


def test_null_block_is_not_freed() -> None:
    with pytest.raises(AssertionError):
        BlockPool(2).free([0])


def test_content_goes_least_recently_used_first_and_tails_before_heads() -> None:
    evicted: list[int] = []
    pool = BlockPool(8)
    pool.on_evict = evicted.append
    one, two = ([pool.allocate() for _ in range(3)] for _ in range(2))
    for block in one + two:
        pool.retain(block)
    pool.free(reversed(one))
    pool.free(reversed(two))
    assert pool.num_free == 7
    pool.share(one[0])  # used again: now the most recent of all
    pool.free([one[0]])
    assert pool.allocate() not in one + two, "what is empty goes before what has content"
    assert [pool.allocate() for _ in range(6)] == evicted == [one[2], one[1], two[2], two[1], two[0], one[0]]
    pool.free(evicted)
    evicted.clear()
    for _ in range(6):
        pool.allocate()
    assert evicted == [], "content is told of once"


def test_forgotten_content_is_not_evicted() -> None:
    evicted: list[int] = []
    pool = BlockPool(4)
    pool.on_evict = evicted.append
    free, held = pool.allocate(), pool.allocate()
    pool.retain(free)
    pool.retain(held)
    pool.free([free])
    pool.forget()
    pool.free([held])
    pool.check([])
    assert len({pool.allocate() for _ in range(3)}) == 3 and evicted == []


def test_prefix_keys_chain() -> None:
    cache = PrefixCache(BlockPool(9), 2, enabled=True)

    def keys(tokens: list[int], start: bytes = cache.root(0)) -> list[bytes]:
        made: list[bytes] = []
        cache.extend(made, start, tokens, len(tokens))
        return made

    assert len(keys([1, 2, 3])) == 1 and keys([1]) == []
    assert keys([1, 2, 3, 4])[0] == keys([1, 2, 5, 6])[0]
    assert keys([1, 2, 3, 4])[1] != keys([5, 6, 3, 4])[1], "same tokens, other prefix"
    assert len({keys([1, 2], cache.root(v, a))[0] for v in (0, 1) for a in (None, "a", "b")}) == 6
    grown = keys([1, 2])
    cache.extend(grown, cache.root(0), [1, 2, 3, 4, 5], 5)
    assert grown == keys([1, 2, 3, 4])


def test_the_prefix_cache_loses_tails_first_and_never_a_held_block() -> None:
    pool = BlockPool(5)
    cache = PrefixCache(pool, 1, enabled=True)
    keys: list[bytes] = []
    cache.extend(keys, cache.root(0), [1, 2, 3, 4], 4)
    blocks = [pool.allocate() for _ in range(4)]
    for key, block in zip(keys, blocks, strict=True):
        cache.insert(key, block)
    cache.insert(keys[0], blocks[3])  # a second block under a key, a second key for a block: the first of each stays
    cache.insert(b"another key", blocks[3])
    assert cache.lookup(keys) == blocks and len(cache) == 4
    pool.free(reversed(blocks[1:]))
    for left in (3, 2, 1):
        assert cache.lookup(keys) == blocks[: left + 1]
        pool.allocate()
    assert cache.lookup(keys) == blocks[:1] and pool.num_free == 0
    cache.clear()
    assert cache.lookup(keys) == [] and len(cache) == 0


def test_what_was_cleared_serves_nobody_and_its_keys_can_be_taken_again() -> None:
    """Of both kinds of layers."""
    pool = BlockPool(9)
    cache = PrefixCache(pool, 1, enabled=True)
    keys: list[bytes] = []
    cache.extend(keys, cache.root(0), [1, 2], 2)
    for _ in range(2):
        blocks, windows = ([pool.allocate() for _ in keys] for _ in range(2))
        for held, window in ((blocks, False), (windows, True)):
            assert all(cache.insert(key, block, window=window) for key, block in zip(keys, held, strict=True))
        assert cache.lookup(keys) == blocks and cache.lookup_window(keys) == windows
        cache.clear()
        assert cache.lookup(keys) == [] and cache.lookup_window(keys) == [0, 0]


def test_a_disabled_prefix_cache_keeps_nothing() -> None:
    pool = BlockPool(3)
    cache = PrefixCache(pool, 1, enabled=False)
    keys: list[bytes] = []
    cache.extend(keys, cache.root(0), [1], 1)
    cache.insert(keys[0], pool.allocate())
    assert cache.lookup(keys) == [] and len(cache) == 0
