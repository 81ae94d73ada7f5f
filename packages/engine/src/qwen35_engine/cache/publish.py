"""While a lane runs: whole blocks join the index, taps become snapshots. Only what a successful pass has written."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass

from prefix_index import PrefixIndex, SnapshotKind
from prefix_index import Tap as PlannedTap
from qwen35_kernels import BLOCK_TOKENS

from ..memory import DeviceMemory
from .lane import LaneMemory
from .space import Space

__all__ = ["Publisher", "Tap"]


@dataclass(frozen=True)
class Tap:
    """A prompt position whose state the coming chunk writes into ``slot``, and what the snapshot will be."""

    position: int
    slot: int
    kind: SnapshotKind


class Publisher:
    """Commits blocks and publishes snapshots."""

    def __init__(self, memory: DeviceMemory, index: PrefixIndex, space: Space) -> None:
        self._memory = memory
        self._index = index
        self._space = space

    def commit(self, lane: LaneMemory, tokens: array[int], computed: int) -> None:
        """A pass has reached ``computed`` tokens: hand every block that they fill to the index."""
        if lane.lease is None or computed <= lane.frontier:
            return
        if not lane.activated:
            self._index.activate(lane.lease)
            lane.activated = True
        full = computed // BLOCK_TOKENS
        if full <= lane.committed:
            return
        begin, lane.committed = lane.committed, full
        extension = self._index.extend(
            lane.lease,
            tokens[begin * BLOCK_TOKENS : full * BLOCK_TOKENS].tobytes(),
            lane.pages[begin:full],
        )
        for first, end in (*extension.inserted, *extension.reattached):
            lane.private.difference_update(lane.pages[first:end])

    def claim_taps(self, lane: LaneMemory, planned: Iterable[PlannedTap]) -> list[Tap]:
        """Slots for planned taps, the most important first; one that finds none is skipped and counted. They are the
        lane's until its pass has been published."""
        taps: list[Tap] = []
        if lane.lease is None:
            return taps
        for tap in sorted(planned, key=lambda tap: (tap.source, -tap.position)):
            if self._space.claim_snapshot_slot(lane.lease, tap.position) and len(self._space.slots):
                taps.append(Tap(tap.position, self._space.take_snapshot_slot(), tap.kind))
                lane.claimed.append(taps[-1].slot)
            else:
                lane.taps_skipped += 1
        return sorted(taps, key=lambda tap: tap.position)

    def publish_tap(self, lane: LaneMemory, tokens: array[int], tap: Tap) -> None:
        """Make a written tap resumable. Its blocks are committed; the partial one is copied to a page of the cache."""
        first = tap.position // BLOCK_TOKENS
        tail = tokens[first * BLOCK_TOKENS : tap.position]
        if tail and not self._space.page_room():
            lane.taps_skipped += 1
            self._drop_claim(lane, tap.slot)
            return
        with ExitStack() as undo:
            tail_pages = self._space.take_pages(1) if tail else []
            undo.callback(self._space.pages.give_back, tail_pages)
            if tail:
                self._memory.copy_page(lane.pages[first], tail_pages[0])
            if self._publish(lane, tap.position, tap.slot, tail, tail_pages, tap.kind):
                undo.pop_all()
                lane.claimed.remove(tap.slot)
                lane.taps_taken += 1
            else:
                self._drop_claim(lane, tap.slot)

    def drop_claims(self, lane: LaneMemory) -> None:
        """Give up what a lane that ends has claimed for a pass that was not published."""
        for slot in lane.claimed[:]:
            self._drop_claim(lane, slot)

    def _drop_claim(self, lane: LaneMemory, slot: int) -> None:
        lane.claimed.remove(slot)
        self._space.drop_snapshot_slot(slot)

    def publish_endpoint(self, lane: LaneMemory, tokens: array[int], computed: int) -> bool:
        """Turn the lane's slot into the snapshot at its end, and its partial page into the tail; nothing is copied.

        Returns:
            Whether there was room for one more snapshot, if it takes one.
        """
        if lane.lease is None or computed <= lane.frontier:
            return True
        # What this lineage leaves behind goes first, so that its slot need not come from another conversation.
        self._index.supersede(lane.lease, computed)
        if not self._space.claim_snapshot_slot(lane.lease, computed):
            return False
        first = computed // BLOCK_TOKENS
        tail = tokens[first * BLOCK_TOKENS : computed]
        tail_pages = [lane.pages[first]] if tail else []
        if self._publish(lane, computed, lane.slot, tail, tail_pages, SnapshotKind.ENDPOINT):
            lane.private.difference_update(tail_pages)
            self._space.snapshot_slots += 1
            lane.slot = 0
        return True

    def _publish(
        self, lane: LaneMemory, frontier: int, slot: int, tail: array[int], tail_pages: list[int], kind: SnapshotKind
    ) -> bool:
        assert lane.lease is not None
        publication = self._index.publish(
            lane.lease, frontier, slot=slot, tail=tail.tobytes(), tail_pages=tuple(tail_pages), kind=kind
        )
        if publication.created:
            lane.published.append(publication.snapshot)
        return publication.created
