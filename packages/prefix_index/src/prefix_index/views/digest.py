"""The whole state as plain values, and a hash of it.

Covered: tokens, extras, residency, pins, snapshots with their values, recency as ranks (so eviction order), L.
Left out: edge boundaries, the epoch, statistics, and anything a clock value says beyond its rank. Recency of pinned
blocks is left out too: their lease sets it when it is released.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable

from prefix_index.retention.valuation import Valuation
from prefix_index.tree.records import FILLING_DEVICE, FILLING_HOST, HOST, Edge, Root, Snapshot, stamped
from prefix_index.tree.tokens import pieces_of
from prefix_index.tree.tree import Tree

Row = dict[str, object]


def dump(tree: Tree, valuation: Valuation) -> Row:
    """Namespaces with their blocks in depth-first order, children ordered by tokens. O(tree)."""
    valuation.flush()
    return {"inflation": valuation.inflation.hex(), "namespaces": _Recorder(tree).namespaces()}


def digest_of(dumped: Row) -> str:
    """The digest of a dumped state: 64 hexadecimal digits."""
    # A caller's handles may be ints of other libraries: equal numbers are equal states.
    text = json.dumps(dumped, sort_keys=True, separators=(",", ":"), default=operator.index)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


class _Ticks:
    """Clock values of one kind, replaced by their ranks once all are known."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._places: list[tuple[Row, int]] = []

    def put(self, row: Row, tick: int) -> None:
        """Have `row` say the rank of `tick`."""
        self._places.append((row, tick))

    def rank(self) -> None:
        """Write the ranks."""
        ranks = {tick: rank for rank, tick in enumerate(sorted({tick for _, tick in self._places}))}
        for row, tick in self._places:
            row[self._name] = ranks[tick]


class _Recorder:
    """Writes the rows of one dump."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._recency = _Ticks("recency")
        self._hits = _Ticks("last_hit")
        self._superseded = _Ticks("superseded")

    def namespaces(self) -> list[Row]:
        """One row a namespace that holds anything."""
        namespaces: list[Row] = []
        roots = self._tree.roots
        for namespace in sorted(roots):
            root = roots[namespace]
            if root.first_child is not None or root.snapshots:
                blocks: list[Row] = []
                self._add_blocks(root, blocks)
                snapshots = self._snapshots(root.snapshots)
                namespaces.append({"namespace": namespace.hex(), "snapshots": snapshots, "blocks": blocks})
        for ticks in (self._recency, self._hits, self._superseded):
            ticks.rank()
        return namespaces

    def _first_block(self, edge: Edge) -> tuple[bytes, int]:
        return edge.head[: self._tree.scheme.block_bytes], edge.extras[0] if edge.extras else 0

    def _add_blocks(self, root: Root, blocks: list[Row]) -> None:
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
            self._add_edge(edge, holds[edge], blocks)

    def _add_edge(self, edge: Edge, holds: int, blocks: list[Row]) -> None:
        width = self._tree.scheme.block_bytes
        pools = self._tree.geometry.num_pools
        tokens = b"".join(pieces_of(edge, self._tree.scheme)[0])
        anchored: dict[int, list[Snapshot]] = {}
        for snapshot in edge.snapshots:
            anchored.setdefault(snapshot.depth, []).append(snapshot)
        for i in range(edge.end - edge.start):
            depth = edge.start + i
            pins = holds - sum(hold.depth <= depth for hold in edge.holds or ())
            row: Row = {
                "depth": depth,
                "tokens": tokens[i * width : (i + 1) * width].hex(),
                "extra": edge.extras[i] if edge.extras else 0,
                "pages": edge.pages[i * pools : (i + 1) * pools] if i < edge.device_blocks else None,
                "slab": edge.slabs[i] if i < edge.host_blocks else None,
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
            "host": bool(snapshot.status & HOST),
            "filling": [bool(snapshot.status & FILLING_DEVICE), bool(snapshot.status & FILLING_HOST)],
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
    child = edge.first_child
    while child is not None:
        children.append(child)
        child = child.next_sibling
    return children
