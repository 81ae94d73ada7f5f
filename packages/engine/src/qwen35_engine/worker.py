"""The one thread that changes anything: drain the inbox, admit, step, publish.

A step is one prefill chunk of the oldest prompt still being computed, then one decode round of all lanes past their
prompt. Tokens leave through each request's stream.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefix_index import Prompt
from qwen35_kernels import BLOCK_TOKENS
from slab_pool import CopyFailed

from .cache import LaneMemory, PrefixCache
from .errors import EngineClosed, EngineError, ExecutionError, QueueFull, RequestError
from .model.qwen35 import Qwen35Model
from .options import OUTPUT_WINDOW_TOKENS, EffectiveOptions
from .request import (
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    NewTokens,
    Started,
    TokenStream,
    Usage,
)
from .sampling import Sampler, SamplingRow
from .scheduler import LaneView, PrefillChunk, plan_step

__all__ = ["Job", "Worker", "WorkerStats"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Job:
    """A request on its way to the worker. ``prompt`` is None where the request does not use the cache."""

    stream: TokenStream
    request: GenerationRequest
    tokens: array[int]
    prompt: Prompt | None
    max_tokens: int
    seed: int


@dataclass(eq=False)
class _Lane:
    """A running sequence. ``tokens`` are the prompt and every token drawn; the first ``computed`` have KV and state."""

    number: int
    job: Job
    memory: LaneMemory
    tokens: array[int]
    computed: int

    @property
    def prompt_tokens(self) -> int:
        return len(self.job.tokens)

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens


@dataclass(frozen=True)
class WorkerStats:
    running: int
    waiting: int


class Worker:
    """Owns lanes, cache and model. ``submit``, ``cancel``, ``close``, ``stats`` may be called from any thread."""

    def __init__(
        self,
        *,
        model: Qwen35Model,
        cache: PrefixCache,
        sampler: Sampler,
        options: EffectiveOptions,
        device: torch.device,
        threads: int | None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._options = options
        self._device = device
        self._threads = threads
        self._changed = threading.Condition()
        self._inbox: deque[Job] = deque()
        self._cancelled: set[int] = set()
        self._closing = False
        self._waiting: deque[Job] = deque()
        self._lanes: dict[int, _Lane] = {}
        self._next_lane = 0
        self._thread = threading.Thread(target=self._run, name="qwen35-worker", daemon=True)

    # ---- from any thread ----------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a request.

        Raises:
            QueueFull: ``max_pending`` requests wait already.
            EngineClosed: the worker is stopping or has stopped.
        """
        with self._changed:
            if self._closing:
                raise EngineClosed("the engine is closed")
            waiting = len(self._inbox) + len(self._waiting)
            room = self._options.max_pending + self._options.max_concurrency - len(self._lanes)
            if waiting >= room:
                raise QueueFull(f"at most {self._options.max_pending} requests may wait, got one more")
            self._inbox.append(job)
            self._changed.notify()

    def cancel(self, request_id: int) -> None:
        with self._changed:
            if not self._closing:
                self._cancelled.add(request_id)
                self._changed.notify()

    def close(self) -> None:
        """Stop after the current step; every request still open fails with ``EngineClosed``."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def is_open(self) -> bool:
        with self._changed:
            return not self._closing

    def stats(self) -> WorkerStats:
        with self._changed:
            return WorkerStats(running=len(self._lanes), waiting=len(self._inbox) + len(self._waiting))

    # ---- the loop -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        reason: EngineError = EngineClosed("the engine was closed before the answer was complete")
        try:
            while self._drain():
                self._cache.poll()
                self._admit()
                self._step()
            self._cache.drain()
        except Exception as error:
            # Nothing a request does may end the loop; what gets here is a fault of the engine's own.
            logger.exception("the engine's worker failed and stops")
            reason = EngineClosed(f"the engine failed: {type(error).__name__}")
        with self._changed:
            self._closing = True
            left = [*self._inbox, *self._waiting, *(lane.job for lane in self._lanes.values())]
            self._inbox.clear()
            self._waiting.clear()
            self._lanes.clear()
        for job in left:
            job.stream.put(Failed(reason))

    def _drain(self) -> bool:
        """Take what came in; wait while there is nothing to do. False: stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._inbox or self._cancelled or self._has_work())
            if self._closing:
                return False
            self._waiting.extend(self._inbox)
            self._inbox.clear()
            cancelled, self._cancelled = self._cancelled, set()
            dropped = [job for job in self._waiting if job.stream.request_id in cancelled]
            for job in dropped:
                self._waiting.remove(job)
        for job in dropped:
            usage = Usage(prompt_tokens=len(job.tokens), cached_tokens=0, completion_tokens=0)
            job.stream.put(Finished("cancelled", usage))
        for lane in [lane for lane in self._lanes.values() if lane.job.stream.request_id in cancelled]:
            self._finish(lane, "cancelled")
        return True

    def _has_work(self) -> bool:
        return bool(self._lanes or self._waiting)

    def _admit(self) -> None:
        """Start waiting requests in their order; the first that finds no room makes the rest wait too."""
        while self._waiting and len(self._lanes) < self._options.max_concurrency:
            job = self._waiting[0]
            total_tokens = len(job.tokens) + min(job.max_tokens, OUTPUT_WINDOW_TOKENS)
            memory = self._cache.admit(job.prompt, total_tokens=total_tokens)
            if memory is None and not self._lanes and self._cache.drain():
                # Only copies hold what is missing, and they have just landed.
                memory = self._cache.admit(job.prompt, total_tokens=total_tokens)
            if memory is None and self._lanes:
                return
            with self._changed:
                self._waiting.popleft()
                if memory is None:
                    # Nothing runs, so nothing will ever be given back: waiting would not end.
                    job.stream.put(Failed(RequestError("the request does not fit an empty cache")))
                    continue
                lane = _Lane(self._next_lane, job, memory, job.tokens[:], memory.frontier)
                self._lanes[lane.number] = lane
                self._next_lane += 1
            job.stream.put(Started(memory.frontier))

    def _step(self) -> None:
        views = [
            LaneView(lane=lane.number, computed=lane.computed, prompt_tokens=lane.prompt_tokens)
            for lane in self._lanes.values()
        ]
        plan = plan_step(views, prefill_chunk=self._options.prefill_chunk, block_tokens=BLOCK_TOKENS)
        if plan.prefill is not None:
            self._prefill(self._lanes[plan.prefill.lane], plan.prefill)
        if plan.decode:
            self._decode([self._lanes[number] for number in plan.decode])

    # ---- prefill ------------------------------------------------------------------------------------------------

    def _prefill(self, lane: _Lane, chunk: PrefillChunk) -> None:
        memory = lane.memory
        wanted = [p for p in lane.job.request.tap_positions if chunk.begin < p <= chunk.end]
        taps = self._cache.claim_taps(memory, wanted)
        restore = memory.restore
        try:
            if restore is not None:
                restore.wait_for_prelude()
            hidden = self._model.prefill(
                tokens=self._to_device(lane.tokens[chunk.begin : chunk.end]),
                base=chunk.begin,
                block_table=self._cache.block_tables[memory.row],
                slot=memory.slot,
                taps=[(tap.position, tap.slot) for tap in taps],
                before_layer=None if restore is None else restore.wait_for_layer,
            ).unsqueeze(0)
            _require_finite(hidden)
        except CopyFailed:
            raise  # what else was copied is in doubt as well: this ends the engine
        except Exception as error:
            self._cache.drop_taps(taps)
            self._fail(lane, error)
            return
        memory.restore = None  # every layer has waited for its part
        lane.computed = chunk.end
        self._cache.commit(memory, lane.tokens, lane.computed)
        for tap in taps:
            self._cache.publish_tap(memory, lane.tokens, tap)
        if lane.computed == lane.prompt_tokens:
            self._extend([lane], hidden)

    # ---- decode -------------------------------------------------------------------------------------------------

    def _decode(self, lanes: Sequence[_Lane]) -> None:
        running = []
        for lane in lanes:
            if self._cache.grow(lane.memory, lane.computed + 1):
                running.append(lane)
            else:
                self._finish(lane, "length")
        if not running:
            return
        width = max(lane.computed // BLOCK_TOKENS for lane in running) + 1
        rows = torch.tensor([lane.memory.row for lane in running], device=self._device)
        try:
            hidden = self._model.decode(
                tokens=self._to_device(array("i", [lane.tokens[lane.computed] for lane in running])),
                positions=torch.tensor([lane.computed for lane in running], device=self._device),
                block_tables=self._cache.block_tables[rows, :width],
                slots=torch.tensor([lane.memory.slot for lane in running], device=self._device),
            )
        except Exception as error:
            for lane in running:
                self._fail(lane, error)
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
            self._cache.commit(lane.memory, lane.tokens, lane.computed)
        if running:
            self._extend(running, hidden)

    def _extend(self, lanes: Sequence[_Lane], hidden: Tensor) -> None:
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
        ids = self._sampler(self._model.logits(hidden), rows)
        for lane, token in zip(lanes, ids, strict=True):
            lane.tokens.append(token)
            lane.job.stream.put(NewTokens((token,)))
            if token in lane.job.request.stop_token_ids:
                self._finish(lane, "stop")
            elif lane.completion_tokens >= lane.job.max_tokens:
                self._finish(lane, "length")

    # ---- ends ---------------------------------------------------------------------------------------------------

    def _finish(self, lane: _Lane, reason: FinishReason) -> None:
        self._cache.finish(lane.memory, lane.tokens, lane.computed)
        self._remove(lane)
        lane.job.stream.put(Finished(reason, _usage(lane)))

    def _fail(self, lane: _Lane, error: Exception) -> None:
        """End one lane whose pass failed; nothing of that pass is published."""
        logger.error("request %d failed: %s", lane.job.stream.request_id, error)
        self._cache.abandon(lane.memory)
        self._remove(lane)
        lane.job.stream.put(Failed(ExecutionError(f"the forward pass failed: {type(error).__name__}")))

    def _remove(self, lane: _Lane) -> None:
        with self._changed:
            del self._lanes[lane.number]

    def _to_device(self, tokens: array[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64).to(self._device)


def _usage(lane: _Lane) -> Usage:
    return Usage(
        prompt_tokens=lane.prompt_tokens,
        cached_tokens=lane.memory.frontier,
        completion_tokens=lane.completion_tokens,
    )


def _require_finite(hidden: Tensor) -> None:
    if not bool(torch.isfinite(hidden).all()):
        raise ArithmeticError("the hidden state is not finite")
