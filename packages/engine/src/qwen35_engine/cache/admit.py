"""Admission: the memory a sequence runs in, taken whole or not at all, and given back at its end."""

from __future__ import annotations

from contextlib import ExitStack
from struct import pack_into
from typing import cast

import torch
from torch import Tensor

from prefix_index import Lease, Match, PrefixIndex, Tier
from qwen35_kernels import BLOCK_TOKENS

from ..memory import DeviceMemory
from ..usage import Reuse
from .lane import LaneMemory
from .quote import AdmissionQuote
from .restore import Missing, Restorer
from .space import Space
from .transfers import Transfers

__all__ = ["Admission"]


class Admission:
    """Makes lanes. ``block_tables`` is int64 ``[max_concurrency, blocks]`` on the device: row r is the lane's with that
    row, unused entries are 0, the scratch page."""

    def __init__(
        self,
        memory: DeviceMemory,
        index: PrefixIndex,
        space: Space,
        restorer: Restorer | None,
        transfers: Transfers | None,
        *,
        max_concurrency: int,
        context_blocks: int,
    ) -> None:
        self._memory = memory
        self._index = index
        self._space = space
        self._restorer = restorer
        self._transfers = transfers
        self._rows = set(range(max_concurrency))
        self.block_tables: Tensor = torch.zeros(
            (max_concurrency, context_blocks), dtype=torch.int64, device=memory.pages.device
        )

    def start(self, quote: AdmissionQuote) -> LaneMemory:
        """Make the lane of a quote that is ready, with nothing in between. All or nothing: where a step raises, all
        that was pinned and taken is given back, and only what was evicted for it stays evicted.

        Returns:
            The lane's memory. Its slot holds the state of its frontier once ``restore``, if there is one, has landed.
        """
        with ExitStack() as undo:
            lane = self._stage(quote, undo)
            undo.pop_all()
        return lane

    def _stage(self, quote: AdmissionQuote, undo: ExitStack) -> LaneMemory:
        if quote.match is None:
            return self._make_lane(self._take_pages(quote.blocks, undo), 0, None, undo)
        index = self._index
        lease = self._acquire(quote, quote.match, undo)
        missing = Missing.of(index, lease)
        # Pins what a restore reads until it has landed, whatever becomes of the lane.
        guard = self._acquire(quote, quote.match, undo) if missing else None
        taken = self._take_pages(quote.blocks - lease.depth + missing.num_pages, undo)
        restored, taken = taken[: missing.blocks], taken[missing.blocks :]
        tail_pages, own = (taken[:1], taken[1:]) if missing.tail else (list(lease.tail_pages), taken)
        held = cast(tuple[int, ...], index.handles(lease, Tier.DEVICE, 0, lease.depth - missing.blocks))
        lane = self._make_lane([*held, *restored, *own], lease.depth, lease, undo)
        if lease.slot is not None:
            self._memory.copy_state(lease.slot, lane.slot)
        if tail_pages and not missing.tail:
            self._memory.copy_page(tail_pages[0], own[0])
        if guard is not None:
            assert self._restorer is not None
            self._restorer.for_lane(lane, missing, guard, restored, tail_pages, undo)
        host_tokens = missing.blocks * BLOCK_TOKENS + (lease.frontier % BLOCK_TOKENS if missing.tail else 0)
        lane.reuse = Reuse(
            device_tokens=lease.frontier - host_tokens,
            host_tokens=host_tokens,
            matched_tokens=quote.match.matched_tokens,
            restored_bytes=lane.restore.num_bytes if lane.restore is not None else 0,
            reason=quote.reason,
        )
        return lane

    def _acquire(self, quote: AdmissionQuote, match: Match, undo: ExitStack) -> Lease:
        lease = self._index.acquire(match, quote.source)
        undo.callback(self._index.cancel, lease)
        return lease

    def _take_pages(self, count: int, undo: ExitStack) -> list[int]:
        pages = self._space.take_pages(count)
        undo.callback(self._space.pages.give_back, pages)
        return pages

    def _make_lane(self, pages: list[int], shared: int, lease: Lease | None, undo: ExitStack) -> LaneMemory:
        """A lane over ``pages``, of which the first so many ``shared`` ones are the index's."""
        (slot,) = self._space.slots.take(1)
        undo.callback(self._space.slots.give_back, [slot])
        if lease is None or lease.snapshot is None:
            self._memory.clear_state(slot)
        row = self._rows.pop()
        undo.callback(self._rows.add, row)
        lane = LaneMemory(
            row=row,
            slot=slot,
            frontier=lease.frontier if lease else 0,
            lease=lease,
            pages=pages,
            committed=shared,
            private=set(pages[shared:]),
        )
        self._write_row(lane)
        return lane

    def grow(self, lane: LaneMemory, tokens: int) -> bool:
        """Make room for the KV of ``tokens`` tokens; False when no page is free or can be evicted now."""
        short = -(-tokens // BLOCK_TOKENS) - len(lane.pages)
        if short <= 0:
            return True
        if short > self._space.page_room():
            return False
        begin = len(lane.pages)
        own = self._space.take_pages(short)
        lane.pages += own
        lane.private.update(own)
        self.block_tables[lane.row, begin : len(lane.pages)] = torch.tensor(own, device=self.block_tables.device)
        return True

    def retire(self, lane: LaneMemory) -> None:
        """Take the row back of a lane that computes no more; a second time changes nothing."""
        self._rows.add(lane.row)

    def end(self, lane: LaneMemory) -> None:
        """Take the lane's pages and slot back; those a restore still writes to, when it has landed."""
        pages, slot = sorted(lane.private), lane.slot

        def give_back() -> None:
            self._space.pages.give_back(pages)
            if slot:
                self._space.slots.give_back([slot])

        if lane.restore is None or lane.restore.done() or self._transfers is None:
            give_back()
        else:
            self._transfers.afterwards(lane.restore.ticket, give_back)

    def _write_row(self, lane: LaneMemory) -> None:
        row = self.block_tables[lane.row]
        # Of thousands of numbers: a third of what an array takes, a tenth of what a tensor does.
        numbers = bytearray(8 * row.shape[0])
        pack_into(f"{len(lane.pages)}q", numbers, 0, *lane.pages)
        row.copy_(torch.frombuffer(numbers, dtype=torch.int64))
