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
    for edge in reversed(edges):
        core.worth.drop_below(edge, edge.start - 1, given)
        if edge is root:
            break
        if edge.dev:
            core.device.take_pages(edge, edge.dev, given)
        if edge.host:
            core.host.take_slabs(edge, edge.host, given)
        core.tree.truncate(edge, 0)
        core.forget(edge)
    core.tree.forget_if_empty(root)
    core.feed.mute(False)
    core.feed.cleared(root)
