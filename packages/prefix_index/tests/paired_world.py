"""The index and the naive model driven side by side. Every operation asks `pick(n)` for its choices, so that Hypothesis
and a seeded generator drive the same code; `check` compares everything after each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

from follower import Follower
from naive_index import NaiveIndex
from naive_records import NaiveFill, NaiveFreed, NaiveLease, NaiveSnapshot, Pairs, Path, as_bytes
from prefix_index import (
    AbortTooLate,
    CostModel,
    Demand,
    Fill,
    Freed,
    Lease,
    Match,
    Pool,
    PrefixIndex,
    SnapshotHandle,
    SnapshotKind,
    Tier,
    xxh3_block_hash,
)

T = TypeVar("T")

SIZE = 3
IMAGE_SLABS = 2
LONGEST = 30
TIERS = {"device": Tier.DEVICE, "host": Tier.HOST}
LAGS = [(0,), (0,), (1,), (0, 1), (0, 0)]
HASHES: dict[str, Callable[[int, bytes, int], int]] = {
    "xxh3": xxh3_block_hash,
    "constant": lambda parent, tokens, extra: 7,
    "parity": lambda parent, tokens, extra: sum(tokens) % 2,
}
PAIRS: list[Pairs] = [(), (), (), (), ((1, 5),), ((4, 5),), ((4, 6),), ((4, 5), (7, 9))]
KINDS = [SnapshotKind.TAP, SnapshotKind.TAP, SnapshotKind.ENDPOINT, SnapshotKind.ENDPOINT, SnapshotKind.BOUNDARY]


class Lane:
    """A lease in both worlds, and the tokens it goes on with."""

    def __init__(self, lease: Lease, model: NaiveLease, tokens: list[int]) -> None:
        self.lease = lease
        self.model = model
        self.tokens = tokens


class World:
    """One index, one model, the lanes and fills that are open, and the handles given out so far."""

    def __init__(self, pick: Callable[[int], int], *, snapshots: bool = True) -> None:
        self.pick = pick
        self.snapshots = snapshots
        lags = self.one_of(LAGS)
        image_bytes = self.one_of([1, 5_000, 5_000_000])
        hashing = self.one_of([*sorted(HASHES), "xxh3"])
        cost = CostModel(
            chunk_seconds=self.one_of([0.0, 1e-3]),
            chunk_tokens=3 * SIZE,
            pair_seconds=self.one_of([0.0, 1e-6]),
            batch_seconds=1e-5,
            token_seconds=1e-4,
        )
        self.index = PrefixIndex(
            block_tokens=SIZE,
            pools=tuple(Pool(lag=lag) for lag in lags),
            snapshots=snapshots,
            block_bytes=1000,
            image_bytes=image_bytes,
            image_slabs=IMAGE_SLABS,
            cost=cost,
            block_hash=HASHES[hashing],
        )
        self.index._scheme.run_bytes = self.one_of([1, 3, 128]) * SIZE * 4
        # With forced collisions a hash names no block, so a follower could not tell blocks apart.
        self.follower = Follower() if hashing == "xxh3" else None
        if self.follower is not None:
            self.subscription = self.index.subscribe(self.follower)
        self.model = NaiveIndex(SIZE, lags, snapshots, 1000, image_bytes, cost)
        self.pools = len(lags)
        self.lanes: list[Lane] = []
        self.fills: list[tuple[Fill, NaiveFill]] = []
        self.known: dict[NaiveSnapshot, SnapshotHandle] = {}
        self.prompts: list[tuple[bytes, list[int], Pairs]] = []
        self.handle = 0
        self.demanded: tuple[Demand, int] | None = None

    # ------------------------------------------------------------------ choosing

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.pick(len(options))]

    def chance(self, one_in: int) -> bool:
        return self.pick(one_in) == 0

    def some_tokens(self, longest: int) -> list[int]:
        return [self.pick(2) for _ in range(self.pick(longest + 1))]

    def handles(self, count: int) -> list[int]:
        self.handle += count
        return list(range(self.handle - count, self.handle))

    def page_sets(self, count: int) -> list[tuple[int, ...]]:
        return [tuple(self.handles(self.pools)) for _ in range(count)]

    def as_given(self, pages: list[tuple[int, ...]]) -> list[int] | list[tuple[int, ...]]:
        return [entry[0] for entry in pages] if self.pools == 1 else pages

    # ------------------------------------------------------------------ operations

    def step(self) -> None:
        """One operation, the common ones more often."""
        operations = [
            *[self.turn] * 6,
            *[self.look_up] * 2,
            *[self.commit] * 3,
            *[self.publish] * 3,
            self.activate,
            *[self.finish] * 3,
            *[self.fill_blocks] * 3,
            *[self.fill_snapshot] * 3,
            *[self.land] * 4,
            self.abort,
            *[self.evict_device] * 3,
            *[self.evict_host] * 3,
            *[self.claim_slot] * 2,
        ]
        self.one_of(operations)()

    def a_prompt(self) -> tuple[bytes, list[int], Pairs]:
        """Mostly one that goes on from an earlier one, or edits it."""
        if self.prompts and not self.chance(5):
            namespace, earlier, pairs = self.one_of(self.prompts)
            keep = self.pick(len(earlier) + 1) if self.chance(3) else len(earlier)
            tokens = [*earlier[:keep], *self.some_tokens(6)]
        else:
            namespace = self.one_of([b"", b"", b"tenant"])
            pairs = self.one_of(PAIRS)
            tokens = self.some_tokens(12)
        tokens = [*tokens, 1][:LONGEST]
        self.prompts = [*self.prompts[-5:], (namespace, tokens, pairs)]
        return namespace, tokens, pairs

    def look_up(self, deepest: bool = False) -> Lane | None:
        """Match a prompt, compare everything the match says, and maybe start a lane on it."""
        namespace, tokens, pairs = self.a_prompt()
        prompt = self.index.prepare(tokens, namespace, pairs)
        match = self.index.match(prompt)
        path = self.model.walk(namespace, tokens, pairs)
        assert match.matched_blocks == len(path)
        assert match.device_blocks == self.model.held(namespace, path, "device")
        assert match.host_blocks == self.model.held(namespace, path, "host")
        assert sum(end - first for first, end in match.filling) == self.model.filling(namespace, path)
        count = self.check_candidates(match, namespace, tokens, pairs, path)
        if len(self.lanes) >= 4:
            return None
        choice = 0 if deepest and count else self.pick(count + 1) - 1
        return self.start(match, namespace, tokens, pairs, path, min(choice, count - 1))

    def check_candidates(self, match: Match, namespace: bytes, tokens: list[int], pairs: Pairs, path: Path) -> int:
        if not self.snapshots:
            assert [c.frontier for c in match.candidates] == [depth * SIZE for depth in range(len(path), 0, -1)]
            return len(path)
        expected = self.model.candidates(namespace, tokens, pairs)
        for candidate, snapshot in zip(match.candidates, expected, strict=True):
            assert candidate.frontier == snapshot.frontier
            assert candidate.kind is snapshot.kind
            assert candidate.restore_bytes == self.model.restore_bytes(snapshot)
            assert candidate.filling == self.model.filling(namespace, snapshot.path) + snapshot.filling_device
            assert candidate.snapshot == self.known[snapshot]
        return len(expected)

    def start(self, match: Match, namespace: bytes, tokens: list[int], pairs: Pairs, path: Path, choice: int) -> Lane:
        candidate = match.candidates[choice] if choice >= 0 else None
        self.demanded = self.index.demand(match, candidate), self.index.stats().evictable_device_pages
        lease = self.index.acquire(match, candidate)
        snapshot = None
        frontier = 0
        if candidate is None:
            path = ()
        else:
            frontier = candidate.frontier
            if self.snapshots:
                snapshot = self.model.candidates(namespace, tokens, pairs)[choice]
                path = snapshot.path
            else:
                path = path[: candidate.depth]
        model = self.model.acquire(namespace, pairs, path, snapshot, frontier)
        assert (lease.depth, lease.frontier) == (len(path), frontier)
        assert lease.slot == (snapshot.slot if snapshot is not None else None)
        pages = [self.model.blocks[namespace, path[: i + 1]].pages for i in range(len(path))]
        resident = [entry for entry in pages if entry is not None]
        assert lease.pages == tuple(tuple(entry[pool] for entry in resident) for pool in range(self.pools))
        self.check_admission(match, lease)
        lane = Lane(lease, model, tokens)
        self.lanes.append(lane)
        return lane

    def check_admission(self, match: Match, lease: Lease) -> None:
        """What a demand calls its own is exactly what the lease's pins took away from the evictable."""
        if self.demanded is not None:
            demand, before = self.demanded
            assert before - self.index.stats().evictable_device_pages == demand.own
            assert demand.depth == lease.depth
            there = self.index.held(lease, Tier.DEVICE)
            assert demand.restore - (lease.depth - there) in (0, 1)
            self.demanded = None

    def turn(self) -> None:
        """A whole request: resume deep, commit, publish, maybe write through, maybe finish."""
        lane = self.look_up(deepest=not self.chance(4))
        if lane is None:
            self.finish()
            return
        if not self.chance(3):
            self.activate(lane)
        self.commit(lane, len(lane.tokens) // SIZE)
        for _ in range(self.pick(3)):
            self.publish(lane)
        if self.chance(2):
            self.fill_blocks(lane, "host")
            if self.model.snapshots:
                self.fill_snapshot()
            for _ in range(self.pick(3)):
                self.land()
        if not self.chance(3):
            self.finish(lane)

    def a_lane(self, lane: Lane | None) -> Lane | None:
        return lane or (self.one_of(self.lanes) if self.lanes else None)

    def on_device(self, lane: Lane) -> bool:
        return self.model.held(lane.model.namespace, lane.model.path, "device") == lane.lease.depth

    def commit(self, lane: Lane | None = None, count: int | None = None) -> None:
        lane = self.a_lane(lane)
        if lane is None or not self.on_device(lane):
            return
        if count is None:
            count = 1 + self.pick(3)
            lane.tokens = [*lane.tokens, *self.some_tokens(6)][:LONGEST]
        depth = lane.lease.depth
        run = lane.tokens[depth * SIZE : (depth + count) * SIZE]
        run = run[: len(run) // SIZE * SIZE]
        pages = self.page_sets(len(run) // SIZE)
        done = self.index.extend(lane.lease, run, self.as_given(pages))
        expected = self.model.extend(lane.model, run, pages)
        for name in ("inserted", "reattached", "duplicate"):
            ranges = getattr(done, name)
            assert [block for first, end in ranges for block in range(first, end)] == expected[name]
            assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))

    def publish(self, lane: Lane | None = None) -> None:
        lane = self.a_lane(lane)
        if lane is None or not self.snapshots or not self.on_device(lane):
            return
        kind = self.one_of(KINDS)
        low = lane.lease.frontier + 1
        high = min(len(lane.tokens), (lane.lease.depth + 1) * SIZE - 1 + self.model.lag)
        if low > high:
            return
        frontier = high - min(self.pick(high - low + 1), self.pick(high - low + 1))
        depth = self.model.depth(frontier)
        tail = tuple(lane.tokens[depth * SIZE : frontier])
        tail_pages = tuple(self.handles(self.pools)) if tail else ()
        slot = self.handles(1)[0]
        assert self.index.worth(lane.lease, frontier) == self.model.estimate(lane.model.published, frontier)
        if self.chance(2):
            self.index.supersede(lane.lease, frontier, kind)
            self.model.supersede(lane.model, frontier, kind)
        run = as_bytes(tail)
        done = self.index.publish(lane.lease, frontier, slot=slot, tail=run, tail_pages=tail_pages, kind=kind)
        snapshot, created = self.model.publish(lane.model, frontier, tail, slot, tail_pages, kind)
        assert done.created == created
        assert done.snapshot.frontier == frontier
        assert self.known.setdefault(snapshot, done.snapshot) == done.snapshot

    def activate(self, lane: Lane | None = None) -> None:
        lane = self.a_lane(lane)
        if lane is not None and not lane.model.activated:
            self.index.activate(lane.lease)
            self.model.activate(lane.model)

    def finish(self, lane: Lane | None = None) -> None:
        lane = self.a_lane(lane)
        if lane is None:
            return
        if not lane.model.activated and self.chance(2):
            self.index.cancel(lane.lease)
            self.model.cancel(lane.model)
        else:
            self.index.release(lane.lease)
            self.model.release(lane.model)
        self.lanes.remove(lane)

    # ------------------------------------------------------------------ giving up

    def same(self, freed: Freed, expected: NaiveFreed) -> None:
        assert list(freed.pages) == expected.pages
        assert list(freed.slots) == expected.slots
        assert list(freed.slabs) == expected.slabs

    def protected(self) -> list[NaiveSnapshot]:
        """Maybe one snapshot to protect; the model sees it as a lease."""
        if not self.model.snapshots or not self.chance(4):
            return []
        snapshot = self.one_of(self.model.snapshots)
        self.model.acquire(snapshot.namespace, (), snapshot.path, snapshot, snapshot.frontier)
        return [snapshot]

    def a_claim(self) -> float:
        values = [self.model.value(s) for s in self.model.snapshots if not s.superseded]
        return self.one_of([math.inf, math.inf, 0.0, *values])

    def evict_device(self) -> None:
        count = 1 + self.pick(5)
        backed_only = self.chance(4)
        protect = self.protected()
        freed = self.index.evict_device(count, [self.known[s] for s in protect], backed_only=backed_only)
        self.same(freed, self.model.evict_device(count, backed_only))
        del self.model.leases[len(self.lanes) :]

    def evict_host(self) -> None:
        count = 1 + self.pick(6)
        claim = self.a_claim()
        protect = self.protected()
        freed = self.index.evict_host(count, [self.known[s] for s in protect], claim)
        self.same(freed, self.model.evict_host(count, claim))
        del self.model.leases[len(self.lanes) :]

    def claim_slot(self) -> None:
        claim = self.a_claim()
        freed, expected = self.index.claim_slot(claim), self.model.claim_slot(claim)
        assert (freed is None) == (expected is None)
        if freed is not None and expected is not None:
            self.same(freed, expected)

    def clear(self) -> None:
        namespace = self.one_of([None, b"", b"tenant"])
        if any(namespace in (None, held.namespace) for held in (*self.model.leases, *self.model.fills)):
            return
        freed = self.index.clear(namespace)
        expected = NaiveFreed()
        for snapshot in [s for s in self.model.snapshots if namespace in (None, s.namespace)]:
            self.model.drop(snapshot, expected)
        for block in [b for b in self.model.blocks.values() if namespace in (None, b.namespace)]:
            if block.pages is not None:
                expected.pages.append(self.model.as_pages(block.pages))
            if block.slab is not None:
                expected.slabs.append(block.slab)
            del self.model.blocks[block.namespace, block.path]
        assert sorted(freed.pages) == sorted(expected.pages)  # type: ignore[type-var]
        assert sorted(freed.slots) == sorted(expected.slots)
        assert sorted(freed.slabs) == sorted(expected.slabs)

    # ------------------------------------------------------------------ fills

    def fill_blocks(self, lane: Lane | None = None, tier: str | None = None) -> None:
        lane = self.a_lane(lane)
        if lane is None:
            return
        tier = tier or self.one_of(["device", "device", "host"])
        there = self.model.held(lane.model.namespace, lane.model.path, tier)
        assert self.index.held(lane.lease, TIERS[tier]) == there
        missing = lane.lease.depth - there
        if not missing:
            return
        count = missing if self.chance(2) else 1 + self.pick(missing)
        handles = self.page_sets(count) if tier == "device" else [(handle,) for handle in self.handles(count)]
        given = self.as_given(handles) if tier == "device" else [handle[0] for handle in handles]
        fill = self.index.begin_fill(lane.lease, TIERS[tier], given)
        assert fill.blocks == (there, there + count)
        self.fills.append((fill, self.model.begin_blocks(lane.model, tier, handles)))

    def fill_snapshot(self) -> None:
        if not self.model.snapshots:
            return
        snapshot = self.one_of(self.model.snapshots)
        if snapshot.filling_device or snapshot.filling_host:
            return
        complete = snapshot.slot is not None and (not snapshot.tail or snapshot.tail_pages is not None)
        tier = "device" if snapshot.host else "host"
        handles: tuple[int, ...] = ()
        slot = None
        if tier == "host":
            if not complete:
                return
            handles = tuple(self.handles(IMAGE_SLABS + bool(snapshot.tail)))
        else:
            there = self.model.held(snapshot.namespace, snapshot.path, "device") == len(snapshot.path)
            if snapshot.tail and snapshot.tail_pages is None and there:
                handles = tuple(self.handles(self.pools))
            if snapshot.slot is None and (not handles or self.chance(2)):
                slot = self.handles(1)[0]
            if not handles and slot is None:
                return
        fill = self.index.begin_fill(self.known[snapshot], TIERS[tier], handles, slot=slot)
        self.fills.append((fill, self.model.begin_snapshot(snapshot, tier, handles, slot)))

    def land(self) -> None:
        if self.fills:
            fill, model = self.one_of(self.fills)
            self.index.land(fill)
            self.model.land(model)
            self.fills.remove((fill, model))

    def abort(self) -> None:
        if not self.fills:
            return
        fill, model = self.one_of(self.fills)
        if self.model.too_late(model):
            with pytest.raises(AbortTooLate):
                self.index.abort(fill)
        else:
            self.same(self.index.abort(fill), self.model.abort(model))
            self.fills.remove((fill, model))

    # ------------------------------------------------------------------ after every step

    def check(self) -> None:
        self.index.check_invariants()
        assert self.index.dump() == self.model.dump()
        blocks = [b for b in self.model.blocks.values() if b.pages is not None]
        tails = [s for s in self.model.snapshots if s.tail_pages is not None]
        free_blocks = sum(not self.model.pins(b.namespace, b.path) for b in blocks)
        free_tails = sum(not self.model.snapshot_pins(s) for s in tails)
        assert self.index.stats().evictable_device_pages == free_blocks + free_tails
        if self.follower is not None:
            assert self.subscription.error is None
            late = Follower()
            late.catch_up(self.index.state_events())
            assert self.follower.view() == late.view()
            on_device, on_host = self.in_flight("device"), self.in_flight("host")
            copies = sum(len(tiers) for tiers in self.follower.tiers.values())
            slabs = [b for b in self.model.blocks.values() if b.slab is not None]
            assert copies == len(blocks) - on_device + len(slabs) - on_host
            assert len(self.follower.snapshots) == len(self.model.snapshots)

    def in_flight(self, tier: str) -> int:
        """Blocks whose copy is on its way to `tier`."""
        fills = [model for _, model in self.fills if model.tier == tier and model.snapshot is None]
        return sum(len(fill.path) - fill.first for fill in fills)

    def settle(self) -> None:
        """End every lane and land every fill."""
        for fill, model in self.fills:
            self.index.land(fill)
            self.model.land(model)
        self.fills = []
        while self.lanes:
            self.finish()
