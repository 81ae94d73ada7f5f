"""Copies on their way, one law a test."""

from __future__ import annotations

import pytest

from index_driver import BLOCK, Driver, make
from prefix_index import AbortTooLate, InvalidArgument, PrefixIndex, Reason, StaleHandle, Tier, WrongState


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
    fill = index.begin_fill(lease, Tier.DEVICE, driver.pages(3))
    match = index.match(prompt)
    assert match.filling == ((0, 3),)
    assert [c.filling for c in match.candidates] == [3, 3, 2, 1]
    assert match.reason is Reason.FILLING
    assert not index.evict_device(9)
    index.land(fill)
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
    fill = index.begin_fill(lease, Tier.DEVICE, pages)
    assert list(index.abort(fill).pages) == pages[::-1]
    index.cancel(lease)
    assert index.digest() == before
    with pytest.raises(StaleHandle, match="land"):
        index.land(fill)


def test_a_fill_cannot_be_undone_under_a_branch_that_another_lane_committed() -> None:
    index = make(snapshots=False)
    driver = Driver(index)
    on_the_host_only(index, driver, list(range(16)))
    match = index.match(index.prepare(range(17)))
    first = index.acquire(match, match.best)
    fill = index.begin_fill(first, Tier.DEVICE, driver.pages(4))
    match = index.match(index.prepare([*range(8), 90, 91, 92, 93, 0]))
    second = index.acquire(match, match.best)
    assert second.depth == 2
    index.extend(second, [90, 91, 92, 93], driver.pages(1))
    before = index.digest()
    with pytest.raises(AbortTooLate, match="abort"):
        index.abort(fill)
    assert index.digest() == before
    index.land(fill)
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
    fill = index.begin_fill(done.snapshot, Tier.HOST, driver.pages(33))  # type: ignore[attr-defined]
    with pytest.raises(WrongState, match="one fill of a snapshot at a time"):
        index.begin_fill(done.snapshot, Tier.HOST, driver.pages(33))  # type: ignore[attr-defined]
    index.land(fill)
    index.check_invariants()
