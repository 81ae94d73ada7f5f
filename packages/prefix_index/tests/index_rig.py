"""An index with free lists, driven in whole turns of 64-token blocks; values are plain fractions."""

from __future__ import annotations

import math
from array import array

from prefix_index import CostModel, Freed, Lease, PrefixIndex, Publication, SnapshotHandle, SnapshotKind, Tier

MIB = 1 << 20
BLOCK = 64
IMAGE = 4
TAP, ENDPOINT, BOUNDARY = SnapshotKind.TAP, SnapshotKind.ENDPOINT, SnapshotKind.BOUNDARY


class Rig:
    """An index with free lists, and turns in terms of token counts: `stem` names a token stream."""

    def __init__(self, **options: object) -> None:
        cost = CostModel(token_seconds=1e-4, batch_seconds=0.0, bytes_per_second=math.inf)
        self.index = PrefixIndex(block_bytes=MIB, image_bytes=IMAGE * MIB, image_slabs=IMAGE, cost=cost, **options)  # type: ignore[arg-type]
        self.next = 0

    def take(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))

    def tokens(self, *parts: tuple[str, int]) -> list[int]:
        """(stem, length) parts joined: equal stems give equal tokens at equal offsets of their part."""
        return [sum(map(ord, stem)) * 10_000 + i for stem, length in parts for i in range(length)]

    def lease(self, tokens: list[int], resume: int | None = None) -> Lease:
        match = self.index.match(self.index.prepare([*tokens, 7]))
        candidate = match.best if resume is None else next((c for c in match.candidates if c.frontier == resume), None)
        return self.index.acquire(match, candidate)

    def commit(self, lease: Lease, tokens: list[int]) -> None:
        rest = tokens[lease.depth * BLOCK : len(tokens) // BLOCK * BLOCK]
        self.index.extend(lease, rest, self.take(len(rest) // BLOCK))

    def publish(self, lease: Lease, tokens: list[int], frontier: int, kind: SnapshotKind) -> Publication:
        tail = array("i", tokens[frontier // BLOCK * BLOCK : frontier]).tobytes()
        pages = self.take(1) if tail else []
        done = self.index.publish(lease, frontier, slot=self.take(1)[0], tail=tail, tail_pages=pages, kind=kind)
        self.index.check_invariants()
        return done

    def turn(
        self, tokens: list[int], *snapshots: tuple[int, SnapshotKind], resume: int | None = None, host: bool = False
    ) -> list[SnapshotHandle]:
        """Resume, commit, publish, optionally write everything through, release."""
        lease = self.lease(tokens, resume)
        self.commit(lease, tokens)
        made = [self.publish(lease, tokens, frontier, kind).snapshot for frontier, kind in snapshots]
        if host:
            self.to_host(lease)
            for snapshot in made:
                self.image_to_host(snapshot)
        self.index.release(lease)
        self.index.check_invariants()
        return made

    def to_host(self, lease: Lease) -> None:
        missing = lease.depth - self.index.held(lease, Tier.HOST)
        if missing:
            self.index.land(self.index.begin_fill(lease, Tier.HOST, self.take(missing)))

    def image_to_host(self, snapshot: SnapshotHandle) -> None:
        count = IMAGE + bool(snapshot.frontier % BLOCK)
        self.index.land(self.index.begin_fill(snapshot, Tier.HOST, self.take(count)))
        self.index.check_invariants()

    def frontiers(self, tokens: list[int]) -> list[int]:
        return [c.frontier for c in self.index.match(self.index.prepare([*tokens, 7])).candidates]

    def checked(self, freed: Freed) -> Freed:
        self.index.check_invariants()
        return freed
