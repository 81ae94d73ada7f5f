"""The check of the invariants: derives everything anew from tokens and handles alone, and compares."""

from __future__ import annotations

from prefix_index.errors import InvariantViolation
from prefix_index.prompt import TOKEN_BYTES, BlockScheme
from prefix_index.retention.queues import UNBACKED, Queues
from prefix_index.retention.valuation import Valuation
from prefix_index.tree.records import (
    DEVICE_IMAGE,
    DEVICE_TAIL,
    FILLING_HOST,
    HAS_TAIL,
    HOST,
    Edge,
    Snapshot,
    edges_below,
    path_of,
    root_of,
    stamps_of,
)
from prefix_index.tree.tokens import hash_before, pieces_of
from prefix_index.tree.tree import Tree
from prefix_index.types import SnapshotKind


def require(holds: bool, what: str, *values: object) -> None:
    """Raise InvariantViolation with `what` must hold and the values that contradict it, unless it holds."""
    if not holds:
        raise InvariantViolation(f"check_invariants: {what}, got {', '.join(map(repr, values))}")


def check(tree: Tree, queues: Queues, valuation: Valuation) -> None:
    """Raise InvariantViolation at the first contradiction. O(tree)."""
    facts = _Facts(tree)
    edges_of = {root: edges_below(root) for root in tree.roots.values()}
    for namespace, root in tree.roots.items():
        require(root.namespace == namespace, "a root must sit under its namespace", root.namespace, namespace)
        require(bool(root.first_child or root.snapshots or root.pins), "an empty root must be forgotten", namespace)
        edges = edges_of[root]
        for edge in edges[1:]:
            facts.structure(edge)
        for edge in reversed(edges):
            facts.counters(edge)
        for edge in edges:
            facts.snapshots(edge)
    facts.totals()
    valuation.flush()
    for edges in edges_of.values():
        for edge in edges:
            facts.owners(edge, valuation)
    facts.queues(queues)


