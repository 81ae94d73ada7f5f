"""The verbs, one law a test: snapshots, leases, misuse."""

from __future__ import annotations

import math
import threading
from array import array

import pytest

from index_driver import BLOCK, Driver, make, raw
from prefix_index import (
    ForeignHandle,
    InvalidArgument,
    Pool,
    PrefixIndex,
    StaleHandle,
    StaleMatch,
    Tier,
    WrongState,
    WrongThread,
)


def test_extend_sorts_blocks_into_inserted_and_duplicate() -> None:
    index = make()
    driver = Driver(index)
    driver.run(list(range(12)))
    lease = index.acquire(index.match(index.prepare(range(5))))
    done = index.extend(lease, [*range(8), 50, 51, 52, 53], driver.pages(3))
    assert (done.inserted, done.reattached, done.duplicate) == (((2, 3),), (), ((0, 2),))
    index.check_invariants()
    assert lease.depth == 3
    index.release(lease)
    index.check_invariants()


def test_lease_pages_are_those_of_the_resumed_path() -> None:
    index = make()
    driver = Driver(index)
    driver.run(list(range(12)), 12)
    match = index.match(index.prepare(range(13)))
    lease = index.acquire(match, match.best)
    assert lease.pages == ((100, 101, 102),)
    assert lease.slot == 1
    index.extend(lease, range(12, 20), driver.pages(2))
    assert lease.pages == ((100, 101, 102),)


def test_several_pools_keep_a_page_each() -> None:
    index = make(pools=(Pool(lag=0), Pool(lag=1)))
    lease = index.acquire(index.match(index.prepare(range(9))))
    index.extend(lease, range(8), [(1, 11), (2, 12)])
    # One pool is a token behind, so a frontier on a block boundary anchors a block earlier, with a whole block as tail.
    index.publish(lease, 8, slot=3, tail=raw(4, 5, 6, 7), tail_pages=(5, 15))
    index.release(lease)
    index.check_invariants()
    match = index.match(index.prepare(range(12)))
    assert match.best is not None
    assert (match.best.frontier, match.best.depth) == (8, 1)
    lease = index.acquire(match, match.best)
    assert lease.pages == ((1,), (11,))
    assert lease.tail_pages == (5, 15)
    index.cancel(lease)
    assert index.evict_device(3).pages == ((5, 15), (2, 12), (1, 11))


def test_a_stale_match_is_refused() -> None:
    index = make()
    Driver(index).run(list(range(8)), 8)
    match = index.match(index.prepare(range(9)))
    index.evict_device(1)
    with pytest.raises(StaleMatch, match="match again"):
        index.acquire(match, match.best)
    assert not match.candidates[0].snapshot.alive  # type: ignore[union-attr]


def test_a_candidate_serves_its_own_prompt_alone() -> None:
    index = make()
    driver = Driver(index)
    driver.run(list(range(8)), 8)
    driver.run(list(range(100, 108)), 8)
    match = index.match(index.prepare(range(20)))
    again = index.match(index.prepare(range(20)))
    other = index.match(index.prepare(range(100, 120)))
    before = index.digest()
    for use in (index.acquire, index.demand):
        with pytest.raises(InvalidArgument, match="must be one of the match's prompt"):
            use(match, other.best)
    assert index.digest() == before
    lease = index.acquire(match, again.best)
    assert lease.frontier == 8


def test_a_block_boundary_of_another_index_is_no_source() -> None:
    """Where there are snapshots, the end of a block alone cannot be resumed."""
    index, plain = make(), make(snapshots=False)
    Driver(index).run(list(range(8)), 8)
    lease = plain.acquire(plain.match(plain.prepare(range(9))))
    plain.extend(lease, range(8), [1, 2])
    foreign = plain.match(plain.prepare(range(9))).best
    match = index.match(index.prepare(range(9)))
    for use in (index.acquire, index.demand):
        with pytest.raises(ForeignHandle, match="the candidate must be this index's own"):
            use(match, foreign)


def test_counts_that_are_no_ints_evict_nothing() -> None:
    index = make()
    Driver(index).run(list(range(16)), 16)
    before = index.digest()
    for count in (1.5, 2.0, "1", None):
        for evict in (index.evict_device, index.evict_host):
            with pytest.raises(InvalidArgument, match=r"num_\w+ must be an int, got"):
                evict(count)  # type: ignore[operator]
    assert index.digest() == before
    index.check_invariants()


