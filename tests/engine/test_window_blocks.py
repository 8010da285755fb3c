"""Blocks of two sizes in one memory, and layers with a window that keep only what is still seen of a sequence."""

from __future__ import annotations

import random

import pytest
from machine import Machine, make_group, make_scheduler, make_spec
from traffic import Traffic, half

from stoker.engine.cache.block_layout import BlockLayout
from stoker.engine.cache.block_pool import BlockPool
from stoker.engine.cache.block_tables import BlockTables
from stoker.engine.request import Adapter
from stoker.kernels.reference.attention_plan import Visibility

WINDOW, CHUNK = Visibility(window=6), Visibility(chunk=5)


# -- the pool ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [1, 2, 3, 6])
@pytest.mark.parametrize("seed", range(8))
def test_the_books_of_both_sizes_are_right_whatever_comes(span: int, seed: int) -> None:
    rng = random.Random(seed)
    content: set[int] = set()
    pool = BlockPool(rng.randint(2, 12) * span, span=span)
    pool.on_evict = content.remove
    held: list[int] = []
    for _ in range(600):
        chance = rng.random()
        if chance < 0.3 and pool.fits(1):
            block = pool.allocate()
            assert block % span == 0
            held.append(block)
        elif chance < 0.6 and span > 1 and pool.fits(0, 1):
            held.append(pool.allocate_piece(rng.choice(held) if held else 0))
        elif chance < 0.8 and held:
            pool.free([held.pop(rng.randrange(len(held)))])
        elif chance < 0.9 and held:
            block = rng.choice(held)
            pool.retain(block)
            content.add(block)
        elif chance < 0.98 and content:
            block = rng.choice(sorted(content))
            pool.share(block)
            held.append(block)
        elif chance > 0.995:
            pool.forget()
            content.clear()
        assert content.isdisjoint(pool.empty_pages), "what is empty has no content"
        pool.check([held])


