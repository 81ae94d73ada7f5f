"""The Host-resident part of an index as plain tables: writing them, planning what of them to take back, reading them.

Parents come first, so that a reader can build as it reads; snapshots come in the order of their last hit. Rows carry
slab handles of the process that wrote them: a reader puts its own in their place (`HostTables.with_slabs`). Tokens and
tails are int32 little-endian bytes. Reading checks everything a file could get wrong before it changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from prefix_index.errors import InvalidArgument, WrongState
from prefix_index.events import Feed
from prefix_index.planning.cost import CostModel
from prefix_index.prompt import TOKEN_BYTES, namespace_hash
from prefix_index.retention.valuation import Valuation
from prefix_index.tree.records import (
    HAS_TAIL,
    HOST,
    KIND_SHIFT,
    Edge,
    Root,
    Snapshot,
    path_of,
    root_of,
    stamp_path,
)
from prefix_index.tree.tokens import block_rows
from prefix_index.tree.tree import Tree
from prefix_index.types import SnapshotKind, Tier, page_list


@dataclass(frozen=True, slots=True)
class BlockRow:
    """One block.

    Attributes:
        namespace: place of its namespace in `HostTables.namespaces`.
        parent: row of the block above, None at the top of its namespace.
        tokens: its tokens.
        extra: its extra key.
        block_hash: its chained hash.
        slab: where its Host copy lies.
    """

    namespace: int
    parent: int | None
    tokens: bytes
    extra: int
    block_hash: int
    slab: int


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """One retained snapshot.

    Attributes:
        namespace: place of its namespace in `HostTables.namespaces`.
        anchor: row of its last whole block, None when it stands on none.
        frontier: tokens its state has seen.
        tail: tokens after the anchor.
        extra: extra key of the tail.
        kind: why it was taken.
        hits: how often it was resumed from.
        slabs: where its Host copy lies: the image's slabs, then the tail's.
    """

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
    """What `PrefixIndex.export` returns and `import_tables` takes."""

    block_tokens: int
    namespaces: tuple[bytes, ...]
    blocks: tuple[BlockRow, ...]
    snapshots: tuple[SnapshotRow, ...]

    @property
    def num_slabs(self) -> int:
        """Slabs of all rows."""
        return len(self.blocks) + sum(len(row.slabs) for row in self.snapshots)

    @property
    def slabs(self) -> tuple[int, ...]:
        """All slab handles in the order in which their bytes are written: blocks, then each snapshot's."""
        return (*(row.slab for row in self.blocks), *(slab for row in self.snapshots for slab in row.slabs))

    def with_slabs(self, slabs: Sequence[int]) -> HostTables:
        """The same tables with other handles, in the order of `slabs`.

        Raises:
            InvalidArgument: there are more or fewer handles than rows need.
        """
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

    Raises:
        InvalidArgument: a parent does not come before its child, or an anchor is no block row.
    """
    paths = _paths(tables)
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


def _paths(tables: HostTables) -> list[list[int]]:
    """Per snapshot the rows of its path, deepest first. Refuses a parent that does not come before its child."""
    for position, row in enumerate(tables.blocks):
        if row.parent is not None and not 0 <= row.parent < position:
            raise InvalidArgument(f"tables: the parent of block row {position} must come before it, got {row.parent}")
    paths = []
    for position, snapshot in enumerate(tables.snapshots):
        path = []
        anchor = snapshot.anchor
        if anchor is not None and not 0 <= anchor < len(tables.blocks):
            raise InvalidArgument(f"tables: the anchor of snapshot row {position} must be a block row, got {anchor}")
        while anchor is not None:
            path.append(anchor)
            anchor = tables.blocks[anchor].parent
        paths.append(path)
    return paths


def export_tables(tree: Tree) -> HostTables:
    """Every retained snapshot with its image, tail and whole path on the Host, and exactly those paths. O(tree)."""
    saved = [snapshot for root in tree.roots.values() for snapshot in _on_host(root)]
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
        anchor = _write_path(tree, edge, snapshot.depth, namespace, blocks, written)
        name = (namespace, anchor, snapshot.frontier, snapshot.tail, snapshot.extra)
        rows.append(SnapshotRow(*name, snapshot.kind, snapshot.hits, snapshot.slabs))
    return HostTables(tree.geometry.block_tokens, tuple(namespaces), tuple(blocks), tuple(rows))


def _on_host(root: Root) -> list[Snapshot]:
    edges: list[Edge] = [root]
    for edge in edges:
        child = edge.first_child
        while child is not None:
            if child.snapshots or child.snapshot_children:
                edges.append(child)
            child = child.next_sibling
    return [s for edge in edges for s in edge.retained if s.status & HOST and s.depth <= edge.start + edge.host_blocks]


def _write_path(
    tree: Tree, edge: Edge, depth: int, namespace: int, blocks: list[BlockRow], written: dict[Edge, list[int]]
) -> int | None:
    """Write rows for those of the first `depth` blocks of the path to `edge` that have none; return the last one's row.

    `written` has an edge's rows so far.
    """
    parent: int | None = None
    for part in path_of(edge):
        rows = written.setdefault(part, [])
        if rows:
            parent = rows[-1]
        first = part.start + len(rows)
        for block_hash, _, at, tokens, extra in block_rows(tree.scheme, part, first, min(depth, part.end)):
            blocks.append(BlockRow(namespace, parent, tokens, extra, block_hash, part.slabs[at - part.start]))
            parent = len(blocks) - 1
            rows.append(parent)
        if depth < part.start + len(rows):
            parent = rows[depth - part.start - 1]
    return parent


def import_tables(tree: Tree, feed: Feed, valuation: Valuation, tables: HostTables) -> None:
    """Build the tables' content, Host-only, into an empty index. Refuses bad tables before it changes anything."""
    if tree.roots:
        raise WrongState(f"import_tables: the index must be empty, got {tree.num_blocks} blocks")
    if tables.block_tokens != tree.geometry.block_tokens:
        raise InvalidArgument(
            f"import_tables: blocks must be of {tree.geometry.block_tokens} tokens, got {tables.block_tokens}"
        )
    _check_rows(tree, tables, _paths(tables))
    children: dict[int | None, list[int]] = {}
    for position, block in enumerate(tables.blocks):
        children.setdefault(block.parent, []).append(position)
    edges: dict[int, Edge] = {}  # by block row
    for position, block in enumerate(tables.blocks):
        if block.parent is None or len(children[block.parent]) > 1:
            above = tree.root(tables.namespaces[block.namespace]) if block.parent is None else edges[block.parent]
            run = _unbranched_run(children, position)
            edge = _add_run(tree, above, [tables.blocks[row] for row in run])
            feed.stored(edge, Tier.HOST, edge.start, edge.end)
            edges.update(dict.fromkeys(run, edge))
    for row in tables.snapshots:
        edge = edges[row.anchor] if row.anchor is not None else tree.root(tables.namespaces[row.namespace])
        tree.serial += 1
        depth = tree.geometry.depth(row.frontier)
        status = row.kind << KIND_SHIFT | HOST | (HAS_TAIL if row.tail else 0)
        snapshot = Snapshot(tree.serial, edge, depth, row.frontier, row.tail, row.extra, status)
        snapshot.hits = row.hits
        snapshot.slabs = row.slabs
        tree.attach(snapshot)
        feed.published(snapshot)
        valuation.add(snapshot)
        stamp_path(edge, depth, tree.tick())


