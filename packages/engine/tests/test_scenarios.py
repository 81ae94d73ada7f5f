"""What users of such servers run into, each as a whole kind of fault, with the reuse the right answer has.

Every answer is held against the tokens alone: the fake model sees any byte of state, page or tail that is another's, is
late, or was never written. What the index can get wrong by itself is tested there; what needs text, in the server.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fake_model import continuation
from loop_rig import Rig, tokens_of
from prefix_index import TapHints
from qwen35_engine import Finished, MissReason

SYSTEM = tokens_of(1, 300)


def turn_after(history: Sequence[int], answered: int, new: Sequence[int]) -> list[int]:
    """The next prompt of a client that repeats the answer token for token."""
    return [*history, *continuation(history, answered), *new]


def cached_of(rig: Rig, request_id: int) -> int:
    (report,) = [report for report in rig.reports if report.request_id == request_id]
    return report.usage.cached_tokens


def computed_since(rig: Rig, before: int) -> int:
    return rig.model.computed_tokens - before


# ---- conversations ----------------------------------------------------------------------------------------------


def test_the_same_question_after_another_conversation() -> None:
    """A, B, A: the third answer is the first, and only the last token is computed for it."""
    rig = Rig(slabs=0, pages=40)
    a, b = tokens_of(2, 150), tokens_of(3, 170)
    rig.ask(a, 20)
    rig.ask(b, 20)
    assert rig.ask(a, 20).cached_tokens == 149
    (_, first), _, (_, third) = rig.ended
    assert first == third


def test_the_second_turn_computes_what_is_new_and_nothing_else() -> None:
    """Hybrid models on other servers process the whole prompt again."""
    rig = Rig(slabs=0, pages=40)
    first = tokens_of(4, 500)
    rig.ask(first, 30)
    before = rig.model.computed_tokens
    second = turn_after(first, 30, tokens_of(5, 50))
    # The last token of the answer was drawn and never computed.
    assert rig.ask(second, 1).cached_tokens == 529
    assert computed_since(rig, before) == 1 + 50


def test_many_turns_resume_from_the_end_of_the_one_before() -> None:
    """Turn k + 1 reuses exactly what turn k had computed, whatever its length modulo 64."""
    rig = Rig(slabs=60, pages=60, snapshots=5, landing=True)
    prompt = tokens_of(6, 40)
    end = 0
    for turn, answered in enumerate((5, 24, 64, 1, 63, 65, 2)):
        assert rig.ask(prompt, answered).cached_tokens == end
        end = len(prompt) + answered - 1
        prompt = turn_after(prompt, answered, tokens_of(50 + turn, 37))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 66, 127, 128, 129, 130])
def test_lengths_around_block_borders(length: int) -> None:
    """Asked twice, then continued; one token is always left to compute. Less than a block is not worth a snapshot."""
    rig = Rig(slabs=0, pages=40)
    prompt = tokens_of(length, length)
    rig.ask(prompt, 3)
    assert rig.ask(prompt, 3).cached_tokens == (length - 1 if length > 64 else 0)
    assert rig.ask(turn_after(prompt, 3, [7]), 3).cached_tokens == length + 2


def test_four_clients_at_once_never_see_each_other() -> None:
    """Each has its own history; at four lanes every turn of each resumes from its own."""
    rig = Rig(lanes=4, slabs=200, pages=60, snapshots=8, landing=True)
    ends = dict.fromkeys(range(4), 0)
    prompts = {client: [*SYSTEM[:100], *tokens_of(70 + client, 20)] for client in range(4)}
    for turn in range(5):
        asked = {client: rig.submit(prompt, 6 + client) for client, prompt in prompts.items()}
        rig.run_dry()
        for client, end in ends.items():
            assert cached_of(rig, asked[client]) >= end
            assert cached_of(rig, asked[client]) == end or not turn
        ends = {client: len(prompt) + 6 + client - 1 for client, prompt in prompts.items()}
        prompts = {
            client: turn_after(prompt, 6 + client, tokens_of(100 * turn + client, 15))
            for client, prompt in prompts.items()
        }
    rig.check_nothing_is_lost()


def test_a_history_whose_thinking_is_stripped_resumes_where_the_answer_began() -> None:
    """The client drops the reasoning, so the rendered history differs from the generation opener on."""
    rig = Rig(slabs=0, pages=40)
    first = tokens_of(8, 190)
    rig.ask(first, 40, hints=TapHints(opener=183))
    stripped = [*first[:183], *tokens_of(9, 60)]
    assert rig.ask(stripped, 3, hints=TapHints(opener=240)).cached_tokens == 183


def test_a_tool_loop_whose_thinking_is_stripped_later_resumes_at_the_last_stable_message() -> None:
    """Within the loop the turns repeat all tokens; the next user turn renders everything after its message anew."""
    rig = Rig(slabs=0, pages=60, snapshots=8, max_taps=4)
    user_turn = tokens_of(10, 150)
    call = turn_after(user_turn, 30, tokens_of(11, 20))
    result = turn_after(call, 30, tokens_of(12, 20))
    rig.ask(user_turn, 30, hints=TapHints(opener=145))
    assert rig.ask(call, 30, hints=TapHints(opener=195)).cached_tokens == 179
    assert rig.ask(result, 10, hints=TapHints(opener=245)).cached_tokens == 229
    stripped = [*user_turn[:145], *tokens_of(13, 70)]
    assert rig.ask(stripped, 3).cached_tokens == 145


def test_an_edit_deep_in_the_history_resumes_from_the_ladder_tap_below_it() -> None:
    prompt = tokens_of(14, 1000)
    # Taps lie 128, 256 and 512 tokens before the end.
    for edited, expected in ((900, 872), (800, 744), (500, 488), (400, 0)):
        rig = Rig(slabs=0, pages=60, snapshots=8, max_taps=8, ladder_tokens=128, prefill_chunk=300)
        rig.ask(prompt, 3)
        cached = rig.ask([*prompt[:edited], (prompt[edited] + 1) % 97, *prompt[edited + 1 :]], 1).cached_tokens
        assert cached == expected, f"edited at {edited}"


def test_long_and_then_short_turns_keep_the_last_boundary() -> None:
    """No minimum distance between snapshots deletes the one the next turn needs."""
    rig = Rig(slabs=60, pages=80, snapshots=4, landing=True)
    prompt = tokens_of(15, 1200)
    rig.ask(prompt, 10, hints=TapHints(opener=1195))
    for turn in range(6):
        opener = len(prompt) - 5
        prompt = [*prompt[:opener], *tokens_of(120 + turn, 70)]
        assert rig.ask(prompt, 5, hints=TapHints(opener=len(prompt) - 5)).cached_tokens == opener


# ---- what several share -----------------------------------------------------------------------------------------


def test_a_short_system_prompt_is_shared_from_the_second_user_on() -> None:
    """Its end is a structural boundary: 300 tokens are reused, although no block ends there."""
    rig = Rig(slabs=0, pages=40, snapshots=6, max_taps=4)
    shared = TapHints(structural=(300,))
    cached = [rig.ask([*SYSTEM, *tokens_of(seed, 80)], 4, hints=shared).cached_tokens for seed in (20, 21, 22)]
    assert cached == [0, 300, 300]


def test_without_hints_it_is_shared_from_the_third_user_on() -> None:
    """Nothing says where raw prompts part until the second one has parted."""
    rig = Rig(slabs=0, pages=40, snapshots=6, ladder_tokens=4096)
    usages = [rig.ask([*SYSTEM, *tokens_of(seed, 80)], 4) for seed in (20, 21, 22)]
    assert [usage.cached_tokens for usage in usages] == [0, 0, 256]
    assert [usage.reuse.matched_tokens for usage in usages] == [0, 256, 256]
    assert usages[1].reuse.reason is MissReason.NO_SNAPSHOT


def test_eight_sessions_hold_the_pages_of_their_preamble_once() -> None:
    rig = Rig(lanes=8, slabs=0, pages=60, snapshots=12, max_taps=4)
    preamble = tokens_of(23, 640)
    rig.ask([*preamble, 1, 2], 2, hints=TapHints(structural=(640,)))
    asked = [rig.submit([*preamble, *tokens_of(seed, 30)], 40, hints=TapHints(structural=(640,))) for seed in range(8)]
    for _ in range(12):
        rig.turn()
    assert len(rig.loop.running) == 8
    tables = [lane.pages for lane in rig.loop.running]
    assert len({tuple(pages[:10]) for pages in tables}) == 1
    assert len({page for pages in tables for page in pages[10:]}) == sum(len(pages) - 10 for pages in tables)
    rig.run_dry()
    assert [cached_of(rig, request) for request in asked] == [640] * 8


def test_eight_identical_prompts_at_once_cost_one_prefill_and_answer_alike() -> None:
    rig = Rig(lanes=8, slabs=0, pages=60, snapshots=12, prefill_chunk=64)
    prompt = tokens_of(24, 320)
    for _ in range(8):
        rig.submit(prompt, 5)
    rig.run_dry()
    assert len({tuple(answer) for _, answer in rig.ended}) == 1
    # The last block is each one's own: at least one token always is.
    assert rig.model.computed_tokens == 320 + 7 * 64 + 8 * 4


def test_two_that_need_the_same_restore_copy_it_once() -> None:
    """A request that comes while the blocks are on their way waits: they are copied once and computed by no request."""
    rig = Rig(lanes=4, slabs=100, pages=60)
    prompt = tokens_of(25, 400)
    rig.ask(prompt, 3)
    rig.bench.leave_to_host()
    following = turn_after(prompt, 3, [1])
    both = {rig.submit(following, 3) for _ in range(2)}
    rig.run_dry()
    assert rig.ask(following, 3).cached_tokens >= 402
    assert all(report.usage.cached_tokens >= 402 for report in rig.reports if report.request_id in both)
    blocks = rig.bench.cache.stats().host
    assert blocks is not None
    page, image = rig.bench.memory.page_layout.page_bytes, rig.bench.memory.state_layout.image_bytes
    assert blocks.restored_bytes <= 8 * page + 3 * image
    rig.check_nothing_is_lost()


# ---- pressure ---------------------------------------------------------------------------------------------------


def test_keys_and_values_without_a_state_are_no_hit() -> None:
    """Blocks whose snapshot is gone are reported as matched, never as skipped, and the answer is right."""
    rig = Rig(slabs=0, pages=40)
    prompt = tokens_of(26, 200)
    rig.ask(prompt, 3)
    index = rig.bench.cache.index
    while (freed := index.claim_slot()) is not None:
        rig.bench.cache.allocator.reclaim(freed)
    assert index.stats().blocks == 3
    usage = rig.ask(turn_after(prompt, 3, [5, 6]), 3)
    assert (usage.cached_tokens, usage.reuse.matched_tokens) == (0, 192)
    assert usage.reuse.reason is MissReason.IMAGE_EVICTED


def test_what_leaves_the_device_under_pressure_is_found_on_the_host() -> None:
    rig = Rig(slabs=200, pages=16, snapshots=2)
    conversations = [tokens_of(seed, 500) for seed in (27, 28, 29)]
    for prompt in conversations:
        rig.ask(prompt, 3)
        rig.bench.land_all()
    for prompt in conversations:
        usage = rig.ask(turn_after(prompt, 3, [1, 2]), 3)
        rig.bench.land_all()
        assert usage.cached_tokens == 502
        assert usage.reuse.host_tokens > 0
        assert usage.reuse.restored_bytes > 0
    rig.check_nothing_is_lost()


def test_without_a_host_tier_a_lost_block_takes_what_stood_on_it_along() -> None:
    rig = Rig(slabs=0, pages=16, snapshots=4)
    rig.ask(tokens_of(30, 500), 3)
    rig.ask(tokens_of(31, 900), 3)
    assert rig.ask(turn_after(tokens_of(30, 500), 3, [1, 2]), 3).cached_tokens == 0
    rig.check_nothing_is_lost()


def test_more_requests_than_lanes_slots_and_pages_all_finish_in_order() -> None:
    rig = Rig(lanes=2, slabs=0, pages=12, snapshots=1)
    asked = [rig.submit(tokens_of(seed, 40 + 13 * seed), 8) for seed in range(30)]
    rig.run_dry()
    assert all(isinstance(event, Finished) for event, _ in rig.ended)
    assert sorted(report.request_id for report in rig.reports) == asked
    rig.check_nothing_is_lost()


def test_a_full_catalogue_goes_on_admitting_and_counts_what_it_leaves_out() -> None:
    """More conversations than snapshot slots: the cache evicts, says so, and nothing stops."""
    rig = Rig(slabs=0, pages=60, snapshots=2)
    for seed in range(12):
        rig.ask(tokens_of(200 + seed, 100), 4)
    stats = rig.bench.cache.index.stats()
    assert stats.snapshots <= 2
    assert stats.snapshots_lost > 0
    # Of the last one at least the tap before its last token is there.
    assert rig.ask(turn_after(tokens_of(211, 100), 4, [1]), 3).cached_tokens >= 99


def test_the_host_tier_is_bounded_by_bytes_however_many_snapshots_there_are() -> None:
    rig = Rig(slabs=30, pages=60, snapshots=5, max_taps=8)
    for seed in range(20):
        rig.ask(tokens_of(300 + seed, 300), 4)
        rig.bench.land_all()
        host = rig.bench.cache.stats().host
        assert host is not None
        assert 0 <= host.slabs_free <= host.slabs_total == 30
    assert host.slabs_free < 10
    rig.check_nothing_is_lost()


def test_a_long_answer_takes_pages_from_the_cache_and_never_from_another_lane() -> None:
    """Growth always wins over what is cached; no running request is ever stopped to make room for another."""
    rig = Rig(lanes=2, slabs=0, pages=14, snapshots=2)
    rig.ask(tokens_of(32, 500), 3)
    one, two = (rig.submit(tokens_of(seed, 60), 330) for seed in (33, 34))
    rig.run_dry()
    assert {report.request_id: report.usage.completion_tokens for report in rig.reports if report.request_id > 1} == {
        one: 330,
        two: 330,
    }
    assert rig.ask(turn_after(tokens_of(32, 500), 3, [1, 2]), 3).cached_tokens == 0


@pytest.mark.parametrize("copies", ["write-through", "prefetch"])
def test_an_answer_does_not_end_early_because_copies_hold_the_pages(
    copies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that are being written to the Host, or filled for a waiting request, are the cache's: growth still wins."""
    monkeypatch.setattr("qwen35_engine.admission.OUTPUT_WINDOW_TOKENS", 64)
    rig = Rig(lanes=1 if copies == "prefetch" else 2, slabs=200, pages=12, max_taps=0)
    cached = tokens_of(44, 400)
    if copies == "prefetch":
        rig.ask(cached, 3)
        rig.bench.leave_to_host()
    growing = rig.submit(tokens_of(45, 60), 500)
    rig.turn()
    rig.submit(turn_after(cached, 3, [1]), 3)
    while not (rig.bench.writes.num_pending_parts or rig.bench.reads.num_pending_parts):
        rig.turn()
    while growing in rig.open:
        rig.turn()
    (report,) = [report for report in rig.reports if report.request_id == growing]
    assert report.usage.completion_tokens == 500
    rig.run_dry()
    rig.check_nothing_is_lost()


