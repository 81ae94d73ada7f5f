"""Re-derives everything the index keeps incrementally, from tokens and handles alone, and compares."""

from __future__ import annotations

from prefix_index.core import Core
from prefix_index.device import UNBACKED
from prefix_index.errors import InvariantViolation
from prefix_index.nodes import (
    DEVICE_IMAGE,
    DEVICE_TAIL,
    FILLING_HOST,
    HAS_TAIL,
    HOST,
    Edge,
    Root,
    Snapshot,
    stamps_of,
)
from prefix_index.prompt import TOKEN_BYTES, BlockScheme
from prefix_index.runs import hash_before, pieces_of
from prefix_index.values import SnapshotKind


def edges_of(root: Root) -> list[Edge]:
    """All edges below `root`, parents first, no recursion."""
    edges: list[Edge] = [root]
    for edge in edges:
        child = edge.first
        while child is not None:
            edges.append(child)
            child = child.next
    return edges[1:]


def require(holds: bool, what: str, *values: object) -> None:
    if not holds:
        raise InvariantViolation(f"check_invariants: {what}, got {', '.join(map(repr, values))}")


def check(core: Core) -> None:
    """Raise InvariantViolation at the first contradiction. O(tree)."""
    facts = _Facts(core)
    for namespace, root in core.tree.roots.items():
        require(root.namespace == namespace, "a root must sit under its namespace", root.namespace, namespace)
        require(bool(root.first or root.snaps or root.pins), "an empty root must be forgotten", namespace)
        edges = edges_of(root)
        for edge in edges:
            facts.structure(edge)
        for edge in (*reversed(edges), root):
            facts.counters(edge)
        for edge in (root, *edges):
            facts.snapshots(edge)
    facts.totals()
    core.worth.flush()
    for root in core.tree.roots.values():
        for edge in (root, *edges_of(root)):
            facts.owners(edge)
    facts.orders()


