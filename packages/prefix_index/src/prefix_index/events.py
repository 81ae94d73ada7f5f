"""Events: what happened to an index, told to listeners in enough detail to know which prefixes can be resumed.

A follower keeps blocks by hash (the hash chains from the namespace, whose bytes never leave the index) and snapshots by
anchor, tail and extra. It may start late: `PrefixIndex.state_events` describes what is there as the events that would
have led to it, and carries the sequence number from which to go on.

Hashes are 64-bit ints, tokens and tails int32 little-endian bytes, a depth a block's place in its path from 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prefix_index.prompt import BlockScheme
from prefix_index.tree.records import Edge, Root, Snapshot, edges_below
from prefix_index.tree.tokens import block_rows, hash_before
from prefix_index.types import SnapshotKind, Tier


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
    """A prompt that starts with these tokens can be resumed here. Told again when the snapshot becomes of another kind.

    `anchor_hash` names the last whole block.
    """

    sequence: int
    anchor_hash: int
    frontier: int
    tail: bytes
    extra: int
    kind: SnapshotKind


@dataclass(frozen=True, slots=True)
class SnapshotDropped:
    """The snapshot that `SnapshotPublished` told of is gone."""

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
    """A listener's place in the feed, until it is closed.

    Listeners run on the index's thread, inside the call that caused the event; they must not call the index. A listener
    that raises is logged and told no more, since the call goes on: what it knows has a gap from then on.

    Attributes:
        error: what the listener raised, else None.
    """

    __slots__ = ("_feed", "_listener", "_open", "error")

    def __init__(self, feed: Feed, listener: Listener) -> None:
        self._feed = feed
        self._listener = listener
        self._open = True
        self.error: Exception | None = None

    def close(self) -> None:
        """Deliver nothing more, not even the event being told right now. Closing twice is fine."""
        self._open = False
        self._feed.remove(self)

    def deliver(self, event: Event) -> None:
        """Call the listener, unless the subscription is closed."""
        if not self._open:
            return
        try:
            self._listener(event)
        except Exception as error:
            self.error = error
            self.close()
            logger.exception("a listener failed and is told no more")


class Feed:
    """Numbers events and hands them to the subscriptions. Costs one test per operation while there are none.

    Attributes:
        sequence: number of the latest event.
        silent: whether events need not be made.
    """

    __slots__ = ("_scheme", "_subscriptions", "sequence", "silent")

    def __init__(self, scheme: BlockScheme) -> None:
        self._scheme = scheme
        self._subscriptions: list[Subscription] = []
        self.sequence = 0
        self.silent = True

    def add(self, listener: Listener) -> Subscription:
        """Tell `listener` every event from now on."""
        subscription = Subscription(self, listener)
        self._subscriptions.append(subscription)
        self.silent = False
        return subscription

    def remove(self, subscription: Subscription) -> None:
        """Forget a subscription, if it is not forgotten already."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self.mute(False)

    def mute(self, muted: bool) -> None:
        """Tell nothing while a namespace is cleared: one event stands for all."""
        self.silent = muted or not self._subscriptions

    def _tell(self, make: Callable[[int], Event]) -> None:
        self.sequence += 1
        event = make(self.sequence)
        for subscription in tuple(self._subscriptions):
            subscription.deliver(event)

    def stored(self, edge: Edge, tier: Tier, first: int, end: int) -> None:
        """Blocks [first, end) of `edge`, absolute, have a resident copy."""
        if not self.silent:
            for row in block_rows(self._scheme, edge, first, end):
                self._tell(lambda sequence, row=row: BlockStored(sequence, tier, *row))  # type: ignore[misc]

    def stored_path(self, path: Iterable[Edge], tier: Tier, first: int, end: int) -> None:
        """Blocks [first, end) of a path, whose edges come shallowest first, have a resident copy."""
        for edge in path:
            self.stored(edge, tier, max(first, edge.start), min(end, edge.end))

    def removed(self, edge: Edge, tier: Tier, first: int, end: int) -> None:
        """Blocks [first, end) of `edge` are about to lose their copy; told deepest first."""
        if not self.silent:
            for block_hash, *_ in reversed(list(block_rows(self._scheme, edge, first, end))):
                self._tell(lambda sequence, gone=block_hash: BlockRemoved(sequence, tier, gone))  # type: ignore[misc]

    def published(self, snapshot: Snapshot) -> None:
        """A snapshot was attached, or became of another kind."""
        if not self.silent:
            name = _name(self._scheme, snapshot)
            self._tell(lambda sequence: SnapshotPublished(sequence, *name, snapshot.kind))

    def dropped(self, snapshot: Snapshot) -> None:
        """A snapshot is about to be detached."""
        if not self.silent:
            name = _name(self._scheme, snapshot)
            self._tell(lambda sequence: SnapshotDropped(sequence, *name))

    def cleared(self, root: Root) -> None:
        """Everything below `root` is gone."""
        if self._subscriptions:
            self._tell(lambda sequence: Cleared(sequence, root.hashed))

    def state(self, roots: Iterable[Root], filling: set[tuple[Edge, Tier, int]]) -> tuple[Event, ...]:
        """The present state as events that lead to it, parents first, all with the sequence number reached. O(tree).

        `filling` names the (edge, tier, depth) of every block whose copy is still on its way.
        """
        sequence = self.sequence
        told: list[Event] = []
        for root in roots:
            edges = edges_below(root)
            for edge in edges:
                for row in block_rows(self._scheme, edge, edge.start, edge.end):
                    depth = row[2]
                    for tier, size in ((Tier.DEVICE, edge.device_blocks), (Tier.HOST, edge.host_blocks)):
                        if depth < edge.start + size and (edge, tier, depth) not in filling:
                            told.append(BlockStored(sequence, tier, *row))
            for edge in edges:
                for snapshot in edge.snapshots:
                    told.append(SnapshotPublished(sequence, *_name(self._scheme, snapshot), snapshot.kind))
        return tuple(told)


def _name(scheme: BlockScheme, snapshot: Snapshot) -> tuple[int, int, bytes, int]:
    """(anchor's hash, frontier, tail, extra)."""
    assert snapshot.edge is not None
    return hash_before(snapshot.edge, scheme, snapshot.depth), snapshot.frontier, snapshot.tail, snapshot.extra
