"""What happened, for somebody who follows from outside: enough to know which prefixes can be resumed here.

A follower keeps blocks by hash (the hash chains from the namespace, whose bytes never leave the index) and snapshots by
anchor, tail and extra. It may start late: `PrefixIndex.state_events` describes what is there as the events that would
have led to it, and carries the sequence number from which to go on.

Hashes are 64-bit ints, tokens and tails int32 little-endian bytes, a depth a block's place in its path from 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefix_index.nodes import Edge, Root, Snapshot
from prefix_index.runs import block_rows, hash_before
from prefix_index.values import SnapshotKind, Tier

if TYPE_CHECKING:
    from prefix_index.core import Core


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block has a resident copy in `tier`. Its parent is a block, or the namespace's own hash."""

    sequence: int
    tier: Tier
    block_hash: int
    parent_hash: int
    depth: int
    tokens: bytes
    extra: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block has no copy in `tier` any more."""

    sequence: int
    tier: Tier
    block_hash: int


@dataclass(frozen=True, slots=True)
class SnapshotPublished:
    """A prompt that starts with these tokens can be resumed here. `anchor_hash` names the last whole block. Told again
    when the snapshot becomes of another kind."""

    sequence: int
    anchor_hash: int
    frontier: int
    tail: bytes
    extra: int
    kind: SnapshotKind


@dataclass(frozen=True, slots=True)
class SnapshotDropped:
    """It cannot any more."""

    sequence: int
    anchor_hash: int
    frontier: int
    tail: bytes
    extra: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """Everything of a namespace, named by its hash, is gone."""

    sequence: int
    namespace_hash: int


logger = logging.getLogger(__name__)

Event = BlockStored | BlockRemoved | SnapshotPublished | SnapshotDropped | Cleared
Listener = Callable[[Event], None]


class Subscription:
    """Ends when closed. Listeners run on the index's thread, inside the call that caused the event; they must not call
    the index. One that raises is logged and told no more, since the call goes on: what it knows has a gap from then on.

    error   what it raised, else None
    """

    __slots__ = ("_feed", "_listener", "_open", "error")

    def __init__(self, feed: Feed, listener: Listener) -> None:
        self._feed = feed
        self._listener = listener
        self._open = True
        self.error: Exception | None = None

    def close(self) -> None:
        """Hear no more, not even of what is being told right now. Closing twice is fine."""
        self._open = False
        if self in self._feed.subscriptions:
            self._feed.subscriptions.remove(self)
            self._feed.mute(False)

    def deliver(self, event: Event) -> None:
        if not self._open:
            return
        try:
            self._listener(event)
        except Exception as error:
            self.error = error
            self.close()
            logger.exception("a listener failed and is told no more")


class Feed:
    """Numbers events and hands them to whoever listens. Costs one test per operation while nobody does."""

    __slots__ = ("_core", "sequence", "silent", "subscriptions")

    def __init__(self, core: Core) -> None:
        self._core = core
        self.sequence = 0
        self.subscriptions: list[Subscription] = []
        self.silent = True

    def add(self, listener: Listener) -> Subscription:
        subscription = Subscription(self, listener)
        self.subscriptions.append(subscription)
        self.silent = False
        return subscription

    def mute(self, muted: bool) -> None:
        """Say nothing while a namespace is cleared: one event stands for all."""
        self.silent = muted or not self.subscriptions

    def _tell(self, make: Callable[[int], Event]) -> None:
        self.sequence += 1
        event = make(self.sequence)
        for subscription in tuple(self.subscriptions):
            subscription.deliver(event)

    def stored(self, edge: Edge, tier: Tier, first: int, end: int) -> None:
        """Blocks [first, end) of `edge`, absolute, have a resident copy."""
        if not self.silent:
            for row in block_rows(self._core.tree.scheme, edge, first, end):
                self._tell(lambda sequence, row=row: BlockStored(sequence, tier, *row))  # type: ignore[misc]

    def removed(self, edge: Edge, tier: Tier, first: int, end: int) -> None:
        """Blocks [first, end) of `edge` are about to lose their copy; told deepest first."""
        if not self.silent:
            for block_hash, *_ in reversed(list(block_rows(self._core.tree.scheme, edge, first, end))):
                self._tell(lambda sequence, gone=block_hash: BlockRemoved(sequence, tier, gone))  # type: ignore[misc]

    def published(self, snapshot: Snapshot) -> None:
        if not self.silent:
            name = snapshot_name(self._core, snapshot)
            self._tell(lambda sequence: SnapshotPublished(sequence, *name, snapshot.kind))

    def dropped(self, snapshot: Snapshot) -> None:
        if not self.silent:
            name = snapshot_name(self._core, snapshot)
            self._tell(lambda sequence: SnapshotDropped(sequence, *name))

    def cleared(self, root: Root) -> None:
        if self.subscriptions:
            self._tell(lambda sequence: Cleared(sequence, root.hashed))


def snapshot_name(core: Core, snapshot: Snapshot) -> tuple[int, int, bytes, int]:
    """(anchor's hash, frontier, tail, extra)."""
    assert snapshot.edge is not None
    return hash_before(snapshot.edge, core.tree.scheme, snapshot.at), snapshot.frontier, snapshot.tail, snapshot.extra


def state_events(core: Core) -> tuple[Event, ...]:
    """The present state as events that lead to it, parents first, all with the sequence number reached. O(tree)."""
    sequence = core.feed.sequence
    filling = _filling(core)
    told: list[Event] = []
    for root in core.tree.roots.values():
        edges: list[Edge] = [root]
        for edge in edges:
            child = edge.first
            while child is not None:
                edges.append(child)
                child = child.next
        for edge in edges[1:]:
            for row in block_rows(core.tree.scheme, edge, edge.start, edge.end):
                depth = row[2]
                for tier, size in ((Tier.DEVICE, edge.dev), (Tier.HOST, edge.host)):
                    if depth < edge.start + size and (id(edge), tier, depth) not in filling:
                        told.append(BlockStored(sequence, tier, *row))
        for edge in edges:
            for snapshot in edge.snaps:
                told.append(SnapshotPublished(sequence, *snapshot_name(core, snapshot), snapshot.kind))
    return tuple(told)


def _filling(core: Core) -> set[tuple[int, Tier, int]]:
    """(edge, tier, depth) of every block whose copy is still on its way."""
    found = set()
    for ticket in core.tickets:
        if ticket._snapshot is None:
            at = ticket._hold.edge
            while at is not None and at.end > ticket._first:
                for depth in range(max(at.start, ticket._first), min(at.end, ticket._hold.depth)):
                    found.add((id(at), ticket._tier, depth))
                at = at.parent
    return found
