"""The binding between tokens and pages: the only code that sees both. One file per verb.

``PrefixCache`` puts them together: ``quote`` finds what a request can resume from, ``admit`` makes lanes and ends them,
``restore`` brings to the device what only the Host has, ``prefetch`` does so ahead of time, ``coalesce`` lets a request
wait for another's snapshot, ``publish`` commits what lanes compute, ``backup`` writes it through to the Host tier,
``transfers`` settles the copies.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from prefix_index import CostModel, PrefixIndex, Prompt, Readiness
from prefix_index import Tap as PlannedTap
from qwen35_kernels import BLOCK_TOKENS

from ..calibration import Calibration, CopyRate, RankingCost
from ..host import HostStats, HostTier
from ..memory import DeviceMemory
from .admit import Admission
from .backup import Backup
from .coalesce import lands_soon
from .lane import LaneMemory
from .prefetch import Prefetch
from .publish import Publisher, Tap
from .quote import AdmissionQuote, Quoter
from .restore import Restorer
from .space import Space
from .transfers import Transfers

__all__ = ["AdmissionQuote", "CacheStats", "LaneMemory", "PrefixCache", "Tap"]


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
    """Pages, slots, slabs and the index over them. Used by the worker only."""

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
        """``calibration`` says what computing and copying take; without one, what they take on a fast accelerator.

        ``copy_rate`` is how fast restores have been so far.
        """
        fixed = CostModel() if calibration is None else calibration.cost_model()
        self.copy_rate = CopyRate(None if calibration is None else calibration.bytes_per_second)
        self.cost = cost = RankingCost.of(fixed, self.copy_rate)
        self.index = PrefixIndex(
            block_tokens=BLOCK_TOKENS,
            block_bytes=memory.page_layout.page_bytes,
            image_bytes=memory.state_layout.image_bytes,
            image_slabs=host.image_slabs if host is not None else 1,
            cost=fixed,
        )
        self._host = host
        self._transfers = Transfers(self.index, host, self.copy_rate) if host is not None else None
        self._space = Space(memory, self.index, host, snapshot_limit=snapshot_slots)
        restorer = None if host is None or self._transfers is None else Restorer(self.index, host, self._transfers)
        self._quoter = Quoter(self.index, self._space, cost=cost)
        self._admission = Admission(
            memory,
            self.index,
            self._space,
            restorer,
            self._transfers,
            max_concurrency=max_concurrency,
            context_blocks=context_blocks,
        )
        self._publisher = Publisher(memory, self.index, self._space)
        self._endpoints_skipped = 0
        self._ending: list[LaneMemory] = []  # their endpoints wait for copies
        self._backup: Backup | None = None
        self._prefetch: Prefetch | None = None
        if host is not None and self._transfers is not None and restorer is not None:
            self._backup = Backup(self.index, self._space, host, self._transfers)
            self._prefetch = Prefetch(self.index, self._space, restorer, self._transfers, cost=cost)

    @property
    def block_tables(self) -> Tensor:
        """int64 ``[max_concurrency, blocks]``, see ``Admission``."""
        return self._admission.block_tables

    @property
    def copying(self) -> bool:
        """Whether copies are on their way, or have landed and are to be settled."""
        return self._transfers is not None and len(self._transfers) > 0

    def poll(self) -> None:
        """Settle the copies that have landed.

        Raises:
            CopyFailed: one failed; the engine has to end.
        """
        if self._transfers is not None:
            self._transfers.poll()

    def drain(self) -> bool:
        """Wait for every copy and settle it; whether there was any.

        Raises:
            CopyFailed: one failed; the engine has to end.
        """
        if self._transfers is None or not self.copying:
            return False
        self._transfers.drain()
        return True

    def quote(self, prompt: Prompt | None, *, total_tokens: int) -> AdmissionQuote:
        """See ``Quoter.quote``. Where a prefetch is about to bring what the request could use, it is waited for.

        Raises:
            CopyFailed: the prefetch will not come; the engine has to end.
        """
        quote = self._quoter.quote(prompt, total_tokens=total_tokens)
        if quote.readiness is Readiness.READY and quote.match is not None and self._prefetch is not None:
            if not self._prefetch.crosses(quote.match):
                return quote
            self._prefetch.land()
            quote = self._quoter.quote(prompt, total_tokens=total_tokens)
        return quote

    def lands_soon(self, quote: AdmissionQuote) -> bool:
        """Whether the request should wait for copies that another lane has started; see ``coalesce.lands_soon``."""
        if quote.match is None or self._host is None:
            return False
        on_their_way = self._host.restoring_bytes
        return lands_soon(quote.match, quote.source, cost=self.cost, bytes_on_their_way=on_their_way)

    def prefetch(self, prompt: Prompt) -> int:
        """Bring back to the device what the request that waits will resume from; how many blocks. Never waits."""
        return 0 if self._prefetch is None else self._prefetch.start(prompt)

    def start(self, quote: AdmissionQuote) -> LaneMemory:
        """See ``Admission.start``."""
        return self._admission.start(quote)

    def grow(self, lane: LaneMemory, tokens: int) -> bool:
        """Make room for the KV of ``tokens`` tokens; False when every page is held by a running sequence.

        Raises:
            CopyFailed: a copy that held pages failed; the engine has to end.
        """
        # What copies still read or write is given up for it as well, as soon as they have landed.
        return self._admission.grow(lane, tokens) or (self.drain() and self._admission.grow(lane, tokens))

    def commit(self, lane: LaneMemory, tokens: array[int], computed: int) -> None:
        """See ``Publisher.commit``."""
        self._publisher.commit(lane, tokens, computed)

    def claim_taps(self, lane: LaneMemory, planned: Iterable[PlannedTap]) -> list[Tap]:
        """See ``Publisher.claim_taps``."""
        return self._publisher.claim_taps(lane, planned)

    def publish_tap(self, lane: LaneMemory, tokens: array[int], tap: Tap) -> None:
        """See ``Publisher.publish_tap``."""
        self._publisher.publish_tap(lane, tokens, tap)

    def finish(self, lane: LaneMemory, tokens: array[int], computed: int) -> None:
        """End a sequence whose first ``computed`` tokens are sound: its slot becomes a snapshot, its blocks stay.

        Where copies to the Host still read every slot that could make room, the snapshot waits for them in the lane's
        own slot.
        """
        self._admission.retire(lane)
        self._publisher.commit(lane, tokens, computed)
        self._end_with_snapshot(lane, tokens, computed)

    def _end_with_snapshot(self, lane: LaneMemory, tokens: array[int], computed: int) -> None:
        if not self._publisher.publish_endpoint(lane, tokens, computed):
            in_the_way = None if self._backup is None else self._backup.reading_slots
            if in_the_way is not None and self._transfers is not None:
                self._transfers.afterwards(in_the_way, lambda: self._end_later(lane, tokens, computed))
                self._ending.append(lane)
                return
            self._endpoints_skipped += 1
        self._write_and_let_go(lane)

    def _end_later(self, lane: LaneMemory, tokens: array[int], computed: int) -> None:
        """The copies have landed. Whatever raises leaves the lane among those that are to be ended."""
        self._end_with_snapshot(lane, tokens, computed)
        self._ending.remove(lane)

    def abandon(self, lane: LaneMemory) -> None:
        """End a sequence without a snapshot at its end. What it committed before stays reusable; one of which no pass
        has succeeded leaves recency and hits as if it had never been."""
        self._admission.retire(lane)
        self._write_and_let_go(lane)

    def _write_and_let_go(self, lane: LaneMemory) -> None:
        if self._backup is not None and lane.activated:
            self._backup.write_through(lane)
        self._let_go(lane)

    def empty(self, lanes: Iterable[LaneMemory]) -> None:
        """End these sequences, all that run, and forget everything cached: after a failure that spared nobody.

        Raises:
            CopyFailed: a copy failed; the engine has to end.
            RuntimeError: something has no owner, so that the engine has to end as well.
        """
        self.drain()
        for lane in (*lanes, *self._ending):
            self._admission.retire(lane)
            self._let_go(lane)
        self._ending.clear()
        self._space.reclaim(self.index.clear())
        self._space.require_all_free()

    def _let_go(self, lane: LaneMemory) -> None:
        self._publisher.drop_claims(lane)
        if lane.lease is not None:
            (self.index.release if lane.activated else self.index.cancel)(lane.lease)
        self._admission.end(lane)

    def check_invariants(self) -> None:
        """Re-derive the accounting of every part; raises where it differs. O(cache)."""
        self.index.check_invariants()
        if self._host is not None:
            self._host.check_invariants()

    def stats(self) -> CacheStats:
        return CacheStats(
            pages_free=len(self._space.pages),
            pages_total=self._space.pages.capacity,
            slots_free=len(self._space.slots),
            slots_total=self._space.slots.capacity,
            snapshot_slots_used=self._space.snapshot_slots,
            endpoints_skipped=self._endpoints_skipped,
            prefetched_blocks=self._prefetch.blocks if self._prefetch is not None else 0,
            host=self._host.stats() if self._host is not None else None,
        )
