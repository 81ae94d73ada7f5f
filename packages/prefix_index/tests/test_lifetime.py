"""What is removed is gone: no cycle keeps it, no handle revives it."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable

import pytest

from index_driver import Driver, make, raw
from paired_world import World
from prefix_index import Lease, Match, SnapshotHandle, SnapshotKind, StaleHandle, Tier
from prefix_index.tree.records import Edge, Hold, Root, Snapshot

KINDS = (Edge, Root, Snapshot, Hold)


def living() -> Counter[str]:
    return Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, KINDS))


def lineage(lease: Lease) -> list[Snapshot]:
    """The snapshots an open lease still remembers; lost ones go with it."""
    return [s for s in (lease._resumed, lease._last_tap, *lease._lineage) if s is not None]


def compare(world: World, before: Counter[str], where: str) -> None:
    """What is alive is what the index counts, and what open leases remember."""
    world.known = {s: handle for s, handle in world.known.items() if s.alive}
    count = living() - before
    stats = world.index.stats()
    gone = len({s for lane in world.lanes for s in lineage(lane.lease) if s.edge is None})
    assert count["Edge"] == stats.edges, where
    assert count["Snapshot"] == stats.snapshots + gone, where
    assert count["Root"] == stats.namespaces, where


def test_with_the_collector_off_every_removed_object_dies() -> None:
    """After any step only what the index still counts is alive; after a clear, nothing."""
    gc.collect()
    gc.disable()
    try:
        before = living()
        for seed in range(12):
            rng = random.Random(seed)
            world = World(rng.randrange)
            for step in range(80):
                world.step()
                if step % 8 == 0:
                    compare(world, before, f"seed {seed}, step {step}")
            world.settle()
            world.known.clear()
            world.index.clear()
            assert living() - before == Counter(), f"seed {seed}"
            del world
    finally:
        gc.enable()


def test_a_match_that_was_read_keeps_nothing_alive() -> None:
    """Its candidates, read in part or in full, are no cycle."""
    reads: list[Callable[[Match], object]] = [lambda match: match.best, lambda match: match.candidates]
    gc.collect()
    gc.disable()
    try:
        for read in reads:
            before = living()
            index = make()
            driver = Driver(index)
            for size in (4, 8):
                driver.run(list(range(size)), size, kind=SnapshotKind.BOUNDARY)
            match = index.match(index.prepare(range(9)), exclude=[(1, 3)])
            assert read(match)
            index.clear()
            del match
            assert living() - before == Counter()
    finally:
        gc.enable()


def test_a_handle_to_something_recycled_raises_and_never_aliases() -> None:
    """The page, slot and slab numbers come back at once; the handle of the first owner stays dead."""
    index = make(image_slabs=1)
    driver = Driver(index)
    first = driver.run(list(range(8)), 6).snapshot  # type: ignore[attr-defined]
    freed = index.clear()
    driver.page = min(freed.pages)  # type: ignore[assignment]
    driver.slot = freed.slots[0] - 1
    second = driver.run(list(range(8)), 6).snapshot  # type: ignore[attr-defined]
    assert isinstance(first, SnapshotHandle)
    assert first != second
    assert (first.alive, second.alive) == (False, True)
    for use in (
        lambda: index.value(first),
        lambda: index.begin_fill(first, Tier.HOST, [1, 2]),
        lambda: index.evict_device(1, protect=[first]),
    ):
        with pytest.raises(StaleHandle, match="must still exist"):
            use()


def test_a_failing_eviction_pins_nothing() -> None:
    index = make()
    driver = Driver(index)
    alive = driver.run(list(range(8)), 6).snapshot  # type: ignore[attr-defined]
    dead = driver.run(list(range(50, 58)), 54 - 50).snapshot  # type: ignore[attr-defined]
    index.clear()
    alive = driver.run(list(range(8)), 6).snapshot  # type: ignore[attr-defined]
    before = index.digest()
    with pytest.raises(StaleHandle):
        index.evict_device(1, protect=[alive, dead])
    assert index.digest() == before
    index.check_invariants()
    assert raw(1)
