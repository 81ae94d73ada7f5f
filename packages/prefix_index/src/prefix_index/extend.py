"""Committing blocks to the tree: new ones are inserted, those without pages get some, the rest are duplicates."""

from __future__ import annotations

from prefix_index.core import Core
from prefix_index.lease import Lease
from prefix_index.nodes import Edge
from prefix_index.prompt import BlockScheme
from prefix_index.runs import agreement, hash_before
from prefix_index.tree import common_extras, twin_with
from prefix_index.values import Extension

Range = tuple[int, int]


def extend(
    core: Core, lease: Lease, tokens: bytes, count: int, extras: tuple[int, ...] | None, pages: list[int]
) -> Extension:
    """Commit `count` whole blocks below the lease's depth and move its pin to their end."""
    hold = lease._hold
    edge = hold.edge
    assert edge is not None
    at = hold.depth
    end = at + count
    tree = core.tree
    prompt = lease._prompt
    if lease._along == at and prompt._tokens.startswith(tokens, at * tree.scheme.block_bytes):
        lease._along = end  # the path is still the lease's prompt, whose hashes are known
    if at < edge.end or edge.first is not None or edge.parent is None:
        return _merge(core, lease, tokens, count, extras, pages)
    # A conversation goes on, as most do: its leaf grows, and the pin at the leaf's end with it.
    tree.append(edge, tokens, extras, prompt._hashes[at] if at < lease._along else None, pages)
    hold.depth = end
    core.pinned_blocks += count
    core.device_blocks += count
    core.inserted += count
    return Extension(((at, end),), (), ())


def _merge(
    core: Core, lease: Lease, tokens: bytes, count: int, extras: tuple[int, ...] | None, pages: list[int]
) -> Extension:
    """`extend` where something may be there already."""
    tree = core.tree
    width = tree.scheme.block_bytes
    pools = core.geometry.num_pools
    hold = lease._hold
    edge = hold.edge
    assert edge is not None
    at = hold.depth
    end = at + count
    reattached: list[Range] = []
    duplicate: list[Range] = []
    done = 0
    while done < count:
        if at < edge.end:
            # Along the present edge as far as it agrees; cut it where it does not.
            same = agreement(edge, tree.scheme, at, tokens, done * width, min(edge.end - at, count - done))
            same = common_extras(edge.extras, at - edge.start, extras, done, same)
            present = min(max(0, edge.start + edge.dev - at), same)
            if present:
                _note(duplicate, at, at + present)
                core.duplicate += present
            if same > present:
                core.hold_on_device(edge, pages[(done + present) * pools : (done + same) * pools])
                _note(reattached, at + present, at + same)
                core.reattached += same - present
            at += same
            done += same
            if done < count and at < edge.end:
                edge = core.split(edge, at)
            continue
        child = edge.first
        key = None
        if child is not None:
            extra = extras[done] if extras is not None else 0
            block = tokens[done * width : (done + 1) * width]
            if edge.branch is not None:
                key = _key(lease, edge, at, block, extra, tree.scheme)
                child = edge.branch.get(key)
            child = twin_with(child, block, extra)
        if child is None:
            break
        edge = child
    inserted = count - done
    if inserted:
        if done:
            tokens, pages = tokens[done * width :], pages[done * pools :]
            extras = extras[done:] if extras is not None and any(extras[done:]) else None
        if edge.first is None and edge.parent is not None:
            tree.append(edge, tokens, extras, lease._prompt._hashes[at] if at < lease._along else None, pages)
        else:
            if key is None:
                key = _key(lease, edge, at, tokens[:width], extras[0] if extras is not None else 0, tree.scheme)
            edge = tree.add_child(edge, tokens, extras, key, pages)
        core.device_blocks += inserted
        core.inserted += inserted
    lease._hold = core.move(hold, edge, end)
    return Extension(((at, end),) if inserted else (), tuple(reattached), tuple(duplicate))


def _key(lease: Lease, edge: Edge, depth: int, block: bytes, extra: int, scheme: BlockScheme) -> int:
    """The hash of the block that comes after `edge`, at `depth`: the prompt's own, else chained from the path's."""
    hashes = lease._prompt._hashes
    if depth < lease._along:
        return hashes[depth]
    above = hashes[depth - 1] if 0 < depth == lease._along else hash_before(edge, scheme, depth)
    return scheme.hasher(above, block, extra)


def _note(ranges: list[Range], first: int, end: int) -> None:
    if ranges and ranges[-1][1] == first:
        ranges[-1] = (ranges[-1][0], end)
    else:
        ranges.append((first, end))
