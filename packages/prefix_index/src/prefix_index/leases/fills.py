"""Copies on their way: a fill owns its interval of blocks, or its snapshot's copy, from `begin_fill` until it lands.

A filling copy counts as held, so lengths stay lengths; the fill remembers which part of a length is not there yet, and
pins it. A fill can be undone only while nothing was committed or filled below it since::

    device length   |======== resident ========|--- filling (a fill) ---|      abort: back to the bar
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prefix_index.errors import AbortTooLate, InvalidArgument, WrongState
from prefix_index.events import Feed
from prefix_index.leases.lease import Lease
from prefix_index.match import Owner
from prefix_index.retention.eviction import Eviction, FreedHandles
from prefix_index.retention.pins import Pins
from prefix_index.tree.records import (
    DEVICE_IMAGE,
    DEVICE_TAIL,
    FILLING_DEVICE,
    FILLING_HOST,
    HOST,
    Edge,
    Hold,
    Snapshot,
    edge_at,
    held,
    pinned_device_blocks,
    stamp_path,
)
from prefix_index.tree.tree import Tree
from prefix_index.types import Freed, Pages, Span, Tier, count, page_list


class Fill:
    """Copies in flight. Pins its path, and its snapshot if it has one, until `land` or `abort`."""

    __slots__ = ("_fills_slot", "_fills_tail", "_first", "_hold", "_owner", "_snapshot", "_tier")

    def __init__(
        self,
        owner: Owner,
        tier: Tier,
        hold: Hold,
        first: int,
        snapshot: Snapshot | None = None,
        fills_slot: bool = False,
        fills_tail: bool = False,
    ) -> None:
        self._owner = owner
        self._tier = tier
        self._hold = hold
        self._first = first
        self._snapshot = snapshot
        self._fills_slot = fills_slot  # a snapshot's image is on its way into a slot
        self._fills_tail = fills_tail  # a snapshot's tail is on its way into pages

    @property
    def open(self) -> bool:
        """Whether the copies are still on their way."""
        return self._hold.edge is not None

    @property
    def tier(self) -> Tier:
        """Where the copies go."""
        return self._tier

    @property
    def blocks(self) -> Span:
        """(first block, end block) of the path being filled; empty for a snapshot's copies."""
        return self._first, self._hold.depth

    def _own_edges(self) -> list[Edge]:
        """The edges its blocks lie in, deepest first."""
        edges = []
        edge = self._hold.edge
        while edge is not None and edge.end > self._first:
            edges.append(edge)
            edge = edge.parent
        return edges

    def __repr__(self) -> str:
        what = "snapshot" if self._snapshot is not None else f"blocks {self._first}..{self._hold.depth}"
        return f"<fill of {what} to the {self._tier.value}, {'open' if self.open else 'closed'}>"


