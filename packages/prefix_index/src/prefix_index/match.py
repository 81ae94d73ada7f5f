"""The answer of a look-up: a `Match`, its candidates, and handles to snapshots.

Candidates are worked out when they are read for the first time. A match is frozen whatever happens to the index
afterwards: the lists of the index that it reads are only ever added to or replaced.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from itertools import islice

from prefix_index.errors import InvalidArgument
from prefix_index.prompt import Prompt
from prefix_index.tree.records import (
    DEVICE_IMAGE,
    DEVICE_TAIL,
    FILLING_DEVICE,
    HAS_TAIL,
    KIND_SHIFT,
    Edge,
    Snapshot,
)
from prefix_index.types import Geometry, SnapshotKind, Span

Seen = list[tuple[list[Snapshot], bytearray, int]]
"""Of every edge of a path its snapshots, their statuses, and how many of them count."""


class Reason(enum.Enum):
    """Why the deepest cached prefix of a prompt cannot be resumed at its end."""

    NONE = "none"  # it can, up to less than a block
    NO_SNAPSHOT = "no_snapshot"  # blocks are there, no snapshot was ever taken so deep
    IMAGE_EVICTED = "image_evicted"  # a snapshot was there and was evicted
    FILLING = "filling"  # a copy is still on its way
    EXCLUDED = "excluded"  # the frontier lies inside a span the caller excluded


class Owner:
    """Marks what one index hands out, and says what a handle needs to know of it.

    Attributes:
        geometry: the sizes it was made with.
        snapshots: False where the end of every block can be resumed.
    """

    __slots__ = ("geometry", "snapshots")

    def __init__(self, geometry: Geometry, snapshots: bool) -> None:
        self.geometry = geometry
        self.snapshots = snapshots


class SnapshotHandle:
    """Names a snapshot. Never aliases: once the snapshot is gone, using the handle raises StaleHandle."""

    __slots__ = ("_owner", "_record")

    def __init__(self, owner: Owner, record: Snapshot) -> None:
        self._owner = owner
        self._record = record

    @property
    def alive(self) -> bool:
        """Whether the snapshot still exists."""
        return self._record.edge is not None

    @property
    def frontier(self) -> int:
        """Tokens its state has seen."""
        return self._record.frontier

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SnapshotHandle) and self._record is other._record

    def __hash__(self) -> int:
        return hash((SnapshotHandle, self._record.serial))

    def __repr__(self) -> str:
        return f"<snapshot {self._record.serial} at {self._record.frontier}{'' if self.alive else ', gone'}>"


Shared = tuple[Owner, int, tuple[Span, ...]]
"""What the candidates of one match have in common: owner, matched blocks on the device, ranges still on their way.

