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
    for snapshot in lease._chain:
        if snapshot.edge is None or snapshot.superseded:
            continue
        deeper = snapshot.frontier >= frontier
        last_tap = snapshot is lease._tap and kind is not SnapshotKind.TAP
        if deeper or last_tap or _protected(snapshot, lease, core.tree.scheme):
            kept.append(snapshot)
        else:
            core.worth.supersede(snapshot)
    lease._chain = kept


def _protected(snapshot: Snapshot, lease: Lease, scheme: BlockScheme) -> bool:
    if snapshot.where >> KIND_SHIFT != SnapshotKind.BOUNDARY:
        return False
    return snapshot is not lease._resumed or shared(snapshot, scheme)


def join(lease: Lease, snapshot: Snapshot, kind: SnapshotKind) -> None:
    """Make a published snapshot the lineage's newest, and let it remember the tap left retained behind it."""
    if snapshot not in lease._chain:
        lease._chain.append(snapshot)
    lease._published = max(lease._published, snapshot.frontier)
    if kind is SnapshotKind.TAP:
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
