"""Which snapshots are retained, what each is worth, and what goes when one is lost.

GreedyDual-Size-Frequency: H = base + (1 + hits) * C / Z, where base is the inflation L at publication or last hit, C
the prefill saved from the nearest retained snapshot above (less the restore of the image), Z the bytes of image, tail
and exclusive path: the blocks below which it is the only retained snapshot.

Values are computed when somebody needs them, which most turns never do. A change notes where it happened, in O(1) as a
rule; `flush` finds out whom it concerned and re-derives those. A snapshot that comes takes from whoever was alone on
blocks it joins, which is marked at once, while that is known; everything else can be seen from the edge afterwards: who
is alone there now, and who comes next below.
Which of two snapshots lies above the other is decided by tokens alone; this is valuation, not identity.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable
from operator import attrgetter

from prefix_index.core import Core, Given
from prefix_index.kin import exclusive_blocks, nearest_retained, next_below, sole, sole_below
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

NOTHING = sys.maxsize, -1  # an empty range of frontiers

_at: Callable[[Snapshot], int] = attrgetter("at")


class Worth:
    """Attaches snapshots to edges, keeps the retained ones valued, detaches them."""

    __slots__ = ("_changed", "_core", "_dirty", "_left", "lost", "superseded")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._changed: dict[Edge, tuple[int, int]] = {}  # see `_note`
        self._dirty: dict[Snapshot, None] = {}  # retained, to be valued and queued
        self._left: dict[Snapshot, None] = {}  # superseded, to be queued
        self.superseded = 0  # since the index was made
        self.lost = 0

    # ------------------------------------------------------------------ life of a snapshot

    def attach(self, snapshot: Snapshot) -> None:
        """Hang a new, retained snapshot at its edge."""
        core = self._core
        edge = snapshot.edge
        assert edge is not None
        snaps = edge.snaps
        if not snaps and not edge.sbelow:
            above = edge.parent
            while above is not None:
                above.sbelow += 1
                if above.sbelow > 1 or above.snaps:
                    break
                above = above.parent
        if not snaps or snaps[-1].frontier <= snapshot.frontier:
            snaps.append(snapshot)
            edge.wheres.append(snapshot.where)
        else:
            place = place_for(snaps, snapshot.frontier)
            edge.snaps = [*snaps[:place], snapshot, *snaps[place:]]
            edge.wheres = edge.wheres[:place] + bytes((snapshot.where,)) + edge.wheres[place:]
        if edge.lost is not None:
            _note_found(edge, edge.lost, snapshot.at)
        core.kinds[snapshot.where >> KIND_SHIFT] += 1
        if not core.feed.silent:
            core.feed.published(snapshot)
        snapshot.base = core.inflation
        core.clock = snapshot.hit_tick = core.clock + 1
        self._retain(snapshot)

    def supersede(self, snapshot: Snapshot) -> None:
        """A deeper snapshot of its lineage makes this one redundant: it goes first, and values others no longer."""
        if not snapshot.superseded:
            core = self._core
            self.superseded += 1
            core.clock = snapshot.superseded = core.clock + 1
            self._unretain(snapshot)
            self._left[snapshot] = None

    def refresh(self, snapshot: Snapshot, *, hit: bool) -> None:
        """A hit, or a duplicate publication: value it from the present inflation; retain it again if superseded."""
        core = self._core
        snapshot.hits += hit
        snapshot.base = core.inflation
        core.clock = snapshot.hit_tick = core.clock + 1
        if snapshot.superseded:
            snapshot.superseded = 0
            self._left.pop(snapshot, None)
            self._retain(snapshot)
        self._dirty[snapshot] = None

    def drop(self, snapshot: Snapshot, given: Given) -> None:
        """Remove a snapshot and give up every copy it has. O(exclusive edges + dependents)."""
        edge = snapshot.edge
        assert edge is not None
        if edge.snaps[-1] is snapshot:
            edge.snaps, edge.wheres = edge.snaps[:-1], edge.wheres[:-1]
        else:
            place = place_of(edge.snaps, snapshot)
            edge.snaps = edge.snaps[:place] + edge.snaps[place + 1 :]
            edge.wheres = edge.wheres[:place] + edge.wheres[place + 1 :]
        if not edge.snaps:
            _none_left(edge)
        _note_lost(edge, snapshot.at)
        self._lose(snapshot, given)
        if snapshot.where & DEVICE_TAIL:
            self._core.device.offer(edge)  # the tail may have been the last thing below

    def drop_below(self, edge: Edge, depth: int, given: Given) -> None:
        """Remove the snapshots of `edge` that stand on blocks behind `depth`, deepest block first. The caller removes
        these blocks, offers what is left, and so nothing need be noted as lost."""
        snaps = edge.snaps
        place = len(snaps)
        while place and snaps[place - 1].at > depth:
            place -= 1
        if place < len(snaps):
            edge.snaps, gone = snaps[:place], snaps[place:]
            edge.wheres = edge.wheres[:place]
            if not place:
                _none_left(edge)
            if len(gone) > 1:
                gone.sort(key=_at, reverse=True)
            for snapshot in gone:
                self._lose(snapshot, given)

    def _lose(self, snapshot: Snapshot, given: Given) -> None:
        """What is left to do for a snapshot that its edge does not list any more."""
        core = self._core
        edge = snapshot.edge
        assert edge is not None
        self.lost += 1
        if not core.feed.silent:
            core.feed.dropped(snapshot)
        if snapshot.superseded:
            self._left.pop(snapshot, None)
        else:
            self._unretain(snapshot)
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
            snapshot.companion = None
        if snapshot.successor is not None:
            snapshot.successor.companion = None
            snapshot.successor = None
        snapshot.edge = None
        core.kinds[snapshot.where >> KIND_SHIFT] -= 1
        core.epoch += 1
        if core.host_blocks:
            core.host.offer_path(edge)
        if edge.parent is None:
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
            self._left[snapshot] = None

    def queue_superseded(self) -> None:
        """Queue the superseded snapshots that were marked: their worth is not asked, so this comes before a `flush`."""
        if self._left:
            for snapshot in self._left:
                self._queue(snapshot)
            self._left.clear()

    def _queue(self, snapshot: Snapshot) -> None:
        self._core.slots.offer(snapshot)
        if snapshot.where & HOST:
            self._core.host.offer_snapshot(snapshot)

    # ------------------------------------------------------------------ retained snapshots

    def _retain(self, snapshot: Snapshot) -> None:
        edge = snapshot.edge
        assert edge is not None
        kept = edge.kept
        self._dirty[snapshot] = None
        if not kept or kept[-1].frontier <= snapshot.frontier:
            if kept:
                self._dirty[kept[-1]] = None  # alone to the end no more
            elif not edge.kbelow:
                self._first_of(edge)
            kept.append(snapshot)
            if edge.kbelow:
                self._note(edge, snapshot.frontier, snapshot.frontier)
        else:
            kept.insert(place_for(kept, snapshot.frontier), snapshot)
            self._note(edge, snapshot.frontier, snapshot.frontier)

    def _first_of(self, edge: Edge) -> None:
        """The first retained snapshot in or below `edge` has come: count it upwards. Whoever was alone where it joins
        the others is so no more."""
        while edge.parent is not None:
            self._core.tree.move_to_front(edge)
            parent = edge.parent
            below = parent.kbelow
            parent.kbelow = below + 1
            if below or parent.kept:
                alone = parent.kept[-1] if not below else sole_below(edge.next) if below == 1 else None
                if alone is not None:
                    self._dirty[alone] = None
                break
            edge = parent

    def _unretain(self, snapshot: Snapshot) -> None:
        edge = snapshot.edge
        assert edge is not None
        kept = edge.kept
        del kept[place_of(kept, snapshot)]
        self._dirty.pop(snapshot, None)
        if kept or edge.kbelow:
            self._note(edge, snapshot.frontier, snapshot.frontier)
            return
        while not (edge.kept or edge.kbelow) and edge.parent is not None:
            self._core.tree.move_to_back(edge)
            edge = edge.parent
            edge.kbelow -= 1
        self._note(edge, *NOTHING)  # whoever is left may be alone there now

    def _note(self, edge: Edge, least: int, greatest: int) -> None:
        """Retained snapshots of `edge` between these frontiers have come or gone, or something below it has gone."""
        if edge.parent is None:  # nobody is alone above a root, and a root may vanish unnoticed
            self._mark_below(edge, least, greatest)
            return
        before = self._changed.get(edge)
        if before is not None:
            if before[0] < least:
                least = before[0]
            if before[1] > greatest:
                greatest = before[1]
        self._changed[edge] = least, greatest

    def _mark_below(self, edge: Edge, least: int, greatest: int) -> None:
        if least <= greatest:
            for snapshot in next_below(edge, least, greatest, self._core.tree.scheme):
                self._dirty[snapshot] = None

    def divide(self, edge: Edge, upper: Edge) -> None:
        """`edge` was cut and `upper` has what lay above the cut."""
        if edge in self._changed:
            self._changed[upper] = self._changed[edge]

    def forget(self, edge: Edge) -> None:
        """`edge` is gone. Its snapshots went before it, so what changed thereby is noted above it."""
        self._changed.pop(edge, None)

    # ------------------------------------------------------------------ values

    def flush(self) -> None:
        """Bring every value up to date and queue what was marked. O(marked snapshots * their exclusive edges)."""
        self.queue_superseded()
        if self._changed:
            for edge, (least, greatest) in self._changed.items():
                alone = sole(edge)
                if alone is not None:
                    self._dirty[alone] = None
                self._mark_below(edge, least, greatest)
            self._changed.clear()
        if self._dirty:
            for snapshot in self._dirty:
                snapshot.value = self.derive(snapshot)
                self._queue(snapshot)
            self._dirty.clear()

    def derive(self, snapshot: Snapshot) -> float:
        """H of a retained snapshot from the present tree."""
        above = nearest_retained(snapshot, self._core.tree.scheme)
        return self.value_above(snapshot, above.frontier if above is not None else 0)

    def value_above(self, snapshot: Snapshot, above: int) -> float:
        """H of a retained snapshot whose nearest retained one above has the frontier `above`, 0 for none."""
        geometry = self._core.geometry
        cost = self._core.cost
        exclusive = exclusive_blocks(snapshot)
        if snapshot.tail:
            exclusive += 1
        size = max(1, geometry.image_bytes + exclusive * geometry.block_bytes)
        saved = cost.saved_seconds(above, snapshot.frontier - above) - cost.restore_seconds(geometry.image_bytes)
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
        saved = cost.saved_seconds(above, frontier - above) - cost.restore_seconds(geometry.image_bytes)
        return self._core.inflation + max(0.0, saved) / size


def _none_left(edge: Edge) -> None:
    """The last snapshot of `edge` has gone: count that upwards."""
    while not (edge.snaps or edge.sbelow) and edge.parent is not None:
        edge = edge.parent
        edge.sbelow -= 1


def _note_lost(edge: Edge, depth: int) -> None:
    """The latest snapshot that stood on `depth` blocks is gone."""
    lost = edge.lost
    if lost is None:
        edge.lost = [depth]
    else:
        place = bisect_left(lost, depth)
        if place == len(lost) or lost[place] != depth:
            lost.insert(place, depth)


def _note_found(edge: Edge, lost: list[int], depth: int) -> None:
    """One stands there again."""
    place = bisect_left(lost, depth)
    if place < len(lost) and lost[place] == depth:
        del lost[place]
        if not lost:
            edge.lost = None
