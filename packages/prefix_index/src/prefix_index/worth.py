"""Which snapshots are retained, what each is worth, and what goes when one is lost.

GreedyDual-Size-Frequency: H = base + (1 + hits) * C / Z, where base is the inflation L at publication or last hit, C
the prefill saved from the nearest retained snapshot above (less the restore of the image), Z the bytes of image, tail
and exclusive path: the blocks below which it is the only retained snapshot.

Values are computed when somebody needs them: a change marks the snapshots it touches, `flush` re-derives the marked.
Which of two snapshots lies above the other is decided by tokens alone; this is valuation, not identity.
"""

from __future__ import annotations

from prefix_index.core import Core, Given
from prefix_index.nodes import DEVICE_IMAGE, DEVICE_TAIL, HOST, Edge, Root, Snapshot, root_of
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
        """Hang a new, retained snapshot at the end of its edge."""
        core = self._core
        edge = snapshot.edge
        assert edge is not None
        edge.snaps = tuple(sorted((*edge.snaps, snapshot), key=_tail_length)) if edge.snaps else (snapshot,)
        edge.lost = 0
        core.kinds[snapshot.kind] += 1
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
        core = self._core
        edge = snapshot.edge
        assert edge is not None
        self.lost += 1
        core.feed.dropped(snapshot)
        if not snapshot.superseded:
            self._unretain(snapshot)
        self._dirty.pop(snapshot, None)
        snaps = edge.snaps
        edge.snaps = tuple(other for other in snaps if other is not snapshot) if len(snaps) > 1 else ()
        edge.lost = 1
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
            core.device.release_tail(snapshot, given)
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
        core.kinds[snapshot.kind] -= 1
        core.epoch += 1
        if core.host_blocks and not edge.live:
            core.host.offer_path(edge)
        core.tree.forget_if_empty(edge)

    def drop_slot(self, snapshot: Snapshot, given: Given) -> None:
        """Take the device slot from a snapshot that keeps its Host copy."""
        assert snapshot.slot is not None
        given.slots.append(snapshot.slot)
        snapshot.slot = None
        snapshot.where &= ~DEVICE_IMAGE
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
        at: Edge | None = edge
        came_from: Edge | None = None
        while at is not None:
            at.units += 1
            if at.units > 1:
                if at.units == 2:  # whoever was alone here is not any more
                    self._mark(_sole(at, snapshot, came_from))
                break
            if at.parent is not None:
                tree.move_to_front(at)
            came_from = at
            at = at.parent
        above = _nearest_retained(snapshot)
        snapshot.anc = above
        assert edge is not None
        if above.deps is None:
            above.deps = {}
        elif len(edge.snaps) > 1 or (edge.first is not None and edge.first.units):
            below = [other for other in above.deps if _is_above(snapshot, other)]
            if below:
                snapshot.deps = dict.fromkeys(below)
                for other in below:
                    other.anc = snapshot
                    del above.deps[other]
                    self._dirty[other] = None
        above.deps[snapshot] = None
        self._dirty[snapshot] = None

    def _unretain(self, snapshot: Snapshot) -> None:
        tree = self._core.tree
        at: Edge | None = snapshot.edge
        came_from: Edge | None = None
        while at is not None:
            at.units -= 1
            if at.units:
                if at.units == 1:  # whoever remains is alone here now
                    self._mark(_sole(at, snapshot, came_from))
                break
            if at.parent is not None:
                tree.move_to_back(at)
            came_from = at
            at = at.parent
        above = snapshot.anc
        assert above is not None
        assert above.deps is not None
        del above.deps[snapshot]
        if snapshot.deps:
            heir = _heir(snapshot, above)
            if heir.deps is None:
                heir.deps = {}
            for other in snapshot.deps:
                other.anc = heir
                heir.deps[other] = None
                self._dirty[other] = None
        if not above.deps:
            above.deps = None
        snapshot.anc = snapshot.deps = None
        self._dirty.pop(snapshot, None)

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
        exclusive = 0
        at = snapshot.edge
        while at is not None and at.units == 1:
            exclusive += at.end - at.start
            at = at.parent
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


def _tail_length(snapshot: Snapshot) -> int:
    return len(snapshot.tail)


def _nearest_retained(snapshot: Snapshot) -> Snapshot | Root:
    edge = snapshot.edge
    assert edge is not None
    tail = snapshot.tail
    best: Snapshot | None = None
    if len(edge.snaps) > 1:
        for other in edge.snaps:
            if not other.superseded and len(other.tail) < len(tail) and tail.startswith(other.tail):
                best = _deeper(best, other)
    below = edge
    at = edge.parent
    while best is None and at is not None:
        for other in at.snaps:
            if not other.superseded and below.tokens.startswith(other.tail):
                best = _deeper(best, other)
        below = at
        at = at.parent
    return best if best is not None else root_of(edge)


def _heir(snapshot: Snapshot, above: Snapshot | Root) -> Snapshot | Root:
    """Who is nearest above the dependents of `snapshot` without it: one that differs in its tail's extra only, or
    `above`."""
    assert snapshot.edge is not None
    for other in snapshot.edge.snaps:
        if other is not snapshot and not other.superseded and other.tail == snapshot.tail:
            return other
    return above


def _deeper(best: Snapshot | None, other: Snapshot) -> Snapshot:
    return other if best is None or len(other.tail) > len(best.tail) else best


def _is_above(snapshot: Snapshot, other: Snapshot) -> bool:
    """Whether `snapshot` lies on the path of `other`, strictly above it."""
    target = snapshot.edge
    at = other.edge
    assert target is not None
    assert at is not None
    tail = snapshot.tail
    if at is target:
        return len(tail) < len(other.tail) and other.tail.startswith(tail)
    while at.parent is not target:
        if at.parent is None or at.start <= target.end:
            return False
        at = at.parent
    return at.tokens.startswith(tail)


def _sole(edge: Edge, but: Snapshot, but_below: Edge | None) -> Snapshot | None:
    """The one retained snapshot at or below `edge` besides `but` and those below its child `but_below`; None when there
    are several. The caller knows that `edge` has exactly one such unit; children with units come first."""
    while True:
        for snapshot in edge.snaps:
            if not snapshot.superseded and snapshot is not but:
                return snapshot
        child = edge.first
        if child is but_below and child is not None:
            child = child.next
        assert child is not None
        if child.units != 1:
            return None
        edge = child
        but_below = None