# ---- interrupted ------------------------------------------------------------------------------------------------


def test_a_second_request_in_the_middle_of_a_prefill_takes_only_what_is_committed() -> None:
    """Two and a half chunks; no request waits for another here, so the second starts while blocks are half written."""
    rig = Rig(lanes=2, slabs=0, pages=60, prefill_chunk=128, snapshots=8, pending_timeout_seconds=1e-9)
    prompt = tokens_of(35, 320)
    rig.submit(prompt, 4, hints=TapHints(explicit=(100,)))
    rig.turn()
    (lane,) = rig.loop.running
    assert (lane.computed, lane.committed) == (128, 2)
    second = rig.submit([*prompt, 5], 4)
    rig.turn()
    assert len(rig.loop.running) == 2
    rig.run_dry()
    assert cached_of(rig, second) == 100


def test_one_of_four_is_cancelled_in_the_middle_of_the_prefix_they_share() -> None:
    rig = Rig(lanes=4, slabs=100, pages=80, snapshots=8, prefill_chunk=64)
    shared = tokens_of(36, 256)
    asked = [rig.submit([*shared, *tokens_of(400 + client, 60)], 10) for client in range(4)]
    for _ in range(3):
        rig.turn()
    rig.loop.end({asked[0]: "cancelled"})
    retried = rig.submit([*shared, *tokens_of(400, 60)], 10)
    rig.run_dry()
    answers = {id_: got for id_, got in rig.answers.items() if id_ in {*asked[1:], retried}}
    assert all(len(got) == 10 for got in answers.values())
    assert cached_of(rig, retried) >= 128
    rig.check_nothing_is_lost()


