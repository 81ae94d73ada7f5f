"""Committing blocks to the tree: new ones are inserted, those without pages get some, the rest are duplicates."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from prefix_index.core import Core
from prefix_index.lease import Lease
from prefix_index.nodes import Edge, Hold
from prefix_index.tree import APPEND_LIMIT, common_blocks, common_extras
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


def extend(core: Core, lease: Lease, tokens: bytes, extras: tuple[int, ...] | None, flat: array[int]) -> Extension:
    """Commit whole blocks below the lease's depth and move its pin to their end."""
    width = core.tree.scheme.block_bytes
    pools = core.geometry.num_pools
    count = len(tokens) // width
    hold = lease._hold
    edge = hold.edge
    assert edge is not None
    at = hold.depth
    hashes = block_hashes(core, lease, tokens, extras, count)
    inserted: list[Range] = []
    reattached: list[Range] = []
    duplicate: list[Range] = []
    done = 0
    while done < count:
        if at < edge.end:
            # Along the present edge as far as it agrees; cut it where it does not.
            same, present = _agreement(edge, at - edge.start, tokens, extras, done, count, width)
            if present:
                _note(duplicate, at, at + present)
                core.duplicate += present
            if same > present:
                core.hold_on_device(edge, flat[(done + present) * pools : (done + same) * pools])
                _note(reattached, at + present, at + same)
                core.reattached += same - present
            at += same
            done += same
            if done < count and at < edge.end:
                edge = core.split(edge, at)
            continue
        if edge.first is not None:
            extra = extras[done] if extras is not None else 0
            child = core.tree.find_child(edge, hashes[done], tokens, done * width, extra)
            if child is not None:
                edge = child
                continue
        room = _room_to_append(edge, hold)
        size = min(room, count - done) if room else count - done
        new_tokens, new_extras, pages = tokens, extras, flat
        if size < count:
            new_tokens = tokens[done * width : (done + size) * width]
            pages = flat[done * pools : (done + size) * pools]
            if extras is not None:
                new_extras = extras[done : done + size]
                new_extras = new_extras if any(new_extras) else None
        if room:
            core.tree.append(edge, new_tokens, new_extras, pages)
        else:
            edge = core.tree.add_child(edge, hashes[done], new_tokens, new_extras, pages, size)
        core.device_blocks += size
        core.inserted += size
        _note(inserted, at, at + size)
        at += size
        done += size
    lease._hash = hashes[-1]
    lease._hold = core.move(hold, edge, at)
    return Extension(tuple(inserted), tuple(reattached), tuple(duplicate))


def _agreement(
    edge: Edge, offset: int, tokens: bytes, extras: tuple[int, ...] | None, done: int, count: int, width: int
) -> tuple[int, int]:
    """How many blocks from `offset` of the edge on equal those from `done` on, and how many of them have pages."""
    limit = min(edge.end - edge.start - offset, count - done)
    same = common_blocks(edge.tokens, offset * width, tokens, done * width, limit, width)
    same = common_extras(edge.extras, offset, extras, done, same)
    return same, min(max(0, edge.dev - offset), same)


def _room_to_append(edge: Edge, own: Hold) -> int:
    """By how many blocks the edge may grow in place."""
    size = edge.end - edge.start
    if edge.first is not None or edge.snaps or edge.parent is None or edge.dev < size or size >= APPEND_LIMIT:
        return 0
    for hold in edge.holds or ():
        if hold is not own and hold.depth == edge.end:
            return 0
    return APPEND_LIMIT - size


def _note(ranges: list[Range], first: int, end: int) -> None:
    if ranges and ranges[-1][1] == first:
        ranges[-1] = (ranges[-1][0], end)
    else:
        ranges.append((first, end))
