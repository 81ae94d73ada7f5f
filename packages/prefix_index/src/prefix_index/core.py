"""The state every part of the index shares, and the pins, which all of them respect."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefix_index.cost import CostModel
from prefix_index.errors import InvalidArgument
from prefix_index.nodes import Edge, Hold, Snapshot, pinned_device_blocks, stamp
from prefix_index.order import kill
from prefix_index.values import Freed, Pages, Pool, SnapshotKind, integer

if TYPE_CHECKING:
    from prefix_index.device import DeviceOrder
    from prefix_index.events import Feed
    from prefix_index.fills import Ticket
    from prefix_index.host import HostOrder
    from prefix_index.slots import SlotOrder
    from prefix_index.tree import Tree
    from prefix_index.worth import Worth


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes the policy weighs; the index itself moves no byte."""

    block_tokens: int
    num_pools: int
    lag: int  # the largest of the pools
    block_bytes: int
    image_bytes: int
    image_slabs: int

    @classmethod
    def checked(
        cls,
        block_tokens: int,
        pools: Sequence[Pool],
        snapshots: bool,
        block_bytes: int,
        image_bytes: int,
        image_slabs: int,
    ) -> Geometry:
        """What `PrefixIndex` is made with, refused where it makes no sense."""
        if not 1 <= integer("PrefixIndex", "block_tokens", block_tokens) <= 4096:
            raise InvalidArgument(f"PrefixIndex: block_tokens must be between 1 and 4096, got {block_tokens!r}")
        if not pools:
            raise InvalidArgument("PrefixIndex: at least one pool is needed, got none")
        for pool in pools:
            if pool.lag not in (0, 1):
                raise InvalidArgument(f"PrefixIndex: a pool's lag must be 0 or 1, got {pool.lag!r}")
        for name, value in (("block_bytes", block_bytes), ("image_bytes", image_bytes), ("image_slabs", image_slabs)):
            if integer("PrefixIndex", name, value) < 1:
                raise InvalidArgument(f"PrefixIndex: {name} must be positive, got {value!r}")
        return cls(
            block_tokens=block_tokens,
            num_pools=len(pools),
            lag=max(pool.lag for pool in pools) if snapshots else 0,
            block_bytes=block_bytes,
            image_bytes=image_bytes,
            image_slabs=image_slabs,
        )

    def depth(self, frontier: int) -> int:
        """Whole blocks below a snapshot at `frontier` that every pool has committed; the rest is its tail."""
        return max(0, frontier - self.lag) // self.block_tokens


class Given:
    """Collects what an operation gives up."""

    __slots__ = ("pages", "slabs", "slots")

    def __init__(self) -> None:
        self.pages: list[Pages] = []
        self.slots: list[int] = []
        self.slabs: list[int] = []

    def freeze(self) -> Freed:
        return Freed(tuple(self.pages), tuple(self.slots), tuple(self.slabs))


