"""The life of a lease: what taking it would need, taking it, reading where its blocks lie, giving it up."""

from __future__ import annotations

from prefix_index.capacity import Demand
from prefix_index.core import Core
from prefix_index.errors import InvalidArgument
from prefix_index.fills import held
from prefix_index.lease import Lease, path_of
from prefix_index.lineage import activate
from prefix_index.lookup import path_edge
from prefix_index.match import Match
from prefix_index.nodes import Edge, Hold, Snapshot, pinned_end
from prefix_index.values import Pages, Tier


def demand(match: Match, depth: int, snapshot: Snapshot | None) -> Demand:
    """Blocks to restore before a lane can resume at `depth` of the match's path, from `snapshot` where there is one,
    and how many evictable ones it would pin. O(edges)."""
    edge = path_edge(match, depth) if snapshot is None else snapshot.edge
    assert edge is not None
    restore = depth - min(held(edge, Tier.DEVICE), depth)
    own = 0
    if snapshot is not None and snapshot.tail:
        restore += snapshot.tail_pages is None
        own += snapshot.tail_pages is not None and not snapshot.pins
    at: Edge | None = edge
    while at is not None and pinned_end(at) < at.end:
        own += max(0, min(at.start + at.dev, depth) - pinned_end(at))
        at = at.parent
    return Demand(depth, restore, own)


def acquire(core: Core, owner: object, match: Match, depth: int, snapshot: Snapshot | None) -> Lease:
    """Pin the first `depth` blocks of the match's path and `snapshot`, which stands there, if it is one's source."""
    frontier = depth * core.geometry.block_tokens
    if snapshot is not None:
        edge = snapshot.edge
        frontier = snapshot.frontier
        core.pin_snapshot(snapshot)
    else:
        edge = path_edge(match, depth) if depth else core.tree.root(match._prompt._namespace)
    assert edge is not None
    hold = Hold(edge, depth)
    core.pin(hold)
    return Lease(owner, core.geometry.num_pools, match._prompt, hold, frontier, snapshot)


def release(core: Core, lease: Lease) -> None:
    """Unpin the path of a lease and make it the most recently used."""
    if not lease._activated:
        activate(core, lease)
    hold = lease._hold
    edge = hold.edge
    assert edge is not None
    core.clock += 1
    core.stamp(edge, hold.depth, core.clock)
    core.unpin(hold)
    if edge.parent is None:
        core.tree.forget_if_empty(edge)


def cancel(core: Core, lease: Lease) -> None:
    """Unpin the path and the snapshot of a lease that was not activated; nothing remembers it."""
    hold = lease._hold
    edge = hold.edge
    assert edge is not None
    if lease._resumed is not None:
        core.unpin_snapshot(lease._resumed)
    core.unpin(hold)
    core.tree.forget_if_empty(edge)


def tell_stored(core: Core, lease: Lease, first: int, end: int) -> None:
    """Tell of the blocks [first, end) of the lease's path that are on the device now."""
    assert lease._hold.edge is not None
    for edge in path_of(lease._hold.edge):
        core.feed.stored(edge, Tier.DEVICE, max(first, edge.start), min(end, edge.end))


def handles(edge: Edge, tier: Tier, num_pools: int, first: int, end: int, there: int) -> tuple[Pages, ...]:
    """The handles in `tier` of blocks [first, end) of the path to `edge`, whose first `there` blocks the tier holds."""
    if not 0 <= first <= end <= there:
        raise InvalidArgument(f"handles: blocks must lie in the {there} held on the {tier.value}, got [{first}, {end})")
    pools = num_pools if tier is Tier.DEVICE else 1
    joined: list[int] = []
    for part in path_of(edge):
        if part.end > first and part.start < end:
            of_part = part.pages if tier is Tier.DEVICE else part.slabs
            joined += of_part[max(0, first - part.start) * pools : (end - part.start) * pools]
    if pools == 1:
        return tuple(joined)
    return tuple(tuple(joined[i : i + pools]) for i in range(0, len(joined), pools))
