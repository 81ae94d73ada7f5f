"""The Host-resident part of an index as plain tables, and which of it a smaller Host tier should take back.

Parents come first, so that a reader can build as it reads; snapshots come in the order of their last hit. Rows carry
slab handles of the process that wrote them: a reader puts its own in their place (`HostTables.with_slabs`). Tokens and
tails are int32 little-endian bytes. Rows that contradict each other raise InvalidArgument where they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from prefix_index.core import Core
from prefix_index.cost import CostModel
from prefix_index.errors import InvalidArgument, WrongState
from prefix_index.nodes import HOST, Edge, Root, Snapshot, root_of
from prefix_index.runs import block_rows
from prefix_index.values import SnapshotKind, Tier


@dataclass(frozen=True, slots=True)
class BlockRow:
    """One block. `parent` is the row of the block above, or None at the top of its namespace."""

    namespace: int
    parent: int | None
    tokens: bytes
    extra: int
    block_hash: int
    slab: int


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """One retained snapshot. `anchor` is the row of its last whole block; slabs: the image's, then the tail's."""

    namespace: int
    anchor: int | None
    frontier: int
    tail: bytes
    extra: int
    kind: SnapshotKind
    hits: int
    slabs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostTables:
    """What `PrefixIndex.export` returns and `restore` takes."""

    block_tokens: int
    namespaces: tuple[bytes, ...]
    blocks: tuple[BlockRow, ...]
    snapshots: tuple[SnapshotRow, ...]

    @property
    def num_slabs(self) -> int:
        return len(self.blocks) + sum(len(row.slabs) for row in self.snapshots)

    @property
    def slabs(self) -> tuple[int, ...]:
        """All slab handles in the order in which their bytes are written: blocks, then each snapshot's."""
        return (*(row.slab for row in self.blocks), *(slab for row in self.snapshots for slab in row.slabs))

    def with_slabs(self, slabs: Sequence[int]) -> HostTables:
        """The same tables with other handles, in the order of `slabs`."""
        if len(slabs) != self.num_slabs:
            raise InvalidArgument(f"with_slabs: {self.num_slabs} slabs are needed, got {len(slabs)}")
        given = iter(slabs)
        blocks = tuple(replace(row, slab=next(given)) for row in self.blocks)
        snapshots = tuple(replace(row, slabs=tuple(next(given) for _ in row.slabs)) for row in self.snapshots)
        return replace(self, blocks=blocks, snapshots=snapshots)

    def keep(self, plan: HostRestorePlan) -> HostTables:
        """Only the rows of `plan`, renumbered."""
        place = {row: position for position, row in enumerate(plan.blocks)}
        blocks = []
        for row in plan.blocks:
            parent = self.blocks[row].parent
            blocks.append(replace(self.blocks[row], parent=None if parent is None else place[parent]))
        snapshots = []
        for row in plan.snapshots:
            anchor = self.snapshots[row].anchor
            snapshots.append(replace(self.snapshots[row], anchor=None if anchor is None else place[anchor]))
        return replace(self, blocks=tuple(blocks), snapshots=tuple(snapshots))


@dataclass(frozen=True, slots=True)
class HostRestorePlan:
    """Rows a Host tier takes back, in table order, and the slabs they need."""

    blocks: tuple[int, ...]
    snapshots: tuple[int, ...]
    num_slabs: int


def plan_host_restore(
    tables: HostTables, num_slabs: int, *, cost: CostModel, block_bytes: int, image_bytes: int
) -> HostRestorePlan:
    """What of `tables` to read into `num_slabs` slabs. Pure.

    All of it if it fits. Otherwise whole snapshots, each with the path blocks it needs and no others, greedily by
    density: (1 + hits) times the prefill it saves from the root, per byte of image, tail and path; ties to the larger
    frontier. One that does not fit is passed over.
    """
    paths = paths_of(tables)
    if tables.num_slabs <= num_slabs:
        return HostRestorePlan(tuple(range(len(tables.blocks))), tuple(range(len(tables.snapshots))), tables.num_slabs)

    def density(row: SnapshotRow, path: Sequence[int]) -> float:
        size = image_bytes + (len(path) + bool(row.tail)) * block_bytes
        saved = cost.saved_seconds(0, row.frontier) - cost.restore_seconds(image_bytes)
        return (1 + row.hits) * max(0.0, saved) / size

    order = sorted(
        range(len(tables.snapshots)),
        key=lambda i: (-density(tables.snapshots[i], paths[i]), -tables.snapshots[i].frontier, i),
    )
    blocks: set[int] = set()
    snapshots: list[int] = []
    used = 0
    for i in order:
        new = [row for row in paths[i] if row not in blocks]
        needed = len(new) + len(tables.snapshots[i].slabs)
        if used + needed <= num_slabs:
            used += needed
            blocks.update(new)
            snapshots.append(i)
    return HostRestorePlan(tuple(sorted(blocks)), tuple(sorted(snapshots)), used)


