"""Committing blocks to the tree: new ones are inserted, those without pages get some, the rest are duplicates."""

from __future__ import annotations

from collections.abc import Sequence

from prefix_index.core import Core
from prefix_index.lease import Lease
from prefix_index.runs import agreement
from prefix_index.tree import common_extras
from prefix_index.values import Extension

Range = tuple[int, int]


def block_hashes(core: Core, lease: Lease, tokens: bytes, extras: tuple[int, ...] | None, count: int) -> Sequence[int]:
    """Hashes of the blocks to commit: the prompt's own while the path follows the prompt, else computed."""
    depth = lease._hold.depth
    prompt = lease._prompt
    on_prompt = lease._along == depth and depth + count <= len(prompt._hashes)
    if on_prompt and prompt._tokens.startswith(tokens, depth * core.tree.scheme.block_bytes):
        lease._along = depth + count
        return prompt._hashes[depth : depth + count]
    return core.tree.scheme.chain(lease._hash, tokens, extras)


def extend(core: Core, lease: Lease, tokens: bytes, extras: tuple[int, ...] | None, pages: list[int]) -> Extension:
    """Commit whole blocks below the lease's depth and move its pin to their end."""
    tree = core.tree
    width = tree.scheme.block_bytes
    pools = core.geometry.num_pools
    count = len(tokens) // width
    hold = lease._hold
    edge = hold.edge
    assert edge is not None
    at = hold.depth
    end = at + count
    hashes = block_hashes(core, lease, tokens, extras, count)
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
        child = None
        if edge.first is not None:
            child = tree.find_child(edge, hashes[done], tokens, done * width, extras[done] if extras is not None else 0)
        if child is None:
            break
        edge = child
    inserted = count - done
    if inserted:
        if done:
            tokens, hashes, pages = tokens[done * width :], hashes[done:], pages[done * pools :]
            extras = extras[done:] if extras is not None and any(extras[done:]) else None
        if edge.first is None and edge.parent is not None:
            tree.append(edge, tokens, extras, hashes, pages)
        else:
            edge = tree.add_child(edge, tokens, extras, hashes, pages)
        core.device_blocks += inserted
        core.inserted += inserted
    lease._hash = hashes[-1]
    lease._hold = core.move(hold, edge, end)
    return Extension(((at, end),) if inserted else (), tuple(reattached), tuple(duplicate))


def _note(ranges: list[Range], first: int, end: int) -> None:
    if ranges and ranges[-1][1] == first:
        ranges[-1] = (ranges[-1][0], end)
    else:
        ranges.append((first, end))
