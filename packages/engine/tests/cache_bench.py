"""A cache over a small memory, no model: tests write recognisable bytes where a pass would write KV and state."""

from __future__ import annotations

import random
from array import array

import torch

from prefix_index import Readiness, SnapshotKind, Tap, TapSource
from qwen35_engine import GenerationRequest, TokenStream
from qwen35_engine.cache import PrefixCache
from qwen35_engine.calibration import Calibration
from qwen35_engine.host import HostTier
from qwen35_engine.memory import DeviceMemory
from qwen35_engine.metrics import Stopwatch
from qwen35_engine.sequence import Sequence
from qwen35_kernels import KVProfile, PageLayout, StateLayout
from slab_pool.testing import ManualCopyStream

BLOCK = 64


def small_memory(num_pages: int, num_slots: int) -> DeviceMemory:
    """Two layers, one of each kind; an image takes three slabs, the last of them partly."""
    memory = DeviceMemory(
        page_layout=PageLayout(profile=KVProfile.FP32, num_layers=1, num_kv_heads=1, head_dim=16),
        state_layout=StateLayout(
            num_layers=1,
            num_value_heads=1,
            key_dim=64,
            value_dim=80,
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


def signature(tokens: list[int]) -> int:
    """A byte that tells token histories apart well enough."""
    return hash(tuple(tokens)) % 251 + 1


def planned(*positions: int) -> list[Tap]:
    return [Tap(position, TapSource.TAIL, True, SnapshotKind.TAP) for position in positions]


class Bench:
    """A cache and the lanes that run on it. With ``slabs`` there is a Host tier whose copies land only when told to, or
    when a pass waits for them."""

    def __init__(
        self,
        *,
        pages: int = 20,
        lanes: int = 3,
        snapshots: int = 3,
        slabs: int = 0,
        calibration: Calibration | None = None,
    ) -> None:
        self.memory = small_memory(1 + pages, 1 + lanes + snapshots)
        self.reads = ManualCopyStream(on_wait="land")
        self.writes = ManualCopyStream(on_wait="land")
        self.host = None
        if slabs:
            slab_bytes = -(-self.memory.page_layout.page_bytes // 4096) * 4096
            self.host = HostTier(self.memory, budget_bytes=slabs * slab_bytes, reads=self.reads, writes=self.writes)
        self.cache = PrefixCache(
            self.memory,
            max_concurrency=lanes,
            context_blocks=pages,
            snapshot_slots=snapshots,
            host=self.host,
            calibration=calibration,
        )
        self.lanes: list[Sequence] = []

    def admit(self, tokens: list[int], total: int | None = None, *, reuse: bool = True) -> Sequence | None:
        lane = self.sequence(tokens, reuse=reuse)
        quote = self.cache.quote(lane.prompt, total_tokens=total or len(tokens))
        if quote.readiness is not Readiness.READY:
            return None
        self.cache.lanes.start(lane, quote)
        self.lanes.append(lane)
        return lane

    def sequence(self, tokens: list[int], *, reuse: bool = True) -> Sequence:
        """A request that waits."""
        ids = array("i", tokens)
        return Sequence(
            stream=TokenStream(0, lambda *_: None, None),
            request=GenerationRequest(tokens=tokens),
            prompt=self.cache.index.prepare(ids) if reuse else None,
            tokens=ids,
            max_tokens=1,
            seed=0,
            times=Stopwatch(0.0),
        )

    def compute(self, lane: Sequence, tokens: list[int], begin: int, end: int) -> None:
        """Write what a pass over ``tokens[begin:end]`` would: a page says which tokens it holds, a slot how far its
        state is. The first pass waits for the lane's restore and finds what it resumes from."""
        if lane.restore is not None:
            lane.restore.wait_for_prelude()
            for layer in range(2):
                lane.restore.wait_for_layer(layer)
            lane.restore = None
        if begin == lane.frontier:
            self.check_resumed(lane, tokens)
        for block in range(begin // BLOCK, -(-end // BLOCK)):
            assert lane.pages[block] in lane.private
            self.memory.pages[lane.pages[block]] = signature(tokens[: min(end, (block + 1) * BLOCK)])
        self.memory.states[lane.slot] = signature(tokens[:end])

    def check_resumed(self, lane: Sequence, tokens: list[int]) -> None:
        """State, whole blocks and tail are those of the lane's own tokens."""
        if not lane.frontier:
            assert not self.memory.states[lane.slot].any(), "a fresh state is not zero"
            return
        layout = self.memory.state_layout
        expected = signature(tokens[: lane.frontier])
        for part in (layout.layer_range(0), layout.hidden_range()):
            got = self.memory.states[lane.slot, part.begin : part.end]
            assert (got == expected).all(), f"resumed at {lane.frontier} from another's state"
        for block in range(lane.frontier // BLOCK):
            self._check_page(lane.pages[block], tokens[: (block + 1) * BLOCK])
        if lane.frontier % BLOCK:
            self._check_page(lane.pages[lane.frontier // BLOCK], tokens[: lane.frontier], tail=lane.frontier % BLOCK)

    def _check_page(self, page: int, tokens: list[int], tail: int = 0) -> None:
        part = self.memory.page_layout.layer_range(0)
        row = self.memory.pages[page, part.begin : part.end]
        if tail:
            # Rows beyond the tail may hold what the lane that wrote it went on with.
            return
        assert (row == signature(tokens)).all(), "resumed over another's page"

    def commit(self, lane: Sequence, computed: int) -> None:
        lane.computed = computed
        self.cache.publisher.commit(lane)

    def claim_taps(self, lane: Sequence, *positions: int) -> list[tuple[int, int]]:
        """Position and slot of the taps that found one."""
        lane.taps = planned(*positions)
        self.cache.publisher.claim_taps(lane, max(positions, default=0))
        return sorted((tap.position, slot) for slot, tap in lane.claimed.items())

    def finish(self, lane: Sequence, tokens: list[int]) -> None:
        self.forget(lane)
        assert lane.tokens[: len(tokens)].tolist() == tokens
        lane.computed = len(tokens)
        self.cache.finish(lane)

    def abandon(self, lane: Sequence) -> None:
        self.forget(lane)
        self.cache.abandon(lane)

    def forget(self, lane: Sequence) -> None:
        self.lanes = [other for other in self.lanes if other is not lane]

    def run(self, tokens: list[int], *, finish: bool = False) -> Sequence:
        """A lane that computes its whole prompt and commits it."""
        lane = self.admit(tokens)
        assert lane is not None
        self.compute(lane, tokens, lane.frontier, len(tokens))
        self.commit(lane, len(tokens))
        if finish:
            self.finish(lane, tokens)
        return lane

    def on_host_only(self, tokens: list[int]) -> None:
        """Compute and finish a prompt, let its copies land, and let the device lose it."""
        self.run(tokens, finish=True)
        self.leave_to_host()

    def land_all(self) -> None:
        """Everything on its way arrives and is settled, also what only starts when something else has arrived."""
        while True:
            self.writes.land_all()
            self.reads.land_all()
            self.cache.transfers.poll()
            if not self.cache.transfers:
                break

    def leave_to_host(self) -> None:
        """What is on its way to the Host arrives, and the device loses everything."""
        self.land_all()
        self.lose_device()

    def lose_device(self) -> None:
        """Everything cached leaves the device, as under pressure; what has no Host copy is gone."""
        space = self.cache.allocator
        while (freed := self.cache.index.claim_slot()) is not None:
            space.reclaim(freed)
        space.reclaim(self.cache.index.evict_device(self.cache.stats().pages_total))

    def check(self) -> None:
        """Every page, slot and slab has one owner: a free list, a lane, or the index."""
        index, stats = self.cache.index, self.cache.stats()
        self.cache.check_invariants()
        gauges = index.stats()
        private = [page for lane in self.lanes for page in lane.private]
        assert len(set(private)) == len(private)
        for lane in self.lanes:
            table = self.cache.lanes.block_tables[lane.row].tolist()
            assert table[: len(lane.pages)] == lane.pages
            assert not any(table[len(lane.pages) :])
        if self.cache.transfers:
            return  # lanes that ended before their restore landed have left pages and slots to it
        assert stats.pages_free + len(private) + gauges.device_blocks + gauges.device_tails == stats.pages_total
        assert stats.slots_free + len(self.lanes) + stats.snapshot_slots_used == stats.slots_total

    def check_nothing_is_lost(self) -> None:
        """With no lane left, everything the cache holds can be taken back, and then everything is free."""
        assert not self.lanes
        self.land_all()
        self.check()
        space, stats = self.cache.allocator, self.cache.stats()
        self.lose_device()
        if stats.host is not None:
            space.reclaim(self.cache.index.evict_host(stats.host.slabs_total))
        after = self.cache.stats()
        assert after.pages_free == after.pages_total
        assert after.slots_free == after.slots_total
        assert after.snapshot_slots_used == 0
        lanes = self.cache.lanes
        assert lanes.num_free == lanes.block_tables.shape[0]
        assert after.host is None or after.host.slabs_free == after.host.slabs_total
        gauges = self.cache.index.stats()
        assert gauges.blocks == gauges.snapshots == 0


class Life:
    """A random life of a cache: lanes with shared prefixes come, compute, tap, fail and end while copies land late.
    Equal seeds live equal lives."""

    def __init__(self, seed: int, *, slabs: int) -> None:
        self.rng = rng = random.Random(seed * 1000 + slabs)
        self.bench = Bench(pages=rng.randint(8, 24), lanes=rng.randint(1, 4), snapshots=rng.randint(1, 4), slabs=slabs)
        self._trunk = [rng.randrange(1000) for _ in range(400)]
        self._computed: dict[Sequence, int] = {}
        self.resumed = self.restored = 0

    def step(self) -> None:
        bench, rng = self.bench, self.rng
        if rng.random() < 0.5:
            bench.writes.land(rng.randint(0, 2))
            bench.reads.land(rng.randint(0, 3))
        bench.cache.transfers.poll()
        if bench.lanes and rng.random() < 0.7:
            self._go_on(rng.choice(bench.lanes))
        elif len(bench.lanes) < bench.cache.lanes.block_tables.shape[0]:
            self.admit(self.prompt(), reuse=rng.random() < 0.9)

    def prompt(self) -> list[int]:
        """The beginning of the trunk and something of its own; it always fits an empty device."""
        rng = self.rng
        shared = rng.randint(0, rng.randint(1, min(400, (self.bench.cache.stats().pages_total - 2) * BLOCK)))
        return [*self._trunk[:shared], *(rng.randrange(1000) for _ in range(rng.randint(1, 40)))]

    def admit(self, tokens: list[int], *, reuse: bool = True) -> Sequence | None:
        lane = self.bench.admit(tokens, reuse=reuse)
        if lane is not None:
            self._computed[lane] = lane.frontier
            self.resumed += lane.frontier > 0
            self.restored += lane.restore is not None
        return lane

    def _go_on(self, lane: Sequence) -> None:
        bench, rng, text, at = self.bench, self.rng, lane.tokens.tolist(), self._computed[lane]
        action = rng.random()
        if action < 0.6 and at < len(text):
            end = min(len(text), at + rng.randint(1, 150))
            places = [place for place in (at + 1, end) if rng.random() < 0.4 and place <= end]
            taps = bench.claim_taps(lane, *places)
            if rng.random() < 0.15:  # the pass fails
                bench.abandon(lane)
                return
            bench.compute(lane, text, at, end)
            for position, slot in taps:
                bench.memory.states[slot] = signature(text[:position])
            bench.commit(lane, end)
            bench.cache.publisher.publish_taps(lane)
            self._computed[lane] = end
        elif action < 0.9:
            bench.finish(lane, text[:at])

    def finish_all(self) -> None:
        for lane in list(self.bench.lanes):
            self.bench.finish(lane, lane.tokens.tolist()[: self._computed[lane]])
