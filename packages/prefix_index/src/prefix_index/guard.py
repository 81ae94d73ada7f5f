"""What every verb checks before it does anything: its thread, and that a handle is this index's own and still good."""

from __future__ import annotations

from threading import get_ident

from prefix_index.core import Core
from prefix_index.errors import ForeignHandle, InvalidArgument, StaleHandle, StaleMatch, WrongThread
from prefix_index.fills import Ticket
from prefix_index.lease import Lease
from prefix_index.match import Candidate, Match, SnapshotHandle
from prefix_index.nodes import Edge, Snapshot


class Guard:
    """Refuses, naming the operation, the constraint and the value; knows no rule of the index itself."""

    __slots__ = ("_core", "_thread", "_watch", "owner")

    def __init__(self, core: Core, watch_thread: bool) -> None:
        self._core = core
        self._thread: int | None = None
        self._watch = watch_thread
        self.owner = object()  # what the handles of this index carry

    def enter(self, op: str) -> None:
        """Take the calling thread as the mutator, or refuse it."""
        if self._watch:
            me = get_ident()
            if self._thread != me:
                if self._thread is not None:
                    raise WrongThread(f"{op}: only thread {self._thread} may change the index, got thread {me}")
                self._thread = me

    def leave(self) -> None:
        """Let the next thread that enters be the mutator."""
        self._thread = None

    def match(self, op: str, match: Match) -> None:
        """Nothing the match can name has been lost since."""
        if match._owner is not self.owner:
            raise ForeignHandle(f"{op}: the match must be this index's own, got another's")
        if match._epoch != self._core.epoch:
            raise StaleMatch(f"{op}: the match must be of epoch {self._core.epoch}, got {match._epoch}; match again")

    def lease(self, op: str, lease: Lease) -> Edge:
        """The edge in which an open lease ends."""
        if lease._owner is not self.owner:
            raise ForeignHandle(f"{op}: the lease must be this index's own, got another's")
        edge = lease._hold.edge
        if edge is None:
            raise StaleHandle(f"{op}: the lease must be open, got {lease!r}")
        return edge

    def change(self, op: str, lease: Lease) -> Edge:
        """`enter`, then `lease`, in one step: what most verbs begin with."""
        if get_ident() != self._thread:
            self.enter(op)
        edge = lease._hold.edge
        return edge if edge is not None and lease._owner is self.owner else self.lease(op, lease)

    def source(self, op: str, match: Match, candidate: Candidate) -> Snapshot | None:
        """The snapshot of a candidate of the match; None for a block boundary. One's own candidate has been lost only
        if the match is stale."""
        if match._epoch == self._core.epoch and match._owner is self.owner and candidate._match is match:
            return candidate._record
        self.match(op, match)
        return self._other(op, match, candidate)

    def snapshot(self, op: str, handle: SnapshotHandle) -> Snapshot:
        """The record of a snapshot that still exists."""
        if handle._owner is not self.owner:
            raise ForeignHandle(f"{op}: the snapshot must be this index's own, got another's")
        if handle._record.edge is None:
            raise StaleHandle(f"{op}: the snapshot must still exist, got {handle!r}")
        return handle._record

    def _other(self, op: str, match: Match, candidate: Candidate) -> Snapshot | None:
        """The same for a candidate that another match made: one of this index, which this match offers too."""
        if candidate._match._owner is not self.owner:
            raise ForeignHandle(f"{op}: the candidate must be this index's own, got another's")
        record = candidate._record
        if record is not None:
            self.snapshot(op, SnapshotHandle(self.owner, record))
        if all(own._record is not record or own._depth != candidate._depth for own in match._usable(())):
            raise InvalidArgument(f"{op}: the candidate must be one of the match's prompt, got {candidate!r}")
        return record

    def ticket(self, op: str, ticket: Ticket) -> None:
        """The fill is still in flight."""
        if ticket._owner is not self.owner:
            raise ForeignHandle(f"{op}: the ticket must be this index's own, got another's")
        if ticket._hold.edge is None:
            raise StaleHandle(f"{op}: the fill must be in flight, got {ticket!r}")
