"""The queues victims are taken from: heaps whose entries may go stale, never a scan.

Device pages: leaves only, that is blocks with no device-held block or tail below them. Those with a Host copy go before
those without, then the least recently released.

Device slots: the snapshot superseded longest ago; else, of those with no Host copy, the one worth least; else the least
recently hit one with a Host copy.

Slabs: dead blocks, which no snapshot can reach, leaves first, the least recently released first; else the snapshot
superseded longest ago; else the retained one worth least.

Pinned things are in no queue.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

from prefix_index.tree.records import HOST, Edge, QueueEntry, Snapshot, live_end, pinned_end, stamped
from prefix_index.tree.tree import Tree

UNBACKED = 1 << 62  # added to a tick: leaves without a Host copy come after every one with

T = TypeVar("T")
Key = Any


class LazyHeap(Generic[T]):
    """Least key first. An entry is [key, sequence number, item]; its item is None once it is dead.

    `current(item)` returns the key under which an item belongs here now, or None when it does not; an entry made under
    another key dies when it surfaces. An item keeps the entry it was given and asks for a new one through `renew`
    whenever its key may have changed. A removed item kills its entry with `kill`, so no heap refers to a dead item.
    Deliberately lacks membership and length: the items themselves answer those. Dead entries are swept once they
    outnumber the live.
    """

    __slots__ = ("_count", "_current", "_heap", "_limit")

    def __init__(self, current: Callable[[T], Key | None]) -> None:
        self._current = current
        self._heap: list[QueueEntry] = []
        self._count = 0
        self._limit = 128

    def renew(self, entry: QueueEntry | None, key: Key, item: T) -> QueueEntry:
        """The live entry of `item` under `key`: `entry` where it still is that, else a new one. O(log n) amortised."""
        if entry is not None:
            if entry[2] is item and entry[0] == key:
                return entry
            entry[2] = None
        return self.add(key, item)

    def add(self, key: Key, item: T) -> QueueEntry:
        """The entry of an item that has none. O(log n) amortised."""
        self._count += 1
        made: QueueEntry = [key, self._count, item]
        heappush(self._heap, made)
        if len(self._heap) > self._limit:
            self._sweep()
        return made

    def peek(self) -> T | None:
        """The item with the least key, or None. Drops stale entries on the way."""
        heap = self._heap
        current = self._current
        while heap:
            entry = heap[0]
            item: T | None = entry[2]
            if item is not None:
                if current(item) == entry[0]:
                    return item
                entry[2] = None
            heappop(heap)
        return None

    def in_order(self) -> list[T]:
        """The items, next first, without changing the heap. O(n log n): for checks and digests."""
        return [e[2] for e in sorted(self._heap) if e[2] is not None and self._current(e[2]) == e[0]]

    def _sweep(self) -> None:
        kept = []
        for entry in self._heap:
            item = entry[2]
            if item is not None:
                if self._current(item) == entry[0]:
                    kept.append(entry)
                else:
                    entry[2] = None
        heapify(kept)
        self._heap = kept
        self._limit = 2 * max(64, len(kept))


def kill(*entries: QueueEntry | None) -> None:
    """Let entries forget their items."""
    for entry in entries:
        if entry is not None:
            entry[2] = None


class Queues:
    """Every queue of an index. `offer_*` queues an item if it may be a victim now; the queue then knows its key."""

    __slots__ = (
        "_tree",
        "dead",
        "device",
        "host_retained",
        "host_superseded",
        "slot_backed",
        "slot_superseded",
        "slot_unbacked",
    )

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.device: LazyHeap[Edge | Snapshot] = LazyHeap(_device_key)
        self.dead: LazyHeap[Edge] = LazyHeap(_dead_key)
        self.host_superseded: LazyHeap[Snapshot] = LazyHeap(_host_superseded_key)
        self.host_retained: LazyHeap[Snapshot] = LazyHeap(_host_retained_key)
        self.slot_superseded: LazyHeap[Snapshot] = LazyHeap(_slot_superseded_key)
        self.slot_unbacked: LazyHeap[Snapshot] = LazyHeap(_slot_unbacked_key)
        self.slot_backed: LazyHeap[Snapshot] = LazyHeap(_slot_backed_key)

    def offer_device(self, edge: Edge) -> None:
        """Queue `edge` if its deepest device block may go now."""
        key = _leaf_key(edge)
        if key is not None:
            edge.device_entry = self.device.renew(edge.device_entry, key, edge)

    def offer_tail(self, snapshot: Snapshot) -> None:
        """Queue the device copy of a snapshot's tail if it may go now."""
        key = _tail_key(snapshot)
        if key is not None:
            snapshot.tail_entry = self.device.renew(snapshot.tail_entry, key, snapshot)

    def add_tail(self, snapshot: Snapshot) -> None:
        """Queue the tail of a new snapshot, which is not pinned and has no Host copy."""
        snapshot.tail_entry = self.device.add(snapshot.tick + UNBACKED, snapshot)

    def offer_dead(self, edge: Edge) -> None:
        """Queue `edge` if its deepest Host block is dead and may go now."""
        key = _dead_key(edge)
        if key is not None:
            edge.dead_entry = self.dead.renew(edge.dead_entry, key, edge)

    def offer_path(self, edge: Edge) -> None:
        """Queue the deepest copies on the path to `edge`, one per tier, if they may go now."""
        deepest = edge
        while not deepest.device_blocks and deepest.parent is not None:
            deepest = deepest.parent
        self.offer_device(deepest)
        if self._tree.host_blocks:
            self.offer_dead_path(edge)

    def offer_dead_path(self, edge: Edge) -> None:
        """Queue the deepest edge on the path to `edge` that has a Host copy, if it is dead."""
        deepest: Edge | None = edge
        while deepest is not None and not deepest.host_blocks:
            deepest = deepest.parent
        if deepest is not None:
            self.offer_dead(deepest)

    def offer_snapshot(self, snapshot: Snapshot) -> None:
        """Queue a snapshot for its slot and for its slabs. An entry in another queue has no key there any more."""
        if snapshot.pins:
            return
        hosted = snapshot.status & HOST
        if snapshot.slot is not None:
            entry = snapshot.slot_entry
            if snapshot.superseded:
                snapshot.slot_entry = self.slot_superseded.renew(entry, snapshot.superseded, snapshot)
            elif hosted:
                snapshot.slot_entry = self.slot_backed.renew(entry, snapshot.hit_tick, snapshot)
            else:
                snapshot.slot_entry = self.slot_unbacked.renew(entry, (snapshot.value, snapshot.hit_tick), snapshot)
        if hosted:
            entry = snapshot.host_entry
            if snapshot.superseded:
                snapshot.host_entry = self.host_superseded.renew(entry, snapshot.superseded, snapshot)
            else:
                snapshot.host_entry = self.host_retained.renew(entry, (snapshot.value, snapshot.hit_tick), snapshot)


