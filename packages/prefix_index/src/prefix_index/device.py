"""Device eviction: which blocks and tails give up their pages, in which order.

Only a leaf goes: a block with no device-held block or tail below it. Among leaves the backed ones (with a Host copy) go
before the unbacked, then the least recently released. So the last copy of anything is lost at a leaf of the tree::

    pages of an edge   |0 1 2 3 4|5 6 7|        evicted right to left; 5 6 7 unbacked, 0..4 backed
    slabs of the edge  |0 1 2 3 4|              losing 7 removes block 7; losing 4 keeps it, on the Host
"""

from __future__ import annotations

from bisect import bisect_left

from prefix_index.core import Core, Given
from prefix_index.nodes import DEVICE_TAIL, HOST, Edge, Snapshot, pinned_end, stamped
from prefix_index.order import LazyHeap
from prefix_index.values import Tier

UNBACKED = 1 << 62  # added to a tick: unbacked leaves come after every backed one


class DeviceOrder:
    """One queue of edges, and of snapshots standing for their tails: backed before unbacked, then by tick."""

    __slots__ = ("_core", "_heap")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._heap: LazyHeap[Edge | Snapshot] = LazyHeap(_key)

    def offer(self, edge: Edge) -> None:
        """Queue `edge` if its deepest device block may go now."""
        key = _edge_key(edge)
        if key is not None:
            edge.queued = self._heap.renew(edge.queued, key, edge)

    def offer_tail(self, snapshot: Snapshot) -> None:
        """Queue the device copy of a snapshot's tail if it may go now."""
        key = _tail_key(snapshot)
        if key is not None:
            snapshot.tail_queued = self._heap.renew(snapshot.tail_queued, key, snapshot)

    def add_tail(self, snapshot: Snapshot) -> None:
        """Queue the tail of a new snapshot, which nobody has pinned and which the Host does not have."""
        snapshot.tail_queued = self._heap.add(snapshot.tick + UNBACKED, snapshot)

    def evict(self, num_blocks: int, given: Given, backed_only: bool = False) -> int:
        """Give up to `num_blocks` device copies. Returns how many; fewer when everything else is pinned, or unbacked
        and only backed copies may go."""
        missing = num_blocks
        while missing > 0:
            item = self._heap.peek()
            if item is None:
                break
            if isinstance(item, Edge):
                if item.host >= item.dev:
                    missing -= self._evict_backed(item, missing, given)
                elif backed_only:
                    break  # backed leaves come first, so none is left
                else:
                    missing -= self._evict_unbacked(item, missing, given)
            else:
                if item.where & HOST:
                    self.release_tail(item, given)
                elif backed_only:
                    break
                else:
                    self._core.worth.drop(item, given)
                missing -= 1
        return num_blocks - missing

    def take_pages(self, edge: Edge, count: int, given: Given) -> None:
        """Move the last `count` blocks' pages of `edge` into `given`, deepest first, and lower the counts."""
        core = self._core
        pools = core.geometry.num_pools
        pages = edge.pages[-count * pools :]
        del edge.pages[-count * pools :]
        if pools == 1:
            pages.reverse()
            given.pages += pages
        else:
            for i in range(len(pages) - pools, -1, -pools):
                given.pages.append(tuple(pages[i : i + pools]))
        edge.dev -= count
        core.device_blocks -= count
        core.epoch += 1
        if not edge.dev:
            parent = edge.parent
            assert parent is not None
            parent.below -= 1
            if not parent.below:
                self.offer(parent)

    def _evict_backed(self, edge: Edge, missing: int, given: Given) -> int:
        end = edge.start + edge.dev
        count = min(missing, end - _barrier(edge, end))
        self._core.feed.removed(edge, Tier.DEVICE, end - count, end)
        self.take_pages(edge, count, given)
        self.offer(edge)
        return count

    def _evict_unbacked(self, edge: Edge, missing: int, given: Given) -> int:
        core = self._core
        end = edge.start + edge.dev
        count = min(missing, end - max(_barrier(edge, end), edge.start + edge.host))
        size = edge.dev - count
        if edge.snaps:
            core.worth.drop_below(edge, end - count, given)
        if not core.feed.silent:
            core.feed.removed(edge, Tier.DEVICE, end - count, end)
        self.take_pages(edge, count, given)
        core.tree.truncate(edge, size)
        if size:
            self.offer(edge)
        else:
            core.forget(edge)
        return count

    def release_tail(self, snapshot: Snapshot, given: Given) -> None:
        """Give up the device copy of a tail; the snapshot itself stays."""
        self.take_tail(snapshot, given)
        snapshot.set_where(snapshot.where & ~DEVICE_TAIL)
        assert snapshot.edge is not None
        self.offer(snapshot.edge)

    def take_tail(self, snapshot: Snapshot, given: Given) -> None:
        """Move the pages of a tail into `given`; the caller marks that the copy is gone and offers the edge."""
        core = self._core
        edge = snapshot.edge
        assert snapshot.tail_pages is not None
        assert edge is not None
        assert edge.tails is not None
        pages = snapshot.tail_pages
        given.pages.append(pages[0] if len(pages) == 1 else pages)
        snapshot.tail_pages = None
        core.device_tails -= 1
        core.epoch += 1
        if len(edge.tails) == 1:
            edge.tails = None
        else:
            del edge.tails[bisect_left(edge.tails, snapshot.at)]

    def in_order(self) -> list[Edge | Snapshot]:
        """Present leaves, next victim first. For checks and digests."""
        return self._heap.in_order()


def _key(item: Edge | Snapshot) -> int | None:
    return _edge_key(item) if isinstance(item, Edge) else _tail_key(item)


def _edge_key(edge: Edge) -> int | None:
    dev = edge.dev
    if not dev or edge.below:
        return None
    end = edge.start + dev
    tails = edge.tails
    if (tails is not None and tails[-1] == end) or (edge.pins and pinned_end(edge) >= end):
        return None
    tick = edge.tick if edge.older is None and edge.upto >= end else stamped(edge, end)[0]
    return tick if edge.host >= dev else tick + UNBACKED


def _tail_key(snapshot: Snapshot) -> int | None:
    if snapshot.tail_pages is None or snapshot.pins:
        return None
    return snapshot.tick if snapshot.where & HOST else snapshot.tick + UNBACKED


def _barrier(edge: Edge, end: int) -> int:
    """How far up the device blocks of a leaf edge may go under one key: to a pin, a tail, or a change of recency."""
    first = stamped(edge, end)[1]
    if edge.pins:
        first = max(first, pinned_end(edge))
    return first if edge.tails is None else max(first, edge.tails[-1])