def _unbranched_run(children: dict[int | None, list[int]], first: int) -> list[int]:
    """The rows from `first` on down to the next branch."""
    run = [first]
    while len(children.get(run[-1], ())) == 1:
        run.append(children[run[-1]][0])
    return run


def _add_run(tree: Tree, above: Edge, rows: Sequence[BlockRow]) -> Edge:
    """One edge from rows that follow each other without a branch."""
    extras = tuple(row.extra for row in rows)
    tokens = b"".join(row.tokens for row in rows)
    edge = tree.add_child(above, tokens, extras if any(extras) else None, rows[0].block_hash, [])
    tree.add_host_copies(edge, [row.slab for row in rows])
    return edge


def _check_rows(tree: Tree, tables: HostTables, paths: list[list[int]]) -> None:
    needed = {row for path in paths for row in path}
    blocks: set[tuple[int, int | None, bytes, int]] = set()
    for position, block in enumerate(tables.blocks):
        complaint = _block_complaint(tree, tables, block)
        name = (block.namespace, block.parent, block.tokens, block.extra)
        if complaint is None and (name in blocks or position not in needed):
            complaint = "be unique and lie on the path of a snapshot"
        if complaint is not None:
            raise InvalidArgument(f"import_tables: block row {position} must {complaint}, got {block!r}")
        blocks.add(name)
    snapshots: set[tuple[int, int | None, bytes, int]] = set()
    for position, row in enumerate(tables.snapshots):
        complaint = _snapshot_complaint(tree, tables, row, len(paths[position]))
        key = (row.namespace, row.anchor, row.tail, row.extra)
        if complaint is None and key in snapshots:
            complaint = "be unique"
        if complaint is not None:
            raise InvalidArgument(f"import_tables: snapshot row {position} must {complaint}, got {row!r}")
        snapshots.add(key)
    if len(set(tables.namespaces)) != len(tables.namespaces):
        raise InvalidArgument(
            f"import_tables: every namespace must be named once, got {len(tables.namespaces)} with doubles"
        )
    handles = page_list("import_tables", tables.slabs, 1, tables.num_slabs)
    if len(set(handles)) != len(handles):
        raise InvalidArgument(
            f"import_tables: every slab must be given once, got {len(handles) - len(set(handles))} doubles"
        )


