"""A priority queue whose entries may go stale: victims come from a heap, never from a scan."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Key = Any
Entry = list[Any]
"""[key, sequence number, item]; the item is None once the entry is dead."""


class LazyHeap(Generic[T]):
    """Least key first. `current(item)` says the key under which an item belongs here now, or None when it does not;
    an entry made under another key dies when it surfaces.

    An item keeps the entry it was given and asks for a new one through `renew` whenever its key may have changed. A
    removed item kills its entry with `kill`, so a dead item is referenced by no heap. Deliberately lacks membership and
    length: the items themselves answer those. Dead entries are swept once they outnumber the live.
    """

    __slots__ = ("_count", "_current", "_heap", "_limit")

    def __init__(self, current: Callable[[T], Key | None]) -> None:
        self._current = current
        self._heap: list[Entry] = []
        self._count = 0
        self._limit = 128

    def renew(self, entry: Entry | None, key: Key, item: T) -> Entry:
        """The live entry of `item` under `key`: `entry` where it still is that, else a new one. O(log n) amortised."""
        if entry is not None:
            if entry[2] is item and entry[0] == key:
                return entry
            entry[2] = None
        return self.add(key, item)

    def add(self, key: Key, item: T) -> Entry:
        """The entry of an item that has none. O(log n) amortised."""
        self._count += 1
        made: Entry = [key, self._count, item]
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


def kill(entry: Entry | None) -> None:
    """Let an entry forget its item."""
    if entry is not None:
        entry[2] = None
