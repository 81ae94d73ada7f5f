"""Looking up, one law a test: what is offered, why not more, and that an answer stays what it was."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from index_driver import Driver, make
from prefix_index import InvalidArgument, Match, Pool, Reason, SnapshotKind, Tier


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


def test_a_match_does_not_change_with_the_index() -> None:
    index = make()
    driver = Driver(index)
    driver.run(list(range(8)), 8)
    prompt = index.prepare(range(30))
    match, unread = index.match(prompt), index.match(prompt)
    before = (match.matched_tokens, list(match.candidates))
    driver.run(list(range(20)), 18)
    for frozen in (match, unread):
        assert (frozen.matched_tokens, list(frozen.candidates)) == before


def test_candidates_are_worked_out_once() -> None:
    index = make()
    driver = Driver(index)
    driver.run(list(range(4)), 4, kind=SnapshotKind.BOUNDARY)
    driver.run(list(range(8)), 8)
    for excluded in ([], [(5, 9)]):
        match = index.match(index.prepare(range(9)), exclude=excluded)
        assert match.best is match.best
        assert match.candidates is match.candidates
        assert match.candidates[0] is match.best
        assert [c.frontier for c in match.candidates] == ([4] if excluded else [8, 4])


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


def test_a_prompt_prepared_for_other_blocks_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="prepared with this block size and hash"):
        make().match(make(block_tokens=8).prepare(range(9)))
    with pytest.raises(InvalidArgument, match="block_tokens must be between 1 and 4096, got 0"):
        make(block_tokens=0)
    with pytest.raises(InvalidArgument, match="a pool's lag must be 0 or 1, got 2"):
        make(pools=(Pool(lag=2),))
    with pytest.raises(InvalidArgument, match="at least one pool"):
        make(pools=())


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
        match, unread = index.match(prompt), index.match(prompt)
        before = said(match)
        change()
        index.check_invariants()
        assert said(match) == said(unread) == before
        seen.add(str(said(index.match(prompt))))
    assert len(seen) == 9, "most changes must show in a new match"


def test_a_match_goes_on_saying_what_it_saw_when_the_path_itself_goes() -> None:
    index = make()
    driver = Driver(index)
    for size in (4, 8, 12):
        driver.run(list(range(size)), size)
    prompt = index.prepare(range(13))
    match, unread = index.match(prompt), index.match(prompt)
    before = said(match)
    index.evict_device(2)
    assert said(match) == said(unread) == before != said(index.match(prompt))


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
    assert (list(match.candidates), match.reason) == ([], Reason.IMAGE_EVICTED)
