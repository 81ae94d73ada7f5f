"""Plain values that callers pass in and get back, and checks of plain arguments. Nothing here knows the tree."""

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

Span = tuple[int, int]
"""A half-open range (begin, end) of tokens or blocks."""


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


@dataclass(frozen=True, slots=True)
class Pool:
    """A device KV pool.

    Attributes:
        lag: how many tokens its committed frontier is behind the text: 0, or 1 for a speculative backend.
    """

    lag: int = 0


class Extension(NamedTuple):
    """What `extend` did, as (first block, end block) ranges in absolute blocks, shallowest first.

    The pages of inserted and reattached blocks belong to the index now; those of duplicates stay with the caller.
    """

    inserted: tuple[Span, ...]
    reattached: tuple[Span, ...]
    duplicate: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class SnapshotCopies:
    """Where a snapshot lies. None and empty stand for what a tier does not have.

    Attributes:
        slot: the device slot of its image.
        tail_pages: the device pages of its tail, one per pool.
        slabs: on the Host the slabs of the image in their order, the tail's last.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The sizes an index is made with. The policy weighs them; the index itself moves no byte.

    Attributes:
        block_tokens: tokens per block.
        num_pools: device pools every block has a page in.
        lag: the largest of the pools' lags.
        block_bytes: size of a block's record.
        image_bytes: size of a state image.
        image_slabs: slabs a state image takes on the Host.
    """

    block_tokens: int
    num_pools: int
    lag: int
    block_bytes: int
    image_bytes: int
    image_slabs: int

    @classmethod
    def checked(
        cls,
        block_tokens: int,
        pools: Sequence[Pool],
        snapshots: bool,
        block_bytes: int,
        image_bytes: int,
        image_slabs: int,
    ) -> Geometry:
        """The geometry of a `PrefixIndex`, refused with InvalidArgument where a size makes no sense."""
        if not 1 <= integer("PrefixIndex", "block_tokens", block_tokens) <= 4096:
            raise InvalidArgument(f"PrefixIndex: block_tokens must be between 1 and 4096, got {block_tokens!r}")
        if not pools:
            raise InvalidArgument("PrefixIndex: at least one pool is needed, got none")
        for pool in pools:
            if pool.lag not in (0, 1):
                raise InvalidArgument(f"PrefixIndex: a pool's lag must be 0 or 1, got {pool.lag!r}")
        for name, value in (("block_bytes", block_bytes), ("image_bytes", image_bytes), ("image_slabs", image_slabs)):
            if integer("PrefixIndex", name, value) < 1:
                raise InvalidArgument(f"PrefixIndex: {name} must be positive, got {value!r}")
        return cls(
            block_tokens=block_tokens,
            num_pools=len(pools),
            lag=max(pool.lag for pool in pools) if snapshots else 0,
            block_bytes=block_bytes,
            image_bytes=image_bytes,
            image_slabs=image_slabs,
        )

    def depth(self, frontier: int) -> int:
        """Whole blocks below a snapshot at `frontier` that every pool has committed; the rest is its tail."""
        return max(0, frontier - self.lag) // self.block_tokens


def integer(op: str, name: str, value: int) -> int:
    """`value` as a plain int; InvalidArgument for anything that is no whole number by its type."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{op}: {name} must be an int, got {value!r}") from None


def count(op: str, name: str, value: int) -> int:
    """`value` as a plain int; InvalidArgument for what is no int or negative."""
    number = value if value.__class__ is int else integer(op, name, value)
    if number < 0:
        raise InvalidArgument(f"{op}: {name} must not be negative, got {number!r}")
    return number


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
