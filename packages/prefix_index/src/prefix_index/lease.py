"""A lane's pin of its path, and the lineage of snapshots it carries on."""

from __future__ import annotations

from prefix_index.errors import StaleHandle
from prefix_index.match import SnapshotHandle
from prefix_index.nodes import Edge, Hold, Snapshot
from prefix_index.prompt import Prompt


class Lease:
    """What `acquire` returns: the path up to `depth` is pinned until `release` or `cancel`. The index owns it; callers
    read it and hand it back."""

    __slots__ = (
        "_activated",
        "_along",
        "_chain",
        "_hold",
        "_owner",
        "_pools",
        "_prompt",
        "_published",
        "_resume_depth",
        "_resume_frontier",
        "_resumed",
        "_slot",
        "_tail_pages",
        "_tap",
    )

    def __init__(
        self,
        owner: object,
        pools: int,
        prompt: Prompt,
        hold: Hold,
        frontier: int,
        resumed: Snapshot | None,
    ) -> None:
        self._owner = owner
        self._pools = pools
        self._prompt = prompt
        self._hold = hold
        self._along = hold.depth  # blocks in which the path is known to equal the prompt
        self._resume_frontier = frontier
        self._resume_depth = hold.depth
        self._resumed = resumed
        self._activated = False
        self._tap: Snapshot | None = None  # the last prompt tap published under this lease
        self._published = frontier  # the deepest frontier of the lineage
        # Retained snapshots of this lineage that its next publication may supersede.
        self._chain: list[Snapshot]
        if resumed is None:
            self._chain = []
            self._slot = None
            self._tail_pages: tuple[int, ...] = ()
        else:
            self._chain = [resumed] if resumed.companion is None else [resumed, resumed.companion]
            self._slot = resumed.slot
            self._tail_pages = resumed.tail_pages or ()

    @property
    def open(self) -> bool:
        """Whether the lease still pins its path."""
        return self._hold.edge is not None

    @property
    def prompt(self) -> Prompt:
        return self._prompt

    @property
    def frontier(self) -> int:
        """Tokens this lease resumed from: what its lane need not compute."""
        return self._resume_frontier

    @property
    def depth(self) -> int:
        """Blocks the lease has pinned by now; `extend` goes on here."""
        return self._hold.depth

    @property
    def snapshot(self) -> SnapshotHandle | None:
        """The snapshot it resumed from."""
        return SnapshotHandle(self._owner, self._resumed) if self._resumed is not None else None

    @property
    def slot(self) -> int | None:
        """The device slot of the image it resumed from, as it was at `acquire`; None when the image was on the Host."""
        return self._slot

    @property
    def tail_pages(self) -> tuple[int, ...]:
        """The device pages of the tail it resumed from, one per pool, as they were at `acquire`."""
        return self._tail_pages

    @property
    def pages(self) -> tuple[tuple[int, ...], ...]:
        """Per pool, the device pages of the blocks the lease resumed with, as far as they are held by now. O(edges)."""
        edge = self._hold.edge
        if edge is None:
            raise StaleHandle("pages: the lease must be open, got a released one")
        pools = self._pools
        parts: list[list[int]] = []
        while edge.parent is not None:
            if edge.start < self._resume_depth:
                parts.append(edge.pages)
            edge = edge.parent
        joined: list[int] = []
        while parts:
            joined += parts.pop()
        del joined[self._resume_depth * pools :]
        return tuple(tuple(joined[pool::pools]) for pool in range(pools)) if pools > 1 else (tuple(joined),)

    def __repr__(self) -> str:
        state = f"depth={self.depth}" if self.open else "released"
        return f"<lease resumed at {self._resume_frontier}, {state}>"


def path_of(edge: Edge) -> list[Edge]:
    """The edges from the root's child down to `edge`."""
    path = []
    while edge.parent is not None:
        path.append(edge)
        edge = edge.parent
    path.reverse()
    return path
