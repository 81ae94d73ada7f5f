"""How retained snapshots lie to each other: who is above whom, who is alone on which blocks.

One snapshot is above another when its whole prefix, tail included, is a proper prefix of the other's. Decided by tokens
alone: this is valuation, not identity.
"""

from __future__ import annotations

from prefix_index.nodes import Edge, Root, Snapshot, place_for, root_of
from prefix_index.prompt import BlockScheme
from prefix_index.tree import starts_with


def exclusive_blocks(snapshot: Snapshot) -> int:
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


def neighbour(snapshot: Snapshot, place: int) -> Snapshot | None:
    """The one other retained snapshot at or below the deepest block that `snapshot`, at this place among its edge's,
    shares with any; None when several share it."""
    edge = snapshot.edge
    assert edge is not None
    kept = edge.kept
    first = place
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


def nearest_retained(snapshot: Snapshot, place: int, scheme: BlockScheme) -> Snapshot | Root:
    """The deepest retained snapshot whose prefix is a proper prefix of this one's, else the root. `place` is its own
    among its edge's."""
    edge = snapshot.edge
    assert edge is not None
    kept = edge.kept
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
            return root_of(edge)
        below, edge = edge, edge.parent
        kept = edge.kept
        place = len(kept)


def twins(snapshot: Snapshot | Root) -> list[Snapshot | Root]:
    """`snapshot` and the retained ones that differ from it in their tail's extra only: each is as near above what lies
    below them as the others."""
    if isinstance(snapshot, Root) or not snapshot.tail:
        return [snapshot]
    assert snapshot.edge is not None
    kept = snapshot.edge.kept
    found: list[Snapshot | Root] = []
    place = place_for(kept, snapshot.frontier)
    while place and kept[place - 1].frontier == snapshot.frontier:
        place -= 1
        if kept[place].tail == snapshot.tail:
            found.append(kept[place])
    return found


def is_above(snapshot: Snapshot, other: Snapshot, scheme: BlockScheme) -> bool:
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
