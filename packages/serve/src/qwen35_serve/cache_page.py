"""What ``GET /v1/cache`` shows: the engine's gauges and sums under names that docs/observability.md explains."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from qwen35_engine import CacheStats, Engine, IndexStats, RequestLog, Totals

__all__ = ["cache_page"]


def cache_page(engine: Engine, request_log: RequestLog | None) -> dict[str, Any]:
    """The whole page. Read while the worker goes on, so that gauges of a busy engine may be a step apart."""
    stats, options = engine.stats(), engine.options
    cache, index, totals = stats.cache, stats.index, stats.totals
    return {
        "lanes": {
            "limit": options.max_concurrency,
            "running": stats.running,
            "prefilling": stats.prefilling,
            "decoding": stats.running - stats.prefilling,
        },
        "queue": {"limit": options.max_pending, "waiting": stats.waiting},
        "refused": dict(stats.refused),
        "device": _device(cache, index, snapshot_limit=options.snapshot_slots),
        "host": _host(cache, index),
        "snapshots": {
            "tap": index.taps,
            "endpoint": index.endpoints,
            "output_boundary": index.output_boundaries,
            "boundary": index.boundaries,
        },
        "requests": _requests(totals),
        "hits": {"device": totals.device_hits, "host": totals.host_hits},
        "misses": dict(totals.misses),
        "partial": dict(totals.partial),
        "funnel": asdict(totals.funnel()),
        "counters": {
            "blocks_inserted": index.blocks_inserted,
            "blocks_reattached": index.blocks_reattached,
            "blocks_duplicate": index.blocks_duplicate,
            "snapshots_published": index.snapshots_published,
            "snapshots_superseded": index.snapshots_superseded,
            "snapshots_lost": index.snapshots_lost,
            "endpoints_skipped": cache.endpoints_skipped,
            "device_evictions": index.device_evictions,
            "host_evictions": index.host_evictions,
            "slot_claims": index.slot_claims,
            "prefetched_blocks": cache.prefetched_blocks,
        },
        "request_log": (
            None if request_log is None else {"written": request_log.written, "lost": request_log.lost + stats.unheard}
        ),
        "options": options.model_dump(),
        "ledger": [asdict(entry) for entry in engine.ledger().entries],
    }


def _device(cache: CacheStats, index: IndexStats, *, snapshot_limit: int) -> dict[str, Any]:
    cached = index.device_blocks + index.device_tails
    return {
        "pages": {
            "total": cache.pages_total,
            "free": cache.pages_free,
            "lanes": max(0, cache.pages_total - cache.pages_free - cached),
            "blocks": index.device_blocks,
            "tails": index.device_tails,
            "pinned": cached - index.evictable_device_pages,
        },
        "slots": {
            "total": cache.slots_total,
            "free": cache.slots_free,
            "lanes": max(0, cache.slots_total - cache.slots_free - cache.snapshot_slots_used),
            "snapshots": cache.snapshot_slots_used,
            "snapshot_limit": snapshot_limit,
        },
    }


def _host(cache: CacheStats, index: IndexStats) -> dict[str, Any] | None:
    host = cache.host
    if host is None:
        return None
    return {
        "slabs": {
            "total": host.slabs_total,
            "free": host.slabs_free,
            "blocks": index.host_blocks,
            "snapshots": max(0, host.slabs_total - host.slabs_free - index.host_blocks),
        },
        "slab_bytes": host.slab_bytes,
        "written_bytes": host.written_bytes,
        "restored_bytes": host.restored_bytes,
        "writing_bytes": host.writing_bytes,
        "restoring_bytes": host.restoring_bytes,
    }


def _requests(totals: Totals) -> dict[str, int]:
    return {
        "ended": totals.requests,
        "stop": totals.stopped,
        "length": totals.length,
        "out_of_pages": totals.out_of_pages,
        "cancelled": totals.cancelled,
        "failed": totals.failed,
        "prompt_tokens": totals.prompt_tokens,
        "completion_tokens": totals.completion_tokens,
        "cached_tokens": totals.device_tokens + totals.host_tokens,
        "device_tokens": totals.device_tokens,
        "host_tokens": totals.host_tokens,
        "restored_bytes": totals.restored_bytes,
        "taps_taken": totals.taps_taken,
        "taps_skipped": totals.taps_skipped,
    }
