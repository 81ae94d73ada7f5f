"""Pages, slots and slabs: free lists over both tiers, and taking back what the index gives up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from prefix_index import Freed, Lease, PrefixIndex, SnapshotHandle

from ..host import HostTier
from ..memory import DeviceMemory, IdPool

__all__ = ["Allocator"]


class Allocator:
    """Takes what is free first and makes the index give up what is short.

    Deliberately knows no sequences and no tokens. At most ``snapshot_limit`` slots are the snapshots', so that they
    never take a lane's.
    """

    def __init__(self, memory: DeviceMemory, index: PrefixIndex, host: HostTier | None, *, snapshot_limit: int) -> None:
        self._index = index
        self._host = host
        self.pages = IdPool("KV pages", memory.pages.shape[0])
        self.slots = IdPool("state slots", memory.states.shape[0])
        self._snapshot_limit = snapshot_limit
        self.snapshot_slots = 0

    def page_room(self) -> int:
        """Pages that are free or can be made free."""
        return len(self.pages) + self._index.evictable_device_pages

    def take_pages(self, count: int) -> list[int]:
        """Take pages; the caller has checked ``page_room``."""
        short = count - len(self.pages)
        if short > 0:
            self.reclaim(self._index.evict_device(short))
        return self.pages.take(count)

    def take_backed_pages(self, count: int) -> list[int]:
        """Take up to ``count`` pages, free ones and those of blocks and tails that the Host holds as well."""
        short = count - len(self.pages)
        if short > 0:
            self.reclaim(self._index.evict_device(short, backed_only=True))
        return self.pages.take(min(count, len(self.pages)))

    def take_slabs(self, count: int, *, claim: float, protect: Iterable[SnapshotHandle] = ()) -> tuple[int, ...]:
        """Take up to ``count`` slabs for something worth ``claim``; fewer where nothing worth less gives way."""
        if self._host is None:
            return ()
        short = count - self._host.num_free
        if short > 0:
            self.reclaim(self._index.evict_host(short, protect, claim))
        return self._host.acquire(min(count, self._host.num_free))

    def give_back_slabs(self, slabs: tuple[int, ...]) -> None:
        if self._host is not None:
            self._host.release(slabs)

    def claim_snapshot_slot(self, lease: Lease, frontier: int) -> bool:
        """Make room for one more snapshot, at ``frontier`` of the lease; a less valuable one gives way if need be."""
        if self.snapshot_slots < self._snapshot_limit:
            return True
        freed = self._index.claim_slot(self._index.worth(lease, frontier))
        if freed is None:
            return False
        self.reclaim(freed)
        return True

    def take_snapshot_slot(self) -> int:
        """A slot for a snapshot; room was claimed."""
        (slot,) = self.slots.take(1)
        self.snapshot_slots += 1
        return slot

    def drop_snapshot_slot(self, slot: int) -> None:
        self.slots.give_back([slot])
        self.snapshot_slots -= 1

    def require_all_free(self) -> None:
        """Raise RuntimeError unless every page, slot and slab is free."""
        pools = {pool.name: (len(pool), pool.capacity) for pool in (self.pages, self.slots)}
        if self._host is not None:
            pools["slabs"] = (self._host.num_free, self._host.num_slabs)
        for name, (free, total) in pools.items():
            if free != total:
                raise RuntimeError(f"{name}: all {total} must be free, got {free}")

    def reclaim(self, freed: Freed) -> None:
        """Everything the index gave up is free again."""
        self.pages.give_back(cast(tuple[int, ...], freed.pages))  # one pool: a block's device copy is one page
        self.slots.give_back(freed.slots)
        self.snapshot_slots -= len(freed.slots)
        if self._host is not None:
            self._host.release(freed.slabs)
