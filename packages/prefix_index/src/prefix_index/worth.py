"""Which snapshots are retained, what each is worth, and what goes when one is lost.

GreedyDual-Size-Frequency: H = base + (1 + hits) * C / Z, where base is the inflation L at publication or last hit, C
the prefill saved from the nearest retained snapshot above (less the restore of the image), Z the bytes of image, tail
and exclusive path: the blocks below which it is the only retained snapshot.

Values are computed when somebody needs them: a change marks the snapshots it touches, `flush` re-derives the marked.
Which of two snapshots lies above the other is decided by tokens alone; this is valuation, not identity.
"""

from __future__ import annotations

from bisect import bisect_left

from prefix_index.core import Core, Given
from prefix_index.kin import exclusive_blocks, is_above, nearest_retained, neighbour, twins
from prefix_index.nodes import (
    DEVICE_IMAGE,
    DEVICE_TAIL,
    HOST,
    KIND_SHIFT,
    Edge,
    Snapshot,
    place_for,
    place_of,
)
from prefix_index.order import kill


class Worth:
    """Attaches snapshots to edges, keeps the retained ones valued, detaches them."""

    __slots__ = ("_core", "_dirty", "lost", "superseded")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._dirty: dict[Snapshot, None] = {}
        self.superseded = 0  # since the index was made
        self.lost = 0

    @property
    def pending(self) -> dict[Snapshot, None]:
        """Retained snapshots that the next `flush` will value and queue."""
        return self._dirty

    # ------------------------------------------------------------------ life of a snapshot

    def attach(self, snapshot: Snapshot) -> None:
        """Hang a new, retained snapshot at its edge."""
        core = self._core
        edge = snapshot.edge
        assert edge is not None
        snaps = edge.snaps
        place = place_for(snaps, snapshot.frontier)
        if place == len(snaps):
            snaps.append(snapshot)
            edge.wheres.append(snapshot.where)
        else:
            edge.snaps = [*snaps[:place], snapshot, *snaps[place:]]
            edge.wheres = edge.wheres[:place] + bytes((snapshot.where,)) + edge.wheres[place:]
        if edge.lost is not None:
            self._note_lost(edge, snapshot.at, False)
        core.kinds[snapshot.where >> KIND_SHIFT] += 1
        if not core.feed.silent:
            core.feed.published(snapshot)
        snapshot.base = core.inflation
        snapshot.hit_tick = core.tick()
        at: Edge | None = edge
        while at is not None:
            at.live += 1
            if at.live > 1:
                break
            at = at.parent
        self._retain(snapshot)

    def supersede(self, snapshot: Snapshot) -> None:
        """A deeper snapshot of its lineage makes this one redundant: it goes first, and values others no longer."""
        if not snapshot.superseded:
            self.superseded += 1
            snapshot.superseded = self._core.tick()
            self._unretain(snapshot)
            self.offer(snapshot)

    def refresh(self, snapshot: Snapshot, *, hit: bool) -> None:
        """A hit, or a duplicate publication: value it from the present inflation; retain it again if superseded."""
        core = self._core
        snapshot.hits += hit
        snapshot.base = core.inflation
        snapshot.hit_tick = core.tick()
        if snapshot.superseded:
            snapshot.superseded = 0
            self._retain(snapshot)
        self._dirty[snapshot] = None

    def drop(self, snapshot: Snapshot, given: Given) -> None:
        """Remove a snapshot and give up every copy it has. O(exclusive edges + dependents)."""
        edge = snapshot.edge
        assert edge is not None
        place = place_of(edge.snaps, snapshot)
        edge.snaps = edge.snaps[:place] + edge.snaps[place + 1 :]
        edge.wheres = edge.wheres[:place] + edge.wheres[place + 1 :]
        self._lose(snapshot, given)

    def drop_below(self, edge: Edge, depth: int, given: Given) -> None:
        """Remove the snapshots of `edge` that stand on blocks behind `depth`, deepest block first."""
        snaps = edge.snaps
        place = len(snaps)
        while place and snaps[place - 1].at > depth:
            place -= 1
        if place < len(snaps):
            edge.snaps, gone = snaps[:place], snaps[place:]
            edge.wheres = edge.wheres[:place]
            for snapshot in sorted(gone, key=lambda snapshot: -snapshot.at):
                self._lose(snapshot, given)

    def _lose(self, snapshot: Snapshot, given: Given) -> None:
        """What is left to do for a snapshot that its edge does not list any more."""
        core = self._core
        edge = snapshot.edge
        assert edge is not None
        self.lost += 1
        if not core.feed.silent:
            core.feed.dropped(snapshot)
        if not snapshot.superseded:
            self._unretain(snapshot)
        self._dirty.pop(snapshot, None)
        self._note_lost(edge, snapshot.at, True)
        at: Edge | None = edge
        while at is not None:
            at.live -= 1
            if at.live:
                break
            at = at.parent
        if snapshot.slot is not None:
            given.slots.append(snapshot.slot)
        if snapshot.slabs is not None:
            given.slabs.extend(snapshot.slabs)
        if snapshot.tail_pages is not None:
            core.device.take_tail(snapshot, given)
        kill(snapshot.slot_queued)
        kill(snapshot.host_queued)
        kill(snapshot.tail_queued)
        if snapshot.companion is not None:
            snapshot.companion.successor = None
        if snapshot.successor is not None:
            snapshot.successor.companion = None
        snapshot.companion = snapshot.successor = snapshot.edge = None
        snapshot.slot = snapshot.slabs = None
        snapshot.where &= ~(DEVICE_IMAGE | DEVICE_TAIL | HOST)
        core.kinds[snapshot.where >> KIND_SHIFT] -= 1
        core.epoch += 1
        if core.host_blocks:
            core.host.offer_path(edge)
        core.tree.forget_if_empty(edge)

    def _note_lost(self, edge: Edge, depth: int, lost: bool) -> None:
        """Whether the latest snapshot that stood on `depth` blocks is gone."""
        lost_at = edge.lost
        if lost_at is None:
            lost_at = edge.lost = []
        place = bisect_left(lost_at, depth)
        there = place < len(lost_at) and lost_at[place] == depth
        if lost and not there:
            lost_at.insert(place, depth)
        elif there and not lost:
            del lost_at[place]
        if not lost_at:
            edge.lost = None

    def drop_slot(self, snapshot: Snapshot, given: Given) -> None:
        """Take the device slot from a snapshot that keeps its Host copy."""
        assert snapshot.slot is not None
        given.slots.append(snapshot.slot)
        snapshot.slot = None
        snapshot.set_where(snapshot.where & ~DEVICE_IMAGE)
        kill(snapshot.slot_queued)
        self._core.epoch += 1

    def offer(self, snapshot: Snapshot) -> None:
        """Have a snapshot queued wherever it may be a victim: a retained one when the next `flush` knows its worth."""
        if not snapshot.superseded:
            self._dirty[snapshot] = None
        else:
            self._queue(snapshot)

    def _queue(self, snapshot: Snapshot) -> None:
        self._core.slots.offer(snapshot)
        if snapshot.where & HOST:
            self._core.host.offer_snapshot(snapshot)

    # ------------------------------------------------------------------ retained snapshots

    def _retain(self, snapshot: Snapshot) -> None:
        tree = self._core.tree
        edge = snapshot.edge
        assert edge is not None
        kept = edge.kept
        place = place_for(kept, snapshot.frontier)
        kept.insert(place, snapshot)
        at: Edge | None = edge
        while at is not None:
            at.units += 1
            if at.units > 1:
                break
            if at.parent is not None:
                tree.move_to_front(at)
            at = at.parent
        self._mark(neighbour(snapshot, place))  # whoever was alone where they meet is not any more
        above = nearest_retained(snapshot, place, tree.scheme)
        snapshot.anc = above
        if place + 1 < len(kept) or edge.units > len(kept):
            for source in twins(above):  # any of them may have what lies below
                below = [other for other in source.deps or () if is_above(snapshot, other, tree.scheme)]
                for other in below:
                    assert source.deps is not None
                    del source.deps[other]
                    other.anc = snapshot
                    self._dirty[other] = None
                if below:
                    source.deps = source.deps or None
                    snapshot.deps = {**(snapshot.deps or {}), **dict.fromkeys(below)}
        if above.deps is None:
            above.deps = {}
        above.deps[snapshot] = None
        self._dirty[snapshot] = None

    def _unretain(self, snapshot: Snapshot) -> None:
        tree = self._core.tree
        edge = snapshot.edge
        above = snapshot.anc
        assert edge is not None
        assert above is not None
        assert above.deps is not None
        place = place_of(edge.kept, snapshot)
        self._mark(neighbour(snapshot, place))  # whoever remains is alone there now
        del above.deps[snapshot]
        if snapshot.deps:
            next_above = next((twin for twin in twins(snapshot) if twin is not snapshot), above)
            if next_above.deps is None:
                next_above.deps = {}
            for other in snapshot.deps:
                other.anc = next_above
                next_above.deps[other] = None
                self._dirty[other] = None
        if not above.deps:
            above.deps = None
        snapshot.anc = snapshot.deps = None
        self._dirty.pop(snapshot, None)
        del edge.kept[place]
        at: Edge | None = edge
        while at is not None:
            at.units -= 1
            if at.units:
                break
            if at.parent is not None:
                tree.move_to_back(at)
            at = at.parent

    def _mark(self, snapshot: Snapshot | None) -> None:
        if snapshot is not None:
            self._dirty[snapshot] = None

    # ------------------------------------------------------------------ values

    def flush(self) -> None:
        """Bring every value up to date and queue what was marked. O(marked snapshots * their exclusive edges)."""
        if self._dirty:
            for snapshot in self._dirty:
                snapshot.value = self.derive(snapshot)
                self._queue(snapshot)
            self._dirty.clear()

    def derive(self, snapshot: Snapshot) -> float:
        """H of a retained snapshot from the present tree."""
        geometry = self._core.geometry
        cost = self._core.cost
        assert snapshot.anc is not None
        exclusive = exclusive_blocks(snapshot)
        if snapshot.tail:
            exclusive += 1
        size = max(1, geometry.image_bytes + exclusive * geometry.block_bytes)
        above = snapshot.anc.frontier
        saved = cost.prefill_seconds(above, snapshot.frontier - above) - cost.restore_seconds(geometry.image_bytes)
        return snapshot.base + (1 + snapshot.hits) * max(0.0, saved) / size

    def estimate(self, above: int, frontier: int) -> float:
        """What a snapshot at `frontier` would be worth at publication when its lineage last stood at `above`."""
        if frontier <= above:
            return self._core.inflation
        geometry = self._core.geometry
        cost = self._core.cost
        depth = geometry.depth(frontier)
        blocks = depth - geometry.depth(above) + (frontier > depth * geometry.block_tokens)
        size = max(1, geometry.image_bytes + blocks * geometry.block_bytes)
        saved = cost.prefill_seconds(above, frontier - above) - cost.restore_seconds(geometry.image_bytes)
        return self._core.inflation + max(0.0, saved) / size
