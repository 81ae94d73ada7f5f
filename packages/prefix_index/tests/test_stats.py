"""What the index says of itself."""

from __future__ import annotations

from index_rig import BOUNDARY, ENDPOINT, TAP, Rig


def test_snapshots_are_counted_by_kind() -> None:
    rig = Rig()
    tokens = rig.tokens(("a", 320))
    rig.turn(tokens, (128, TAP), (192, BOUNDARY), (320, ENDPOINT))
    stats = rig.index.stats()
    assert (stats.taps, stats.endpoints, stats.output_boundaries, stats.boundaries) == (1, 1, 0, 1)
    assert stats.snapshots == 3
    rig.turn(tokens, (128, BOUNDARY), resume=0)  # the tap is there already and becomes a boundary
    stats = rig.index.stats()
    assert (stats.taps, stats.endpoints, stats.output_boundaries, stats.boundaries) == (0, 1, 0, 2)
    while rig.index.claim_slot() is not None:
        rig.index.check_invariants()
    stats = rig.index.stats()
    assert (stats.snapshots, stats.taps, stats.endpoints, stats.boundaries) == (0, 0, 0, 0)


def test_a_namespace_holds_something_while_blocks_or_snapshots_are_there() -> None:
    rig = Rig()
    assert not rig.index.holds(b"")
    lease = rig.lease(rig.tokens(("a", 100)))
    assert not rig.index.holds(b"")  # a lease alone is nothing that could be found
    rig.index.release(lease)
    rig.turn(rig.tokens(("a", 100)))
    assert rig.index.holds(b"")
    assert not rig.index.holds(b"other")
    rig.index.clear(b"")
    assert not rig.index.holds(b"")
