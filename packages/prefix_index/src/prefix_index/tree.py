"""Links between edges: finding, adding, splitting, removing. Knows no policy and no handle's meaning."""

from __future__ import annotations

from bisect import bisect_right

from prefix_index.nodes import Edge, Root, cut_stamps, set_stamps, stamps_down_to, stamps_of
from prefix_index.prompt import BlockScheme, namespace_hash
from prefix_index.runs import add_tokens, cut_tokens, goes_on_with, move_tokens, set_tokens


def common_extras(
    left: tuple[int, ...] | None, left_at: int, right: tuple[int, ...] | None, right_at: int, limit: int
) -> int:
    """How many of the next `limit` blocks have equal extras; None stands for all zero."""
    if left is None and right is None:
        return limit
    for i in range(limit):
        a = left[left_at + i] if left is not None else 0
        b = right[right_at + i] if right is not None else 0
        if a != b:
            return i
    return limit


def twin_with(edge: Edge | None, block: bytes, extra: int) -> Edge | None:
    """Among `edge` and those after it with an equal key, the one that begins with this block."""
    while edge is not None:
        if edge.head.startswith(block) and (edge.extras[0] if edge.extras else 0) == extra:
            return edge
        edge = edge.twin
    return None


class Tree:
    """The namespaces' roots and the edges below them."""

    __slots__ = ("num_blocks", "num_edges", "pools", "roots", "scheme")

    def __init__(self, scheme: BlockScheme, pools: int) -> None:
        self.scheme = scheme
        self.pools = pools
        self.roots: dict[bytes, Root] = {}
        self.num_edges = 0
        self.num_blocks = 0

    def root(self, namespace: bytes) -> Root:
        """The root of `namespace`, made on first use."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace, namespace_hash(namespace))
        return root

    def add_child(
        self, parent: Edge, tokens: bytes, extras: tuple[int, ...] | None, key: int, pages: list[int]
    ) -> Edge:
        """A new edge at the end of `parent`, on the device if it has `pages`; `key` is the hash of its first block.
        Counts device units, not pins."""
        num_blocks = len(tokens) // self.scheme.block_bytes
        edge = Edge(parent, parent.end, parent.end + num_blocks, extras)
        set_tokens(edge, self.scheme, tokens, key)
        self._link_last(parent, edge)
        if edge.prev is not None:
            self._into_branch(parent, edge)
        if pages:
            edge.pages = pages
            edge.dev = num_blocks
            parent.below += 1
        self.num_edges += 1
        self.num_blocks += num_blocks
        return edge

    def _into_branch(self, parent: Edge, edge: Edge) -> None:
        branch = parent.branch
        if branch is None:
            assert parent.first is not None
            branch = parent.branch = {parent.first.key: parent.first}
        edge.twin = branch.get(edge.key)
        branch[edge.key] = edge

    def move_to_front(self, edge: Edge) -> None:
        """Make `edge` its parent's first child: those with retained snapshots come first."""
        parent = edge.parent
        assert parent is not None
        if parent.first is not edge:
            self._unlink(parent, edge)
            assert parent.first is not None
            parent.first.prev = edge
            edge.prev, edge.next = None, parent.first
            parent.first = edge

    def move_to_back(self, edge: Edge) -> None:
        """Make `edge` its parent's last child: those without a retained snapshot come last."""
        parent = edge.parent
        assert parent is not None
        if parent.last is not edge:
            self._unlink(parent, edge)
            self._link_last(parent, edge)

    def _link_last(self, parent: Edge, edge: Edge) -> None:
        edge.prev, edge.next = parent.last, None
        if parent.last is None:
            parent.first = edge
        else:
            parent.last.next = edge
        parent.last = edge

    def _unlink(self, parent: Edge, edge: Edge) -> None:
        if edge.prev is None:
            parent.first = edge.next
        else:
            edge.prev.next = edge.next
        if edge.next is None:
            parent.last = edge.prev
        else:
            edge.next.prev = edge.prev

    def append(
        self, edge: Edge, tokens: bytes, extras: tuple[int, ...] | None, key: int | None, pages: list[int]
    ) -> None:
        """Grow a leaf edge in place by whole blocks that are all on the device; `key` is the hash of the first of them
        where the caller knows it."""
        num_blocks = len(tokens) // self.scheme.block_bytes
        if edge.extras is not None or extras is not None:
            edge.extras = (edge.extras or (0,) * (edge.end - edge.start)) + (extras or (0,) * num_blocks)
        add_tokens(edge, self.scheme, edge.end, tokens, key)
        edge.pages += pages
        edge.dev += num_blocks
        edge.end += num_blocks
        self.num_blocks += num_blocks

    def split(self, edge: Edge, at: int) -> Edge:
        """Cut `edge` before absolute block `at` and return the new upper half, which takes what lies above the cut; the
        lower keeps its object, its children and its place in the orders. O(what the upper half takes)."""
        size = at - edge.start
        extras = edge.extras
        upper = Edge(edge.parent, edge.start, at, extras[:size] if extras is not None and any(extras[:size]) else None)
        self._replace(edge, upper)
        move_tokens(edge, upper, self.scheme, at)
        edge.extras = extras[size:] if extras is not None and any(extras[size:]) else None
        cut = size * self.pools
        upper.pages, edge.pages = edge.pages[:cut], edge.pages[cut:]
        upper.dev, edge.dev = min(edge.dev, size), max(0, edge.dev - size)
        upper.slabs, edge.slabs = edge.slabs[:size], edge.slabs[size:]
        upper.host, edge.host = min(edge.host, size), max(0, edge.host - size)
        stamps = stamps_of(edge)
        self._divide_snapshots(edge, upper, at)
        edge.start = at
        set_stamps(upper, stamps_down_to(stamps, at))
        set_stamps(edge, [stamp for stamp in stamps if stamp[0] > at])
        edge.parent = upper
        upper.first = upper.last = edge
        upper.below = 1 if edge.dev else 0
        upper.hbelow = 1 if edge.host else 0
        self._divide_holds(edge, upper, at)
        self.num_edges += 1
        return upper

    def _divide_snapshots(self, edge: Edge, upper: Edge, at: int) -> None:
        above = [snapshot for snapshot in edge.snaps if snapshot.at <= at]
        if above:
            for snapshot in above:
                snapshot.edge = upper
            upper.snaps, edge.snaps = above, edge.snaps[len(above) :]
            upper.wheres, edge.wheres = edge.wheres[: len(above)], edge.wheres[len(above) :]
            upper.kept = [snapshot for snapshot in above if not snapshot.superseded]
            del edge.kept[: len(upper.kept)]
        upper.sbelow = 1 if edge.snaps or edge.sbelow else 0
        upper.kbelow = 1 if edge.kept or edge.kbelow else 0
        upper.tails, edge.tails = _divided(edge.tails, at)
        upper.lost, edge.lost = _divided(edge.lost, at)

    def _divide_holds(self, edge: Edge, upper: Edge, at: int) -> None:
        if edge.holds is not None:
            above = [hold for hold in edge.holds if hold.depth <= at]
            if above:
                for hold in above:
                    hold.edge = upper
                upper.holds = above
                upper.pins = len(above)
                edge.holds = [hold for hold in edge.holds if hold.depth > at] or None
                edge.pins -= len(above)
        if edge.pins:
            upper.pins += 1

    def _replace(self, edge: Edge, upper: Edge) -> None:
        parent = edge.parent
        assert parent is not None
        upper.prev, upper.next, upper.twin = edge.prev, edge.next, edge.twin
        if edge.prev is None:
            parent.first = upper
        else:
            edge.prev.next = upper
        if edge.next is None:
            parent.last = upper
        else:
            edge.next.prev = upper
        branch = parent.branch
        if branch is not None:
            if branch[edge.key] is edge:
                branch[edge.key] = upper
            else:
                _twin_before(branch[edge.key], edge).twin = upper
        edge.prev = edge.next = edge.twin = None

    def truncate(self, edge: Edge, size: int) -> None:
        """Drop the blocks of a leaf edge behind its first `size`; a whole edge is removed and every link of it cut.
        The caller has dropped the snapshots that stood on them."""
        self.num_blocks -= edge.end - edge.start - size
        if size:
            end = edge.end = edge.start + size
            cut_tokens(edge, self.scheme, end)
            if edge.extras is not None:
                edge.extras = edge.extras[:size] if any(edge.extras[:size]) else None
            cut_stamps(edge, end)
            if edge.lost is not None:
                edge.lost = _divided(edge.lost, end)[0]
            return
        parent = edge.parent
        assert parent is not None
        self._unlink(parent, edge)
        branch = parent.branch
        if branch is not None:
            if branch[edge.key] is edge:
                if edge.twin is None:
                    del branch[edge.key]
                else:
                    branch[edge.key] = edge.twin
            else:
                _twin_before(branch[edge.key], edge).twin = edge.twin
            if parent.first is None or parent.first.next is None:
                parent.branch = None
                if parent.first is not None:
                    parent.first.twin = None
        edge.parent = edge.prev = edge.next = edge.twin = None
        self.num_edges -= 1
        self.forget_if_empty(parent)

    def forget_if_empty(self, edge: Edge) -> None:
        """Drop a namespace's root once nothing hangs from it or holds it."""
        if isinstance(edge, Root) and not (edge.first or edge.snaps or edge.pins):
            self.roots.pop(edge.namespace, None)


def starts_with(edge: Edge, scheme: BlockScheme, depth: int, below: Edge | None, tail: bytes) -> bool:
    """Whether the path over `edge` and its child `below` goes on with `tail` after `depth` blocks."""
    if not tail:
        return True
    if depth < edge.end:
        return goes_on_with(edge, scheme, depth, tail)
    return below is not None and below.head.startswith(tail)


def _divided(depths: list[int] | None, at: int) -> tuple[list[int] | None, list[int] | None]:
    """The depths up to `at` and those below it; None for none."""
    if depths is None:
        return None, None
    place = bisect_right(depths, at)
    return depths[:place] or None, depths[place:] or None


def _twin_before(first: Edge, edge: Edge) -> Edge:
    while first.twin is not edge:
        assert first.twin is not None
        first = first.twin
    return first
