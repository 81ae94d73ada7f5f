"""What one request cost: how much of its prompt was reused, why not more, and where its time went."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = ["MissReason", "Reuse", "Timing", "Usage"]


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
