"""The engine's loop without its thread: admit, step, publish. Synchronous, so that tests can drive it step by step.

A turn settles the copies that have landed, starts waiting requests, brings back to the device what the first that goes
on waiting will need, computes one prefill chunk of the oldest prompt still being computed, then one token of every lane
past its prompt. Tokens leave through each request's stream.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from prefix_index import Readiness, Tap, plan_taps
from qwen35_kernels import BLOCK_TOKENS, log_probabilities
from slab_pool import CopyFailed

from .accounting import Accounts, RequestListener, RequestReport, Stopwatch
from .cache import AdmissionQuote, PrefixCache
from .cache.coalesce import deepest_wait
from .errors import EngineError, ExecutionError, QueueTimeout, RequestError
from .lane import Job, Lane
from .options import OUTPUT_WINDOW_TOKENS, EffectiveOptions
from .request import (
    Failed,
    Finished,
    FinishReason,
    NewTokens,
    Started,
    TokenLogprobs,
)
from .sampling import Sampler, SamplingRow
from .scheduler import LaneView, PrefillChunk, plan_step
from .usage import MissReason, Reuse, Usage

__all__ = ["Core", "Model"]

logger = logging.getLogger(__name__)


class Model(Protocol):
    """What the loop needs of a model; see ``model.qwen35.Qwen35Model`` for the contract of each call."""

    def prefill(
        self,
        *,
        tokens: Tensor,
        base: int,
        block_table: Tensor,
        slot: int,
        taps: Sequence[tuple[int, int]] = (),
        before_layer: Callable[[int], None] | None = None,
    ) -> Tensor: ...

    def decode(self, *, tokens: Tensor, positions: Tensor, block_tables: Tensor, slots: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Core:
    """Lanes, the line of waiting requests, cache and model. One thread at a time."""

    def __init__(
        self,
        *,
        model: Model,
        cache: PrefixCache,
        sampler: Sampler,
        options: EffectiveOptions,
        device: torch.device,
        on_end: Callable[[], None] = lambda: None,
        on_request: RequestListener | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_end`` is called for each request that ends, just before its stream is told, and ``on_request`` with its
        report. ``clock`` gives seconds and never goes back."""
        self.cache = cache
        self.accounts = Accounts(on_request)
        self._model = model
        self._sampler = sampler
        self._options = options
        self._device = device
        self._on_end = on_end
        self._clock = clock
        self._waiting: deque[Job] = deque()
        self._lanes: dict[int, Lane] = {}
        self._next_lane = 0

    @property
    def num_running(self) -> int:
        return len(self._lanes)

    @property
    def num_prefilling(self) -> int:
        """Of those running, how many are still in their prompt. May be asked from any thread."""
        return sum(lane.in_prompt for lane in list(self._lanes.values()))

    @property
    def has_work(self) -> bool:
        return bool(self._lanes or self._waiting)

    def add(self, jobs: Iterable[Job]) -> None:
        """Put requests at the end of the line."""
        self._waiting.extend(jobs)

    def end(self, reasons: Mapping[int, FinishReason]) -> None:
        """End these requests, by id, wherever they are; ids of none are ignored."""
        for job in [job for job in self._waiting if job.stream.request_id in reasons]:
            self._waiting.remove(job)
            self._end(job, reasons[job.stream.request_id])
        for lane in [lane for lane in self._lanes.values() if lane.job.stream.request_id in reasons]:
            self._finish(lane, reasons[lane.job.stream.request_id])

    def recover(self, error: Exception) -> None:
        """Answer every request and empty the cache, after a failure that no single lane can be blamed for.

        Raises:
            CopyFailed, RuntimeError: not even that can be done; the engine has to end.
        """
        lanes = [lane.memory for lane in self._lanes.values()]
        self.fail_all(ExecutionError(f"the engine had to start afresh: {type(error).__name__}"))
        self.cache.empty(lanes)

    def fail_all(self, error: EngineError) -> None:
        """Tell every open request that it ends here. The cache is not touched any more."""
        jobs, lanes = list(self._waiting), list(self._lanes.values())
        self._waiting.clear()
        self._lanes.clear()
        for lane in lanes:
            self._end(lane.job, error, lane)
        for job in jobs:
            self._end(job, error)

    def turn(self) -> None:
        """Settle copies, admit, step.

        Raises:
            CopyFailed: a copy failed; nothing can go on.
            Exception: a step failed for which no single lane can be blamed; see ``recover``.
        """
        self.cache.poll()
        self._note_landings()
        self._expire()
        self._admit()
        self._prefetch_next()
        self._step()

    def _note_landings(self) -> None:
        for lane in self._lanes.values():
            restore = lane.memory.restore
            if restore is not None and lane.times.landed is None and restore.done():
                lane.times.landed = self._clock()

    def _expire(self) -> None:
        """Answer whoever has waited too long. The line is in the order of arrival, so the first ones are the oldest."""
        latest = self._clock() - self._options.pending_timeout_seconds
        while self._waiting and self._waiting[0].submitted < latest:
            seconds = self._options.pending_timeout_seconds
            self._end(self._waiting.popleft(), QueueTimeout(f"no place within {seconds:g} seconds"))

    def _admit(self) -> None:
        """Start waiting requests in their order; the first that finds no room makes the rest wait too."""
        while self._waiting and len(self._lanes) < self._options.max_concurrency:
            job = self._waiting[0]
            total_tokens = len(job.tokens) + min(job.max_tokens, OUTPUT_WINDOW_TOKENS)
            quote = self.cache.quote(job.prompt, total_tokens=total_tokens)
            if not self._lanes and self._held_up(quote) and self.cache.drain():
                # Only copies of lanes that have ended were in the way, and they have just landed.
                quote = self.cache.quote(job.prompt, total_tokens=total_tokens)
            if self._lanes and (self._held_up(quote) or self._waits_for_sibling(job, quote)):
                return
            if quote.readiness is Readiness.READY:
                self._start(job, quote)
            else:
                self._waiting.popleft()
                self._end(job, RequestError(f"the request needs {quote.blocks} blocks, more than there are"))

    def _held_up(self, quote: AdmissionQuote) -> bool:
        """Whether something that is on its way will make room, or let the request skip more than it could now."""
        if quote.readiness is Readiness.READY:
            return self.cache.lands_soon(quote)
        return quote.readiness is Readiness.TEMPORARILY_BLOCKED

    def _start(self, job: Job, quote: AdmissionQuote) -> None:
        """Give the first of the line its lane. Whatever raises finds it either in the line or in a lane."""
        taps = self._plan_taps(job, quote)
        try:
            memory = self.cache.start(quote)
        except Exception as error:
            if _concerns_all(error):
                raise
            self._waiting.popleft()
            self._end(job, _failure(job, "the admission", error))
            return
        times = Stopwatch(job.submitted, admitted=self._clock())
        lane = Lane(self._next_lane, job, memory, job.tokens[:], memory.frontier, taps, times)
        self._lanes[lane.number] = lane
        self._waiting.popleft()
        self._next_lane += 1
        job.stream.put(Started(memory.frontier))

    def _prefetch_next(self) -> None:
        """Use the time in which the first of the line waits for a lane or for pages."""
        if self._waiting and self._waiting[0].prompt is not None:
            self.cache.prefetch(self._waiting[0].prompt)

    def _plan_taps(self, job: Job, quote: AdmissionQuote) -> list[Tap]:
        if quote.match is None:
            return []
        source = quote.source
        planned = plan_taps(
            len(job.tokens),
            source.frontier if source is not None else 0,
            job.request.hints,
            limits=self._options.taps,
            existing=[candidate.frontier for candidate in quote.match.candidates],
            matched_tokens=quote.match.matched_tokens,
            resumed=source.kind if source is not None else None,
        )
        return list(planned)

    def _waits_for_sibling(self, job: Job, quote: AdmissionQuote) -> bool:
        """Whether a lane that is computing the same prefix will soon have a snapshot that is worth waiting for.

        The waiting request holds nothing. If the lane ends or passes the place without one, nobody waits any more.
        """
        if job.prompt is None or quote.readiness is not Readiness.READY:
            return False
        lanes = [lane for lane in self._lanes.values() if lane.job.prompt is not None and lane.in_prompt]
        chosen = deepest_wait(
            job.prompt,
            quote.source.frontier if quote.source is not None else 0,
            [lane.as_sibling() for lane in lanes],
            cost=self.cache.cost,
            limit_seconds=self._options.pending_timeout_seconds,
        )
        if chosen is None:
            return False
        number, tap = chosen
        lane = lanes[number]
        lane.taps = [tap, *(other for other in lane.taps if other.position != tap.position)]
        return True

    def _step(self) -> None:
        views = [
            LaneView(
                lane=lane.number,
                computed=lane.computed,
                prompt_tokens=lane.prompt_tokens,
                restoring=lane.memory.restore is not None and not lane.memory.restore.done(),
            )
            for lane in self._lanes.values()
        ]
        plan = plan_step(views, prefill_chunk=self._options.prefill_chunk, block_tokens=BLOCK_TOKENS)
        if plan.prefill is not None:
            self._prefill(self._lanes[plan.prefill.lane], plan.prefill)
        if plan.decode:
            self._decode([self._lanes[number] for number in plan.decode])

    # ---- prefill ------------------------------------------------------------------------------------------------

    def _prefill(self, lane: Lane, chunk: PrefillChunk) -> None:
        memory = lane.memory
        taps = self.cache.claim_taps(memory, [tap for tap in lane.taps if tap.position <= chunk.end])
        lane.taps = [tap for tap in lane.taps if tap.position > chunk.end]
        restore = memory.restore
        try:
            if restore is not None:
                restore.wait_for_prelude()
            hidden = self._model.prefill(
                tokens=self._to_device(lane.tokens[chunk.begin : chunk.end]),
                base=chunk.begin,
                block_table=self.cache.block_tables[memory.row],
                slot=memory.slot,
                taps=[(tap.position, tap.slot) for tap in taps],
                before_layer=None if restore is None else restore.wait_for_layer,
            ).unsqueeze(0)
            _require_finite(hidden)
        except Exception as error:
            if _concerns_all(error):
                raise
            self._fail(lane, error)
            return
        memory.restore = None  # every layer has waited for its part
        if restore is not None and lane.times.landed is None:
            lane.times.landed = self._clock()
        lane.computed = chunk.end
        self.cache.commit(memory, lane.tokens, lane.computed)
        for tap in taps:
            self.cache.publish_tap(memory, lane.tokens, tap)
            lane.last_capture = tap.position
        if lane.computed == lane.prompt_tokens:
            self._extend([lane], hidden)

    # ---- decode -------------------------------------------------------------------------------------------------

    def _decode(self, lanes: Sequence[Lane]) -> None:
        running = []
        for lane in lanes:
            if self.cache.grow(lane.memory, lane.computed + 1):
                running.append(lane)
            else:
                self._finish(lane, "length")
        if not running:
            return
        width = max(lane.computed // BLOCK_TOKENS for lane in running) + 1
        # One transfer for all four.
        tokens, positions, rows, slots = torch.tensor(
            [
                [lane.tokens[lane.computed] for lane in running],
                [lane.computed for lane in running],
                [lane.memory.row for lane in running],
                [lane.memory.slot for lane in running],
            ],
            device=self._device,
        ).unbind()
        try:
            hidden = self._model.decode(
                tokens=tokens, positions=positions, block_tables=self.cache.block_tables[rows, :width], slots=slots
            )
        except Exception as error:
            if len(running) > 1 or _concerns_all(error):
                raise  # nobody knows whose fault it is, nor what else it has touched
            self._fail(running[0], error)
            return
        sound = torch.isfinite(hidden).all(dim=-1).tolist()
        if not all(sound):
            for lane, fine in zip(running, sound, strict=True):
                if not fine:
                    self._fail(lane, ArithmeticError("the hidden state is not finite"))
            hidden = hidden[torch.tensor(sound, device=self._device)]
            running = [lane for lane, fine in zip(running, sound, strict=True) if fine]
        for lane in running:
            lane.computed += 1
            self.cache.commit(lane.memory, lane.tokens, lane.computed)
        if running:
            self._extend(running, hidden)

    def _extend(self, lanes: Sequence[Lane], hidden: Tensor) -> None:
        """Draw one token for each lane from its last hidden state and hand it out."""
        rows = [
            SamplingRow(
                lane.job.stream.request_id,
                lane.job.request.sampling,
                lane.job.seed,
                lane.completion_tokens,
            )
            for lane in lanes
        ]
        logits = self._model.logits(hidden)
        ids = self._sampler(logits, rows)
        now = self._clock()
        for i, (lane, token) in enumerate(zip(lanes, ids, strict=True)):
            lane.tokens.append(token)
            lane.times.token(now)
            wanted = lane.job.request.logprobs
            lane.job.stream.put(NewTokens((token,), () if wanted is None else (_logprobs(logits[i], token, wanted),)))
            if token in lane.job.request.stop_token_ids:
                self._finish(lane, "stop")
            elif lane.completion_tokens >= lane.job.max_tokens:
                self._finish(lane, "length")

    # ---- ends ---------------------------------------------------------------------------------------------------

    def _finish(self, lane: Lane, reason: FinishReason) -> None:
        self.cache.finish(lane.memory, lane.tokens, lane.computed)
        del self._lanes[lane.number]
        self._end(lane.job, reason, lane)

    def _fail(self, lane: Lane, error: Exception) -> None:
        """End one lane whose pass failed; nothing of that pass is published."""
        self.cache.abandon(lane.memory)
        del self._lanes[lane.number]
        self._end(lane.job, _failure(lane.job, "the forward pass", error), lane)

    def _end(self, job: Job, ending: FinishReason | EngineError, lane: Lane | None = None) -> None:
        """Close the books on a request and tell its stream; ``lane`` is what it ran in, if it got so far."""
        usage = self._usage_waiting(job) if lane is None else self._usage(lane)
        self.accounts.settle(
            RequestReport(
                request_id=job.stream.request_id,
                outcome=ending if isinstance(ending, str) else "failed",
                error=None if isinstance(ending, str) else type(ending).__name__,
                executed=lane is not None and lane.computed > lane.memory.frontier,
                usage=usage,
            )
        )
        self._on_end()
        job.stream.put(Finished(ending, usage) if isinstance(ending, str) else Failed(ending, usage))

    def _usage(self, lane: Lane) -> Usage:
        return Usage(
            prompt_tokens=lane.prompt_tokens,
            completion_tokens=lane.completion_tokens,
            reuse=lane.memory.reuse,
            timing=lane.times.read(self._clock(), completion_tokens=lane.completion_tokens),
            taps_taken=lane.memory.taps_taken,
            taps_skipped=lane.memory.taps_skipped,
        )

    def _usage_waiting(self, job: Job) -> Usage:
        """Of a request that was never admitted."""
        return Usage(
            prompt_tokens=len(job.tokens),
            completion_tokens=0,
            reuse=Reuse(reason=MissReason.DISABLED if job.prompt is None else MissReason.NOT_ADMITTED),
            timing=Stopwatch(job.submitted).read(self._clock(), completion_tokens=0),
        )

    def _to_device(self, tokens: array[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64).to(self._device)


def _logprobs(logits: Tensor, drawn: int, wanted: int) -> TokenLogprobs:
    """Of one row of logits, ``[vocab]``."""
    row = log_probabilities(logits=logits.unsqueeze(0))[0]
    best = row.topk(min(wanted, len(row)))
    return TokenLogprobs(float(row[drawn]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))


def _failure(job: Job, what: str, error: Exception) -> ExecutionError:
    logger.error("request %d: %s failed: %s", job.stream.request_id, what, error)
    return ExecutionError(f"{what} failed: {type(error).__name__}")


def _concerns_all(error: Exception) -> bool:
    """Whether more than one request is in doubt: what was copied, or whether there is memory for anything."""
    return isinstance(error, CopyFailed | MemoryError | torch.OutOfMemoryError)


def _require_finite(hidden: Tensor) -> None:
    if not bool(torch.isfinite(hidden).all()):
        raise ArithmeticError("the hidden state is not finite")
