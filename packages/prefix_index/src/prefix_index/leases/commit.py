"""What a lane commits under its lease: blocks, and snapshots with the supersession they bring.

*Blocks*: new ones are inserted, those without pages get some, the rest are duplicates.

*Supersession*: a lineage that publishes past its resume point makes redundant what it stood on: the snapshot it
resumed from, the prompt tap that snapshot had left retained, and what this lease published before, its last prompt tap
apart (a next turn that renders the reply anew resumes there). A BOUNDARY may serve other conversations: only the one
resumed from is superseded, and only while the tree below it is a single chain.
"""

from __future__ import annotations

from typing import NamedTuple

from prefix_index.errors import InvalidArgument, WrongState
from prefix_index.events import Feed
from prefix_index.leases.lease import Lease, Leases
from prefix_index.match import SnapshotHandle
from prefix_index.prompt import TOKEN_BYTES, BlockScheme
from prefix_index.retention.pins import Pins
from prefix_index.retention.queues import Queues
from prefix_index.retention.valuation import Valuation
from prefix_index.tree.records import (
    DEVICE_IMAGE,
    DEVICE_TAIL,
    HAS_TAIL,
    KIND_SHIFT,
    Edge,
    Snapshot,
    edge_at,
    held,
    path_of,
    place_for,
)
from prefix_index.tree.tokens import agreement, block_starts_with, common_extras, hash_before, path_goes_on_with
from prefix_index.tree.tree import Tree, child_with
from prefix_index.types import Extension, SnapshotKind, Span, Tier, integer

_TAP = SnapshotKind.TAP
_BOUNDARY_BITS = SnapshotKind.BOUNDARY << KIND_SHIFT  # the greatest kind: a status with these bits has no less


class Publication(NamedTuple):
    """What `publish` did. When not `created`, an equal snapshot was there: the caller keeps slot and pages."""

    snapshot: SnapshotHandle
    created: bool


