"""Write-through: when a lane lets go of its path, what only the device has is copied to the Host, in one batch.

Afterwards a device eviction loses nothing. Blocks come first, since no snapshot is worth anything without its path.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import cast

from prefix_index import PrefixIndex, Tier
from prefix_index import Ticket as Fill
from qwen35_kernels import BLOCK_TOKENS
from slab_pool import Ticket

from ..host import HostTier, Image, Tail
from .lane import LaneMemory
from .space import Space
from .transfers import Transfers

__all__ = ["Backup"]


class Backup:
    """Copies a lane's blocks and snapshots to the Host tier."""

    def __init__(self, index: PrefixIndex, space: Space, host: HostTier, transfers: Transfers) -> None:
        self._index = index
        self._space = space
        self._host = host
        self._transfers = transfers
        self._with_images: list[Ticket] = []

    @property
    def reading_slots(self) -> Ticket | None:
        """The first batch on its way that reads snapshots' slots. Once it has landed these can be given up."""
        return self._with_images[0] if self._with_images else None

    def write_through(self, lane: LaneMemory) -> None:
        """Start the batch; the lane's lease is still held. Where a step raises, what was promised is taken back."""
        with ExitStack() as undo:
            self._start(lane, undo)

    def _start(self, lane: LaneMemory, undo: ExitStack) -> None:
        if lane.lease is None:
            return
        fills, pages, slabs = self._blocks(lane, undo)
        images: list[Image] = []
        tails: list[Tail] = []
        for snapshot in lane.published:
            claim = self._index.value(snapshot) if snapshot.alive else -math.inf
            if claim == -math.inf:
                continue  # superseded or gone: nobody will resume from it
            copies = self._index.copies(snapshot)
            if (
                copies.slot is None
                or copies.slabs
                or self._index.held(lane.lease, Tier.HOST) < snapshot.frontier // BLOCK_TOKENS
            ):
                continue
            wanted = self._host.image_slabs + len(copies.tail_pages)
            taken = self._space.take_slabs(wanted, claim=claim, protect=(snapshot,))
            if len(taken) < wanted:
                self._space.give_back_slabs(taken)
                continue
            undo.callback(self._space.give_back_slabs, taken)
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
            self._with_images.append(ticket)
            self._transfers.afterwards(ticket, lambda: self._with_images.remove(ticket))

    def _blocks(self, lane: LaneMemory, undo: ExitStack) -> tuple[list[Fill], tuple[int, ...], tuple[int, ...]]:
        """From the first block without a Host copy on, as far as slabs go."""
        assert lane.lease is not None
        first = self._index.held(lane.lease, Tier.HOST)
        end = min(lane.lease.depth, self._index.held(lane.lease, Tier.DEVICE))
        if first >= end:
            return [], (), ()
        slabs = self._space.take_slabs(end - first, claim=math.inf)
        if not slabs:
            return [], (), ()
        undo.callback(self._space.give_back_slabs, slabs)
        pages = self._index.handles(lane.lease, Tier.DEVICE, first, first + len(slabs))
        fill = self._index.begin_fill(lane.lease, Tier.HOST, slabs)
        undo.callback(self._index.abort, fill)
        return [fill], cast(tuple[int, ...], pages), slabs
