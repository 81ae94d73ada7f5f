"""Leases: a lane's pin of its path, from `acquire` to `release` or `cancel`."""

from __future__ import annotations

from prefix_index.errors import InvalidArgument, StaleHandle, WrongState
from prefix_index.match import Match, Owner, SnapshotHandle
from prefix_index.planning.admission import Demand
from prefix_index.prompt import Prompt
from prefix_index.retention.pins import Pins
from prefix_index.retention.valuation import Valuation
from prefix_index.tree.records import Edge, Hold, Snapshot, held, path_of, pinned_end, stamp_path
from prefix_index.tree.tree import Tree
from prefix_index.types import Pages, Tier


class Lease:
    """What `acquire` returns: the path up to `depth` is pinned until `release` or `cancel`.

    The index owns it; callers read it and hand it back.
    """

    __slots__ = (
        "_activated",
        "_hold",
        "_last_tap",
        "_lineage",
        "_owner",
        "_prompt",
        "_prompt_depth",
        "_published_frontier",
        "_resume_depth",
        "_resume_frontier",
        "_resumed",
        "_slot",
        "_tail_pages",
    )

    def __init__(self, owner: Owner, prompt: Prompt, hold: Hold, frontier: int, resumed: Snapshot | None) -> None:
        self._owner = owner
        self._prompt = prompt
        self._hold = hold
        self._prompt_depth = hold.depth  # blocks in which the path is known to equal the prompt
        self._resume_frontier = frontier
        self._resume_depth = hold.depth
        self._resumed = resumed
        self._activated = False
        self._last_tap: Snapshot | None = None  # the last prompt tap published under this lease
        self._published_frontier = frontier  # the deepest frontier of the lineage
        # Retained snapshots of this lineage that its next publication may supersede.
        self._lineage: list[Snapshot]
        if resumed is None:
            self._lineage = []
            self._slot = None
            self._tail_pages: tuple[int, ...] = ()
        else:
            self._lineage = [resumed] if resumed.companion is None else [resumed, resumed.companion]
            self._slot = resumed.slot
            self._tail_pages = resumed.tail_pages or ()

    @property
    def open(self) -> bool:
        """Whether the lease still pins its path."""
        return self._hold.edge is not None

    @property
    def prompt(self) -> Prompt:
        """The prompt it was acquired for."""
        return self._prompt

    @property
    def frontier(self) -> int:
        """Tokens this lease resumed from: what its lane need not compute."""
        return self._resume_frontier

    @property
    def depth(self) -> int:
        """Blocks the lease has pinned by now; `extend` goes on here."""
        return self._hold.depth

    @property
    def snapshot(self) -> SnapshotHandle | None:
        """The snapshot it resumed from."""
        return SnapshotHandle(self._owner, self._resumed) if self._resumed is not None else None

    @property
    def slot(self) -> int | None:
        """The device slot of the image it resumed from, as it was at `acquire`; None when the image was on the Host."""
        return self._slot

    @property
    def tail_pages(self) -> tuple[int, ...]:
        """The device pages of the tail it resumed from, one per pool, as they were at `acquire`."""
        return self._tail_pages

    @property
    def pages(self) -> tuple[tuple[int, ...], ...]:
        """Per pool, the device pages of the blocks the lease resumed with, as far as they are held by now. O(edges).

        Raises:
            StaleHandle: the lease is released.
        """
        edge = self._hold.edge
        if edge is None:
            raise StaleHandle("pages: the lease must be open, got a released one")
        pools = self._owner.geometry.num_pools
        parts: list[list[int]] = []
        while edge.parent is not None:
            if edge.start < self._resume_depth:
                parts.append(edge.pages)
            edge = edge.parent
        joined: list[int] = []
        while parts:
            joined += parts.pop()
        del joined[self._resume_depth * pools :]
        return tuple(tuple(joined[pool::pools]) for pool in range(pools)) if pools > 1 else (tuple(joined),)

    def __repr__(self) -> str:
        state = f"depth={self.depth}" if self.open else "released"
        return f"<lease resumed at {self._resume_frontier}, {state}>"


