"""Restores: what only the Host has of a path comes to the device, in the order in which a forward pass reads it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

from prefix_index import Lease, PrefixIndex, Tier
from prefix_index import Ticket as Fill
from qwen35_kernels import BLOCK_TOKENS

from ..host import HostTier, Image, Restore, Tail
from .lane import LaneMemory
from .transfers import Transfers

__all__ = ["Missing", "Restorer"]


@dataclass(frozen=True)
class Missing:
    """What of a leased snapshot and its path only the Host has. False when there is nothing."""

    blocks: int
    tail: bool
    image: bool

    @classmethod
    def of(cls, index: PrefixIndex, lease: Lease) -> Missing:
        if lease.snapshot is None:
            return cls(0, False, False)
        return cls(
            blocks=lease.depth - index.held(lease, Tier.DEVICE),
            tail=lease.frontier % BLOCK_TOKENS != 0 and not lease.tail_pages,
            image=lease.slot is None,
        )

    @property
    def num_pages(self) -> int:
        """Pages of the cache that a restore fills."""
        return self.blocks + self.tail

    def __bool__(self) -> bool:
        return bool(self.blocks or self.tail or self.image)


class Restorer:
    """Starts batches. What raises leaves it to ``undo`` to take back the index's fills."""

    def __init__(self, index: PrefixIndex, host: HostTier, transfers: Transfers) -> None:
        self._index = index
        self._host = host
        self._transfers = transfers

    @property
    def busy(self) -> bool:
        """Whether a batch is on its way."""
        return self._host.restoring

    def for_lane(
        self,
        lane: LaneMemory,
        missing: Missing,
        guard: Lease,
        pages: list[int],
        tail_pages: list[int],
        undo: ExitStack,
    ) -> None:
        """Bring blocks and tail to pages of the cache, the image to the lane's own slot; its first pass waits.

        ``guard`` pins what is read until the batch has landed, whatever becomes of the lane."""
        index, lease = self._index, lane.lease
        assert lease is not None
        assert lease.snapshot is not None
        fills, slabs = self._fill_blocks(lease, pages, undo)
        host_slabs = index.copies(lease.snapshot).slabs
        image = Image(lane.slot, host_slabs[: self._host.image_slabs]) if missing.image else None
        tails = []
        if missing.tail:
            fills.append(index.begin_fill(lease.snapshot, Tier.DEVICE, tail_pages))
            undo.callback(index.abort, fills[-1])
            # The lane goes on writing in its own copy of the partial page.
            tails = [Tail(page, host_slabs[-1]) for page in (*tail_pages, lane.pages[lease.depth])]
        lane.restore = self._host.restore(pages, slabs, image, tails)
        self._transfers.add(lane.restore.ticket, fills, guard)

    def ahead(self, path: Lease, pages: list[int], undo: ExitStack) -> tuple[Restore, Fill]:
        """Bring the next blocks of ``path`` to ``pages`` before anybody needs them; the lease is given up when they
        have landed."""
        fills, slabs = self._fill_blocks(path, pages, undo)
        restore = self._host.restore(pages, slabs, None, ())
        self._transfers.add(restore.ticket, fills, path)
        return restore, fills[0]

    def _fill_blocks(self, path: Lease, pages: list[int], undo: ExitStack) -> tuple[list[Fill], tuple[int, ...]]:
        """Promise the pages to the next blocks that the device lacks; the slabs these lie in."""
        if not pages:
            return [], ()
        first = self._index.held(path, Tier.DEVICE)
        slabs = self._index.handles(path, Tier.HOST, first, first + len(pages))
        fill = self._index.begin_fill(path, Tier.DEVICE, pages)
        undo.callback(self._index.abort, fill)
        return [fill], cast(tuple[int, ...], slabs)