Candidates refer to this and not to their match: it refers to them.
"""


class Candidate:
    """A place a prompt can resume from, as it was when the match was made. Frozen."""

    __slots__ = ("_depth", "_record", "_shared", "_status")

    def __init__(self, shared: Shared, record: Snapshot | None, depth: int, status: int) -> None:
        self._shared = shared
        self._record = record
        self._depth = depth
        self._status = status

    @property
    def snapshot(self) -> SnapshotHandle | None:
        """The snapshot; None for the end of a block in an index without snapshots."""
        return None if self._record is None else SnapshotHandle(self._shared[0], self._record)

    @property
    def frontier(self) -> int:
        """Tokens that need not be computed again."""
        if self._record is None:
            return self._depth * self._shared[0].geometry.block_tokens
        return self._record.frontier

    @property
    def depth(self) -> int:
        """Whole blocks of the path; the tail follows them."""
        return self._depth

    @property
    def kind(self) -> SnapshotKind | None:
        """Why the snapshot was taken; None without one."""
        return None if self._record is None else SnapshotKind(self._status >> KIND_SHIFT)

    @property
    def restore_bytes(self) -> int:
        """Bytes to bring from the Host before this can be resumed; 0 when all of it is on the device."""
        owner, device_blocks, _ = self._shared
        geometry = owner.geometry
        missing = self._depth - device_blocks
        size = missing * geometry.block_bytes if missing > 0 else 0
        if self._record is not None:
            status = self._status
            if not status & DEVICE_IMAGE:
                size += geometry.image_bytes
            if status & HAS_TAIL and not status & DEVICE_TAIL:
                size += geometry.block_bytes
        return size

    @property
    def filling(self) -> int:
        """How many of its blocks and tail have a device copy that is still on its way."""
        count = 1 if self._status & FILLING_DEVICE else 0
        for first, end in self._shared[2]:
            if first < self._depth:
                count += min(end, self._depth) - first
        return count

    def _facts(self) -> tuple[object, ...]:
        return self.snapshot, self.frontier, self._depth, self._status, self.restore_bytes, self.filling

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Candidate) and self._facts() == other._facts()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Candidate(frontier={self.frontier}, kind={self.kind!r}, restore_bytes={self.restore_bytes})"


class Match:
    """What the index knew about a prompt when it was asked. Frozen."""

    __slots__ = (
        "_candidates",
        "_device_blocks",
        "_epoch",
        "_exclude",
        "_filling",
        "_first",
        "_host_blocks",
        "_lost_depth",
        "_matched_blocks",
        "_owner",
        "_path",
        "_prompt",
        "_seen",
        "_shared",
    )

    _candidates: tuple[Candidate, ...] | None
    _device_blocks: int
    _epoch: int
    _exclude: Sequence[Span]
    _filling: tuple[Span, ...]
    _first: tuple[Candidate | None] | None  # the first candidate, if there is one; None until it was read
    _host_blocks: int
    _lost_depth: int  # the deepest matched block that lost its snapshot, 0 for none
    _matched_blocks: int
    _owner: Owner
    _path: list[Edge]
    _prompt: Prompt
    _seen: Seen
    _shared: Shared | None  # None until a candidate is made

    @property
    def prompt(self) -> Prompt:
        """What was looked up."""
        return self._prompt

    @property
    def epoch(self) -> int:
        """`acquire` refuses the match once the index has moved past this."""
        return self._epoch

    @property
    def matched_blocks(self) -> int:
        """Blocks of the deepest cached prefix, resumable or not; at most (n - 1) // block_tokens."""
        return self._matched_blocks

    @property
    def matched_tokens(self) -> int:
        """Tokens of the matched blocks."""
        return self._matched_blocks * self._owner.geometry.block_tokens

    @property
    def device_blocks(self) -> int:
        """The first so many matched blocks have a device copy, filling ones included."""
        return self._device_blocks

    @property
    def host_blocks(self) -> int:
        """The first so many matched blocks have a Host copy, filling ones included."""
        return self._host_blocks

    @property
    def filling(self) -> tuple[Span, ...]:
        """Ranges of matched blocks whose device copy is still on its way, as (first block, end block)."""
        return self._filling

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The places to resume from, deepest first. Worked out once."""
        if self._candidates is None:
            best = self.best
            others = islice(self._offered(self._exclude), 1, None)
            self._candidates = () if best is None else (best, *others)
        return self._candidates

    @property
    def best(self) -> Candidate | None:
        """The deepest candidate, or None when only the root is left. Worked out once."""
        first = self._first
        if first is None:
            best = next(self._offered(self._exclude), None)
            self._first = (best,)
            return best
        return first[0]

    @property
    def reason(self) -> Reason:
        """Why the deepest cached prefix cannot be resumed at its end."""
        best = self.best
        depth = best._depth if best is not None else 0
        if depth < self._matched_blocks:
            deepest = next(self._offered(()), None) if self._exclude else best
            if deepest is not None and _inside(deepest.frontier, self._exclude):
                return Reason.EXCLUDED
            return Reason.IMAGE_EVICTED if self._lost_depth > depth else Reason.NO_SNAPSHOT
        return Reason.FILLING if best is not None and best.filling else Reason.NONE

    def _edge_at(self, depth: int) -> Edge:
        """The edge of the path in which block boundary `depth` lies."""
        if not 0 < depth <= self._matched_blocks:
            raise InvalidArgument(
                f"acquire: the candidate must lie on the {self._matched_blocks} matched blocks, got {depth}"
            )
        return next(edge for edge in self._path if edge.end >= depth)

    def _offers(self, candidate: Candidate) -> bool:
        """Whether a candidate of another match of the same index is one of this match's prompt, excluded or not."""
        return any(own._record is candidate._record and own._depth == candidate._depth for own in self._offered(()))

    def _offered(self, exclude: Sequence[Span]) -> Iterator[Candidate]:
        """The candidates, deepest first, each made when it is its turn."""
        shared = self._shared
        if shared is None:
            shared = self._shared = self._owner, self._device_blocks, self._filling
        blocks = self._matched_blocks
        if not self._owner.snapshots:  # every block's end
            size = self._owner.geometry.block_tokens
            for depth in range(blocks, 0, -1):
                if not _inside(depth * size, exclude):
                    yield Candidate(shared, None, depth, 0)
            return
        prompt = self._prompt
        startswith = prompt._tokens.startswith
        width = prompt._scheme.block_bytes
        extra_at = prompt._extras.at if prompt._extras.pairs else _no_extra
        limit = prompt._num_tokens - 1  # the last token is always computed
        for snapshots, statuses, count in reversed(self._seen):
            for place in range(count - 1, -1, -1):
                snapshot = snapshots[place]
                depth = snapshot.depth
                if depth > blocks or snapshot.frontier > limit:
                    continue
                tail = snapshot.tail
                if tail and not (startswith(tail, depth * width) and extra_at(snapshot.frontier) == snapshot.extra):
                    continue
                if not exclude or not _inside(snapshot.frontier, exclude):
                    yield Candidate(shared, snapshot, depth, statuses[place])

    def __repr__(self) -> str:
        return f"Match({self.matched_tokens} of {self._prompt.num_tokens} tokens, {len(self.candidates)} candidates)"


def _inside(frontier: int, spans: Sequence[Span]) -> bool:
    return any(begin < frontier < end for begin, end in spans)


def _no_extra(frontier: int) -> int:
    return 0
