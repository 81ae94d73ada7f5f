"""The copy stream of a CUDA device: a stream of its own, and events."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from slab_pool.batches import CopyBatch
from slab_pool.memory import Registrar
from slab_pool.streams import DEFAULT_MAX_IN_FLIGHT_BYTES, CopyStream
from slab_pool.tickets import Ticket, without_frames
from slab_pool.transports import (
    EnqueueCopy,
    Transport,
    Trial,
    choose_transport,
    enqueue_with_torch,
    find_memcpy_2d_async,
    runtime_transport,
)


class EventCompletion:
    """Progress of a batch that a device reports through events: one before the first copy, one after each part.

    A batch whose enqueuing failed has fewer part events, the error, and a `fence` behind what was enqueued
    before the failure: it is at rest when that has passed. Until then the batch is kept, for the device reads and
    writes its memory.
    """

    __slots__ = ("_batch", "_begin", "_events", "_fence", "_landed", "_num_parts", "error")

    def __init__(
        self, batch: CopyBatch, begin: Any, events: list[Any], fence: Any, error: BaseException | None
    ) -> None:
        self._batch: CopyBatch | None = batch
        self._num_parts = len(batch.parts)
        self._begin = begin
        self._events = events
        self._fence = fence
        self._landed = 0
        self.error = error

    def num_landed(self) -> int:
        landed = self._landed
        try:
            while landed < len(self._events) and self._events[landed].query():
                landed += 1
        except Exception as error:  # the device reports here what failed in any of its earlier work
            self._landed = landed
            self._fail(error)
        # Several threads may ask: each writes only what it has seen itself, so that none can count a part twice.
        self._landed = landed
        return landed

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = without_frames(error)
        # A device that fails a query answers no later one either; nothing more can be learnt from it.
        self._events = self._events[: self._landed]

    def finished(self) -> bool:
        if self._batch is not None and self._at_rest():
            self._batch = None
        return self._batch is None

    def _at_rest(self) -> bool:
        if self.error is None:
            return self.num_landed() == self._num_parts or self.error is not None
        if self._fence is None:
            return True
        try:
            return bool(self._fence.query())
        except Exception as error:
            self._fail(error)
            return True

    def wait(self, num_parts: int) -> None:
        if num_parts <= len(self._events):
            self._synchronize(self._events[num_parts - 1])
            self.num_landed()

    def wait_finished(self) -> None:
        if self.error is None:
            self._synchronize(self._events[-1])
            self.num_landed()
        elif self._fence is not None:
            self._synchronize(self._fence)

    def _synchronize(self, event: Any) -> None:
        try:
            event.synchronize()
        except Exception as error:
            self._fail(error)

    def wait_on(self, part: int, compute: Any) -> None:
        if part < len(self._events):
            compute.wait_event(self._events[part])

    def seconds(self) -> float:
        return float(self._begin.elapsed_time(self._events[-1])) / 1000.0

    def last_event(self) -> Any | None:
        """What another stream of the device has to wait for, or None where nothing is left to wait for."""
        return self._fence if self.error is not None else self._events[-1]


class CudaCopyStream(CopyStream):
    """`CopyStream` between page-locked Host memory and one CUDA device.

    It owns a non-blocking stream (from torch's pool), so no other stream orders it implicitly: `after` is a CUDA
    stream (everything queued there now), a CUDA event, or a ticket. `compute_stream()` is torch's current stream.

    Contiguous copies go through torch. For strided ones the first of these that proves asynchronous here is
    used: torch's own 2-D copy, the CUDA runtime's, one copy a row. `transport=` skips the trial. `cuda` (what
    `torch.cuda` offers), `contiguous` and `registrar` are seams for tests.

    Attributes:
        device: the CUDA device.
        transport: how strided copies are enqueued.
        trials: what was seen of each way that was tried.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        max_in_flight_bytes: int = DEFAULT_MAX_IN_FLIGHT_BYTES,
        transport: Transport | None = None,
        contiguous: EnqueueCopy = enqueue_with_torch,
        registrar: Registrar | None = None,
        cuda: Any = torch.cuda,
    ) -> None:
        super().__init__(max_in_flight_bytes=max_in_flight_bytes)
        self.device = torch.device(device)
        self._cuda = cuda
        self._contiguous = contiguous
        self._stream = cuda.Stream(device=self.device)
        self.trials: tuple[Trial, ...] = ()
        if transport is None:
            with cuda.device(self.device):
                transport, self.trials = choose_transport(
                    self._candidates(),
                    device=self.device,
                    stream=self._stream,
                    cuda=cuda,
                    registrar=registrar,
                )
        self.transport = transport

    def _candidates(self) -> list[Transport]:
        candidates = [Transport("torch", enqueue_with_torch)]
        memcpy_2d_async = find_memcpy_2d_async()
        if memcpy_2d_async is not None:
            candidates.append(
                runtime_transport(memcpy_2d_async, lambda: int(self._cuda.current_stream(self.device).cuda_stream))
            )
        return candidates

    def compute_stream(self) -> Any:
        return self._cuda.current_stream(self.device)

    def _check_after(self, after: Any) -> None:
        if not isinstance(after, (self._cuda.Stream, self._cuda.Event, Ticket)):
            raise TypeError(f"submit: after must be a CUDA stream, a CUDA event or a ticket, got {after!r}")

    def _order_behind(self, after: Any) -> None:
        if isinstance(after, self._cuda.Event):
            self._stream.wait_event(after)
        elif isinstance(after, self._cuda.Stream):
            self._stream.wait_stream(after)
        else:
            completion = after.completion
            if isinstance(completion, EventCompletion):
                event = completion.last_event()
                if event is not None:
                    self._stream.wait_event(event)
            else:  # a batch that no device event stands for: the owner's thread waits
                completion.wait_finished()

    def _start(self, batch: CopyBatch, after: tuple[Any, ...]) -> EventCompletion:
        events: list[Any] = []
        begin = fence = error = None
        # Arenas made under inference_mode may only be written under it, and others may be as well.
        with torch.inference_mode(), self._cuda.device(self.device), self._cuda.stream(self._stream):
            try:
                for prerequisite in after:
                    self._order_behind(prerequisite)
                begin = self._cuda.Event(enable_timing=True)
                begin.record(self._stream)
                for part in batch.parts:
                    for copy in part.copies:
                        enqueue = self._contiguous if copy.rows == 1 else self.transport.enqueue
                        enqueue(copy, batch.direction)
                    event = self._cuda.Event(enable_timing=True)
                    event.record(self._stream)
                    events.append(event)
            except Exception as failure:
                error = without_frames(failure)
                with contextlib.suppress(Exception):  # a device that is lost for good takes no event either
                    fence = self._cuda.Event()
                    fence.record(self._stream)
        return EventCompletion(batch, begin, events, fence, error)
