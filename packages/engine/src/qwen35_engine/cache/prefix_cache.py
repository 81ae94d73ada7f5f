"""The cache as the loop sees it: one object that makes its parts, and the verbs that need several of them.

``quotes`` finds what a request can resume from, ``lanes`` gives sequences their memory and takes it back, ``restores``
brings to the device what only the Host has, ``publication`` commits what sequences compute, ``write_through`` copies it
to the Host, ``transfers`` settles the copies, ``allocator`` keeps the free lists of all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prefix_index import CostModel, PrefixIndex, Prompt, Readiness
from qwen35_kernels import BLOCK_TOKENS

from ..calibration import Calibration, CopyRate, RankingCost
from ..host import HostStats, HostTier
from ..memory import DeviceMemory
from ..sequence import Sequence
from .allocator import Allocator
from .lanes import Lanes
from .publication import Publisher
from .quotes import AdmissionQuote, Quoter
from .restores import Prefetch, Restorer
from .transfers import Transfers
from .write_through import WriteThrough

__all__ = ["CacheStats", "PrefixCache"]


@dataclass(frozen=True)
class CacheStats:
    """Gauges of both tiers and what the binding counts; ``host`` is None without a Host tier."""

    pages_free: int
    pages_total: int
    slots_free: int
    slots_total: int
    snapshot_slots_used: int
    endpoints_skipped: int
    prefetched_blocks: int
    host: HostStats | None


class PrefixCache:
    """Pages, slots, slabs and the index over them. Used by the worker only.

    Attributes:
        index: what is reusable.
        cost: what computing and copying take; ranks candidates.
        copy_rate: how fast restores have been so far.
        allocator: the free lists.
        lanes: the block tables, and the sequences' rows of them.
        publisher: commits blocks and publishes snapshots.
        transfers: copies on their way.
        write_through: None without a Host tier.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        *,
        max_concurrency: int,
        context_blocks: int,
        snapshot_slots: int,
        host: HostTier | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        """``calibration`` says what computing and copying take; without one, what they take on a fast accelerator."""
        fixed = CostModel() if calibration is None else calibration.cost_model()
        self.copy_rate = CopyRate(None if calibration is None else calibration.bytes_per_second)
        self.cost = RankingCost.of(fixed, self.copy_rate)
        self.index = index = PrefixIndex(
            block_tokens=BLOCK_TOKENS,
            block_bytes=memory.page_layout.page_bytes,
            image_bytes=memory.state_layout.image_bytes,
            image_slabs=host.image_slabs if host is not None else 1,
            cost=fixed,
        )
        self._host = host
        self.transfers = Transfers(index, host, self.copy_rate)
        self.allocator = Allocator(memory, index, host, snapshot_limit=snapshot_slots)
        self.quoter = Quoter(index, self.allocator, cost=self.cost)
        self.publisher = Publisher(memory, index, self.allocator)
        restorer: Restorer | None = None
        self.write_through: WriteThrough | None = None
        self._prefetch: Prefetch | None = None
        if host is not None:
            restorer = Restorer(index, host, self.transfers)
            self.write_through = WriteThrough(index, self.allocator, host, self.transfers)
            self._prefetch = Prefetch(index, self.allocator, restorer, self.transfers, cost=self.cost)
        self.lanes = Lanes(
            memory,
            index,
            self.allocator,
            restorer,
            self.transfers,
            max_concurrency=max_concurrency,
            context_blocks=context_blocks,
        )
        self._endpoints_skipped = 0
        self._ending: list[Sequence] = []  # their endpoints wait for copies

    @property
    def state(self) -> object:
        """Equal to what it was before as long as no request that found no room then could find it now. O(1)."""
        return self.index.stats(), len(self.allocator.pages), len(self.allocator.slots)

    @property
    def restoring_bytes(self) -> int:
        """Bytes on their way from the Host."""
        return 0 if self._host is None else self._host.restoring_bytes

    def quote(self, prompt: Prompt | None, *, total_tokens: int) -> AdmissionQuote:
        """Whether a request can start now, and from where; see ``Quoter.quote`` for the arguments.

        Where a prefetch is about to bring what the request could use, it is waited for.

        Raises:
            CopyFailed: the prefetch will not come; the engine has to end.
        """
        quote = self.quoter.quote(prompt, total_tokens=total_tokens)
        if quote.readiness is Readiness.READY and quote.match is not None and self._prefetch is not None:
            if not self._prefetch.crosses(quote.match):
                return quote
            self._prefetch.land()
            quote = self.quoter.quote(prompt, total_tokens=total_tokens)
        return quote

    def prefetch(self, prompt: Prompt) -> int:
        """Bring back to the device what the request that waits will resume from; how many blocks. Never waits."""
        return 0 if self._prefetch is None else self._prefetch.start(prompt)

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Make room for the KV of ``tokens`` tokens; False when every page is held by a running sequence.

        Raises:
            CopyFailed: a copy that held pages failed; the engine has to end.
        """
        # What copies still read or write is given up for it as well, as soon as they have landed.
        return self.lanes.grow(sequence, tokens) or (self.transfers.drain() and self.lanes.grow(sequence, tokens))

    def finish(self, sequence: Sequence) -> None:
        """End a sequence whose computed tokens are sound: its slot becomes a snapshot, its blocks stay.

        Where copies to the Host still read every slot that could make room, the snapshot waits for them in the
        sequence's own slot.
        """
        self.lanes.retire(sequence)
        self.publisher.commit(sequence)
        self._end_with_snapshot(sequence)

    def _end_with_snapshot(self, sequence: Sequence) -> None:
        if not self.publisher.publish_endpoint(sequence):
            in_the_way = None if self.write_through is None else self.write_through.reading_slots
            if in_the_way is not None:
                self.transfers.afterwards(in_the_way, lambda: self._end_later(sequence))
                self._ending.append(sequence)
                return
            self._endpoints_skipped += 1
        self._write_and_let_go(sequence)

    def _end_later(self, sequence: Sequence) -> None:
        """The copies have landed. Whatever raises leaves the sequence among those that are to be ended."""
        self._end_with_snapshot(sequence)
        self._ending.remove(sequence)

    def abandon(self, sequence: Sequence) -> None:
        """End a sequence without a snapshot at its end.

        What it committed before stays reusable. A sequence of which no pass has succeeded leaves recency and hits as if
        it had never been.
        """
        self.lanes.retire(sequence)
        self._write_and_let_go(sequence)

    def _write_and_let_go(self, sequence: Sequence) -> None:
        if self.write_through is not None and sequence.activated:
            self.write_through.start(sequence)
        self._let_go(sequence)

    def empty(self, sequences: Iterable[Sequence]) -> None:
        """End these sequences, all that run, and forget everything cached: after a failure that spared none.

        Raises:
            CopyFailed: a copy failed; the engine has to end.
            RuntimeError: something has no owner, so that the engine has to end as well.
        """
        self.transfers.drain()
        for sequence in (*sequences, *self._ending):
            self.lanes.retire(sequence)
            self._let_go(sequence)
        self._ending.clear()
        self.allocator.reclaim(self.index.clear())
        self.allocator.require_all_free()

    def _let_go(self, sequence: Sequence) -> None:
        self.publisher.drop_claims(sequence)
        if sequence.lease is not None:
            (self.index.release if sequence.activated else self.index.cancel)(sequence.lease)
            sequence.lease = None
        self.lanes.end(sequence)

    def check_invariants(self) -> None:
        """Re-derive the accounting of every part; raises where it differs. O(cache)."""
        self.index.check_invariants()
        if self._host is not None:
            self._host.check_invariants()

    def stats(self) -> CacheStats:
        """Gauges and counters; may be asked from any thread."""
        allocator = self.allocator
        return CacheStats(
            pages_free=len(allocator.pages),
            pages_total=allocator.pages.capacity,
            slots_free=len(allocator.slots),
            slots_total=allocator.slots.capacity,
            snapshot_slots_used=allocator.snapshot_slots,
            endpoints_skipped=self._endpoints_skipped,
            prefetched_blocks=self._prefetch.num_blocks if self._prefetch is not None else 0,
            host=self._host.stats() if self._host is not None else None,
        )
