"""Taps: where a prefill captures its state. A function of the prompt, its hints and where it resumes."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prefix_index.errors import InvalidArgument
from prefix_index.types import SnapshotKind, Span


class TapSource(enum.IntEnum):
    """Why a position was proposed, in order of priority."""

    EXPLICIT = 0  # a breakpoint the client named
    DIVERGENCE = 1  # the end of the cached path: another prompt went another way here
    OPENER = 2  # start of the generation opener: the next turn renders the history anew from here
    STRUCTURAL = 3  # end of tools or of the leading system block
    AUTOMATIC = 4  # a protocol's automatic marker: planned like a structural one, but not shared
    TAIL = 5  # the prompt's last reusable position
    LADDER = 6  # ever sparser towards the start


SHARED = frozenset({TapSource.EXPLICIT, TapSource.DIVERGENCE, TapSource.STRUCTURAL})
_CLUSTERED = frozenset({TapSource.DIVERGENCE, TapSource.OPENER, TapSource.STRUCTURAL, TapSource.AUTOMATIC})


@dataclass(frozen=True, slots=True, kw_only=True)
class TapHints:
    """What the renderer of the prompt knows about its structure, as token positions.

    Attributes:
        explicit: breakpoints the client named.
        opener: start of the tokens that make the model answer.
        structural: ends of tools and of the leading system block.
        automatic: a protocol's automatic markers.
        message_boundaries: where messages begin.
    """

    explicit: tuple[int, ...] = ()
    opener: int | None = None
    structural: tuple[int, ...] = ()
    automatic: tuple[int, ...] = ()
    message_boundaries: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TapLimits:
    """How many taps, and how far apart.

    Attributes:
        max_taps: most taps of a prompt.
        ladder_tokens: how far the ladder's first tap is from the prompt's end; each next one is twice as far.
        min_gap_tokens: no tap of the ladder is closer than this to another snapshot.
        block_tokens: tokens per block.

    Raises:
        InvalidArgument: a value is out of its range.
    """

    max_taps: int = 8
    ladder_tokens: int = 4096
    min_gap_tokens: int = 1024
    block_tokens: int = 64

    def __post_init__(self) -> None:
        if self.max_taps < 0:
            raise InvalidArgument(f"TapLimits: max_taps must not be negative, got {self.max_taps!r}")
        for name in ("ladder_tokens", "min_gap_tokens", "block_tokens"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"TapLimits: {name} must be positive, got {getattr(self, name)!r}")

    @classmethod
    def for_engine(cls, prefill_chunk: int, *, host_tier: bool) -> TapLimits:
        """Defaults of an engine that prefills in such chunks; without a Host tier taps displace other snapshots."""
        return cls(
            max_taps=8 if host_tier else 2,
            ladder_tokens=max(4096, 2 * prefill_chunk),
            min_gap_tokens=max(1024, prefill_chunk),
        )


@dataclass(frozen=True, slots=True)
class Tap:
    """Capture the state after `position` tokens; if not exact, at the chunk end that reaches it."""

    position: int
    source: TapSource
    exact: bool
    kind: SnapshotKind


def plan_taps(
    num_tokens: int,
    base: int,
    hints: TapHints,
    *,
    limits: TapLimits | None = None,
    existing: Sequence[int] = (),
    exclude: Sequence[Span] = (),
    matched_tokens: int = 0,
    resumed: SnapshotKind | None = None,
    split_seconds: float = 0.0,
) -> tuple[Tap, ...]:
    """Taps in (base, num_tokens - 1], sorted by position.

    Args:
        num_tokens: length of the prompt.
        base: where the prefill resumes.
        hints: what is known of the prompt's structure.
        limits: how many taps and how far apart.
        existing: frontiers of snapshots already on the path.
        exclude: spans no tap may lie strictly inside; a position in one moves to its start.
        matched_tokens: length of the cached block path: past the base, its end is where prompts diverge.
        resumed: kind of the snapshot resumed from; after an ENDPOINT neither opener nor tail is tapped, for the
            lineage's own endpoint serves its next turn.
        split_seconds: what an exact tap costs; with 0 all taps are exact, above it tail and ladder take a chunk's end.
    """
    limits = limits or TapLimits()
    if limits.max_taps == 0 or num_tokens < 2:
        return ()
    near = limits.block_tokens
    gap = max(limits.min_gap_tokens, near)
    taken = sorted({base, *existing})
    accepted: list[tuple[int, TapSource, bool]] = []
    proposed = _cluster(_semantic(num_tokens, base, hints, exclude, matched_tokens, resumed), near)
    if resumed is not SnapshotKind.ENDPOINT:
        proposed.append((_settle(num_tokens - 1, num_tokens, exclude), TapSource.TAIL, False))
    for rung in _ladder(num_tokens, base, hints.message_boundaries, limits.ladder_tokens, gap):
        proposed.append((_settle(rung, num_tokens, exclude), TapSource.LADDER, False))
    for position, source, shared in sorted(proposed, key=lambda entry: (entry[1], -entry[0])):
        if len(accepted) == limits.max_taps:
            break
        others = [*taken, *(place for place, _, _ in accepted)]
        if position <= base or _redundant(position, source, others, near, gap):
            continue
        accepted.append((position, source, shared))
    return tuple(_tap(position, source, shared, split_seconds) for position, source, shared in sorted(accepted))


def _tap(position: int, source: TapSource, shared: bool, split_seconds: float) -> Tap:
    exact = split_seconds == 0 or source not in (TapSource.TAIL, TapSource.LADDER)
    return Tap(position, source, exact, SnapshotKind.BOUNDARY if shared else SnapshotKind.TAP)


def _settle(position: int, num_tokens: int, exclude: Sequence[Span]) -> int:
    """Clamp to the last reusable position and leave excluded spans at their start."""
    position = min(position, num_tokens - 1)
    moved = True
    while moved:
        moved = False
        for begin, end in exclude:
            if begin < position < end:
                position = begin
                moved = True
    return position


def _semantic(
    num_tokens: int,
    base: int,
    hints: TapHints,
    exclude: Sequence[Span],
    matched_tokens: int,
    resumed: SnapshotKind | None,
) -> list[tuple[int, TapSource, bool]]:
    named: list[tuple[int, TapSource]] = [(position, TapSource.EXPLICIT) for position in hints.explicit]
    if matched_tokens > base:
        named.append((matched_tokens, TapSource.DIVERGENCE))
    if hints.opener is not None and resumed is not SnapshotKind.ENDPOINT:
        named.append((hints.opener, TapSource.OPENER))
    named.extend((position, TapSource.STRUCTURAL) for position in hints.structural)
    named.extend((position, TapSource.AUTOMATIC) for position in hints.automatic)
    return [(_settle(position, num_tokens, exclude), source, source in SHARED) for position, source in named]


def _cluster(proposed: Iterable[tuple[int, TapSource, bool]], near: int) -> list[tuple[int, TapSource, bool]]:
    """Of semantic positions closer than a block keep the earliest; it inherits that it may be shared."""
    kept: list[tuple[int, TapSource, bool]] = []
    explicit = []
    for position, source, shared in sorted(proposed):
        if source not in _CLUSTERED:
            explicit.append((position, source, shared))
        elif kept and position - kept[-1][0] < near:
            first, its_source, its_shared = kept[-1]
            kept[-1] = (first, its_source, its_shared or shared)
        else:
            kept.append((position, source, shared))
    return explicit + kept


def _ladder(num_tokens: int, base: int, boundaries: Sequence[int], step: int, gap: int) -> list[int]:
    """num_tokens - step * 2**k while past the base, each moved back to a message boundary closer than the gap."""
    rungs = []
    while step < num_tokens and num_tokens - step > base:
        target = num_tokens - step
        reachable = [place for place in boundaries if base < place <= target and target - place < gap]
        rungs.append(max(reachable, default=target))
        step *= 2
    return rungs


def _redundant(position: int, source: TapSource, others: Sequence[int], near: int, gap: int) -> bool:
    """Whether a later prompt would gain too little: a snapshot serves every prompt that diverges behind it."""
    if source is TapSource.EXPLICIT:
        return position in others
    if source is TapSource.LADDER:
        return any(abs(position - other) < gap for other in others)
    return any(0 <= position - other < near for other in others)