def test_pages_may_come_in_any_sequence_of_ints() -> None:
    class Pages(tuple):
        """Added to a list it adds elementwise, as arrays do."""

        def __radd__(self, other: object) -> object:
            raise AssertionError("pages are gone through, not added")

    for pools, pages in ((1, Pages((5, 6))), (2, [Pages((5, 6)), Pages((7, 8))])):
        index = make(pools=(Pool(),) * pools)
        lease = index.acquire(index.match(index.prepare(range(8))))
        index.extend(lease, range(8), pages)  # type: ignore[arg-type]
        assert index.handles(lease, Tier.DEVICE, 0, 2) == ((5, 6) if pools == 1 else ((5, 6), (7, 8)))


def test_a_cancelled_lease_leaves_no_trace() -> None:
    index = make()
    driver = Driver(index)
    driver.run(list(range(8)), 8)
    driver.run([*range(50, 58)], 8)
    before = index.digest()
    match = index.match(index.prepare(range(9)))
    lease = index.acquire(match, match.best)
    assert index.digest() != before
    index.cancel(lease)
    assert index.digest() == before
    index.check_invariants()


def test_a_cancel_after_work_is_refused() -> None:
    index = make()
    lease = index.acquire(index.match(index.prepare(range(9))))
    index.extend(lease, range(4), [1])
    with pytest.raises(WrongState, match="cancel"):
        index.cancel(lease)
    index.release(lease)


def test_a_duplicate_snapshot_leaves_slot_and_pages_with_the_caller() -> None:
    index = make()
    driver = Driver(index)
    first = driver.run(list(range(6)), 6)
    lease = index.acquire(index.match(index.prepare(range(9))))
    index.extend(lease, range(4), [500])
    again = index.publish(lease, 6, slot=900, tail=raw(4, 5), tail_pages=(901,))
    assert not again.created
    assert again.snapshot == first.snapshot  # type: ignore[attr-defined]
    index.release(lease)
    index.check_invariants()
    assert 900 not in index.clear().slots


