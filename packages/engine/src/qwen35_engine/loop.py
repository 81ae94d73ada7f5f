"""The engine's loop without its thread: poll, admit, step, publish. Synchronous, so that tests drive it turn by turn.

A turn settles the copies that have landed, starts waiting requests, brings back to the device what the first that goes
on waiting will need, then runs one step. Tokens leave through each request's stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import torch

from prefix_index import Readiness
from qwen35_kernels import BLOCK_TOKENS

from .admission import Admission
from .cache import AdmissionQuote, PrefixCache
from .errors import EngineError, ExecutionError, QueueTimeout, RequestError
from .metrics import Accounts, FinishReason, RequestListener
from .options import EffectiveOptions
from .request import Started
from .sampling import Sampler
from .scheduler import plan_step
from .sequence import Sequence
from .step import Model, StepRunner, concerns_all, failure

__all__ = ["Loop"]


class Loop:
    """The sequences that run, the line of those that wait, the cache and the model. One thread at a time.

    Attributes:
        cache: the binding between tokens and pages.
        accounts: what ended requests add up to.
        admission: those that wait.
        running: those that have a lane, in the order of their admission.
        runner: runs the steps.
    """

    def __init__(
        self,
        *,
        model: Model,
        cache: PrefixCache,
        sampler: Sampler,
        options: EffectiveOptions,
        device: torch.device,
        on_request: RequestListener | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_request`` is called with the report of each request that ends, just before its stream is told. ``clock``
        gives seconds and never goes back."""
        self.cache = cache
        self.accounts = Accounts(on_request)
        self.admission = Admission(cache, options)
        self.running: list[Sequence] = []
        self.runner = StepRunner(model=model, cache=cache, sampler=sampler, device=device, clock=clock)
        self._options = options
        self._clock = clock

    @property
    def num_prefilling(self) -> int:
        """Of those running, how many are still in their prompt. May be asked from any thread."""
        return sum(sequence.in_prompt for sequence in list(self.running))

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.admission)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Put requests at the end of the line."""
        self.admission.add(sequences)

    def end(self, reasons: Mapping[int, FinishReason]) -> None:
        """End these requests, by id, wherever they are; ids of none are ignored."""
        for sequence in (*self.admission, *self.running):
            if sequence.request_id in reasons:
                self._close(sequence, reasons[sequence.request_id])

    def turn(self) -> None:
        """Settle copies, admit, step.

        Raises:
            CopyFailed: a copy failed; nothing can go on.
            Exception: a step failed for which no single sequence can be blamed; see ``recover``.
        """
        self.poll()
        self.admit()
        self.step()

    def poll(self) -> None:
        """Settle the copies that have landed. Never waits.

        Raises:
            CopyFailed: one failed; nothing can go on.
        """
        self.cache.transfers.poll()
        for sequence in self.running:
            if sequence.restore is not None and sequence.restore.done():
                sequence.times.land(self._clock())

    def admit(self) -> None:
        """Answer the requests that have waited too long, start those that can, and prefetch for the next."""
        for sequence in self.admission.expired(self._clock()):
            seconds = self._options.pending_timeout_seconds
            self._close(sequence, QueueTimeout(f"no place within {seconds:g} seconds"))
        while (following := self.admission.next(self.running)) is not None:
            self._start(*following)
        self.admission.prefetch()

    def _start(self, sequence: Sequence, quote: AdmissionQuote) -> None:
        """Give the first of the line its lane. Where something raises, it is either in the line or in a lane."""
        if quote.readiness is not Readiness.READY:
            self._close(sequence, RequestError(f"the request needs {quote.blocks} blocks, more than there are"))
            return
        taps = self.admission.plan_taps(sequence, quote)
        try:
            self.cache.lanes.start(sequence, quote)
        except Exception as error:
            if concerns_all(error):
                raise
            self._close(sequence, failure(sequence, "the admission", error))
            return
        sequence.taps = taps
        sequence.times.admitted = self._clock()
        self.running.append(sequence)
        self.admission.remove(sequence)
        sequence.stream.put(Started(sequence.frontier))

    def step(self) -> None:
        """Compute one chunk of a prompt, then one token of every sequence past its own."""
        plan = plan_step(self.running, prefill_chunk=self._options.prefill_chunk, block_tokens=BLOCK_TOKENS)
        for sequence, ending in self.runner.run(plan):
            self._close(sequence, ending)

    def _close(self, sequence: Sequence, ending: FinishReason | EngineError) -> None:
        """The one way out of the line or of a lane: first the memory, then the books, then the stream."""
        if sequence.row is None:
            self.admission.remove(sequence)
        else:
            if isinstance(ending, EngineError):
                self.cache.abandon(sequence)
            else:
                self.cache.finish(sequence)
            self.running.remove(sequence)
        sequence.close(ending, self._clock(), settle=self.accounts.settle)

    def recover(self, error: Exception) -> None:
        """Answer every request and empty the cache, after a failure that no single sequence can be blamed for.

        Raises:
            CopyFailed, RuntimeError: not even that can be done; the engine has to end.
        """
        running = list(self.running)
        self.fail_all(ExecutionError(f"the engine had to start afresh: {type(error).__name__}"))
        self.cache.empty(running)

    def fail_all(self, error: EngineError) -> None:
        """Tell every open request that it ends here. The cache is not touched any more."""
        open_requests = [*self.running, *self.admission]
        self.running.clear()
        for sequence in self.admission:
            self.admission.remove(sequence)
        for sequence in open_requests:
            sequence.close(error, self._clock(), settle=self.accounts.settle)
