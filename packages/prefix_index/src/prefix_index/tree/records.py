"""The records the tree is made of. They hold facts and links; every rule about them lives elsewhere.

An *edge* is a run of blocks without a branch, however many turns wrote it::

    start                                   end          blocks, absolute
      |  b0   b1   b2   b3   b4   b5   b6  |
      |==== device ====>|                               the first `device_blocks` have pages
      |====== host ==============>|                     the first `host_blocks` have slabs
      |-- pinned -->|                                   a length too: the deepest hold inside the edge
      |-- tick 9 ---->|-- tick 4 -->|-- tick 2 ---|     recency falls towards the end
                 S         S    S           S           snapshots, each after its own block

Residency of an edge is a length because a block held in a tier has its whole path held there. The longer of the two
lengths is always the whole edge: a block with neither copy does not exist. Recency falls because a release of a block
releases everything above it.

The `..._children` counters count child edges, each once however much it carries: they change along a path only as far
as a zero becomes a one, so most updates touch one edge.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from prefix_index.types import SnapshotKind, Tier

# Bits of Snapshot.status: the copies there are. With the kind they fill one byte.
DEVICE_IMAGE = 1
DEVICE_TAIL = 2
HOST = 4
FILLING_DEVICE = 8
FILLING_HOST = 16
HAS_TAIL = 32
KIND_SHIFT = 6

Pieces = tuple[list[bytes], list[int], list[int | None]]
"""Runs of tokens, the byte of the path each begins at, the hash of its first block or None."""

QueueEntry = list[Any]
"""An item's place in a queue of victims, see `retention/queues.py`."""


class MatchedFields:
    """What a look-up reads of an edge. A base class, so that these fields come first and share a cache line."""

    __slots__ = ("branch", "end", "extras", "first_child", "head", "next_sibling", "pieces", "snapshots", "statuses")

    branch: dict[int, Edge] | None
    end: int
    extras: tuple[int, ...] | None
    first_child: Edge | None
    head: bytes
    next_sibling: Edge | None
    pieces: Pieces | None
    snapshots: list[Snapshot]
    statuses: bytearray


class Edge(MatchedFields):
    """A run of blocks [start, end) below `parent`; children hang at its end.

    Its tokens are `head` and, where that does not hold them all, `pieces`, see `tokens.py`. `snapshots` are ordered by
    frontier, `statuses` has the `status` of each. Both grow in place at their ends only; any other change puts new ones
    in their place, so that a match may keep what it saw.
    """

    __slots__ = (
        "dead_entry",
        "device_blocks",  # the first so many blocks have a device copy
        "device_children",  # child edges with device blocks
        "device_entry",
        "holds",  # holds that end inside this edge, or None
        "host_blocks",  # the first so many blocks have a Host copy
        "host_children",  # child edges with Host blocks
        "key",  # hash of the first block
        "last_child",
        "lost_depths",  # block depths whose latest snapshot was lost, ascending, or None
        "next_collision",  # next child of the same parent with an equal key
        "older_stamps",  # (block depth, tick) of the stretches below `stamp_end`, deepest first, or None
        "pages",  # interleaved by pool: page of block i in pool p is pages[i * pools + p]
        "parent",
        "pins",  # holds ending here plus pinned children
        "previous_sibling",
        "retained",  # the retained ones of `snapshots`, in the same order
        "retained_children",  # child edges with retained snapshots in or below them
        "slabs",
        "snapshot_children",  # child edges with snapshots in or below them
        "stamp_end",  # block depth; the edge's start while none of its blocks was ever released
        "stamp_tick",  # when the blocks down to `stamp_end` were last released
        "start",
        "tail_depths",  # block depths of the snapshots whose tail has a device copy, ascending, or None
    )

    def __init__(self, parent: Edge | None, start: int, end: int, extras: tuple[int, ...] | None) -> None:
        self.parent = parent
        self.start = start
        self.end = end
        self.extras = extras
        self.head = b""
        self.pieces = self.branch = None
        self.snapshots = []
        self.statuses = bytearray()
        self.retained: list[Snapshot] = []
        self.pages: list[int] = []
        self.slabs: list[int] = []
        self.holds: list[Hold] | None = None
        self.lost_depths: list[int] | None = None
        self.tail_depths: list[int] | None = None
        self.older_stamps: list[tuple[int, int]] | None = None
        self.stamp_end = start
        self.key = self.stamp_tick = self.device_blocks = self.host_blocks = self.pins = 0
        self.device_children = self.host_children = self.snapshot_children = self.retained_children = 0
        self.first_child = self.next_sibling = None
        self.last_child: Edge | None = None
        self.previous_sibling: Edge | None = None
        self.next_collision: Edge | None = None
        self.device_entry: QueueEntry | None = None
        self.dead_entry: QueueEntry | None = None


