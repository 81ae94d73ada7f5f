"""The owner of each page, slot and slab, from admission to the end of a lane."""

from __future__ import annotations

import pytest

from cache_bench import BLOCK, Bench, Life, signature
from slab_pool import CopyFailed


def test_an_endpoint_takes_the_slot_and_the_partial_page_over() -> None:
    bench = Bench()
    tokens = list(range(150))
    lane = bench.run(tokens)
    slot, pages = lane.slot, lane.pages
    partial = pages[2]
    bench.finish(lane, tokens)
    bench.check()
    following = [*tokens, 7, 8]
    resumed = bench.admit(following)
    assert resumed is not None
    assert resumed.frontier == 150
    assert resumed.pages[:2] == pages[:2]
    # State and partial page are copies: the snapshot stays as it is while the lane goes on.
    assert resumed.slot != slot
    assert resumed.pages[2] != partial
    assert (bench.memory.states[resumed.slot] == signature(tokens)).all()
    assert (bench.memory.pages[resumed.pages[2]] == signature(tokens)).all()
    bench.compute(resumed, following, 150, 152)
    assert (bench.memory.states[slot] == signature(tokens)).all()
    assert (bench.memory.pages[partial] == signature(tokens)).all()
    bench.check()


def test_a_fresh_lane_starts_from_zeros() -> None:
    bench = Bench()
    bench.memory.states[1:] = 9
    lane = bench.admit([1, 2, 3])
    assert lane is not None
    assert not bench.memory.states[lane.slot].any()


def test_a_block_that_is_there_already_stays_private() -> None:
    bench = Bench()
    tokens = list(range(130))
    one, two = bench.admit(tokens), bench.admit(tokens)
    assert one is not None
    assert two is not None
    for lane in (one, two):
        bench.compute(lane, tokens, 0, 130)
        bench.commit(lane, 130)
    assert one.private == {one.pages[2]}
    assert two.private == set(two.pages)
    bench.check()
    bench.finish(one, tokens)
    bench.finish(two, tokens)
    bench.check()
    assert bench.cache.index.stats().snapshots == 1


def test_a_request_that_finds_no_room_changes_nothing() -> None:
    bench = Bench(pages=6)
    tokens = list(range(130))
    bench.run(tokens, finish=True)
    assert bench.admit([5], total=4 * BLOCK) is not None
    before, stats = bench.cache.index.digest(), bench.cache.stats()
    assert bench.admit([*tokens, 1, 2, 3], total=5 * BLOCK) is None
    assert bench.admit(list(range(500, 510)), total=3 * BLOCK) is None
    assert bench.admit([9], total=3 * BLOCK, reuse=False) is None
    assert (bench.cache.index.digest(), bench.cache.stats()) == (before, stats)
    bench.check()


def test_a_shallower_place_is_taken_where_the_deepest_does_not_fit() -> None:
    """The path's own pages cannot be evicted for it: with a copy of the tail the deepest snapshot needs one page more
    than there is, so the whole prompt is computed."""
    bench = Bench(pages=4)
    tokens = list(range(150))
    bench.run(tokens, finish=True)  # two blocks and a tail; one page is free
    lane = bench.admit([*tokens, 1], total=4 * BLOCK)
    assert lane is not None
    assert lane.frontier == 0
    bench.check()


def test_a_tap_copies_the_partial_page() -> None:
    bench = Bench()
    tokens = list(range(200))
    lane = bench.admit(tokens)
    assert lane is not None
    ((_, slot),) = bench.claim_taps(lane, 140)
    bench.compute(lane, tokens, 0, 200)
    bench.memory.states[slot] = signature(tokens[:140])
    bench.commit(lane, 200)
    bench.cache.publisher.publish_taps(lane)
    bench.check()
    bench.memory.pages[lane.pages[2]] = 0  # the lane's own page may go on changing
    other = bench.admit([*tokens[:140], 3, 2, 1])
    assert other is not None
    assert other.frontier == 140
    assert (bench.memory.states[other.slot] == signature(tokens[:140])).all()
    assert (bench.memory.pages[other.pages[2]] != 0).all()


def test_taps_beyond_the_snapshot_slots_are_counted() -> None:
    bench = Bench(snapshots=2)
    lane = bench.admit(list(range(300)))
    assert lane is not None
    taps = bench.claim_taps(lane, 100, 150, 200)
    assert [position for position, _ in taps] == [150, 200]
    assert lane.taps_skipped == 1
    bench.check()
    bench.abandon(lane)  # their pass has failed
    bench.check_nothing_is_lost()


