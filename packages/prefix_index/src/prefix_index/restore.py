"""Taking exported tables back: checks everything a file could get wrong, then builds the tree from its rows."""

from __future__ import annotations

from prefix_index.core import Core
from prefix_index.errors import InvalidArgument, WrongState
from prefix_index.fills import hold_on_host
from prefix_index.nodes import HAS_TAIL, HOST, KIND_SHIFT, Edge, Snapshot
from prefix_index.prompt import TOKEN_BYTES, namespace_hash
from prefix_index.tables import BlockRow, HostTables, SnapshotRow, paths_of
from prefix_index.values import SnapshotKind, Tier, page_list


def restore(core: Core, tables: HostTables) -> list[Snapshot]:
    """Build the tables' content, Host-only, into an empty index. Refuses bad tables before it changes anything."""
    if core.tree.roots:
        raise WrongState(f"restore: the index must be empty, got {core.tree.num_blocks} blocks")
    if tables.block_tokens != core.geometry.block_tokens:
        raise InvalidArgument(
            f"restore: blocks must be of {core.geometry.block_tokens} tokens, got {tables.block_tokens}"
        )
    paths = paths_of(tables)
    _check_rows(core, tables, paths)
    children: dict[int | None, list[int]] = {}
    for position, block in enumerate(tables.blocks):
        children.setdefault(block.parent, []).append(position)
    edges: dict[int, Edge] = {}  # by block row
    for position, block in enumerate(tables.blocks):
        if block.parent is None or len(children[block.parent]) > 1:
            above = core.tree.root(tables.namespaces[block.namespace]) if block.parent is None else edges[block.parent]
            _add_run(core, tables, position, above, children, edges)
    made = []
    for row in tables.snapshots:
        edge = edges[row.anchor] if row.anchor is not None else core.tree.root(tables.namespaces[row.namespace])
        core.serial += 1
        depth = core.geometry.depth(row.frontier)
        where = row.kind << KIND_SHIFT | HOST | (HAS_TAIL if row.tail else 0)
        snapshot = Snapshot(core.serial, edge, depth, row.frontier, row.tail, row.extra, where)
        snapshot.hits = row.hits
        snapshot.slabs = row.slabs
        core.worth.attach(snapshot)
        core.worth.offer(snapshot)
        core.stamp(edge, depth, core.tick())
        made.append(snapshot)
    return made


def _add_run(
    core: Core,
    tables: HostTables,
    first: int,
    above: Edge,
    children: dict[int | None, list[int]],
    edges: dict[int, Edge],
) -> None:
    """One edge from the run of rows that starts at `first` and has no branch inside."""
    run = [first]
    while len(children.get(run[-1], ())) == 1:
        run.append(children[run[-1]][0])
    rows = [tables.blocks[row] for row in run]
    extras = tuple(row.extra for row in rows)
    tokens = b"".join(row.tokens for row in rows)
    edge = core.tree.add_child(above, tokens, extras if any(extras) else None, rows[0].block_hash, [])
    hold_on_host(core, edge, [row.slab for row in rows])
    core.feed.stored(edge, Tier.HOST, edge.start, edge.end)
    edges.update(dict.fromkeys(run, edge))


def _check_rows(core: Core, tables: HostTables, paths: list[list[int]]) -> None:
    needed = {row for path in paths for row in path}
    blocks: set[tuple[int, int | None, bytes, int]] = set()
    for position, block in enumerate(tables.blocks):
        complaint = _block_complaint(core, tables, block)
        name = (block.namespace, block.parent, block.tokens, block.extra)
        if complaint is None and (name in blocks or position not in needed):
            complaint = "be unique and lie on the path of a snapshot"
        if complaint is not None:
            raise InvalidArgument(f"restore: block row {position} must {complaint}, got {block!r}")
        blocks.add(name)
    snapshots: set[tuple[int, int | None, bytes, int]] = set()
    for position, row in enumerate(tables.snapshots):
        complaint = _snapshot_complaint(core, tables, row, len(paths[position]))
        key = (row.namespace, row.anchor, row.tail, row.extra)
        if complaint is None and key in snapshots:
            complaint = "be unique"
        if complaint is not None:
            raise InvalidArgument(f"restore: snapshot row {position} must {complaint}, got {row!r}")
        snapshots.add(key)
    if len(set(tables.namespaces)) != len(tables.namespaces):
        raise InvalidArgument(f"restore: every namespace must be named once, got {len(tables.namespaces)} with doubles")
    handles = page_list("restore", tables.slabs, 1, tables.num_slabs)
    if len(set(handles)) != len(handles):
        raise InvalidArgument(f"restore: every slab must be given once, got {len(handles) - len(set(handles))} doubles")


def _block_complaint(core: Core, tables: HostTables, row: BlockRow) -> str | None:
    if not 0 <= row.namespace < len(tables.namespaces):
        return f"name one of {len(tables.namespaces)} namespaces"
    above = None if row.parent is None else tables.blocks[row.parent]
    if above is not None and above.namespace != row.namespace:
        return "stay in its parent's namespace"
    if len(row.tokens) != core.tree.scheme.block_bytes:
        return f"have {core.tree.scheme.block_bytes} bytes of tokens"
    if not _within(row.extra, 1 << 64):
        return "have an extra of 64 bits"
    parent_hash = namespace_hash(tables.namespaces[row.namespace]) if above is None else above.block_hash
    if row.block_hash != core.tree.scheme.hasher(parent_hash, row.tokens, row.extra):
        return "carry the hash of its tokens"
    return None


def _snapshot_complaint(core: Core, tables: HostTables, row: SnapshotRow, path_blocks: int) -> str | None:
    geometry = core.geometry
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