class Fills:
    """Begins, lands and aborts fills.

    Attributes:
        in_flight: the open fills, oldest first.
    """

    __slots__ = ("_eviction", "_feed", "_owner", "_pins", "_tree", "in_flight")

    def __init__(self, tree: Tree, feed: Feed, pins: Pins, eviction: Eviction, owner: Owner) -> None:
        self._tree = tree
        self._feed = feed
        self._pins = pins
        self._eviction = eviction
        self._owner = owner
        self.in_flight: dict[Fill, None] = {}

    def blocks_to_device(self) -> Iterator[tuple[int, Hold]]:
        """First block and hold of every fill of blocks to the device."""
        for fill in self.in_flight:
            if fill._snapshot is None and fill._tier is Tier.DEVICE:
                yield fill._first, fill._hold

    def filling_blocks(self) -> set[tuple[Edge, Tier, int]]:
        """(edge, tier, depth) of every block whose copy is still on its way."""
        return {
            (edge, fill._tier, depth)
            for fill in self.in_flight
            if fill._snapshot is None
            for edge in fill._own_edges()
            for depth in range(max(edge.start, fill._first), min(edge.end, fill._hold.depth))
        }

    # ------------------------------------------------------------------ beginning

    def begin_blocks(self, lease: Lease, tier: Tier, handles: Sequence[Pages]) -> Fill:
        """Give `handles` to the next blocks of the lease's path without a copy in `tier`, and pin the path to them."""
        tree = self._tree
        pools = tree.geometry.num_pools if tier is Tier.DEVICE else 1
        flat = page_list("begin_fill", handles, pools, len(handles))
        lane = lease._hold
        assert lane.edge is not None
        first = min(held(lane.edge, tier), lane.depth)
        missing = lane.depth - first
        if not 0 < len(handles) <= missing:
            raise InvalidArgument(
                f"begin_fill: {missing} blocks lack a copy on the {tier.value}, got {len(handles)} handles"
            )
        end = first + len(handles)
        hold = Hold(edge_at(lane, end)[0], end)
        self._pins.pin(hold)
        fill = Fill(self._owner, tier, hold, first)
        for edge in reversed(fill._own_edges()):
            begin = max(first, edge.start)
            stop = min(end, edge.end)
            run = flat[(begin - first) * pools : (stop - first) * pools]
            if tier is Tier.DEVICE:
                tree.add_device_copies(edge, run)
            else:
                tree.add_host_copies(edge, run)
        self.in_flight[fill] = None
        return fill

    def begin_snapshot(self, snapshot: Snapshot, tier: Tier, handles: tuple[Pages, ...], slot: int | None) -> Fill:
        """Give a snapshot the handles its copies are on their way to, and pin it and its path."""
        flat = page_list("begin_fill", handles, 1, len(handles))
        if slot is not None:
            slot = count("begin_fill", "slot", slot)
        if snapshot.status & (FILLING_DEVICE | FILLING_HOST):
            raise WrongState("begin_fill: one fill of a snapshot at a time, got one in flight")
        if tier is Tier.HOST:
            self._check_to_host(snapshot, flat, slot)
        else:
            self._check_to_device(snapshot, flat, slot)
        edge = snapshot.edge
        assert edge is not None
        hold = Hold(edge, snapshot.depth)
        self._pins.pin(hold)
        self._pins.pin_snapshot(snapshot)
        if tier is Tier.HOST:
            snapshot.slabs = tuple(flat)
            snapshot.set_status(snapshot.status | FILLING_HOST)
        else:
            copies = FILLING_DEVICE
            if slot is not None:
                snapshot.slot = slot
                copies |= DEVICE_IMAGE
            if flat:
                self._tree.add_tail_copy(snapshot, tuple(flat))
                copies |= DEVICE_TAIL
            snapshot.set_status(snapshot.status | copies)
        fill = Fill(self._owner, tier, hold, snapshot.depth, snapshot, slot is not None, bool(flat))
        self.in_flight[fill] = None
        return fill

    def _check_to_host(self, snapshot: Snapshot, slabs: list[int], slot: int | None) -> None:
        expected = self._tree.geometry.image_slabs + bool(snapshot.tail)
        if snapshot.status & HOST or slot is not None:
            raise WrongState(f"begin_fill: the snapshot must have no Host copy and take no slot, got slot {slot!r}")
        if snapshot.slot is None or (snapshot.tail and snapshot.tail_pages is None):
            raise WrongState("begin_fill: image and tail must be on the device to be copied, got one that is not")
        if len(slabs) != expected:
            raise InvalidArgument(f"begin_fill: image and tail take {expected} slabs, got {len(slabs)}")

    def _check_to_device(self, snapshot: Snapshot, pages: list[int], slot: int | None) -> None:
        edge = snapshot.edge
        assert edge is not None
        if not snapshot.status & HOST:
            raise WrongState("begin_fill: a device copy is made from a Host copy, got a snapshot without")
        if (slot is None and not pages) or (slot is not None and snapshot.slot is not None):
            raise WrongState(f"begin_fill: only an image the device lacks is filled, got slot {slot!r}")
        if not pages:
            return
        if snapshot.tail_pages is not None or not snapshot.tail:
            raise WrongState(f"begin_fill: only a tail the device lacks is filled, got pages {tuple(pages)!r}")
        num_pools = self._tree.geometry.num_pools
        if len(pages) != num_pools:
            raise InvalidArgument(f"begin_fill: a tail takes {num_pools} pages, got {tuple(pages)!r}")
        if held(edge, Tier.DEVICE) < snapshot.depth:
            raise WrongState("begin_fill: the path must be held on the device before its tail, got one that is not")

    # ------------------------------------------------------------------ ending

    def land(self, fill: Fill) -> None:
        """The copies are there. A device copy counts as used now; a Host copy changes no recency."""
        tree = self._tree
        hold = fill._hold
        edge = hold.edge
        assert edge is not None
        snapshot = fill._snapshot
        if snapshot is None:
            if fill._tier is Tier.DEVICE:
                stamp_path(edge, hold.depth, tree.tick())
            if not self._feed.silent:
                self._feed.stored_path(reversed(fill._own_edges()), fill._tier, fill._first, hold.depth)
        else:
            if fill._tier is Tier.HOST:
                snapshot.set_status(snapshot.status & ~FILLING_HOST | HOST)
            else:
                snapshot.set_status(snapshot.status & ~FILLING_DEVICE)
                if fill._fills_tail:
                    snapshot.tick = tree.tick()
            self._pins.unpin_snapshot(snapshot)
        self._pins.unpin(hold)
        del self.in_flight[fill]

    def abort(self, fill: Fill) -> Freed:
        """Undo a fill and give its handles back, deepest first. Raises AbortTooLate, changing nothing."""
        freed = FreedHandles()
        if fill._snapshot is None:
            self._abort_blocks(fill, freed)
        elif fill._tier is Tier.HOST:
            self._abort_to_host(fill._snapshot, freed)
        else:
            self._abort_to_device(fill, fill._snapshot, freed)
        self._pins.unpin(fill._hold)
        del self.in_flight[fill]
        return freed.freeze()

    def _abort_blocks(self, fill: Fill, freed: FreedHandles) -> None:
        for edge in _undoable_edges(fill):
            size = min(fill._hold.depth, edge.end) - max(fill._first, edge.start)
            if fill._tier is Tier.HOST:
                self._eviction.take_slabs(edge, size, freed)
            else:
                before = pinned_device_blocks(edge)
                self._eviction.take_pages(edge, size, freed)
                self._tree.pinned_blocks += pinned_device_blocks(edge) - before

    def _abort_to_host(self, snapshot: Snapshot, freed: FreedHandles) -> None:
        assert snapshot.slabs is not None
        freed.slabs.extend(snapshot.slabs)
        snapshot.slabs = None
        snapshot.set_status(snapshot.status & ~FILLING_HOST)
        self._pins.unpin_snapshot(snapshot)

    def _abort_to_device(self, fill: Fill, snapshot: Snapshot, freed: FreedHandles) -> None:
        copies = FILLING_DEVICE
        if fill._fills_slot:
            assert snapshot.slot is not None
            freed.slots.append(snapshot.slot)
            snapshot.slot = None
            copies |= DEVICE_IMAGE
        snapshot.set_status(snapshot.status & ~copies)
        if fill._fills_tail:
            self._eviction.release_tail(snapshot, freed)
            self._tree.pinned_tails -= 1
        self._tree.epoch += 1
        self._pins.unpin_snapshot(snapshot)


def _undoable_edges(fill: Fill) -> list[Edge]:
    """The edges of a block fill, deepest first, if the fill is still the deepest thing its tier holds there."""
    on_device = fill._tier is Tier.DEVICE
    hold = fill._hold
    edges = fill._own_edges()
    for edge in edges:
        size = edge.device_blocks if on_device else edge.host_blocks
        children = edge.device_children if on_device else edge.host_children
        clean = children == (edge is not hold.edge) and size == min(hold.depth, edge.end) - edge.start
        if on_device and edge.tail_depths is not None and edge.tail_depths[-1] > fill._first:
            clean = False
        if not clean:
            raise AbortTooLate(f"abort: nothing may be committed or filled below {fill!r}, got deeper copies")
    return edges