def test_growth_takes_what_the_cache_can_spare_and_no_more() -> None:
    bench = Bench(pages=6, lanes=2)
    tokens = list(range(130))
    bench.run(tokens, finish=True)  # three pages of cache
    lane = bench.admit([1, 2], total=BLOCK, reuse=False)
    assert lane is not None
    assert bench.cache.grow(lane, 6 * BLOCK)
    bench.check()
    assert not bench.cache.grow(lane, 6 * BLOCK + 1)
    assert len(lane.pages) == 6
    bench.check()


# ---- the Host tier ----------------------------------------------------------------------------------------------


def test_what_left_the_device_comes_back_from_the_host() -> None:
    bench = Bench(slabs=40)
    tokens = list(range(150))
    bench.on_host_only(tokens)
    bench.memory.pages[1:] = 0xEE
    bench.memory.states[1:] = 0xEE
    following = [*tokens, 7, 8, 9]
    lane = bench.admit(following)
    assert lane is not None
    assert lane.frontier == 150
    assert lane.restore is not None
    bench.compute(lane, following, 150, 153)
    tail = bench.memory.pages[lane.pages[2]]
    assert (tail == signature(following)).all()
    bench.finish(lane, following)
    bench.check_nothing_is_lost()


def test_a_restore_lands_in_the_order_of_a_pass() -> None:
    """Each part is there when its layer has waited, and no later one needs to be."""
    bench = Bench(slabs=40)
    tokens = list(range(150))
    bench.on_host_only(tokens)
    lane = bench.admit([*tokens, 1])
    assert lane is not None
    assert lane.restore is not None
    layout, states = bench.memory.page_layout, bench.memory.state_layout
    page = bench.memory.pages[lane.pages[0], layout.layer_range(0).begin : layout.layer_range(0).end]
    state = bench.memory.states[lane.slot, states.layer_range(0).begin : states.layer_range(0).end]
    assert bench.reads.num_pending_parts == 3
    lane.restore.wait_for_prelude()
    assert bench.reads.num_pending_parts == 2
    assert (bench.memory.pages[lane.pages[2]] == signature(tokens)).all()  # the tail
    assert (state != signature(tokens)).all()
    lane.restore.wait_for_layer(0)  # Gated DeltaNet
    assert bench.reads.num_pending_parts == 1
    assert (state == signature(tokens)).all()
    assert (page != signature(tokens[:64])).all()
    lane.restore.wait_for_layer(1)  # attention
    assert (page == signature(tokens[:64])).all()


def test_blocks_that_are_still_arriving_are_not_offered_to_others() -> None:
    bench = Bench(slabs=40)
    tokens = list(range(150))
    bench.on_host_only(tokens)
    first = bench.admit([*tokens, 1])
    second = bench.admit([*tokens, 2])
    assert first is not None
    assert second is not None
    assert (first.frontier, second.frontier) == (150, 0)
    bench.land_all()
    third = bench.admit([*tokens, 3])
    assert third is not None
    assert third.frontier == 150
    bench.compute(third, [*tokens, 3], 150, 151)


def test_a_lane_cancelled_before_its_first_pass_leaves_its_memory_to_the_copies() -> None:
    bench = Bench(slabs=40)
    tokens = list(range(150))
    bench.on_host_only(tokens)
    lane = bench.admit([*tokens, 1])
    assert lane is not None
    slot, own = lane.slot, set(lane.private)
    bench.abandon(lane)
    taken = []
    while (other := bench.admit([len(taken)], reuse=False)) is not None:
        taken.append(other)
        assert other.slot != slot
        assert not own & set(other.pages)
        if len(taken) == 3:
            break
    bench.land_all()
    for other in taken:
        assert not bench.memory.states[other.slot].any(), "a late copy wrote into another's state"
        bench.abandon(other)
    bench.check_nothing_is_lost()


def test_a_source_is_not_evicted_while_it_is_read() -> None:
    """The slabs a restore reads from stay where they are, even when the lane is gone and the tier is emptied."""
    bench = Bench(slabs=40)
    tokens = list(range(150))
    bench.on_host_only(tokens)
    before = bench.cache.stats().host
    lane = bench.admit([*tokens, 1])
    assert lane is not None
    assert before is not None
    bench.abandon(lane)
    freed = bench.cache.index.evict_host(before.slabs_total)
    assert not freed.slabs
    bench.land_all()
    assert bench.cache.index.evict_host(before.slabs_total).slabs


def test_only_what_the_host_lacks_is_written() -> None:
    bench = Bench(slabs=60)
    tokens = list(range(130))
    bench.run(tokens, finish=True)
    bench.land_all()
    stats = bench.cache.stats().host
    assert stats is not None
    page_bytes, image_bytes = bench.memory.page_layout.page_bytes, bench.memory.state_layout.image_bytes
    assert stats.written_bytes == 3 * page_bytes + image_bytes  # two blocks, a tail, an image
    bench.run([*tokens, *range(500, 570)], finish=True)
    bench.land_all()
    stats = bench.cache.stats().host
    assert stats is not None
    assert stats.written_bytes == (3 + 2) * page_bytes + 2 * image_bytes


