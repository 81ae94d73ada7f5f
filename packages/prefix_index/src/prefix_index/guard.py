"""What every verb checks first: its thread, and that a handle belongs to this index and still names something."""

from __future__ import annotations

from threading import get_ident

from prefix_index.errors import ForeignHandle, InvalidArgument, StaleHandle, StaleMatch, WrongThread
from prefix_index.leases.fills import Fill
from prefix_index.leases.lease import Lease
from prefix_index.match import Candidate, Match, Owner, SnapshotHandle
from prefix_index.tree.records import Edge, Snapshot
from prefix_index.tree.tree import Tree


class Guard:
    """Refuses, naming the operation, the constraint and the value."""

    __slots__ = ("_owner", "_thread", "_tree", "_watch")

    def __init__(self, tree: Tree, owner: Owner, watch_thread: bool) -> None:
        self._tree = tree
        self._owner = owner
        self._thread: int | None = None
        self._watch = watch_thread

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
        if match._owner is not self._owner:
            raise ForeignHandle(f"{op}: the match must be this index's own, got another's")
        if match._epoch != self._tree.epoch:
            raise StaleMatch(f"{op}: the match must be of epoch {self._tree.epoch}, got {match._epoch}; match again")

    def lease(self, op: str, lease: Lease) -> Edge:
        """The edge in which an open lease ends."""
        if lease._owner is not self._owner:
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
        return edge if edge is not None and lease._owner is self._owner else self.lease(op, lease)

    def source(self, op: str, match: Match, candidate: Candidate) -> Snapshot | None:
        """The snapshot of a candidate of the match; None for a block boundary.

        A match's own candidate has been lost only if the match is stale.
        """
        if match._epoch == self._tree.epoch and match._owner is self._owner and candidate._shared is match._shared:
            return candidate._record
        self.match(op, match)
        return self._other(op, match, candidate)

    def snapshot(self, op: str, handle: SnapshotHandle) -> Snapshot:
        """The record of a snapshot that still exists."""
        if handle._owner is not self._owner:
            raise ForeignHandle(f"{op}: the snapshot must be this index's own, got another's")
        if handle._record.edge is None:
            raise StaleHandle(f"{op}: the snapshot must still exist, got {handle!r}")
        return handle._record

    def _other(self, op: str, match: Match, candidate: Candidate) -> Snapshot | None:
        """The same for a candidate that another match made: one of this index, which this match offers too."""
        if candidate._shared[0] is not self._owner:
            raise ForeignHandle(f"{op}: the candidate must be this index's own, got another's")
        record = candidate._record
        if record is not None:
            self.snapshot(op, SnapshotHandle(self._owner, record))
        if not match._offers(candidate):
            raise InvalidArgument(f"{op}: the candidate must be one of the match's prompt, got {candidate!r}")
        return record

    def fill(self, op: str, fill: Fill) -> None:
        """The fill is still in flight."""
        if fill._owner is not self._owner:
            raise ForeignHandle(f"{op}: the fill must be this index's own, got another's")
        if fill._hold.edge is None:
            raise StaleHandle(f"{op}: the fill must be in flight, got {fill!r}")
