"""Links between edges: finding, adding, splitting, removing. Knows no policy and no handle's meaning."""

from __future__ import annotations

from array import array

from prefix_index.nodes import Edge, Root
from prefix_index.prompt import BlockScheme, namespace_hash

APPEND_LIMIT = 64  # blocks an edge may reach by appending: an append copies the edge's bytes


def common_blocks(left: bytes, left_at: int, right: bytes, right_at: int, limit: int, width: int) -> int:
    """How many whole blocks of `width` bytes agree from the two byte positions on, at most `limit`.

    Halves the run that is known to hold the difference, so it costs two compares of the run and no loop over blocks."""
    if not limit or left[left_at : left_at + width] != right[right_at : right_at + width]:
        return 0
    low, high = 1, limit  # the first `low` blocks agree; no more than `high` can
    while low < high:
        middle = (low + high + 1) // 2
        a, b = low * width, middle * width
        if left[left_at + a : left_at + b] == right[right_at + a : right_at + b]:
            low = middle
        else:
            high = middle - 1
    return low


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

    def find_child(self, edge: Edge, key: int, tokens: bytes, at: int, extra: int) -> Edge | None:
        """The child of `edge` whose first block is the one at byte `at` of `tokens`. The key only narrows."""
        child = edge.first
        if child is None:
            return None
        if edge.branch is not None:
            child = edge.branch.get(key)
        width = self.scheme.block_bytes
        while child is not None:
            if tokens.startswith(child.tokens[:width], at) and (child.extras[0] if child.extras else 0) == extra:
                return child
            child = child.twin
        return None

    def add_child(
        self, parent: Edge, key: int, tokens: bytes, extras: tuple[int, ...] | None, pages: array[int], dev: int
    ) -> Edge:
        """A new edge at the end of `parent`; its first `dev` blocks have `pages`. Counts device units, not pins."""
        num_blocks = len(tokens) // self.scheme.block_bytes
        edge = Edge(parent, key, parent.end, parent.end + num_blocks, tokens, extras, pages, dev)
        self._link_last(parent, edge)
        if edge.prev is not None:
            self._into_branch(parent, edge)
        if dev:
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

    def append(self, edge: Edge, tokens: bytes, extras: tuple[int, ...] | None, pages: array[int]) -> None:
        """Grow a leaf edge in place by whole blocks that are all on the device."""
        num_blocks = len(tokens) // self.scheme.block_bytes
        if edge.extras is not None or extras is not None:
            edge.extras = (edge.extras or (0,) * (edge.end - edge.start)) + (extras or (0,) * num_blocks)
        edge.tokens += tokens
        edge.pages += pages
        edge.dev += num_blocks
        edge.end += num_blocks
        self.num_blocks += num_blocks

    def split(self, edge: Edge, at: int, key: int | None) -> Edge:
        """Cut `edge` before absolute block `at` and return the new upper half. The lower keeps its object, snapshots,
        children and counters. `key` is the hash of block `at` where the caller knows it."""
        size = at - edge.start
        width = self.scheme.block_bytes
        cut = size * width
        pools = self.pools
        extras = edge.extras
        upper_extras = lower_extras = None
        if extras is not None:
            upper_extras = extras[:size] if any(extras[:size]) else None
            lower_extras = extras[size:] if any(extras[size:]) else None
        if key is None:
            between = extras[1 : size + 1] if extras is not None else None
            key = self.scheme.chain(edge.key, edge.tokens[width : cut + width], between)[-1]
        upper = Edge(
            edge.parent,
            edge.key,
            edge.start,
            at,
            edge.tokens[:cut],
            upper_extras,
            edge.pages[: size * pools],
            min(edge.dev, size),
        )
        self._replace(edge, upper)
        edge.tokens = edge.tokens[cut:]
        edge.extras = lower_extras
        edge.pages = edge.pages[size * pools :]
        edge.dev = max(0, edge.dev - size)
        if edge.slabs is not None:
            upper.slabs = edge.slabs[:size]
            edge.slabs = edge.slabs[size:] if edge.host > size else None
        upper.host = min(edge.host, size)
        edge.host = max(0, edge.host - size)
        edge.start = at
        edge.key = key
        edge.parent = upper
        upper.first = upper.last = edge
        upper.below = 1 if edge.dev else 0
        upper.hbelow = 1 if edge.host else 0
        upper.live = 1 if edge.live else 0
        upper.units = 1 if edge.units else 0
        upper.tick = edge.tick
        if edge.holds is not None:
            above = [hold for hold in edge.holds if hold.depth <= at]
            if above:
                upper.holds = above
                for hold in above:
                    hold.edge = upper
                below = [hold for hold in edge.holds if hold.depth > at]
                edge.holds = below or None
                edge.pins -= len(above)
                upper.pins = len(above)
        if edge.pins:
            upper.pins += 1
        self.num_edges += 1
        return upper

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
        """Drop the blocks of a leaf edge behind its first `size`; a whole edge is removed and every link of it cut."""
        dropped = edge.end - edge.start - size
        self.num_blocks -= dropped
        if size:
            edge.tokens = edge.tokens[: size * self.scheme.block_bytes]
            if edge.extras is not None:
                edge.extras = edge.extras[:size] if any(edge.extras[:size]) else None
            edge.end = edge.start + size
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


def last_hash(tree: Tree, edge: Edge) -> int:
    """The hash of the edge's last block, from the stored hash of its first."""
    if edge.parent is None:
        return edge.key
    width = tree.scheme.block_bytes
    rest = edge.tokens[width:]
    if not rest:
        return edge.key
    extras = edge.extras[1:] if edge.extras is not None else None
    return tree.scheme.chain(edge.key, rest, extras)[-1]


def _twin_before(first: Edge, edge: Edge) -> Edge:
    while first.twin is not edge:
        assert first.twin is not None
        first = first.twin
    return first