class Core:
    """Shared state. No clock but its own count, no randomness: equal calls give equal indexes."""

    __slots__ = (
        "clock",
        "cost",
        "device",
        "device_blocks",
        "device_tails",
        "duplicate",
        "epoch",
        "feed",
        "geometry",
        "hits",
        "host",
        "host_blocks",
        "inflation",
        "inserted",
        "kinds",
        "pinned_blocks",
        "pinned_tails",
        "reattached",
        "serial",
        "slots",
        "tickets",
        "tokens_resumed",
        "tree",
        "worth",
    )

    tree: Tree
    device: DeviceOrder
    feed: Feed
    host: HostOrder
    slots: SlotOrder
    worth: Worth

    def __init__(self, geometry: Geometry, cost: CostModel) -> None:
        self.geometry = geometry
        self.cost = cost
        self.clock = 0  # stamps recency; every stamping operation takes one tick
        self.epoch = 0  # moves when something a match can name is lost or renumbered
        self.serial = 0
        self.hits = self.tokens_resumed = 0  # counted, never read by a rule
        self.inserted = self.reattached = self.duplicate = 0
        self.inflation = 0.0  # L of GreedyDual-Size-Frequency
        self.device_blocks = self.device_tails = self.host_blocks = 0
        self.kinds = [0] * len(SnapshotKind)  # snapshots there are, by kind
        self.tickets: dict[Ticket, None] = {}  # fills in flight, oldest first
        self.pinned_blocks = self.pinned_tails = 0  # device copies only

    @property
    def evictable_device_pages(self) -> int:
        return self.device_blocks + self.device_tails - self.pinned_blocks - self.pinned_tails

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    # Pins are path-wide: a hold pins every block from the root to its depth. `Edge.pins` counts units, so pinning stops
    # at the first ancestor that somebody pinned already.

    def pin(self, hold: Hold) -> None:
        """Register `hold` at its edge and pin the path above it."""
        edge = hold.edge
        assert edge is not None
        if edge.pins:
            before = pinned_device_blocks(edge)
            edge.holds = [*edge.holds, hold] if edge.holds is not None else [hold]
            edge.pins += 1
            newly = pinned_device_blocks(edge) - before
        else:
            edge.holds = [hold]
            edge.pins = 1
            newly = min(hold.depth - edge.start, edge.dev)
            above = edge.parent
            while above is not None:
                pins = above.pins
                above.pins = pins + 1
                if pins:
                    if above.holds is not None and len(above.holds) == pins:
                        newly += above.dev - min(max(h.depth for h in above.holds) - above.start, above.dev)
                    break
                newly += above.dev
                above = above.parent
        self.pinned_blocks += newly

    def unpin(self, hold: Hold) -> None:
        """Take `hold` off its edge. Whatever becomes evictable is offered to the orders."""
        edge = hold.edge
        assert edge is not None
        assert edge.holds is not None
        if edge.pins > 1:
            before = pinned_device_blocks(edge)
            edge.holds = [other for other in edge.holds if other is not hold] or None
            edge.pins -= 1
            freed = before - pinned_device_blocks(edge)
        else:
            edge.holds = None
            edge.pins = 0
            freed = min(hold.depth - edge.start, edge.dev)
            above = edge.parent
            while above is not None:
                pins = above.pins = above.pins - 1
                if pins:
                    if above.holds is not None and len(above.holds) == pins:
                        freed += above.dev - min(max(h.depth for h in above.holds) - above.start, above.dev)
                    break
                freed += above.dev
                above = above.parent
        self.pinned_blocks -= freed
        hold.edge = None
        self.offer_path(edge)

    def move(self, hold: Hold, edge: Edge, depth: int) -> Hold:
        """Carry a hold deeper along its path: to `depth` inside `edge`, which is its own edge or lies below it."""
        if edge is hold.edge:
            if edge.pins > 1:
                before = pinned_device_blocks(edge)
                hold.depth = depth
                self.pinned_blocks += pinned_device_blocks(edge) - before
            else:
                self.pinned_blocks += min(depth - edge.start, edge.dev) - min(hold.depth - edge.start, edge.dev)
                hold.depth = depth
            return hold
        left = hold.edge
        assert left is not None
        assert left.holds is not None
        if edge.parent is left and not edge.pins and hold.depth == left.end:  # the usual step, into a new child
            if len(left.holds) == 1:
                left.holds = None
            else:
                left.holds.remove(hold)
            edge.holds = [hold]
            edge.pins = 1
            hold.edge = edge
            hold.depth = depth
            self.pinned_blocks += min(depth - edge.start, edge.dev)
            return hold
        moved = Hold(edge, depth)
        self.pin(moved)
        left.pins -= 1  # the child on the way to `edge` holds it now
        if len(left.holds) == 1:
            left.holds = None
        else:
            left.holds.remove(hold)
        hold.edge = None
        return moved

    def hold_on_device(self, edge: Edge, pages: list[int]) -> None:
        """Give `pages` to the next blocks of `edge` without a device copy. The path above must be held."""
        before = pinned_device_blocks(edge)
        if not edge.dev:
            assert edge.parent is not None
            edge.parent.below += 1
        num_blocks = len(pages) // self.geometry.num_pools
        edge.pages += pages
        edge.dev += num_blocks
        self.device_blocks += num_blocks
        self.pinned_blocks += pinned_device_blocks(edge) - before

    def hold_tail(self, snapshot: Snapshot, pages: tuple[int, ...]) -> None:
        """Give `pages` to the tail of a snapshot. The path to its anchor must be held on the device; the caller marks
        the copy."""
        edge = snapshot.edge
        assert edge is not None
        snapshot.tail_pages = pages
        if edge.tails is None:
            edge.tails = [snapshot.at]
        else:
            insort(edge.tails, snapshot.at)
        self.device_tails += 1
        if snapshot.pins:
            self.pinned_tails += 1

    def offer_path(self, edge: Edge) -> None:
        """Queue whatever on the path to `edge` is the deepest copy in its tier, if it may be evicted."""
        at = edge
        while not at.dev and at.parent is not None:
            at = at.parent
        self.device.offer(at)
        if self.host_blocks:
            self.host.offer_path(edge)

    def pin_snapshot(self, snapshot: Snapshot) -> None:
        if not snapshot.pins and snapshot.tail_pages is not None:
            self.pinned_tails += 1
        snapshot.pins += 1

    def unpin_snapshot(self, snapshot: Snapshot) -> None:
        snapshot.pins -= 1
        if not snapshot.pins:
            if snapshot.tail_pages is not None:
                self.pinned_tails -= 1
                self.device.offer_tail(snapshot)
            self.worth.offer(snapshot)

    def shield(self, snapshots: Sequence[Snapshot]) -> list[tuple[Hold, Snapshot]]:
        """Pin snapshots and their paths until `unshield`."""
        shields = []
        for snapshot in snapshots:
            assert snapshot.edge is not None
            hold = Hold(snapshot.edge, snapshot.at)
            self.pin(hold)
            self.pin_snapshot(snapshot)
            shields.append((hold, snapshot))
        return shields

    def unshield(self, shields: Sequence[tuple[Hold, Snapshot]]) -> None:
        for hold, snapshot in reversed(shields):
            self.unpin_snapshot(snapshot)
            self.unpin(hold)

    def stamp(self, edge: Edge, depth: int, tick: int) -> None:
        """Make the path to block `depth`, which lies in `edge`, the most recently released. O(edges)."""
        above = edge.parent
        while above is not None:
            if edge.older is None and edge.upto <= depth:  # nothing of it was released from further down
                edge.upto = depth
                edge.tick = tick
            else:
                stamp(edge, depth, tick)
            edge = above
            depth = edge.end
            above = edge.parent

    def forget(self, edge: Edge) -> None:
        """Let no queue refer to a removed edge."""
        kill(edge.queued)
        kill(edge.dead_queued)
        self.worth.forget(edge)

    def split(self, edge: Edge, at: int) -> Edge:
        """Cut an edge; returns the upper half. The lower keeps its place in the orders, the upper needs none: whoever
        cuts an edge pins it down to the cut, and offers what it then unpins."""
        upper = self.tree.split(edge, at)
        self.worth.divide(edge, upper)
        self.epoch += 1
        return upper


def anchor(hold: Hold, depth: int) -> tuple[Edge, Edge | None]:
    """The edge on the hold's path in which `depth` lies, its end included, and the edge below it on that path."""
    below: Edge | None = None
    edge = hold.edge
    assert edge is not None
    while edge.parent is not None and edge.start >= depth:
        below, edge = edge, edge.parent
    return edge, below
