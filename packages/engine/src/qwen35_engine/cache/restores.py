"""Restores: what only the Host has of a path comes to the device, in the order in which a forward pass reads it.

``Restorer`` does so for a sequence that starts, ``Prefetch`` ahead of time for the next one.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

from prefix_index import Candidate, CostModel, Fill, Lease, Match, PrefixIndex, Prompt, Tier, rank_candidates
from qwen35_kernels import BLOCK_TOKENS

from ..host import HostTier, Image, Restore, Tail
from .allocator import Allocator
from .transfers import Transfers

__all__ = ["MAX_PREFETCH_BLOCKS", "Missing", "Prefetch", "Restorer"]

MAX_PREFETCH_BLOCKS = 256  # a batch; a longer path takes several, so that an admission never waits long for one


@dataclass(frozen=True)
class Missing:
    """What of a leased snapshot and its path only the Host has. False when there is nothing."""

    blocks: int = 0
    tail: bool = False
    image: bool = False

    @classmethod
    def of(cls, index: PrefixIndex, lease: Lease | None) -> Missing:
        if lease is None or lease.snapshot is None:
            return cls()
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
    """Starts batches. Where a step raises, it leaves to ``undo`` to take back the index's fills."""

    def __init__(self, index: PrefixIndex, host: HostTier, transfers: Transfers) -> None:
        self._index = index
        self._host = host
        self._transfers = transfers

    @property
    def busy(self) -> bool:
        """Whether a batch is on its way."""
        return self._host.restoring

    def bring(
        self,
        lease: Lease,
        missing: Missing,
        guard: Lease,
        *,
        pages: list[int],
        tails: list[int],
        slot: int,
        undo: ExitStack,
    ) -> Restore:
        """Start bringing what a sequence resumes from.

        Args:
            lease: of the snapshot.
            missing: what the device lacks of it.
            guard: a second lease, which pins what is read until the batch has landed, whatever becomes of the
                sequence.
            pages: of the cache, one for each missing block.
            tails: for a missing tail the cache's page, and the sequence's own, in which it goes on writing.
            slot: the sequence's own, for a missing image.
            undo: takes back what was begun.
        """
        index = self._index
        assert lease.snapshot is not None
        fills, slabs = self._fill_blocks(lease, pages, undo)
        host_slabs = index.copies(lease.snapshot).slabs
        image = Image(slot, host_slabs[: self._host.image_slabs]) if missing.image else None
        if missing.tail:
            fills.append(index.begin_fill(lease.snapshot, Tier.DEVICE, tails[:1]))
            undo.callback(index.abort, fills[-1])
        restore = self._host.restore(pages, slabs, image, [Tail(page, host_slabs[-1]) for page in tails])
        self._transfers.add(restore.ticket, fills, guard)
        return restore

    def bring_ahead(self, path: Lease, pages: list[int], undo: ExitStack) -> tuple[Restore, Fill]:
        """Start bringing the next blocks of ``path`` to ``pages``. The lease is given up when they have landed."""
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


class Prefetch:
    """While the next request waits for a place, blocks that only the Host has come back to the device for it.

    Its admission then finds them resident and restores only the rest. They are ordinary cached blocks: on their way
    until the batch has landed, then free to be evicted again, last of all. A prefetch displaces only what the Host
    still holds. One batch at a time, and never beside a sequence's own restore, which it would only delay.

    Attributes:
        num_blocks: brought back so far.
    """

    def __init__(
        self, index: PrefixIndex, allocator: Allocator, restorer: Restorer, transfers: Transfers, *, cost: CostModel
    ) -> None:
        self._index = index
        self._allocator = allocator
        self._restorer = restorer
        self._transfers = transfers
        self._cost = cost
        self._batch: tuple[Restore, Fill] | None = None
        # Matching walks the whole path: where it brought nothing, it is tried again only once there is more room.
        self._last_prompt: Prompt | None = None
        self._last_room = 0
        self.num_blocks = 0

    def start(self, prompt: Prompt) -> int:
        """Start bringing back blocks of what ``prompt`` would resume from; how many. Never waits."""
        room = self._allocator.page_room()
        if self._restorer.busy or (prompt is self._last_prompt and room <= self._last_room):
            return 0
        match = self._index.match(prompt)
        source = rank_candidates(match.candidates, prompt.num_tokens, self._cost)[0]
        missing = 0 if source is None else source.depth - match.device_blocks
        count = 0
        if source is not None and missing > 0:
            with ExitStack() as undo:
                count = self._bring(match, source, min(missing, MAX_PREFETCH_BLOCKS), undo)
                if count:
                    undo.pop_all()
        self._last_prompt, self._last_room = (None, 0) if count else (prompt, room)
        self.num_blocks += count
        return count

    def _bring(self, match: Match, source: Candidate, count: int, undo: ExitStack) -> int:
        """Start a batch of up to ``count`` blocks; how many. What ``undo`` holds is to be run where that is none."""
        path = self._index.acquire(match, source)  # not activated: it changes no recency and is no hit
        undo.callback(self._index.cancel, path)
        pages = self._allocator.take_backed_pages(count)
        undo.callback(self._allocator.pages.give_back, pages)
        if pages:
            self._batch = self._restorer.bring_ahead(path, pages, undo)
        return len(pages)

    def crosses(self, match: Match) -> bool:
        """Whether a batch that is still on its way brings blocks that ``match`` could use."""
        if self._batch is None or not self._batch[1].open:
            return False
        begin, end = self._batch[1].blocks
        return any(first < end and begin < last for first, last in match.filling)

    def land(self) -> None:
        """Wait for the batch and settle it.

        Raises:
            CopyFailed: it will not come; the engine has to end.
        """
        if self._batch is not None:
            self._batch[0].wait()
            self._transfers.poll()
            self._batch = None
