"""Forgetting a whole namespace."""

from __future__ import annotations

from prefix_index.core import Core, Given
from prefix_index.nodes import Edge, Root


def clear_namespace(core: Core, root: Root, given: Given) -> None:
    """Give up everything below `root`, deepest first. The caller has made sure that nothing is pinned. No recursion."""
    core.feed.mute(True)
    edges: list[Edge] = [root]
    for edge in edges:
        child = edge.first
        while child is not None:
            edges.append(child)
            child = child.next
    pools = core.geometry.num_pools
    for edge in reversed(edges):
        core.worth.drop_below(edge, edge.start - 1, given)
        if edge is root:
            break
        for i in range(len(edge.pages) - pools, -1, -pools):
            given.pages.append(core.device.as_pages(tuple(edge.pages[i : i + pools])))
        given.slabs.extend(reversed(edge.slabs))
        core.device_blocks -= edge.dev
        core.host_blocks -= edge.host
        parent = edge.parent
        assert parent is not None
        parent.below -= bool(edge.dev)
        parent.hbelow -= bool(edge.host)
        edge.dev = edge.host = 0
        core.tree.truncate(edge, 0)
        core.forget(edge)
    core.tree.forget_if_empty(root)
    core.feed.mute(False)
    core.feed.cleared(root)
