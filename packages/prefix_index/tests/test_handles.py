"""Reading back where a path's blocks and a snapshot's parts lie, in both tiers, across edges, pools and fills."""

from __future__ import annotations

from array import array

import pytest

from prefix_index import InvalidArgument, Pool, PrefixIndex, SnapshotCopies, StaleHandle, Tier

WIDTH = 4


def tokens(*blocks: int) -> bytes:
    """Blocks of four equal tokens."""
    return array("i", [token for block in blocks for token in [block] * WIDTH]).tobytes()


def test_blocks_on_the_device_across_edges() -> None:
    index = PrefixIndex(block_tokens=WIDTH)
    prompt = index.prepare(tokens(1, 2, 3, 4, 5))
    lease = index.acquire(index.match(prompt))
    index.extend(lease, tokens(1, 2, 3, 4), [10, 20, 30, 40])
    index.publish(lease, 2 * WIDTH, slot=1)  # splits the edge after two blocks
    for first in range(5):
        for end in range(first, 5):
            assert index.handles(lease, Tier.DEVICE, first, end) == (10, 20, 30, 40)[first:end]
    with pytest.raises(InvalidArgument, match="in the 4 held on the device"):
        index.handles(lease, Tier.DEVICE, 0, 5)
    with pytest.raises(InvalidArgument, match="in the 0 held on the host"):
        index.handles(lease, Tier.HOST, 0, 1)
    index.release(lease)
    with pytest.raises(StaleHandle):
        index.handles(lease, Tier.DEVICE, 0, 1)


def test_several_pools_give_tuples() -> None:
    index = PrefixIndex(block_tokens=WIDTH, pools=(Pool(), Pool()))
    lease = index.acquire(index.match(index.prepare(tokens(1, 2, 3))))
    index.extend(lease, tokens(1, 2), [(10, 11), (20, 21)])
    assert index.handles(lease, Tier.DEVICE, 0, 2) == ((10, 11), (20, 21))
    assert index.handles(lease, Tier.DEVICE, 1, 2) == ((20, 21),)


def test_fills_count_from_the_moment_they_begin() -> None:
    index = PrefixIndex(block_tokens=WIDTH, image_slabs=2)
    lease = index.acquire(index.match(index.prepare(tokens(1, 2, 3))))
    index.extend(lease, tokens(1, 2), [10, 20])
    tail = array("i", [3]).tobytes()
    snapshot = index.publish(lease, 2 * WIDTH + 1, slot=7, tail=tail, tail_pages=(30,)).snapshot
    assert index.copies(snapshot) == SnapshotCopies(7, (30,), ())
    blocks = index.begin_fill(lease, Tier.HOST, (100, 101))
    image = index.begin_fill(snapshot, Tier.HOST, (102, 103, 104))
    for _ in range(2):
        assert index.handles(lease, Tier.HOST, 0, 2) == (100, 101)
        assert index.copies(snapshot) == SnapshotCopies(7, (30,), (102, 103, 104))
        for fill in (blocks, image):
            if fill.open:
                index.land(fill)


def test_the_copies_of_a_snapshot_that_is_gone() -> None:
    index = PrefixIndex(block_tokens=WIDTH)
    lease = index.acquire(index.match(index.prepare(tokens(1, 2))))
    index.extend(lease, tokens(1), [10])
    snapshot = index.publish(lease, WIDTH, slot=7).snapshot
    index.release(lease)
    index.claim_slot()
    with pytest.raises(StaleHandle):
        index.copies(snapshot)
