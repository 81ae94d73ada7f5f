"""Giving up: device pages, snapshot slots, Host slabs, whole namespaces. The queues say what goes next.

*Device pages* go from leaves only, so the last copy of anything is lost at a leaf of the tree::

    pages of an edge   |0 1 2 3 4|5 6 7|        evicted right to left; 5 6 7 unbacked, 0..4 backed
    slabs of the edge  |0 1 2 3 4|              losing 7 removes block 7; losing 4 keeps it, on the Host

*Slots*: the snapshot superseded longest ago keeps its Host copy or, without one, is lost; else the device-only snapshot
worth least is lost, if the claim is worth at least as much, and L rises to its value; else the least recently hit
snapshot with a Host copy keeps that copy. Free slots are the caller's and are used before any claim.

*Slabs*: dead blocks go first, then superseded snapshots with every copy they have, then the retained snapshot worth
least, unless it is worth more than the claim; L rises to its value. A snapshot that is complete on the device gives up
its Host copy only. After each snapshot the blocks only it could reach are dead, so these come round again. A dead block
that has a device copy keeps that; otherwise it is gone.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from prefix_index.errors import InvalidArgument, WrongState
from prefix_index.events import Feed
from prefix_index.retention.pins import Pins
from prefix_index.retention.queues import Queues, kill
from prefix_index.retention.valuation import Valuation
from prefix_index.tree.records import (
    DEVICE_IMAGE,
    DEVICE_TAIL,
    HAS_TAIL,
    HOST,
    KIND_SHIFT,
    Edge,
    Root,
    Snapshot,
    edges_below,
    live_end,
    pinned_end,
    stamped,
)
from prefix_index.tree.tree import Tree
from prefix_index.types import Freed, Pages, Tier


class FreedHandles:
    """Collects the handles an operation gives up."""

    __slots__ = ("pages", "slabs", "slots")

    def __init__(self) -> None:
        self.pages: list[Pages] = []
        self.slots: list[int] = []
        self.slabs: list[int] = []

    def freeze(self) -> Freed:
        """What was collected, as the caller gets it."""
        return Freed(tuple(self.pages), tuple(self.slots), tuple(self.slabs))


class Eviction:
    """Takes copies away, and removes what has lost its last one.

    Attributes:
        num_lost: snapshots lost since the index was made.
        num_device, num_slabs, num_claims: device copies and slabs evicted, and slots claimed, since then.
    """

    __slots__ = (
        "_feed",
        "_pins",
        "_queues",
        "_tree",
        "_valuation",
        "num_claims",
        "num_device",
        "num_lost",
        "num_slabs",
    )

    def __init__(self, tree: Tree, feed: Feed, queues: Queues, valuation: Valuation, pins: Pins) -> None:
        self._tree = tree
        self._pins = pins
        self._feed = feed
        self._queues = queues
        self._valuation = valuation
        self.num_lost = self.num_device = self.num_slabs = self.num_claims = 0

    # ------------------------------------------------------------------ device pages

    def evict_device(self, num_blocks: int, protect: Sequence[Snapshot], backed_only: bool) -> Freed:
        """Give up to `num_blocks` device copies; fewer when the rest is pinned, or unbacked and only backed may go."""
        freed = FreedHandles()
        shields = self._pins.shield(protect) if protect else ()
        missing = num_blocks
        queue = self._queues.device
        while missing > 0:
            item = queue.peek()
            if item is None:
                break
            if isinstance(item, Edge):
                if item.host_blocks >= item.device_blocks:
                    missing -= self._evict_backed(item, missing, freed)
                elif backed_only:
                    break  # backed leaves come first, so none is left
                else:
                    missing -= self._evict_unbacked(item, missing, freed)
            else:
                if item.status & HOST:
                    self.release_tail(item, freed)
                elif backed_only:
                    break
                else:
                    self._drop(item, freed)
                missing -= 1
        if shields:
            self._pins.unshield(shields)
        self.num_device += num_blocks - missing
        return freed.freeze()

    def _evict_backed(self, edge: Edge, missing: int, freed: FreedHandles) -> int:
        end = edge.start + edge.device_blocks
        count = min(missing, end - _same_recency(edge, end))
        self._feed.removed(edge, Tier.DEVICE, end - count, end)
        self.take_pages(edge, count, freed)
        self._queues.offer_device(edge)
        return count

    def _evict_unbacked(self, edge: Edge, missing: int, freed: FreedHandles) -> int:
        end = edge.start + edge.device_blocks
        count = min(missing, end - max(_same_recency(edge, end), edge.start + edge.host_blocks))
        size = edge.device_blocks - count
        if edge.snapshots:
            for snapshot in self._tree.detach_below(edge, end - count):
                self._lose(snapshot, freed)
        if not self._feed.silent:
            self._feed.removed(edge, Tier.DEVICE, end - count, end)
        self.take_pages(edge, count, freed)
        self._tree.truncate(edge, size)
        if size:
            self._queues.offer_device(edge)
        else:
            self._forget(edge)
        return count

    def take_pages(self, edge: Edge, count: int, freed: FreedHandles) -> None:
        """Move the last `count` blocks' pages of `edge` into `freed`, deepest first, and lower the counts."""
        tree = self._tree
        pools = tree.geometry.num_pools
        pages = edge.pages[-count * pools :]
        del edge.pages[-count * pools :]
        if pools == 1:
            pages.reverse()
            freed.pages += pages
        else:
            for i in range(len(pages) - pools, -1, -pools):
                freed.pages.append(tuple(pages[i : i + pools]))
        edge.device_blocks -= count
        tree.device_blocks -= count
        tree.epoch += 1
        if not edge.device_blocks:
            parent = edge.parent
            assert parent is not None
            parent.device_children -= 1
            if not parent.device_children:
                self._queues.offer_device(parent)

    def release_tail(self, snapshot: Snapshot, freed: FreedHandles) -> None:
        """Give up the device copy of a tail; the snapshot itself stays."""
        self._take_tail(snapshot, freed)
        snapshot.set_status(snapshot.status & ~DEVICE_TAIL)
        assert snapshot.edge is not None
        self._queues.offer_device(snapshot.edge)

    def _take_tail(self, snapshot: Snapshot, freed: FreedHandles) -> None:
        """Move the pages of a tail into `freed`; the caller marks that the copy is gone and offers the edge."""
        edge = snapshot.edge
        assert snapshot.tail_pages is not None
        assert edge is not None
        assert edge.tail_depths is not None
        pages = snapshot.tail_pages
        freed.pages.append(pages[0] if len(pages) == 1 else pages)
        snapshot.tail_pages = None
        self._tree.device_tails -= 1
        self._tree.epoch += 1
        if len(edge.tail_depths) == 1:
            edge.tail_depths = None
        else:
            del edge.tail_depths[bisect_left(edge.tail_depths, snapshot.depth)]

    # ------------------------------------------------------------------ slots

    def claim_slot(self, claim: float) -> Freed | None:
        """Free one slot for an image worth `claim`; None when every other owner is pinned or worth more."""
        _check_claim("claim_slot", claim)
        freed = FreedHandles()
        queues = self._queues
        self._valuation.queue_superseded()
        victim = queues.slot_superseded.peek()
        if victim is None:
            self._valuation.flush()  # queues every retained owner under its present value
            victim = queues.slot_unbacked.peek()
            if victim is not None and victim.value <= claim:
                self._inflate(victim)
            else:
                victim = queues.slot_backed.peek()
                if victim is None:
                    return None
        if victim.status & HOST:
            self._take_slot(victim, freed)
        else:
            self._drop(victim, freed)
        self.num_claims += 1
        return freed.freeze()

    def _take_slot(self, snapshot: Snapshot, freed: FreedHandles) -> None:
        """Take the device slot from a snapshot that keeps its Host copy; the slot's queue sees that it is gone."""
        assert snapshot.slot is not None
        freed.slots.append(snapshot.slot)
        snapshot.slot = None
        snapshot.set_status(snapshot.status & ~DEVICE_IMAGE)
        self._tree.epoch += 1

    # ------------------------------------------------------------------ slabs

    def evict_host(self, num_slabs: int, protect: Sequence[Snapshot], claim: float) -> Freed:
        """Give up at least `num_slabs` slabs; fewer when it had to stop before, keeping what it had given up."""
        _check_claim("evict_host", claim)
        freed = FreedHandles()
        shields = self._pins.shield(protect)
        queues = self._queues
        while len(freed.slabs) < num_slabs:
            edge = queues.dead.peek()
            if edge is not None:
                self._drop_dead(edge, num_slabs - len(freed.slabs), freed)
                continue
            self._valuation.queue_superseded()
            victim = queues.host_superseded.peek()
            if victim is not None:
                self._drop(victim, freed)
                continue
            self._valuation.flush()
            victim = queues.host_retained.peek()
            if victim is None or victim.value > claim:
                break
            self._inflate(victim)
            if victim.status & DEVICE_IMAGE and (victim.status & DEVICE_TAIL or not victim.status & HAS_TAIL):
                self._take_host_copy(victim, freed)
            else:
                self._drop(victim, freed)
        self._pins.unshield(shields)
        self.num_slabs += len(freed.slabs)
        return freed.freeze()

    def _drop_dead(self, edge: Edge, missing: int, freed: FreedHandles) -> None:
        """Take Host copies from the dead end of an edge, deepest first, as far as recency and backing are the same."""
        end = edge.start + edge.host_blocks
        on_device = edge.device_blocks >= edge.host_blocks
        first = max(live_end(edge), pinned_end(edge), stamped(edge, end)[1])
        if not on_device:
            first = max(first, edge.start + edge.device_blocks)
        count = min(missing, end - first)
        self._feed.removed(edge, Tier.HOST, end - count, end)
        self.take_slabs(edge, count, freed)
        if on_device:
            self._queues.offer_device(edge)  # unbacked from now on
            self._queues.offer_dead(edge)
        elif edge.host_blocks or edge.device_blocks:
            self._tree.truncate(edge, max(edge.host_blocks, edge.device_blocks))
            self._queues.offer_dead(edge)
        else:
            self._forget(edge)
            self._tree.truncate(edge, 0)

    def take_slabs(self, edge: Edge, count: int, freed: FreedHandles) -> None:
        """Move the last `count` slabs of `edge` into `freed`, deepest first, and lower the counts."""
        slabs = edge.slabs[-count:]
        slabs.reverse()
        freed.slabs += slabs
        del edge.slabs[-count:]
        edge.host_blocks -= count
        self._tree.host_blocks -= count
        self._tree.epoch += 1
        if not edge.host_blocks:
            parent = edge.parent
            assert parent is not None
            parent.host_children -= 1
            if not parent.host_children:
                self._queues.offer_dead(parent)

    def _take_host_copy(self, snapshot: Snapshot, freed: FreedHandles) -> None:
        """Take the Host copy of a snapshot that is complete on the device."""
        assert snapshot.slabs is not None
        freed.slabs.extend(snapshot.slabs)
        snapshot.slabs = None
        snapshot.set_status(snapshot.status & ~HOST)
        self._tree.epoch += 1
        self._valuation.offer(snapshot)
        self._queues.offer_tail(snapshot)

    # ------------------------------------------------------------------ whole snapshots, edges and namespaces

    def _inflate(self, victim: Snapshot) -> None:
        """L rises to the value of a retained snapshot that has to go."""
        self._valuation.inflation = max(self._valuation.inflation, victim.value)

    def _drop(self, snapshot: Snapshot, freed: FreedHandles) -> None:
        """Remove a snapshot and give up every copy it has. O(exclusive edges + dependents)."""
        edge = snapshot.edge
        assert edge is not None
        self._tree.detach(snapshot)
        self._lose(snapshot, freed)
        if snapshot.status & DEVICE_TAIL:
            self._queues.offer_device(edge)  # the tail may have been the last thing below

    def _lose(self, snapshot: Snapshot, freed: FreedHandles) -> None:
        """What is left to do for a snapshot that its edge does not list any more."""
        tree = self._tree
        edge = snapshot.edge
        assert edge is not None
        self.num_lost += 1
        if not self._feed.silent:
            self._feed.dropped(snapshot)
        self._valuation.remove(snapshot)
        if snapshot.slot is not None:
            freed.slots.append(snapshot.slot)
        if snapshot.slabs is not None:
            freed.slabs.extend(snapshot.slabs)
        if snapshot.tail_pages is not None:
            self._take_tail(snapshot, freed)
        kill(snapshot.slot_entry, snapshot.host_entry, snapshot.tail_entry)
        if snapshot.companion is not None:
            snapshot.companion.successor = None
            snapshot.companion = None
        if snapshot.successor is not None:
            snapshot.successor.companion = None
            snapshot.successor = None
        snapshot.edge = None
        tree.kinds[snapshot.status >> KIND_SHIFT] -= 1
        tree.epoch += 1
        if tree.host_blocks:
            self._queues.offer_dead_path(edge)
        if edge.parent is None:
            tree.forget_if_empty(edge)

    def _forget(self, edge: Edge) -> None:
        """Let nothing refer to a removed edge."""
        kill(edge.device_entry, edge.dead_entry)
        self._valuation.forget(edge)

    def clear(self, namespace: bytes | None) -> Freed:
        """Give up everything in a namespace, or in all of them for None. Refused while anything of it is pinned."""
        roots = list(self._tree.roots.values()) if namespace is None else [self._tree.roots.get(namespace)]
        chosen = [root for root in roots if root is not None]
        for root in chosen:
            if root.pins:
                raise WrongState(f"clear: no lease may be open in namespace {root.hashed:016x}, got {root.pins} pins")
        freed = FreedHandles()
        for root in chosen:
            self._clear_root(root, freed)
        self._tree.epoch += 1
        return freed.freeze()

    def _clear_root(self, root: Root, freed: FreedHandles) -> None:
        """Give up everything below `root`, deepest first."""
        self._feed.mute(True)
        for edge in reversed(edges_below(root)):
            for snapshot in self._tree.detach_below(edge, edge.start - 1):
                self._lose(snapshot, freed)
            if edge is root:
                break
            if edge.device_blocks:
                self.take_pages(edge, edge.device_blocks, freed)
            if edge.host_blocks:
                self.take_slabs(edge, edge.host_blocks, freed)
            self._tree.truncate(edge, 0)
            self._forget(edge)
        self._tree.forget_if_empty(root)
        self._feed.mute(False)
        self._feed.cleared(root)


def _check_claim(op: str, claim: float) -> None:
    if not claim >= -math.inf:  # NaN, which compares as the greatest claim of all
        raise InvalidArgument(f"{op}: claim must be a number, got {claim!r}")


def _same_recency(edge: Edge, end: int) -> int:
    """How far up the device blocks of a leaf edge may go under one key: to a pin, a tail, or a change of recency."""
    first = stamped(edge, end)[1]
    if edge.pins:
        first = max(first, pinned_end(edge))
    return first if edge.tail_depths is None else max(first, edge.tail_depths[-1])
