"""The records of the naive model: one a block, one a snapshot, one a lease, one a fill."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefix_index import SnapshotKind

Block = tuple[tuple[int, ...], int]  # tokens, extra
Path = tuple[Block, ...]
Pairs = tuple[tuple[int, int], ...]


@dataclass(eq=False)
class NaiveBlock:
    namespace: bytes
    path: Path  # from the root, this block included
    pages: tuple[int, ...] | None = None
    slab: int | None = None
    tick: int = 0


@dataclass(eq=False)
class NaiveSnapshot:
    namespace: bytes
    path: Path
    tail: tuple[int, ...]
    extra: int
    frontier: int
    kind: SnapshotKind
    slot: int | None
    tail_pages: tuple[int, ...] | None
    slabs: tuple[int, ...] | None = None
    host: bool = False
    filling_device: bool = False
    filling_host: bool = False
    hits: int = 0
    base: float = 0.0
    hit_tick: int = 0
    superseded: int = 0
    tick: int = 0
    companion: NaiveSnapshot | None = None
    alive: bool = True


@dataclass(eq=False)
class NaiveLease:
    namespace: bytes
    pairs: Pairs
    path: Path
    frontier: int
    resumed: NaiveSnapshot | None
    holds_snapshot: bool
    activated: bool = False
    chain: list[NaiveSnapshot] = field(default_factory=list)
    tap: NaiveSnapshot | None = None
    published: int = 0


@dataclass(eq=False)
class NaiveFill:
    tier: str
    namespace: bytes
    path: Path
    first: int
    snapshot: NaiveSnapshot | None = None
    slot: bool = False
    tail: bool = False


@dataclass
class NaiveFreed:
    pages: list[object] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    slabs: list[int] = field(default_factory=list)


def extra_at(pairs: Pairs, frontier: int) -> int:
    return max(((first, key) for first, key in pairs if first < frontier), default=(0, 0))[1]


def as_bytes(tokens: tuple[int, ...]) -> bytes:
    return b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)


def path_key(path: Path) -> tuple[tuple[bytes, int], ...]:
    return tuple((as_bytes(tokens), extra) for tokens, extra in path)


def rank(ticks: list[int]) -> dict[int, int]:
    return {tick: position for position, tick in enumerate(sorted(set(ticks)))}
