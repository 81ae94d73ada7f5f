"""The copy stream of a CPU: one background thread, so that copies run beside the caller's work."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from slab_pool.batches import Copy, CopyBatch, Direction
from slab_pool.streams import (
    CALLING_THREAD,
    DEFAULT_MAX_IN_FLIGHT_BYTES,
    CallingThread,
    CopyStream,
)
from slab_pool.tickets import Ticket, without_frames

CopyFunction = Callable[[Sequence[Copy], Direction], None]


_FEW_ROWS = 4


def copy_now(copies: Sequence[Copy], direction: Direction) -> None:
    """Make copies between CPU tensors, one after the other, in the calling thread."""
    # Between two copies the interpreter's own data leaves the caches, so a copy costs what of it is touched: two
    # microseconds by address, of the ten that 64 KiB take; twice that with two views and an operator. A copy of many
    # rows is one call of torch's, whose own loop costs less than a microsecond a row.
    to_device = direction is Direction.HOST_TO_DEVICE
    move = ctypes.memmove
    last_device = last_host = None
    device_base = host_base = 0
    for copy in copies:
        device, device_offset, device_pitch, host, host_offset, host_pitch, width, rows = copy
        if rows > _FEW_ROWS:
            destination, source = copy.views(direction)
            destination.copy_(source)
            continue
        if device is not last_device:
            last_device, device_base = device, device.data_ptr()
        if host is not last_host:
            last_host, host_base = host, host.data_ptr()
        device_address = device_base + device_offset
        host_address = host_base + host_offset
        for _ in range(rows):
            if to_device:
                move(device_address, host_address, width)
            else:
                move(host_address, device_address, width)
            device_address += device_pitch
            host_address += host_pitch


_NEVER = 1 << 62


class HostCompletion:
    """Progress of a batch that threads of this process can see: a count under a lock."""

    __slots__ = ("_condition", "_finished", "_landed", "_seconds", "_wanted", "error")

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._landed = 0
        # The fewest parts that a thread waits for: a waiter that is woken for every part takes the interpreter's lock
        # from the thread that copies, each time.
        self._wanted = _NEVER
        self._finished = False
        self._seconds = 0.0
        self.error: BaseException | None = None

    def num_landed(self) -> int:
        return self._landed

    def finished(self) -> bool:
        return self._finished

    def wait(self, num_parts: int) -> None:
        with self._condition:
            while self._landed < num_parts and not self._finished:
                self._wanted = min(self._wanted, num_parts)
                self._condition.wait()

    def wait_finished(self) -> None:
        with self._condition:
            while not self._finished:
                self._condition.wait()

    def wait_on(self, part: int, compute: Any) -> None:
        check_calling_thread("wait_on", compute)
        self.wait(part + 1)

    def seconds(self) -> float:
        return self._seconds

    # -- the copying side ------------------------------------------------------------------------------------

    def land_part(self) -> None:
        with self._condition:
            self._landed += 1
            if self._landed >= self._wanted:
                self._wanted = _NEVER
                self._condition.notify_all()

    def finish(self, *, seconds: float = 0.0, error: BaseException | None = None) -> None:
        """The batch is at rest: landed, or failed with `error`."""
        with self._condition:
            self._seconds = seconds
            self.error = error
            self._finished = True
            self._condition.notify_all()


class CpuCopyStream(CopyStream):
    """`CopyStream` between Host memory and arenas in the same memory.

    `after` may be `CALLING_THREAD` (from `compute_stream()`) or a ticket of any stream; the background thread
    waits for the ticket. A batch behind a ticket that failed still runs: `after` asks for an order and nothing else.
    `copy` is a seam for tests.
    """

    def __init__(
        self, *, max_in_flight_bytes: int = DEFAULT_MAX_IN_FLIGHT_BYTES, copy: CopyFunction = copy_now
    ) -> None:
        super().__init__(max_in_flight_bytes=max_in_flight_bytes)
        self._copy = copy
        self._wake = threading.Condition()
        self._queue: deque[tuple[CopyBatch, tuple[Any, ...], HostCompletion]] = deque()
        self._ending = False
        self._thread: threading.Thread | None = None

    def compute_stream(self) -> CallingThread:
        return CALLING_THREAD

    def _check_after(self, after: Any) -> None:
        check_host_prerequisite(after)

    def _start(self, batch: CopyBatch, after: tuple[Any, ...]) -> HostCompletion:
        completion = HostCompletion()
        if self._thread is None:
            # A daemon, so that an interpreter that ends without close() does not wait for it forever.
            thread = threading.Thread(target=self._run, name="slab-pool-copy", daemon=True)
            thread.start()  # may be refused: then the next submit tries again
            self._thread = thread
        with self._wake:
            self._queue.append((batch, after, completion))
            self._wake.notify()
        return completion

    def close(self) -> None:
        """Drain, then end the thread."""
        super().close()
        if self._thread is not None:
            with self._wake:
                self._ending = True
                self._wake.notify()
            self._thread.join()

    # Arenas made under inference_mode may only be written under it, and others may be as well.
    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._ending)
                if not self._queue:
                    return
                batch, after, completion = self._queue.popleft()
            seconds, error = self._run_batch(batch, after, completion)
            del batch, after  # a caller that drops an arena once the batch is done gets its memory back
            completion.finish(seconds=seconds, error=error)
            del completion, error

    def _run_batch(
        self, batch: CopyBatch, after: tuple[Any, ...], completion: HostCompletion
    ) -> tuple[float, BaseException | None]:
        try:
            for prerequisite in after:
                if isinstance(prerequisite, Ticket):
                    prerequisite.completion.wait_finished()
            begin = time.perf_counter()
            for part in batch.parts:
                self._copy(part.copies, batch.direction)
                completion.land_part()
        except BaseException as error:
            return 0.0, without_frames(error)
        return time.perf_counter() - begin, None


def check_calling_thread(op: str, compute: Any) -> None:
    """Check that `compute` is what a CPU stream's `compute_stream()` returns.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(compute, CallingThread):
        raise TypeError(f"{op}: the compute stream of a CPU is CALLING_THREAD, got {compute!r}")


def check_host_prerequisite(after: Any) -> None:
    """Check that a thread can wait for `after`.

    Raises:
        TypeError: it cannot.
    """
    if not isinstance(after, (CallingThread, Ticket)):
        raise TypeError(f"submit: after must be CALLING_THREAD or a ticket, got {after!r}")
