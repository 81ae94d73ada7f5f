"""The line of waiting requests: which comes next, from which cached prefix, and when it had better wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator

from prefix_index import Readiness, Tap, Wait, plan_coalescing, plan_taps, worth_landing
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
        self._blocked: tuple[Sequence, object] | None = None  # the first, and the state in which it found no room

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
        self._blocked = None

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
        if running and self._blocked == (sequence, self._cache.state):
            return None
        quote = self._quote(sequence)
        if not running and self._held_up(quote) and self._cache.transfers.drain():
            # Only copies of sequences that have ended were in the way, and they have just landed.
            quote = self._quote(sequence)
        if running and self._held_up(quote):
            if quote.readiness is Readiness.TEMPORARILY_BLOCKED:
                self._blocked = sequence, self._cache.state
            return None
        wait = self._wait(sequence, quote, running)
        if wait is not None:
            sibling, tap = wait
            sibling.plan_tap(tap)
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
        total_tokens = len(sequence.tokens) + min(sequence.max_tokens, OUTPUT_WINDOW_TOKENS)
        return self._cache.quote(sequence.prompt, total_tokens=total_tokens)

    def _held_up(self, quote: AdmissionQuote) -> bool:
        """Whether something that is on its way will make room, or let the request skip more than it could now."""
        if quote.readiness is Readiness.READY:
            return quote.match is not None and worth_landing(
                quote.match.candidates,
                quote.source,
                quote.match.prompt.num_tokens,
                self._cache.cost,
                bytes_on_their_way=self._cache.restoring_bytes,
            )
        return quote.readiness is Readiness.TEMPORARILY_BLOCKED

    def _wait(
        self, sequence: Sequence, quote: AdmissionQuote, running: Collection[Sequence]
    ) -> tuple[Sequence, Tap] | None:
        """The running sequence that will soon have a snapshot of the same prefix that is worth waiting for, and the tap
        by which it takes it.

        The waiting request holds nothing. If the other one ends or passes the place without a snapshot, the request
        does not wait any more.
        """
        if sequence.prompt is None or quote.readiness is not Readiness.READY:
            return None
        best: tuple[Sequence, Wait] | None = None
        for other in running:
            if other.prompt is None or not other.in_prompt:
                continue
            wait = plan_coalescing(
                sequence.prompt,
                quote.source.frontier if quote.source is not None else 0,
                other.as_sibling(),
                self._cache.cost,
                wait_limit_seconds=self._options.pending_timeout_seconds,
                block_tokens=BLOCK_TOKENS,
            )
            if wait is not None and (best is None or wait.target > best[1].target):
                best = other, wait
        return None if best is None else (best[0], best[1].tap)
