"""Whether a request fits, by arithmetic alone. Pure; exact because every eviction frees one page in every pool."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prefix_index.errors import InvalidArgument


class Readiness(enum.Enum):
    """What an admission can expect."""

    READY = "ready"
    TEMPORARILY_BLOCKED = "temporarily blocked"  # fits once somebody finishes
    PERMANENTLY_INFEASIBLE = "permanently infeasible"  # would not fit into an empty pool


@dataclass(frozen=True, slots=True)
class PoolState:
    """One device pool: its size, its free pages, and the pages the request may come to hold in it."""

    total: int
    free: int
    entitlement: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What resuming from one source takes and brings, in blocks; `PrefixIndex.demand` measures it.

    depth    blocks of the path that are shared, not allocated
    restore  blocks and tails to bring from the Host, each into a page of its own
    own      evictable now, but pinned by this very admission: blocks of the path and the tail
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

    `evictable` counts what the index could give up now, each a page in every pool.

    A source needs entitlement - depth + restore pages of a pool. It fits when free pages and evictions cover that in
    every pool, its own path and tail not being evicted. Raises InvalidArgument without a pool.
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
