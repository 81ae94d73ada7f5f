"""The state as plain values, and a hash of it.

Covered: tokens, extras, residency, pins, snapshots with their values, recency as ranks (so eviction order), L.
Left out: edge boundaries, the epoch, statistics, and anything a clock value says beyond its rank. Recency of pinned
blocks is left out too: their lease sets it when it is released.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

from prefix_index.core import Core
from prefix_index.nodes import HOST, Edge, Root, Snapshot


def dump(core: Core) -> dict[str, object]:
    """Namespaces with their blocks in depth-first order, children ordered by tokens. O(tree)."""
    core.worth.flush()
    namespaces = []
    ticks: set[int] = set()
    for namespace in sorted(core.tree.roots):
        root = core.tree.roots[namespace]
        if root.first is None and not root.snaps:
            continue
        blocks: list[dict[str, object]] = []
        rows = _rows(core, root, blocks, ticks)
        namespaces.append({"namespace": namespace.hex(), "snapshots": rows, "blocks": blocks})
    ranks = {tick: rank for rank, tick in enumerate(sorted(ticks))}
    for entry in namespaces:
        _rank(entry, ranks)
    return {"inflation": core.inflation.hex(), "namespaces": namespaces}


def digest(core: Core) -> str:
    """64 hexadecimal digits."""
    text = json.dumps(dump(core), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def _rows(core: Core, root: Root, blocks: list[dict[str, object]], ticks: set[int]) -> list[dict[str, object]]:
    """Append the blocks below `root`; returns the snapshots at the root itself."""
    order: list[Edge] = []
    stack: list[Edge] = [root]
    while stack:
        edge = stack.pop()
        order.append(edge)
        children = []
        child = edge.first
        while child is not None:
            children.append(child)
            child = child.next
        stack.extend(sorted(children, key=_first_block(core), reverse=True))
    through: dict[Edge, int] = {}
    for edge in reversed(order):
        own = len(edge.holds or ())
        below = 0
        child = edge.first
        while child is not None:
            below += through[child]
            child = child.next
        through[edge] = own + below
    for edge in order[1:]:
        _edge_rows(core, edge, through[edge], blocks, ticks)
    return [_snapshot_row(snapshot, ticks) for snapshot in sorted(root.snaps, key=_identity)]


def _first_block(core: Core) -> Callable[[Edge], tuple[bytes, int]]:
    width = core.tree.scheme.block_bytes
    return lambda edge: (edge.tokens[:width], edge.extras[0] if edge.extras else 0)


def _identity(snapshot: Snapshot) -> tuple[bytes, int]:
    return snapshot.tail, snapshot.extra


def _edge_rows(core: Core, edge: Edge, through: int, blocks: list[dict[str, object]], ticks: set[int]) -> None:
    width = core.tree.scheme.block_bytes
    pools = core.geometry.num_pools
    size = edge.end - edge.start
    for i in range(size):
        depth = edge.start + i
        pins = through - sum(hold.depth <= depth for hold in edge.holds or ())
        if not pins:
            ticks.add(edge.tick)
        last = i == size - 1
        blocks.append(
            {
                "depth": depth,
                "tokens": edge.tokens[i * width : (i + 1) * width].hex(),
                "extra": edge.extras[i] if edge.extras else 0,
                "pages": list(edge.pages[i * pools : (i + 1) * pools]) if i < edge.dev else None,
                "slab": edge.slabs[i] if edge.slabs is not None and i < edge.host else None,
                "pins": pins,
                "recency": None if pins else edge.tick,
                "snapshots": [_snapshot_row(s, ticks) for s in sorted(edge.snaps, key=_identity)] if last else [],
            }
        )


def _snapshot_row(snapshot: Snapshot, ticks: set[int]) -> dict[str, object]:
    ticks.update((snapshot.hit_tick, snapshot.superseded))
    row: dict[str, object] = {
        "frontier": snapshot.frontier,
        "tail": snapshot.tail.hex(),
        "extra": snapshot.extra,
        "kind": snapshot.kind.name,
        "slot": snapshot.slot,
        "tail_pages": list(snapshot.tail_pages) if snapshot.tail_pages is not None else None,
        "slabs": list(snapshot.slabs) if snapshot.slabs is not None else None,
        "host": bool(snapshot.where & HOST),
        "pins": snapshot.pins,
        "hits": snapshot.hits,
        "last_hit": snapshot.hit_tick,
        "superseded": snapshot.superseded,
        "companion": snapshot.companion.frontier if snapshot.companion is not None else None,
        "base": snapshot.base.hex(),
        "value": None if snapshot.superseded else snapshot.value.hex(),
        "recency": None,
    }
    if snapshot.tail_pages is not None and not snapshot.pins:
        row["recency"] = snapshot.tick
        ticks.add(snapshot.tick)
    return row


def _rank(entry: Mapping[str, object], ranks: dict[int, int]) -> None:
    blocks = entry["blocks"]
    top = entry["snapshots"]
    assert isinstance(blocks, list)
    assert isinstance(top, list)
    for block in blocks:
        if block["recency"] is not None:
            block["recency"] = ranks[block["recency"]]
        for row in block["snapshots"]:
            _rank_snapshot(row, ranks)
    for row in top:
        _rank_snapshot(row, ranks)


def _rank_snapshot(row: dict[str, object], ranks: dict[int, int]) -> None:
    for name in ("last_hit", "recency", "superseded"):
        tick = row[name]
        if isinstance(tick, int) and (tick or name != "superseded"):
            row[name] = ranks[tick]
