"""What snapshots are worth: GreedyDual-Size-Frequency.

H = base + (1 + hits) * C / Z, where base is the inflation L at publication or last hit, C the prefill saved from the
nearest retained snapshot above (less the restore of the image), Z the bytes of image, tail and exclusive path: the
blocks below which it is the only retained snapshot.

Values are computed on demand, which most turns never make. A change notes where it happened, in O(1) as a rule; `flush`
finds out which snapshots it concerned and derives those anew. One thing is marked at once: a new snapshot that joins
blocks on which another was alone changes the other's value, and that can be seen only before. Everything else can be
seen from the edge afterwards: which snapshot is alone there now, and which come next below.

One snapshot is above another when its whole prefix, tail included, is a proper prefix of the other's. Tokens alone
decide that: this is valuation, not identity.
"""

from __future__ import annotations

import sys

from prefix_index.planning.cost import CostModel
from prefix_index.prompt import BlockScheme
from prefix_index.retention.queues import Queues
from prefix_index.tree.records import Edge, Snapshot, place_for, place_of
from prefix_index.tree.tokens import path_goes_on_with
from prefix_index.tree.tree import Tree

NO_FRONTIERS = sys.maxsize, -1  # an empty range


class Valuation:
    """Knows which snapshots are retained, keeps them valued, and queues every snapshot where it may be a victim.

    Attributes:
        inflation: L, the highest value that had to go so far.
        num_superseded: snapshots superseded since the index was made.
    """

    __slots__ = ("_changed_edges", "_cost", "_queues", "_tree", "_unqueued", "_unvalued", "inflation", "num_superseded")

    def __init__(self, tree: Tree, queues: Queues, cost: CostModel) -> None:
        self._tree = tree
        self._queues = queues
        self._cost = cost
        self._changed_edges: dict[Edge, tuple[int, int]] = {}  # see `_note`
        self._unvalued: dict[Snapshot, None] = {}  # retained, to be valued and queued
        self._unqueued: dict[Snapshot, None] = {}  # superseded, to be queued
        self.inflation = 0.0
        self.num_superseded = 0

    # ------------------------------------------------------------------ life of a snapshot

    def add(self, snapshot: Snapshot) -> None:
        """Retain a new snapshot, which the tree has attached."""
        tree = self._tree
        snapshot.base = self.inflation
        tree.clock = snapshot.hit_tick = tree.clock + 1
        self._retain(snapshot)

    def supersede(self, snapshot: Snapshot) -> None:
        """A deeper snapshot of its lineage makes this one redundant: it goes first, and values others no longer."""
        if not snapshot.superseded:
            tree = self._tree
            self.num_superseded += 1
            tree.clock = snapshot.superseded = tree.clock + 1
            self._unretain(snapshot)
            self._unqueued[snapshot] = None

    def refresh(self, snapshot: Snapshot, *, hit: bool) -> None:
        """A hit, or a duplicate publication: value it from the present inflation; retain it again if superseded."""
        tree = self._tree
        snapshot.hits += hit
        snapshot.base = self.inflation
        tree.clock = snapshot.hit_tick = tree.clock + 1
        if snapshot.superseded:
            snapshot.superseded = 0
            self._unqueued.pop(snapshot, None)
            self._retain(snapshot)
        self._unvalued[snapshot] = None

    def remove(self, snapshot: Snapshot) -> None:
        """A snapshot is gone; its edge does not list it any more."""
        if snapshot.superseded:
            self._unqueued.pop(snapshot, None)
        else:
            self._unretain(snapshot)

    def offer(self, snapshot: Snapshot) -> None:
        """Have a snapshot queued wherever it may be a victim: a retained one when the next `flush` knows its value."""
        if not snapshot.superseded:
            self._unvalued[snapshot] = None
        else:
            self._unqueued[snapshot] = None

    def queue_superseded(self) -> None:
        """Queue the superseded snapshots that were marked: they need no value, so this comes before a `flush`."""
        if self._unqueued:
            for snapshot in self._unqueued:
                self._queues.offer_snapshot(snapshot)
            self._unqueued.clear()

    # ------------------------------------------------------------------ retained snapshots

    def _retain(self, snapshot: Snapshot) -> None:
        edge = snapshot.edge
        assert edge is not None
        retained = edge.retained
        self._unvalued[snapshot] = None
        if not retained or retained[-1].frontier <= snapshot.frontier:
            if retained:
                self._unvalued[retained[-1]] = None  # alone to the end no more
            elif not edge.retained_children:
                self._count_in(edge)
            retained.append(snapshot)
            if edge.retained_children:
                self._note(edge, snapshot.frontier, snapshot.frontier)
        else:
            retained.insert(place_for(retained, snapshot.frontier), snapshot)
            self._note(edge, snapshot.frontier, snapshot.frontier)

    def _count_in(self, edge: Edge) -> None:
        """Count upwards the first retained snapshot in or below `edge`, and mark the one that is alone no more."""
        while edge.parent is not None:
            self._tree.move_to_front(edge)
            parent = edge.parent
            children = parent.retained_children
            parent.retained_children = children + 1
            if children or parent.retained:
                if not children:
                    alone: Snapshot | None = parent.retained[-1]
                else:
                    alone = only_retained_in(edge.next_sibling) if children == 1 else None
                if alone is not None:
                    self._unvalued[alone] = None
                break
            edge = parent

    def _unretain(self, snapshot: Snapshot) -> None:
        edge = snapshot.edge
        assert edge is not None
        retained = edge.retained
        del retained[place_of(retained, snapshot)]
        self._unvalued.pop(snapshot, None)
        if retained or edge.retained_children:
            self._note(edge, snapshot.frontier, snapshot.frontier)
            return
        while not (edge.retained or edge.retained_children) and edge.parent is not None:
            self._tree.move_to_back(edge)
            edge = edge.parent
            edge.retained_children -= 1
        self._note(edge, *NO_FRONTIERS)  # what is left may be alone there now

    def _note(self, edge: Edge, least: int, greatest: int) -> None:
        """Retained snapshots of `edge` between these frontiers have come or gone, or something below it has gone."""
        if edge.parent is None:  # no snapshot is alone above a root, and a root may vanish unnoticed
            self._mark_dependents(edge, least, greatest)
            return
        before = self._changed_edges.get(edge)
        if before is not None:
            if before[0] < least:
                least = before[0]
            if before[1] > greatest:
                greatest = before[1]
        self._changed_edges[edge] = least, greatest

    def _mark_dependents(self, edge: Edge, least: int, greatest: int) -> None:
        if least <= greatest:
            for snapshot in possible_dependents(edge, least, greatest, self._tree.scheme):
                self._unvalued[snapshot] = None

    def divide(self, edge: Edge, upper: Edge) -> None:
        """`edge` was cut and `upper` has what lay above the cut."""
        if edge in self._changed_edges:
            self._changed_edges[upper] = self._changed_edges[edge]

    def forget(self, edge: Edge) -> None:
        """`edge` is gone. Its snapshots went before it, so what changed thereby is noted above it."""
        self._changed_edges.pop(edge, None)

    # ------------------------------------------------------------------ values

    def flush(self) -> None:
        """Bring every value up to date and queue what was marked. O(marked snapshots * their exclusive edges)."""
        self.queue_superseded()
        if self._changed_edges:
            for edge, (least, greatest) in self._changed_edges.items():
                alone = only_retained_through(edge)
                if alone is not None:
                    self._unvalued[alone] = None
                self._mark_dependents(edge, least, greatest)
            self._changed_edges.clear()
        if self._unvalued:
            for snapshot in self._unvalued:
                above = nearest_retained(snapshot, self._tree.scheme)
                snapshot.value = self.value_above(snapshot, above.frontier if above is not None else 0)
                self._queues.offer_snapshot(snapshot)
            self._unvalued.clear()

    def value_above(self, snapshot: Snapshot, above: int) -> float:
        """H of a retained snapshot whose nearest retained one above has the frontier `above`, 0 for none."""
        blocks = exclusive_blocks(snapshot)
        if snapshot.tail:
            blocks += 1
        return snapshot.base + self._gain(1 + snapshot.hits, above, snapshot.frontier, blocks)

    def estimate(self, above: int, frontier: int) -> float:
        """H of a snapshot published now at `frontier`, when its lineage last stood at `above`."""
        if frontier <= above:
            return self.inflation
        geometry = self._tree.geometry
        depth = geometry.depth(frontier)
        blocks = depth - geometry.depth(above) + (frontier > depth * geometry.block_tokens)
        return self.inflation + self._gain(1, above, frontier, blocks)

    def _gain(self, uses: int, above: int, frontier: int, blocks: int) -> float:
        """Seconds that so many uses save past `above`, per byte of an image and so many blocks."""
        geometry = self._tree.geometry
        size = max(1, geometry.image_bytes + blocks * geometry.block_bytes)
        saved = self._cost.saved_seconds(above, frontier - above) - self._cost.restore_seconds(geometry.image_bytes)
        return uses * max(0.0, saved) / size


