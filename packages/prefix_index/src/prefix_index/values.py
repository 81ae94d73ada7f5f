"""What crosses the border of the package by value: frozen, comparable, free of references into the index's tree."""

from __future__ import annotations

import enum
from dataclasses import dataclass

Pages = int | tuple[int, ...]
"""The device copy of one block: a page id, or one page id per pool when there are several."""


class Tier(enum.Enum):
    """Where a copy lives."""

    DEVICE = "device"
    HOST = "host"


class SnapshotKind(enum.IntEnum):
    """Why a snapshot was taken. Only a BOUNDARY may be shared by conversations on purpose."""

    TAP = 0
    ENDPOINT = 1
    OUTPUT_BOUNDARY = 2
    BOUNDARY = 3


class Reason(enum.Enum):
    """Why the deepest cached prefix of a prompt cannot be resumed at its end."""

    NONE = "none"  # it can, up to less than a block
    NO_SNAPSHOT = "no snapshot"  # blocks are there, no snapshot was ever taken so deep
    IMAGE_LOST = "image lost"  # a snapshot was there and was evicted
    FILLING = "filling"  # a copy is still on its way
    EXCLUDED = "excluded"  # the frontier lies inside a span the caller excluded


@dataclass(frozen=True, slots=True)
class Pool:
    """A device KV pool. `lag` is how many tokens its committed frontier is behind the text: 0, or 1 for a speculative
    backend."""

    lag: int = 0


@dataclass(frozen=True, slots=True)
class Extension:
    """What `extend` did, as (first block, end block) ranges in absolute blocks, shallowest first.

    Pages of inserted and reattached blocks belong to the index now; those of duplicates stay with the caller."""

    inserted: tuple[tuple[int, int], ...]
    reattached: tuple[tuple[int, int], ...]
    duplicate: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Freed:
    """Handles the index gave up, each kind in the order in which it did. They belong to the caller again."""

    pages: tuple[Pages, ...] = ()
    slots: tuple[int, ...] = ()
    slabs: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pages or self.slots or self.slabs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Gauges (what is there now) and counters (what happened since the index was made)."""

    blocks: int
    edges: int
    snapshots: int
    namespaces: int
    device_blocks: int
    device_tails: int
    evictable_device_pages: int
    host_blocks: int
    inflation: float
    blocks_inserted: int
    blocks_reattached: int
    blocks_duplicate: int
    snapshots_published: int
    snapshots_duplicate: int
    snapshots_superseded: int
    snapshots_lost: int
    hits: int
    tokens_resumed: int
    device_evictions: int
    slot_claims: int
