"""The quote: whether a request can start now, and which cached prefix it resumes from. Arithmetic; changes nothing.

What can fail is found here, before the first eviction.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefix_index import (
    ROOT,
    Candidate,
    CostModel,
    Match,
    PoolState,
    PrefixIndex,
    Prompt,
    Readiness,
    plan_admission,
    rank_candidates,
)
from qwen35_kernels import BLOCK_TOKENS

from ..usage import MissReason
from .reuse import shortfall
from .space import Space

__all__ = ["AdmissionQuote", "Quoter"]


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


class Quoter:
    """Asks the index what is cached of a prompt, and the free lists whether it fits."""

    def __init__(self, index: PrefixIndex, space: Space, *, cost: CostModel) -> None:
        self._index = index
        self._space = space
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
        pages = self._space.pages
        planned = plan_admission(
            (ROOT if match is None else self._index.demand(match, source) for source in sources),
            [PoolState(total=pages.capacity, free=len(pages), entitlement=blocks)],
            self._index.evictable_device_pages,
        )
        if planned.source is None:
            return AdmissionQuote(planned.readiness, blocks, match, None)
        if not len(self._space.slots):  # a cancelled lane's restore still writes to one
            return AdmissionQuote(Readiness.TEMPORARILY_BLOCKED, blocks, match, None)
        reason = None if match is None else shortfall(self._index, match, sources, planned.source)
        return AdmissionQuote(planned.readiness, blocks, match, sources[planned.source], reason)
