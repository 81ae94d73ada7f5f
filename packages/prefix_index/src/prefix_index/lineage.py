"""Supersession: which snapshots a conversation leaves behind as redundant when it moves on.

A lineage that publishes past its resume point supersedes what it stood on: the snapshot it resumed from, the prompt
tap that snapshot had left retained, and what this lease published before, its last prompt tap apart (a next turn that
renders the reply anew resumes there). A BOUNDARY may serve other conversations: only the one resumed from is
superseded, and only while the tree below it is a single chain.
"""

from __future__ import annotations

from prefix_index.core import Core
from prefix_index.lease import Lease
from prefix_index.nodes import KIND_SHIFT, Edge, Snapshot
from prefix_index.prompt import BlockScheme
from prefix_index.runs import goes_on_with
from prefix_index.values import SnapshotKind

_TAP = SnapshotKind.TAP
_BOUNDARY_BITS = SnapshotKind.BOUNDARY << KIND_SHIFT  # the greatest kind: what has these bits has no less


def activate(core: Core, lease: Lease) -> None:
    """The lane has its own copy of what it resumed from: count the hit and let the snapshot go. Once per lease.

    Comes before anything the lane does, since a hit retains what the lane's progress is about to supersede."""
    lease._activated = True
    core.hits += lease._resume_frontier > 0
    core.tokens_resumed += lease._resume_frontier
    snapshot = lease._resumed
    if snapshot is not None:
        core.worth.refresh(snapshot, hit=True)
        snapshot.tick = snapshot.hit_tick
        core.unpin_snapshot(snapshot)


def supersede_below(core: Core, lease: Lease, frontier: int, kind: SnapshotKind) -> None:
    """Supersede what a snapshot of `kind` at `frontier` makes redundant in the lineage of `lease`."""
    kept: list[Snapshot] = []
    spared = lease._tap if kind is not _TAP else None
    for snapshot in lease._chain:
        if snapshot.edge is None or snapshot.superseded:
            continue
        if (
            snapshot is spared
            or snapshot.frontier >= frontier
            or (snapshot.where >= _BOUNDARY_BITS and _protected(snapshot, lease, core.tree.scheme))
        ):
            kept.append(snapshot)
        else:
            core.worth.supersede(snapshot)
    lease._chain = kept


def _protected(boundary: Snapshot, lease: Lease, scheme: BlockScheme) -> bool:
    return boundary is not lease._resumed or shared(boundary, scheme)


def advance(lease: Lease, snapshot: Snapshot, kind: SnapshotKind) -> None:
    """A published snapshot is the lineage's newest; let it remember the tap left retained behind it."""
    if snapshot.frontier > lease._published:
        lease._published = snapshot.frontier
    if kind is _TAP:
        lease._tap = snapshot
        return
    tap = lease._tap
    if tap is not None and tap.edge is not None and not tap.superseded and tap is not snapshot:
        if tap.successor is not None:
            tap.successor.companion = None
        if snapshot.companion is not None:
            snapshot.companion.successor = None
        tap.successor = snapshot
        snapshot.companion = tap


def shared(snapshot: Snapshot, scheme: BlockScheme) -> bool:
    """Whether several conversations have gone on from `snapshot`: the tree below is no single chain. O(chain)."""
    edge = snapshot.edge
    assert edge is not None
    at: Edge | None = edge
    if snapshot.at < edge.end:
        if not goes_on_with(edge, scheme, snapshot.at, snapshot.tail):
            return False
    elif snapshot.tail:
        going_on = None
        child = edge.first
        while child is not None:
            if child.head.startswith(snapshot.tail):
                if going_on is not None:
                    return True
                going_on = child
            child = child.next
        at = going_on
    while at is not None:
        first = at.first
        if first is not None and first.next is not None:
            return True
        at = first
    return False
