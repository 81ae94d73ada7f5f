"""What requests cost: one report for each request that has ended, and the totals of all of them.

A request is counted once, whole, when it ends. So the totals equal the sum of the reports at any moment, and a request
that still runs is in none of them.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

__all__ = [
    "Accounts",
    "FinishReason",
    "Funnel",
    "MissReason",
    "Outcome",
    "RequestListener",
    "RequestReport",
    "Reuse",
    "Stopwatch",
    "Timing",
    "Totals",
    "Usage",
]

logger = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "cancelled"]
Outcome = FinishReason | Literal["failed"]


class MissReason(enum.StrEnum):
    """Why the longest cached prefix was not used, or not all of it. In the order in which a request meets them.

    ``NAMESPACE`` never says that another namespace holds this very prefix: looking would cost a walk per namespace and
    tell one tenant what another has asked.
    """

    DISABLED = "disabled"  # the request or the engine does without the cache
    NOT_ADMITTED = "not_admitted"  # it ended while it waited
    NAMESPACE = "namespace"  # its namespace is empty, others are not
    NOT_CACHED = "not_cached"  # no block of it is cached
    NO_SNAPSHOT = "no_snapshot"  # blocks are there, no snapshot was ever taken so deep
    IMAGE_EVICTED = "image_evicted"  # a snapshot was there and had to go
    EXCLUDED = "excluded"  # the frontier lies where nothing may be resumed
    FILLING = "filling"  # a copy it needs is still on its way
    COST = "cost"  # computing it was predicted to be as quick as restoring it
    CAPACITY = "capacity"  # there was no room to resume from it


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """Where a request resumed.

    Attributes:
        device_tokens: skipped prompt tokens whose KV was on the device.
        host_tokens: skipped prompt tokens whose KV came back from the Host.
        matched_tokens: length of the longest cached block prefix, resumable or not.
        restored_bytes: bytes copied from the Host for it, its state image among them.
        reason: why no more was skipped; None when all that was cached was used, up to less than a block.
    """

    device_tokens: int = 0
    host_tokens: int = 0
    matched_tokens: int = 0
    restored_bytes: int = 0
    reason: MissReason | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed, no more and no less."""
        return self.device_tokens + self.host_tokens


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one request. None where it ended earlier.

    Attributes:
        queued_seconds: until it was admitted, or until its end if it never was.
        staged_seconds: from there until what it resumed from had landed; 0 without a restore. The first pass overlaps
            with it.
        first_token_seconds: from its arrival to its first token.
        token_seconds: mean distance of the tokens after the first.
        total_seconds: from its arrival to its end.
    """

    queued_seconds: float
    staged_seconds: float = 0.0
    first_token_seconds: float | None = None
    token_seconds: float | None = None
    total_seconds: float


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a request cost. Taps are the snapshots it took of its prompt; those skipped found no room."""

    prompt_tokens: int
    completion_tokens: int
    reuse: Reuse = field(default_factory=Reuse)
    timing: Timing
    taps_taken: int = 0
    taps_skipped: int = 0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed, no more and no less."""
        return self.reuse.cached_tokens


@dataclass(frozen=True, kw_only=True)
class RequestReport:
    """A request that has ended. Holds no token and nothing a client wrote.

    Attributes:
        request_id: counts from 1 in each engine.
        outcome: as its stream was told.
        error: the class of the error it was told, if it failed.
        executed: whether a forward pass of it succeeded.
        usage: what it cost.
        out_of_pages: whether its answer was cut because running sequences held every page.
    """

    request_id: int
    outcome: Outcome
    error: str | None
    executed: bool
    usage: Usage
    out_of_pages: bool = False


RequestListener = Callable[[RequestReport], None]


@dataclass(eq=False)
class Stopwatch:
    """When things happened to one request, in seconds of the core's clock. None: not yet."""

    submitted: float
    admitted: float | None = None
    landed: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def land(self, now: float) -> None:
        """What it resumes from is on the device; only the first call counts."""
        if self.landed is None:
            self.landed = now

    def token(self, now: float) -> None:
        """A token was drawn."""
        if self.first_token is None:
            self.first_token = now
        self.last_token = now

    def read(self, now: float, *, completion_tokens: int) -> Timing:
        """The request ends ``now``."""
        admitted = now if self.admitted is None else self.admitted
        first, last, gaps = self.first_token, self.last_token, completion_tokens - 1
        return Timing(
            queued_seconds=admitted - self.submitted,
            staged_seconds=0.0 if self.landed is None else self.landed - admitted,
            first_token_seconds=None if first is None else first - self.submitted,
            token_seconds=None if first is None or last is None or gaps < 1 else (last - first) / gaps,
            total_seconds=now - self.submitted,
        )


