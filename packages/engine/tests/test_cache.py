"""Who owns which page and slot, from admission to the end of a lane. No model: the tests write recognisable bytes where
a pass would write KV and state."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from qwen35_engine.cache import LaneMemory, PrefixCache
from qwen35_engine.memory import DeviceMemory
from qwen35_kernels import KVProfile, PageLayout, StateLayout

BLOCK = 64


def memory_of(num_pages: int, num_slots: int) -> DeviceMemory:
    memory = DeviceMemory(
        page_layout=PageLayout(profile=KVProfile.FP32, num_layers=1, num_kv_heads=1, head_dim=16),
        state_layout=StateLayout(
            num_layers=1,
            num_value_heads=1,
            key_dim=16,
            value_dim=16,
            conv_channels=16,
            conv_width=4,
            conv_dtype=torch.float32,
            hidden_size=16,
            hidden_dtype=torch.float32,
        ),
        layers=[True, False],
        num_pages=num_pages,
        num_slots=num_slots,
        device=torch.device("cpu"),
    )
    memory.pages.zero_()
    memory.states.zero_()
    return memory


class Bench:
    """A cache over a small memory and the lanes that run on it."""

    def __init__(self, *, pages: int = 20, lanes: int = 3, snapshots: int = 3) -> None:
        self.memory = memory_of(1 + pages, 1 + lanes + snapshots)
        self.cache = PrefixCache(self.memory, max_concurrency=lanes, context_blocks=pages, snapshot_slots=snapshots)
        self.lanes: list[tuple[LaneMemory, array[int]]] = []

    def admit(self, tokens: list[int], total: int | None = None, *, reuse: bool = True) -> LaneMemory | None:
        prompt = self.cache.index.prepare(array("i", tokens)) if reuse else None
        lane = self.cache.admit(prompt, total_tokens=total or len(tokens))
        if lane is not None:
            self.lanes.append((lane, array("i", tokens)))
        return lane

    def compute(self, lane: LaneMemory, tokens: list[int], begin: int, end: int) -> None:
        """Write what a pass over ``tokens[begin:end]`` would: a page says which tokens it holds, a slot how far its
        state is."""
        for block in range(begin // BLOCK, -(-end // BLOCK)):
            assert lane.pages[block] in lane.private
            self.memory.pages[lane.pages[block]] = signature(tokens[: min(end, (block + 1) * BLOCK)])
        self.memory.states[lane.slot] = signature(tokens[:end])

    def check(self) -> None:
        """Every page and slot has one owner: the free list, a lane, or the index."""
        index, stats = self.cache.index, self.cache.stats()
        index.check_invariants()
        gauges = index.stats()
        private = [page for lane, _ in self.lanes for page in lane.private]
        assert len(set(private)) == len(private)
        assert stats.pages_free + len(private) + gauges.device_blocks + gauges.device_tails == stats.pages_total
        assert stats.snapshot_slots_used == gauges.snapshots
        assert stats.slots_free + len(self.lanes) + gauges.snapshots == stats.slots_total
        for lane, _ in self.lanes:
            table = self.cache.block_tables[lane.row].tolist()
            assert table[: len(lane.pages)] == lane.pages
            assert not any(table[len(lane.pages) :])


def signature(tokens: list[int]) -> int:
    """A byte that tells token histories apart well enough."""
    return hash(tuple(tokens)) % 251 + 1


def run(bench: Bench, tokens: list[int]) -> LaneMemory:
    """A lane that computes its whole prompt and commits it."""
    lane = bench.admit(tokens)
    assert lane is not None
    bench.compute(lane, tokens, lane.frontier, len(tokens))
    bench.cache.commit(lane, array("i", tokens), len(tokens))
    return lane


def finish(bench: Bench, lane: LaneMemory, tokens: list[int]) -> None:
    bench.lanes = [(other, t) for other, t in bench.lanes if other is not lane]
    bench.cache.finish(lane, array("i", tokens), len(tokens))


def test_an_endpoint_takes_the_slot_and_the_partial_page_over() -> None:
    bench = Bench()
    tokens = list(range(150))
    lane = run(bench, tokens)
    slot, partial = lane.slot, lane.pages[2]
    finish(bench, lane, tokens)
    bench.check()
    following = [*tokens, 7, 8]
    resumed = bench.admit(following)
    assert resumed is not None
    assert resumed.frontier == 150
    assert resumed.pages[:2] == lane.pages[:2]
    # State and partial page are copies: the snapshot stays as it is while the lane goes on.
    assert resumed.slot != slot
    assert resumed.pages[2] != partial
    assert (bench.memory.states[resumed.slot] == signature(tokens)).all()
    assert (bench.memory.pages[resumed.pages[2]] == signature(tokens)).all()
    bench.compute(resumed, following, 150, 152)
    assert (bench.memory.states[slot] == signature(tokens)).all()
    assert (bench.memory.pages[partial] == signature(tokens)).all()
    bench.check()


def test_a_fresh_lane_starts_from_zeros() -> None:
    bench = Bench()
    bench.memory.states[1:] = 9
    lane = bench.admit([1, 2, 3])
    assert lane is not None
    assert not bench.memory.states[lane.slot].any()


def test_a_block_that_is_there_already_stays_private() -> None:
    bench = Bench()
    tokens = list(range(130))
    one, two = bench.admit(tokens), bench.admit(tokens)
    assert one is not None
    assert two is not None
    for lane in (one, two):
        bench.compute(lane, tokens, 0, 130)
        bench.cache.commit(lane, array("i", tokens), 130)
    assert one.private == {one.pages[2]}
    assert two.private == set(two.pages)
    bench.check()
    finish(bench, one, tokens)
    finish(bench, two, tokens)
    bench.check()
    assert bench.cache.index.stats().snapshots == 1


def test_a_request_that_finds_no_room_changes_nothing() -> None:
    bench = Bench(pages=6)
    tokens = list(range(130))
    finish(bench, run(bench, tokens), tokens)
    assert bench.admit([5], total=4 * BLOCK) is not None
    before, stats = bench.cache.index.digest(), bench.cache.stats()
    assert bench.admit([*tokens, 1, 2, 3], total=5 * BLOCK) is None
    assert bench.admit(list(range(500, 510)), total=3 * BLOCK) is None
    assert bench.admit([9], total=3 * BLOCK, reuse=False) is None
    assert (bench.cache.index.digest(), bench.cache.stats()) == (before, stats)
    bench.check()


def test_a_shallower_place_is_taken_where_the_deepest_does_not_fit() -> None:
    """The path's own pages cannot be evicted for it: with a copy of the tail the deepest snapshot needs one page more
    than there is, so the whole prompt is computed."""
    bench = Bench(pages=4)
    tokens = list(range(150))
    finish(bench, run(bench, tokens), tokens)  # two blocks and a tail; one page is free
    lane = bench.admit([*tokens, 1], total=4 * BLOCK)
    assert lane is not None
    assert lane.frontier == 0
    bench.check()


def test_a_tap_copies_the_partial_page() -> None:
    bench = Bench()
    tokens = list(range(200))
    lane = bench.admit(tokens)
    assert lane is not None
    (tap,) = bench.cache.claim_taps(lane, [140])
    bench.compute(lane, tokens, 0, 200)
    bench.memory.states[tap.slot] = signature(tokens[:140])
    bench.cache.commit(lane, array("i", tokens), 200)
    bench.cache.publish_tap(lane, array("i", tokens), tap)
    bench.check()
    bench.memory.pages[lane.pages[2]] = 0  # the lane's own page may go on changing
    other = bench.admit([*tokens[:140], 3, 2, 1])
    assert other is not None
    assert other.frontier == 140
    assert (bench.memory.states[other.slot] == signature(tokens[:140])).all()
    assert (bench.memory.pages[other.pages[2]] != 0).all()


def test_taps_beyond_the_snapshot_slots_are_counted() -> None:
    bench = Bench(snapshots=2)
    lane = bench.admit(list(range(300)))
    assert lane is not None
    taps = bench.cache.claim_taps(lane, [100, 150, 200])
    assert [tap.position for tap in taps] == [100, 150]
    assert bench.cache.stats().taps_skipped == 1
    bench.cache.drop_taps(taps)
    bench.check()


def test_growth_takes_what_the_cache_can_spare_and_no_more() -> None:
    bench = Bench(pages=6, lanes=2)
    tokens = list(range(130))
    finish(bench, run(bench, tokens), tokens)  # three pages of cache
    lane = bench.admit([1, 2], total=BLOCK, reuse=False)
    assert lane is not None
    assert bench.cache.grow(lane, 6 * BLOCK)
    bench.check()
    assert not bench.cache.grow(lane, 6 * BLOCK + 1)
    assert len(lane.pages) == 6
    bench.check()


@pytest.mark.parametrize("seed", range(12))
def test_random_lives_lose_and_double_nothing(seed: int) -> None:
    """Lanes with shared prefixes come, compute, tap, end in every way; whatever a lane resumes from is right."""
    rng = random.Random(seed)
    bench = Bench(pages=rng.randint(8, 24), lanes=rng.randint(1, 4), snapshots=rng.randint(1, 4))
    trunk = [rng.randrange(1000) for _ in range(400)]
    computed: dict[int, int] = {}
    for _ in range(150):
        if bench.lanes and rng.random() < 0.7:
            lane, tokens = rng.choice(bench.lanes)
            text = tokens.tolist()
            at = computed[id(lane)]
            action = rng.random()
            if action < 0.6 and at < len(text):
                end = min(len(text), at + rng.randint(1, 150))
                taps = bench.cache.claim_taps(lane, [p for p in (at + 1, end) if rng.random() < 0.4 and p <= end])
                if rng.random() < 0.15:  # the pass fails
                    bench.cache.drop_taps(taps)
                    bench.lanes = [(other, t) for other, t in bench.lanes if other is not lane]
                    bench.cache.abandon(lane)
                else:
                    bench.compute(lane, text, at, end)
                    for tap in taps:
                        bench.memory.states[tap.slot] = signature(text[: tap.position])
                    bench.cache.commit(lane, tokens, end)
                    for tap in taps:
                        bench.cache.publish_tap(lane, tokens, tap)
                    computed[id(lane)] = end
            elif action < 0.9:
                finish(bench, lane, text[:at])
        elif len(bench.lanes) < bench.cache.block_tables.shape[0]:
            length = rng.randint(1, min(400, (bench.cache.stats().pages_total - 1) * BLOCK))
            text = [*trunk[: rng.randint(0, length)], *(rng.randrange(1000) for _ in range(rng.randint(1, 40)))]
            new = bench.admit(text, reuse=rng.random() < 0.9) if len(text) <= 20 * BLOCK else None
            if new is not None:
                computed[id(new)] = new.frontier
                if new.frontier:
                    state = bench.memory.states[new.slot]
                    assert (state == signature(text[: new.frontier])).all(), "resumed from another's state"
                for block in range(new.frontier // BLOCK):
                    page = bench.memory.pages[new.pages[block]]
                    assert (page == signature(text[: (block + 1) * BLOCK])).all(), "resumed over another's page"
        bench.check()
    for lane, tokens in list(bench.lanes):
        finish(bench, lane, tokens.tolist()[: computed[id(lane)]])
    bench.check()
    stats = bench.cache.stats()
    freed = bench.cache.index.evict_device(stats.pages_total)
    assert len(freed.pages) + stats.pages_free == stats.pages_total
    assert len(freed.slots) + stats.slots_free == stats.slots_total
