"""What a caller asks for, and the stream through which the answer comes back."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from prefix_index import TapHints

from .errors import EngineError, RequestError
from .metrics import FinishReason, Usage

__all__ = [
    "MAX_LOGPROBS",
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "GenerationRequest",
    "NewTokens",
    "SamplingParams",
    "Started",
    "TokenLogprobs",
    "TokenStream",
]

logger = logging.getLogger(__name__)

MAX_LOGPROBS = 64


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn.

    Attributes:
        temperature: 0 takes the most likely token, up to 100.
        top_k: keep the k most likely tokens, 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        min_p: drop tokens less likely than this share of the most likely one, in [0, 1].
        seed: any 64-bit integer; equal seeds give equal tokens for equal logits. None draws a fresh one.

    Raises:
        RequestError: a value out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(0 <= self.temperature <= 100, "temperature must be between 0 and 100", self.temperature)
        _require(0 <= self.top_k < 2**31, "top_k must be between 0 and 2147483647", self.top_k)
        _require(0 < self.top_p <= 1, "top_p must be above 0 and at most 1", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p must be between 0 and 1", self.min_p)
        if self.seed is not None:
            _require(-(2**63) <= self.seed < 2**63, "seed must be a signed 64-bit integer", self.seed)


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue.

    Attributes:
        tokens: the prompt, as token ids.
        sampling: how tokens are drawn.
        max_tokens: output tokens at most; None allows what the context holds.
        stop_token_ids: a token of these ends the answer and belongs to it.
        logprobs: how many of the most likely tokens to report at each position besides the one drawn, 0 to 64; None
            reports nothing.
        namespace: the isolation domain; nothing is shared between two of them.
        hints: what is known of the prompt's structure: where a later prompt may well continue differently, such as the
            start of the generation opener. Snapshots are planned from it.
        reuse: False computes everything and leaves nothing behind.

    Raises:
        RequestError: an empty prompt, a value out of its range, a hint outside the prompt.
    """

    tokens: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    namespace: bytes = b""
    hints: TapHints = field(default_factory=TapHints)
    reuse: bool = True

    def __post_init__(self) -> None:
        _require(len(self.tokens) >= 1, "a prompt must have at least one token", len(self.tokens))
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, "max_tokens must be at least 1", self.max_tokens)
        if self.logprobs is not None:
            _require(
                0 <= self.logprobs <= MAX_LOGPROBS, f"logprobs must be between 0 and {MAX_LOGPROBS}", self.logprobs
            )
        hints = self.hints
        opener = () if hints.opener is None else (hints.opener,)
        for position in (*hints.explicit, *opener, *hints.structural, *hints.automatic, *hints.message_boundaries):
            _require(1 <= position <= len(self.tokens), "a hint's position must lie inside the prompt", position)


@dataclass(frozen=True)
class Started:
    """The request runs; how many of its prompt tokens are skipped is decided now."""

    cached_tokens: int


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities before any temperature or cut: of the token drawn, and ``(id, log-probability)`` of the most
    likely ones, best first."""

    drawn: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class NewTokens:
    """Tokens that were drawn; ``logprobs`` has one entry for each if the request asked for them, else none."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The answer is complete, or was ended through its stream."""

    reason: FinishReason
    usage: Usage


@dataclass(frozen=True)
class Failed:
    """There is no answer, or no more of it. It has cost what ``usage`` says all the same."""

    error: EngineError
    usage: Usage


Event = Started | NewTokens | Finished | Failed


class TokenStream:
    """The events of one request, in order: at most one ``Started``, ``NewTokens``, then one ``Finished`` or ``Failed``.

    Written by the engine's worker, read by one reader on any thread. ``notify`` is called on the worker after each
    event and must return at once; an asynchronous reader schedules its own wake-up there and calls ``take``. One that
    raises is not called again.
    ``request_id`` is the number its report has.
    """

    def __init__(
        self, request_id: int, end: Callable[[int, FinishReason], None], notify: Callable[[], None] | None
    ) -> None:
        self.request_id = request_id
        self._end = end
        self._notify = notify
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._ended = False

    def take(self) -> list[Event]:
        """The events that came since the last call; never waits."""
        with self._changed:
            events = list(self._events)
            self._events.clear()
            return events

    def __iter__(self) -> Iterator[Event]:
        """Wait for events and yield them up to and including the last; nothing once that has been read."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._events or self._ended)
                if not self._events:
                    return
                event = self._events.popleft()
            yield event
            if isinstance(event, Finished | Failed):
                return

    def cancel(self) -> None:
        """End the request soon: its reader wants no more. A last event still comes. No effect after the end."""
        self._end(self.request_id, "cancelled")

    def stop(self) -> None:
        """End the request soon, for the answer is complete, say at a stop string; else as ``cancel``."""
        self._end(self.request_id, "stop")

    def put(self, event: Event) -> None:
        """Append an event (the engine only). Nothing comes after the last one."""
        with self._changed:
            if self._ended:
                return
            self._ended = isinstance(event, Finished | Failed)
            self._events.append(event)
            self._changed.notify_all()
        try:
            if self._notify is not None:
                self._notify()
        except Exception:
            # A reader's fault is its own; the worker has others to serve.
            self._notify = None
            logger.exception("request %d: its notify failed and is not called again", self.request_id)


def _require(holds: bool, constraint: str, value: object) -> None:
    if not holds:
        raise RequestError(f"{constraint}, got {value!r}")
