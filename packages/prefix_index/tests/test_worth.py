"""Which snapshots stand in for which when one comes or goes."""

from __future__ import annotations

import pytest

from index_driver import BLOCK, Driver, make, raw
from prefix_index import SnapshotKind


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


def test_a_snapshot_whose_tail_is_on_the_path_is_not_above_another_tail_of_its_block() -> None:
    """6 and 7 stand on one block, 6 on the path of 12, 7 beside it. One at 5 that leads to both comes last."""
    index = make()
    driver = Driver(index)
    path = list(range(12))
    beside = [*path[:5], 90, 91]
    for tokens in (path[:6], path, beside, path[:5]):
        lease = index.acquire(index.match(index.prepare([*tokens, 99])))
        blocks = len(tokens) // BLOCK
        index.extend(lease, tokens[: blocks * BLOCK], driver.pages(blocks))
        tail = raw(*tokens[blocks * BLOCK :])
        driver.slot += 1
        index.publish(lease, len(tokens), slot=driver.slot, tail=tail, tail_pages=driver.pages(bool(tail)))
        index.release(lease)
        index.check_invariants()
