"""Pins: what may not be given up."""

from __future__ import annotations

from collections.abc import Sequence

from prefix_index.retention.queues import Queues
from prefix_index.retention.valuation import Valuation
from prefix_index.tree.records import Edge, Hold, Snapshot, pinned_device_blocks
from prefix_index.tree.tree import Tree


class Pins:
    """Pins of paths and of snapshots. Whatever an unpin makes evictable is queued.

    A hold pins every block from the root to its depth. `Edge.pins` counts units: the holds that end in the edge, and
    its pinned children. So pinning stops at the first ancestor that is pinned already.
    """

    __slots__ = ("_queues", "_tree", "_valuation")

    def __init__(self, tree: Tree, queues: Queues, valuation: Valuation) -> None:
        self._tree = tree
        self._queues = queues
        self._valuation = valuation

    def pin(self, hold: Hold) -> None:
        """Register `hold` at its edge and pin the path above it."""
        edge = hold.edge
        assert edge is not None
        if edge.pins:
            before = pinned_device_blocks(edge)
            edge.holds = [*edge.holds, hold] if edge.holds is not None else [hold]
            edge.pins += 1
            newly = pinned_device_blocks(edge) - before
        else:
            edge.holds = [hold]
            edge.pins = 1
            newly = min(hold.depth - edge.start, edge.device_blocks)
            above = edge.parent
            while above is not None:
                pins = above.pins
                above.pins = pins + 1
                if pins:
                    if above.holds is not None and len(above.holds) == pins:
                        newly += _device_blocks_below_holds(above, above.holds)
                    break
                newly += above.device_blocks
                above = above.parent
        self._tree.pinned_blocks += newly

    def unpin(self, hold: Hold) -> None:
        """Take `hold` off its edge."""
        edge = hold.edge
        assert edge is not None
        assert edge.holds is not None
        if edge.pins > 1:
            before = pinned_device_blocks(edge)
            edge.holds = [other for other in edge.holds if other is not hold] or None
            edge.pins -= 1
            freed = before - pinned_device_blocks(edge)
        else:
            edge.holds = None
            edge.pins = 0
            freed = min(hold.depth - edge.start, edge.device_blocks)
            above = edge.parent
            while above is not None:
                pins = above.pins = above.pins - 1
                if pins:
                    if above.holds is not None and len(above.holds) == pins:
                        freed += _device_blocks_below_holds(above, above.holds)
                    break
                freed += above.device_blocks
                above = above.parent
        self._tree.pinned_blocks -= freed
        hold.edge = None
        self._queues.offer_path(edge)

    def move(self, hold: Hold, edge: Edge, depth: int) -> Hold:
        """Carry a hold deeper along its path: to `depth` inside `edge`, which is its own edge or lies below it."""
        if edge is hold.edge:
            if edge.pins > 1:
                before = pinned_device_blocks(edge)
                hold.depth = depth
                self._tree.pinned_blocks += pinned_device_blocks(edge) - before
            else:
                size = edge.device_blocks
                self._tree.pinned_blocks += min(depth - edge.start, size) - min(hold.depth - edge.start, size)
                hold.depth = depth
            return hold
        left = hold.edge
        assert left is not None
        assert left.holds is not None
        if edge.parent is left and not edge.pins and hold.depth == left.end:  # the usual step, into a new child
            if len(left.holds) == 1:
                left.holds = None
            else:
                left.holds.remove(hold)
            edge.holds = [hold]
            edge.pins = 1
            hold.edge = edge
            hold.depth = depth
            self._tree.pinned_blocks += min(depth - edge.start, edge.device_blocks)
            return hold
        moved = Hold(edge, depth)
        self.pin(moved)
        left.pins -= 1  # the child on the way to `edge` holds it now
        if len(left.holds) == 1:
            left.holds = None
        else:
            left.holds.remove(hold)
        hold.edge = None
        return moved

    def pin_snapshot(self, snapshot: Snapshot) -> None:
        """Pin the copies of a snapshot; its path is pinned by a hold."""
        if not snapshot.pins and snapshot.tail_pages is not None:
            self._tree.pinned_tails += 1
        snapshot.pins += 1

    def unpin_snapshot(self, snapshot: Snapshot) -> None:
        """End one pin of a snapshot."""
        snapshot.pins -= 1
        if not snapshot.pins:
            if snapshot.tail_pages is not None:
                self._tree.pinned_tails -= 1
                self._queues.offer_tail(snapshot)
            self._valuation.offer(snapshot)

    def shield(self, snapshots: Sequence[Snapshot]) -> list[tuple[Hold, Snapshot]]:
        """Pin snapshots and their paths until `unshield`."""
        shields = []
        for snapshot in snapshots:
            assert snapshot.edge is not None
            hold = Hold(snapshot.edge, snapshot.depth)
            self.pin(hold)
            self.pin_snapshot(snapshot)
            shields.append((hold, snapshot))
        return shields

    def unshield(self, shields: Sequence[tuple[Hold, Snapshot]]) -> None:
        """End what `shield` pinned."""
        for hold, snapshot in reversed(shields):
            self.unpin_snapshot(snapshot)
            self.unpin(hold)


def _device_blocks_below_holds(edge: Edge, holds: Sequence[Hold]) -> int:
    return edge.device_blocks - min(max(hold.depth for hold in holds) - edge.start, edge.device_blocks)
