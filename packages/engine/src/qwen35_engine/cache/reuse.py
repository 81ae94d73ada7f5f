"""Why a lane skips as many tokens as it does and no more."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from prefix_index import Candidate, Match, PrefixIndex, Reason
from qwen35_kernels import BLOCK_TOKENS

from ..usage import MissReason

__all__ = ["shortfall"]

_OF_THE_INDEX = {
    Reason.NONE: None,
    Reason.NO_SNAPSHOT: MissReason.NO_SNAPSHOT,
    Reason.IMAGE_LOST: MissReason.IMAGE_EVICTED,
    Reason.EXCLUDED: MissReason.EXCLUDED,
    Reason.FILLING: MissReason.FILLING,
}


def shortfall(index: PrefixIndex, match: Match, sources: Sequence[Candidate | None], chosen: int) -> MissReason | None:
    """Why the chosen source is not the longest cached prefix of the prompt; None if it is, up to less than a block.

    Where several things stood in the way, the one nearest to what was chosen counts: without it, more had been used.

    Args:
        index: what the match was made in.
        match: what is cached of the prompt.
        sources: what could be resumed from, in the order in which it was tried; None is the first token.
        chosen: which of them fits.
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
        empty = not index.holds(match.prompt.namespace)
        return MissReason.NAMESPACE if empty and index.stats().blocks else MissReason.NOT_CACHED
    return _OF_THE_INDEX[match.reason]