def test_a_long_prompt_cancelled_late_is_not_computed_again() -> None:
    """Cancelled at eighty per cent, asked again: it goes on where it was."""
    rig = Rig(slabs=0, pages=40, prefill_chunk=128)
    prompt = tokens_of(37, 1280)
    first = rig.submit(prompt, 4)
    for _ in range(8):
        rig.turn()
    rig.loop.end({first: "cancelled"})
    before = rig.model.computed_tokens
    assert before == 1024
    assert rig.ask(prompt, 1).cached_tokens == 1024
    assert computed_since(rig, before) == 256


def test_prefill_and_decode_in_one_step_leave_snapshots_that_are_right() -> None:
    """A prompt is computed, with taps, while another answer is being decoded; both are then asked again."""
    rig = Rig(lanes=2, slabs=0, pages=60, snapshots=8, prefill_chunk=64)
    decoding, prompt = tokens_of(38, 50), tokens_of(39, 300)
    rig.submit(decoding, 30)
    rig.turn()
    rig.submit(prompt, 10, hints=TapHints(explicit=(70, 200)))
    rig.run_dry()
    assert rig.ask(turn_after(decoding, 30, [1, 2]), 5).cached_tokens == 79
    for tap in (70, 200):
        assert rig.ask([*prompt[:tap], *tokens_of(40 + tap, 9)], 5).cached_tokens == tap


