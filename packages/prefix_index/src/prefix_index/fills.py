"""Copies on their way: a fill owns its interval of blocks, or its snapshot's copy, from `begin_fill` until it lands.

A filling copy counts as held, so lengths stay lengths; the ticket remembers which part of a length is not there yet,
and pins it. A fill can be undone only while nothing was committed or filled below it since::

    device length   |======== resident ========|--- filling (ticket) ---|      abort: back to the bar
"""

from __future__ import annotations

from collections.abc import Sequence

from prefix_index.core import Core, Given, anchor
from prefix_index.errors import AbortTooLate, InvalidArgument, WrongState
from prefix_index.nodes import (
    DEVICE_IMAGE,
    DEVICE_TAIL,
    FILLING_DEVICE,
    FILLING_HOST,
    HOST,
    Edge,
    Hold,
    Snapshot,
    pinned_device_blocks,
)
from prefix_index.values import Pages, Tier, page_list


class Ticket:
    """A fill in flight. Pins its path, and its snapshot if it has one, until `land` or `abort`."""

    __slots__ = ("_first", "_hold", "_owner", "_slot", "_snapshot", "_tail", "_tier")

    def __init__(
        self, owner: object, tier: Tier, hold: Hold, first: int, snapshot: Snapshot | None, slot: bool, tail: bool
    ) -> None:
        self._owner = owner
        self._tier = tier
        self._hold = hold
        self._first = first
        self._snapshot = snapshot
        self._slot = slot  # a snapshot's image is on its way into a slot
        self._tail = tail  # a snapshot's tail is on its way into pages

    @property
    def open(self) -> bool:
        """Whether the copies are still on their way."""
        return self._hold.edge is not None

    @property
    def tier(self) -> Tier:
        """Where the copies go."""
        return self._tier

    @property
    def blocks(self) -> tuple[int, int]:
        """(first block, end block) of the path being filled; empty for a snapshot's copies."""
        return self._first, self._hold.depth

    def __repr__(self) -> str:
        what = "snapshot" if self._snapshot is not None else f"blocks {self._first}..{self._hold.depth}"
        return f"<fill of {what} to the {self._tier.value}, {'open' if self.open else 'closed'}>"


def held(edge: Edge, tier: Tier) -> int:
    """How many blocks of the path to the end of `edge` the tier holds. O(edges)."""
    at: Edge | None = edge
    while at is not None:
        size = at.dev if tier is Tier.DEVICE else at.host
        if size:
            return at.start + size
        at = at.parent
    return 0


def begin_blocks(core: Core, owner: object, lane: Hold, tier: Tier, handles: Sequence[Pages]) -> Ticket:
    """Give `handles` to the next blocks of the lane's path without a copy in `tier`, and pin the path up to them."""
    pools = core.geometry.num_pools if tier is Tier.DEVICE else 1
    flat = page_list("begin_fill", handles, pools, len(handles))
    assert lane.edge is not None
    first = min(held(lane.edge, tier), lane.depth)
    missing = lane.depth - first
    if not 0 < len(handles) <= missing:
        raise InvalidArgument(
            f"begin_fill: {missing} blocks lack a copy on the {tier.value}, got {len(handles)} handles"
        )
    end = first + len(handles)
    hold = Hold(anchor(lane, end)[0], end)
    core.pin(hold)
    part: list[Edge] = []
    at = hold.edge
    while at is not None and at.end > first:
        part.append(at)
        at = at.parent
    for edge in reversed(part):
        begin = max(first, edge.start)
        end = min(hold.depth, edge.end)
        run = flat[(begin - first) * pools : (end - first) * pools]
        if tier is Tier.DEVICE:
            core.hold_on_device(edge, run)
        else:
            hold_on_host(core, edge, run)
    ticket = Ticket(owner, tier, hold, first, None, False, False)
    core.tickets[ticket] = None
    return ticket


def hold_on_host(core: Core, edge: Edge, slabs: list[int]) -> None:
    """Give `slabs` to the next blocks of `edge` without a Host copy. The path above must be held."""
    if not edge.host:
        assert edge.parent is not None
        edge.parent.hbelow += 1
    edge.slabs += slabs
    edge.host += len(slabs)
    core.host_blocks += len(slabs)


def begin_snapshot(
    core: Core, owner: object, snapshot: Snapshot, tier: Tier, handles: tuple[Pages, ...], slot: int | None
) -> Ticket:
    """Give a snapshot the handles its copies are on their way to, and pin it and its path."""
    flat = page_list("begin_fill", handles, 1, len(handles))
    if slot is not None and slot < 0:
        raise InvalidArgument(f"begin_fill: a slot must not be negative, got {slot!r}")
    if snapshot.where & (FILLING_DEVICE | FILLING_HOST):
        raise WrongState("begin_fill: one fill of a snapshot at a time, got one in flight")
    if tier is Tier.HOST:
        _check_to_host(core, snapshot, flat, slot)
    else:
        _check_to_device(core, snapshot, flat, slot)
    edge = snapshot.edge
    assert edge is not None
    hold = Hold(edge, snapshot.at)
    core.pin(hold)
    core.pin_snapshot(snapshot)
    if tier is Tier.HOST:
        snapshot.slabs = tuple(flat)
        snapshot.set_where(snapshot.where | FILLING_HOST)
    else:
        copies = FILLING_DEVICE
        if slot is not None:
            snapshot.slot = slot
            copies |= DEVICE_IMAGE
        if flat:
            core.hold_tail(snapshot, tuple(flat))
            copies |= DEVICE_TAIL
        snapshot.set_where(snapshot.where | copies)
    ticket = Ticket(owner, tier, hold, snapshot.at, snapshot, slot is not None, bool(flat))
    core.tickets[ticket] = None
    return ticket


