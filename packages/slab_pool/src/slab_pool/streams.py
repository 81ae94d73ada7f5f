"""The copy stream: what CUDA, CPU and test double share. Order, statistics, waiting for room, polling."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from slab_pool.batches import CopyBatch, Direction
from slab_pool.errors import PoolClosed
from slab_pool.tickets import Completion, Ticket

DEFAULT_MAX_IN_FLIGHT_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectionStatistics:
    """What landed in one direction. Failed batches are counted, their bytes and seconds are not.

    Attributes:
        seconds_in_flight: summed over the batches, the time from the start of the first copy (after the prerequisites)
            to the landing of the last, by the clock of what copied.
    """

    num_batches: int = 0
    num_copies: int = 0
    num_bytes: int = 0
    seconds_in_flight: float = 0.0
    num_failed_batches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyStatistics:
    """Counts of a copy stream, as of the moment they were asked for.

    Attributes:
        high_water_bytes: the most that was in flight at once.
    """

    host_to_device: DirectionStatistics = DirectionStatistics()
    device_to_host: DirectionStatistics = DirectionStatistics()
    in_flight_batches: int = 0
    in_flight_bytes: int = 0
    high_water_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Progress:
    """What is in flight, oldest first, and the totals that go with it.

    A stream replaces it whole, so that another thread reads one moment while the owner goes on.
    """

    in_flight: tuple[Ticket, ...]
    statistics: CopyStatistics

    def started(self, ticket: Ticket) -> _Progress:
        old = self.statistics
        in_flight_bytes = old.in_flight_bytes + ticket.batch_bytes
        statistics = replace(
            old,
            in_flight_batches=old.in_flight_batches + 1,
            in_flight_bytes=in_flight_bytes,
            high_water_bytes=max(old.high_water_bytes, in_flight_bytes),
        )
        return _Progress((*self.in_flight, ticket), statistics)

    def settled(self) -> _Progress:
        """The progress once what is done at the front of the line is counted."""
        done = list(itertools.takewhile(Ticket.done, self.in_flight))
        if not done:
            return self
        old = self.statistics
        statistics = replace(
            old,
            host_to_device=_counted(old.host_to_device, Direction.HOST_TO_DEVICE, done),
            device_to_host=_counted(old.device_to_host, Direction.DEVICE_TO_HOST, done),
            in_flight_batches=old.in_flight_batches - len(done),
            in_flight_bytes=old.in_flight_bytes - sum(ticket.batch_bytes for ticket in done),
        )
        return _Progress(self.in_flight[len(done) :], statistics)


def _counted(old: DirectionStatistics, direction: Direction, done: Sequence[Ticket]) -> DirectionStatistics:
    done = [ticket for ticket in done if ticket.direction is direction]
    landed = [ticket for ticket in done if ticket.completion.error is None]
    return DirectionStatistics(
        num_batches=old.num_batches + len(landed),
        num_copies=old.num_copies + sum(ticket.batch_copies for ticket in landed),
        num_bytes=old.num_bytes + sum(ticket.batch_bytes for ticket in landed),
        seconds_in_flight=old.seconds_in_flight + sum(ticket.result().seconds for ticket in landed),
        num_failed_batches=old.num_failed_batches + len(done) - len(landed),
    )


class CallingThread:
    """The compute stream of a CPU: what the calling thread did before a call is finished by then."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "CALLING_THREAD"


CALLING_THREAD: Final = CallingThread()


