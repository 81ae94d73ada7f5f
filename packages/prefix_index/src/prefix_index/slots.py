"""Who gives up a device snapshot slot: the order of a claim.

1. the snapshot superseded longest ago; it keeps its Host copy or, without one, is lost;
2. the device-only snapshot worth least, if the claim is worth at least as much; it is lost and L rises to its value;
3. the least recently hit snapshot with a Host copy, which keeps that copy.

Pinned snapshots are passed over. Free slots are the caller's and are used before anybody claims.
"""

from __future__ import annotations

from prefix_index.core import Core, Given
from prefix_index.nodes import HOST, Snapshot
from prefix_index.order import LazyHeap

Key = tuple[int, float, int]


class SlotOrder:
    """Three queues, one per step of the claim; a snapshot with a slot is in exactly one."""

    __slots__ = ("_backed", "_core", "_lone", "_superseded")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._superseded: LazyHeap[Snapshot] = LazyHeap(_key)
        self._lone: LazyHeap[Snapshot] = LazyHeap(_key)
        self._backed: LazyHeap[Snapshot] = LazyHeap(_key)

    def offer(self, snapshot: Snapshot) -> None:
        key = _key(snapshot)
        if key is not None:
            heap = (self._superseded, self._lone, self._backed)[key[0]]
            snapshot.slot_queued = heap.renew(snapshot.slot_queued, key, snapshot)

    def claim(self, claim: float, given: Given) -> bool:
        """Free one slot for something worth `claim`. False when nothing worth no more is unpinned."""
        core = self._core
        worth = core.worth
        victim = self._superseded.peek()
        if victim is None:
            worth.flush()  # queues every retained owner under its present worth
            victim = self._lone.peek()
            if victim is not None and victim.value <= claim:
                core.inflation = max(core.inflation, victim.value)
                worth.drop(victim, given)
                return True
            victim = self._backed.peek()
        if victim is None:
            return False
        if victim.where & HOST:
            worth.drop_slot(victim, given)
        else:
            worth.drop(victim, given)
        return True

    def in_order(self) -> list[Snapshot]:
        """Next victim first, whatever the claim. For checks and digests."""
        return [*self._superseded.in_order(), *self._lone.in_order(), *self._backed.in_order()]


def _key(snapshot: Snapshot) -> Key | None:
    if snapshot.slot is None or snapshot.pins:
        return None
    if snapshot.superseded:
        return 0, snapshot.superseded, 0
    if snapshot.where & HOST:
        return 2, snapshot.hit_tick, 0
    return 1, snapshot.value, snapshot.hit_tick
