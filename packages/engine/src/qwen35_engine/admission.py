"""The line of waiting requests: which comes next, from which cached prefix, and when it had better wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from prefix_index import (
    Candidate,
    CostModel,
    Match,
    Readiness,
    SnapshotKind,
    Tap,
    TapSource,
    plan_coalescing,
    plan_taps,
    resume_seconds,
)
from qwen35_kernels import BLOCK_TOKENS

from .cache import AdmissionQuote, PrefixCache
from .options import OUTPUT_WINDOW_TOKENS, EffectiveOptions
from .sequence import Sequence

__all__ = ["Admission"]


class Admission:
    """Requests start in the order of their arrival; the first that finds no room makes the rest wait too.

    The line holds nothing of the cache: a request that waits pins no block and has no page.
    """

    def __init__(self, cache: PrefixCache, options: EffectiveOptions) -> None:
        self._cache = cache
        self._options = options
        self._line: deque[Sequence] = deque()
        self._quoted: tuple[Sequence, object, AdmissionQuote] | None = None

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait, the oldest first."""
        return iter(tuple(self._line))

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Put requests at the end of the line."""
        self._line.extend(sequences)

    def remove(self, sequence: Sequence) -> None:
        """Take a request out of the line, wherever it stands."""
        self._line.remove(sequence)
        if self._quoted is not None and self._quoted[0] is sequence:
            self._quoted = None

    def expired(self, now: float) -> Iterator[Sequence]:
        """Those that have waited too long. The line is in the order of arrival, so they are the first ones."""
        latest = now - self._options.pending_timeout_seconds
        while self._line and self._line[0].times.submitted < latest:
            yield self._line[0]

    def next(self, running: Collection[Sequence]) -> tuple[Sequence, AdmissionQuote] | None:
        """The first of the line with a quote that is ready or hopeless; None where it has to wait, or there is none.

        Where it waits for the snapshot of a running sequence, that one is made to take it.

        Raises:
            CopyFailed: a copy failed; the engine has to end.
        """
        if not self._line or len(running) >= self._options.max_concurrency:
            return None
        sequence = self._line[0]
        quote = self._quote(sequence)
        if not running and self._held_up(quote) and self._cache.transfers.drain():
            # Only copies of sequences that have ended were in the way, and they have just landed.
            quote = self._quote(sequence)
        if running and self._held_up(quote):
            return None
        wait = self._wait(sequence, quote, running)
        if wait is not None:
            wait.sibling.plan_tap(wait.tap)
            return None
        return sequence, quote

    def prefetch(self) -> None:
        """Use the time in which the first of the line waits for a lane or for pages."""
        if self._line and self._line[0].prompt is not None:
            self._cache.prefetch(self._line[0].prompt)

    def plan_taps(self, sequence: Sequence, quote: AdmissionQuote) -> list[Tap]:
        """The snapshots that a sequence takes of its prompt, if it starts on this quote."""
        if quote.match is None:
            return []
        source = quote.source
        planned = plan_taps(
            sequence.prompt_tokens,
            source.frontier if source is not None else 0,
            sequence.request.hints,
            limits=self._options.taps,
            existing=[candidate.frontier for candidate in quote.match.candidates],
            matched_tokens=quote.match.matched_tokens,
            resumed=source.kind if source is not None else None,
        )
        return list(planned)

    def _quote(self, sequence: Sequence) -> AdmissionQuote:
        """Made once for each state of the cache: a request that is held up asks again at every turn."""
        version = self._cache.version
        if self._quoted is not None and self._quoted[:2] == (sequence, version):
            return self._quoted[2]
        total_tokens = len(sequence.tokens) + min(sequence.max_tokens, OUTPUT_WINDOW_TOKENS)
        quote = self._cache.quote(sequence.prompt, total_tokens=total_tokens)
        self._quoted = sequence, self._cache.version, quote
        return quote

    def _held_up(self, quote: AdmissionQuote) -> bool:
        """Whether something that is on its way will make room, or let the request skip more than it could now."""
        if quote.readiness is Readiness.READY:
            return quote.match is not None and _lands_soon(
                quote.match, quote.source, cost=self._cache.cost, bytes_on_their_way=self._cache.restoring_bytes
            )
        return quote.readiness is Readiness.TEMPORARILY_BLOCKED

    def _wait(self, sequence: Sequence, quote: AdmissionQuote, running: Collection[Sequence]) -> _Wait | None:
        """The running sequence that computes the same prefix and will soon have a snapshot that is worth waiting for.

        The waiting request holds nothing. If the other one ends or passes the place without a snapshot, the request
        does not wait any more.
        """
        if sequence.prompt is None or quote.readiness is not Readiness.READY:
            return None
        reuse = quote.source.frontier if quote.source is not None else 0
        best: tuple[int, Sequence] | None = None
        for other in running:
            if other.prompt is None or not other.in_prompt:
                continue
            wait = plan_coalescing(
                sequence.prompt,
                reuse,
                other.as_sibling(),
                self._cache.cost,
                wait_limit_seconds=self._options.pending_timeout_seconds,
                block_tokens=BLOCK_TOKENS,
            )
            if wait is not None and (best is None or wait.target > best[0]):
                best = wait.target, other
        if best is None:
            return None
        return _Wait(best[1], Tap(best[0], TapSource.DIVERGENCE, True, SnapshotKind.BOUNDARY))


@dataclass(frozen=True)
class _Wait:
    """For the snapshot that ``sibling`` will take by ``tap``."""

    sibling: Sequence
    tap: Tap


def _lands_soon(match: Match, source: Candidate | None, *, cost: CostModel, bytes_on_their_way: int) -> bool:
    """Whether what is on its way to the device for another sequence is worth waiting for.

    Args:
        match: what is cached of the prompt.
        source: what it could resume from now; None is the first token.
        cost: ranks the wait against computing.
        bytes_on_their_way: of all copies from the Host that have not landed.
    """
    if not bytes_on_their_way:
        return False
    num_tokens = match.prompt.num_tokens
    now = resume_seconds(source, num_tokens, cost)
    wait = cost.restore_seconds(bytes_on_their_way)
    return any(
        candidate.filling and wait + resume_seconds(candidate, num_tokens, cost) < now for candidate in match.candidates
    )
