"""Test doubles for users of this package: copies that land when told to, memory and disks that refuse.

Part of the public interface; nothing here needs a test framework.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from slab_pool.batches import Copy, CopyBatch, Direction
from slab_pool.cpu import (
    CopyFunction,
    HostCompletion,
    check_calling_thread,
    check_host_prerequisite,
    copy_now,
)
from slab_pool.errors import HostMemoryError, WouldBlock
from slab_pool.memory import HostChunk
from slab_pool.streams import (
    CALLING_THREAD,
    DEFAULT_MAX_IN_FLIGHT_BYTES,
    CallingThread,
    CopyStream,
)
from slab_pool.tickets import Ticket, without_frames

POISON = 0xFF  # a NaN in every floating-point format that has one, when it fills the element


class CopyInjected(Exception):
    """The error of a copy that was told to fail."""


class CopyFailures:
    """Counts copies from 0 on and fails those it was told to, otherwise copying for real: a `copy=` seam."""

    def __init__(self, *failing: int, copy: CopyFunction = copy_now) -> None:
        self._failing = set(failing)
        self._copy = copy
        self.num_copies = 0

    def fail(self, offset: int = 0) -> None:
        """Fail the `offset`-th copy from now on (0: the next)."""
        self._failing.add(self.num_copies + offset)

    def __call__(self, copies: Sequence[Copy], direction: Direction) -> None:
        for copy in copies:
            index = self.num_copies
            self.num_copies += 1
            if index in self._failing:
                raise CopyInjected(f"copy {index} was told to fail")
            self._copy((copy,), direction)


class ManualCopyStream(CopyStream):
    """A CPU copy stream without a thread: a part lands when `land()` says so, and not before.

    The bytes are copied at that moment, for real. When a batch comes to the front of the line and its
    prerequisites are done, what it will write is filled with `POISON`, so that reading too early is seen.

    A call that would wait for a copy (`wait_on`, `result`, `drain`, `submit` without room) raises WouldBlock, or with
    `on_wait="land"` lands what it waits for.
    """

    def __init__(
        self,
        *,
        max_in_flight_bytes: int = DEFAULT_MAX_IN_FLIGHT_BYTES,
        on_wait: Literal["raise", "land"] = "raise",
        poison: bool = True,
    ) -> None:
        super().__init__(max_in_flight_bytes=max_in_flight_bytes)
        self.failures = CopyFailures()
        self._on_wait = on_wait
        self._poison = poison
        self._queue: deque[_ManualBatch] = deque()

    def compute_stream(self) -> CallingThread:
        return CALLING_THREAD

    def fail_copy(self, offset: int = 0) -> None:
        """Fail the `offset`-th copy that is made from now on (0: the next)."""
        self.failures.fail(offset)

    @property
    def num_pending_parts(self) -> int:
        """Parts submitted that have neither landed nor failed."""
        return sum(len(entry.batch.parts) - entry.completion.num_landed() for entry in self._queue)

    def land(self, num_parts: int = 1) -> int:
        """Land the next parts in order.

        Returns:
            How many landed: fewer where one failed or none was left.

        Raises:
            WouldBlock: the next batch waits for tickets of other streams that are not done.
        """
        landed = 0
        while landed < num_parts and self._queue:
            entry = self._queue[0]
            self._come_to_front()
            if not entry.at_front:
                raise WouldBlock("land: the batch waits for tickets of other streams that are not done")
            part = entry.batch.parts[entry.completion.num_landed()]
            try:
                self.failures(part.copies, entry.batch.direction)
            except Exception as error:
                entry.completion.finish(error=without_frames(error))
                self._queue.popleft()
                self._come_to_front()
                return landed
            entry.completion.land_part()
            landed += 1
            if entry.completion.num_landed() == len(entry.batch.parts):
                entry.completion.finish()
                self._queue.popleft()
                self._come_to_front()
        return landed

    def land_all(self) -> int:
        """Land every part there is, also past failures.

        Returns:
            How many landed.

        Raises:
            WouldBlock: a batch waits for tickets of other streams that are not done.
        """
        landed = 0
        while self._queue:
            landed += self.land(self.num_pending_parts)
        return landed

    def _check_after(self, after: Any) -> None:
        check_host_prerequisite(after)

    def _start(self, batch: CopyBatch, after: tuple[Any, ...]) -> HostCompletion:
        completion = _ManualCompletion(self)
        self._queue.append(_ManualBatch(batch, after, completion))
        self._come_to_front()
        return completion

    def _come_to_front(self) -> None:
        if not self._queue or self._queue[0].at_front:
            return
        entry = self._queue[0]
        if not all(after.done() for after in entry.after if isinstance(after, Ticket)):
            return
        entry.at_front = True
        if self._poison:
            with torch.inference_mode():
                for part in entry.batch.parts:
                    for copy in part.copies:
                        to_device = entry.batch.direction is Direction.HOST_TO_DEVICE
                        (copy.device_view() if to_device else copy.host_view()).fill_(POISON)

    def _wait_for(self, reached: Callable[[], bool]) -> None:
        while not reached():
            if self._on_wait == "raise":
                raise WouldBlock("a copy was waited for that was not told to land")
            if not self.land() and not self._queue and not reached():
                raise WouldBlock("nothing is left to land")


class _ManualBatch:
    __slots__ = ("after", "at_front", "batch", "completion")

    def __init__(self, batch: CopyBatch, after: tuple[Any, ...], completion: HostCompletion) -> None:
        self.batch = batch
        self.after = after
        self.completion = completion
        self.at_front = False


class _ManualCompletion(HostCompletion):
    __slots__ = ("_stream",)

    def __init__(self, stream: ManualCopyStream) -> None:
        super().__init__()
        self._stream = stream

    def wait(self, num_parts: int) -> None:
        self._stream._wait_for(lambda: self.num_landed() >= num_parts or self.finished())

    def wait_finished(self) -> None:
        self._stream._wait_for(self.finished)

    def wait_on(self, part: int, compute: Any) -> None:
        check_calling_thread("wait_on", compute)
        self.wait(part + 1)


class RefusingAllocator:
    """Allocates chunks up to `limit_bytes`, then refuses as the system would: an `allocate=` seam."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.allocated_bytes = 0

    def __call__(self, num_bytes: int) -> HostChunk:
        if self.allocated_bytes + num_bytes > self._limit_bytes:
            raise HostMemoryError(f"Host memory: {num_bytes} bytes refused", num_bytes=num_bytes)
        self.allocated_bytes += num_bytes
        return HostChunk(num_bytes)


class RecordingRegistrar:
    """Page-locks nothing but notes every call, and refuses misuse and the `refuse_at`-th registration."""

    def __init__(self, *, refuse_at: int | None = None) -> None:
        self.locked: dict[int, int] = {}
        self.registered: list[int] = []
        self._refuse_at = refuse_at

    def register(self, address: int, num_bytes: int) -> None:
        if len(self.registered) == self._refuse_at:
            raise HostMemoryError(f"pinned Host memory: {num_bytes} bytes refused", num_bytes=num_bytes)
        if address in self.locked:
            raise AssertionError(f"registered twice: {address:#x}")
        self.locked[address] = num_bytes
        self.registered.append(num_bytes)

    def unregister(self, address: int) -> None:
        if self.locked.pop(address, None) is None:
            raise AssertionError(f"not registered: {address:#x}")


class FullDisk:
    """Writes until `num_bytes` are written, then answers "no space left": a `write=` seam of `save_image`."""

    def __init__(self, num_bytes: int) -> None:
        self.remaining = num_bytes

    def __call__(self, descriptor: int, data: memoryview) -> int:
        if not self.remaining:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(descriptor, data[: self.remaining])
        self.remaining -= written
        return written
