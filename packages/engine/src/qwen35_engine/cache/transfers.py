"""Copies on their way: what waits for a batch to land, and what happens when it has."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from prefix_index import Fill, Lease, PrefixIndex
from slab_pool import Direction, Ticket

from ..calibration import CopyRate
from ..host import HostTier

__all__ = ["Transfers"]


class Transfers:
    """For each batch: the index's fills it carries, a lease that keeps its sources in place, what to do afterwards.

    Without a Host tier there is never one.
    """

    def __init__(self, index: PrefixIndex, host: HostTier | None, rate: CopyRate) -> None:
        """``rate`` is told of every restore that landed."""
        self._index = index
        self._host = host
        self._rate = rate
        self._fills: dict[Ticket, tuple[Fill, ...]] = {}
        self._guards: dict[Ticket, Lease] = {}
        self._afterwards: dict[Ticket, list[Callable[[], None]]] = {}
        self._landed: deque[Ticket] = deque()  # where settling one raises, the others are still to be settled

    def __len__(self) -> int:
        """Batches that are on their way, or have landed and are to be settled."""
        return len(self._fills)

    def add(self, ticket: Ticket, fills: Iterable[Fill], guard: Lease | None = None) -> None:
        """Land ``fills`` when the batch has landed, and give up ``guard``, which pins what it reads until then."""
        self._fills[ticket] = tuple(fills)
        if guard is not None:
            self._guards[ticket] = guard

    def afterwards(self, ticket: Ticket, action: Callable[[], None]) -> None:
        """Run ``action`` once the batch has landed: a destination is free only when nothing writes to it any more."""
        self._afterwards.setdefault(ticket, []).append(action)

    def poll(self) -> None:
        """Settle what has landed. Never waits.

        Raises:
            CopyFailed: a copy failed; the engine has to end.
        """
        if not self._fills or self._host is None:
            return
        self._landed.extend(self._host.poll())
        while self._landed:
            self._settle(self._landed.popleft())

    def drain(self) -> bool:
        """Wait for every batch and settle it, also what is started by settling; whether there was any.

        Raises:
            CopyFailed: a copy failed; the engine has to end.
        """
        if not self._fills or self._host is None:
            return False
        while self._fills:
            self._host.drain()
            self.poll()
        return True

    def _settle(self, ticket: Ticket) -> None:
        if ticket.direction is Direction.HOST_TO_DEVICE:
            copied = ticket.result()
            self._rate.add(copied.num_bytes, copied.seconds)
        for fill in self._fills.pop(ticket):
            self._index.land(fill)
        guard = self._guards.pop(ticket, None)
        if guard is not None:
            self._index.cancel(guard)
        for action in self._afterwards.pop(ticket, ()):
            action()