class _Facts:
    """What the walk over the tree has established."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.blocks = self.edges = self.device_blocks = self.host_blocks = 0
        self.tails = self.pinned_blocks = self.pinned_tails = 0
        self.kinds = [0] * len(SnapshotKind)
        self.pages: list[set[int]] = [set() for _ in range(tree.geometry.num_pools)]
        self.slots: set[int] = set()
        self.slabs: set[int] = set()
        self.leaves: list[tuple[int, int]] = []
        self.slot_owners: list[tuple[tuple[float, ...], int]] = []
        self.dead: list[tuple[int, int]] = []
        self.superseded: list[tuple[int, int]] = []
        self.retained: list[tuple[float, int, int]] = []

    def structure(self, edge: Edge) -> None:
        """Tokens, extras, hashes and copies of an edge's blocks."""
        scheme = self.tree.scheme
        pools = self.tree.geometry.num_pools
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
        device, host = edge.device_blocks, edge.host_blocks
        require(max(device, host) == size, "every block must have a copy", device, host, size)
        require(len(edge.pages) == device * pools, "pages must match the device length", len(edge.pages), device)
        require(len(edge.slabs) == host, "slabs must match the Host length", len(edge.slabs), host)
        full = parent.end - parent.start
        require(not device or parent.device_blocks == full, "a device block must have its path there", edge.start)
        require(not host or parent.host_blocks == full, "a Host block must have its path there", edge.start)
        for i, page in enumerate(edge.pages):
            self.claim(self.pages[i % pools], page, "page")
        for slab in edge.slabs:
            self.claim(self.slabs, slab, "slab")
        self.edges += 1
        self.blocks += size
        self.device_blocks += device
        self.host_blocks += host

    def claim(self, owned: set[int], handle: int, what: str) -> None:
        """Note the one owner of a handle."""
        require(handle not in owned, f"a {what} must have one owner", handle)
        owned.add(handle)

    def counters(self, edge: Edge) -> None:
        """Links to children, counters and lists of an edge, and what of it may be evicted."""
        children = self.children(edge)
        snapshots = edge.snapshots
        tails = [snapshot.depth for snapshot in snapshots if snapshot.tail_pages is not None]
        self.lists(edge, tails)
        holds = edge.holds or []
        for name, value, expected in (
            ("device_children", edge.device_children, sum(child.device_blocks > 0 for child in children)),
            ("host_children", edge.host_children, sum(child.host_blocks > 0 for child in children)),
            ("snapshot_children", edge.snapshot_children, sum(map(_has_snapshots, children))),
            ("retained_children", edge.retained_children, sum(map(_has_retained, children))),
            ("pins", edge.pins, len(holds) + sum(child.pins > 0 for child in children)),
        ):
            require(value == expected, f"{name} must count what lies below", value, expected)
        require(edge.holds is None or bool(holds), "an empty list of holds must be None", holds)
        for hold in holds:
            inside = edge.start < hold.depth <= edge.end or (edge.parent is None and hold.depth == 0)
            require(hold.edge is edge and inside, "a hold must end inside its edge", hold.depth)
        through = any(child.pins for child in children)
        pinned = edge.end if through else max((hold.depth for hold in holds), default=edge.start)
        pinned_here = min(pinned - edge.start, edge.device_blocks)
        self.pinned_blocks += pinned_here
        end = edge.start + edge.device_blocks
        if edge.device_blocks > pinned_here and not edge.device_children and end not in tails:
            unbacked = 0 if edge.host_blocks >= edge.device_blocks else UNBACKED
            self.leaves.append((self.tick(edge, end) + unbacked, id(edge)))
        end = edge.start + edge.host_blocks
        alive = max((snapshot.depth for snapshot in snapshots), default=edge.start)
        if any(map(_has_snapshots, children)):
            alive = edge.end
        if end > max(pinned, alive, edge.start) and not edge.host_children:
            self.dead.append((self.tick(edge, end), id(edge)))

    def children(self, edge: Edge) -> list[Edge]:
        """The children of an edge, once their links are known to agree."""
        children = []
        child = edge.first_child
        previous = None
        while child is not None:
            linked = child.parent is edge and child.previous_sibling is previous
            require(linked, "sibling links must agree", child.start)
            children.append(child)
            previous, child = child, child.next_sibling
        require(edge.last_child is previous, "the last child must be linked", edge.end)
        carrying = [_has_retained(child) for child in children]
        in_front = carrying == sorted(carrying, reverse=True)
        require(in_front, "children with retained snapshots must come first", carrying)
        firsts = {(c.head[: self.tree.scheme.block_bytes], c.extras[0] if c.extras else 0) for c in children}
        require(len(firsts) == len(children), "siblings must differ in their first block", edge.end)
        if len(children) > 1:
            listed = []
            for head in (edge.branch or {}).values():
                child = head
                while child is not None:
                    require(child.key == head.key, "colliding children must share a key", child.key, head.key)
                    listed.append(id(child))
                    child = child.next_collision
            require(sorted(listed) == sorted(map(id, children)), "the branch must list every child", len(listed))
        else:
            lone = edge.branch is None and all(child.next_collision is None for child in children)
            require(lone, "one child needs no branch", edge.end)
        return children

    def lists(self, edge: Edge, tails: list[int]) -> None:
        """What an edge lists of its snapshots and of its recency; `tails` are the depths of the device tails."""
        snapshots = edge.snapshots
        retained = {snapshot for snapshot in snapshots if not snapshot.superseded}
        require(set(edge.retained) == retained, "retained snapshots must be listed", len(edge.retained), len(retained))
        statuses = [snapshot.status for snapshot in snapshots]
        require(list(edge.statuses) == statuses, "statuses must be listed", edge.statuses)
        frontiers = [snapshot.frontier for snapshot in edge.retained]
        require(frontiers == sorted(frontiers), "retained snapshots must be ordered by frontier", frontiers)
        listed = edge.tail_depths
        require((listed or []) == tails and listed != [], "device tails must be listed", listed, tails)
        lost = edge.lost_depths or []
        once = lost == sorted(set(lost)) and edge.lost_depths != []
        require(once, "lost depths must be listed once, in order", edge.lost_depths)
        require(all(edge.start <= depth <= edge.end for depth in lost), "lost snapshots must lie in their edge", lost)
        stamps = stamps_of(edge)
        ends = [end for end, _ in stamps]
        ticks = [tick for _, tick in stamps]
        require(ends == sorted(set(ends), reverse=True), "stamps must come deepest first", stamps)
        require(ticks == sorted(ticks), "recency must not rise towards the end", stamps)
        require(all(edge.start < end <= edge.end for end in ends), "stamps must lie in their edge", stamps)
        require(edge.older_stamps is None or bool(edge.older_stamps), "no older stamps must be None", edge.older_stamps)

    def tick(self, edge: Edge, depth: int) -> int:
        """Recency of the block before `depth`."""
        return max((tick for end, tick in stamps_of(edge) if end >= depth), default=0)

    def snapshots(self, edge: Edge) -> None:
        """Every snapshot of an edge, and what of it may be evicted."""
        geometry = self.tree.geometry
        frontiers = [snapshot.frontier for snapshot in edge.snapshots]
        require(frontiers == sorted(frontiers), "snapshots of an edge must be ordered by frontier", frontiers)
        names = {(snapshot.depth, snapshot.tail, snapshot.extra) for snapshot in edge.snapshots}
        require(len(names) == len(edge.snapshots), "one snapshot per anchor, tail and extra", len(names))
        for snapshot in edge.snapshots:
            self.kinds[snapshot.kind] += 1
            size = geometry.block_tokens
            tokens = len(snapshot.tail) // 4
            require(snapshot.edge is edge, "a snapshot must know its edge", snapshot.serial)
            inside = edge.start < snapshot.depth <= edge.end or (edge.parent is None and snapshot.depth == 0)
            require(inside, "a snapshot must stand in its edge", snapshot.depth)
            require(snapshot.frontier == snapshot.depth * size + tokens, "frontier = anchor + tail", snapshot.frontier)
            require(geometry.depth(snapshot.frontier) == snapshot.depth, "the tail must fit the pools' lag", tokens)
            status = snapshot.status
            hosted = bool(status & HOST)
            require(bool(status & HAS_TAIL) == bool(tokens), "a tail must be marked", status)
            require(bool(status & DEVICE_IMAGE) == (snapshot.slot is not None), "a slot must be marked", status)
            require(
                bool(status & DEVICE_TAIL) == (snapshot.tail_pages is not None), "a tail page must be marked", status
            )
            require(snapshot.slot is not None or hosted, "a snapshot must have an image", snapshot.serial)
            require(not tokens or snapshot.tail_pages is not None or hosted, "a tail must have a copy", snapshot.serial)
            require(
                (snapshot.slabs is not None) == bool(status & (HOST | FILLING_HOST)), "slabs must be marked", status
            )
            require(snapshot.pins >= 0, "pins must not be negative", snapshot.pins)
            if snapshot.slot is not None:
                self.claim(self.slots, snapshot.slot, "slot")
            if snapshot.slabs is not None:
                for slab in snapshot.slabs:
                    self.claim(self.slabs, slab, "slab")
            if snapshot.tail_pages is not None:
                on_device = edge.start + edge.device_blocks >= snapshot.depth
                require(on_device, "a device tail must have its path there", snapshot.serial)
                self.tails += 1
                for pool, page in enumerate(snapshot.tail_pages):
                    self.claim(self.pages[pool], page, "page")
                if snapshot.pins:
                    self.pinned_tails += 1
                else:
                    self.leaves.append((snapshot.tick + (0 if hosted else UNBACKED), id(snapshot)))

    def owners(self, edge: Edge, valuation: Valuation) -> None:
        """The values, now that all are derived, and under them what may lose a slot or a Host copy."""
        for snapshot in edge.snapshots:
            if not snapshot.superseded:
                above = nearest_retained(snapshot, self.tree.scheme)
                value = valuation.value_above(snapshot, above.frontier if above is not None else 0)
                require(snapshot.value == value, "a value must be up to date", snapshot.value, value)
            if snapshot.pins:
                continue
            if snapshot.slot is not None:
                self.slot_owners.append((_slot_key(snapshot), id(snapshot)))
            if snapshot.status & HOST and snapshot.superseded:
                self.superseded.append((snapshot.superseded, id(snapshot)))
            elif snapshot.status & HOST:
                self.retained.append((snapshot.value, snapshot.hit_tick, id(snapshot)))

    def totals(self) -> None:
        """The tree's counts."""
        tree = self.tree
        for name, value, expected in (
            ("num_blocks", tree.num_blocks, self.blocks),
            ("num_edges", tree.num_edges, self.edges),
            ("kinds", tree.kinds, self.kinds),
            ("device_blocks", tree.device_blocks, self.device_blocks),
            ("device_tails", tree.device_tails, self.tails),
            ("host_blocks", tree.host_blocks, self.host_blocks),
            ("pinned_blocks", tree.pinned_blocks, self.pinned_blocks),
            ("pinned_tails", tree.pinned_tails, self.pinned_tails),
        ):
            require(value == expected, f"{name} must be exact", value, expected)

    def queues(self, queues: Queues) -> None:
        """Every queue has exactly what may go, in the order in which it goes."""
        slots = [
            *queues.slot_superseded.in_order(),
            *queues.slot_unbacked.in_order(),
            *queues.slot_backed.in_order(),
        ]
        for what, items, entries in (
            ("device", queues.device.in_order(), self.leaves),
            ("slot", slots, self.slot_owners),
            ("dead", queues.dead.in_order(), self.dead),
            ("superseded", queues.host_superseded.in_order(), self.superseded),
            ("retained", queues.host_retained.in_order(), self.retained),
        ):
            expected = [entry[-1] for entry in sorted(entries)]
            require([id(item) for item in items] == expected, f"the {what} order", len(expected))


