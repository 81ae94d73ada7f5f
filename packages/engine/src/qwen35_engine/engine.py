"""The engine as its users see it: load a folder, submit prompts, read streams, close."""

from __future__ import annotations

import secrets
import threading
import time
from array import array
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType

from prefix_index import Stats as IndexStats

from .cache import CacheStats
from .calibration import remember
from .checkpoint.config import ModelConfig, read_config
from .errors import ContextLengthExceeded, EngineError, QueueFull, RequestError
from .ledger import Ledger, LedgerEntry, bytes_of, free_bytes
from .metrics import RequestListener, Stopwatch, Totals
from .model.weights import ModelWeights, load_weights
from .options import EngineOptions
from .parts import EngineParts
from .request import GenerationRequest, TokenStream
from .sampling import Sampler
from .sequence import Sequence

__all__ = ["Engine", "EngineStats"]

_REFUSALS: dict[type[EngineError], str] = {
    QueueFull: "queue_full",
    ContextLengthExceeded: "too_long",
    RequestError: "invalid",
}


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """What runs, what waits, what ended requests add up to, the cache's gauges, and the index's gauges and counters.

    Of those running, ``prefilling`` are still in their prompt. ``refused`` counts what ``submit`` and ``require_room``
    turned away, by reason: ``queue_full``, ``too_long``, ``invalid``; no total has it. ``unheard`` counts reports that
    the engine's listener failed to take.
    """

    running: int
    prefilling: int
    waiting: int
    refused: Mapping[str, int]
    totals: Totals
    unheard: int
    cache: CacheStats
    index: IndexStats


