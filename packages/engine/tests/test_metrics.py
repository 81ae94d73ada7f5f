"""The books: over random schedules they agree with themselves, with the streams, with the index and with the model."""

from __future__ import annotations

import logging
import random
from array import array
from dataclasses import replace
from typing import Any

import pytest

from fake_model import continuation
from loop_rig import Rig, tokens_of
from prefix_index import CostModel, Prompt, Reason
from qwen35_engine import MissReason, RequestReport, Reuse, TapHints, Timing, Totals, Usage
from qwen35_engine.cache import AdmissionQuote
from qwen35_engine.cache.quotes import Quoter
from qwen35_engine.metrics import Accounts, Stopwatch
from report_checks import bucket, check_books
from test_loop import TRUNK

# ---- random schedules -------------------------------------------------------------------------------------------

INDEX_REASONS = {
    Reason.NO_SNAPSHOT: "no_snapshot",
    Reason.IMAGE_EVICTED: "image_evicted",
    Reason.EXCLUDED: "excluded",
}


class Watched(Rig):
    """Notes what the index knew of each prompt when it was last asked, and moves its clock on at every turn."""

    def __init__(self, rng: random.Random, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._rng = rng
        self._requests: dict[int, int] = {}
        self._prompts: list[Prompt] = []  # keeps their ids from being reused
        self.opted_out: set[int] = set()
        self.buckets: dict[int, set[str]] = {}
        self._real_quote = self.loop.cache.quote
        self.loop.cache.quote = self._quote  # type: ignore[method-assign]

    def submit(self, prompt: list[int], max_tokens: int, **changes: Any) -> int:
        request_id = super().submit(prompt, max_tokens, **changes)
        prepared = list(self.loop.admission)[-1].prompt
        if prepared is None:
            self.opted_out.add(request_id)
        else:
            self._prompts.append(prepared)
            self._requests[id(prepared)] = request_id
        return request_id

    def _quote(self, prompt: Prompt | None, **needs: int) -> AdmissionQuote:
        quote = self._real_quote(prompt, **needs)
        if quote.match is not None:
            match = quote.match
            if not match.candidates:
                fates = {INDEX_REASONS[match.reason]} if match.matched_blocks else {"namespace", "not_cached"}
            elif all(candidate.filling for candidate in match.candidates):
                fates = {"filling"}
            else:
                fates = {"cost", "capacity", "not_executed", ""}
            self.buckets[self._requests[id(prompt)]] = fates
        return quote

    def turn(self) -> None:
        self.now += self._rng.choice([0.0, 0.001, 0.5])
        super().turn()


def run_schedule(rng: random.Random, rig: Watched, *, faults: bool) -> None:
    """Forks of one trunk and follow-ups of finished answers; copies land late; cancels and faults in between."""
    histories = [TRUNK[:60]]
    for _ in range(40):
        choice = rng.random()
        if choice < 0.35:
            history = rng.choice([*histories, TRUNK[: rng.randrange(1, 500)]])
            prompt = [*history, *tokens_of(rng.randrange(1, 6), rng.randrange(1, 60))][: rig.max_context - 1]
            taps = tuple(sorted(rng.sample(range(1, len(prompt) + 1), min(len(prompt), rng.randrange(3)))))
            rig.submit(
                prompt,
                rng.randrange(1, 40),
                hints=TapHints(explicit=taps),
                namespace=rng.choice([b"", b"", b"other"]),
                reuse=rng.random() < 0.85,
            )
            histories.append([*prompt, *continuation(prompt, 12)])
        elif choice < 0.5 and rig.open and faults:
            rig.loop.admit()  # some of them then end between their admission and their first pass
            rig.loop.end({rng.choice(sorted(rig.open)): "cancelled"})
            rig.read()
        elif choice < 0.55 and rig.loop.running and faults:
            rig.spoil(rig.model.nan_slots, rng.choice(list(rig.loop.running)))
        elif choice < 0.7:
            rig.bench.reads.land(rng.randrange(4))
            rig.bench.writes.land(rng.randrange(4))
        else:
            for _ in range(rng.randrange(1, 6)):
                rig.turn()
    check_books(rig.reports, rig.loop.accounts.totals)
    rig.run_dry()


@pytest.mark.parametrize("faults", [True, False])
def test_random_schedules_leave_each_request_in_one_bucket(faults: bool) -> None:
    """Scenarios 43 and 53: what is reported as skipped was not computed, and the counters equal the summed usage."""
    seen: set[str] = set()
    for seed in range(8):
        rng = random.Random(seed)
        rig = Watched(
            rng,
            pages=rng.choice([12, 16, 24]),
            lanes=rng.randrange(1, 5),
            snapshots=rng.randrange(1, 5),
            slabs=rng.choice([0, 20, 80]),
            prefill_chunk=rng.choice([33, 64, 300]),
        )
        run_schedule(rng, rig, faults=faults)
        totals, funnel = rig.loop.accounts.totals, rig.loop.accounts.totals.funnel()
        check_books(rig.reports, totals)
        # The streams' side.
        assert funnel.requests == len(rig.ended), f"seed {seed}"
        told = [event.usage for event, _ in rig.ended]
        assert sum(usage.prompt_tokens for usage in told) == totals.prompt_tokens
        assert sum(usage.cached_tokens for usage in told) == totals.device_tokens + totals.host_tokens
        assert sum(usage.completion_tokens for usage in told) == totals.completion_tokens
        for report in rig.reports:
            assert report.usage.cached_tokens == rig.started.get(report.request_id, 0)
            if report.request_id in rig.opted_out:
                assert bucket(report) == "disabled"
            elif report.request_id not in rig.started:
                assert bucket(report) == "not_admitted"
            else:
                assert bucket(report) in rig.buckets[report.request_id], f"seed {seed}: {report}"
            seen.add(bucket(report))
        # The index's and the model's.
        index = rig.bench.cache.index.stats()
        assert funnel.executed == index.hits
        executed = [report.usage for report in rig.reports if report.executed]
        assert sum(usage.cached_tokens for usage in executed) == index.tokens_resumed
        if not faults:
            usages = [report.usage for report in rig.reports]
            computed = sum(u.prompt_tokens - u.cached_tokens + u.completion_tokens - 1 for u in usages)
            assert rig.model.computed_tokens == computed, f"seed {seed}"
    assert {"", "disabled", "not_cached", "namespace", "no_snapshot", "image_evicted"} <= seen
    assert not faults or {"not_admitted", "not_executed"} <= seen


# ---- each reason ----------------------------------------------------------------------------------------------------


def reuse_of(rig: Rig, request_id: int) -> Reuse:
    (found,) = [report.usage.reuse for report in rig.reports if report.request_id == request_id]
    return found


def ask(rig: Rig, prompt: list[int], max_tokens: int = 3, **changes: Any) -> Reuse:
    request_id = rig.submit(prompt, max_tokens, **changes)
    rig.run_dry()
    return reuse_of(rig, request_id)


def turn_of(seed: int, length: int = 150) -> tuple[list[int], list[int]]:
    """A prompt, and the one that continues its answer of three tokens."""
    prompt = tokens_of(seed, length)
    return prompt, [*prompt, *continuation(prompt, 3), 1, 2]


def test_a_device_hit_skips_everything_but_the_last_token_drawn() -> None:
    rig = Rig(slabs=0)
    prompt, following = turn_of(1)
    assert ask(rig, prompt) == Reuse(reason=MissReason.NOT_CACHED)
    assert ask(rig, following) == Reuse(device_tokens=152, matched_tokens=128)
    assert (rig.loop.accounts.totals.device_hits, rig.loop.accounts.totals.host_hits) == (1, 0)


def test_a_host_hit_tells_its_bytes_and_what_stayed_on_the_device() -> None:
    rig = Rig(slabs=60)
    prompt, following = turn_of(2)
    ask(rig, prompt)
    rig.bench.leave_to_host()
    reuse = ask(rig, following)
    assert (reuse.device_tokens, reuse.host_tokens, reuse.matched_tokens, reuse.reason) == (0, 152, 128, None)
    host = rig.bench.cache.stats().host
    assert host is not None
    # Two blocks, the image, and the tail twice: the cache's own and the one that the lane goes on writing in.
    memory = rig.bench.memory
    image = memory.state_layout.hidden_range().end
    assert reuse.restored_bytes == host.restored_bytes == 4 * memory.page_layout.page_bytes + image
    assert (rig.loop.accounts.totals.device_hits, rig.loop.accounts.totals.host_hits) == (0, 1)


def test_without_the_cache_nothing_is_looked_up_or_left() -> None:
    rig = Rig(slabs=0)
    prompt, following = turn_of(3)
    assert ask(rig, prompt, reuse=False) == Reuse(reason=MissReason.DISABLED)
    assert rig.bench.cache.index.stats().blocks == rig.bench.cache.index.stats().snapshots == 0
    ask(rig, prompt)
    assert ask(rig, following, reuse=False) == Reuse(reason=MissReason.DISABLED)


def test_an_empty_namespace_beside_full_ones_is_named() -> None:
    rig = Rig(slabs=0)
    prompt, following = turn_of(4)
    assert ask(rig, prompt, namespace=b"a").reason is MissReason.NOT_CACHED
    assert ask(rig, following, namespace=b"b").reason is MissReason.NAMESPACE
    assert ask(rig, tokens_of(5, 100), namespace=b"b").reason is MissReason.NOT_CACHED


def test_blocks_without_a_snapshot() -> None:
    rig = Rig(slabs=0, max_taps=0)
    prompt, _ = turn_of(6)
    ask(rig, prompt)
    other = [*prompt[:140], *tokens_of(7, 20)]  # parts inside the tail: the endpoint does not fit
    assert ask(rig, other) == Reuse(matched_tokens=128, reason=MissReason.NO_SNAPSHOT)


@pytest.mark.parametrize(("tap", "reason"), [(129, None), (128, MissReason.NO_SNAPSHOT)])
def test_less_than_a_block_needs_no_reason(tap: int, reason: MissReason | None) -> None:
    """Three blocks are cached and the state of the 129th token, or of the 128th."""
    rig = Rig(slabs=0, max_taps=1)
    prompt, _ = turn_of(19, 195)
    ask(rig, prompt, hints=TapHints(explicit=(tap,)))
    other = [*prompt[:192], 1, 2, 3, 4]
    assert ask(rig, other) == Reuse(device_tokens=tap, matched_tokens=192, reason=reason)


def test_an_evicted_image_is_told_from_one_that_never_was() -> None:
    rig = Rig(slabs=0, max_taps=0)
    prompt, following = turn_of(8)
    ask(rig, prompt)
    freed = rig.bench.cache.index.claim_slot()
    assert freed is not None
    rig.bench.cache.allocator.reclaim(freed)
    assert ask(rig, following) == Reuse(matched_tokens=128, reason=MissReason.IMAGE_EVICTED)


def test_a_shorter_snapshot_is_used_and_the_reason_for_the_rest_told() -> None:
    rig = Rig(slabs=0)
    prompt, following = turn_of(9, 200)
    ask(rig, prompt, hints=TapHints(explicit=(70,)))
    rig.bench.cache.allocator.reclaim(rig.bench.cache.index.clear())
    ask(rig, prompt[:100], hints=TapHints(explicit=(70,)))
    index = rig.bench.cache.index
    lease = index.acquire(index.match(index.prepare(array("i", following))))
    index.extend(lease, array("i", prompt[:192]).tobytes(), rig.bench.cache.allocator.take_pages(3))
    index.release(lease)
    reuse = ask(rig, following)
    assert reuse == Reuse(device_tokens=70, matched_tokens=192, reason=MissReason.NO_SNAPSHOT)
    assert rig.loop.accounts.totals.partial[MissReason.NO_SNAPSHOT] == 1


def left_to_host(seed: int) -> tuple[Rig, list[int]]:
    """A rig that has only on the Host what it was asked, and the turn that follows."""
    rig = Rig(slabs=60)
    prompt, following = turn_of(seed)
    ask(rig, prompt)
    rig.bench.leave_to_host()
    return rig, following


def test_a_prefix_that_is_just_being_restored_for_another() -> None:
    rig, following = left_to_host(10)
    rig.submit(following, 3)
    rig.submit([*following[:-1], 5], 3)
    rig.turn()
    rig.run_dry()
    first, second = reuse_of(rig, 2), reuse_of(rig, 3)
    assert (first.host_tokens, first.reason) == (152, None)
    assert (second.device_tokens, second.host_tokens, second.reason) == (152, 0, None)
    image = rig.bench.memory.state_layout.image_bytes
    assert second.restored_bytes >= image, "the first one's went to its own slot"


def test_a_prefix_that_is_restored_for_another_so_slowly_that_computing_is_quicker() -> None:
    rig, following = left_to_host(10)
    rig.submit(following, 3)
    rig.loop.admit()
    rig.bench.cache.cost = CostModel(bytes_per_second=1.0)
    rig.submit([*following[:-1], 5], 3)
    rig.loop.admit()
    rig.run_dry()
    assert reuse_of(rig, 2).host_tokens == 152
    assert reuse_of(rig, 3) == Reuse(matched_tokens=128, reason=MissReason.FILLING)


def test_a_restore_that_would_take_longer_than_computing() -> None:
    rig, following = left_to_host(11)
    rig.bench.cache.quoter = Quoter(
        rig.bench.cache.index, rig.bench.cache.allocator, cost=CostModel(bytes_per_second=1.0)
    )
    assert ask(rig, following) == Reuse(matched_tokens=128, reason=MissReason.COST)


def test_no_room_to_resume_where_there_is_room_to_start_over() -> None:
    """The cached path and its tail fill the pool, and a lane that resumes there needs a copy of the tail's page."""
    rig = Rig(slabs=0, pages=10, max_taps=0)
    prompt, following = turn_of(12, 530)
    ask(rig, prompt)
    assert ask(rig, following, 60) == Reuse(matched_tokens=512, reason=MissReason.CAPACITY)


def test_a_request_that_ends_while_waiting_was_not_admitted() -> None:
    rig = Rig(slabs=0, lanes=1)
    running = rig.submit(tokens_of(13, 20), 40)
    rig.turn()
    waiting = [rig.submit(tokens_of(14, 20), 5), rig.submit(tokens_of(14, 20), 5, reuse=False)]
    rig.now = 7.0
    rig.loop.end(dict.fromkeys(waiting, "cancelled"))
    assert [reuse_of(rig, number).reason for number in waiting] == [MissReason.NOT_ADMITTED, MissReason.DISABLED]
    assert rig.reports[0].usage.timing == Timing(queued_seconds=7.0, total_seconds=7.0)
    assert running in rig.open


def test_a_lane_that_ends_before_its_first_pass_is_no_executed_hit() -> None:
    rig = Rig(slabs=0)
    prompt, following = turn_of(15)
    ask(rig, prompt)
    request_id = rig.submit(following, 3)
    rig.loop.admit()
    rig.loop.end({request_id: "cancelled"})
    rig.read()
    assert not rig.reports[-1].executed
    funnel = rig.loop.accounts.totals.funnel()
    assert (funnel.requests, funnel.leased, funnel.executed) == (2, 1, 0)
    assert funnel.rejected["not_executed"] == 1


# ---- time -----------------------------------------------------------------------------------------------------------


def test_times_are_those_of_the_injected_clock() -> None:
    """Three seconds in the queue, five from there to the first token, one from each token to the next."""
    rig = Rig(slabs=0, lanes=1, prefill_chunk=64)
    blocking = rig.submit(tokens_of(16, 20), 100)
    rig.turn()
    request_id = rig.submit(tokens_of(17, 150), 3)
    rig.now = 3.0
    rig.loop.end({blocking: "cancelled"})
    rig.loop.cache.transfers.poll()
    rig.loop.admit()
    rig.now = 8.0
    while request_id in rig.open:
        rig.turn()
        if rig.loop.running and next(iter(rig.loop.running)).completion_tokens:
            rig.now += 1.0
    assert rig.reports[-1].usage.timing == Timing(
        queued_seconds=3.0, first_token_seconds=8.0, token_seconds=1.0, total_seconds=10.0
    )


def test_a_restore_is_staged_until_it_was_seen_to_land() -> None:
    rig = Rig(slabs=60, lanes=2)
    prompt, following = turn_of(18)
    ask(rig, prompt)
    rig.bench.leave_to_host()
    request_id = rig.submit(following, 3)
    rig.loop.admit()
    rig.now = 2.5
    rig.bench.reads.land_all()
    rig.run_dry()
    (ended,) = [report for report in rig.reports if report.request_id == request_id]
    assert ended.usage.timing.staged_seconds == 2.5


def test_a_request_without_a_token_has_no_time_to_one() -> None:
    watch = Stopwatch(1.0)
    assert watch.read(4.0, completion_tokens=0) == Timing(queued_seconds=3.0, total_seconds=3.0)
    watch.admitted = 2.0
    watch.token(3.0)
    assert watch.read(4.0, completion_tokens=1) == Timing(
        queued_seconds=1.0, first_token_seconds=2.0, total_seconds=3.0
    )


# ---- the listener ---------------------------------------------------------------------------------------------------


def a_report() -> RequestReport:
    usage = Usage(
        prompt_tokens=10,
        completion_tokens=2,
        reuse=Reuse(reason=MissReason.NOT_CACHED),
        timing=Timing(queued_seconds=0.5, first_token_seconds=1.0, token_seconds=0.25, total_seconds=2.0),
    )
    return RequestReport(request_id=1, outcome="stop", error=None, executed=True, usage=usage)


def test_a_listener_hears_every_record_and_may_fail() -> None:
    heard: list[RequestReport] = []

    def listener(report: RequestReport) -> None:
        heard.append(report)
        if len(heard) > 1:
            raise OSError("no space left")

    accounts = Accounts(listener)
    for number in (1, 2, 3):
        accounts.settle(replace(a_report(), request_id=number))
    assert [report.request_id for report in heard] == [1, 2, 3]
    assert accounts.unheard == 2
    assert accounts.totals.requests == 3


def test_a_failing_listener_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def listener(report: RequestReport) -> None:
        raise OSError("no space left")

    accounts = Accounts(listener)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            accounts.settle(a_report())
    assert len(caplog.records) == 1


def test_totals_are_replaced_and_never_changed() -> None:
    before = Totals()
    after = before.plus(a_report())
    assert before == Totals()
    assert after.misses[MissReason.NOT_CACHED] == 1
    assert before.misses[MissReason.NOT_CACHED] == 0