class Commits:
    """Commits blocks and snapshots.

    Attributes:
        num_inserted, num_reattached, num_duplicate: blocks committed since the index was made, by what became of them.
        num_published, num_refreshed: snapshots published since then, new ones and equal ones.
    """

    __slots__ = (
        "_feed",
        "_leases",
        "_pins",
        "_queues",
        "_tree",
        "_valuation",
        "num_duplicate",
        "num_inserted",
        "num_published",
        "num_reattached",
        "num_refreshed",
    )

    def __init__(
        self, tree: Tree, feed: Feed, queues: Queues, valuation: Valuation, pins: Pins, leases: Leases
    ) -> None:
        self._tree = tree
        self._feed = feed
        self._queues = queues
        self._valuation = valuation
        self._pins = pins
        self._leases = leases
        self.num_inserted = self.num_reattached = self.num_duplicate = 0
        self.num_published = self.num_refreshed = 0

    # ------------------------------------------------------------------ blocks

    def extend(self, lease: Lease, tokens: bytes, num_blocks: int, pages: list[int]) -> Extension:
        """Commit whole blocks below the lease's depth and move its pin to their end."""
        tree = self._tree
        hold = lease._hold
        edge = hold.edge
        assert edge is not None
        depth = hold.depth
        there = edge.start + edge.device_blocks
        if there < depth:
            raise WrongState(f"extend: all {depth} blocks of the path must be held on the device, got {there}")
        if not num_blocks:
            return Extension((), (), ())
        prompt = lease._prompt
        end = depth + num_blocks
        extras = None
        if prompt._extras.pairs:
            extras = prompt._extras.of_blocks(depth, end, tree.scheme.block_tokens)
        if not lease._activated:
            self._leases.activate(lease)
        if lease._prompt_depth == depth and prompt._tokens.startswith(tokens, depth * tree.scheme.block_bytes):
            lease._prompt_depth = end  # the path is still the lease's prompt, whose hashes are known
        if depth < edge.end or edge.first_child is not None or edge.parent is None:
            done = self._merge(lease, tokens, num_blocks, extras, pages)
        else:
            # A conversation goes on, as most do: its leaf grows, and the pin at the leaf's end with it.
            tree.append(edge, tokens, extras, prompt._hashes[depth] if depth < lease._prompt_depth else None, pages)
            hold.depth = end
            tree.pinned_blocks += num_blocks
            self.num_inserted += num_blocks
            done = Extension(((depth, end),), (), ())
        if not self._feed.silent:
            assert lease._hold.edge is not None
            path = path_of(lease._hold.edge)
            for first, stop in sorted((*done.inserted, *done.reattached)):
                self._feed.stored_path(path, Tier.DEVICE, first, stop)
        return done

    def _merge(
        self, lease: Lease, tokens: bytes, num_blocks: int, extras: tuple[int, ...] | None, pages: list[int]
    ) -> Extension:
        """`extend` where something may be there already."""
        tree = self._tree
        scheme = tree.scheme
        width = scheme.block_bytes
        pools = tree.geometry.num_pools
        hold = lease._hold
        edge = hold.edge
        assert edge is not None
        depth = hold.depth
        end = depth + num_blocks
        reattached: list[Span] = []
        duplicate: list[Span] = []
        done = 0
        while done < num_blocks:
            if depth < edge.end:
                # Along the present edge as far as it agrees; cut it where it does not.
                same = agreement(edge, scheme, depth, tokens, done * width, min(edge.end - depth, num_blocks - done))
                same = common_extras(edge.extras, depth - edge.start, extras, done, same)
                present = min(max(0, edge.start + edge.device_blocks - depth), same)
                if present:
                    _add_span(duplicate, depth, depth + present)
                    self.num_duplicate += present
                if same > present:
                    tree.add_device_copies(edge, pages[(done + present) * pools : (done + same) * pools])
                    _add_span(reattached, depth + present, depth + same)
                    self.num_reattached += same - present
                depth += same
                done += same
                if done < num_blocks and depth < edge.end:
                    upper = tree.split(edge, depth)
                    self._valuation.divide(edge, upper)
                    edge = upper
                continue
            child = edge.first_child
            key = None
            if child is not None:
                extra = extras[done] if extras is not None else 0
                block = tokens[done * width : (done + 1) * width]
                if edge.branch is not None:
                    key = _key_below(lease, edge, depth, block, extra, scheme)
                    child = edge.branch.get(key)
                child = child_with(child, block, extra)
            if child is None:
                break
            edge = child
        inserted = num_blocks - done
        if inserted:
            if done:
                tokens, pages = tokens[done * width :], pages[done * pools :]
                extras = extras[done:] if extras is not None and any(extras[done:]) else None
            if edge.first_child is None and edge.parent is not None:
                known = lease._prompt._hashes[depth] if depth < lease._prompt_depth else None
                tree.append(edge, tokens, extras, known, pages)
            else:
                if key is None:
                    extra = extras[0] if extras is not None else 0
                    key = _key_below(lease, edge, depth, tokens[:width], extra, scheme)
                edge = tree.add_child(edge, tokens, extras, key, pages)
            self.num_inserted += inserted
        lease._hold = self._pins.move(hold, edge, end)
        return Extension(((depth, end),) if inserted else (), tuple(reattached), tuple(duplicate))

    # ------------------------------------------------------------------ snapshots

    def publish(
        self, lease: Lease, frontier: int, slot: int, tail: bytes, pages: tuple[int, ...], kind: SnapshotKind
    ) -> Publication:
        """The snapshot at `frontier`, new or, where an equal one is there, refreshed and retained again."""
        for number in (frontier, slot, *pages):
            if number.__class__ is not int:  # almost always it is
                frontier, slot, *others = (
                    integer("publish", "frontier, slot and pages", given) for given in (frontier, slot, *pages)
                )
                pages = tuple(others)
                break
        if kind.__class__ is not SnapshotKind:
            raise InvalidArgument(f"publish: kind must be a SnapshotKind, got {kind!r}")
        tree = self._tree
        depth = self._checked_depth(lease, frontier, slot, tail, pages)
        hold = lease._hold
        edge, below = edge_at(hold, depth)
        extra = 0
        if tail:
            if depth < hold.depth and not path_goes_on_with(edge, tree.scheme, depth, below, tail):
                raise InvalidArgument(f"publish: the tail must repeat the committed block {depth}, got other tokens")
            if lease._prompt._extras.pairs:
                extra = lease._prompt._extras.at(frontier)
        if not lease._activated:
            self._leases.activate(lease)
        if edge.snapshots and edge.snapshots[-1].frontier >= frontier:
            equal = _equal(edge, frontier, tail, extra)
            if equal is not None:
                self._refresh(lease, equal, kind)
                self.num_refreshed += 1
                return Publication(SnapshotHandle(lease._owner, equal), False)
        tree.serial += 1
        snapshot = Snapshot(tree.serial, edge, depth, frontier, tail, extra, kind << KIND_SHIFT | DEVICE_IMAGE)
        snapshot.slot = slot
        if tail:
            snapshot.status |= HAS_TAIL | DEVICE_TAIL
            tree.add_tail_copy(snapshot, pages)
            tree.clock = snapshot.tick = tree.clock + 1
            self._queues.add_tail(snapshot)
        tree.attach(snapshot)
        if not self._feed.silent:
            self._feed.published(snapshot)
        self._valuation.add(snapshot)
        # After the new one hangs there: what it takes over from its predecessors is then next to it.
        self._supersede_below(lease, frontier, kind)
        lease._lineage.append(snapshot)
        _advance(lease, snapshot, kind)
        self.num_published += 1
        return Publication(SnapshotHandle(lease._owner, snapshot), True)

    def supersede(self, lease: Lease, frontier: int, kind: SnapshotKind) -> None:
        """Supersede what a publication of `kind` at `frontier` would."""
        if frontier > lease._resume_frontier:
            if not lease._activated:
                self._leases.activate(lease)
            self._supersede_below(lease, frontier, kind)

    def _supersede_below(self, lease: Lease, frontier: int, kind: SnapshotKind) -> None:
        """Supersede what a snapshot of `kind` at `frontier` makes redundant in the lineage of `lease`."""
        retained: list[Snapshot] = []
        spared = lease._last_tap if kind is not _TAP else None
        for snapshot in lease._lineage:
            if snapshot.edge is None or snapshot.superseded:
                continue
            if (
                snapshot is spared
                or snapshot.frontier >= frontier
                or (
                    snapshot.status >= _BOUNDARY_BITS
                    and (snapshot is not lease._resumed or _is_shared(snapshot, self._tree.scheme))
                )
            ):
                retained.append(snapshot)
            else:
                self._valuation.supersede(snapshot)
        lease._lineage = retained

    def _refresh(self, lease: Lease, snapshot: Snapshot, kind: SnapshotKind) -> None:
        """Publish what is there already."""
        if kind is SnapshotKind.BOUNDARY and snapshot.kind is not kind:
            self._tree.kinds[snapshot.kind] -= 1
            self._tree.kinds[kind] += 1
            snapshot.set_kind(kind)
            self._feed.published(snapshot)
        self._supersede_below(lease, snapshot.frontier, kind)
        self._valuation.refresh(snapshot, hit=False)
        if snapshot not in lease._lineage:
            lease._lineage.append(snapshot)
        _advance(lease, snapshot, kind)

    def _checked_depth(self, lease: Lease, frontier: int, slot: int, tail: bytes, pages: tuple[int, ...]) -> int:
        """The blocks below a snapshot at `frontier`, once everything the caller says of it is known to be right."""
        geometry = self._tree.geometry
        hold = lease._hold
        if frontier <= lease._resume_frontier:
            resumed = lease._resume_frontier
            raise InvalidArgument(f"publish: frontier must lie above {resumed}, the resume point, got {frontier}")
        depth = geometry.depth(frontier)
        if depth > hold.depth:
            raise InvalidArgument(f"publish: {frontier} tokens need {depth} committed blocks, got {hold.depth}")
        expected = frontier - depth * geometry.block_tokens
        if len(tail) != expected * TOKEN_BYTES:
            raise InvalidArgument(f"publish: the tail must be {expected} tokens, got {len(tail) // TOKEN_BYTES}")
        if len(pages) != (geometry.num_pools if tail else 0):
            raise InvalidArgument(f"publish: a tail needs {geometry.num_pools} pages, no tail none, got {pages!r}")
        if slot < 0 or (pages and min(pages) < 0):
            raise InvalidArgument(f"publish: slot and pages must not be negative, got slot {slot!r}, pages {pages!r}")
        edge = hold.edge
        assert edge is not None
        there = edge.start + edge.device_blocks if edge.device_blocks else held(edge, Tier.DEVICE)
        if there < depth:
            raise WrongState(f"publish: {depth} blocks of the path must be held on the device, got {there}")
        return depth


