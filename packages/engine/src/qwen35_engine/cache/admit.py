"""Admission: which cached prefix a sequence resumes from, and the memory it runs in.

A quote is arithmetic and changes nothing; what can fail is found there, before the first eviction.
"""

from __future__ import annotations

from array import array
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from prefix_index import (
    ROOT,
    Candidate,
    CostModel,
    Lease,
    Match,
    PoolState,
    PrefixIndex,
    Prompt,
    Readiness,
    Tier,
    plan_admission,
    rank_candidates,
)
from qwen35_kernels import BLOCK_TOKENS

from ..host import HostTier, Image, Tail
from ..memory import DeviceMemory
from ..usage import MissReason, Reuse
from .lane import LaneMemory
from .reuse import shortfall
from .space import Space
from .transfers import Transfers

__all__ = ["Admission", "AdmissionQuote"]


@dataclass(frozen=True)
class _Missing:
    """What of a leased snapshot and its path only the Host has. False when there is nothing."""

    blocks: int
    tail: bool
    image: bool

    @classmethod
    def of(cls, index: PrefixIndex, lease: Lease) -> _Missing:
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


@dataclass(frozen=True)
class AdmissionQuote:
    """What an admission would do. ``source`` is the snapshot to resume from, None for the first token; ``reason`` says
    why it is not a deeper one.

    Good until the cache changes next.
    """

    readiness: Readiness
    blocks: int
    match: Match | None
    source: Candidate | None
    reason: MissReason | None = None


class Admission:
    """Makes lanes. ``block_tables`` is int64 ``[max_concurrency, blocks]`` on the device: row r is the lane's with that
    row, unused entries are 0, the scratch page."""

    def __init__(
        self,
        memory: DeviceMemory,
        index: PrefixIndex,
        space: Space,
        host: HostTier | None,
        transfers: Transfers | None,
        *,
        cost: CostModel,
        max_concurrency: int,
        context_blocks: int,
    ) -> None:
        self._memory = memory
        self._index = index
        self._space = space
        self._host = host
        self._transfers = transfers
        self._cost = cost
        self._rows = list(range(max_concurrency))
        self.block_tables: Tensor = torch.zeros(
            (max_concurrency, context_blocks), dtype=torch.int64, device=memory.pages.device
        )

    def quote(self, prompt: Prompt | None, *, total_tokens: int) -> AdmissionQuote:
        """Whether a new sequence can start now, and from where. Changes nothing.

        Args:
            prompt: the prepared prompt, or None for a request that neither uses nor feeds the cache.
            total_tokens: prompt and the output room that the request is entitled to.
        """
        blocks = -(-total_tokens // BLOCK_TOKENS)
        match = None if prompt is None else self._index.match(prompt)
        sources: tuple[Candidate | None, ...] = (None,)
        if match is not None:
            sources = rank_candidates(match.candidates, match.prompt.num_tokens, self._cost)
        pages = self._space.pages
        planned = plan_admission(
            (ROOT if match is None else self._index.demand(match, source) for source in sources),
            [PoolState(total=pages.capacity, free=len(pages), entitlement=blocks)],
            self._index.stats().evictable_device_pages,
        )
        if planned.source is None:
            return AdmissionQuote(planned.readiness, blocks, match, None)
        if not len(self._space.slots):  # a cancelled lane's restore still writes to one
            return AdmissionQuote(Readiness.TEMPORARILY_BLOCKED, blocks, match, None)
        reason = None if match is None else shortfall(self._index, match, sources, planned.source)
        return AdmissionQuote(planned.readiness, blocks, match, sources[planned.source], reason)

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
            return self._make_lane(self._take_pages(quote.blocks, undo), None, (), undo)
        index = self._index
        lease = self._acquire(quote, quote.match, undo)
        missing = _Missing.of(index, lease)
        # Pins what a restore reads until it has landed, whatever becomes of the lane.
        guard = self._acquire(quote, quote.match, undo) if missing else None
        taken = self._take_pages(quote.blocks - lease.depth + missing.num_pages, undo)
        restored, taken = taken[: missing.blocks], taken[missing.blocks :]
        tail_pages, own = (taken[:1], taken[1:]) if missing.tail else (list(lease.tail_pages), taken)
        held = cast(tuple[int, ...], index.handles(lease, Tier.DEVICE, 0, lease.depth - missing.blocks))
        lane = self._make_lane(own, lease, (*held, *restored), undo)
        if lease.slot is not None:
            self._memory.copy_state(lease.slot, lane.slot)
        if tail_pages and not missing.tail:
            self._memory.copy_page(tail_pages[0], own[0])
        if guard is not None:
            self._restore(lane, missing, guard, restored, tail_pages, undo)
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

    def _restore(
        self,
        lane: LaneMemory,
        missing: _Missing,
        guard: Lease,
        pages: list[int],
        tail_pages: list[int],
        undo: ExitStack,
    ) -> None:
        """Bring to the device what only the Host has: blocks and tail for the cache, the image for the lane alone."""
        index, lease = self._index, lane.lease
        assert lease is not None
        assert lease.snapshot is not None
        assert self._host is not None
        assert self._transfers is not None
        slabs = cast(
            tuple[int, ...], index.handles(lease, Tier.HOST, lease.depth - len(pages), lease.depth) if pages else ()
        )
        fills = []
        if pages:
            fills.append(index.begin_fill(lease, Tier.DEVICE, pages))
            undo.callback(index.abort, fills[-1])
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

    def _make_lane(self, own: list[int], lease: Lease | None, shared: tuple[int, ...], undo: ExitStack) -> LaneMemory:
        (slot,) = self._space.slots.take(1)
        undo.callback(self._space.slots.give_back, [slot])
        if lease is None or lease.snapshot is None:
            self._memory.clear_state(slot)
        row = self._rows.pop()
        undo.callback(self._rows.append, row)
        lane = LaneMemory(
            row=row,
            slot=slot,
            frontier=lease.frontier if lease else 0,
            lease=lease,
            pages=[*shared, *own],
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
        if short > self._space.page_room():
            return False
        begin = len(lane.pages)
        own = self._space.take_pages(short)
        lane.pages += own
        lane.private.update(own)
        self._write_table(lane, begin)
        return True

    def end(self, lane: LaneMemory) -> None:
        """Take the lane's row, pages and slot back; those a restore still writes to, when it has landed."""
        self._rows.append(lane.row)
        pages, slot = sorted(lane.private), lane.slot

        def give_back() -> None:
            self._space.pages.give_back(pages)
            if slot:
                self._space.slots.give_back([slot])

        if lane.restore is None or lane.restore.done() or self._transfers is None:
            give_back()
        else:
            self._transfers.afterwards(lane.restore.ticket, give_back)

    def _write_table(self, lane: LaneMemory, begin: int) -> None:
        # A tensor made of a list of thousands looks at each number twice.
        pages = torch.frombuffer(array("q", lane.pages[begin:]), dtype=torch.int64)
        self.block_tables[lane.row, begin : len(lane.pages)] = pages.to(self.block_tables.device)
