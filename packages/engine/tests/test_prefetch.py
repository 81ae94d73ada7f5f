"""While a request waits, what only the Host has of its path comes back to the device."""

from __future__ import annotations

import pytest

from cache_bench import Bench
from fake_model import continuation
from loop_rig import Rig, tokens_of
from prefix_index import Tier
from qwen35_engine.cache import restores
from qwen35_engine.host import HostTier
from slab_pool import CopyFailed

HISTORY = tokens_of(1, 400)
FOLLOWING = [*HISTORY, 1, 2, 3]


def host_only(rig: Rig, history: list[int] = HISTORY) -> list[int]:
    """A conversation that only the Host still has; returns its next turn."""
    rig.ask(history, 3)
    rig.bench.leave_to_host()
    return [*history, *continuation(history, 3), 1, 2]


def device_blocks(bench: Bench, tokens: list[int]) -> int:
    index = bench.cache.index
    return index.match(index.prepare(tokens)).device_blocks


def test_a_request_that_waits_for_a_lane_finds_its_blocks_on_the_device() -> None:
    rig = Rig(lanes=1, pages=40, slabs=80)
    following = host_only(rig)
    rig.submit(tokens_of(2, 10), 20)
    rig.turn()
    rig.submit(following, 3)
    rig.turn()
    assert rig.bench.reads.num_pending_parts == 3  # on its way, and no pass waits for it
    for _ in range(5):
        rig.bench.reads.land()
        rig.turn()
    assert device_blocks(rig.bench, following) == 6
    assert len(rig.loop.running) == 1
    rig.check()
    before = rig.bench.reads.statistics().host_to_device.num_bytes
    rig.run_dry()
    memory = rig.bench.memory
    restored = rig.bench.reads.statistics().host_to_device.num_bytes - before
    # The image, and the tail twice: for the cache and for the lane.
    assert restored == memory.state_layout.image_bytes + 2 * memory.page_layout.page_bytes
    assert rig.ended[-1][0].usage.cached_tokens == 402  # type: ignore[union-attr]
    rig.check_nothing_is_lost()


def test_a_request_that_waits_for_pages_finds_them_as_well() -> None:
    """Room is what is free and what the Host holds as well: another conversation's copies give way."""
    rig = Rig(lanes=2, pages=14, slabs=120, max_taps=0)
    following = host_only(rig)
    rig.ask(tokens_of(3, 200), 3)
    rig.bench.land_all()
    rig.submit(tokens_of(4, 10), 60 * 8)  # entitled to eight pages
    rig.turn()
    rig.submit(following, 64)  # needs eight more
    rig.turn()
    assert len(rig.loop.running) == 1
    rig.bench.land_all()
    assert device_blocks(rig.bench, following) == 6
    rig.run_dry()
    rig.check_nothing_is_lost()


def test_no_last_copy_is_given_up_for_it() -> None:
    rig = Rig(lanes=1, pages=10, slabs=40)
    following = host_only(rig)
    rig.bench.cache.write_through = None  # what comes now has no Host copy
    other = tokens_of(5, 300)
    rig.ask(other, 3)
    rig.submit(tokens_of(6, 10), 20)
    rig.turn()
    rig.submit(following, 3)
    rig.turn()
    rig.bench.land_all()
    held = device_blocks(rig.bench, following)
    assert 0 < held < 6
    assert device_blocks(rig.bench, [*other, 1]) == 4
    rig.check()


def test_a_long_path_takes_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restores, "MAX_PREFETCH_BLOCKS", 2)
    rig = Rig(lanes=1, pages=40, slabs=80)
    following = host_only(rig)
    rig.submit(tokens_of(2, 10), 20)
    rig.turn()
    rig.submit(following, 3)
    seen = []
    for _ in range(8):
        rig.turn()
        rig.bench.reads.land(1)
        seen.append(device_blocks(rig.bench, following))
    assert seen == [2, 2, 2, 4, 4, 4, 6, 6]  # filling ones count as held; a batch has three parts


def test_an_admission_waits_for_the_batch_that_brings_its_blocks() -> None:
    """It does not take a shallower place because the deeper one is still on its way."""
    rig = Rig(lanes=1, pages=40, slabs=80)
    following = host_only(rig)
    running = rig.submit(tokens_of(2, 10), 20)
    rig.turn()
    rig.submit(following, 3)
    rig.turn()
    assert rig.bench.reads.num_pending_parts == 3
    rig.loop.end({running: "cancelled"})
    rig.turn()
    assert rig.bench.reads.num_pending_parts == 3 - 3 + 0
    rig.run_dry()
    assert rig.ended[-1][0].usage.cached_tokens == 402  # type: ignore[union-attr]


def test_where_it_brings_nothing_it_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matching walks the whole path; that is done once, and again when there is more room."""
    rig = Rig(lanes=1, pages=40, slabs=80)
    matches = 0
    real = type(rig.bench.cache.index).match

    def counting(*arguments: object) -> object:
        nonlocal matches
        matches += 1
        return real(*arguments)  # type: ignore[arg-type]

    rig.submit(tokens_of(2, 10), 20)
    rig.turn()
    rig.submit(tokens_of(7, 300), 3)
    monkeypatch.setattr(type(rig.bench.cache.index), "match", counting)
    for _ in range(10):
        rig.turn()
    assert matches == 1


def test_a_waiting_request_that_does_not_use_the_cache_prefetches_nothing() -> None:
    rig = Rig(lanes=1, pages=40, slabs=80)
    following = host_only(rig)
    rig.submit(tokens_of(2, 10), 20)
    rig.turn()
    rig.submit(following, 3, reuse=False)
    rig.turn()
    assert rig.bench.reads.num_pending_parts == 0


def test_a_prefetch_changes_neither_recency_nor_hits() -> None:
    bench = Bench(slabs=80, pages=30)
    bench.on_host_only(list(range(200)))
    index = bench.cache.index
    before = index.stats().hits
    prompt = index.prepare([*range(200), 1])
    assert bench.cache.prefetch(prompt) == 3
    bench.land_all()
    assert index.stats().hits == before
    lease = index.acquire(match := index.match(prompt), match.best)
    assert index.held(lease, Tier.DEVICE) == 3
    index.cancel(lease)
    bench.check_nothing_is_lost()


def test_a_failed_prefetch_ends_the_engine_like_any_copy() -> None:
    rig = Rig(lanes=1, pages=40, slabs=80)
    following = host_only(rig)
    rig.submit(tokens_of(2, 10), 20)
    rig.turn()
    rig.submit(following, 3)
    rig.bench.reads.fail_copy(0)
    rig.turn()
    rig.bench.reads.land_all()
    with pytest.raises(CopyFailed):
        rig.turn()


def test_a_batch_that_cannot_be_started_leaves_nothing_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(slabs=80, pages=30)
    bench.on_host_only(list(range(200)))
    before = bench.cache.index.digest(), bench.cache.stats()
    monkeypatch.setattr(HostTier, "restore", refuse)
    with pytest.raises(ValueError, match="injected"):
        bench.cache.prefetch(bench.cache.index.prepare([*range(200), 1]))
    assert (bench.cache.index.digest(), bench.cache.stats()) == before


def refuse(*_: object) -> None:
    raise ValueError("injected")
