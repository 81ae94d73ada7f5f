"""The verbs, one law a test: device tier, snapshots, leases."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Callable

import pytest

from index_driver import BLOCK, Driver, make, raw
from prefix_index import (
    AbortTooLate,
    ForeignHandle,
    InvalidArgument,
    Match,
    Pool,
    PrefixIndex,
    Reason,
    SnapshotKind,
    StaleHandle,
    StaleMatch,
    Tier,
    WrongState,
    WrongThread,
)


def test_match_of_an_empty_index_finds_nothing() -> None:
    index = make()
    match = index.match(index.prepare(range(20)))
    assert (match.matched_tokens, len(match.candidates), match.best) == (0, 0, None)
    assert match.reason is Reason.NONE


def test_a_released_path_is_found_by_the_next_prompt() -> None:
    index = make()
    Driver(index).run(list(range(10)), 10)
    match = index.match(index.prepare(range(40)))
    assert match.matched_tokens == 8
    assert [c.frontier for c in match.candidates] == [10]
    assert match.reason is Reason.NONE


def test_the_last_token_is_always_computed() -> None:
    index = make()
    Driver(index).run(list(range(8)), 8)
    assert [c.frontier for c in index.match(index.prepare(range(8))).candidates] == []
    assert index.match(index.prepare(range(8))).matched_tokens == 4
    assert [c.frontier for c in index.match(index.prepare(range(9))).candidates] == [8]


def test_candidates_come_deepest_first_and_an_edit_falls_back() -> None:
    index = make()
    driver = Driver(index)
    driver.run(list(range(4)), 4, kind=SnapshotKind.BOUNDARY)
    driver.run(list(range(8)), 8, kind=SnapshotKind.BOUNDARY)
    driver.run(list(range(11)), 11)
    frontiers = [c.frontier for c in index.match(index.prepare(range(30))).candidates]
    assert frontiers == [11, 8, 4]
    edited = [*range(6), 99, *range(7, 30)]
    match = index.match(index.prepare(edited))
    assert [c.frontier for c in match.candidates] == [4]
    assert match.matched_tokens == 4


def test_a_tail_is_compared_exactly() -> None:
    index = make()
    Driver(index).run([*range(4), 7, 8], 6)
    assert index.match(index.prepare([*range(4), 7, 8, 9])).best.frontier == 6  # type: ignore[union-attr]
    assert index.match(index.prepare([*range(4), 7, 9, 9])).best is None


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


def test_a_stale_match_is_refused() -> None:
    index = make()
    Driver(index).run(list(range(8)), 8)
    match = index.match(index.prepare(range(9)))
    index.evict_device(1)
    with pytest.raises(StaleMatch, match="match again"):
        index.acquire(match, match.best)
    assert not match.candidates[0].snapshot.alive  # type: ignore[union-attr]


def test_a_match_does_not_change_with_the_index() -> None:
    index = make()
    driver = Driver(index)
    driver.run(list(range(8)), 8)
    match = index.match(index.prepare(range(30)))
    before = (match.matched_tokens, list(match.candidates))
    driver.run(list(range(20)), 18)
    assert (match.matched_tokens, list(match.candidates)) == before


def test_match_changes_nothing() -> None:
    index = make()
    driver = Driver(index)
    driver.run(list(range(20)), 18)
    before, epoch = index.digest(), index.epoch
    index.match(index.prepare([*range(10), 77, 78]), exclude=[(3, 5)])
    assert (index.digest(), index.epoch) == (before, epoch)


def test_excluded_frontiers_are_not_offered() -> None:
    index = make()
    driver = Driver(index)
    driver.run(list(range(4)), 4, kind=SnapshotKind.BOUNDARY)
    driver.run(list(range(8)), 8, kind=SnapshotKind.BOUNDARY)
    prompt = index.prepare(range(9))
    assert [c.frontier for c in index.match(prompt, exclude=[(4, 8)]).candidates] == [8, 4]
    match = index.match(prompt, exclude=[(4, 9)])
    assert [c.frontier for c in match.candidates] == [4]
    assert match.reason is Reason.EXCLUDED


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


def test_namespaces_share_nothing() -> None:
    index = make()
    driver = Driver(index)
    driver.run(list(range(8)), 8, namespace=b"a")
    assert index.match(index.prepare(range(9), b"b")).matched_tokens == 0
    assert index.prepare(range(9), b"a").hashes[0] != index.prepare(range(9), b"b").hashes[0]
    driver.run(list(range(8)), 8, namespace=b"b")
    assert set(index.clear(b"a").pages) == {100, 101}
    assert index.match(index.prepare(range(9), b"b")).matched_tokens == 8


def test_extras_are_part_of_identity() -> None:
    index = make()
    driver = Driver(index)
    driver.run(list(range(12)), 10, extras=((5, 7),))
    assert index.match(index.prepare(range(13), extras=((5, 7),))).best.frontier == 10  # type: ignore[union-attr]
    assert index.match(index.prepare(range(13), extras=((5, 8),))).matched_tokens == 4
    assert index.match(index.prepare(range(13))).matched_tokens == 4
    index.check_invariants()


def test_an_extra_inside_a_tail_is_part_of_the_tails_identity() -> None:
    index = make()
    Driver(index).run(list(range(7)), 7, extras=((5, 7),))
    assert index.match(index.prepare(range(8), extras=((5, 7),))).best.frontier == 7  # type: ignore[union-attr]
    assert index.match(index.prepare(range(8), extras=((5, 8),))).best is None
    assert index.match(index.prepare(range(8), extras=((7, 8),))).best is None


def test_equal_hashes_do_not_make_equal_blocks() -> None:
    index = make(block_hash=lambda parent, tokens, extra: 7)
    driver = Driver(index)
    rng = random.Random(5)
    prompts = [[rng.randrange(2) for _ in range(12)] for _ in range(30)]
    for tokens in prompts:
        driver.run(tokens, 12)
    for tokens in prompts:
        match = index.match(index.prepare([*tokens, 9]))
        assert match.matched_tokens == 12
        assert match.best is not None
        assert match.best.frontier == 12


def test_without_snapshots_every_block_boundary_is_resumable() -> None:
    index = make(snapshots=False)
    driver = Driver(index)
    driver.run(list(range(16)))
    match = index.match(index.prepare([*range(10), 99, 99]))
    assert [c.frontier for c in match.candidates] == [8, 4]
    lease = index.acquire(match, match.best)
    assert lease.pages == ((100, 101),)
    index.extend(lease, [8, 9, 99, 99], driver.pages(1))
    index.release(lease)
    index.check_invariants()


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


def on_the_host_only(index: PrefixIndex, driver: Driver, tokens: list[int]) -> None:
    """Commit `tokens`, copy them to the Host, give up their device copies."""
    lease = index.acquire(index.match(index.prepare([*tokens, 0])))
    index.extend(lease, tokens, driver.pages(len(tokens) // BLOCK))
    index.land(index.begin_fill(lease, Tier.HOST, driver.pages(lease.depth)))
    index.release(lease)
    index.evict_device(len(tokens))
    assert index.stats().device_blocks == 0
    index.check_invariants()


def test_a_fill_is_resident_only_once_it_landed() -> None:
    index = make(snapshots=False)
    driver = Driver(index)
    on_the_host_only(index, driver, list(range(16)))
    prompt = index.prepare(range(17))
    match = index.match(prompt)
    assert (match.matched_blocks, match.device_blocks, match.host_blocks) == (4, 0, 4)
    assert match.best is not None
    assert match.best.restore_bytes == 4 << 20
    lease = index.acquire(match, match.best)
    ticket = index.begin_fill(lease, Tier.DEVICE, driver.pages(3))
    match = index.match(prompt)
    assert match.filling == ((0, 3),)
    assert [c.filling for c in match.candidates] == [3, 3, 2, 1]
    assert match.reason is Reason.FILLING
    assert not index.evict_device(9)
    index.land(ticket)
    assert [c.filling for c in index.match(prompt).candidates] == [0, 0, 0, 0]
    index.release(lease)
    index.check_invariants()


def test_an_aborted_restore_leaves_the_digest_of_before() -> None:
    index = make(snapshots=False)
    driver = Driver(index)
    on_the_host_only(index, driver, list(range(16)))
    before = index.digest()
    match = index.match(index.prepare(range(17)))
    lease = index.acquire(match, match.best)
    pages = driver.pages(4)
    ticket = index.begin_fill(lease, Tier.DEVICE, pages)
    assert list(index.abort(ticket).pages) == pages[::-1]
    index.cancel(lease)
    assert index.digest() == before
    with pytest.raises(StaleHandle, match="land"):
        index.land(ticket)


def test_a_fill_cannot_be_undone_under_a_branch_that_another_lane_committed() -> None:
    index = make(snapshots=False)
    driver = Driver(index)
    on_the_host_only(index, driver, list(range(16)))
    match = index.match(index.prepare(range(17)))
    first = index.acquire(match, match.best)
    ticket = index.begin_fill(first, Tier.DEVICE, driver.pages(4))
    match = index.match(index.prepare([*range(8), 90, 91, 92, 93, 0]))
    second = index.acquire(match, match.best)
    assert second.depth == 2
    index.extend(second, [90, 91, 92, 93], driver.pages(1))
    before = index.digest()
    with pytest.raises(AbortTooLate, match="abort"):
        index.abort(ticket)
    assert index.digest() == before
    index.land(ticket)
    index.release(first)
    index.release(second)
    index.check_invariants()


def test_fills_of_what_is_there_already_are_refused() -> None:
    index = make()
    driver = Driver(index)
    done = driver.run(list(range(8)), 6)
    lease = index.acquire(index.match(index.prepare(range(9))))
    before = index.digest()
    with pytest.raises(InvalidArgument, match="0 blocks lack a copy on the device, got 1 handles"):
        index.begin_fill(lease, Tier.DEVICE, [1])
    with pytest.raises(WrongState, match="made from a Host copy"):
        index.begin_fill(done.snapshot, Tier.DEVICE, slot=7)  # type: ignore[attr-defined]
    with pytest.raises(InvalidArgument, match="image and tail take 33 slabs, got 2"):
        index.begin_fill(done.snapshot, Tier.HOST, [1, 2])  # type: ignore[attr-defined]
    with pytest.raises(InvalidArgument, match="a slot goes with a snapshot"):
        index.begin_fill(lease, Tier.DEVICE, [1], slot=3)
    assert index.digest() == before
    ticket = index.begin_fill(done.snapshot, Tier.HOST, driver.pages(33))  # type: ignore[attr-defined]
    with pytest.raises(WrongState, match="one fill of a snapshot at a time"):
        index.begin_fill(done.snapshot, Tier.HOST, driver.pages(33))  # type: ignore[attr-defined]
    index.land(ticket)
    index.check_invariants()


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
    ticket = index.begin_fill(lease, Tier.HOST, driver.pages(4))
    index.land(ticket)
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


def test_a_leaf_grows_under_whoever_stands_inside_it() -> None:
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


def test_a_prompt_prepared_for_other_blocks_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="prepared with this block size and hash"):
        make().match(make(block_tokens=8).prepare(range(9)))
    with pytest.raises(InvalidArgument, match="block_tokens must be between 1 and 4096, got 0"):
        make(block_tokens=0)
    with pytest.raises(InvalidArgument, match="a pool's lag must be 0 or 1, got 2"):
        make(pools=(Pool(lag=2),))
    with pytest.raises(InvalidArgument, match="at least one pool"):
        make(pools=())


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


def test_children_of_equal_tokens_are_told_apart_by_their_extras() -> None:
    """Whichever came first: the look-up tries the first child before it asks the hash."""
    index = make(snapshots=False)
    driver = Driver(index)
    tokens = list(range(12))
    ways: list[tuple[tuple[int, int], ...]] = [(), ((5, 7),), ((5, 8),)]
    for extras in ways:
        driver.run(tokens, extras=extras)
    for extras in ways:
        match = index.match(index.prepare([*tokens, 0], extras=extras))
        assert (match.matched_blocks, len(match.candidates)) == (3, 3)
    assert index.match(index.prepare([*tokens, 0], extras=((5, 9),))).matched_blocks == 1


def said(match: Match) -> list[object]:
    return [match.reason, *((c.frontier, c.kind, c.restore_bytes, c.filling) for c in match.candidates)]


def test_a_match_goes_on_saying_what_it_saw() -> None:
    """Snapshots published in between, promoted, given Host copies, cut off by a branch or lost; a path that grows."""
    index = make(image_slabs=1)
    driver = Driver(index)
    tokens = list(range(20))
    made = [driver.run(tokens[:size], size, kind=SnapshotKind.TAP).snapshot for size in (4, 10, 14, 16)]  # type: ignore[attr-defined]
    prompt = index.prepare([*tokens, 0])
    lease = index.acquire(index.match(prompt))
    index.extend(lease, tokens[:16], driver.pages(4))
    changes: list[Callable[[], object]] = [
        lambda: index.publish(lease, 12, slot=90, kind=SnapshotKind.TAP),  # between two others
        lambda: index.publish(lease, 16, slot=91, kind=SnapshotKind.BOUNDARY),  # promotes the tap
        lambda: index.extend(lease, tokens[16:], driver.pages(1)),
        lambda: index.publish(lease, 20, slot=92),
        lambda: index.begin_fill(made[1], Tier.HOST, driver.pages(2)),
        lambda: index.begin_fill(lease, Tier.HOST, driver.pages(3)),
        lambda: index.release(lease),
        lambda: index.evict_device(1),
        lambda: driver.run([*range(8), 70, 71, 72, 73]),  # a branch
        lambda: index.claim_slot(),
        lambda: index.claim_slot(),
        lambda: index.claim_slot(),
        lambda: index.evict_device(2),
        lambda: index.evict_device(9),
    ]
    seen = set()
    for change in changes:
        match = index.match(prompt)
        before = said(match)
        change()
        index.check_invariants()
        assert said(match) == before
        seen.add(str(said(index.match(prompt))))
    assert len(seen) == 9, "most changes must show in a new match"


def test_a_match_goes_on_saying_what_it_saw_when_the_path_itself_goes() -> None:
    index = make()
    driver = Driver(index)
    for size in (4, 8, 12):
        driver.run(list(range(size)), size)
    match = index.match(index.prepare(range(13)))
    before = said(match)
    index.evict_device(2)
    assert said(match) == before != said(index.match(match.prompt))


def test_the_reason_is_about_what_lies_below_the_best_candidate() -> None:
    """A lost snapshot above the best one is no reason; one below it is."""
    index = make()
    driver = Driver(index)
    driver.run(list(range(4)), 4, kind=SnapshotKind.BOUNDARY)
    driver.run(list(range(8)), 8, kind=SnapshotKind.BOUNDARY)
    driver.run(list(range(12)))
    prompt = index.prepare(range(13))
    assert index.match(prompt).reason is Reason.NO_SNAPSHOT
    for _ in range(9):
        match = index.match(prompt)
        index.release(index.acquire(match, match.best))
    index.claim_slot()
    match = index.match(prompt)
    assert ([c.frontier for c in match.candidates], match.reason) == ([8], Reason.NO_SNAPSHOT)
    index.claim_slot()
    match = index.match(prompt)
    assert (list(match.candidates), match.reason) == ([], Reason.IMAGE_LOST)


@pytest.mark.parametrize("first", [(), ((1, 5),)])
def test_twins_that_differ_in_their_tails_extra_stand_in_for_each_other(first: tuple[tuple[int, int], ...]) -> None:
    """Two snapshots at one frontier: whichever is lost, what lies below is valued from the other."""
    index = make()
    second = ((1, 5),) if not first else ()
    for slot, (tokens, extras) in enumerate((([0, 1], first), ([0, 1], second), (list(range(8)), ()))):
        lease = index.acquire(index.match(index.prepare([*tokens, 99], extras=extras)))
        whole = tokens[: len(tokens) // BLOCK * BLOCK]
        index.extend(lease, whole, [10 * slot + block for block in range(len(whole) // BLOCK)])
        tail = raw(*tokens[len(whole) :])
        pages = [90 + slot] if tail else []
        index.publish(lease, len(tokens), slot=slot, tail=tail, tail_pages=pages, kind=SnapshotKind.BOUNDARY)
        index.release(lease)
        index.check_invariants()
    deepest = index.match(index.prepare(range(9))).candidates[0]
    for _ in range(9):
        match = index.match(index.prepare(range(9)))
        index.release(index.acquire(match, match.candidates[0]))
    assert deepest.frontier == 8
    while index.claim_slot() is not None:
        index.check_invariants()
    assert index.stats().snapshots == 0


def test_a_snapshot_takes_over_what_lay_below_any_twin_of_the_one_above() -> None:
    """Twins at 2 tokens, 8 valued from the first of them; one at 4 comes between, nearest to the second."""
    index = make()
    driver = Driver(index)
    for tokens, extras in ((2, ()), (8, ()), (2, ((1, 5),)), (4, ())):
        match = index.match(index.prepare([*range(tokens), 99], extras=extras))
        lease = index.acquire(match)
        index.extend(lease, range(tokens // BLOCK * BLOCK), driver.pages(tokens // BLOCK))
        tail = raw(*range(tokens)) if tokens < BLOCK else b""
        pages = driver.pages(1) if tail else []
        driver.slot += 1
        index.publish(lease, tokens, slot=driver.slot, tail=tail, tail_pages=pages, kind=SnapshotKind.BOUNDARY)
        index.release(lease)
        index.check_invariants()
