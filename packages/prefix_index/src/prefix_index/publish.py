"""Publishing: checks what a lane says about its state and hangs the snapshot at its block."""

from __future__ import annotations

from typing import NamedTuple

from prefix_index.core import Core, anchor
from prefix_index.errors import InvalidArgument, WrongState
from prefix_index.fills import held
from prefix_index.lease import Lease
from prefix_index.lineage import activate, join, supersede_below
from prefix_index.match import SnapshotHandle
from prefix_index.nodes import DEVICE_IMAGE, DEVICE_TAIL, Edge, Snapshot, place_for
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
    depth = core.geometry.depth(frontier)
    _check(core, lease, frontier, depth, slot, tail, pages)
    edge, below = anchor(lease._hold, depth)
    if tail and depth < lease._hold.depth and not starts_with(edge, core.tree.scheme, depth, below, tail):
        raise InvalidArgument(f"publish: the tail must repeat the committed block {depth}, got other tokens")
    if not lease._activated:
        activate(core, lease)
    extra = lease._prompt._extras.at(frontier) if tail else 0
    other = _equal(edge, frontier, tail, extra)
    if other is not None:
        if kind is SnapshotKind.BOUNDARY:
            core.kinds[other.kind] -= 1
            core.kinds[kind] += 1
            other.set_kind(kind)
        supersede_below(core, lease, frontier, kind)
        core.worth.refresh(other, hit=False)
        join(lease, other, kind)
        return other, False
    core.serial += 1
    snapshot = Snapshot(core.serial, edge, depth, frontier, tail, extra, kind)
    snapshot.slot = slot
    snapshot.where |= DEVICE_IMAGE | (DEVICE_TAIL if tail else 0)
    if tail:
        core.hold_tail(snapshot, pages)
        snapshot.tick = core.tick()
        core.device.offer_tail(snapshot)
    core.worth.attach(snapshot)
    # After the new one hangs there: what it takes over from its predecessors is then next to it.
    supersede_below(core, lease, frontier, kind)
    join(lease, snapshot, kind)
    return snapshot, True


def _equal(edge: Edge, frontier: int, tail: bytes, extra: int) -> Snapshot | None:
    """The snapshot of `edge` with this frontier, tail and extra."""
    snaps = edge.snaps
    place = place_for(snaps, frontier)
    while place and snaps[place - 1].frontier == frontier:
        place -= 1
        if snaps[place].tail == tail and snaps[place].extra == extra:
            return snaps[place]
    return None


def _check(core: Core, lease: Lease, frontier: int, depth: int, slot: int, tail: bytes, pages: tuple[int, ...]) -> None:
    geometry = core.geometry
    hold = lease._hold
    resumed = lease._resume_frontier
    if frontier <= resumed:
        raise InvalidArgument(f"publish: frontier must lie above {resumed}, the resume point, got {frontier}")
    if depth > hold.depth:
        raise InvalidArgument(f"publish: {frontier} tokens need {depth} committed blocks, got {hold.depth}")
    expected = frontier - depth * geometry.block_tokens
    if len(tail) != expected * TOKEN_BYTES:
        raise InvalidArgument(f"publish: the tail must be {expected} tokens, got {len(tail) // TOKEN_BYTES}")
    if len(pages) != (geometry.num_pools if tail else 0):
        raise InvalidArgument(f"publish: a tail needs {geometry.num_pools} pages, no tail none, got {pages!r}")
    if slot < 0 or min(pages, default=0) < 0:
        raise InvalidArgument(f"publish: slot and pages must not be negative, got slot {slot!r}, pages {pages!r}")
    edge = hold.edge
    assert edge is not None
    there = edge.start + edge.dev if edge.dev else held(edge, Tier.DEVICE)
    if there < depth:
        raise WrongState(f"publish: {depth} blocks of the path must be held on the device, got {there}")
