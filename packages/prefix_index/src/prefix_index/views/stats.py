"""Statistics: gauges of what is there, counters of what happened since the index was made."""

from __future__ import annotations

from dataclasses import dataclass

from prefix_index.leases.commit import Commits
from prefix_index.leases.fills import Fills
from prefix_index.leases.lease import Leases
from prefix_index.retention.eviction import Eviction
from prefix_index.retention.valuation import Valuation
from prefix_index.tree.tree import Tree
from prefix_index.types import SnapshotKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Gauges (what is there now) and counters (what happened since the index was made).

    `snapshots` is the sum of the four kinds after it.
    """

    blocks: int
    edges: int
    snapshots: int
    taps: int
    endpoints: int
    output_boundaries: int
    boundaries: int
    namespaces: int
    device_blocks: int
    device_tails: int
    evictable_device_pages: int
    host_blocks: int
    inflation: float
    blocks_inserted: int
    blocks_reattached: int
    blocks_duplicate: int
    snapshots_published: int
    snapshots_duplicate: int
    snapshots_superseded: int
    snapshots_lost: int
    hits: int
    tokens_resumed: int
    device_evictions: int
    host_evictions: int
    slot_claims: int
    fills_in_flight: int


def gather(
    tree: Tree, valuation: Valuation, eviction: Eviction, leases: Leases, commits: Commits, fills: Fills
) -> Stats:
    """The statistics now. O(1)."""
    return Stats(
        blocks=tree.num_blocks,
        edges=tree.num_edges,
        snapshots=sum(tree.kinds),
        taps=tree.kinds[SnapshotKind.TAP],
        endpoints=tree.kinds[SnapshotKind.ENDPOINT],
        output_boundaries=tree.kinds[SnapshotKind.OUTPUT_BOUNDARY],
        boundaries=tree.kinds[SnapshotKind.BOUNDARY],
        namespaces=len(tree.roots),
        device_blocks=tree.device_blocks,
        device_tails=tree.device_tails,
        evictable_device_pages=tree.evictable_device_pages,
        host_blocks=tree.host_blocks,
        inflation=valuation.inflation,
        blocks_inserted=commits.num_inserted,
        blocks_reattached=commits.num_reattached,
        blocks_duplicate=commits.num_duplicate,
        snapshots_published=commits.num_published,
        snapshots_duplicate=commits.num_refreshed,
        snapshots_superseded=valuation.num_superseded,
        snapshots_lost=eviction.num_lost,
        hits=leases.num_hits,
        tokens_resumed=leases.tokens_resumed,
        device_evictions=eviction.num_device,
        host_evictions=eviction.num_slabs,
        slot_claims=eviction.num_claims,
        fills_in_flight=len(fills.in_flight),
    )
