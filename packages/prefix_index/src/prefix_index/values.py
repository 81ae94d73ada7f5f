"""What crosses the border of the package by value: frozen, comparable, free of references into the index's tree."""

from __future__ import annotations

import enum
import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prefix_index.errors import InvalidArgument

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


class Extension(NamedTuple):
    """What `extend` did, as (first block, end block) ranges in absolute blocks, shallowest first.

    Pages of inserted and reattached blocks belong to the index now; those of duplicates stay with the caller."""

    inserted: tuple[tuple[int, int], ...]
    reattached: tuple[tuple[int, int], ...]
    duplicate: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SnapshotCopies:
    """Where a snapshot lies: the slot of its image, the pages of its tail (one per pool), and on the Host the slabs of
    the image in their order, the tail's last. None and empty for what a tier does not have."""

    slot: int | None
    tail_pages: tuple[int, ...]
    slabs: tuple[int, ...]


class Freed(NamedTuple):
    """Handles the index gave up, each kind in the order in which it did. They belong to the caller again."""

    pages: tuple[Pages, ...] = ()
    slots: tuple[int, ...] = ()
    slabs: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pages or self.slots or self.slabs)


def integer(op: str, name: str, value: int) -> int:
    """`value` as a plain int; anything that is no whole number by its type raises InvalidArgument."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{op}: {name} must be an int, got {value!r}") from None


def page_list(op: str, pages: Sequence[Pages], num_pools: int, num_blocks: int) -> list[int]:
    """`pages` as one interleaved list, checked: one id per block, or one tuple of `num_pools` ids."""
    if len(pages) != num_blocks:
        raise InvalidArgument(f"{op}: one page entry per block is needed, {num_blocks}, got {len(pages)}")
    flat: list[int] = []
    try:
        if num_pools == 1:
            flat.extend(pages)  # type: ignore[arg-type]
        else:
            for entry in pages:
                if len(entry) != num_pools:  # type: ignore[arg-type]
                    raise InvalidArgument(f"{op}: a block needs one page per pool, {num_pools}, got {entry!r}")
                flat.extend(entry)  # type: ignore[arg-type]
        array("Q", flat)
    except (TypeError, OverflowError) as error:
        raise InvalidArgument(
            f"{op}: handles must be ints that are not negative, one tuple per block with several pools, got {error}"
        ) from None
    return flat