class CopyStream(ABC):
    """Batches of copies between Host slabs and a device, in order, beside the owner's own work.

    One owner submits, polls and closes, from one thread; `statistics` and tickets may be read from any. Batches run
    first in, first out; so do the parts of a batch. There are no priorities and no cancelling: a batch that was
    submitted always runs, and a caller that no longer needs it waits until it is done.

    Errors never appear on another thread's stack: a failed batch keeps its error in its ticket, and `poll`
    raises it to the owner, once. Batches behind it run all the same.

    At most `max_in_flight_bytes` are in flight: `submit` waits for the oldest batches to land until the new one
    fits. A batch larger than the bound runs alone.
    """

    def __init__(self, *, max_in_flight_bytes: int = DEFAULT_MAX_IN_FLIGHT_BYTES) -> None:
        if max_in_flight_bytes < 1:
            raise ValueError(f"CopyStream: max_in_flight_bytes must be at least 1, got {max_in_flight_bytes!r}")
        self.max_in_flight_bytes = max_in_flight_bytes
        self._serials = itertools.count()
        self._progress = _Progress((), CopyStatistics())
        self._unpolled: deque[Ticket] = deque()  # done and not yet returned by poll, oldest first
        self._closed = False

    # -- what each kind of stream supplies -------------------------------------------------------------------

    @abstractmethod
    def _start(self, batch: CopyBatch, after: tuple[Any, ...]) -> Completion:
        """Enqueue the batch behind everything started before and behind `after`.

        It must not raise for what the copies do: that belongs into the completion.
        """

    @abstractmethod
    def _check_after(self, after: Any) -> None:
        """TypeError for a prerequisite this kind of stream cannot wait for."""

    @abstractmethod
    def compute_stream(self) -> Any:
        """A handle of the caller's present compute stream, for `after` and `wait_on`."""

    # -- the owner's side ------------------------------------------------------------------------------------

    def submit(self, batch: CopyBatch, *, after: Any) -> Ticket:
        """Start `batch` once `after` is complete. Returns at once unless it must wait for room.

        Args:
            batch: the copies.
            after: a handle from `compute_stream()`, a ticket (also another stream's), an event of the device, or a
                tuple of these. There is no default: a copy that does not say what it waits for reads memory that is
                still being written.

        Raises:
            TypeError: a prerequisite that this kind of stream cannot wait for.
            ValueError: no prerequisite.
            PoolClosed: after `close()`.
        """
        prerequisites = tuple(after) if isinstance(after, (tuple, list)) else (after,)
        if not prerequisites:
            raise ValueError("submit: after must name at least one prerequisite, got none")
        for prerequisite in prerequisites:
            self._check_after(prerequisite)
        self._check_open("submit")
        self._make_room(batch.num_bytes)
        ticket = Ticket(next(self._serials), batch, self._start(batch, prerequisites))
        self._progress = self._progress.started(ticket)
        return ticket

    def fits(self, num_bytes: int) -> bool:
        """Whether `submit` of so many bytes would start without waiting."""
        self._settle()
        progress = self._progress
        return not progress.in_flight or progress.statistics.in_flight_bytes + num_bytes <= self.max_in_flight_bytes

    def _make_room(self, num_bytes: int) -> None:
        while not self.fits(num_bytes):
            self._progress.in_flight[0].completion.wait_finished()

    def _settle(self) -> None:
        """Move what is done from the front of the line to what poll returns."""
        before = self._progress
        if before.in_flight:
            self._progress = after = before.settled()
            self._unpolled.extend(before.in_flight[: len(before.in_flight) - len(after.in_flight)])

    def poll(self) -> tuple[Ticket, ...]:
        """The tickets that landed since the last poll, in order. Never waits.

        Raises:
            CopyFailed: a batch failed, and what landed before it was returned by an earlier poll. So no landing is
                lost to an exception, and each failure is raised once.
        """
        self._settle()
        landed: list[Ticket] = []
        while self._unpolled:
            failure = self._unpolled[0].error
            if failure is not None:
                if landed:
                    break
                self._unpolled.popleft()
                raise failure
            landed.append(self._unpolled.popleft())
        return tuple(landed)

    def drain(self) -> None:
        """Wait until everything submitted is done. `poll` raises what failed, not this."""
        while self._progress.in_flight:
            self._progress.in_flight[0].completion.wait_finished()
            self._settle()

    def statistics(self) -> CopyStatistics:
        """What has landed and what is in flight now. Any thread may ask: nothing changes by it."""
        return self._progress.settled().statistics

    def close(self) -> None:
        """Drain, then refuse further batches. Twice does nothing. What is left can still be polled."""
        self.drain()
        self._closed = True

    def _check_open(self, op: str) -> None:
        if self._closed:
            raise PoolClosed(f"{op}: the copy stream is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
