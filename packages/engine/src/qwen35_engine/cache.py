"""The binding between tokens and pages: the only code that sees both.

``PrefixCache`` owns the free lists of pages and slots, asks the index what is reusable and tells it what was computed.
One lane's share of the memory is a ``LaneMemory``. Who owns a page of a lane, block by block::

    0 ............ frontier//64 ............ committed ............ len(pages)
    | the index's, pinned by  | the index's, or the      | the lane's: being written |
    | the lease               | lane's if a duplicate    | or reserved for output    |
                              (``private`` lists the lane's)

At the end of a lane its private pages go back to the pool, but for the partial one that an endpoint snapshot takes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from prefix_index import Freed, Lease, PrefixIndex, Prompt, SnapshotKind
from qwen35_kernels import BLOCK_TOKENS

from .memory import DeviceMemory, IdPool

__all__ = ["CacheStats", "LaneMemory", "PrefixCache", "Tap"]


@dataclass(frozen=True)
class Tap:
    """A prompt position whose state the coming chunk writes into ``slot``."""

    position: int
    slot: int


@dataclass(frozen=True)
class CacheStats:
    """Gauges of the device tier."""

    pages_free: int
    pages_total: int
    slots_free: int
    slots_total: int
    snapshot_slots_used: int
    taps_skipped: int
    endpoints_skipped: int


@dataclass(eq=False)
class LaneMemory:
    """What one running sequence holds. ``row`` is its row of the block tables, ``frontier`` where it resumed."""

    row: int
    slot: int
    frontier: int
    lease: Lease | None
    pages: list[int]
    committed: int
    private: set[int] = field(default_factory=set)


class PrefixCache:
    """Pages, slots and the index over them, for the device tier. Used by the worker only.

    Attributes:
        block_tables: int64 ``[max_concurrency, blocks]`` on the device; row r belongs to the lane with that row, unused
            entries are 0, the scratch page.
    """

    def __init__(self, memory: DeviceMemory, *, max_concurrency: int, context_blocks: int, snapshot_slots: int) -> None:
        self._memory = memory
        self.index = PrefixIndex(
            block_tokens=BLOCK_TOKENS,
            block_bytes=memory.page_layout.page_bytes,
            image_bytes=memory.state_layout.image_bytes,
        )
        self._pages = IdPool("KV pages", memory.pages.shape[0])
        self._slots = IdPool("state slots", memory.states.shape[0])
        self._snapshot_limit = snapshot_slots
        self._snapshot_slots = 0
        self._rows = list(range(max_concurrency))
        self._taps_skipped = 0
        self._endpoints_skipped = 0
        self.block_tables: Tensor = torch.zeros(
            (max_concurrency, context_blocks), dtype=torch.int64, device=memory.pages.device
        )

    # ---- admission ----------------------------------------------------------------------------------------------

    def admit(self, prompt: Prompt | None, *, total_tokens: int) -> LaneMemory | None:
        """Give a new sequence its slot and the pages of ``total_tokens`` tokens, resumed as deep as the cache allows.

        Args:
            prompt: the prepared prompt, or None for a request that neither uses nor feeds the cache.
            total_tokens: prompt and the output room that the request is entitled to.

        Returns:
            The lane's memory, with the state of its frontier in its slot; None when the pages that running sequences
            hold leave no room, in which case nothing has changed.
        """
        blocks = -(-total_tokens // BLOCK_TOKENS)
        if prompt is None:
            return self._activate(None, blocks) if self._room() >= blocks else None
        match = self.index.match(prompt)
        for candidate in (*match.candidates, None):
            # Pinning the path first makes the arithmetic exact: what is evictable now is none of the lane's own.
            lease = self.index.acquire(match, candidate)
            if self._room() >= blocks - lease.depth:
                return self._activate(lease, blocks)
            self.index.cancel(lease)
        return None

    def _room(self) -> int:
        """Pages that are free or can be made free."""
        return len(self._pages) + self.index.stats().evictable_device_pages

    def _activate(self, lease: Lease | None, blocks: int) -> LaneMemory:
        shared = list(lease.pages[0]) if lease else []
        own = self._take_pages(blocks - len(shared))
        slot = self._slots.take(1)[0]
        if lease is not None and lease.slot is not None:
            self._memory.copy_state(lease.slot, slot)
            for tail_page in lease.tail_pages:
                self._memory.copy_page(tail_page, own[0])
        else:
            self._memory.clear_state(slot)
        if lease is not None:
            self.index.activate(lease)
        lane = LaneMemory(
            row=self._rows.pop(),
            slot=slot,
            frontier=lease.frontier if lease else 0,
            lease=lease,
            pages=shared + own,
            committed=len(shared),
            private=set(own),
        )
        self.block_tables[lane.row].zero_()
        self._write_table(lane, 0)
        return lane

    def grow(self, lane: LaneMemory, tokens: int) -> bool:
        """Make room for the KV of ``tokens`` tokens; False when every page is held by a running sequence."""
        short = -(-tokens // BLOCK_TOKENS) - len(lane.pages)
        if short <= 0:
            return True
        if short > self._room():
            return False
        own = self._take_pages(short)
        begin = len(lane.pages)
        lane.pages += own
        lane.private.update(own)
        self._write_table(lane, begin)
        return True

    def _write_table(self, lane: LaneMemory, begin: int) -> None:
        pages = torch.tensor(lane.pages[begin:], dtype=torch.int64)
        self.block_tables[lane.row, begin : len(lane.pages)] = pages.to(self.block_tables.device)

    def _take_pages(self, count: int) -> list[int]:
        short = count - len(self._pages)
        if short > 0:
            self._reclaim(self.index.evict_device(short))
        return self._pages.take(count)

    def _reclaim(self, freed: Freed) -> None:
        self._pages.give_back(cast(tuple[int, ...], freed.pages))  # one pool: a block's device copy is one page
        self._slots.give_back(freed.slots)
        self._snapshot_slots -= len(freed.slots)

    # ---- while it runs ------------------------------------------------------------------------------------------

    def commit(self, lane: LaneMemory, tokens: array[int], computed: int) -> None:
        """Hand every block that ``computed`` tokens fill to the index."""
        full = computed // BLOCK_TOKENS
        if lane.lease is None or full <= lane.committed:
            return
        begin, lane.committed = lane.committed, full
        extension = self.index.extend(
            lane.lease,
            tokens[begin * BLOCK_TOKENS : full * BLOCK_TOKENS].tobytes(),
            lane.pages[begin:full],
        )
        for first, end in (*extension.inserted, *extension.reattached):
            lane.private.difference_update(lane.pages[first:end])

    def claim_taps(self, lane: LaneMemory, positions: Sequence[int]) -> list[Tap]:
        """Slots for the states after ``positions``; a position that finds none is skipped and counted."""
        taps = []
        for position in positions if lane.lease is not None else ():
            if self._snapshot_room(lane, position):
                self._snapshot_slots += 1
                taps.append(Tap(position, self._slots.take(1)[0]))
            else:
                self._taps_skipped += 1
        return taps

    def publish_tap(self, lane: LaneMemory, tokens: array[int], tap: Tap) -> None:
        """Make a written tap resumable. Its blocks are committed; the partial one is copied to a page of the cache."""
        first = tap.position // BLOCK_TOKENS
        tail = tokens[first * BLOCK_TOKENS : tap.position]
        if tail and not self._room():
            self._taps_skipped += 1
            self._drop_snapshot_slot(tap.slot)
            return
        tail_pages = self._take_pages(1) if tail else []
        if tail:
            self._memory.copy_page(lane.pages[first], tail_pages[0])
        if not self._publish(lane, tap.position, tap.slot, tail, tail_pages, SnapshotKind.TAP):
            self._drop_snapshot_slot(tap.slot)
            self._pages.give_back(tail_pages)

    def drop_taps(self, taps: Sequence[Tap]) -> None:
        """Give up taps whose chunk failed."""
        for tap in taps:
            self._drop_snapshot_slot(tap.slot)

    # ---- the end ------------------------------------------------------------------------------------------------

    def finish(self, lane: LaneMemory, tokens: array[int], computed: int) -> None:
        """End a sequence whose first ``computed`` tokens are sound: its slot becomes a snapshot, its blocks stay."""
        self.commit(lane, tokens, computed)
        if lane.lease is not None and computed > lane.frontier:
            self._publish_endpoint(lane, tokens, computed)
        self.abandon(lane)

    def _publish_endpoint(self, lane: LaneMemory, tokens: array[int], computed: int) -> None:
        assert lane.lease is not None
        # What this lineage leaves behind goes first, so that its slot need not come from another conversation.
        self.index.supersede(lane.lease, computed)
        if not self._snapshot_room(lane, computed):
            self._endpoints_skipped += 1
            return
        first = computed // BLOCK_TOKENS
        tail = tokens[first * BLOCK_TOKENS : computed]
        tail_pages = [lane.pages[first]] if tail else []
        if self._publish(lane, computed, lane.slot, tail, tail_pages, SnapshotKind.ENDPOINT):
            # Slot and partial page move to the snapshot as they are; nothing is copied.
            lane.private.difference_update(tail_pages)
            self._snapshot_slots += 1
            lane.slot = 0

    def abandon(self, lane: LaneMemory) -> None:
        """End a sequence without a snapshot. What it committed before stays reusable."""
        if lane.lease is not None:
            self.index.release(lane.lease)
        self._pages.give_back(sorted(lane.private))
        if lane.slot:
            self._slots.give_back([lane.slot])
        self._rows.append(lane.row)

    # ---- snapshots ----------------------------------------------------------------------------------------------

    def _publish(
        self,
        lane: LaneMemory,
        frontier: int,
        slot: int,
        tail: array[int],
        tail_pages: list[int],
        kind: SnapshotKind,
    ) -> bool:
        assert lane.lease is not None
        publication = self.index.publish(
            lane.lease, frontier, slot=slot, tail=tail.tobytes(), tail_pages=tuple(tail_pages), kind=kind
        )
        return publication.created

    def _snapshot_room(self, lane: LaneMemory, frontier: int) -> bool:
        """Whether the cache may hold one more snapshot; a less valuable one gives way if need be."""
        if self._snapshot_slots < self._snapshot_limit:
            return True
        assert lane.lease is not None
        freed = self.index.claim_slot(self.index.worth(lane.lease, frontier))
        if freed is None:
            return False
        self._reclaim(freed)
        return True

    def _drop_snapshot_slot(self, slot: int) -> None:
        self._slots.give_back([slot])
        self._snapshot_slots -= 1

    # ---- observation --------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        return CacheStats(
            pages_free=len(self._pages),
            pages_total=self._pages.capacity,
            slots_free=len(self._slots),
            slots_total=self._slots.capacity,
            snapshot_slots_used=self._snapshot_slots,
            taps_skipped=self._taps_skipped,
            endpoints_skipped=self._endpoints_skipped,
        )