def test_a_path_of_a_million_tokens_need_no_recursion() -> None:
    index = make(block_tokens=64)
    tokens = array("i", range(1_000_000)).tobytes()
    lease = index.acquire(index.match(index.prepare(tokens[: 4 * 65])))
    step = 64 * 64 * 4
    for first in range(0, len(tokens) // step * step, step):
        index.extend(lease, tokens[first : first + step], range(first, first + 64))
        frontier = lease.depth * 64
        index.publish(lease, frontier, slot=first)
    index.release(lease)
    prompt = index.prepare(tokens)
    assert index.match(prompt).matched_tokens == len(tokens) // step * step // 4
    index.digest()
    index.check_invariants()
    assert len(index.evict_device(10_000).pages) == 10_000
    index.clear()


def test_misuse_names_the_operation_and_changes_nothing() -> None:
    index = make()
    driver = Driver(index)
    driver.run(list(range(8)), 8)
    other = make()
    match = index.match(index.prepare(range(20)))
    lease = index.acquire(match, match.best)
    foreign = other.acquire(other.match(other.prepare(range(3))))
    before = index.digest()
    with pytest.raises(InvalidArgument, match=r"extend: tokens must fill blocks of 4, got 3"):
        index.extend(lease, [1, 2, 3], [1])
    with pytest.raises(InvalidArgument, match=r"extend: one page entry per block"):
        index.extend(lease, [1, 2, 3, 4], [1, 2])
    with pytest.raises(InvalidArgument, match=r"extend: handles must be ints that are not negative"):
        index.extend(lease, [1, 2, 3, 4], [-1])
    with pytest.raises(InvalidArgument, match=r"publish: 12 tokens need 3 committed blocks, got 2"):
        index.publish(lease, 12, slot=1)
    with pytest.raises(InvalidArgument, match=r"the tail must be 1 tokens, got 0"):
        index.publish(lease, 9, slot=1)
    with pytest.raises(InvalidArgument, match=r"a tail needs 1 pages"):
        index.publish(lease, 9, slot=1, tail=raw(8))
    with pytest.raises(InvalidArgument, match=r"above 8, the resume point"):
        index.publish(lease, 8, slot=1)
    with pytest.raises(ForeignHandle, match="extend"):
        index.extend(foreign, [], [])
    with pytest.raises(ForeignHandle, match="acquire"):
        index.acquire(other.match(other.prepare(range(3))))
    with pytest.raises(WrongState, match="clear"):
        index.clear()
    with pytest.raises(InvalidArgument, match="int32"):
        index.prepare([1 << 31])
    with pytest.raises(InvalidArgument, match="groups of 4"):
        index.prepare(b"abc")
    with pytest.raises(InvalidArgument, match="sorted"):
        index.prepare([1], extras=((3, 1), (3, 2)))
    assert index.digest() == before
    index.release(lease)
    with pytest.raises(StaleHandle, match="release"):
        index.release(lease)


@pytest.mark.parametrize("name", ["block_tokens", "block_bytes", "image_bytes", "image_slabs"])
@pytest.mark.parametrize("size", [0, -1, 4.0, math.nan, None])
def test_sizes_that_make_no_sense_are_refused_at_construction(name: str, size: object) -> None:
    with pytest.raises(InvalidArgument, match=f"PrefixIndex: {name} must be"):
        PrefixIndex(**{name: size})  # type: ignore[arg-type]


def test_a_second_thread_is_caught() -> None:
    index = make()
    index.clear()
    caught: list[Exception] = []

    def intrude() -> None:
        try:
            index.clear()
        except WrongThread as error:
            caught.append(error)

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join()
    assert len(caught) == 1
    index.hand_over()
    thread = threading.Thread(target=index.clear)
    thread.start()
    thread.join()
    with pytest.raises(WrongThread, match="clear"):
        index.clear()


def test_the_epoch_moves_when_something_is_lost_or_cut_and_only_then() -> None:
    index = make(image_slabs=1)
    driver = Driver(index)
    done = driver.run(list(range(8)), 8)
    epoch = index.epoch
    match = index.match(index.prepare(range(20)))
    lease = index.acquire(match, match.best)
    index.activate(lease)
    index.extend(lease, range(8, 16), driver.pages(2))
    index.publish(lease, 16, slot=77)
    fill = index.begin_fill(lease, Tier.HOST, driver.pages(4))
    index.land(fill)
    index.release(lease)
    assert index.epoch == epoch, "insert, publication, landing and pins renumber nothing"
    index.begin_fill(done.snapshot, Tier.HOST, driver.pages(1))  # type: ignore[attr-defined]
    assert index.epoch == epoch
    driver.run([*range(12), 90, 91, 92, 93])
    assert index.epoch > epoch, "a branch cut the edge"
    epoch = index.epoch
    index.evict_device(1)
    assert index.epoch > epoch, "a copy is gone"


def test_decoded_blocks_grow_a_leaf_edge_in_place() -> None:
    """One block at a time: 200 blocks make one edge of two pieces, and the path reads back as one."""
    index = make(snapshots=False)
    lease = index.acquire(index.match(index.prepare(range(3))))
    for block in range(200):
        done = index.extend(lease, range(block * BLOCK, (block + 1) * BLOCK), [block])
        assert done.inserted == ((block, block + 1),)
    index.check_invariants()
    assert index.stats().edges == 1
    index.release(lease)
    match = index.match(index.prepare(range(200 * BLOCK + 1)))
    assert index.acquire(match, match.best).pages == (tuple(range(200)),)


def test_a_leaf_grows_under_whatever_stands_inside_it() -> None:
    """Snapshots and other leases on a path cut nothing: only a branch does."""
    index = make()
    first = index.acquire(index.match(index.prepare(range(3))))
    index.extend(first, range(8), [0, 1])
    index.publish(first, 8, slot=0)
    match = index.match(index.prepare(range(9)))
    second = index.acquire(match, match.best)
    index.extend(first, range(8, 12), [2])
    index.check_invariants()
    assert (index.stats().edges, second.pages) == (1, ((0, 1),))
    index.extend(second, range(90, 94), [3])
    index.check_invariants()
    assert index.stats().edges == 3
    index.release(second)
    index.release(first)
    assert index.evict_device(9).pages == (3, 2, 1, 0)