def _has_snapshots(edge: Edge) -> bool:
    return bool(edge.snapshots or edge.snapshot_children)


def _has_retained(edge: Edge) -> bool:
    return bool(edge.retained or edge.retained_children)


def _slot_key(snapshot: Snapshot) -> tuple[float, ...]:
    if snapshot.superseded:
        return 0, snapshot.superseded
    if snapshot.status & HOST:
        return 2, snapshot.hit_tick
    return 1, snapshot.value, snapshot.hit_tick


def nearest_retained(snapshot: Snapshot, scheme: BlockScheme) -> Snapshot | None:
    """The deepest retained snapshot whose prefix is a proper prefix of this one's, by comparing tokens."""
    assert snapshot.edge is not None
    path = path_of(snapshot.edge)
    tokens = b"".join(run for edge in path for run in pieces_of(edge, scheme)[0])
    own = tokens[: TOKEN_BYTES * snapshot.frontier - len(snapshot.tail)] + snapshot.tail
    above = [
        other
        for edge in (root_of(snapshot.edge), *path)
        for other in edge.retained
        if other.frontier < snapshot.frontier
        and own.startswith(other.tail, TOKEN_BYTES * other.frontier - len(other.tail))
    ]
    return max(above, key=lambda other: other.frontier, default=None)