def _key_below(lease: Lease, edge: Edge, depth: int, block: bytes, extra: int, scheme: BlockScheme) -> int:
    """The hash of the block that comes after `edge`, at `depth`: the prompt's own, else chained from the path's."""
    hashes = lease._prompt._hashes
    if depth < lease._prompt_depth:
        return hashes[depth]
    above = hashes[depth - 1] if 0 < depth == lease._prompt_depth else hash_before(edge, scheme, depth)
    return scheme.hasher(above, block, extra)


def _add_span(spans: list[Span], first: int, end: int) -> None:
    if spans and spans[-1][1] == first:
        spans[-1] = (spans[-1][0], end)
    else:
        spans.append((first, end))


def _equal(edge: Edge, frontier: int, tail: bytes, extra: int) -> Snapshot | None:
    """The snapshot of `edge` with this frontier, tail and extra."""
    snapshots = edge.snapshots
    place = place_for(snapshots, frontier)
    while place and snapshots[place - 1].frontier == frontier:
        place -= 1
        if snapshots[place].tail == tail and snapshots[place].extra == extra:
            return snapshots[place]
    return None


def _advance(lease: Lease, snapshot: Snapshot, kind: SnapshotKind) -> None:
    """A published snapshot is the lineage's newest; let it remember the tap left retained behind it."""
    if snapshot.frontier > lease._published_frontier:
        lease._published_frontier = snapshot.frontier
    if kind is _TAP:
        lease._last_tap = snapshot
        return
    tap = lease._last_tap
    if tap is not None and tap.edge is not None and not tap.superseded and tap is not snapshot:
        if tap.successor is not None:
            tap.successor.companion = None
        if snapshot.companion is not None:
            snapshot.companion.successor = None
        tap.successor = snapshot
        snapshot.companion = tap


def _is_shared(snapshot: Snapshot, scheme: BlockScheme) -> bool:
    """Whether several conversations have gone on from `snapshot`: the tree below is no single chain. O(chain)."""
    edge = snapshot.edge
    assert edge is not None
    below: Edge | None = edge
    if snapshot.depth < edge.end:
        if not block_starts_with(edge, scheme, snapshot.depth, snapshot.tail):
            return False
    elif snapshot.tail:
        going_on = None
        child = edge.first_child
        while child is not None:
            if child.head.startswith(snapshot.tail):
                if going_on is not None:
                    return True
                going_on = child
            child = child.next_sibling
        below = going_on
    while below is not None:
        first = below.first_child
        if first is not None and first.next_sibling is not None:
            return True
        below = first
    return False