class _Facts:
    """What the walk over the tree has established."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.blocks = self.edges = self.device_blocks = self.host_blocks = 0
        self.tails = self.pinned_blocks = self.pinned_tails = 0
        self.kinds = [0] * len(SnapshotKind)
        self.pages: list[set[int]] = [set() for _ in range(core.geometry.num_pools)]
        self.slots: set[int] = set()
        self.slabs: set[int] = set()
        self.leaves: list[tuple[int, int]] = []
        self.slot_owners: list[tuple[tuple[float, ...], int]] = []
        self.dead: list[tuple[int, int]] = []
        self.superseded: list[tuple[int, int]] = []
        self.retained: list[tuple[float, int, int]] = []

    def structure(self, edge: Edge) -> None:
        scheme = self.core.tree.scheme
        pools = self.core.geometry.num_pools
        parent = edge.parent
        assert parent is not None
        size = edge.end - edge.start
        require(edge.start == parent.end and size > 0, "an edge must start where its parent ends", edge.start, edge.end)
        if edge.extras is not None:
            require(len(edge.extras) == size and any(edge.extras), "extras must be one per block or None", edge.extras)
        at = edge.start * scheme.block_bytes
        runs, starts, keys = pieces_of(edge, scheme)
        hashes = scheme.chain(hash_before(parent, scheme, parent.end), b"".join(runs), edge.extras)
        require(len(hashes) == size, "tokens must fill the edge", len(hashes), size)
        require(edge.head is runs[0] and edge.key == keys[0], "the first run must be the head", edge.start)
        require(edge.pieces is None or len(runs) > 1, "one piece needs no lists", edge.start)
        require(len(runs) == len(starts) == len(keys), "every run needs a start and a key", edge.start)
        for run, start, key in zip(runs, starts, keys, strict=True):
            require(start == at and len(run) % scheme.block_bytes == 0, "runs must follow each other", start, at)
            expected = hashes[at // scheme.block_bytes - edge.start]
            require(key is None or key == expected, "a run's key must be the hash of its first block", key, expected)
            at += len(run)
        require(max(edge.dev, edge.host) == size, "every block must have a copy", edge.dev, edge.host, size)
        require(len(edge.pages) == edge.dev * pools, "pages must match the device length", len(edge.pages), edge.dev)
        require(len(edge.slabs) == edge.host, "slabs must match the Host length", len(edge.slabs), edge.host)
        full = parent.end - parent.start
        require(not edge.dev or parent.dev == full, "a device block must have its path on the device", edge.start)
        require(not edge.host or parent.host == full, "a Host block must have its path on the Host", edge.start)
        for i, page in enumerate(edge.pages):
            self.claim(self.pages[i % pools], page, "page")
        for slab in edge.slabs:
            self.claim(self.slabs, slab, "slab")
        self.edges += 1
        self.blocks += size
        self.device_blocks += edge.dev
        self.host_blocks += edge.host

    def claim(self, owned: set[int], handle: int, what: str) -> None:
        require(handle not in owned, f"a {what} must have one owner", handle)
        owned.add(handle)

    def counters(self, edge: Edge) -> None:
        children = []
        child = edge.first
        previous = None
        while child is not None:
            require(child.parent is edge and child.prev is previous, "sibling links must agree", child.start)
            children.append(child)
            previous, child = child, child.next
        require(edge.last is previous, "the last child must be linked", edge.end)
        carrying = [bool(child.kept or child.kbelow) for child in children]
        require(
            carrying == sorted(carrying, reverse=True), "children with retained snapshots must come first", carrying
        )
        firsts = {(c.head[: self.core.tree.scheme.block_bytes], c.extras[0] if c.extras else 0) for c in children}
        require(len(firsts) == len(children), "siblings must differ in their first block", edge.end)
        if len(children) > 1:
            twins = []
            for head in (edge.branch or {}).values():
                at: Edge | None = head
                while at is not None:
                    require(at.key == head.key, "twins must share a key", at.key, head.key)
                    twins.append(id(at))
                    at = at.twin
            require(sorted(twins) == sorted(map(id, children)), "the branch must list every child", len(twins))
        else:
            require(
                edge.branch is None and all(c.twin is None for c in children), "one child needs no branch", edge.end
            )
        snaps = edge.snaps
        tails = [snapshot.at for snapshot in snaps if snapshot.tail_pages is not None]
        kept = {snapshot for snapshot in snaps if not snapshot.superseded}
        require(set(edge.kept) == kept, "retained snapshots must be listed", len(edge.kept), len(kept))
        require(list(edge.wheres) == [snapshot.where for snapshot in snaps], "copies must be listed", edge.wheres)
        frontiers = [snapshot.frontier for snapshot in edge.kept]
        require(frontiers == sorted(frontiers), "retained snapshots must be ordered by frontier", frontiers)
        require((edge.tails or []) == tails and edge.tails != [], "device tails must be listed", edge.tails, tails)
        lost = edge.lost or []
        require(lost == sorted(set(lost)) and edge.lost != [], "lost depths must be listed once, in order", edge.lost)
        require(all(edge.start <= at <= edge.end for at in lost), "lost snapshots must lie in their edge", lost)
        holds = edge.holds or []
        for name, value, expected in (
            ("below", edge.below, sum(child.dev > 0 for child in children)),
            ("hbelow", edge.hbelow, sum(child.host > 0 for child in children)),
            ("sbelow", edge.sbelow, sum(bool(child.snaps or child.sbelow) for child in children)),
            ("kbelow", edge.kbelow, sum(carrying)),
            ("pins", edge.pins, len(holds) + sum(child.pins > 0 for child in children)),
        ):
            require(value == expected, f"{name} must count what lies below", value, expected)
        require(edge.holds is None or bool(holds), "an empty list of holds must be None", holds)
        for hold in holds:
            inside = edge.start < hold.depth <= edge.end or (edge.parent is None and hold.depth == 0)
            require(hold.edge is edge and inside, "a hold must end inside its edge", hold.depth)
        through = any(child.pins for child in children)
        pinned = edge.end if through else max((hold.depth for hold in holds), default=edge.start)
        pinned_here = min(pinned - edge.start, edge.dev)
        self.pinned_blocks += pinned_here
        end = edge.start + edge.dev
        if edge.dev > pinned_here and not edge.below and end not in tails:
            self.leaves.append((self.tick(edge, end) + (0 if edge.host >= edge.dev else UNBACKED), id(edge)))
        end = edge.start + edge.host
        alive = (
            edge.end
            if any(child.snaps or child.sbelow for child in children)
            else max((s.at for s in snaps), default=edge.start)
        )
        if end > max(pinned, alive, edge.start) and not edge.hbelow:
            self.dead.append((self.tick(edge, end), id(edge)))
        stamps = stamps_of(edge)
        ends = [end for end, _ in stamps]
        ticks = [tick for _, tick in stamps]
        require(ends == sorted(set(ends), reverse=True), "stamps must come deepest first", stamps)
        require(ticks == sorted(ticks), "recency must not rise towards the end", stamps)
        require(all(edge.start < end <= edge.end for end in ends), "stamps must lie in their edge", stamps)
        require(edge.older is None or bool(edge.older), "no older stamps must be None", edge.older)

    def tick(self, edge: Edge, depth: int) -> int:
        """Recency of the block before `depth`."""
        return max((tick for end, tick in stamps_of(edge) if end >= depth), default=0)

    def snapshots(self, edge: Edge) -> None:
        core = self.core
        frontiers = [snapshot.frontier for snapshot in edge.snaps]
        require(frontiers == sorted(frontiers), "snapshots of an edge must be ordered by frontier", frontiers)
        names = {(snapshot.at, snapshot.tail, snapshot.extra) for snapshot in edge.snaps}
        require(len(names) == len(edge.snaps), "one snapshot per anchor, tail and extra", len(names))
        for snapshot in edge.snaps:
            self.kinds[snapshot.kind] += 1
            size = core.geometry.block_tokens
            tokens = len(snapshot.tail) // 4
            require(snapshot.edge is edge, "a snapshot must know its edge", snapshot.serial)
            inside = edge.start < snapshot.at <= edge.end or (edge.parent is None and snapshot.at == 0)
            require(inside, "a snapshot must stand in its edge", snapshot.at)
            require(snapshot.frontier == snapshot.at * size + tokens, "frontier = anchor + tail", snapshot.frontier)
            require(core.geometry.depth(snapshot.frontier) == snapshot.at, "the tail must fit the pools' lag", tokens)
            where = snapshot.where
            hosted = bool(where & HOST)
            require(bool(where & HAS_TAIL) == bool(tokens), "a tail must be marked", where)
            require(bool(where & DEVICE_IMAGE) == (snapshot.slot is not None), "a slot must be marked", where)
            require(bool(where & DEVICE_TAIL) == (snapshot.tail_pages is not None), "a tail page must be marked", where)
            require(snapshot.slot is not None or hosted, "a snapshot must have an image", snapshot.serial)
            require(not tokens or snapshot.tail_pages is not None or hosted, "a tail must have a copy", snapshot.serial)
            require((snapshot.slabs is not None) == bool(where & (HOST | FILLING_HOST)), "slabs must be marked", where)
            require(snapshot.pins >= 0, "pins must not be negative", snapshot.pins)
            if snapshot.slot is not None:
                self.claim(self.slots, snapshot.slot, "slot")
            if snapshot.slabs is not None:
                for slab in snapshot.slabs:
                    self.claim(self.slabs, slab, "slab")
            if snapshot.tail_pages is not None:
                on_device = edge.start + edge.dev >= snapshot.at
                require(on_device, "a device tail must have its path there", snapshot.serial)
                self.tails += 1
                for pool, page in enumerate(snapshot.tail_pages):
                    self.claim(self.pages[pool], page, "page")
                if snapshot.pins:
                    self.pinned_tails += 1
                else:
                    self.leaves.append((snapshot.tick + (0 if hosted else UNBACKED), id(snapshot)))

    def owners(self, edge: Edge) -> None:
        """The values, now that all are derived, and under them who may lose a slot or a Host copy."""
        for snapshot in edge.snaps:
            if not snapshot.superseded:
                above = nearest_retained(snapshot, self.core.tree.scheme)
                value = self.core.worth.value_above(snapshot, above.frontier if above is not None else 0)
                require(snapshot.value == value, "a value must be up to date", snapshot.value, value)
            if snapshot.pins:
                continue
            if snapshot.slot is not None:
                self.slot_owners.append((_slot_key(snapshot), id(snapshot)))
            if snapshot.where & HOST and snapshot.superseded:
                self.superseded.append((snapshot.superseded, id(snapshot)))
            elif snapshot.where & HOST:
                self.retained.append((snapshot.value, snapshot.hit_tick, id(snapshot)))

    def totals(self) -> None:
        core = self.core
        for name, value, expected in (
            ("num_blocks", core.tree.num_blocks, self.blocks),
            ("num_edges", core.tree.num_edges, self.edges),
            ("kinds", core.kinds, self.kinds),
            ("device_blocks", core.device_blocks, self.device_blocks),
            ("device_tails", core.device_tails, self.tails),
            ("host_blocks", core.host_blocks, self.host_blocks),
            ("pinned_blocks", core.pinned_blocks, self.pinned_blocks),
            ("pinned_tails", core.pinned_tails, self.pinned_tails),
        ):
            require(value == expected, f"{name} must be exact", value, expected)

    def orders(self) -> None:
        expected = [identity for _, identity in sorted(self.leaves)]
        require([id(item) for item in self.core.device.in_order()] == expected, "the device order", len(expected))
        expected = [identity for _, identity in sorted(self.slot_owners)]
        require([id(item) for item in self.core.slots.in_order()] == expected, "the slot order", len(expected))
        dead, superseded, retained = self.core.host.in_order()
        for what, items, entries in (
            ("dead", dead, self.dead),
            ("superseded", superseded, self.superseded),
            ("retained", retained, self.retained),
        ):
            require(
                [id(item) for item in items] == [entry[-1] for entry in sorted(entries)], f"the {what} order", items
            )


def _slot_key(snapshot: Snapshot) -> tuple[float, ...]:
    if snapshot.superseded:
        return 0, snapshot.superseded
    if snapshot.where & HOST:
        return 2, snapshot.hit_tick
    return 1, snapshot.value, snapshot.hit_tick


def nearest_retained(snapshot: Snapshot, scheme: BlockScheme) -> Snapshot | None:
    """The deepest retained snapshot whose prefix is a proper prefix of this one's, by comparing tokens."""
    assert snapshot.edge is not None
    path: list[Edge] = []
    at: Edge | None = snapshot.edge
    while at is not None:
        path.append(at)
        at = at.parent
    tokens = b"".join(run for edge in reversed(path) for run in pieces_of(edge, scheme)[0])
    own = tokens[: TOKEN_BYTES * snapshot.frontier - len(snapshot.tail)] + snapshot.tail
    above = [
        other
        for edge in path
        for other in edge.kept
        if other.frontier < snapshot.frontier
        and own.startswith(other.tail, TOKEN_BYTES * other.frontier - len(other.tail))
    ]
    return max(above, key=lambda other: other.frontier, default=None)
