"""Committing blocks to the tree: new ones are inserted, those without pages get some, the rest are duplicates."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from prefix_index.core import Core
from prefix_index.lease import Lease
from prefix_index.nodes import Edge
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


class _Walk:
    """One `extend` under way: where it stands and what it has done."""

    __slots__ = (
        "at",
        "core",
        "done",
        "duplicate",
        "edge",
        "extras",
        "flat",
        "hashes",
        "inserted",
        "reattached",
        "tokens",
        "width",
    )

    def __init__(
        self, core: Core, lease: Lease, tokens: bytes, extras: tuple[int, ...] | None, flat: array[int]
    ) -> None:
        self.core = core
        self.width = core.tree.scheme.block_bytes
        self.tokens = tokens
        self.extras = extras
        self.flat = flat
        edge = lease._hold.edge
        assert edge is not None
        self.edge: Edge = edge
        self.at = lease._hold.depth
        self.done = 0
        self.hashes = block_hashes(core, lease, tokens, extras, len(tokens) // self.width)
        self.inserted: list[Range] = []
        self.reattached: list[Range] = []
        self.duplicate: list[Range] = []

    def run(self, lease: Lease) -> None:
        count = len(self.hashes)
        while self.done < count:
            edge = self.edge
            if self.at < edge.end:
                self._follow(count)
                continue
            at = self.done
            extra = self.extras[at] if self.extras is not None else 0
            child = self.core.tree.find_child(edge, self.hashes[at], self.tokens, at * self.width, extra)
            if child is not None:
                self.edge = child
            else:
                room = self._room_to_append(lease)
                if room:
                    self._append(min(room, count - at))
                else:
                    self._branch()

    def _slice(self, first: int, end: int) -> tuple[bytes, tuple[int, ...] | None, array[int]]:
        pools = self.core.geometry.num_pools
        extras = self.extras[first:end] if self.extras is not None else None
        if extras is not None and not any(extras):
            extras = None
        tokens = self.tokens
        if first or end < len(self.hashes):
            tokens = tokens[first * self.width : end * self.width]
        return tokens, extras, self.flat[first * pools : end * pools]

    def _follow(self, count: int) -> None:
        """Go along the present edge as far as it agrees; cut it where it does not."""
        edge = self.edge
        offset = self.at - edge.start
        limit = min(edge.end - self.at, count - self.done)
        same = common_blocks(edge.tokens, offset * self.width, self.tokens, self.done * self.width, limit, self.width)
        same = common_extras(edge.extras, offset, self.extras, self.done, same)
        present = min(max(0, edge.dev - offset), same)
        at = self.at
        if present:
            _note(self.duplicate, at, at + present)
        if same > present:
            self._reattach(edge, self.done + present, self.done + same)
            _note(self.reattached, at + present, at + same)
        self.at += same
        self.done += same
        if self.done < count and self.at < edge.end:
            self.edge = self.core.split(edge, self.at)

    def _reattach(self, edge: Edge, first: int, end: int) -> None:
        pools = self.core.geometry.num_pools
        self.core.hold_on_device(edge, self.flat[first * pools : end * pools])

    def _room_to_append(self, lease: Lease) -> int:
        edge = self.edge
        if edge.parent is None or edge.first is not None or edge.snaps or edge.dev < edge.end - edge.start:
            return 0
        for hold in edge.holds or ():
            if hold is not lease._hold and hold.depth == edge.end:
                return 0
        return max(0, APPEND_LIMIT - (edge.end - edge.start))

    def _append(self, size: int) -> None:
        self.core.tree.append(self.edge, *self._slice(self.done, self.done + size))
        self._inserted(size)

    def _branch(self) -> None:
        end = len(self.hashes)
        tokens, extras, pages = self._slice(self.done, end)
        size = end - self.done
        self.edge = self.core.tree.add_child(self.edge, self.hashes[self.done], tokens, extras, pages, size)
        self._inserted(size)

    def _inserted(self, size: int) -> None:
        self.core.device_blocks += size
        _note(self.inserted, self.at, self.at + size)
        self.at += size
        self.done += size


def _note(ranges: list[Range], first: int, end: int) -> None:
    if ranges and ranges[-1][1] == first:
        ranges[-1] = (ranges[-1][0], end)
    else:
        ranges.append((first, end))


def extend(core: Core, lease: Lease, tokens: bytes, extras: tuple[int, ...] | None, flat: array[int]) -> Extension:
    """Commit whole blocks below the lease's depth and move its pin to their end."""
    walk = _Walk(core, lease, tokens, extras, flat)
    walk.run(lease)
    lease._hash = walk.hashes[-1]
    lease._hold = core.move(lease._hold, walk.edge, walk.at)
    return Extension(tuple(walk.inserted), tuple(walk.reattached), tuple(walk.duplicate))