@pytest.mark.parametrize("seed", range(8))
def test_what_fits_can_be_had(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        span = rng.choice((1, 2, 5))
        pool = BlockPool(rng.randint(3, 9) * span, span=span)
        held = [pool.allocate() if rng.random() < 0.5 or span == 1 else pool.allocate_piece() for _ in range(2)]
        for _ in range(rng.randint(0, 20)):
            if pool.fits(0, 1) and span > 1:
                held.append(pool.allocate_piece())
        for block in rng.sample(held, rng.randint(0, len(held))):
            if rng.random() < 0.5:
                pool.retain(block)
            pool.free([block])
            held.remove(block)
        slabs, pieces = rng.randint(0, 9), rng.randint(0, 20) if span > 1 else 0
        free, whole = pool.num_free, pool.num_slabs - 1 - len({block // span for block in held})
        assert pool.fits(slabs, pieces) == (slabs <= whole and slabs * span + pieces <= free)
        if pool.fits(slabs, pieces):
            held += [pool.allocate() for _ in range(slabs)] + [pool.allocate_piece() for _ in range(pieces)]
            pool.check([held])
            assert pool.num_free == free - slabs * span - pieces
        while pool.fits(0, 1) and span > 1:
            held.append(pool.allocate_piece())
        assert span == 1 or pool.num_free == 0, "a page is left that nobody can have"


def test_pieces_of_one_sequence_lie_together_and_a_slab_is_whole_again_when_they_go() -> None:
    pool = BlockPool(13, span=4)  # three slabs, the first of them nobody's, and a page too many
    one, two = [pool.allocate_piece()], [pool.allocate_piece()]
    for sequence in (one, two):
        sequence += [pool.allocate_piece(sequence[-1] + i) for i in range(3)]
    assert {block // 4 for block in one} != {block // 4 for block in two} and not pool.fits(1)
    pool.free(one)
    assert pool.fits(1) and pool.allocate() == min(one)
    pool.check([two, [min(one)]])


def test_a_sequence_at_the_end_of_its_slab_goes_on_in_an_empty_one_and_not_beside_another() -> None:
    pool = BlockPool(16, span=4)
    one, two = ([pool.allocate_piece()] for _ in range(2))
    for sequence in (one, two):
        sequence += [pool.allocate_piece(sequence[-1] + i) for i in range(3)]
    pool.free([two.pop(0)])
    assert max(one) + 1 < min(two) < pool.allocate_piece(one[-1])


@pytest.mark.parametrize("slab_is_older", [True, False])
def test_a_piece_takes_the_place_of_what_was_used_least_recently_be_it_a_piece_or_a_slab(slab_is_older: bool) -> None:
    evicted: list[int] = []
    pool = BlockPool(6, span=2)
    pool.on_evict = evicted.append
    slab, held = pool.allocate(), pool.allocate_piece()
    piece = pool.allocate_piece(held)
    for block in (slab, piece) if slab_is_older else (piece, slab):
        pool.retain(block)
        pool.free([block])
    assert pool.allocate_piece() == (slab if slab_is_older else piece) == evicted.pop() and not evicted


def test_of_pieces_in_slabs_that_are_held_the_one_used_longest_ago_goes_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(8, span=4)
    pool.on_evict = evicted.append
    held, *pieces = (pool.allocate_piece() for _ in range(4))
    for piece in pieces:
        pool.retain(piece)
    pool.free([pieces[1], pieces[0], pieces[2]])
    pool.share(pieces[1])  # used again: now the most recent of all
    pool.free([pieces[1]])
    for piece in (pieces[0], pieces[2], pieces[1]):
        assert pool.allocate_piece(held) == piece == evicted.pop() and not evicted


def test_the_end_of_a_sequence_goes_before_its_beginning_in_both_kinds_of_layers() -> None:
    evicted: list[int] = []
    tables = BlockTables(9, 2, BlockLayout(1, 1, (WINDOW,)))
    (request,) = make_group(0, [1] * 8, [make_spec()])
    assert tables.reserve(request, 8, ({}, {}))
    blocks, window = list(request.block_ids), list(request.window_ids)
    for block in (*blocks, *window):
        tables.pool.retain(block)
    tables.pool.on_evict = evicted.append
    tables.release(request)
    for _ in range(8):
        tables.pool.allocate()
    assert evicted == [*reversed(blocks), *reversed(window)]


# -- the scheduler -------------------------------------------------------------------------------------------------------


# Of a scheduler: layout, block_size, slabs, max_num_seqs, budget, window, caching.
SIZES = [
    (BlockLayout(1, 1, (WINDOW,)), 2, 30, 6, 64, 8, True),
    (BlockLayout(1, 1, (WINDOW,)), 1, 50, 4, 7, 4, False),
    (BlockLayout(1, 2, (WINDOW,)), 2, 18, 6, 5, 1, True),
    (BlockLayout(1, 5, (WINDOW,)), 4, 10, 8, 64, 3, True),
    (BlockLayout(1, 5, (WINDOW,)), 4, 10, 8, 6, 3, False),
    (BlockLayout(1, 3, (CHUNK,)), 4, 10, 8, 24, 8, True),
    (BlockLayout(1, 3, (CHUNK, WINDOW)), 2, 16, 8, 64, 1, True),
    (BlockLayout(3, 1, (WINDOW,)), 2, 24, 6, 64, 5, True),
    (BlockLayout(3, 1, (CHUNK,)), 4, 12, 5, 9, 8, False),
    (BlockLayout(1, 5, (WINDOW,)), 4, 80, 16, 24, 5, True),
]


@pytest.mark.parametrize(("sizes", "seed", "ahead"), half(SIZES, range(3), range(3)))
def test_whatever_the_schedule_the_results_are_those_of_a_request_alone(
    sizes: tuple[BlockLayout, int, int, int, int, int, bool], seed: int, ahead: int
) -> None:
    """As in ``test_scheduler.py``; the machine also proves that what a window sees is there whenever it is seen."""
    layout, block_size, slabs, max_num_seqs, budget, window, caching = sizes
    rng = random.Random(seed)
    num_blocks = slabs * layout.span
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        decode_window=window,
        enable_prefix_caching=caching,
        block_layout=layout,
    )
    machine = Machine(scheduler, ahead)
    adapters = [None, *(Adapter(f"a{serial}", serial) for serial in range(3))]
    room = min(40, layout.most_tokens(num_blocks, block_size, budget))
    traffic = Traffic(rng, room, adapters if seed else (None,), budget if seed > 1 else 0)
    traffic.run(machine, 800)
    assert scheduler.tables.pool.num_free == num_blocks - layout.span
    assert (scheduler.counters.prefix_hit_tokens > 0) == caching
    if slabs < 80:
        assert scheduler.counters.preemptions > 0, "the pool was not tight"


@pytest.mark.parametrize("windows", [(WINDOW,), (CHUNK,), (CHUNK, WINDOW)])
@pytest.mark.parametrize(("pages", "window_pages"), [(1, 1), (1, 3), (2, 1), (4, 1)])
def test_the_longest_sequence_that_is_to_fit_runs_to_its_end(
    pages: int, window_pages: int, windows: tuple[Visibility, ...]
) -> None:
    """Wherever in a slab its windows begin, and with nothing taken from it on the way."""
    layout = BlockLayout(pages, window_pages, windows)
    for slabs, chunk, ahead in ((8, 1, 0), (9, 5, 1), (12, 3, 1)):
        fields = {"num_blocks": slabs * layout.span, "block_size": 4, "max_num_batched_tokens": chunk}
        scheduler = make_scheduler(block_layout=layout, decode_window=1, **fields)
        room = layout.most_tokens(slabs * layout.span, 4, chunk)
        assert room > 8
        (request,) = make_group(0, [i * i % 5 for i in range(room - 6)], [make_spec(max_tokens=6)])
        scheduler.add([request])
        assert Machine(scheduler, ahead).drain() == [request] and scheduler.counters.preemptions == 0


@pytest.mark.parametrize("caching", [False, True])
def test_samples_that_wait_begin_at_their_prompt_s_end(caching: bool) -> None:
    """Whatever those before them have given up meanwhile."""
    layout = BlockLayout(1, 2, (WINDOW,))
    scheduler = make_scheduler(num_blocks=200, block_layout=layout, max_num_seqs=2, enable_prefix_caching=caching)
    machine = Machine(scheduler)
    prompt = [i * i % 5 for i in range(37)]
    lengths = (30, 12, 9, 9, 25, 3)
    scheduler.add(make_group(0, prompt, [make_spec(max_tokens=n, seed=i) for i, n in enumerate(lengths)]))
    machine.drain()
    assert machine.tokens_computed == len(prompt) + sum(lengths) - 1  # the prompt's last token once for each


def test_what_is_cached_goes_where_a_request_does_not_fit_beside_it() -> None:
    """Its pieces lie in a slab each, so that there is none for a window, which all of the memory would have room for."""
    layout = BlockLayout(1, 3, (Visibility(window=4),))
    fields = {"num_blocks": 21, "block_size": 2, "max_num_batched_tokens": 2}
    scheduler = make_scheduler(block_layout=layout, **fields)
    assert layout.most_tokens(21, 2, 2) >= 12
    (request,) = make_group(0, [1, 2, 3, 4, 0, 1, 2, 3, 4], [make_spec(max_tokens=3)])
    pool, cache = scheduler.tables.pool, scheduler.prefixes.cache
    pieces = [pool.allocate_piece() for _ in range(4)]
    windows = [pool.allocate() for _ in range(2)]
    scheduler.prefixes.extend_keys(request, 8)
    for key, block in zip(request.block_keys, pieces, strict=True):
        assert cache.insert(key, block)
    for key, block in zip(request.block_keys[2:], windows, strict=True):
        assert cache.insert(key, block, window=True)
    pool.free([*pieces, *windows])
    assert cache.lookup(request.block_keys) == pieces and pool.fits(6)
    scheduler.add([request])
    assert Machine(scheduler).drain() == [request] and request.cached_tokens == 0
