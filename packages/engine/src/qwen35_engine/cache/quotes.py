"""Quotes: whether a request can start now, which cached prefix it resumes from, and why no deeper one.

Arithmetic that changes nothing. What can fail is found here, before the first eviction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from prefix_index import (
    ROOT,
    Candidate,
    CostModel,
    Match,
    PoolState,
    PrefixIndex,
    Prompt,
    Readiness,
    Reason,
    plan_admission,
    rank_candidates,
)
from qwen35_kernels import BLOCK_TOKENS

from ..metrics import MissReason
from .allocator import Allocator

__all__ = ["AdmissionQuote", "Quoter"]


@dataclass(frozen=True)
class AdmissionQuote:
    """What an admission would do. Good until the cache changes next.

    Attributes:
        readiness: whether the request can start now, later, or never.
        blocks: pages that it needs in all, shared ones included.
        match: what is cached of its prompt; None for a request that does without the cache.
        source: the snapshot to resume from; None is the first token.
        reason: why it is not a deeper one.
    """

    readiness: Readiness
    blocks: int
    match: Match | None
    source: Candidate | None
    reason: MissReason | None = None


class Quoter:
    """Asks the index what is cached of a prompt, and the free lists whether it fits."""

    def __init__(self, index: PrefixIndex, allocator: Allocator, *, cost: CostModel) -> None:
        self._index = index
        self._allocator = allocator
        self._cost = cost

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
        pages = self._allocator.pages
        planned = plan_admission(
            (ROOT if match is None else self._index.demand(match, source) for source in sources),
            [PoolState(total=pages.capacity, free=len(pages), entitlement=blocks)],
            self._index.evictable_device_pages,
        )
        if planned.source is None:
            return AdmissionQuote(planned.readiness, blocks, match, None)
        if not len(self._allocator.slots):  # the restore of a cancelled sequence still writes to one
            return AdmissionQuote(Readiness.TEMPORARILY_BLOCKED, blocks, match, None)
        reason = None if match is None else self._shortfall(match, sources, planned.source)
        return AdmissionQuote(planned.readiness, blocks, match, sources[planned.source], reason)

    def _shortfall(self, match: Match, sources: Sequence[Candidate | None], chosen: int) -> MissReason | None:
        """Why the chosen source is not the longest cached prefix of the prompt; None if it is, up to less than a block.

        Where several things stood in the way, the one nearest to what was chosen counts: without it, more had been
        used. ``sources`` are in the order in which they were tried.
        """
        source = sources[chosen]
        used = source.frontier if source is not None else 0
        best = match.best
        longest = max(match.matched_tokens, best.frontier if best is not None else 0)
        if source is not None and longest - used < BLOCK_TOKENS:
            return None
        if best is not None and best.frontier > used:
            deeper = takewhile(lambda candidate: candidate.frontier > used, match.candidates)
            if all(candidate.filling for candidate in deeper):
                return MissReason.FILLING
            return MissReason.CAPACITY if chosen else MissReason.COST
        if not longest:
            empty = not self._index.holds(match.prompt.namespace)
            return MissReason.NAMESPACE if empty and self._index.stats().blocks else MissReason.NOT_CACHED
        # The index's reasons are among ours, under the same names.
        return None if match.reason is Reason.NONE else MissReason(match.reason.value)
