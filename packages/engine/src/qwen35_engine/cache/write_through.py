"""Write-through: when a sequence ends, what only the device has of its path is copied to the Host, in one batch.

Afterwards a device eviction loses nothing. Blocks come first, since no snapshot is worth anything without its path.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import cast

from prefix_index import Fill, Lease, PrefixIndex, Tier
from qwen35_kernels import BLOCK_TOKENS
from slab_pool import Ticket

from ..host import HostTier, Image, Tail
from ..sequence import Sequence
from .allocator import Allocator
from .transfers import Transfers

__all__ = ["WriteThrough"]


class WriteThrough:
    """Copies a sequence's blocks and snapshots to the Host tier."""

    def __init__(self, index: PrefixIndex, allocator: Allocator, host: HostTier, transfers: Transfers) -> None:
        self._index = index
        self._allocator = allocator
        self._host = host
        self._transfers = transfers
        self._reading_slots: list[Ticket] = []

    @property
    def reading_slots(self) -> Ticket | None:
        """The first batch on its way that reads snapshots' slots. Once it has landed these can be given up."""
        return self._reading_slots[0] if self._reading_slots else None

    def start(self, sequence: Sequence) -> None:
        """Start the batch of a sequence that still holds its lease. Where a step raises, promises are taken back."""
        with ExitStack() as undo:
            self._start(sequence, undo)

    def _start(self, sequence: Sequence, undo: ExitStack) -> None:
        lease = sequence.lease
        if lease is None:
            return
        fills, pages, slabs = self._blocks(lease, undo)
        images: list[Image] = []
        tails: list[Tail] = []
        for snapshot in sequence.published:
            claim = self._index.value(snapshot) if snapshot.alive else -math.inf
            if claim == -math.inf:
                continue  # superseded or gone: no request will resume from it
            copies = self._index.copies(snapshot)
            if (
                copies.slot is None
                or copies.slabs
                or self._index.held(lease, Tier.HOST) < snapshot.frontier // BLOCK_TOKENS
            ):
                continue
            wanted = self._host.image_slabs + len(copies.tail_pages)
            taken = self._allocator.take_slabs(wanted, claim=claim, protect=(snapshot,))
            if len(taken) < wanted:
                self._allocator.give_back_slabs(taken)
                continue
            undo.callback(self._allocator.give_back_slabs, taken)
            fills.append(self._index.begin_fill(snapshot, Tier.HOST, taken))
            undo.callback(self._index.abort, fills[-1])
            images.append(Image(copies.slot, taken[: self._host.image_slabs]))
            tails += [Tail(page, taken[-1]) for page in copies.tail_pages]
        if not fills:
            return
        ticket = self._host.write(pages, slabs, images, tails)
        undo.pop_all()
        self._transfers.add(ticket, fills)
        if images:
            self._reading_slots.append(ticket)
            self._transfers.afterwards(ticket, lambda: self._reading_slots.remove(ticket))

    def _blocks(self, lease: Lease, undo: ExitStack) -> tuple[list[Fill], tuple[int, ...], tuple[int, ...]]:
        """From the first block without a Host copy on, as far as slabs go."""
        first = self._index.held(lease, Tier.HOST)
        end = min(lease.depth, self._index.held(lease, Tier.DEVICE))
        if first >= end:
            return [], (), ()
        slabs = self._allocator.take_slabs(end - first, claim=math.inf)
        if not slabs:
            return [], (), ()
        undo.callback(self._allocator.give_back_slabs, slabs)
        pages = self._index.handles(lease, Tier.DEVICE, first, first + len(slabs))
        fill = self._index.begin_fill(lease, Tier.HOST, slabs)
        undo.callback(self._index.abort, fill)
        return [fill], cast(tuple[int, ...], pages), slabs
