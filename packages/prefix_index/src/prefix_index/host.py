"""Host eviction: what gives up slabs, in which order.

1. dead blocks, which no snapshot can reach: leaves of the Host-held tree first, the least recently released first;
2. the snapshot superseded longest ago, with every copy it has;
3. the retained snapshot worth least, unless it is worth more than the claim; L rises to its value. One that is complete
   on the device only gives up its Host copy.

After each snapshot the blocks only it could reach are dead, so step 1 comes round again. A dead block that has a device
copy keeps that; otherwise it is gone. Pinned things are passed over.
"""

from __future__ import annotations

from prefix_index.core import Core, Given
from prefix_index.nodes import (
    DEVICE_IMAGE,
    DEVICE_TAIL,
    HAS_TAIL,
    HOST,
    Edge,
    Snapshot,
    live_end,
    pinned_end,
    stamped,
)
from prefix_index.order import LazyHeap
from prefix_index.values import Tier

Key = tuple[float, int]


class HostOrder:
    """Three queues: dead edges, superseded snapshots, retained snapshots."""

    __slots__ = ("_core", "_dead", "_retained", "_superseded")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._dead: LazyHeap[Edge] = LazyHeap(_dead_key)
        self._superseded: LazyHeap[Snapshot] = LazyHeap(_superseded_key)
        self._retained: LazyHeap[Snapshot] = LazyHeap(_retained_key)

    def offer(self, edge: Edge) -> None:
        """Queue `edge` if its deepest Host block is dead and may go now."""
        key = _dead_key(edge)
        if key is not None:
            edge.dead_queued = self._dead.renew(edge.dead_queued, key, edge)

    def offer_path(self, edge: Edge) -> None:
        """Queue the deepest edge on the path to `edge` that has a Host copy, if it is dead."""
        at: Edge | None = edge
        while at is not None and not at.host:
            at = at.parent
        if at is not None:
            self.offer(at)

    def offer_snapshot(self, snapshot: Snapshot) -> None:
        """Queue a snapshot with a Host copy in the queue it belongs to."""
        if snapshot.superseded:
            key = _superseded_key(snapshot)
            if key is not None:
                snapshot.host_queued = self._superseded.renew(snapshot.host_queued, key, snapshot)
        else:
            retained = _retained_key(snapshot)
            if retained is not None:
                snapshot.host_queued = self._retained.renew(snapshot.host_queued, retained, snapshot)

    def evict(self, num_slabs: int, claim: float, given: Given) -> bool:
        """Give up at least `num_slabs` slabs. False when it had to stop before, keeping what it had given up."""
        core = self._core
        worth = core.worth
        while len(given.slabs) < num_slabs:
            edge = self._dead.peek()
            if edge is not None:
                self._drop_dead(edge, num_slabs - len(given.slabs), given)
                continue
            worth.queue_superseded()
            victim = self._superseded.peek()
            if victim is not None:
                worth.drop(victim, given)
                continue
            worth.flush()
            victim = self._retained.peek()
            if victim is None or victim.value > claim:
                return False
            core.inflation = max(core.inflation, victim.value)
            if victim.where & DEVICE_IMAGE and (victim.where & DEVICE_TAIL or not victim.where & HAS_TAIL):
                self.drop_copy(victim, given)
            else:
                worth.drop(victim, given)
        return True

    def _drop_dead(self, edge: Edge, missing: int, given: Given) -> None:
        """Take Host copies from the dead end of an edge, deepest first, as far as recency and backing are the same."""
        core = self._core
        end = edge.start + edge.host
        on_device = edge.dev >= edge.host
        first = max(live_end(edge), pinned_end(edge), stamped(edge, end)[1])
        if not on_device:
            first = max(first, edge.start + edge.dev)
        count = min(missing, end - first)
        core.feed.removed(edge, Tier.HOST, end - count, end)
        self.take_slabs(edge, count, given)
        if on_device:
            core.device.offer(edge)  # unbacked from now on
            self.offer(edge)
        elif edge.host or edge.dev:
            core.tree.truncate(edge, max(edge.host, edge.dev))
            self.offer(edge)
        else:
            core.forget(edge)
            core.tree.truncate(edge, 0)

    def take_slabs(self, edge: Edge, count: int, given: Given) -> None:
        """Move the last `count` slabs of `edge` into `given`, deepest first, and lower the counts."""
        core = self._core
        slabs = edge.slabs[-count:]
        slabs.reverse()
        given.slabs += slabs
        del edge.slabs[-count:]
        edge.host -= count
        core.host_blocks -= count
        core.epoch += 1
        if not edge.host:
            parent = edge.parent
            assert parent is not None
            parent.hbelow -= 1
            if not parent.hbelow:
                self.offer(parent)

    def drop_copy(self, snapshot: Snapshot, given: Given) -> None:
        """Take the Host copy of a snapshot that is complete on the device."""
        core = self._core
        assert snapshot.slabs is not None
        given.slabs.extend(snapshot.slabs)
        snapshot.slabs = None
        snapshot.set_where(snapshot.where & ~HOST)
        core.epoch += 1
        core.worth.offer(snapshot)
        core.device.offer_tail(snapshot)

    def in_order(self) -> tuple[list[Edge], list[Snapshot], list[Snapshot]]:
        """Dead edges, superseded and retained snapshots, each next victim first. For checks and digests."""
        return self._dead.in_order(), self._superseded.in_order(), self._retained.in_order()


def _dead_key(edge: Edge) -> int | None:
    if not edge.host or edge.hbelow:
        return None
    end = edge.start + edge.host
    if live_end(edge) >= end or (edge.pins and pinned_end(edge) >= end):
        return None
    return stamped(edge, end)[0]


def _superseded_key(snapshot: Snapshot) -> int | None:
    if snapshot.superseded and snapshot.where & HOST and not snapshot.pins:
        return snapshot.superseded
    return None


def _retained_key(snapshot: Snapshot) -> Key | None:
    if not snapshot.superseded and snapshot.where & HOST and not snapshot.pins:
        return snapshot.value, snapshot.hit_tick
    return None
