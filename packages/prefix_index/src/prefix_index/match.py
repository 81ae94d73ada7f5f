"""The answer of a look-up: frozen, whatever happens to the index afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from prefix_index.core import Geometry
from prefix_index.nodes import (
    DEVICE_IMAGE,
    DEVICE_TAIL,
    FILLING_DEVICE,
    HAS_TAIL,
    KIND_SHIFT,
    Edge,
    Snapshot,
)
from prefix_index.prompt import Prompt
from prefix_index.values import Reason, SnapshotKind

Span = tuple[int, int]


class SnapshotHandle:
    """Names a snapshot. Never aliases: once the snapshot is gone, using the handle raises StaleHandle."""

    __slots__ = ("_owner", "_record")

    def __init__(self, owner: object, record: Snapshot) -> None:
        self._owner = owner
        self._record = record

    @property
    def alive(self) -> bool:
        """Whether the snapshot still exists."""
        return self._record.edge is not None

    @property
    def frontier(self) -> int:
        return self._record.frontier

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SnapshotHandle) and self._record is other._record

    def __hash__(self) -> int:
        return hash((SnapshotHandle, self._record.serial))

    def __repr__(self) -> str:
        return f"<snapshot {self._record.serial} at {self._record.frontier}{'' if self.alive else ', gone'}>"


class Candidate:
    """A place a prompt can resume from, as it was when the match was made. Frozen."""

    __slots__ = ("_depth", "_match", "_record", "_where")

    def __init__(self, match: Match, record: Snapshot | None, depth: int, where: int) -> None:
        self._match = match
        self._record = record
        self._depth = depth
        self._where = where

    @property
    def snapshot(self) -> SnapshotHandle | None:
        """The snapshot; None for the end of a block in an index without snapshots."""
        return None if self._record is None else SnapshotHandle(self._match._owner, self._record)

    @property
    def frontier(self) -> int:
        """Tokens that need not be computed again."""
        if self._record is None:
            return self._depth * self._match._geometry.block_tokens
        return self._record.frontier

    @property
    def depth(self) -> int:
        """Whole blocks of the path; the tail follows them."""
        return self._depth

    @property
    def kind(self) -> SnapshotKind | None:
        return None if self._record is None else SnapshotKind(self._where >> KIND_SHIFT)

    @property
    def restore_bytes(self) -> int:
        """Bytes to bring from the Host before this can be resumed; 0 when all of it is on the device."""
        match = self._match
        geometry = match._geometry
        missing = self._depth - match._device_blocks
        size = missing * geometry.block_bytes if missing > 0 else 0
        if self._record is not None:
            where = self._where
            if not where & DEVICE_IMAGE:
                size += geometry.image_bytes
            if where & HAS_TAIL and not where & DEVICE_TAIL:
                size += geometry.block_bytes
        return size

    @property
    def filling(self) -> int:
        """Blocks and tails of it whose device copy is still on its way."""
        count = 1 if self._where & FILLING_DEVICE else 0
        for first, end in self._match._filling:
            if first < self._depth:
                count += min(end, self._depth) - first
        return count

    def _facts(self) -> tuple[object, ...]:
        return self.snapshot, self.frontier, self._depth, self._where, self.restore_bytes, self.filling

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Candidate) and self._facts() == other._facts()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Candidate(frontier={self.frontier}, kind={self.kind!r}, restore_bytes={self.restore_bytes})"


class Candidates(Sequence[Candidate]):
    """The usable candidates, deepest first."""

    __slots__ = ("_found",)

    def __init__(self, found: list[Candidate]) -> None:
        self._found = found

    def __len__(self) -> int:
        return len(self._found)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> list[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | list[Candidate]:
        return self._found[index]

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._found)


class Match:
    """What the index knew about a prompt when it was asked. Frozen: the lists of the index that it reads are only
    ever added to or replaced."""

    __slots__ = (
        "_device_blocks",
        "_epoch",
        "_exclude",
        "_filling",
        "_geometry",
        "_host_blocks",
        "_lost",
        "_matched_blocks",
        "_owner",
        "_path",
        "_prompt",
        "_seen",
        "_snapshots",
    )

    _device_blocks: int
    _epoch: int
    _exclude: Sequence[Span]
    _filling: tuple[Span, ...]
    _geometry: Geometry
    _host_blocks: int
    _lost: int  # the deepest matched block that lost its snapshot, 0 for none
    _matched_blocks: int
    _owner: object
    _path: list[Edge]
    _prompt: Prompt
    _seen: list[tuple[list[Snapshot], bytearray, int]]  # of every edge the snapshots, their `where`, how many
    _snapshots: bool

    @property
    def prompt(self) -> Prompt:
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
        return self._matched_blocks * self._geometry.block_tokens

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
    def reason(self) -> Reason:
        """Why the deepest cached prefix cannot be resumed at its end."""
        best = self.best
        if (best._depth if best is not None else 0) < self._matched_blocks:
            deepest = next(self._usable(()), None) if self._exclude else best
            if deepest is not None and _inside(deepest.frontier, self._exclude):
                return Reason.EXCLUDED
            lost = self._lost > (best._depth if best is not None else 0)
            return Reason.IMAGE_LOST if lost else Reason.NO_SNAPSHOT
        return Reason.FILLING if best is not None and best.filling else Reason.NONE

    @property
    def candidates(self) -> Candidates:
        """Worked out at every call, not kept: a match that knew its candidates would be a cycle."""
        return Candidates(list(self._usable(self._exclude)))

    @property
    def best(self) -> Candidate | None:
        """The deepest candidate, or None when only the root is left."""
        return next(self._usable(self._exclude), None)

    def _usable(self, exclude: Sequence[Span]) -> Iterator[Candidate]:
        """The candidates, deepest first, each made when it is its turn."""
        blocks = self._matched_blocks
        if not self._snapshots:  # every block boundary
            size = self._geometry.block_tokens
            for depth in range(blocks, 0, -1):
                if not _inside(depth * size, exclude):
                    yield Candidate(self, None, depth, 0)
            return
        prompt = self._prompt
        startswith = prompt._tokens.startswith
        width = prompt._scheme.block_bytes
        extra_at = prompt._extras.at if prompt._extras.pairs else _no_extra
        limit = prompt._num_tokens - 1  # the last token is always computed
        for snaps, wheres, count in reversed(self._seen):
            for place in range(count - 1, -1, -1):
                snapshot = snaps[place]
                depth = snapshot.at
                if depth > blocks or snapshot.frontier > limit:
                    continue
                tail = snapshot.tail
                if tail and not (startswith(tail, depth * width) and extra_at(snapshot.frontier) == snapshot.extra):
                    continue
                if not exclude or not _inside(snapshot.frontier, exclude):
                    yield Candidate(self, snapshot, depth, wheres[place])

    def __repr__(self) -> str:
        return f"Match({self.matched_tokens} of {self._prompt.num_tokens} tokens, {len(self.candidates)} candidates)"


def _inside(frontier: int, spans: Sequence[Span]) -> bool:
    return any(begin < frontier < end for begin, end in spans)


def _no_extra(frontier: int) -> int:
    return 0
