"""The state machine under fire: any schedule of requests, cancels, failures and late copies gives every request the
tokens it would have been given alone, and loses nothing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fake_model import continuation
from loop_rig import Rig, tokens_of
from qwen35_engine import (
    EngineClosed,
    Failed,
    Finished,
    QueueTimeout,
    TapHints,
)
from qwen35_engine.cache.allocator import Allocator
from qwen35_engine.cache.publication import Publisher
from qwen35_engine.memory import DeviceMemory
from report_checks import check_books
from slab_pool import CopyFailed, Ticket

TRUNK = tokens_of(0, 700)


class Schedules(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(10, 24),
        lanes=st.integers(1, 4),
        snapshots=st.integers(1, 5),
        slabs=st.sampled_from([0, 5, 20, 80]),
        prefill_chunk=st.sampled_from([33, 64, 100, 300]),
        max_taps=st.sampled_from([0, 1, 4, 8]),
        pending_timeout_seconds=st.sampled_from([1e-9, 1000.0]),
    )
    def start(self, **sizes: Any) -> None:
        self.rig = Rig(**sizes)
        self.conversations: list[list[int]] = []

    @rule(
        shared=st.integers(0, 500),
        own=st.integers(1, 60),
        seed=st.integers(1, 5),
        max_tokens=st.integers(1, 70),
        taps=st.lists(st.floats(0, 1), max_size=3),
        namespace=st.sampled_from([b"", b"", b"other"]),
        reuse=st.sampled_from([True, True, True, False]),
    )
    def submit(
        self, shared: int, own: int, seed: int, max_tokens: int, taps: list[float], namespace: bytes, reuse: bool
    ) -> None:
        prompt = [*TRUNK[:shared], *tokens_of(seed, own)][: self.rig.max_context - 1]
        positions = tuple(max(1, round(tap * len(prompt))) for tap in taps)
        self.rig.submit(
            prompt,
            max_tokens,
            hints=TapHints(explicit=positions, opener=positions[0] if positions else None),
            namespace=namespace,
            reuse=reuse,
        )
        self.conversations.append([*prompt, *continuation(prompt, min(max_tokens, 20))])

    @precondition(lambda self: self.conversations)
    @rule(data=st.data(), own=st.integers(1, 30), max_tokens=st.integers(1, 30))
    def follow_up(self, data: st.DataObject, own: int, max_tokens: int) -> None:
        history = data.draw(st.sampled_from(self.conversations))
        prompt = [*history, *tokens_of(own, own)][: self.rig.max_context - 1]
        self.rig.submit(prompt, max_tokens)

    @rule(count=st.integers(1, 6))
    def turns(self, count: int) -> None:
        for _ in range(count):
            self.rig.turn()

    @rule(reads=st.integers(0, 4), writes=st.integers(0, 3))
    def land(self, reads: int, writes: int) -> None:
        self.rig.bench.reads.land(reads)
        self.rig.bench.writes.land(writes)

    @precondition(lambda self: self.rig.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.rig.loop.end({data.draw(st.sampled_from(sorted(self.rig.open))): "cancelled"})
        self.rig.read()

    @precondition(lambda self: self.rig.loop.running)
    @rule(data=st.data())
    def turn_nan(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(list(self.rig.loop.running)))
        self.rig.spoil(self.rig.model.nan_slots, lane)

    @precondition(lambda self: any(lane.computed < lane.prompt_tokens for lane in self.rig.loop.running))
    @rule()
    def raise_in_prefill(self) -> None:
        lane = next(lane for lane in self.rig.loop.running if lane.computed < lane.prompt_tokens)
        self.rig.spoil(self.rig.model.broken_slots, lane)

    @precondition(lambda self: self.rig.loop.running)
    @rule(error=st.sampled_from([MemoryError(), ValueError()]))
    def fail_a_pass(self, error: Exception) -> None:
        """A pass of one lane or of several, or a fault that is no lane's."""
        self.rig.model.next_error = error

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.run_dry()
            check_books(self.rig.reports, self.rig.loop.accounts.totals)
            self.rig.check_nothing_is_lost()