def paths_of(tables: HostTables) -> list[list[int]]:
    """Per snapshot the rows of its path, deepest first. Refuses a parent that does not come before its child."""
    for position, row in enumerate(tables.blocks):
        if row.parent is not None and not 0 <= row.parent < position:
            raise InvalidArgument(f"tables: the parent of block row {position} must come before it, got {row.parent}")
    paths = []
    for position, snapshot in enumerate(tables.snapshots):
        path = []
        at = snapshot.anchor
        if at is not None and not 0 <= at < len(tables.blocks):
            raise InvalidArgument(f"tables: the anchor of snapshot row {position} must be a block row, got {at}")
        while at is not None:
            path.append(at)
            at = tables.blocks[at].parent
        paths.append(path)
    return paths


def export(core: Core) -> HostTables:
    """Every retained snapshot with its image, tail and whole path on the Host, and exactly those paths. O(tree)."""
    if any(ticket._tier is Tier.HOST for ticket in core.tickets):
        raise WrongState(f"export: Host fills must have landed, got {len(core.tickets)} fills in flight")
    saved = [snapshot for root in core.tree.roots.values() for snapshot in _hosted(root)]
    saved.sort(key=lambda snapshot: snapshot.hit_tick)
    namespaces: dict[bytes, int] = {}
    blocks: list[BlockRow] = []
    written: dict[Edge, list[int]] = {}
    rows = []
    for snapshot in saved:
        edge = snapshot.edge
        assert edge is not None
        assert snapshot.slabs is not None
        namespace = namespaces.setdefault(root_of(edge).namespace, len(namespaces))
        anchor = _write_path(core, edge, snapshot.at, namespace, blocks, written)
        name = (namespace, anchor, snapshot.frontier, snapshot.tail, snapshot.extra)
        rows.append(SnapshotRow(*name, snapshot.kind, snapshot.hits, snapshot.slabs))
    return HostTables(core.geometry.block_tokens, tuple(namespaces), tuple(blocks), tuple(rows))


def _hosted(root: Root) -> list[Snapshot]:
    edges: list[Edge] = [root]
    for edge in edges:
        child = edge.first
        while child is not None:
            if child.snaps or child.sbelow:
                edges.append(child)
            child = child.next
    return [s for edge in edges for s in edge.kept if s.where & HOST and s.at <= edge.start + edge.host]


def _write_path(
    core: Core, edge: Edge, depth: int, namespace: int, blocks: list[BlockRow], written: dict[Edge, list[int]]
) -> int | None:
    """Rows for the first `depth` blocks of the path to `edge` that have none yet, parents first; the last one's row.
    `written` has an edge's rows so far."""
    path = []
    at: Edge | None = edge
    while at is not None and at.parent is not None:
        path.append(at)
        at = at.parent
    parent: int | None = None
    scheme = core.tree.scheme
    for part in reversed(path):
        rows = written.setdefault(part, [])
        if rows:
            parent = rows[-1]
        first = part.start + len(rows)
        for block_hash, _, at_depth, tokens, extra in block_rows(scheme, part, first, min(depth, part.end)):
            blocks.append(BlockRow(namespace, parent, tokens, extra, block_hash, part.slabs[at_depth - part.start]))
            parent = len(blocks) - 1
            rows.append(parent)
        if depth < part.start + len(rows):
            parent = rows[depth - part.start - 1]
    return parent
