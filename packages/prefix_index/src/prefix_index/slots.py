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


class SlotOrder:
    """Three queues, one per step of the claim; an unpinned snapshot with a slot is in exactly one."""

    __slots__ = ("_backed", "_core", "_lone", "_superseded")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._superseded: LazyHeap[Snapshot] = LazyHeap(_superseded_key)
        self._lone: LazyHeap[Snapshot] = LazyHeap(_lone_key)
        self._backed: LazyHeap[Snapshot] = LazyHeap(_backed_key)

    def offer(self, snapshot: Snapshot) -> None:
        """Queue a snapshot where it belongs. Its entry elsewhere is stale: it has no key there any more."""
        if snapshot.slot is None or snapshot.pins:
            return
        queued = snapshot.slot_queued
        if snapshot.superseded:
            snapshot.slot_queued = self._superseded.renew(queued, snapshot.superseded, snapshot)
        elif snapshot.where & HOST:
            snapshot.slot_queued = self._backed.renew(queued, snapshot.hit_tick, snapshot)
        else:
            snapshot.slot_queued = self._lone.renew(queued, (snapshot.value, snapshot.hit_tick), snapshot)

    def claim(self, claim: float, given: Given) -> bool:
        """Free one slot for something worth `claim`. False when nothing worth no more is unpinned."""
        core = self._core
        worth = core.worth
        worth.queue_superseded()
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


def _superseded_key(snapshot: Snapshot) -> int | None:
    return snapshot.superseded or None if snapshot.slot is not None and not snapshot.pins else None


def _lone_key(snapshot: Snapshot) -> tuple[float, int] | None:
    if snapshot.slot is None or snapshot.pins or snapshot.superseded or snapshot.where & HOST:
        return None
    return snapshot.value, snapshot.hit_tick


def _backed_key(snapshot: Snapshot) -> int | None:
    if snapshot.slot is None or snapshot.pins or snapshot.superseded or not snapshot.where & HOST:
        return None
    return snapshot.hit_tick