class Leases:
    """Makes leases and ends them.

    Attributes:
        num_hits: leases activated that resumed from something.
        tokens_resumed: tokens those need not compute.
    """

    __slots__ = ("_owner", "_pins", "_tree", "_valuation", "num_hits", "tokens_resumed")

    def __init__(self, tree: Tree, pins: Pins, valuation: Valuation, owner: Owner) -> None:
        self._tree = tree
        self._pins = pins
        self._valuation = valuation
        self._owner = owner
        self.num_hits = self.tokens_resumed = 0

    def demand(self, match: Match, depth: int, snapshot: Snapshot | None) -> Demand:
        """What resuming at `depth` of the path, from `snapshot` where there is one, takes and pins. O(edges)."""
        edge = match._edge_at(depth) if snapshot is None else snapshot.edge
        assert edge is not None
        restore = depth - min(held(edge, Tier.DEVICE), depth)
        own = 0
        if snapshot is not None and snapshot.tail:
            restore += snapshot.tail_pages is None
            own += snapshot.tail_pages is not None and not snapshot.pins
        above: Edge | None = edge
        while above is not None and pinned_end(above) < above.end:
            own += max(0, min(above.start + above.device_blocks, depth) - pinned_end(above))
            above = above.parent
        return Demand(depth, restore, own)

    def acquire(self, match: Match, depth: int, snapshot: Snapshot | None) -> Lease:
        """Pin the first `depth` blocks of the match's path, and `snapshot`, which stands there, if there is one."""
        pins = self._pins
        if snapshot is not None:
            edge = snapshot.edge
            frontier = snapshot.frontier
            pins.pin_snapshot(snapshot)
        else:
            edge = match._edge_at(depth) if depth else self._tree.root(match._prompt._namespace)
            frontier = depth * self._owner.geometry.block_tokens
        assert edge is not None
        hold = Hold(edge, depth)
        pins.pin(hold)
        return Lease(self._owner, match._prompt, hold, frontier, snapshot)

    def activate(self, lease: Lease) -> None:
        """The lane has its own copy of what it resumed from: count the hit and unpin the snapshot. Once per lease.

        Comes before anything the lane does, since a hit retains what the lane's progress is about to supersede.
        """
        lease._activated = True
        self.num_hits += lease._resume_frontier > 0
        self.tokens_resumed += lease._resume_frontier
        snapshot = lease._resumed
        if snapshot is not None:
            self._valuation.refresh(snapshot, hit=True)
            snapshot.tick = snapshot.hit_tick
            self._pins.unpin_snapshot(snapshot)

    def release(self, lease: Lease) -> None:
        """Unpin the path of a lease and make it the most recently used."""
        if not lease._activated:
            self.activate(lease)
        tree = self._tree
        hold = lease._hold
        edge = hold.edge
        assert edge is not None
        tree.clock = clock = tree.clock + 1
        stamp_path(edge, hold.depth, clock)
        self._pins.unpin(hold)
        if edge.parent is None:
            tree.forget_if_empty(edge)

    def cancel(self, lease: Lease) -> None:
        """Unpin the path and the snapshot of a lease that was not activated, and leave no trace of it."""
        if lease._activated:
            raise WrongState(f"cancel: the lease must not have been activated, got {lease!r}; release it")
        hold = lease._hold
        edge = hold.edge
        assert edge is not None
        if lease._resumed is not None:
            self._pins.unpin_snapshot(lease._resumed)
        self._pins.unpin(hold)
        self._tree.forget_if_empty(edge)

    def handles(self, lease: Lease, tier: Tier, first: int, end: int) -> tuple[Pages, ...]:
        """The handles in `tier` of blocks [first, end) of the lease's path."""
        edge = lease._hold.edge
        assert edge is not None
        there = min(held(edge, tier), lease._hold.depth)
        if not 0 <= first <= end <= there:
            raise InvalidArgument(
                f"handles: blocks must lie in the {there} held on the {tier.value}, got [{first}, {end})"
            )
        pools = self._owner.geometry.num_pools if tier is Tier.DEVICE else 1
        joined: list[int] = []
        for part in path_of(edge):
            if part.end > first and part.start < end:
                of_part = part.pages if tier is Tier.DEVICE else part.slabs
                joined += of_part[max(0, first - part.start) * pools : (end - part.start) * pools]
        if pools == 1:
            return tuple(joined)
        return tuple(tuple(joined[i : i + pools]) for i in range(0, len(joined), pools))
