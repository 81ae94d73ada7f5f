"""Admission is a transaction: a lane of which no pass has succeeded leaves nothing but the evictions made for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from cache_bench import Bench, Life
from prefix_index import Freed, Lease, PrefixIndex, Tier
from qwen35_engine.cache.lanes import Lanes
from qwen35_engine.host import HostTier
from qwen35_engine.memory import DeviceMemory, IdPool
from slab_pool import CopyStream

SEEDS = range(40)
SLABS = (0, 6, 200)


def state(bench: Bench) -> tuple[Any, ...]:
    """What the law is about: the index's digest and what is free."""
    stats = bench.cache.stats()
    slabs = stats.host.slabs_free if stats.host is not None else 0
    return bench.cache.index.digest(), stats.pages_free, stats.slots_free, stats.snapshot_slots_used, slabs


@pytest.fixture(autouse=True)
def _comparable_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pool begins its handles at a random generation, so that another's are seen; here twins must name alike."""
    monkeypatch.setattr("secrets.randbits", lambda _: 0)


class Evictions:
    """Notes what is evicted from one cache and does the same to another."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        index = bench.cache.index
        for name in ("evict_device", "evict_host", "claim_slot"):
            monkeypatch.setattr(index, name, self._noting(name, getattr(index, name)))

    def _noting(self, name: str, real: Callable[..., Freed | None]) -> Callable[..., Freed | None]:
        def note(*arguments: Any, **options: Any) -> Freed | None:
            self.calls.append((name, arguments, options))
            return real(*arguments, **options)

        return note

    def repeat(self, bench: Bench) -> None:
        for name, arguments, options in self.calls:
            freed = getattr(bench.cache.index, name)(*arguments, **options)
            if freed is not None:
                bench.cache.allocator.reclaim(freed)


@contextmanager
def acquired(bench: Bench, tokens: list[int], frontier: int) -> Iterator[Lease]:
    """The pin under which an admission evicts, taken back afterwards."""
    index = bench.cache.index
    match = index.match(index.prepare(tokens))
    source = next((candidate for candidate in match.candidates if candidate.frontier == frontier), None)
    path = index.acquire(match, source)
    yield path
    index.cancel(path)


def restore_only(bench: Bench, path: Lease) -> None:
    """What the copies of a restore leave behind that no pass waits for: blocks and tail are on the device again."""
    index, space = bench.cache.index, bench.cache.allocator
    assert path.snapshot is not None
    missing = path.depth - index.held(path, Tier.DEVICE)
    tail = bool(path.frontier % 64 and not path.tail_pages)
    pages = space.take_pages(missing + tail)
    fills = [index.begin_fill(path, Tier.DEVICE, pages[:missing])] if missing else []
    if tail:
        fills.append(index.begin_fill(path.snapshot, Tier.DEVICE, pages[missing:]))
    for fill in fills:
        index.land(fill)


@pytest.mark.parametrize("slabs", SLABS)
def test_a_lane_that_never_ran_leaves_what_a_twin_has_after_the_same_evictions(
    slabs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pins, reservations, slots, hits and recency are as before. What its restore had copied stays on the device."""
    seen = {"evicting": 0, "resuming": 0, "restoring": 0}
    for seed in SEEDS:
        one, twin = Life(seed, slabs=slabs), Life(seed, slabs=slabs)
        for life in (one, twin):
            for _ in range(60):
                life.step()
            life.finish_all()
            life.bench.land_all()
        assert state(one.bench) == state(twin.bench)
        tokens = one.prompt()
        with monkeypatch.context() as patch:
            evictions = Evictions(one.bench, patch)
            lane = one.bench.admit(tokens)
            assert lane is not None
            restoring = lane.restore is not None
            # Also a first pass that failed has published nothing; the slots of its taps were claimed before it.
            one.bench.claim_taps(lane, *([len(tokens)] if seed % 2 else []))
            if seed % 3:
                one.bench.abandon(lane)
            else:  # cancelled: it ends like any other
                one.bench.finish(lane, tokens[: lane.frontier])
        one.bench.land_all()

        with acquired(twin.bench, tokens, lane.frontier) as path:
            evictions.repeat(twin.bench)
            if restoring:
                restore_only(twin.bench, path)
        assert state(one.bench) == state(twin.bench), f"seed {seed}"
        one.bench.check_nothing_is_lost()
        seen["evicting"] += bool(evictions.calls)
        seen["resuming"] += lane.frontier > 0
        seen["restoring"] += restoring
    assert seen["evicting"] > 3
    assert seen["resuming"] > 3
    assert seen["restoring"] > 0 or slabs < 200


class StepFailed(Exception):
    """Injected."""


STEPS: list[tuple[type, str]] = [
    (PrefixIndex, "acquire"),
    (IdPool, "take"),
    (DeviceMemory, "copy_state"),
    (DeviceMemory, "copy_page"),
    (DeviceMemory, "clear_state"),
    (Lanes, "_write_row"),
    (PrefixIndex, "begin_fill"),
    (HostTier, "restore"),
    (CopyStream, "submit"),
]


@pytest.mark.parametrize(("owner", "step"), STEPS, ids=lambda value: value if isinstance(value, str) else "")
def test_an_admission_that_fails_at_any_step_gives_everything_back(
    owner: type, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first, second or third call of the step fails."""
    failures = 0
    for seed in range(10):
        for kth in range(3):
            one, twin = Life(seed, slabs=200), Life(seed, slabs=200)
            for life in (one, twin):
                for _ in range(50):
                    life.step()
                life.finish_all()
                life.bench.land_all()
                if seed % 2:
                    life.bench.lose_device()
            tokens = one.prompt()
            sequence = one.bench.sequence(tokens)
            quote = one.bench.cache.quote(sequence.prompt, total_tokens=len(tokens))
            with monkeypatch.context() as patch:
                evictions = Evictions(one.bench, patch)
                fail_kth_call(patch, owner, step, kth)
                try:
                    one.bench.cache.lanes.start(sequence, quote)
                except StepFailed:
                    failures += 1
                else:
                    break  # it has no more calls of this step
            with acquired(twin.bench, tokens, 0 if quote.source is None else quote.source.frontier):
                evictions.repeat(twin.bench)
            assert state(one.bench) == state(twin.bench), f"seed {seed}, call {kth}"
            one.bench.check_nothing_is_lost()
    assert failures


def fail_kth_call(patch: pytest.MonkeyPatch, owner: type, step: str, kth: int) -> None:
    real, calls = getattr(owner, step), count()

    def failing(*arguments: Any, **options: Any) -> Any:
        if next(calls) == kth:
            raise StepFailed(f"call {kth} of {step}")
        return real(*arguments, **options)

    patch.setattr(owner, step, failing)