class Engine:
    """One model on one device. Thread-safe: any thread may submit; one worker thread computes.

    Use as a context manager, or call ``close``.

    Attributes:
        config: the model's shape.
        options: every choice in force.
        parts: what it is made of, for tests and tools. They belong to the worker: while it runs, they may be read at
            best.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        options: EngineOptions | None = None,
        *,
        sampler: Sampler | None = None,
        on_request: RequestListener | None = None,
    ) -> None:
        """Run ``weights`` that lie on their device already; ``options.device`` and ``dtype`` have no say any more.

        Args:
            config: the model's shape.
            weights: on the device to run on.
            options: what to choose; the rest is derived.
            sampler: draws tokens instead of the engine's own.
            on_request: called on the worker's thread with the report of each request that ends, before its stream is
                told; must return at once.

        Raises:
            OptionError: sizes that contradict each other, the model or the memory.
        """
        self.parts = parts = EngineParts.build(
            config, weights, options or EngineOptions(), sampler=sampler, on_request=on_request
        )
        self.config = config
        self.options = parts.options
        self._ids = count(1)
        self._refused = dict.fromkeys(_REFUSALS.values(), 0)
        self._refusing = threading.Lock()
        parts.worker.start()

    @classmethod
    def from_folder(
        cls,
        folder: Path | str,
        options: EngineOptions | None = None,
        *,
        sampler: Sampler | None = None,
        on_request: RequestListener | None = None,
    ) -> Engine:
        """Load a model folder in the Hugging Face layout and run it; see ``Engine`` for the arguments.

        Raises:
            CheckpointError: the folder cannot be served.
            OptionError: the options do not fit the machine or the model.
        """
        options = options or EngineOptions()
        folder = Path(folder)
        device = options.resolve_device()
        config = read_config(folder)
        dtype = options.resolve_dtype(config, device)
        weights = load_weights(folder, config, device=device, dtype=dtype)
        return cls(config, weights, options, sampler=sampler, on_request=on_request)

    def submit(self, request: GenerationRequest, *, notify: Callable[[], None] | None = None) -> TokenStream:
        """Queue a request and return its stream at once.

        Args:
            request: what to continue.
            notify: called on the worker's thread after each event of the stream; must return at once.

        Raises:
            ContextLengthExceeded: the prompt leaves no room for a token.
            RequestError: a token outside the vocabulary.
            QueueFull: too many requests wait.
            EngineClosed: the engine is closed.
        """
        with self._refusals_counted():
            return self._submit(request, notify)

    def require_room(self) -> None:
        """Refuse a request before any work on its prompt, where ``submit`` would refuse it for want of room.

        A refusal counts as one of ``submit``'s. The room is not reserved: ``submit`` may still find none.

        Raises:
            QueueFull: too many requests wait.
            EngineClosed: the engine is closed.
        """
        with self._refusals_counted():
            self.parts.worker.require_room()

    @contextmanager
    def _refusals_counted(self) -> Iterator[None]:
        try:
            yield
        except (RequestError, QueueFull) as error:
            with self._refusing:
                self._refused[_REFUSALS[type(error)]] += 1
            raise

    def _submit(self, request: GenerationRequest, notify: Callable[[], None] | None) -> TokenStream:
        tokens = self._checked_tokens(request.tokens)
        room = self.options.max_context - len(tokens)
        reuse = request.reuse and self.options.prefix_reuse
        stream = TokenStream(next(self._ids), self.parts.worker.end, notify)
        seed = request.sampling.seed
        self.parts.worker.submit(
            Sequence(
                stream=stream,
                request=request,
                tokens=tokens,
                # Hashing is work of the caller's thread, so that a long prompt does not hold up the others.
                prompt=self.parts.cache.index.prepare(tokens, namespace=request.namespace) if reuse else None,
                max_tokens=room if request.max_tokens is None else min(request.max_tokens, room),
                seed=secrets.randbits(63) if seed is None else seed,
                times=Stopwatch(submitted=time.monotonic()),
            )
        )
        return stream

    def _checked_tokens(self, tokens: abc.Sequence[int]) -> array[int]:
        if len(tokens) >= self.options.max_context:
            raise ContextLengthExceeded(prompt_tokens=len(tokens), limit_tokens=self.options.max_context)
        try:
            checked = array("i", tokens)
        except (OverflowError, TypeError) as error:
            raise RequestError(f"token ids must be integers below {self.config.vocab_size}: {error}") from error
        for worst in (min(checked), max(checked)):
            if not 0 <= worst < self.config.vocab_size:
                raise RequestError(f"token ids must be between 0 and {self.config.vocab_size - 1}, got {worst}")
        return checked

    @property
    def is_open(self) -> bool:
        """Whether requests are taken: False after ``close`` and after a fault of the engine's own."""
        return self.parts.worker.is_open

    def stats(self) -> EngineStats:
        """Gauges and totals now; on a busy engine gauges may be a step apart."""
        worker = self.parts.worker.stats()
        return EngineStats(
            running=worker.running,
            prefilling=worker.prefilling,
            waiting=worker.waiting,
            refused=dict(self._refused),
            totals=worker.totals,
            unheard=worker.unheard,
            cache=self.parts.cache.stats(),
            index=self.parts.cache.index.stats(),
        )

    def ledger(self) -> Ledger:
        """Where every byte went that the engine holds now. Only the workspace grows after the start, with the longest
        chunk and the most lanes it has seen."""
        parts = self.parts
        device = {
            "weights": bytes_of(parts.weights),
            "KV pages": bytes_of(parts.memory.pages),
            "state slots": bytes_of(parts.memory.states),
            "tables": bytes_of(parts.cache.lanes.block_tables, parts.model.frequencies),
            "workspace": parts.model.workspace_bytes,
        }
        slabs = parts.host.capacity_bytes if parts.host is not None else 0
        return Ledger(
            entries=(
                *(LedgerEntry(what, "device", num_bytes) for what, num_bytes in device.items()),
                LedgerEntry("Host slabs", "host", slabs),
            ),
            free_bytes=free_bytes(parts.weights.device),
        )

    def close(self) -> None:
        """Stop the worker. Requests still open fail with ``EngineClosed``. May be called twice."""
        self.parts.worker.close()
        if self.parts.host is not None:
            self.parts.host.close()
        if self.parts.calibration is not None:
            remember(*self.parts.calibration, self.parts.cache.copy_rate)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
