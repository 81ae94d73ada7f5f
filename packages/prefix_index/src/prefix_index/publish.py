"""Publishing: checks what a lane says about its state and hangs the snapshot at its block."""

from __future__ import annotations

from typing import NamedTuple

from prefix_index.core import Core, anchor
from prefix_index.errors import InvalidArgument, WrongState
from prefix_index.fills import held
from prefix_index.lease import Lease
from prefix_index.lineage import activate, advance, supersede_below
from prefix_index.match import SnapshotHandle
from prefix_index.nodes import DEVICE_IMAGE, DEVICE_TAIL, HAS_TAIL, KIND_SHIFT, Edge, Snapshot, place_for
from prefix_index.prompt import TOKEN_BYTES
from prefix_index.tree import starts_with
from prefix_index.values import SnapshotKind, Tier


class Publication(NamedTuple):
    """What `publish` did. When not `created`, an equal snapshot was there: the caller keeps slot and pages."""

    snapshot: SnapshotHandle
    created: bool


def publish(
    core: Core, lease: Lease, frontier: int, slot: int, tail: bytes, pages: tuple[int, ...], kind: SnapshotKind
) -> tuple[Snapshot, bool]:
    """The snapshot at `frontier` and whether it is new; an equal one is refreshed, and retained again if superseded."""
    depth = _checked_depth(core, lease, frontier, slot, tail, pages)
    hold = lease._hold
    edge, below = anchor(hold, depth)
    extra = 0
    if tail:
        if depth < hold.depth and not starts_with(edge, core.tree.scheme, depth, below, tail):
            raise InvalidArgument(f"publish: the tail must repeat the committed block {depth}, got other tokens")
        if lease._prompt._extras.pairs:
            extra = lease._prompt._extras.at(frontier)
    if not lease._activated:
        activate(core, lease)
    if edge.snaps and edge.snaps[-1].frontier >= frontier:
        other = _equal(edge, frontier, tail, extra)
        if other is not None:
            _refresh(core, lease, other, kind)
            return other, False
    core.serial += 1
    snapshot = Snapshot(core.serial, edge, depth, frontier, tail, extra, kind << KIND_SHIFT | DEVICE_IMAGE)
    snapshot.slot = slot
    if tail:
        snapshot.where |= HAS_TAIL | DEVICE_TAIL
        core.hold_tail(snapshot, pages)
        core.clock = snapshot.tick = core.clock + 1
        core.device.add_tail(snapshot)
    core.worth.attach(snapshot)
    # After the new one hangs there: what it takes over from its predecessors is then next to it.
    supersede_below(core, lease, frontier, kind)
    lease._chain.append(snapshot)
    advance(lease, snapshot, kind)
    return snapshot, True


def _refresh(core: Core, lease: Lease, snapshot: Snapshot, kind: SnapshotKind) -> None:
    """Publish what is there already."""
    if kind is SnapshotKind.BOUNDARY and snapshot.kind is not kind:
        core.kinds[snapshot.kind] -= 1
        core.kinds[kind] += 1
        snapshot.set_kind(kind)
        core.feed.published(snapshot)
    supersede_below(core, lease, snapshot.frontier, kind)
    core.worth.refresh(snapshot, hit=False)
    if snapshot not in lease._chain:
        lease._chain.append(snapshot)
    advance(lease, snapshot, kind)


def _equal(edge: Edge, frontier: int, tail: bytes, extra: int) -> Snapshot | None:
    """The snapshot of `edge` with this frontier, tail and extra."""
    snaps = edge.snaps
    place = place_for(snaps, frontier)
    while place and snaps[place - 1].frontier == frontier:
        place -= 1
        if snaps[place].tail == tail and snaps[place].extra == extra:
            return snaps[place]
    return None


def _checked_depth(core: Core, lease: Lease, frontier: int, slot: int, tail: bytes, pages: tuple[int, ...]) -> int:
    """The blocks below a snapshot at `frontier`, once everything the caller says of it is known to be right."""
    geometry = core.geometry
    hold = lease._hold
    if frontier <= lease._resume_frontier:
        resumed = lease._resume_frontier
        raise InvalidArgument(f"publish: frontier must lie above {resumed}, the resume point, got {frontier}")
    depth = geometry.depth(frontier)
    if depth > hold.depth:
        raise InvalidArgument(f"publish: {frontier} tokens need {depth} committed blocks, got {hold.depth}")
    expected = frontier - depth * geometry.block_tokens
    if len(tail) != expected * TOKEN_BYTES:
        raise InvalidArgument(f"publish: the tail must be {expected} tokens, got {len(tail) // TOKEN_BYTES}")
    if len(pages) != (geometry.num_pools if tail else 0):
        raise InvalidArgument(f"publish: a tail needs {geometry.num_pools} pages, no tail none, got {pages!r}")
    if slot < 0 or (pages and min(pages) < 0):
        raise InvalidArgument(f"publish: slot and pages must not be negative, got slot {slot!r}, pages {pages!r}")
    edge = hold.edge
    assert edge is not None
    there = edge.start + edge.dev if edge.dev else held(edge, Tier.DEVICE)
    if there < depth:
        raise WrongState(f"publish: {depth} blocks of the path must be held on the device, got {there}")
    return depth
