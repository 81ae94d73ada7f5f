"""How retained snapshots lie to each other: who is above whom, who is alone on which blocks.

One snapshot is above another when its whole prefix, tail included, is a proper prefix of the other's. Decided by tokens
alone: this is valuation, not identity.
"""

from __future__ import annotations

from prefix_index.nodes import Edge, Snapshot, place_for, place_of
from prefix_index.prompt import BlockScheme
from prefix_index.tree import starts_with


def exclusive_blocks(snapshot: Snapshot) -> int:
    """How many blocks of its path lead to no other retained snapshot. O(edges among them)."""
    edge = snapshot.edge
    assert edge is not None
    kept = edge.kept
    if kept[-1] is not snapshot or edge.kbelow:
        return 0
    above = len(kept) - 1
    depth = snapshot.at
    while not above and edge.parent is not None and edge.parent.kbelow == 1:
        edge = edge.parent
        kept = edge.kept
        above = len(kept)
    return depth - (kept[above - 1].at if above else edge.start)


def sole(edge: Edge) -> Snapshot | None:
    """The one retained snapshot whose way up leads through `edge` shared with none below; None when there is none."""
    if edge.kbelow:
        return sole_below(edge.first) if edge.kbelow == 1 else None
    return edge.kept[-1] if edge.kept else None


def sole_below(edge: Edge | None) -> Snapshot | None:
    """The one retained snapshot in or below `edge`; None for several. Children that lead to any come first."""
    while edge is not None and len(edge.kept) + edge.kbelow == 1:
        if edge.kept:
            return edge.kept[0]
        edge = edge.first
    return None


def next_below(edge: Edge, least: int, greatest: int, scheme: BlockScheme) -> list[Snapshot]:
    """The retained snapshots that may have their nearest one above among those of `edge` with a frontier between
    `least` and `greatest`. O(them, and the edges between)."""
    found = []
    edges = [edge]
    for edge in edges:
        kept = edge.kept
        nearer: int | None = None  # whatever stands on more blocks than this has a nearer one
        for snapshot in kept[place_for(kept, least) :]:
            at = snapshot.at
            if nearer is not None and at > nearer:
                break
            found.append(snapshot)
            if nearer is None and snapshot.frontier > greatest:
                tail = snapshot.tail
                if starts_with(edge, scheme, at, None, tail) if at < edge.end else not tail:
                    nearer = at
        if nearer is None:
            child = edge.first
            while child is not None and (child.kept or child.kbelow):
                edges.append(child)
                child = child.next
    return found


def nearest_retained(snapshot: Snapshot, scheme: BlockScheme) -> Snapshot | None:
    """The deepest retained snapshot whose prefix is a proper prefix of this one's. O(edges up to it)."""
    edge = snapshot.edge
    assert edge is not None
    kept = edge.kept
    place = place_of(kept, snapshot)
    below: Edge | None = None
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
            return None
        below, edge = edge, edge.parent
        kept = edge.kept
        place = len(kept)
