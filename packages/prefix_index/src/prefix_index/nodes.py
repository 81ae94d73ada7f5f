"""The records the tree is made of. They hold facts and links; every rule about them lives elsewhere.

An *edge* is a run of blocks without a branch, however many turns wrote it::

    start                                   end          blocks, absolute
      |  b0   b1   b2   b3   b4   b5   b6  |
      |==== device ====>|                               first `dev` blocks have pages
      |====== host ==============>|                     first `host` blocks have slabs
      |-- pinned -->|                                   a length too: the deepest hold inside the edge
      |-- tick 9 ---->|-- tick 4 -->|-- tick 2 ---|     recency falls towards the end
                 S         S    S           S           snapshots, each after its own block

Residency of an edge is a length because a block held in a tier has its whole path held there. `max(dev, host)` is
always the whole edge: a block with neither copy does not exist. Recency falls because whoever releases a block
releases everything above it.

Counters count what lies in or directly below an edge, a child edge counting once however much it carries: they change
along a path only as far as a zero becomes a one, so most updates touch one edge.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from prefix_index.order import Entry
from prefix_index.values import SnapshotKind

# Bits of Snapshot.where; with the kind they fill one byte.
DEVICE_IMAGE = 1
DEVICE_TAIL = 2
HOST = 4
FILLING_DEVICE = 8
FILLING_HOST = 16
HAS_TAIL = 32
KIND_SHIFT = 6


Pieces = tuple[list[bytes], list[int], list[int | None]]
"""Runs of tokens, the byte of the path each begins at, the hash of its first block or None."""


class Walked:
    """What a match touches. A base class, so that these fields come first and share a cache line."""

    __slots__ = ("branch", "end", "extras", "first", "head", "next", "pieces", "snaps", "wheres")

    branch: dict[int, Edge] | None
    end: int
    extras: tuple[int, ...] | None
    first: Edge | None
    head: bytes
    next: Edge | None
    pieces: Pieces | None
    snaps: list[Snapshot]
    wheres: bytearray


class Edge(Walked):
    """A run of blocks [start, end) below `parent`; children hang at its end.

    Its tokens are `head` and, where that does not hold them all, `pieces`, see `runs.py`. `snaps` are ordered
    by frontier, `wheres` has the `where` of each. Both grow in place at their ends only; any other change puts new ones
    in their place, so that a match may keep what it saw.
    """

    __slots__ = (
        "below",  # child edges with device blocks
        "dead_queued",
        "dev",
        "hbelow",  # child edges with host blocks
        "holds",  # holds that end inside this edge, or None
        "host",
        "kbelow",  # child edges with retained snapshots in or below them
        "kept",  # the retained ones of `snaps`, in the same order
        "key",  # hash of the first block
        "last",
        "lost",  # block depths whose latest snapshot was lost, ascending, or None
        "older",  # (block depth, tick) of the stretches below `upto`, deepest first, or None
        "pages",  # interleaved by pool: page of block i in pool p is pages[i * pools + p]
        "parent",
        "pins",  # holds ending here plus pinned children
        "prev",
        "queued",
        "sbelow",  # child edges with snapshots in or below them
        "slabs",
        "start",
        "tails",  # block depths of the snapshots whose tail has a device copy, ascending, or None
        "tick",  # when the blocks down to `upto` were last released
        "twin",  # next child of the same parent with an equal key
        "upto",  # block depth; the edge's start while none of its blocks was ever released
    )

    parent: Edge | None
    last: Edge | None
    prev: Edge | None
    twin: Edge | None
    holds: list[Hold] | None
    kept: list[Snapshot]
    pages: list[int]
    slabs: list[int]
    older: list[tuple[int, int]] | None
    lost: list[int] | None
    tails: list[int] | None
    below: int
    dead_queued: Entry | None
    dev: int
    hbelow: int
    host: int
    kbelow: int
    key: int
    pins: int
    queued: Entry | None
    sbelow: int
    start: int
    tick: int
    upto: int

    def __init__(self, parent: Edge | None, start: int, end: int, extras: tuple[int, ...] | None) -> None:
        self.parent = parent
        self.start = start
        self.end = end
        self.extras = extras
        self.head = b""
        self.pieces = None
        self.pages = []
        self.slabs = []
        self.snaps = []
        self.wheres = bytearray()
        self.kept = []
        self.branch = self.holds = self.lost = self.older = self.tails = None
        self.upto = start
        self.key = self.tick = 0
        self.first = self.last = self.next = self.prev = self.twin = None
        self.dev = self.host = self.below = self.hbelow = self.kbelow = self.sbelow = self.pins = 0
        self.queued = self.dead_queued = None


class Root(Edge):
    """The empty edge a namespace hangs from."""

    __slots__ = ("hashed", "namespace")

    hashed: int
    namespace: bytes

    def __init__(self, namespace: bytes, hashed: int) -> None:
        super().__init__(None, 0, 0, None)
        self.namespace = namespace
        self.hashed = hashed  # what the hashes of its first blocks are chained from


class Offered:
    """What a candidate shows of a snapshot, never changed; a base class for the same reason as `Walked`."""

    __slots__ = ("at", "extra", "frontier", "tail")

    at: int
    extra: int
    frontier: int
    tail: bytes


class Snapshot(Offered):
    """State at `frontier` = the first `at` blocks of the path, which ends in `edge`, plus `tail`; and its copies."""

    __slots__ = (
        "base",  # inflation L when published or last hit
        "companion",  # the prompt tap its lineage left retained behind it
        "edge",  # None once removed
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
        "where",  # which copies there are, and the kind
    )

    companion: Snapshot | None
    edge: Edge | None
    slabs: tuple[int, ...] | None
    slot: int | None
    successor: Snapshot | None
    tail_pages: tuple[int, ...] | None
    where: int
    slot_queued: Entry | None
    host_queued: Entry | None
    tail_queued: Entry | None

    def __init__(self, serial: int, edge: Edge, at: int, frontier: int, tail: bytes, extra: int, where: int) -> None:
        self.serial = serial
        self.edge = edge
        self.at = at
        self.frontier = frontier
        self.tail = tail
        self.extra = extra
        self.companion = self.successor = self.slabs = self.slot = self.tail_pages = None
        self.slot_queued = self.host_queued = self.tail_queued = None
        self.base = self.value = 0.0
        self.hits = self.hit_tick = self.tick = self.superseded = self.pins = 0
        self.where = where

    @property
    def kind(self) -> SnapshotKind:
        return SnapshotKind(self.where >> KIND_SHIFT)

    def set_kind(self, kind: SnapshotKind) -> None:
        self.set_where(self.where & ((1 << KIND_SHIFT) - 1) | kind << KIND_SHIFT)

    def set_where(self, where: int) -> None:
        """Change what an attached snapshot says of its copies."""
        edge = self.edge
        assert edge is not None
        self.where = where
        wheres = bytearray(edge.wheres)
        wheres[place_of(edge.snaps, self)] = where
        edge.wheres = wheres


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
    if len(holds) == 1:
        return holds[0].depth
    return max(hold.depth for hold in holds)


def pinned_device_blocks(edge: Edge) -> int:
    """How many of the edge's device-held blocks are pinned."""
    if not edge.pins:
        return 0
    holds = edge.holds
    if holds is None or len(holds) < edge.pins:
        return edge.dev
    depth = holds[0].depth if len(holds) == 1 else max(hold.depth for hold in holds)
    return min(depth - edge.start, edge.dev)


