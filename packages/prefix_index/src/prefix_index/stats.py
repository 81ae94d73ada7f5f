"""What the index counts: gauges of what is there, counters of what happened since it was made."""

from __future__ import annotations

from dataclasses import dataclass

from prefix_index.core import Core
from prefix_index.values import SnapshotKind


@dataclass(slots=True)
class Counters:
    """What the verbs count as they run; evictions and losses are counted where they happen."""

    published: int = 0
    duplicates: int = 0
    device_evictions: int = 0
    host_evictions: int = 0
    slot_claims: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Gauges (what is there now) and counters (what happened since the index was made). `snapshots` is the sum of the
    four kinds after it."""

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


def gather(core: Core, counts: Counters) -> Stats:
    """The statistics now. O(1)."""
    return Stats(
        blocks=core.tree.num_blocks,
        edges=core.tree.num_edges,
        snapshots=sum(core.kinds),
        taps=core.kinds[SnapshotKind.TAP],
        endpoints=core.kinds[SnapshotKind.ENDPOINT],
        output_boundaries=core.kinds[SnapshotKind.OUTPUT_BOUNDARY],
        boundaries=core.kinds[SnapshotKind.BOUNDARY],
        namespaces=len(core.tree.roots),
        device_blocks=core.device_blocks,
        device_tails=core.device_tails,
        evictable_device_pages=core.evictable_device_pages,
        host_blocks=core.host_blocks,
        inflation=core.inflation,
        blocks_inserted=core.inserted,
        blocks_reattached=core.reattached,
        blocks_duplicate=core.duplicate,
        snapshots_published=counts.published,
        snapshots_duplicate=counts.duplicates,
        snapshots_superseded=core.worth.superseded,
        snapshots_lost=core.worth.lost,
        hits=core.hits,
        tokens_resumed=core.tokens_resumed,
        device_evictions=counts.device_evictions,
        host_evictions=counts.host_evictions,
        slot_claims=counts.slot_claims,
        fills_in_flight=len(core.tickets),
    )
