"""What a successful pass has written is published: whole blocks join the index, taps become snapshots."""

from __future__ import annotations

from contextlib import ExitStack

from prefix_index import PrefixIndex, SnapshotKind
from qwen35_kernels import BLOCK_TOKENS

from ..memory import DeviceMemory
from ..sequence import Sequence
from .allocator import Allocator

__all__ = ["Publisher"]


class Publisher:
    """Commits blocks and publishes snapshots."""

    def __init__(self, memory: DeviceMemory, index: PrefixIndex, allocator: Allocator) -> None:
        self._memory = memory
        self._index = index
        self._allocator = allocator

    def commit(self, sequence: Sequence) -> None:
        """Hand every block that the computed tokens fill to the index."""
        lease, computed = sequence.lease, sequence.computed
        if lease is None or computed <= sequence.frontier:
            return
        if not sequence.activated:
            self._index.activate(lease)
            sequence.activated = True
        begin, full = sequence.committed, computed // BLOCK_TOKENS
        if full <= begin:
            return
        sequence.committed = full
        extension = self._index.extend(
            lease, sequence.tokens[begin * BLOCK_TOKENS : full * BLOCK_TOKENS].tobytes(), sequence.pages[begin:full]
        )
        for first, end in (*extension.inserted, *extension.reattached):
            sequence.private.difference_update(sequence.pages[first:end])

    def claim_taps(self, sequence: Sequence, end: int) -> None:
        """Give slots to the taps up to ``end``, the most important first. A tap that finds none is skipped and counted.

        They are the sequence's until its pass has been published.
        """
        if not sequence.taps:
            return
        due = [tap for tap in sequence.taps if tap.position <= end]
        sequence.taps = [tap for tap in sequence.taps if tap.position > end]
        if sequence.lease is None:
            return
        for tap in sorted(due, key=lambda tap: (tap.source, -tap.position)):
            room = self._allocator.claim_snapshot_slot(sequence.lease, tap.position)
            if room and len(self._allocator.slots):
                sequence.claimed[self._allocator.take_snapshot_slot()] = tap
            else:
                sequence.taps_skipped += 1

    def publish_taps(self, sequence: Sequence) -> None:
        """Make the written taps resumable, in the order of the prompt. Their blocks are committed."""
        for slot, tap in sorted(sequence.claimed.items(), key=lambda item: item[1].position):
            self._publish_tap(sequence, slot, tap.position, tap.kind)
            sequence.last_capture = tap.position

    def _publish_tap(self, sequence: Sequence, slot: int, position: int, kind: SnapshotKind) -> None:
        block, rest = divmod(position, BLOCK_TOKENS)
        if rest and not self._allocator.page_room():
            sequence.taps_skipped += 1
            self._drop_claim(sequence, slot)
            return
        with ExitStack() as undo:
            tail_pages = self._allocator.take_pages(1) if rest else []
            undo.callback(self._allocator.pages.give_back, tail_pages)
            if rest:  # the sequence goes on writing in its own copy of the partial page
                self._memory.copy_page(sequence.pages[block], tail_pages[0])
            if self._publish(sequence, position, slot, tail_pages, kind):
                undo.pop_all()
                del sequence.claimed[slot]
                sequence.taps_taken += 1
            else:
                self._drop_claim(sequence, slot)

    def drop_claims(self, sequence: Sequence) -> None:
        """Give up what a sequence that ends has claimed for a pass that was not published."""
        for slot in list(sequence.claimed):
            self._drop_claim(sequence, slot)

    def _drop_claim(self, sequence: Sequence, slot: int) -> None:
        del sequence.claimed[slot]
        self._allocator.drop_snapshot_slot(slot)

    def publish_endpoint(self, sequence: Sequence) -> bool:
        """Turn the sequence's slot into the snapshot at its end, and its partial page into the tail; nothing is copied.

        Returns:
            Whether there was room for one more snapshot, if it takes one.
        """
        lease, computed = sequence.lease, sequence.computed
        if lease is None or computed <= sequence.frontier:
            return True
        # What this lineage leaves behind goes first, so that its slot need not come from another conversation.
        self._index.supersede(lease, computed)
        if not self._allocator.claim_snapshot_slot(lease, computed):
            return False
        block, rest = divmod(computed, BLOCK_TOKENS)
        tail_pages = [sequence.pages[block]] if rest else []
        if self._publish(sequence, computed, sequence.slot, tail_pages, SnapshotKind.ENDPOINT):
            sequence.private.difference_update(tail_pages)
            self._allocator.snapshot_slots += 1
            sequence.slot = 0
        return True

    def _publish(self, sequence: Sequence, frontier: int, slot: int, tail_pages: list[int], kind: SnapshotKind) -> bool:
        """Whether there is a new snapshot; where an equal one exists, the handles stay the caller's."""
        assert sequence.lease is not None
        tail = sequence.tokens[frontier // BLOCK_TOKENS * BLOCK_TOKENS : frontier].tobytes()
        publication = self._index.publish(
            sequence.lease, frontier, slot=slot, tail=tail, tail_pages=tuple(tail_pages), kind=kind
        )
        if publication.created:
            sequence.published.append(publication.snapshot)
        return publication.created