def live_end(edge: Edge) -> int:
    """The absolute block up to which the edge's blocks lie on the path of a snapshot."""
    if edge.sbelow:
        return edge.end
    return edge.snaps[-1].at if edge.snaps else edge.start


def stamped(edge: Edge, depth: int) -> tuple[int, int]:
    """(tick, first block) of the stretch of equal recency that ends with the block before `depth`; tick 0 when that
    block was never released."""
    tick = 0
    if edge.older is not None:
        for end, older in edge.older:
            if end < depth:
                return tick, end
            tick = older
    return (tick, edge.upto) if edge.upto < depth else (edge.tick, edge.start)


def stamp(edge: Edge, depth: int, tick: int) -> None:
    """The blocks of `edge` down to `depth` were released at `tick`, which is later than any before."""
    older = edge.older
    if edge.upto > depth:
        edge.older = [*older, (edge.upto, edge.tick)] if older is not None else [(edge.upto, edge.tick)]
    elif older is not None:
        edge.older = [(end, before) for end, before in older if end > depth] or None
    edge.upto = depth
    edge.tick = tick


def stamps_of(edge: Edge) -> list[tuple[int, int]]:
    """(block depth, tick) of every stretch of equal recency, deepest first."""
    return [*(edge.older or ()), (edge.upto, edge.tick)] if edge.upto > edge.start else []


def stamps_down_to(stamps: list[tuple[int, int]], depth: int) -> list[tuple[int, int]]:
    """What is left of `stamps` when the blocks from `depth` on are left out."""
    within = [stamp for stamp in stamps if stamp[0] < depth]
    return [(depth, stamps[-len(within) - 1][1]), *within] if len(within) < len(stamps) else within


def cut_stamps(edge: Edge, depth: int) -> None:
    """The blocks from `depth` on are gone."""
    if edge.older is not None:
        set_stamps(edge, stamps_down_to(stamps_of(edge), depth))
    elif edge.upto > depth:
        edge.upto = depth


def set_stamps(edge: Edge, stamps: list[tuple[int, int]]) -> None:
    edge.older = stamps[:-1] or None
    edge.upto, edge.tick = stamps[-1] if stamps else (edge.start, 0)


def root_of(edge: Edge) -> Root:
    """The root above `edge`. O(edges of the path)."""
    while edge.parent is not None:
        edge = edge.parent
    assert isinstance(edge, Root)
    return edge


_frontier: Callable[[Any], int] = attrgetter("frontier")


def place_for(snaps: list[Snapshot], frontier: int) -> int:
    """Where a snapshot at `frontier` belongs in a list ordered by frontier: behind its equals."""
    if not snaps or snaps[-1].frontier <= frontier:
        return len(snaps)
    return bisect_left(snaps, frontier + 1, key=_frontier)


def place_of(snaps: list[Snapshot], snapshot: Snapshot) -> int:
    """Where `snapshot` is in a list ordered by frontier that has it."""
    if snaps[-1] is snapshot:
        return len(snaps) - 1
    place = bisect_left(snaps, snapshot.frontier, key=_frontier)
    while snaps[place] is not snapshot:
        place += 1
    return place


Hasher = Callable[[int, bytes, int], int]
