"""The answer of a look-up: frozen values that refer to nothing which may change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

from prefix_index.core import Geometry
from prefix_index.nodes import (
    DEVICE_IMAGE,
    DEVICE_TAIL,
    FILLING_DEVICE,
    KIND_SHIFT,
    Edge,
    Snapshot,
)
from prefix_index.prompt import Prompt
from prefix_index.values import Reason, SnapshotKind

if TYPE_CHECKING:
    pass

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

    __slots__ = ("_depth", "_filling", "_frontier", "_restore_bytes", "_snapshot", "_where")

    def __init__(
        self,
        snapshot: SnapshotHandle | None,
        frontier: int,
        depth: int,
        where: int,
        restore_bytes: int,
        filling: int,
    ) -> None:
        self._snapshot = snapshot
        self._frontier = frontier
        self._depth = depth
        self._where = where
        self._restore_bytes = restore_bytes
        self._filling = filling

    @property
    def snapshot(self) -> SnapshotHandle | None:
        """The snapshot; None for a block boundary of an index without snapshots."""
        return self._snapshot

    @property
    def frontier(self) -> int:
        """Tokens that need not be computed again."""
        return self._frontier

    @property
    def depth(self) -> int:
        """Whole blocks of the path; the tail follows them."""
        return self._depth

    @property
    def kind(self) -> SnapshotKind | None:
        return None if self._snapshot is None else SnapshotKind(self._where >> KIND_SHIFT)

    @property
    def restore_bytes(self) -> int:
        """Bytes to bring from the Host before this can be resumed; 0 when all of it is on the device."""
        return self._restore_bytes

    @property
    def filling(self) -> int:
        """Blocks and tails of it whose device copy is still on its way."""
        return self._filling

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Candidate) and all(getattr(self, n) == getattr(other, n) for n in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Candidate(frontier={self._frontier}, kind={self.kind!r}, restore_bytes={self._restore_bytes})"


class Candidates(Sequence[Candidate]):
    """The usable candidates, deepest first. Which they are is settled; their records are written when read."""

    __slots__ = ("_match",)

    def __init__(self, match: Match) -> None:
        self._match = match

    def __len__(self) -> int:
        found = self._match._found
        return len(self._match._depths) if found is None else len(found)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> list[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | list[Candidate]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"candidate {index} of {size}")
        return self._match._candidate(size - 1 - index if index >= 0 else -index - 1)

    def __iter__(self) -> Iterator[Candidate]:
        return (self._match._candidate(i) for i in range(len(self) - 1, -1, -1))


class Match:
    """What the index knew about a prompt when it was asked. Frozen; refers to nothing that may change."""

    __slots__ = (
        "_depths",
        "_device_blocks",
        "_epoch",
        "_filling",
        "_found",
        "_geometry",
        "_host_blocks",
        "_matched_blocks",
        "_owner",
        "_path",
        "_prompt",
        "_reason",
        "_where",
    )

    _depths: Sequence[int]
    _device_blocks: int
    _epoch: int
    _filling: tuple[Span, ...]
    _found: list[Snapshot] | None
    _geometry: Geometry
    _host_blocks: int
    _matched_blocks: int
    _owner: object
    _path: list[Edge]
    _prompt: Prompt
    _reason: Reason
    _where: list[int]

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
        return self._reason

    @property
    def candidates(self) -> Candidates:
        return Candidates(self)

    @property
    def best(self) -> Candidate | None:
        """The deepest candidate, or None when only the root is left."""
        candidates = Candidates(self)
        return candidates[0] if candidates else None

    def _candidate(self, position: int) -> Candidate:
        """Candidate by position, shallowest first."""
        geometry = self._geometry
        found = self._found
        if found is None:
            depth = self._depths[position]
            missing = max(0, depth - self._device_blocks) * geometry.block_bytes
            return Candidate(None, depth * geometry.block_tokens, depth, 0, missing, self._filling_below(depth))
        snapshot = found[position]
        where = self._where[position]
        depth = geometry.depth(snapshot.frontier)
        missing = max(0, depth - self._device_blocks) * geometry.block_bytes
        filling = self._filling_below(depth)
        if not where & DEVICE_IMAGE:
            missing += geometry.image_bytes
        if snapshot.tail and not where & DEVICE_TAIL:
            missing += geometry.block_bytes
        if where & FILLING_DEVICE:
            filling += 1
        return Candidate(SnapshotHandle(self._owner, snapshot), snapshot.frontier, depth, where, missing, filling)

    def _filling_below(self, depth: int) -> int:
        if not self._filling:
            return 0
        return sum(min(end, depth) - first for first, end in self._filling if first < depth)

    def __repr__(self) -> str:
        return f"Match({self.matched_tokens} of {self._prompt.num_tokens} tokens, {len(self.candidates)} candidates)"
