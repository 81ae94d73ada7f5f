"""What one running sequence holds of the memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefix_index import Lease, SnapshotHandle

from ..host import Restore
from ..usage import MissReason, Reuse

__all__ = ["LaneMemory"]

_WITHOUT_THE_CACHE = Reuse(reason=MissReason.DISABLED)


@dataclass(eq=False)
class LaneMemory:
    """One lane's share. Who owns a page of it, block by block::

        0 ............ frontier//64 ............ committed ............ len(pages)
        | the index's, pinned by  | the index's, or the      | the lane's: being written |
        | the lease               | lane's if a duplicate    | or reserved for output    |

    Attributes:
        row: its row of the block tables.
        slot: its state slot; 0 once a snapshot has taken it over.
        frontier: the token it resumed at.
        lease: its pin in the index; None for a request that does not use the cache.
        pages: the page of each block.
        committed: blocks that were handed to the index.
        private: the pages that are the lane's own.
        restore: the copies its first pass waits for.
        activated: whether a pass of it has succeeded. Until then it has only borrowed, and ends without a trace.
        claimed: the slots of taps whose pass has yet to be published.
        published: the snapshots it has made.
        reuse: what it skips and why no more; as set here, a lane that does without the cache.
        taps_taken: planned snapshots it has made.
        taps_skipped: planned snapshots that found no room.
    """

    row: int
    slot: int
    frontier: int
    lease: Lease | None
    pages: list[int]
    committed: int
    private: set[int]
    restore: Restore | None = None
    activated: bool = False
    claimed: list[int] = field(default_factory=list)
    published: list[SnapshotHandle] = field(default_factory=list)
    reuse: Reuse = _WITHOUT_THE_CACHE
    taps_taken: int = 0
    taps_skipped: int = 0