def test_a_short_prompt_in_a_slot_that_held_another_state() -> None:
    rig = Rig(lanes=1, slabs=0, pages=20, snapshots=1)
    rig.ask(tokens_of(41, 700), 20, reuse=False)
    rig.ask([3, 4, 5], 20, reuse=False)
    assert rig.ended[-1][1] == continuation([3, 4, 5], 20)


def test_a_request_that_opts_out_leaves_the_tree_as_it_was() -> None:
    rig = Rig(slabs=40, pages=40)
    rig.ask(tokens_of(42, 200), 5)
    rig.bench.land_all()
    before = rig.bench.cache.index.digest()
    for prompt in (turn_after(tokens_of(42, 200), 5, [1]), tokens_of(43, 150)):
        usage = rig.ask(prompt, 70, reuse=False)
        assert usage.cached_tokens == 0
        assert usage.reuse.reason is MissReason.DISABLED
    assert rig.bench.cache.index.digest() == before


def test_what_is_reported_as_cached_is_what_was_not_computed() -> None:
    """Never what merely matched: over many requests the passes add up to prompt minus cached, and the answers."""
    rig = Rig(slabs=30, pages=20, snapshots=3)
    for seed in range(40):
        rig.ask([*SYSTEM[: 7 * seed], *tokens_of(500 + seed % 5, 30 + seed)], 1 + seed % 7)
    usages = [report.usage for report in rig.reports]
    assert sum(u.prompt_tokens - u.cached_tokens + u.completion_tokens - 1 for u in usages) == rig.model.computed_tokens
    assert sum(usage.cached_tokens for usage in usages) > 1000
