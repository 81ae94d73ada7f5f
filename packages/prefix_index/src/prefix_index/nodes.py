"""The records the tree is made of. They hold facts and links; every rule about them lives elsewhere.

An *edge* is a run of blocks without a branch::

    start                                   end          blocks, absolute
      |  b0   b1   b2   b3   b4   b5   b6  |
      |==== device ====>|                               first `dev` blocks have pages
      |====== host ==============>|                     first `host` blocks have slabs
      |-- pinned -->|                                   a length too: the deepest hold inside the edge

Residency of an edge is a length because a block held in a tier has its whole path held there. `max(dev, host)` is
always the whole edge: a block with neither copy does not exist.

Counters named *units* count things directly below or at an edge that carry a property, a child edge counting once
however much it carries: they change along a path only as far as a zero becomes a one, so most updates touch one edge.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from prefix_index.order import Entry
from prefix_index.values import SnapshotKind

NO_SNAPSHOTS: tuple[Any, ...] = ()

# Bits of Snapshot.where. Small integers are shared objects, so a match can keep a copy for free.
DEVICE_IMAGE = 1
DEVICE_TAIL = 2
HOST = 4
FILLING_DEVICE = 8
FILLING_HOST = 16
HAS_TAIL = 32
KIND_SHIFT = 6


class Walked:
    """What a match touches. A base class, so that these fields come first and share a cache line."""

    __slots__ = ("branch", "extras", "first", "next", "snaps", "tokens")

    branch: dict[int, Edge] | None
    extras: tuple[int, ...] | None
    first: Edge | None
    next: Edge | None
    snaps: tuple[Snapshot, ...]
    tokens: bytes


class Edge(Walked):
    """A run of blocks [start, end) below `parent`; snapshots and children hang at its end."""

    __slots__ = (
        "below",  # device units: child edges with device blocks, device tails at this end
        "dead_queued",
        "dev",
        "end",
        "hbelow",  # host units: child edges with host blocks
        "holds",  # holds that end inside this edge, or None
        "host",
        "key",  # hash of the first block
        "last",
        "live",  # units of snapshots
        "lost",  # 1 when the latest snapshot here was lost, 0 once there is one again
        "pages",  # interleaved by pool: page of block i in pool p is pages[i * pools + p]
        "parent",
        "pins",  # holds ending here plus pinned children
        "prev",
        "queued",
        "slabs",
        "start",
        "tick",  # when a lease that covered these blocks was last released
        "twin",  # next child of the same parent with an equal key
        "units",  # units of retained snapshots
    )

    parent: Edge | None
    last: Edge | None
    prev: Edge | None
    twin: Edge | None
    holds: list[Hold] | None
    pages: array[int]
    slabs: array[int] | None
    below: int
    dead_queued: Entry | None
    dev: int
    end: int
    hbelow: int
    host: int
    key: int
    live: int
    lost: int
    pins: int
    queued: Entry | None
    start: int
    tick: int
    units: int

    def __init__(
        self,
        parent: Edge | None,
        key: int,
        start: int,
        end: int,
        tokens: bytes,
        extras: tuple[int, ...] | None,
        pages: array[int],
        dev: int,
    ) -> None:
        self.parent = parent
        self.key = key
        self.start = start
        self.end = end
        self.tokens = tokens
        self.extras = extras
        self.pages = pages
        self.dev = dev
        self.slabs = None
        self.snaps = NO_SNAPSHOTS
        self.branch = self.holds = None
        self.first = self.last = self.next = self.prev = self.twin = None
        self.host = self.below = self.hbelow = self.live = self.units = 0
        self.pins = self.lost = self.tick = 0
        self.queued = self.dead_queued = None


class Root(Edge):
    """The empty edge a namespace hangs from. It is also the nearest retained snapshot of whoever has none."""

    __slots__ = ("deps", "frontier", "namespace")

    deps: dict[Snapshot, None] | None
    frontier: int
    namespace: bytes

    def __init__(self, namespace: bytes, key: int) -> None:
        super().__init__(None, key, 0, 0, b"", None, array("Q"), 0)
        self.namespace = namespace
        self.frontier = 0
        self.deps = None


class Offered:
    """What a match reads of a snapshot; a base class for the same reason as `Walked`."""

    __slots__ = ("extra", "tail", "where")

    extra: int
    tail: bytes
    where: int


class Snapshot(Offered):
    """State at `frontier` = end of `edge` plus `tail`, and the copies there are of it."""

    __slots__ = (
        "anc",  # nearest retained snapshot above, or the root; None while superseded or removed
        "base",  # inflation L when published or last hit
        "companion",  # the prompt tap its lineage left retained behind it
        "deps",  # retained snapshots whose `anc` this is, or None
        "edge",  # None once removed
        "frontier",
        "hit_tick",
        "hits",
        "host_queued",
        "pins",
        "serial",
        "slabs",  # image slabs, then the tail's
        "slot",
        "slot_queued",
        "successor",  # whose companion this is
        "superseded",  # tick, 0 while retained
        "tail_pages",
        "tail_queued",
        "tick",  # recency of the tail's device pages
        "value",
    )

    anc: Snapshot | Root | None
    companion: Snapshot | None
    deps: dict[Snapshot, None] | None
    edge: Edge | None
    slabs: tuple[int, ...] | None
    slot: int | None
    successor: Snapshot | None
    tail_pages: tuple[int, ...] | None
    slot_queued: Entry | None
    host_queued: Entry | None
    tail_queued: Entry | None

    def __init__(self, serial: int, edge: Edge, frontier: int, tail: bytes, extra: int) -> None:
        self.serial = serial
        self.edge = edge
        self.frontier = frontier
        self.tail = tail
        self.extra = extra
        self.anc = self.companion = self.deps = self.successor = None
        self.slabs = self.slot = self.tail_pages = None
        self.slot_queued = self.host_queued = self.tail_queued = None
        self.base = self.value = 0.0
        self.hits = self.hit_tick = self.tick = self.superseded = self.pins = 0
        self.where = HAS_TAIL if tail else 0

    @property
    def kind(self) -> SnapshotKind:
        return SnapshotKind(self.where >> KIND_SHIFT)

    def set_kind(self, kind: SnapshotKind) -> None:
        self.where = (self.where & ((1 << KIND_SHIFT) - 1)) | (kind << KIND_SHIFT)


class Hold:
    """A pin of the path from the root to `depth`, which lies in (edge.start, edge.end] or is 0 at a root."""

    __slots__ = ("depth", "edge")

    edge: Edge | None
    depth: int

    def __init__(self, edge: Edge, depth: int) -> None:
        self.edge = edge
        self.depth = depth


def pinned_end(edge: Edge) -> int:
    """The absolute block up to which `edge` is pinned; `edge.start` when it is not."""
    if not edge.pins:
        return edge.start
    holds = edge.holds
    if holds is None or len(holds) < edge.pins:
        return edge.end
    return max(hold.depth for hold in holds)


def pinned_device_blocks(edge: Edge) -> int:
    """How many of the edge's device-held blocks are pinned."""
    if not edge.pins:
        return 0
    holds = edge.holds
    if holds is None or len(holds) < edge.pins:
        return edge.dev
    return min(max(hold.depth for hold in holds) - edge.start, edge.dev)


def root_of(edge: Edge) -> Root:
    """The root above `edge`. O(edges of the path)."""
    while edge.parent is not None:
        edge = edge.parent
    assert isinstance(edge, Root)
    return edge


Hasher = Callable[[int, bytes, int], int]
