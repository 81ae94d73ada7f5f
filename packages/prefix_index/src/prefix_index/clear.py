"""Forgetting whole namespaces."""

from __future__ import annotations

from prefix_index.core import Core, Given
from prefix_index.errors import WrongState
from prefix_index.nodes import Edge, Root


def clear(core: Core, namespace: bytes | None) -> Given:
    """Give up everything in a namespace, or in all of them for None. Refused while anything of it is pinned."""
    roots = list(core.tree.roots.values()) if namespace is None else [core.tree.roots.get(namespace)]
    chosen = [root for root in roots if root is not None]
    for root in chosen:
        if root.pins:
            raise WrongState(f"clear: no lease may be open in namespace {root.hashed:016x}, got {root.pins} pins")
    given = Given()
    for root in chosen:
        _clear_root(core, root, given)
    core.epoch += 1
    return given


def _clear_root(core: Core, root: Root, given: Given) -> None:
    """Give up everything below `root`, deepest first. No recursion."""
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
