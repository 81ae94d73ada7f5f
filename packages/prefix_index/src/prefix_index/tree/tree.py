"""The tree: roots, edges and the links between them, and the counts of all it holds. Knows no policy."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from operator import attrgetter

from prefix_index.prompt import BlockScheme, namespace_hash
from prefix_index.tree.records import (
    KIND_SHIFT,
    Edge,
    Root,
    Snapshot,
    cut_stamps,
    pinned_device_blocks,
    place_for,
    place_of,
    set_stamps,
    stamps_down_to,
    stamps_of,
)
from prefix_index.tree.tokens import add_tokens, cut_tokens, move_tokens, set_tokens
from prefix_index.types import Geometry, SnapshotKind

_depth: Callable[[Snapshot], int] = attrgetter("depth")


def child_with(edge: Edge | None, block: bytes, extra: int) -> Edge | None:
    """Among `edge` and those after it with an equal key, the one that begins with this block."""
    while edge is not None:
        if edge.head.startswith(block) and (edge.extras[0] if edge.extras else 0) == extra:
            return edge
        edge = edge.next_collision
    return None


class Tree:
    """The namespaces' roots, the edges below them, and the facts every part of an index shares.

    No clock but its own count, no randomness: equal calls give equal trees.

    Attributes:
        clock: stamps recency; every stamping operation takes one tick.
        epoch: moves when something a match can name is lost or renumbered.
        kinds: how many snapshots there are, by kind.
        pinned_blocks, pinned_tails: device copies that are pinned.
        serial: number of the latest snapshot.
    """

    __slots__ = (
        "clock",
        "device_blocks",
        "device_tails",
        "epoch",
        "geometry",
        "host_blocks",
        "kinds",
        "num_blocks",
        "num_edges",
        "pinned_blocks",
        "pinned_tails",
        "roots",
        "scheme",
        "serial",
    )

    def __init__(self, scheme: BlockScheme, geometry: Geometry) -> None:
        self.scheme = scheme
        self.geometry = geometry
        self.roots: dict[bytes, Root] = {}
        self.clock = self.epoch = self.serial = 0
        self.num_edges = self.num_blocks = 0
        self.device_blocks = self.device_tails = self.host_blocks = 0
        self.pinned_blocks = self.pinned_tails = 0
        self.kinds = [0] * len(SnapshotKind)

    @property
    def evictable_device_pages(self) -> int:
        """Pages of each pool that eviction could give up now."""
        return self.device_blocks + self.device_tails - self.pinned_blocks - self.pinned_tails

    def tick(self) -> int:
        """The next value of the clock."""
        self.clock += 1
        return self.clock

    def root(self, namespace: bytes) -> Root:
        """The root of `namespace`, made on first use."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace, namespace_hash(namespace))
        return root

    def add_child(
        self, parent: Edge, tokens: bytes, extras: tuple[int, ...] | None, key: int, pages: list[int]
    ) -> Edge:
        """A new edge at the end of `parent`, on the device if it has `pages`; `key` is the hash of its first block."""
        num_blocks = len(tokens) // self.scheme.block_bytes
        edge = Edge(parent, parent.end, parent.end + num_blocks, extras)
        set_tokens(edge, self.scheme, tokens, key)
        self._link_last(parent, edge)
        if edge.previous_sibling is not None:
            self._into_branch(parent, edge)
        if pages:
            edge.pages = pages
            edge.device_blocks = num_blocks
            parent.device_children += 1
            self.device_blocks += num_blocks
        self.num_edges += 1
        self.num_blocks += num_blocks
        return edge

    def _into_branch(self, parent: Edge, edge: Edge) -> None:
        branch = parent.branch
        if branch is None:
            assert parent.first_child is not None
            branch = parent.branch = {parent.first_child.key: parent.first_child}
        edge.next_collision = branch.get(edge.key)
        branch[edge.key] = edge

    def move_to_front(self, edge: Edge) -> None:
        """Make `edge` its parent's first child: those with retained snapshots come first."""
        parent = edge.parent
        assert parent is not None
        if parent.first_child is not edge:
            self._unlink(parent, edge)
            assert parent.first_child is not None
            parent.first_child.previous_sibling = edge
            edge.previous_sibling, edge.next_sibling = None, parent.first_child
            parent.first_child = edge

    def move_to_back(self, edge: Edge) -> None:
        """Make `edge` its parent's last child: those without a retained snapshot come last."""
        parent = edge.parent
        assert parent is not None
        if parent.last_child is not edge:
            self._unlink(parent, edge)
            self._link_last(parent, edge)

    def _link_last(self, parent: Edge, edge: Edge) -> None:
        edge.previous_sibling, edge.next_sibling = parent.last_child, None
        if parent.last_child is None:
            parent.first_child = edge
        else:
            parent.last_child.next_sibling = edge
        parent.last_child = edge

    def _unlink(self, parent: Edge, edge: Edge) -> None:
        if edge.previous_sibling is None:
            parent.first_child = edge.next_sibling
        else:
            edge.previous_sibling.next_sibling = edge.next_sibling
        if edge.next_sibling is None:
            parent.last_child = edge.previous_sibling
        else:
            edge.next_sibling.previous_sibling = edge.previous_sibling

    def append(
        self, edge: Edge, tokens: bytes, extras: tuple[int, ...] | None, key: int | None, pages: list[int]
    ) -> None:
        """Grow a leaf edge in place by whole blocks that are all on the device.

        `key` is the hash of the first of them where the caller knows it.
        """
        num_blocks = len(tokens) // self.scheme.block_bytes
        if edge.extras is not None or extras is not None:
            edge.extras = (edge.extras or (0,) * (edge.end - edge.start)) + (extras or (0,) * num_blocks)
        add_tokens(edge, self.scheme, edge.end, tokens, key)
        edge.pages += pages
        edge.device_blocks += num_blocks
        edge.end += num_blocks
        self.num_blocks += num_blocks
        self.device_blocks += num_blocks

    def add_device_copies(self, edge: Edge, pages: list[int]) -> None:
        """Give `pages` to the next blocks of `edge` without a device copy. The path above must be held."""
        before = pinned_device_blocks(edge)
        if not edge.device_blocks:
            assert edge.parent is not None
            edge.parent.device_children += 1
        num_blocks = len(pages) // self.geometry.num_pools
        edge.pages += pages
        edge.device_blocks += num_blocks
        self.device_blocks += num_blocks
        self.pinned_blocks += pinned_device_blocks(edge) - before

    def add_host_copies(self, edge: Edge, slabs: list[int]) -> None:
        """Give `slabs` to the next blocks of `edge` without a Host copy. The path above must be held."""
        if not edge.host_blocks:
            assert edge.parent is not None
            edge.parent.host_children += 1
        edge.slabs += slabs
        edge.host_blocks += len(slabs)
        self.host_blocks += len(slabs)

    def add_tail_copy(self, snapshot: Snapshot, pages: tuple[int, ...]) -> None:
        """Give `pages` to the tail of a snapshot whose path is held on the device; the caller marks the copy."""
        edge = snapshot.edge
        assert edge is not None
        snapshot.tail_pages = pages
        if edge.tail_depths is None:
            edge.tail_depths = [snapshot.depth]
        else:
            insort(edge.tail_depths, snapshot.depth)
        self.device_tails += 1
        if snapshot.pins:
            self.pinned_tails += 1

    def attach(self, snapshot: Snapshot) -> None:
        """List a new snapshot at its edge."""
        edge = snapshot.edge
        assert edge is not None
        snapshots = edge.snapshots
        if not snapshots and not edge.snapshot_children:
            above = edge.parent
            while above is not None:
                above.snapshot_children += 1
                if above.snapshot_children > 1 or above.snapshots:
                    break
                above = above.parent
        if not snapshots or snapshots[-1].frontier <= snapshot.frontier:
            snapshots.append(snapshot)
            edge.statuses.append(snapshot.status)
        else:
            place = place_for(snapshots, snapshot.frontier)
            edge.snapshots = [*snapshots[:place], snapshot, *snapshots[place:]]
            edge.statuses = edge.statuses[:place] + bytes((snapshot.status,)) + edge.statuses[place:]
        lost = edge.lost_depths
        if lost is not None:
            place = bisect_left(lost, snapshot.depth)
            if place < len(lost) and lost[place] == snapshot.depth:
                del lost[place]
                if not lost:
                    edge.lost_depths = None
        self.kinds[snapshot.status >> KIND_SHIFT] += 1

    def detach(self, snapshot: Snapshot) -> None:
        """List a snapshot no more, and note that the block it stood on lost one."""
        edge = snapshot.edge
        assert edge is not None
        if edge.snapshots[-1] is snapshot:
            edge.snapshots, edge.statuses = edge.snapshots[:-1], edge.statuses[:-1]
        else:
            place = place_of(edge.snapshots, snapshot)
            edge.snapshots = edge.snapshots[:place] + edge.snapshots[place + 1 :]
            edge.statuses = edge.statuses[:place] + edge.statuses[place + 1 :]
        if not edge.snapshots:
            _count_out(edge)
        lost = edge.lost_depths
        if lost is None:
            edge.lost_depths = [snapshot.depth]
        else:
            place = bisect_left(lost, snapshot.depth)
            if place == len(lost) or lost[place] != snapshot.depth:
                lost.insert(place, snapshot.depth)

    def detach_below(self, edge: Edge, depth: int) -> list[Snapshot]:
        """Detach the snapshots of `edge` on blocks behind `depth`, which the caller removes; deepest block first."""
        snapshots = edge.snapshots
        place = len(snapshots)
        while place and snapshots[place - 1].depth > depth:
            place -= 1
        if place == len(snapshots):
            return []
        edge.snapshots, gone = snapshots[:place], snapshots[place:]
        edge.statuses = edge.statuses[:place]
        if not place:
            _count_out(edge)
        if len(gone) > 1:
            gone.sort(key=_depth, reverse=True)
        return gone

    def split(self, edge: Edge, depth: int) -> Edge:
        """Cut `edge` before absolute block `depth` and return the new upper half. O(what the upper half takes).

        The lower half keeps its object, its children and its place in the queues. The upper needs none: the caller pins
        it down to the cut, and queues what it then unpins.
        """
        size = depth - edge.start
        extras = edge.extras
        above = extras[:size] if extras is not None and any(extras[:size]) else None
        upper = Edge(edge.parent, edge.start, depth, above)
        self._replace(edge, upper)
        move_tokens(edge, upper, self.scheme, depth)
        edge.extras = extras[size:] if extras is not None and any(extras[size:]) else None
        cut = size * self.geometry.num_pools
        upper.pages, edge.pages = edge.pages[:cut], edge.pages[cut:]
        upper.device_blocks, edge.device_blocks = min(edge.device_blocks, size), max(0, edge.device_blocks - size)
        upper.slabs, edge.slabs = edge.slabs[:size], edge.slabs[size:]
        upper.host_blocks, edge.host_blocks = min(edge.host_blocks, size), max(0, edge.host_blocks - size)
        stamps = stamps_of(edge)
        self._divide_snapshots(edge, upper, depth)
        edge.start = depth
        set_stamps(upper, stamps_down_to(stamps, depth))
        set_stamps(edge, [stamp for stamp in stamps if stamp[0] > depth])
        edge.parent = upper
        upper.first_child = upper.last_child = edge
        upper.device_children = 1 if edge.device_blocks else 0
        upper.host_children = 1 if edge.host_blocks else 0
        self._divide_holds(edge, upper, depth)
        self.num_edges += 1
        self.epoch += 1
        return upper

    def _divide_snapshots(self, edge: Edge, upper: Edge, depth: int) -> None:
        above = [snapshot for snapshot in edge.snapshots if snapshot.depth <= depth]
        if above:
            for snapshot in above:
                snapshot.edge = upper
            upper.snapshots, edge.snapshots = above, edge.snapshots[len(above) :]
            upper.statuses, edge.statuses = edge.statuses[: len(above)], edge.statuses[len(above) :]
            upper.retained = [snapshot for snapshot in above if not snapshot.superseded]
            del edge.retained[: len(upper.retained)]
        upper.snapshot_children = 1 if edge.snapshots or edge.snapshot_children else 0
        upper.retained_children = 1 if edge.retained or edge.retained_children else 0
        upper.tail_depths, edge.tail_depths = _divided(edge.tail_depths, depth)
        upper.lost_depths, edge.lost_depths = _divided(edge.lost_depths, depth)

    def _divide_holds(self, edge: Edge, upper: Edge, depth: int) -> None:
        if edge.holds is not None:
            above = [hold for hold in edge.holds if hold.depth <= depth]
            if above:
                for hold in above:
                    hold.edge = upper
                upper.holds = above
                upper.pins = len(above)
                edge.holds = [hold for hold in edge.holds if hold.depth > depth] or None
                edge.pins -= len(above)
        if edge.pins:
            upper.pins += 1

    def _replace(self, edge: Edge, upper: Edge) -> None:
        parent = edge.parent
        assert parent is not None
        upper.previous_sibling, upper.next_sibling = edge.previous_sibling, edge.next_sibling
        upper.next_collision = edge.next_collision
        if edge.previous_sibling is None:
            parent.first_child = upper
        else:
            edge.previous_sibling.next_sibling = upper
        if edge.next_sibling is None:
            parent.last_child = upper
        else:
            edge.next_sibling.previous_sibling = upper
        branch = parent.branch
        if branch is not None:
            if branch[edge.key] is edge:
                branch[edge.key] = upper
            else:
                _collision_before(branch[edge.key], edge).next_collision = upper
        edge.previous_sibling = edge.next_sibling = edge.next_collision = None

    def truncate(self, edge: Edge, size: int) -> None:
        """Drop the blocks of a leaf edge behind its first `size`, whose snapshots are dropped already.

        A whole edge is removed and every link of it cut.
        """
        self.num_blocks -= edge.end - edge.start - size
        if size:
            end = edge.end = edge.start + size
            cut_tokens(edge, self.scheme, end)
            if edge.extras is not None:
                edge.extras = edge.extras[:size] if any(edge.extras[:size]) else None
            cut_stamps(edge, end)
            if edge.lost_depths is not None:
                edge.lost_depths = _divided(edge.lost_depths, end)[0]
            return
        parent = edge.parent
        assert parent is not None
        self._unlink(parent, edge)
        branch = parent.branch
        if branch is not None:
            if branch[edge.key] is edge:
                if edge.next_collision is None:
                    del branch[edge.key]
                else:
                    branch[edge.key] = edge.next_collision
            else:
                _collision_before(branch[edge.key], edge).next_collision = edge.next_collision
            if parent.first_child is None or parent.first_child.next_sibling is None:
                parent.branch = None
                if parent.first_child is not None:
                    parent.first_child.next_collision = None
        edge.parent = edge.previous_sibling = edge.next_sibling = edge.next_collision = None
        self.num_edges -= 1
        self.forget_if_empty(parent)

    def forget_if_empty(self, edge: Edge) -> None:
        """Drop a namespace's root once nothing hangs from it or holds it."""
        if isinstance(edge, Root) and not (edge.first_child or edge.snapshots or edge.pins):
            self.roots.pop(edge.namespace, None)


def _count_out(edge: Edge) -> None:
    """The last snapshot of `edge` has gone: count that upwards."""
    while not (edge.snapshots or edge.snapshot_children) and edge.parent is not None:
        edge = edge.parent
        edge.snapshot_children -= 1


def _divided(depths: list[int] | None, depth: int) -> tuple[list[int] | None, list[int] | None]:
    """The depths up to `depth` and those below it; None for none."""
    if depths is None:
        return None, None
    place = bisect_right(depths, depth)
    return depths[:place] or None, depths[place:] or None


def _collision_before(first: Edge, edge: Edge) -> Edge:
    while first.next_collision is not edge:
        assert first.next_collision is not None
        first = first.next_collision
    return first