def _device_key(item: Edge | Snapshot) -> int | None:
    return _leaf_key(item) if isinstance(item, Edge) else _tail_key(item)


def _leaf_key(edge: Edge) -> int | None:
    size = edge.device_blocks
    if not size or edge.device_children:
        return None
    end = edge.start + size
    tails = edge.tail_depths
    if (tails is not None and tails[-1] == end) or (edge.pins and pinned_end(edge) >= end):
        return None
    tick = edge.stamp_tick if edge.older_stamps is None and edge.stamp_end >= end else stamped(edge, end)[0]
    return tick if edge.host_blocks >= size else tick + UNBACKED


def _tail_key(snapshot: Snapshot) -> int | None:
    if snapshot.tail_pages is None or snapshot.pins:
        return None
    return snapshot.tick if snapshot.status & HOST else snapshot.tick + UNBACKED


def _dead_key(edge: Edge) -> int | None:
    if not edge.host_blocks or edge.host_children:
        return None
    end = edge.start + edge.host_blocks
    if live_end(edge) >= end or (edge.pins and pinned_end(edge) >= end):
        return None
    return stamped(edge, end)[0]


def _host_superseded_key(snapshot: Snapshot) -> int | None:
    return snapshot.superseded or None if snapshot.status & HOST and not snapshot.pins else None


def _host_retained_key(snapshot: Snapshot) -> tuple[float, int] | None:
    if snapshot.superseded or snapshot.pins or not snapshot.status & HOST:
        return None
    return snapshot.value, snapshot.hit_tick


def _slot_superseded_key(snapshot: Snapshot) -> int | None:
    return snapshot.superseded or None if snapshot.slot is not None and not snapshot.pins else None


def _slot_unbacked_key(snapshot: Snapshot) -> tuple[float, int] | None:
    if snapshot.slot is None or snapshot.pins or snapshot.superseded or snapshot.status & HOST:
        return None
    return snapshot.value, snapshot.hit_tick


def _slot_backed_key(snapshot: Snapshot) -> int | None:
    if snapshot.slot is None or snapshot.pins or snapshot.superseded or not snapshot.status & HOST:
        return None
    return snapshot.hit_tick