def exclusive_blocks(snapshot: Snapshot) -> int:
    """How many blocks of its path lead to no other retained snapshot. O(edges among them)."""
    edge = snapshot.edge
    assert edge is not None
    retained = edge.retained
    if retained[-1] is not snapshot or edge.retained_children:
        return 0
    above = len(retained) - 1
    depth = snapshot.depth
    while not above and edge.parent is not None and edge.parent.retained_children == 1:
        edge = edge.parent
        retained = edge.retained
        above = len(retained)
    return depth - (retained[above - 1].depth if above else edge.start)


def only_retained_through(edge: Edge) -> Snapshot | None:
    """The one retained snapshot whose way up leads through `edge` shared with none below; None when there is none."""
    if edge.retained_children:
        return only_retained_in(edge.first_child) if edge.retained_children == 1 else None
    return edge.retained[-1] if edge.retained else None


def only_retained_in(edge: Edge | None) -> Snapshot | None:
    """The one retained snapshot in or below `edge`; None for several. Children that lead to any come first."""
    while edge is not None and len(edge.retained) + edge.retained_children == 1:
        if edge.retained:
            return edge.retained[0]
        edge = edge.first_child
    return None


def possible_dependents(edge: Edge, least: int, greatest: int, scheme: BlockScheme) -> list[Snapshot]:
    """The retained snapshots whose nearest retained one above may be at `edge`, between two frontiers.

    O(them, and the edges between).
    """
    found = []
    edges = [edge]
    for edge in edges:
        retained = edge.retained
        nearer: int | None = None  # what stands on more blocks than this has a nearer one
        for snapshot in retained[place_for(retained, least) :]:
            depth = snapshot.depth
            if nearer is not None and depth > nearer:
                break
            found.append(snapshot)
            if nearer is None and snapshot.frontier > greatest:
                tail = snapshot.tail
                if path_goes_on_with(edge, scheme, depth, None, tail) if depth < edge.end else not tail:
                    nearer = depth
        if nearer is None:
            child = edge.first_child
            while child is not None and (child.retained or child.retained_children):
                edges.append(child)
                child = child.next_sibling
    return found


def nearest_retained(snapshot: Snapshot, scheme: BlockScheme) -> Snapshot | None:
    """The deepest retained snapshot whose prefix is a proper prefix of this one's. O(edges up to it)."""
    edge = snapshot.edge
    assert edge is not None
    retained = edge.retained
    place = place_of(retained, snapshot)
    below: Edge | None = None
    while True:
        while place:
            place -= 1
            other = retained[place]
            if other.depth < snapshot.depth:
                if path_goes_on_with(edge, scheme, other.depth, below, other.tail):
                    return other
            elif other.frontier < snapshot.frontier and snapshot.tail.startswith(other.tail):
                return other
        if edge.parent is None:
            return None
        below, edge = edge, edge.parent
        retained = edge.retained
        place = len(retained)
