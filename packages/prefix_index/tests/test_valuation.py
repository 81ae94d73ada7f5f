"""Which snapshots stand in for which when one comes or goes."""

from __future__ import annotations

import random

import pytest

from index_driver import BLOCK, Driver, make, raw
from prefix_index import InvariantViolation, Pool, SnapshotKind


@pytest.mark.parametrize("first", [(), ((1, 5),)])
def test_snapshots_that_differ_in_their_tails_extra_stand_in_for_each_other(first: tuple[tuple[int, int], ...]) -> None:
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


def test_a_snapshot_takes_over_what_lay_below_any_of_two_at_one_frontier_above() -> None:
    """Two at 2 tokens, 8 valued from the first of them; one at 4 comes between, nearest to the second."""
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


@pytest.mark.parametrize("part", range(4))
def test_values_are_right_however_tails_and_branches_lie(part: int) -> None:
    """Many snapshots on few blocks, their tails on the path and beside it, checked after one publication or several."""
    for seed in range(part, 48, 4):
        rng = random.Random(seed)
        lag = rng.choice([0, 0, 1])
        index = make(pools=(Pool(lag=lag),), block_bytes=1000, image_bytes=rng.choice([1, 5_000, 500_000]))
        driver = Driver(index)
        every = rng.choice([1, 3, 5])
        known: list[list[int]] = []
        for step in range(60):
            begin = rng.choice(known)[: rng.randrange(20)] if known and rng.random() < 0.8 else []
            tokens = [*begin, *(rng.randrange(2) for _ in range(rng.randrange(1, 8)))][:24]
            known.append(tokens)
            extras = rng.choice([(), (), (), ((len(tokens) - 1, 5),), ((1, 5),)])
            match = index.match(index.prepare([*tokens, 9], b"", extras))
            lease = index.acquire(match, rng.choice([None, *match.candidates]))
            blocks = len(tokens) // BLOCK
            index.extend(lease, tokens[lease.depth * BLOCK : blocks * BLOCK], driver.pages(blocks - lease.depth))
            for frontier in rng.sample(range(1, len(tokens) + 1), min(rng.randrange(3), len(tokens))):
                depth = (frontier - lag) // BLOCK
                if lease.frontier < frontier and depth <= lease.depth:
                    tail = raw(*tokens[depth * BLOCK : frontier])
                    driver.slot += 1
                    pages = driver.pages(bool(tail))
                    kind = rng.choice(list(SnapshotKind))
                    index.publish(lease, frontier, slot=driver.slot, tail=tail, tail_pages=pages, kind=kind)
            index.release(lease)
            if rng.random() < 0.3:
                index.evict_device(rng.randrange(1, 4)) if rng.random() < 0.5 else index.claim_slot()
            if step % every == 0:
                try:
                    index.check_invariants()
                except InvariantViolation as error:
                    error.add_note(f"seed {seed}, step {step}")
                    raise
