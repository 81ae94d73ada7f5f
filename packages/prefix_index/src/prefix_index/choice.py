"""Which candidate to resume from: cost ranks, feasibility decides elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from prefix_index.cost import CostModel


class Source(Protocol):
    """What a choice looks at; a `Candidate` is one."""

    @property
    def frontier(self) -> int:
        """Tokens that need not be computed again."""

    @property
    def restore_bytes(self) -> int:
        """Bytes to bring from the Host before."""

    @property
    def filling(self) -> int:
        """Copies of it that are still on their way."""


S = TypeVar("S", bound=Source)


def resume_seconds(candidate: Source | None, num_tokens: int, cost: CostModel) -> float:
    """Predicted seconds from admission to the first token: restore, then prefill of the rest. None is the root."""
    if candidate is None:
        return cost.prefill_seconds(0, num_tokens)
    frontier = candidate.frontier
    return cost.restore_seconds(candidate.restore_bytes) + cost.prefill_seconds(frontier, num_tokens - frontier)


def rank_candidates(candidates: Iterable[S], num_tokens: int, cost: CostModel) -> tuple[S | None, ...]:
    """The sources to try, best first; None stands for the root.

    First the cheapest: it must be strictly cheaper than the root; among equally cheap ones fewer bytes win, then the
    deeper. Then, for when it does not fit, the others deepest first, the root last. Candidates with copies still on
    their way are left out.
    """
    usable = sorted((c for c in candidates if not c.filling), key=lambda candidate: -candidate.frontier)
    choice: S | None = None
    best = resume_seconds(None, num_tokens, cost)
    for candidate in usable:
        frontier = candidate.frontier
        seconds = cost.prefill_seconds(frontier, num_tokens - frontier)
        if seconds > best:
            break  # a shallower one computes more still
        seconds += cost.restore_seconds(candidate.restore_bytes)
        tie = choice is not None and seconds == best and candidate.restore_bytes < choice.restore_bytes
        if seconds < best or tie:
            choice, best = candidate, seconds
    rest: list[S | None] = [candidate for candidate in usable if candidate is not choice]
    return (choice, *rest) if choice is None else (choice, *rest, None)