def _check_to_host(core: Core, snapshot: Snapshot, slabs: list[int], slot: int | None) -> None:
    expected = core.geometry.image_slabs + bool(snapshot.tail)
    if snapshot.where & HOST or slot is not None:
        raise WrongState(f"begin_fill: the snapshot must have no Host copy and take no slot, got slot {slot!r}")
    if snapshot.slot is None or (snapshot.tail and snapshot.tail_pages is None):
        raise WrongState("begin_fill: image and tail must be on the device to be copied, got one that is not")
    if len(slabs) != expected:
        raise InvalidArgument(f"begin_fill: image and tail take {expected} slabs, got {len(slabs)}")


def _check_to_device(core: Core, snapshot: Snapshot, pages: list[int], slot: int | None) -> None:
    edge = snapshot.edge
    assert edge is not None
    if not snapshot.where & HOST:
        raise WrongState("begin_fill: a device copy is made from a Host copy, got a snapshot without")
    if (slot is None and not pages) or (slot is not None and snapshot.slot is not None):
        raise WrongState(f"begin_fill: only an image the device lacks is filled, got slot {slot!r}")
    if not pages:
        return
    if snapshot.tail_pages is not None or not snapshot.tail:
        raise WrongState(f"begin_fill: only a tail the device lacks is filled, got pages {tuple(pages)!r}")
    if len(pages) != core.geometry.num_pools:
        raise InvalidArgument(f"begin_fill: a tail takes {core.geometry.num_pools} pages, got {tuple(pages)!r}")
    if held(edge, Tier.DEVICE) < snapshot.at:
        raise WrongState("begin_fill: the path must be held on the device before its tail, got one that is not")


def land(core: Core, ticket: Ticket) -> None:
    """The copies are there. A device copy counts as used now; a Host copy changes no recency."""
    hold = ticket._hold
    edge = hold.edge
    assert edge is not None
    snapshot = ticket._snapshot
    if snapshot is not None:
        if ticket._tier is Tier.HOST:
            snapshot.set_where(snapshot.where & ~FILLING_HOST | HOST)
        else:
            snapshot.set_where(snapshot.where & ~FILLING_DEVICE)
            if ticket._tail:
                snapshot.tick = core.tick()
        core.unpin_snapshot(snapshot)
    elif ticket._tier is Tier.DEVICE:
        core.stamp(edge, hold.depth, core.tick())
    if snapshot is None and not core.feed.silent:
        at: Edge | None = hold.edge
        part = []
        while at is not None and at.end > ticket._first:
            part.append(at)
            at = at.parent
        for edge in reversed(part):
            core.feed.stored(edge, ticket._tier, max(edge.start, ticket._first), min(edge.end, hold.depth))
    core.unpin(hold)
    del core.tickets[ticket]


def abort(core: Core, ticket: Ticket) -> Given:
    """Undo a fill and give its handles back, deepest first. Raises AbortTooLate, changing nothing."""
    given = Given()
    hold = ticket._hold
    snapshot = ticket._snapshot
    if snapshot is None:
        part = _own_part(ticket)
        for edge in part:
            size = min(hold.depth, edge.end) - max(ticket._first, edge.start)
            if ticket._tier is Tier.HOST:
                core.host.take_slabs(edge, size, given)
            else:
                before = pinned_device_blocks(edge)
                core.device.take_pages(edge, size, given)
                core.pinned_blocks += pinned_device_blocks(edge) - before
    elif ticket._tier is Tier.HOST:
        assert snapshot.slabs is not None
        given.slabs.extend(snapshot.slabs)
        snapshot.slabs = None
        snapshot.set_where(snapshot.where & ~FILLING_HOST)
        core.unpin_snapshot(snapshot)
    else:
        copies = FILLING_DEVICE
        if ticket._slot:
            assert snapshot.slot is not None
            given.slots.append(snapshot.slot)
            snapshot.slot = None
            copies |= DEVICE_IMAGE
        snapshot.set_where(snapshot.where & ~copies)
        if ticket._tail:
            core.device.release_tail(snapshot, given)
            core.pinned_tails -= 1
        core.epoch += 1
        core.unpin_snapshot(snapshot)
    core.unpin(hold)
    del core.tickets[ticket]
    return given


def _own_part(ticket: Ticket) -> list[Edge]:
    """The edges of a block fill, deepest first, if the fill is still the deepest thing its tier holds there."""
    on_device = ticket._tier is Tier.DEVICE
    hold = ticket._hold
    edge = hold.edge
    assert edge is not None
    part = []
    at: Edge | None = edge
    while at is not None and at.end > ticket._first:
        size = at.dev if on_device else at.host
        below = at.below if on_device else at.hbelow
        clean = below == (at is not edge) and size == min(hold.depth, at.end) - at.start
        if on_device and at.tails is not None and at.tails[-1] > ticket._first:
            clean = False
        if not clean:
            raise AbortTooLate(f"abort: nothing may be committed or filled below {ticket!r}, got deeper copies")
        part.append(at)
        at = at.parent
    return part
