"""Device eviction, one law a test."""

from __future__ import annotations

from index_driver import BLOCK, Driver, make
from prefix_index import PrefixIndex


def test_device_eviction_is_leaf_first_and_least_recently_released_first() -> None:
    index = make()
    driver = Driver(index)
    driver.run([*range(4), 10, 11, 12, 13])  # pages 100, 101
    driver.run([*range(4), 20, 21, 22, 23])  # 102 is a duplicate of 100, so 103
    driver.run([*range(4), 10, 11, 12, 13])
    assert index.evict_device(1).pages == (103,)
    assert index.evict_device(9).pages == (101, 100)
    assert index.stats().blocks == 0
    index.check_invariants()


def test_losing_a_block_loses_the_snapshot_on_it_and_returns_its_slot() -> None:
    index = make()
    Driver(index).run(list(range(8)), 8)
    freed = index.evict_device(1)
    assert (freed.pages, freed.slots) == ((101,), (1,))
    match = index.match(index.prepare(range(9)))
    assert match.best is None
    index.check_invariants()


def test_pinned_blocks_are_never_evicted() -> None:
    index = make()
    driver = Driver(index)
    driver.run(list(range(8)), 8)
    match = index.match(index.prepare(range(20)))
    lease = index.acquire(match, match.best)
    assert not index.evict_device(5)
    assert index.claim_slot() is None
    index.release(lease)
    assert index.evict_device(5).pages == (101, 100)


def test_eviction_goes_round_as_recency_changes_inside_an_edge() -> None:
    """The upper half of a path was used again after another path: the other goes before it, in one call as in many."""

    def filled() -> PrefixIndex:
        index = make(snapshots=False)
        for tokens, first in ((range(32), 0), (range(100, 108), 20)):
            lease = index.acquire(index.match(index.prepare([*tokens, 0])))
            index.extend(lease, tokens, range(first, first + len(tokens) // BLOCK))
            index.release(lease)
        match = index.match(index.prepare(range(17)))
        index.release(index.acquire(match, match.best))
        return index

    expected = (7, 6, 5, 4, 21, 20, 3, 2, 1, 0)
    index = filled()
    assert index.stats().edges == 2
    assert index.evict_device(7).pages == expected[:7]
    index.check_invariants()
    assert index.evict_device(9).pages == expected[7:]
    index = filled()
    assert tuple(index.evict_device(1).pages[0] for _ in expected) == expected