class Root(Edge):
    """The empty edge a namespace hangs from."""

    __slots__ = ("hashed", "namespace")

    def __init__(self, namespace: bytes, hashed: int) -> None:
        super().__init__(None, 0, 0, None)
        self.namespace = namespace
        self.hashed = hashed  # what the hashes of its first blocks are chained from


class OfferedFields:
    """What a candidate shows of a snapshot, never changed; a base class for the same reason as `MatchedFields`."""

    __slots__ = ("depth", "extra", "frontier", "tail")

    depth: int
    extra: int
    frontier: int
    tail: bytes


class Snapshot(OfferedFields):
    """State at `frontier` = the first `depth` blocks of the path, which ends in `edge`, plus `tail`; and its copies."""

    __slots__ = (
        "base",  # inflation L when published or last hit
        "companion",  # the prompt tap its lineage left retained behind it
        "edge",  # None once removed
        "hit_tick",
        "hits",
        "host_entry",
        "pins",
        "serial",
        "slabs",  # image slabs, then the tail's
        "slot",
        "slot_entry",
        "status",  # which copies there are, and the kind
        "successor",  # whose companion this is
        "superseded",  # tick, 0 while retained
        "tail_entry",
        "tail_pages",
        "tick",  # recency of the tail's device pages
        "value",
    )

    def __init__(
        self, serial: int, edge: Edge, depth: int, frontier: int, tail: bytes, extra: int, status: int
    ) -> None:
        self.serial = serial
        self.edge: Edge | None = edge
        self.depth = depth
        self.frontier = frontier
        self.tail = tail
        self.extra = extra
        self.status = status
        self.slot: int | None = None
        self.slabs: tuple[int, ...] | None = None
        self.tail_pages: tuple[int, ...] | None = None
        self.companion: Snapshot | None = None
        self.successor: Snapshot | None = None
        self.slot_entry: QueueEntry | None = None
        self.host_entry: QueueEntry | None = None
        self.tail_entry: QueueEntry | None = None
        self.base = self.value = 0.0
        self.hits = self.hit_tick = self.tick = self.superseded = self.pins = 0

    @property
    def kind(self) -> SnapshotKind:
        """Why it was taken."""
        return SnapshotKind(self.status >> KIND_SHIFT)

    def set_kind(self, kind: SnapshotKind) -> None:
        """Change why an attached snapshot was taken."""
        self.set_status(self.status & ((1 << KIND_SHIFT) - 1) | kind << KIND_SHIFT)

    def set_status(self, status: int) -> None:
        """Change what an attached snapshot says of its copies."""
        edge = self.edge
        assert edge is not None
        self.status = status
        statuses = bytearray(edge.statuses)
        statuses[place_of(edge.snapshots, self)] = status
        edge.statuses = statuses


class Hold:
    """A pin of the path from the root to `depth`, which lies in (edge.start, edge.end] or is 0 at a root."""

    __slots__ = ("depth", "edge")

    def __init__(self, edge: Edge, depth: int) -> None:
        self.edge: Edge | None = edge
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
        return edge.device_blocks
    depth = holds[0].depth if len(holds) == 1 else max(hold.depth for hold in holds)
    return min(depth - edge.start, edge.device_blocks)


def live_end(edge: Edge) -> int:
    """The absolute block up to which the edge's blocks lie on the path of a snapshot."""
    if edge.snapshot_children:
        return edge.end
    return edge.snapshots[-1].depth if edge.snapshots else edge.start


def stamped(edge: Edge, depth: int) -> tuple[int, int]:
    """(tick, first block) of the stretch of equal recency that ends with the block before `depth`.

    The tick is 0 when that block was never released.
    """
    tick = 0
    if edge.older_stamps is not None:
        for end, older in edge.older_stamps:
            if end < depth:
                return tick, end
            tick = older
    return (tick, edge.stamp_end) if edge.stamp_end < depth else (edge.stamp_tick, edge.start)


