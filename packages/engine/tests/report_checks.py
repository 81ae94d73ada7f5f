"""What has to hold between the reports of requests, their sums, and the funnel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from qwen35_engine import MissReason, RequestReport, Totals

# The stages in their order, and the buckets in front of each.
STAGES: tuple[tuple[str, frozenset[str]], ...] = (
    ("eligible", frozenset({"disabled"})),
    ("admitted", frozenset({"not_admitted"})),
    ("matched", frozenset({"namespace", "not_cached"})),
    ("resumable", frozenset({"no_snapshot", "image_evicted", "excluded"})),
    ("landed", frozenset({"filling"})),
    ("worthwhile", frozenset({"cost"})),
    ("leased", frozenset({"capacity"})),
    ("executed", frozenset({"not_executed"})),
)


def bucket(report: RequestReport) -> str:
    """Where one request left the funnel; empty if it came through."""
    if not report.usage.cached_tokens:
        assert report.usage.reuse.reason is not None, f"a miss without a reason: {report}"
        return report.usage.reuse.reason.value
    return "" if report.executed else "not_executed"


def check_report(report: RequestReport) -> None:
    """Every number of one request is possible beside the others."""
    usage, reuse, timing = report.usage, report.usage.reuse, report.usage.timing
    assert reuse.device_tokens >= 0
    assert reuse.host_tokens >= 0
    assert reuse.cached_tokens < usage.prompt_tokens
    assert 0 <= reuse.matched_tokens < usage.prompt_tokens
    assert reuse.matched_tokens % 64 == 0
    assert (reuse.restored_bytes > 0) or not reuse.host_tokens
    if reuse.cached_tokens and reuse.reason is None:
        assert reuse.cached_tokens > reuse.matched_tokens - 64
    assert usage.completion_tokens >= 0
    assert min(usage.taps_taken, usage.taps_skipped) >= 0
    assert (report.outcome == "failed") == (report.error is not None)
    assert report.outcome == "length" or not report.out_of_pages
    assert timing.queued_seconds >= 0
    assert timing.staged_seconds >= 0
    assert timing.queued_seconds + timing.staged_seconds <= timing.total_seconds + 1e-9
    if usage.completion_tokens:
        assert report.executed
        assert timing.first_token_seconds is not None
        assert timing.queued_seconds <= timing.first_token_seconds <= timing.total_seconds
    else:
        assert timing.first_token_seconds is None
    assert (timing.token_seconds is not None) == (usage.completion_tokens > 1)
    assert timing.token_seconds is None or timing.token_seconds >= 0


def check_books(reports: Sequence[RequestReport], totals: Totals) -> None:
    """The totals are the sums of the reports; each request that is in one stage of the funnel and not in the next is in
    exactly one bucket between them."""
    for report in reports:
        check_report(report)
    assert len({report.request_id for report in reports}) == len(reports) == totals.requests
    usages = [report.usage for report in reports]
    assert totals.prompt_tokens == sum(usage.prompt_tokens for usage in usages)
    assert totals.completion_tokens == sum(usage.completion_tokens for usage in usages)
    assert totals.device_tokens + totals.host_tokens == sum(usage.cached_tokens for usage in usages)
    assert totals.host_tokens == sum(usage.reuse.host_tokens for usage in usages)
    assert totals.restored_bytes == sum(usage.reuse.restored_bytes for usage in usages)
    assert totals.taps_taken == sum(usage.taps_taken for usage in usages)
    assert totals.taps_skipped == sum(usage.taps_skipped for usage in usages)
    assert totals.out_of_pages == sum(report.out_of_pages for report in reports)
    outcomes = Counter(report.outcome for report in reports)
    assert (totals.stopped, totals.length) == (outcomes["stop"], outcomes["length"])
    assert (totals.cancelled, totals.failed) == (outcomes["cancelled"], outcomes["failed"])
    hits = [usage for usage in usages if usage.cached_tokens]
    assert totals.device_hits + totals.host_hits == len(hits)
    assert totals.host_hits == sum(usage.reuse.restored_bytes > 0 for usage in hits)
    partial = Counter(usage.reuse.reason for usage in hits if usage.reuse.reason is not None)
    assert {reason: count for reason, count in totals.partial.items() if count} == partial

    funnel = totals.funnel()
    buckets = Counter(bucket(report) for report in reports)
    assert set(funnel.rejected) == {reason.value for reason in MissReason} | {"not_executed"}
    assert {name: count for name, count in funnel.rejected.items() if count} == {
        name: count for name, count in buckets.items() if name
    }
    assert set().union(*(names for _, names in STAGES)) == set(funnel.rejected), "a bucket belongs to no stage"
    above = funnel.requests
    assert above == len(reports)
    for stage, names in STAGES:
        here = getattr(funnel, stage)
        assert above - here == sum(funnel.rejected[name] for name in names) >= 0, stage
        above = here
    assert funnel.executed == buckets[""]