def _block_complaint(tree: Tree, tables: HostTables, row: BlockRow) -> str | None:
    if not 0 <= row.namespace < len(tables.namespaces):
        return f"name one of {len(tables.namespaces)} namespaces"
    above = None if row.parent is None else tables.blocks[row.parent]
    if above is not None and above.namespace != row.namespace:
        return "stay in its parent's namespace"
    if len(row.tokens) != tree.scheme.block_bytes:
        return f"have {tree.scheme.block_bytes} bytes of tokens"
    if not _within(row.extra, 1 << 64):
        return "have an extra of 64 bits"
    parent_hash = namespace_hash(tables.namespaces[row.namespace]) if above is None else above.block_hash
    if row.block_hash != tree.scheme.hasher(parent_hash, row.tokens, row.extra):
        return "carry the hash of its tokens"
    return None


def _snapshot_complaint(tree: Tree, tables: HostTables, row: SnapshotRow, path_blocks: int) -> str | None:
    geometry = tree.geometry
    numbers = _within(row.hits, 1 << 63) and _within(row.frontier, 1 << 63)
    if not 0 <= row.namespace < len(tables.namespaces) or not numbers or row.frontier < 1:
        return "have a namespace, no negative hits and a positive frontier"
    if not _within(row.kind, len(SnapshotKind)):
        return f"be of one of {len(SnapshotKind)} kinds"
    depth = geometry.depth(row.frontier)
    tail = row.frontier - depth * geometry.block_tokens
    if path_blocks != depth or len(row.tail) != tail * TOKEN_BYTES:
        return f"stand on {depth} blocks with a tail of {tail} tokens"
    if not _within(row.extra, 1 << 64 if tail else 1):
        return "have an extra of 64 bits with a tail, and none without"
    if len(row.slabs) != geometry.image_slabs + bool(tail):
        return f"have {geometry.image_slabs + bool(tail)} slabs"
    if row.anchor is not None and tables.blocks[row.anchor].namespace != row.namespace:
        return "share its anchor's namespace"
    return None


def _within(number: int, limit: int) -> bool:
    return isinstance(number, int) and 0 <= number < limit