Schedules.TestCase.settings = settings(
    max_examples={"long": 2000, "share": 200}.get(settings.get_current_profile_name(), 25),
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
TestSchedules = Schedules.TestCase


def test_the_fake_model_sees_a_wrong_byte() -> None:
    """Any byte of state, row or tail that is not its own shows in the next token."""
    for damage in ("state", "row", "late tail"):
        rig = Rig(slabs=0)
        rig.submit(tokens_of(1, 130), 40)
        for _ in range(5):
            rig.turn()
        (lane,) = rig.loop.running
        memory = rig.bench.memory
        if damage == "state":
            memory.states[lane.slot, 77] ^= 1
        elif damage == "row":
            memory.pages[lane.pages[0], 1000] ^= 1
        else:
            memory.pages[lane.pages[2]] = 0xFF
        with pytest.raises(AssertionError, match="wrong tokens"):
            rig.run_dry()


def test_nothing_cached_is_computed_again() -> None:
    rig = Rig(slabs=0)
    prompt = tokens_of(2, 200)
    rig.submit(prompt, 10)
    rig.run_dry()
    assert rig.model.computed_tokens == 200 + 9
    following = [*prompt, *continuation(prompt, 10), *tokens_of(3, 30)]
    rig.submit(following, 5)
    rig.run_dry()
    assert rig.model.computed_tokens == 209 + (240 - 209) + 4


def test_a_failed_copy_ends_the_loop_and_answers_can_still_be_given() -> None:
    rig = Rig(slabs=60)
    history = tokens_of(4, 150)
    rig.submit(history, 3)
    rig.run_dry()
    rig.bench.leave_to_host()
    rig.submit([*history, *continuation(history, 3), 1, 2], 3)
    rig.bench.reads.fail_copy(1)
    with pytest.raises(CopyFailed):
        rig.turn()
    rig.loop.fail_all(EngineClosed("a copy failed"))
    ((stream, _, _),) = rig.open.values()
    assert isinstance(stream.take()[-1], Failed)


def test_after_a_failure_that_spares_none_the_loop_starts_afresh() -> None:
    """Out of memory, or a decode of two lanes that raises: all are answered, those that wait as well."""
    for error, lanes in ((MemoryError(), 1), (ValueError(), 2)):
        rig = Rig(lanes=lanes, slabs=60, pages=40)
        history = tokens_of(15, 150)
        rig.ask(history, 3)
        for seed in (16, 17, 18):
            rig.submit(tokens_of(seed, 40), 30)
        for _ in range(3):
            rig.turn()
        rig.model.next_error = error
        rig.turn()
        assert rig.recoveries == 1
        assert not rig.open
        assert [type(event) for event, _ in rig.ended] == [Finished, Failed, Failed, Failed]
        rig.check()
        assert rig.bench.cache.index.stats().blocks == 0
        assert rig.ask(history, 3).cached_tokens == 0
        rig.check_nothing_is_lost()


@pytest.mark.parametrize(
    ("owner", "step"),
    [(Publisher, "commit"), (Publisher, "publish_taps"), (Allocator, "take_pages"), (DeviceMemory, "copy_page")],
)
@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_a_pass_that_cannot_be_published_is_recovered_from(
    owner: type, step: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(pages=40, snapshots=8, landing=True)
    plain, calls = getattr(owner, step), itertools.count()

    def fails_once(*arguments: Any, **options: Any) -> Any:
        if next(calls) == k:
            rig.spoiled.update(rig.open)
            raise MemoryError
        return plain(*arguments, **options)

    monkeypatch.setattr(owner, step, fails_once)
    for seed in range(6):
        prompt = [*tokens_of(40, 100), *tokens_of(41 + seed, 70)]
        rig.submit(prompt, 3, hints=TapHints(explicit=(90, 130, 165)))
    rig.run_dry()
    assert next(calls) > k, "the step was never reached"
    assert rig.recoveries == 1
    rig.check_nothing_is_lost()


@pytest.mark.parametrize("waits", [False, True])
def test_a_write_through_that_cannot_start_is_recovered_from(waits: bool) -> None:
    """At a lane's end, and where that end had to wait for copies that held every snapshot slot."""
    rig = Rig(lanes=2, snapshots=1, slabs=60, pages=40, max_taps=0)
    real, failures = rig.bench.host.write, [MemoryError()]  # type: ignore[union-attr]

    def write(*what: Any) -> Ticket:
        if failures:
            raise failures.pop()
        return real(*what)

    if waits:
        rig.ask(tokens_of(31, 100), 3)
        rig.ask(tokens_of(32, 100), 3)  # the only slot is being read
    rig.bench.host.write = write  # type: ignore[method-assign, union-attr]
    rig.bench.writes.land_all()
    rig.submit(tokens_of(33, 100), 3)
    rig.run_dry()
    assert rig.recoveries == 1
    assert isinstance(rig.ended[-1][0], Failed)
    history = tokens_of(34, 100)
    rig.ask(history, 3)
    rig.bench.land_all()
    assert rig.ask([*history, *continuation(history, 3)], 3).cached_tokens == 102
    rig.check_nothing_is_lost()


def test_an_error_of_one_lane_is_its_own() -> None:
    """A pass of a single lane that raises, and an admission that does."""
    rig = Rig(slabs=60, pages=40)
    rig.ask(tokens_of(19, 150), 3)
    rig.submit(tokens_of(20, 40), 30)
    for _ in range(3):
        rig.turn()
    rig.model.next_error = ValueError()
    rig.turn()
    assert isinstance(rig.ended[-1][0], Failed)
    real = rig.bench.memory.copy_state
    rig.bench.memory.copy_state = fail  # type: ignore[method-assign]
    rig.spoiled.add(rig.submit([*tokens_of(19, 150), *continuation(tokens_of(19, 150), 3), 5], 30))
    rig.submit(tokens_of(21, 40), 3)
    rig.run_dry()
    rig.bench.memory.copy_state = real  # type: ignore[method-assign]
    assert [type(event) for event, _ in rig.ended[-2:]] == [Failed, Finished]
    assert rig.recoveries == 0
    assert rig.bench.cache.index.stats().blocks > 0
    rig.check_nothing_is_lost()


def fail(*_: Any) -> None:
    raise ValueError("injected")


def test_a_restore_is_waited_for_by_its_own_lane_only() -> None:
    """While one lane's copies are on their way, another goes on decoding."""
    rig = Rig(slabs=60)
    history = tokens_of(5, 150)
    rig.submit(history, 3)
    rig.run_dry()
    rig.bench.leave_to_host()
    other = rig.submit(tokens_of(6, 10), 40)
    rig.turn()
    waiting = rig.submit([*history, *continuation(history, 3), 1, 2], 3)
    rig.loop.cache.transfers.poll()
    rig.loop.admit()
    (_, restored) = rig.loop.running
    assert restored.request_id == waiting
    assert restored.restore is not None
    assert not restored.restore.done()
    pending = rig.bench.reads.num_pending_parts
    assert pending == 3
    decoded = len(rig.answers[other])
    for _ in range(4):
        rig.turn()
    assert rig.bench.reads.num_pending_parts == pending, "a pass waited for the copies"
    assert len(rig.answers[other]) == decoded + 4
    assert not rig.answers[waiting]
    rig.bench.land_all()
    rig.turn()
    assert len(rig.answers[waiting]) == 1
    rig.run_dry()
    assert len(rig.ended) == 3


def test_identical_prompts_at_once_cost_one_prefill() -> None:
    rig = Rig(lanes=4, snapshots=8, slabs=0, pages=40, prefill_chunk=64)
    prompt = tokens_of(7, 300)
    for _ in range(4):
        rig.submit(prompt, 1)
    rig.run_dry()
    # One whole prompt, and of each other the rest behind the last whole block before its end.
    assert rig.model.computed_tokens == 300 + 3 * (300 - 256)
    assert sorted(event.usage.cached_tokens for event, _ in rig.ended) == [0, 256, 256, 256]  # type: ignore[union-attr]


def test_prompts_that_part_share_what_is_before() -> None:
    rig = Rig(lanes=4, snapshots=8, slabs=0, pages=40, prefill_chunk=64)
    shared = tokens_of(8, 200)
    for seed in (20, 21, 22):
        rig.submit([*shared, *tokens_of(seed, 50)], 1)
    rig.run_dry()
    assert rig.model.computed_tokens == 250 + 2 * (250 - 192)


def test_no_request_waits_when_waiting_is_off_or_in_another_namespace() -> None:
    prompt = tokens_of(9, 300)
    rig = Rig(lanes=4, slabs=0, pages=40, prefill_chunk=64, pending_timeout_seconds=1e-9)
    for _ in range(2):
        rig.submit(prompt, 1)
    rig.turn()
    assert len(rig.loop.running) == 2
    rig = Rig(lanes=4, slabs=0, pages=40, prefill_chunk=64)
    rig.submit(prompt, 1)
    rig.submit(prompt, 1, namespace=b"other")
    rig.turn()
    assert len(rig.loop.running) == 2


def test_a_request_that_waits_goes_on_when_the_other_dies() -> None:
    for how in ("cancel", "nan"):
        rig = Rig(lanes=4, slabs=0, pages=40, prefill_chunk=64)
        prompt = tokens_of(10, 300)
        first = rig.submit(prompt, 1)
        rig.submit(prompt, 1)
        rig.turn()
        assert len(rig.loop.running) == 1
        (lane,) = rig.loop.running
        if how == "cancel":
            rig.loop.end({first: "cancelled"})
        else:
            rig.spoil(rig.model.nan_slots, lane)
        rig.run_dry()
        (event, tokens) = rig.ended[-1]
        assert isinstance(event, Finished)
        assert len(tokens) == 1


def test_a_prefix_shared_by_raw_prompts_is_resumable_for_the_third() -> None:
    """The second prompt finds blocks and no snapshot, and takes one where the paths part."""
    rig = Rig(slabs=0, pages=40, snapshots=8, ladder_tokens=4096)
    shared = tokens_of(11, 200)
    for seed in (30, 31, 32):
        rig.submit([*shared, *tokens_of(seed, 90)], 1)
        rig.run_dry()
    assert [event.usage.cached_tokens for event, _ in rig.ended] == [0, 0, 192]  # type: ignore[union-attr]


def test_a_request_that_waits_too_long_is_told() -> None:
    rig = Rig(lanes=1, slabs=0, pending_timeout_seconds=30)
    rig.submit(tokens_of(12, 20), 60)
    rig.turn()
    late = rig.submit(tokens_of(13, 20), 1)
    rig.now = 20.0
    patient = rig.submit(tokens_of(14, 20), 1)
    rig.turn()
    rig.now = 31.0
    rig.spoiled.add(late)
    rig.turn()
    assert late not in rig.open
    assert patient in rig.open
    event, _ = rig.ended[-1]
    assert isinstance(event, Failed)
    assert isinstance(event.error, QueueTimeout)
    rig.run_dry()


def test_a_request_that_finds_no_room_is_quoted_again_only_when_something_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(lanes=2, slabs=0, pages=10)
    rig.submit(tokens_of(50, 10), 500)  # eight pages
    rig.turn()
    late = rig.submit(tokens_of(51, 200), 1)
    quotes = itertools.count()
    real = rig.bench.cache.quote

    def counting(*arguments: Any, **options: Any) -> Any:
        next(quotes)
        return real(*arguments, **options)

    monkeypatch.setattr(rig.bench.cache, "quote", counting)
    for _ in range(50):  # its first block is not full yet
        rig.turn()
    assert next(quotes) == 1
    assert not rig.answers[late]
    rig.run_dry()
    assert next(quotes) < 20
    assert len(rig.ended) == 2
