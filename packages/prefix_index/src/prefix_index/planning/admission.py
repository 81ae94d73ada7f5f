"""Admission: which candidate to resume from, by cost, and whether it fits, by arithmetic.

The arithmetic is exact because every eviction frees one page in every pool.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from prefix_index.errors import InvalidArgument
from prefix_index.planning.cost import CostModel


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


class Readiness(enum.Enum):
    """What an admission can expect."""

    READY = "ready"
    TEMPORARILY_BLOCKED = "temporarily blocked"  # fits once another request finishes
    PERMANENTLY_INFEASIBLE = "permanently infeasible"  # would not fit into an empty pool


@dataclass(frozen=True, slots=True)
class PoolState:
    """One device pool.

    Attributes:
        total: its size in pages.
        free: its free pages.
        entitlement: pages the request may come to hold in it.
    """

    total: int
    free: int
    entitlement: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What resuming from one source takes and brings, in blocks; `PrefixIndex.demand` measures it.

    Attributes:
        depth: blocks of the path that are shared, not allocated.
        restore: blocks and tails to bring from the Host, each into a page of its own.
        own: evictable now, but pinned by this very admission: blocks of the path and the tail.
    """

    depth: int
    restore: int
    own: int


ROOT = Demand(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Quote:
    """The first source that fits and how many blocks to evict for it; `source` is None unless ready."""

    readiness: Readiness
    source: int | None
    evict: int


def plan_admission(demands: Iterable[Demand], pools: Sequence[PoolState], evictable: int) -> Quote:
    """Try the sources in order, up to the first that fits.

    A source needs entitlement - depth + restore pages of a pool. It fits when free pages and evictions cover that in
    every pool, its own path and tail not being evicted.

    Args:
        demands: what each source takes.
        pools: the device pools.
        evictable: what the index could give up now, each a page in every pool.

    Raises:
        InvalidArgument: there is no pool.
    """
    if not pools:
        raise InvalidArgument("plan_admission: at least one pool is needed, got none")
    if any(pool.entitlement > pool.total for pool in pools):
        return Quote(Readiness.PERMANENTLY_INFEASIBLE, None, 0)
    for position, demand in enumerate(demands):
        missing = max(pool.entitlement - demand.depth + demand.restore - pool.free for pool in pools)
        if missing <= evictable - demand.own:
            return Quote(Readiness.READY, position, max(0, missing))
    return Quote(Readiness.TEMPORARILY_BLOCKED, None, 0)
