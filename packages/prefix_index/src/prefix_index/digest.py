"""The state as plain values, and a hash of it.

Covered: tokens, extras, residency, pins, snapshots with their values, recency as ranks (so eviction order), L.
Left out: edge boundaries, the epoch, statistics, and anything a clock value says beyond its rank. Recency of pinned
blocks is left out too: their lease sets it when it is released.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable

from prefix_index.core import Core
from prefix_index.nodes import FILLING_DEVICE, FILLING_HOST, HOST, Edge, Root, Snapshot, stamped
from prefix_index.runs import pieces_of

Row = dict[str, object]


def dump(core: Core) -> Row:
    """Namespaces with their blocks in depth-first order, children ordered by tokens. O(tree)."""
    core.worth.flush()
    return _Recorder(core).run()


def digest(core: Core) -> str:
    """64 hexadecimal digits."""
    return digest_of(dump(core))


def digest_of(dumped: Row) -> str:
    """The digest of a dumped state."""
    # A caller's handles may be ints of other libraries: equal numbers are equal states.
    text = json.dumps(dumped, sort_keys=True, separators=(",", ":"), default=operator.index)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


class _Ticks:
    """Clock values of one kind, replaced by their ranks once all are known."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._places: list[tuple[Row, int]] = []

    def put(self, row: Row, tick: int) -> None:
        self._places.append((row, tick))

    def rank(self) -> None:
        ranks = {tick: rank for rank, tick in enumerate(sorted({tick for _, tick in self._places}))}
        for row, tick in self._places:
            row[self._name] = ranks[tick]


class _Recorder:
    """Writes the rows of one dump."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._recency = _Ticks("recency")
        self._hits = _Ticks("last_hit")
        self._superseded = _Ticks("superseded")

    def run(self) -> Row:
        namespaces: list[Row] = []
        roots = self._core.tree.roots
        for namespace in sorted(roots):
            root = roots[namespace]
            if root.first is not None or root.snaps:
                blocks: list[Row] = []
                self._tree(root, blocks)
                snapshots = self._snapshots(root.snaps)
                namespaces.append({"namespace": namespace.hex(), "snapshots": snapshots, "blocks": blocks})
        for ticks in (self._recency, self._hits, self._superseded):
            ticks.rank()
        return {"inflation": self._core.inflation.hex(), "namespaces": namespaces}

    def _first_block(self, edge: Edge) -> tuple[bytes, int]:
        return edge.head[: self._core.tree.scheme.block_bytes], edge.extras[0] if edge.extras else 0

    def _tree(self, root: Root, blocks: list[Row]) -> None:
        order: list[Edge] = []
        stack: list[Edge] = [root]
        while stack:
            edge = stack.pop()
            order.append(edge)
            stack.extend(sorted(_children(edge), key=self._first_block, reverse=True))
        holds: dict[Edge, int] = {}
        for edge in reversed(order):
            holds[edge] = len(edge.holds or ()) + sum(holds[child] for child in _children(edge))
        for edge in order[1:]:
            self._blocks(edge, holds[edge], blocks)

    def _blocks(self, edge: Edge, holds: int, blocks: list[Row]) -> None:
        width = self._core.tree.scheme.block_bytes
        pools = self._core.geometry.num_pools
        tokens = b"".join(pieces_of(edge, self._core.tree.scheme)[0])
        anchored: dict[int, list[Snapshot]] = {}
        for snapshot in edge.snaps:
            anchored.setdefault(snapshot.at, []).append(snapshot)
        for i in range(edge.end - edge.start):
            depth = edge.start + i
            pins = holds - sum(hold.depth <= depth for hold in edge.holds or ())
            row: Row = {
                "depth": depth,
                "tokens": tokens[i * width : (i + 1) * width].hex(),
                "extra": edge.extras[i] if edge.extras else 0,
                "pages": edge.pages[i * pools : (i + 1) * pools] if i < edge.dev else None,
                "slab": edge.slabs[i] if i < edge.host else None,
                "pins": pins,
                "recency": None,
                "snapshots": self._snapshots(anchored.get(depth + 1, [])),
            }
            if not pins:
                self._recency.put(row, stamped(edge, depth + 1)[0])
            blocks.append(row)

    def _snapshots(self, snapshots: Iterable[Snapshot]) -> list[Row]:
        return [self._snapshot(snapshot) for snapshot in sorted(snapshots, key=lambda s: (s.tail, s.extra))]

    def _snapshot(self, snapshot: Snapshot) -> Row:
        row: Row = {
            "frontier": snapshot.frontier,
            "tail": snapshot.tail.hex(),
            "extra": snapshot.extra,
            "kind": snapshot.kind.name,
            "slot": snapshot.slot,
            "tail_pages": list(snapshot.tail_pages) if snapshot.tail_pages is not None else None,
            "slabs": list(snapshot.slabs) if snapshot.slabs is not None else None,
            "host": bool(snapshot.where & HOST),
            "filling": [bool(snapshot.where & FILLING_DEVICE), bool(snapshot.where & FILLING_HOST)],
            "pins": snapshot.pins,
            "hits": snapshot.hits,
            "superseded": None,
            "companion": snapshot.companion.frontier if snapshot.companion is not None else None,
            "base": None if snapshot.superseded else snapshot.base.hex(),
            "value": None if snapshot.superseded else snapshot.value.hex(),
            "recency": None,
        }
        self._hits.put(row, snapshot.hit_tick)
        if snapshot.superseded:
            self._superseded.put(row, snapshot.superseded)
        if snapshot.tail_pages is not None and not snapshot.pins:
            self._recency.put(row, snapshot.tick)
        return row


def _children(edge: Edge) -> list[Edge]:
    children = []
    child = edge.first
    while child is not None:
        children.append(child)
        child = child.next
    return children