def test_an_endpoint_waits_for_copies_that_hold_every_snapshot_slot() -> None:
    bench = Bench(lanes=2, snapshots=1, slabs=40)
    one, two = list(range(150)), list(range(200, 340))
    bench.run(one, finish=True)
    bench.run(two, finish=True)  # the only slot is being read
    stats = bench.cache.stats()
    assert (stats.endpoints_skipped, stats.slots_free) == (0, 1)
    # Both rows of the tables are free already; the slot of the second comes back with the copies.
    third, fourth = [7] * 70, [8] * 70
    lane = bench.run(third)
    assert bench.admit(fourth) is None
    bench.land_all()
    other = bench.run(fourth)
    bench.finish(lane, third)
    bench.finish(other, fourth)
    bench.land_all()
    assert bench.cache.stats().endpoints_skipped == 0
    for tokens in (one, two, third, fourth):
        following = [*tokens, 5]
        resumed = bench.admit(following)
        assert resumed is not None
        assert resumed.frontier == len(tokens)
        bench.compute(resumed, following, len(tokens), len(following))
        bench.abandon(resumed)
    bench.check_nothing_is_lost()


def test_what_landed_together_is_settled_though_one_of_it_raises() -> None:
    bench = Bench(lanes=2, snapshots=3, slabs=40)
    for tokens in (list(range(150)), list(range(200, 340))):
        bench.run(tokens, finish=True)
    transfers, backup = bench.cache.transfers, bench.cache.write_through
    assert backup is not None
    assert backup.reading_slots is not None

    def fail() -> None:
        raise MemoryError

    transfers.afterwards(backup.reading_slots, fail)
    bench.writes.land_all()
    with pytest.raises(MemoryError):
        bench.cache.transfers.poll()
    bench.cache.transfers.poll()
    assert not len(transfers)
    bench.check_nothing_is_lost()


def test_an_endpoint_is_given_up_where_no_copy_would_make_room() -> None:
    bench = Bench(lanes=2, snapshots=1, slabs=40)
    tokens = list(range(150))
    bench.run(tokens, finish=True)
    bench.land_all()
    following = [*tokens, 5]
    pinning = bench.admit(following)  # holds the only snapshot
    assert pinning is not None
    other = [9] * 100
    bench.run(other, finish=True)
    assert bench.cache.stats().endpoints_skipped == 1
    bench.abandon(pinning)
    bench.check_nothing_is_lost()


def test_what_is_written_is_the_caches_own_copy() -> None:
    """A duplicate page is the lane's and free once the lane has ended, while the batch is still on its way."""
    bench = Bench(slabs=60)
    tokens = list(range(130))
    first, second = bench.admit(tokens), bench.admit(tokens)
    assert first is not None
    assert second is not None
    for lane in (first, second):
        bench.compute(lane, tokens, 0, 130)
        bench.commit(lane, 130)
    duplicates = set(second.pages)
    bench.finish(second, tokens)
    third = bench.run(list(range(5000, 5190)))
    assert duplicates & set(third.pages)
    bench.land_all()
    bench.finish(first, tokens)
    bench.abandon(third)
    bench.leave_to_host()
    following = [*tokens, 1]
    resumed = bench.admit(following)
    assert resumed is not None
    assert resumed.frontier == 130
    bench.compute(resumed, following, 130, 131)


def test_a_full_host_tier_keeps_what_it_has_room_for() -> None:
    bench = Bench(slabs=5, pages=40)
    for start in range(0, 4000, 1000):
        bench.run(list(range(start, start + 200)), finish=True)
        bench.land_all()
        bench.check()
    bench.check_nothing_is_lost()


def test_a_failed_copy_is_told_to_the_owner() -> None:
    bench = Bench(slabs=40)
    bench.run(list(range(150)), finish=True)
    bench.writes.fail_copy(1)
    bench.writes.land_all()
    with pytest.raises(CopyFailed):
        bench.cache.transfers.poll()


# ---- random lives -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slabs", [0, 6, 30, 200])
@pytest.mark.parametrize("seed", range(8))
def test_random_lives_lose_and_double_nothing(seed: int, slabs: int) -> None:
    """Lanes with shared prefixes come, compute, tap and end in every way while copies land late; whatever a lane
    resumes from is its own."""
    life = Life(seed, slabs=slabs)
    for _ in range(150):
        life.step()
        life.bench.check()
    life.finish_all()
    life.bench.check_nothing_is_lost()
    assert life.resumed > 0
    assert life.restored > 0 or slabs < 30