@dataclass(frozen=True, kw_only=True)
class Funnel:
    """How far requests came on the way to a reused prefix; each number is at most the one above it.

    A request that is in one and not in the next is in exactly one bucket of ``rejected``.

    Attributes:
        requests: have ended.
        eligible: were to use the cache; the others are in ``disabled``.
        admitted: got a lane; else ``not_admitted``.
        matched: found a block or a snapshot of their prompt; else ``namespace`` or ``not_cached``.
        resumable: found a snapshot; else ``no_snapshot``, ``image_evicted`` or ``excluded``.
        landed: found one whose copies were not on their way; else ``filling``.
        worthwhile: found one that was cheaper than computing; else ``cost``.
        leased: resumed from one; else ``capacity``.
        executed: computed on from it; else ``not_executed``: they ended before their first pass had.
        rejected: how many are in each bucket.
    """

    requests: int
    eligible: int
    admitted: int
    matched: int
    resumable: int
    landed: int
    worthwhile: int
    leased: int
    executed: int
    rejected: Mapping[str, int]


# A request that leaves the funnel in front of a stage left for one of these reasons.
_STAGES: tuple[tuple[str, tuple[MissReason, ...]], ...] = (
    ("eligible", (MissReason.DISABLED,)),
    ("admitted", (MissReason.NOT_ADMITTED,)),
    ("matched", (MissReason.NAMESPACE, MissReason.NOT_CACHED)),
    ("resumable", (MissReason.NO_SNAPSHOT, MissReason.IMAGE_EVICTED, MissReason.EXCLUDED)),
    ("landed", (MissReason.FILLING,)),
    ("worthwhile", (MissReason.COST,)),
    ("leased", (MissReason.CAPACITY,)),
)


def _none_yet() -> dict[MissReason, int]:
    return dict.fromkeys(MissReason, 0)


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over the requests that have ended.

    Attributes:
        requests: how many, and by outcome ``stopped``, ``length``, ``cancelled``, ``failed``.
        device_hits: skipped tokens without a copy from the Host.
        host_hits: skipped tokens after one.
        unexecuted_hits: of both, ended before their first pass had.
        out_of_pages: of those with the outcome ``length``, cut because running sequences held every page.
        misses: skipped nothing, by reason.
        partial: skipped tokens while more of the prompt was cached, by the reason for not using the rest.
    """

    requests: int = 0
    stopped: int = 0
    length: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    completion_tokens: int = 0
    restored_bytes: int = 0
    taps_taken: int = 0
    taps_skipped: int = 0
    device_hits: int = 0
    host_hits: int = 0
    unexecuted_hits: int = 0
    out_of_pages: int = 0
    misses: Mapping[MissReason, int] = field(default_factory=_none_yet)
    partial: Mapping[MissReason, int] = field(default_factory=_none_yet)

    def plus(self, report: RequestReport) -> Totals:
        """These totals with one more request."""
        usage, reuse, outcome = report.usage, report.usage.reuse, report.outcome
        hit = reuse.cached_tokens > 0
        return replace(
            self,
            requests=self.requests + 1,
            stopped=self.stopped + (outcome == "stop"),
            length=self.length + (outcome == "length"),
            cancelled=self.cancelled + (outcome == "cancelled"),
            failed=self.failed + (outcome == "failed"),
            prompt_tokens=self.prompt_tokens + usage.prompt_tokens,
            device_tokens=self.device_tokens + reuse.device_tokens,
            host_tokens=self.host_tokens + reuse.host_tokens,
            completion_tokens=self.completion_tokens + usage.completion_tokens,
            restored_bytes=self.restored_bytes + reuse.restored_bytes,
            taps_taken=self.taps_taken + usage.taps_taken,
            taps_skipped=self.taps_skipped + usage.taps_skipped,
            device_hits=self.device_hits + (hit and not reuse.restored_bytes),
            host_hits=self.host_hits + (hit and reuse.restored_bytes > 0),
            unexecuted_hits=self.unexecuted_hits + (hit and not report.executed),
            out_of_pages=self.out_of_pages + report.out_of_pages,
            misses=self.misses if hit else _one_more(self.misses, reuse.reason),
            partial=_one_more(self.partial, reuse.reason) if hit else self.partial,
        )

    def funnel(self) -> Funnel:
        """The same requests by how far they came."""
        left, stages = self.requests, {}
        for stage, reasons in _STAGES:
            left -= sum(self.misses[reason] for reason in reasons)
            stages[stage] = left
        rejected = {reason.value: count for reason, count in self.misses.items()}
        return Funnel(
            requests=self.requests,
            **stages,
            executed=left - self.unexecuted_hits,
            rejected=rejected | {"not_executed": self.unexecuted_hits},
        )


def _one_more(counts: Mapping[MissReason, int], reason: MissReason | None) -> Mapping[MissReason, int]:
    return counts if reason is None else {**counts, reason: counts[reason] + 1}


class Accounts:
    """Keeps the totals and tells a listener of every report. Written by the worker; ``totals`` may be read anywhere.

    A listener that raises loses that report and is counted; nothing else happens.
    """

    def __init__(self, listener: RequestListener | None = None) -> None:
        self._listener = listener
        self.totals = Totals()
        self.unheard = 0

    def settle(self, report: RequestReport) -> None:
        """Count a request that has ended."""
        self.totals = self.totals.plus(report)  # replaced whole, so that a reader never sees half a request
        if self._listener is None:
            return
        try:
            self._listener(report)
        except Exception:
            self.unheard += 1
            if self.unheard == 1:
                logger.exception("the listener for ended requests failed; further failures are only counted")