def _stamp(edge: Edge, depth: int, tick: int) -> None:
    """The blocks of `edge` down to `depth` were released at `tick`, which is later than any before."""
    older = edge.older_stamps
    if edge.stamp_end > depth:
        edge.older_stamps = (
            [*older, (edge.stamp_end, edge.stamp_tick)] if older is not None else [(edge.stamp_end, edge.stamp_tick)]
        )
    elif older is not None:
        edge.older_stamps = [(end, before) for end, before in older if end > depth] or None
    edge.stamp_end = depth
    edge.stamp_tick = tick


def stamps_of(edge: Edge) -> list[tuple[int, int]]:
    """(block depth, tick) of every stretch of equal recency, deepest first."""
    return [*(edge.older_stamps or ()), (edge.stamp_end, edge.stamp_tick)] if edge.stamp_end > edge.start else []


def stamps_down_to(stamps: list[tuple[int, int]], depth: int) -> list[tuple[int, int]]:
    """What is left of `stamps` when the blocks from `depth` on are left out."""
    within = [stamp for stamp in stamps if stamp[0] < depth]
    return [(depth, stamps[-len(within) - 1][1]), *within] if len(within) < len(stamps) else within


def cut_stamps(edge: Edge, depth: int) -> None:
    """The blocks from `depth` on are gone."""
    if edge.older_stamps is not None:
        set_stamps(edge, stamps_down_to(stamps_of(edge), depth))
    elif edge.stamp_end > depth:
        edge.stamp_end = depth


def set_stamps(edge: Edge, stamps: list[tuple[int, int]]) -> None:
    """Give `edge` these stretches, deepest first."""
    edge.older_stamps = stamps[:-1] or None
    edge.stamp_end, edge.stamp_tick = stamps[-1] if stamps else (edge.start, 0)


def stamp_path(edge: Edge, depth: int, tick: int) -> None:
    """Make the path to block `depth`, which lies in `edge`, the most recently released. O(edges)."""
    above = edge.parent
    while above is not None:
        if edge.older_stamps is None and edge.stamp_end <= depth:  # nothing of it was released from further down
            edge.stamp_end = depth
            edge.stamp_tick = tick
        else:
            _stamp(edge, depth, tick)
        edge = above
        depth = edge.end
        above = edge.parent


def path_of(edge: Edge) -> list[Edge]:
    """The edges from the root's child down to `edge`."""
    path = []
    while edge.parent is not None:
        path.append(edge)
        edge = edge.parent
    path.reverse()
    return path


def edges_below(root: Edge) -> list[Edge]:
    """`root` and all edges below it, parents first. No recursion."""
    edges = [root]
    for edge in edges:
        child = edge.first_child
        while child is not None:
            edges.append(child)
            child = child.next_sibling
    return edges


def edge_at(hold: Hold, depth: int) -> tuple[Edge, Edge | None]:
    """The edge on the hold's path in which `depth` lies, its end included, and the edge below it on that path."""
    below: Edge | None = None
    edge = hold.edge
    assert edge is not None
    while edge.parent is not None and edge.start >= depth:
        below, edge = edge, edge.parent
    return edge, below


def held(edge: Edge, tier: Tier) -> int:
    """How many blocks of the path to the end of `edge` the tier holds. O(edges)."""
    above: Edge | None = edge
    while above is not None:
        size = above.device_blocks if tier is Tier.DEVICE else above.host_blocks
        if size:
            return above.start + size
        above = above.parent
    return 0


def root_of(edge: Edge) -> Root:
    """The root above `edge`. O(edges of the path)."""
    while edge.parent is not None:
        edge = edge.parent
    assert isinstance(edge, Root)
    return edge


_frontier: Callable[[Any], int] = attrgetter("frontier")


def place_for(snapshots: list[Snapshot], frontier: int) -> int:
    """Where a snapshot at `frontier` belongs in a list ordered by frontier: behind its equals."""
    if not snapshots or snapshots[-1].frontier <= frontier:
        return len(snapshots)
    return bisect_left(snapshots, frontier + 1, key=_frontier)


def place_of(snapshots: list[Snapshot], snapshot: Snapshot) -> int:
    """Where `snapshot` is in a list ordered by frontier that has it."""
    if snapshots[-1] is snapshot:
        return len(snapshots) - 1
    place = bisect_left(snapshots, snapshot.frontier, key=_frontier)
    while snapshots[place] is not snapshot:
        place += 1
    return place
