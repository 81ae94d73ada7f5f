"""Which snapshots are retained, what each is worth, and what goes when one is lost.

GreedyDual-Size-Frequency: H = base + (1 + hits) * C / Z, where base is the inflation L at publication or last hit, C
the prefill saved from the nearest retained snapshot above (less the restore of the image), Z the bytes of image, tail
and exclusive path: the blocks below which it is the only retained snapshot.

Values are computed when somebody needs them: a change marks the snapshots it touches, `flush` re-derives the marked.
Which of two snapshots lies above the other is decided by tokens alone; this is valuation, not identity.
"""

from __future__ import annotations

from bisect import insort

from prefix_index.core import Core, Given
from prefix_index.nodes import DEVICE_IMAGE, DEVICE_TAIL, HOST, Edge, Root, Snapshot, place_for, place_of, root_of
from prefix_index.order import kill
from prefix_index.prompt import BlockScheme
from prefix_index.tree import starts_with


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
        if edge.lost is not None and snapshot.at in edge.lost:
            edge.lost = [at for at in edge.lost if at != snapshot.at] or None
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
        core.feed.dropped(snapshot)
        if not snapshot.superseded:
            self._unretain(snapshot)
        self._dirty.pop(snapshot, None)
        if edge.lost is None:
            edge.lost = [snapshot.at]
        elif snapshot.at not in edge.lost:
            insort(edge.lost, snapshot.at)
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
        core.kinds[snapshot.kind] -= 1
        core.epoch += 1
        if core.host_blocks:
            core.host.offer_path(edge)
        core.tree.forget_if_empty(edge)

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
        edge.kept.insert(place_for(edge.kept, snapshot.frontier), snapshot)
        at: Edge | None = edge
        while at is not None:
            at.units += 1
            if at.units > 1:
                break
            if at.parent is not None:
                tree.move_to_front(at)
            at = at.parent
        self._mark(_neighbour(snapshot))  # whoever was alone where they meet is not any more
        above = _nearest_retained(snapshot, tree.scheme)
        snapshot.anc = above
        if above.deps is None:
            above.deps = {}
        elif edge.kept[-1] is not snapshot or edge.units > len(edge.kept):
            below = [other for other in above.deps if _is_above(snapshot, other, tree.scheme)]
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
        edge = snapshot.edge
        above = snapshot.anc
        assert edge is not None
        assert above is not None
        assert above.deps is not None
        self._mark(_neighbour(snapshot))  # whoever remains is alone there now
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
        del edge.kept[place_of(edge.kept, snapshot)]
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
        exclusive = _exclusive_blocks(snapshot)
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


def _exclusive_blocks(snapshot: Snapshot) -> int:
    """How many blocks of its path lead to no other retained snapshot. O(edges among them)."""
    edge = snapshot.edge
    assert edge is not None
    kept = edge.kept
    if kept[-1] is not snapshot or edge.units > len(kept):
        return 0
    above = len(kept) - 1
    depth = snapshot.at
    while not above and edge.parent is not None and edge.parent.units == len(edge.parent.kept) + 1:
        edge = edge.parent
        kept = edge.kept
        above = len(kept)
    return depth - (kept[above - 1].at if above else edge.start)


def _neighbour(snapshot: Snapshot) -> Snapshot | None:
    """The one other retained snapshot at or below the deepest block that `snapshot` shares with any; None when several
    share it."""
    edge = snapshot.edge
    assert edge is not None
    kept = edge.kept
    place = first = place_of(kept, snapshot)
    while first and kept[first - 1].at == snapshot.at:
        first -= 1
    others = len(kept) - first - 1
    children = edge.units - len(kept)
    came_from: Edge | None = None
    while not others and not children:
        if first:
            deepest = kept[first - 1]
            return None if first > 1 and kept[first - 2].at == deepest.at else deepest
        if edge.parent is None:
            return None
        came_from, edge = edge, edge.parent
        kept = edge.kept
        first = place = len(kept)
        while first and kept[first - 1].at == edge.end:
            first -= 1
        others = len(kept) - first
        children = edge.units - len(kept) - 1
    if others + children > 1:
        return None
    if others:
        return kept[first] if place != first else kept[first + 1]
    child = edge.first
    return _sole(child.next if child is came_from and child is not None else child)


def _sole(edge: Edge | None) -> Snapshot | None:
    """The one retained snapshot in or below `edge`; None when there are several. Children with units come first."""
    while edge is not None and edge.units == 1:
        if edge.kept:
            return edge.kept[0]
        edge = edge.first
    return None


def _nearest_retained(snapshot: Snapshot, scheme: BlockScheme) -> Snapshot | Root:
    """The deepest retained snapshot whose prefix is a proper prefix of this one's, else the root."""
    edge = snapshot.edge
    assert edge is not None
    kept = edge.kept
    below: Edge | None = None
    place = place_of(kept, snapshot)
    while True:
        while place:
            place -= 1
            other = kept[place]
            if other.at < snapshot.at:
                if starts_with(edge, scheme, other.at, below, other.tail):
                    return other
            elif other.frontier < snapshot.frontier and snapshot.tail.startswith(other.tail):
                return other
        if edge.parent is None:
            return root_of(edge)
        below, edge = edge, edge.parent
        kept = edge.kept
        place = len(kept)


def _heir(snapshot: Snapshot, above: Snapshot | Root) -> Snapshot | Root:
    """Who is nearest above the dependents of `snapshot` without it: one that differs in its tail's extra only, or
    `above`."""
    assert snapshot.edge is not None
    kept = snapshot.edge.kept
    place = place_for(kept, snapshot.frontier)
    while place and kept[place - 1].frontier == snapshot.frontier:
        place -= 1
        if kept[place] is not snapshot and kept[place].tail == snapshot.tail:
            return kept[place]
    return above


def _is_above(snapshot: Snapshot, other: Snapshot, scheme: BlockScheme) -> bool:
    """Whether `snapshot` lies on the path of `other`, strictly above it."""
    target = snapshot.edge
    edge = other.edge
    assert target is not None
    assert edge is not None
    if edge is target and other.at <= snapshot.at:
        tail = snapshot.tail
        return other.at == snapshot.at and len(tail) < len(other.tail) and other.tail.startswith(tail)
    below: Edge | None = None
    while edge is not target:
        if edge.parent is None or edge.start < target.end:
            return False
        below, edge = edge, edge.parent
    return starts_with(target, scheme, snapshot.at, below, snapshot.tail)
