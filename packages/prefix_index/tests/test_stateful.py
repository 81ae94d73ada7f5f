"""PrefixIndex against the naive model: the same calls, the same answers, the same state after every one.

The default run is short; the environment variable PREFIX_INDEX_PROFILE=long selects the long one.
"""

from __future__ import annotations

import itertools
import math
import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from naive_index import NaiveFreed, NaiveIndex, NaiveLease, NaiveSnapshot, NaiveTicket, as_bytes
from prefix_index import (
    AbortTooLate,
    CostModel,
    Freed,
    Lease,
    Pool,
    PrefixIndex,
    SnapshotHandle,
    SnapshotKind,
    Ticket,
    Tier,
    xxh3_block_hash,
)

settings.register_profile("index-short", max_examples=60, stateful_step_count=40, deadline=None)
settings.register_profile("index-long", max_examples=2000, stateful_step_count=80, deadline=None)
PROFILE = settings.get_profile("index-long" if os.environ.get("PREFIX_INDEX_PROFILE") == "long" else "index-short")

SIZE = 3
IMAGE_SLABS = 2
TIERS = {"device": Tier.DEVICE, "host": Tier.HOST}
HASHES = {
    "xxh3": xxh3_block_hash,
    "constant": lambda parent, tokens, extra: 7,
    "parity": lambda parent, tokens, extra: sum(tokens) % 2,
}
PAIRS = st.sampled_from([(), (), (), ((1, 5),), ((4, 5),), ((4, 6),), ((4, 5), (7, 9))])
TOKENS = st.lists(st.integers(0, 1), max_size=6)


class Lane:
    """A lease in both worlds, and the tokens it goes on with."""

    def __init__(self, lease: Lease, model: NaiveLease, tokens: list[int]) -> None:
        self.lease = lease
        self.model = model
        self.tokens = tokens


class IndexMachine(RuleBasedStateMachine):
    snapshots = True

    @initialize(
        lags=st.sampled_from([(0,), (0,), (1,), (0, 1), (0, 0)]),
        hashing=st.sampled_from(sorted(HASHES)),
        pair_seconds=st.sampled_from([0.0, 1e-6]),
        image_bytes=st.sampled_from([1, 50_000, 5_000_000]),
    )
    def build(self, lags: tuple[int, ...], hashing: str, pair_seconds: float, image_bytes: int) -> None:
        cost = CostModel(pair_seconds=pair_seconds, batch_seconds=1e-4, token_seconds=1e-4)
        self.index = PrefixIndex(
            block_tokens=SIZE,
            pools=tuple(Pool(lag=lag) for lag in lags),
            snapshots=self.snapshots,
            block_bytes=1000,
            image_bytes=image_bytes,
            image_slabs=IMAGE_SLABS,
            cost=cost,
            block_hash=HASHES[hashing],
        )
        self.model = NaiveIndex(SIZE, lags, self.snapshots, 1000, image_bytes, cost)
        self.pools = len(lags)
        self.lanes: list[Lane] = []
        self.tickets: list[tuple[Ticket, NaiveTicket]] = []
        self.known: dict[NaiveSnapshot, SnapshotHandle] = {}
        self.prompts: list[tuple[bytes, list[int], tuple[tuple[int, int], ...]]] = []
        self.handle = 0

    def handles(self, count: int) -> list[int]:
        self.handle += count
        return list(range(self.handle - count, self.handle))

    def page_sets(self, count: int) -> list[tuple[int, ...]]:
        return [tuple(self.handles(self.pools)) for _ in range(count)]

    def as_given(self, pages: list[tuple[int, ...]]) -> list[object]:
        return [entry[0] for entry in pages] if self.pools == 1 else list(pages)

    def same(self, freed: Freed, expected: NaiveFreed) -> None:
        assert list(freed.pages) == expected.pages
        assert list(freed.slots) == expected.slots
        assert list(freed.slabs) == expected.slabs

    # ------------------------------------------------------------------ rules

    @rule(
        data=st.data(),
        namespace=st.sampled_from([b"", b"", b"tenant"]),
        fresh=TOKENS,
        pairs=PAIRS,
    )
    def look_up(
        self, data: st.DataObject, namespace: bytes, fresh: list[int], pairs: tuple[tuple[int, int], ...]
    ) -> None:
        """Match a prompt that mostly continues or edits an earlier one, and maybe start a lane on it."""
        tokens = fresh
        if self.prompts and data.draw(st.integers(0, 4)):
            namespace, earlier, pairs = data.draw(st.sampled_from(self.prompts))
            keep = data.draw(st.integers(0, len(earlier)))
            tokens = [*earlier[:keep], *fresh] if data.draw(st.booleans()) else [*earlier, *fresh]
        tokens = [*tokens, 1][:24]
        self.prompts = [*self.prompts[-7:], (namespace, tokens, pairs)]
        prompt = self.index.prepare(tokens, namespace, pairs)
        match = self.index.match(prompt)
        path = self.model.walk(namespace, tokens, pairs)
        assert match.matched_blocks == len(path)
        assert match.device_blocks == self.model.held(namespace, path, "device")
        assert match.host_blocks == self.model.held(namespace, path, "host")
        assert sum(end - first for first, end in match.filling) == self.model.filling(namespace, path)
        frontiers = self.check_candidates(match, namespace, tokens, pairs, path)
        choice = data.draw(st.integers(-1, len(frontiers) - 1))
        if len(self.lanes) < 4 and data.draw(st.integers(0, 3)):
            candidate = match.candidates[choice] if choice >= 0 else None
            lease = self.index.acquire(match, candidate)
            snapshot = None
            frontier = 0
            if candidate is not None:
                frontier = candidate.frontier
                if self.snapshots:
                    snapshot = self.model.candidates(namespace, tokens, pairs)[choice]
                    path = snapshot.path
                else:
                    path = path[: candidate.depth]
            else:
                path = ()
            model = self.model.acquire(namespace, pairs, path, snapshot, frontier)
            assert lease.depth == len(path)
            assert lease.frontier == frontier
            assert lease.slot == (snapshot.slot if snapshot is not None else None)
            pages = [self.model.blocks[namespace, path[: i + 1]].pages for i in range(len(path))]
            resident = [entry for entry in pages if entry is not None]
            assert lease.pages == tuple(tuple(entry[pool] for entry in resident) for pool in range(self.pools))
            self.lanes.append(Lane(lease, model, tokens))

    def check_candidates(self, match, namespace, tokens, pairs, path) -> list[int]:  # type: ignore[no-untyped-def]
        if not self.snapshots:
            found = [c.frontier for c in match.candidates]
            assert found == [depth * SIZE for depth in range(len(path), 0, -1)]
            return found
        expected = self.model.candidates(namespace, tokens, pairs)
        for candidate, snapshot in zip(match.candidates, expected, strict=True):
            assert candidate.frontier == snapshot.frontier
            assert candidate.kind is snapshot.kind
            assert candidate.restore_bytes == self.model.restore_bytes(snapshot)
            own = self.model.filling(namespace, snapshot.path) + snapshot.filling_device
            assert candidate.filling == own
            assert candidate.snapshot == self.known[snapshot]
        return [snapshot.frontier for snapshot in expected]

    @precondition(lambda self: self.lanes)
    @rule(data=st.data(), generated=TOKENS, count=st.integers(1, 3))
    def commit(self, data: st.DataObject, generated: list[int], count: int) -> None:
        lane = data.draw(st.sampled_from(self.lanes))
        depth = lane.lease.depth
        if self.model.held(lane.model.namespace, lane.model.path, "device") < depth:
            return
        lane.tokens = [*lane.tokens, *generated]
        run = lane.tokens[depth * SIZE : (depth + count) * SIZE]
        run = run[: len(run) // SIZE * SIZE]
        pages = self.page_sets(len(run) // SIZE)
        done = self.index.extend(lane.lease, run, self.as_given(pages))  # type: ignore[arg-type]
        expected = self.model.extend(lane.model, run, pages)
        for name in ("inserted", "reattached", "duplicate"):
            ranges = getattr(done, name)
            assert [block for first, end in ranges for block in range(first, end)] == expected[name]
            assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))

    @precondition(lambda self: self.snapshots and self.lanes)
    @rule(data=st.data(), kind=st.sampled_from(list(SnapshotKind)))
    def publish(self, data: st.DataObject, kind: SnapshotKind) -> None:
        lane = data.draw(st.sampled_from(self.lanes))
        if self.model.held(lane.model.namespace, lane.model.path, "device") < lane.lease.depth:
            return
        low = lane.lease.frontier + 1
        high = min(len(lane.tokens), (lane.lease.depth + 1) * SIZE - 1 + self.model.lag)
        if low > high:
            return
        frontier = data.draw(st.integers(low, high))
        depth = self.model.depth(frontier)
        tail = tuple(lane.tokens[depth * SIZE : frontier])
        tail_pages = tuple(self.handles(self.pools)) if tail else ()
        slot = self.handles(1)[0]
        assert self.index.worth(lane.lease, frontier) == self.model.estimate(lane.model.published, frontier)
        if data.draw(st.booleans()):
            self.index.supersede(lane.lease, frontier, kind)
            self.model.supersede(lane.model, frontier, kind)
        done = self.index.publish(
            lane.lease, frontier, slot=slot, tail=as_bytes(tail), tail_pages=tail_pages, kind=kind
        )
        snapshot, created = self.model.publish(lane.model, frontier, tail, slot, tail_pages, kind)
        lane.published = True  # type: ignore[attr-defined]
        assert done.created == created
        assert done.snapshot.frontier == frontier
        if created:
            self.known[snapshot] = done.snapshot
        else:
            assert self.known[snapshot] == done.snapshot

    @precondition(lambda self: self.lanes)
    @rule(data=st.data())
    def activate(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(self.lanes))
        if not lane.model.activated:
            self.index.activate(lane.lease)
            self.model.activate(lane.model)

    @precondition(lambda self: self.lanes)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(self.lanes))
        untouched = lane.lease.depth == self.model.depth(lane.lease.frontier) and not hasattr(lane, "published")
        if untouched and not lane.model.activated and not lane.lease._worked and data.draw(st.booleans()):
            self.index.cancel(lane.lease)
            self.model.cancel(lane.model)
        else:
            self.index.release(lane.lease)
            self.model.release(lane.model)
        self.lanes.remove(lane)

    @rule(count=st.integers(1, 5), data=st.data())
    def evict_device(self, count: int, data: st.DataObject) -> None:
        protect = self.protected(data)
        self.same(self.index.evict_device(count, [self.known[s] for s in protect]), self.model.evict_device(count))
        self.unprotect(protect)

    @rule(count=st.integers(1, 6), data=st.data())
    def evict_host(self, count: int, data: st.DataObject) -> None:
        claim = self.draw_claim(data)
        protect = self.protected(data)
        freed = self.index.evict_host(count, [self.known[s] for s in protect], claim)
        self.same(freed, self.model.evict_host(count, claim))
        self.unprotect(protect)

    def protected(self, data: st.DataObject) -> list[NaiveSnapshot]:
        """Maybe one snapshot to protect; the model sees it as a lease."""
        if not self.model.snapshots or data.draw(st.integers(0, 3)):
            return []
        snapshot = data.draw(st.sampled_from(self.model.snapshots))
        self.model.acquire(snapshot.namespace, (), snapshot.path, snapshot, snapshot.frontier)
        return [snapshot]

    def unprotect(self, protect: list[NaiveSnapshot]) -> None:
        if protect:
            self.model.leases.pop()

    def draw_claim(self, data: st.DataObject) -> float:
        values = [self.model.value(s) for s in self.model.snapshots if not s.superseded]
        return data.draw(st.sampled_from([math.inf, math.inf, 0.0, *values]))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def claim_slot(self, data: st.DataObject) -> None:
        claim = self.draw_claim(data)
        freed, expected = self.index.claim_slot(claim), self.model.claim_slot(claim)
        assert (freed is None) == (expected is None)
        if freed is not None and expected is not None:
            self.same(freed, expected)

    @precondition(lambda self: self.lanes)
    @rule(data=st.data(), tier=st.sampled_from(["device", "host", "host"]), count=st.integers(1, 4))
    def fill_blocks(self, data: st.DataObject, tier: str, count: int) -> None:
        lane = data.draw(st.sampled_from(self.lanes))
        there = self.model.held(lane.model.namespace, lane.model.path, tier)
        assert self.index.held(lane.lease, TIERS[tier]) == there
        count = min(count, lane.lease.depth - there)
        if count <= 0:
            return
        handles = self.page_sets(count) if tier == "device" else [(handle,) for handle in self.handles(count)]
        given = self.as_given(handles) if tier == "device" else [handle[0] for handle in handles]
        ticket = self.index.begin_fill(lane.lease, TIERS[tier], given)  # type: ignore[arg-type]
        model = self.model.begin_blocks(lane.model, tier, handles)
        assert ticket.blocks == (there, there + count)
        self.tickets.append((ticket, model))

    @precondition(lambda self: self.model.snapshots)
    @rule(data=st.data(), promote=st.booleans())
    def fill_snapshot(self, data: st.DataObject, promote: bool) -> None:
        snapshot = data.draw(st.sampled_from(self.model.snapshots))
        if snapshot.filling_device or snapshot.filling_host:
            return
        complete = snapshot.slot is not None and (not snapshot.tail or snapshot.tail_pages is not None)
        handles: tuple[int, ...] = ()
        slot = None
        if complete and not snapshot.host:
            tier = "host"
            handles = tuple(self.handles(IMAGE_SLABS + bool(snapshot.tail)))
        elif not complete and snapshot.host:
            tier = "device"
            on_device = self.model.held(snapshot.namespace, snapshot.path, "device") == len(snapshot.path)
            if snapshot.tail and snapshot.tail_pages is None and on_device:
                handles = tuple(self.handles(self.pools))
            if snapshot.slot is None and (promote or not handles):
                slot = self.handles(1)[0]
            if not handles and slot is None:
                return
        else:
            return
        ticket = self.index.begin_fill(self.known[snapshot], TIERS[tier], handles, slot=slot)
        self.tickets.append((ticket, self.model.begin_snapshot(snapshot, tier, handles, slot)))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        ticket, model = data.draw(st.sampled_from(self.tickets))
        self.index.land(ticket)
        self.model.land(model)
        self.tickets.remove((ticket, model))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        ticket, model = data.draw(st.sampled_from(self.tickets))
        if self.model.too_late(model):
            with pytest.raises(AbortTooLate):
                self.index.abort(ticket)
        else:
            self.same(self.index.abort(ticket), self.model.abort(model))
            self.tickets.remove((ticket, model))

    @rule(namespace=st.sampled_from([None, b"", b"tenant"]), rare=st.integers(0, 9))
    def clear(self, namespace: bytes | None, rare: int) -> None:
        pinned = [h for h in (*self.model.leases, *self.model.tickets) if namespace in (None, h.namespace)]
        if rare or pinned:
            return
        freed = self.index.clear(namespace)
        gone = [b for b in self.model.blocks.values() if namespace in (None, b.namespace)]
        lost = [s for s in self.model.snapshots if namespace in (None, s.namespace)]
        expected = NaiveFreed()
        for snapshot in lost:
            self.model.drop(snapshot, expected)
        for block in gone:
            if block.pages is not None:
                expected.pages.append(self.model.as_pages(block.pages))
            if block.slab is not None:
                expected.slabs.append(block.slab)
            del self.model.blocks[block.namespace, block.path]
        assert sorted(freed.pages) == sorted(expected.pages)  # type: ignore[type-var]
        assert sorted(freed.slots) == sorted(expected.slots)
        assert sorted(freed.slabs) == sorted(expected.slabs)

    # ------------------------------------------------------------------ after every step

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "index"):
            self.index.check_invariants()
            assert self.index.dump() == self.model.dump()
            evictable = self.index.stats().evictable_device_pages
            pages = [b for b in self.model.blocks.values() if b.pages is not None]
            tails = [s for s in self.model.snapshots if s.tail_pages is not None]
            assert evictable == sum(not self.model.pins(b.namespace, b.path) for b in pages) + sum(
                not self.model.snapshot_pins(s) for s in tails
            )


class StatelessMachine(IndexMachine):
    snapshots = False


def test_the_index_equals_the_naive_model() -> None:
    run_state_machine_as_test(IndexMachine, settings=PROFILE)


def test_the_index_without_snapshots_equals_the_naive_model() -> None:
    run_state_machine_as_test(StatelessMachine, settings=settings(PROFILE, max_examples=PROFILE.max_examples // 3))
