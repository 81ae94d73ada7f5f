"""What users of such servers report, where it can break in an index. The number is the scenario's in the collection of
reports; the sentence is the right answer."""

from __future__ import annotations

import math

import pytest

from follower import Follower
from index_rig import BOUNDARY, ENDPOINT, TAP, Rig
from prefix_index import (
    CostModel,
    Event,
    Freed,
    PrefixIndex,
    Reason,
    SnapshotPublished,
    TapHints,
    TapSource,
    Tier,
    plan_host_restore,
    plan_taps,
)


def test_1_the_third_request_finds_what_the_first_left() -> None:
    """A, B, A: B's commits and snapshots change nothing in what A resumes from."""
    rig = Rig()
    a, b = rig.tokens(("a", 130)), rig.tokens(("b", 130))
    rig.turn(a, (130, ENDPOINT))
    before = rig.index.match(rig.index.prepare([*a, 7]))
    rig.turn(b, (130, ENDPOINT))
    after = rig.index.match(rig.index.prepare([*a, 7]))
    assert list(before.candidates) == list(after.candidates)
    lease = rig.index.acquire(after, after.best)
    assert (lease.frontier, lease.slot) == (130, 3)
    rig.index.release(lease)


def test_4_blocks_without_state_are_no_hit() -> None:
    """Keys and values alone resume nothing in a hybrid model: hit length 0, and the reason says so."""
    rig = Rig()
    tokens = rig.tokens(("a", 256))
    rig.turn(tokens)
    match = rig.index.match(rig.index.prepare([*tokens, 7]))
    assert (match.matched_tokens, match.best, match.reason) == (256, None, Reason.NO_SNAPSHOT)


def test_5_only_committed_blocks_are_reusable_while_a_prompt_is_prefilled() -> None:
    rig = Rig(snapshots=False)
    tokens = rig.tokens(("a", 160))
    lease = rig.lease(tokens)
    rig.index.extend(lease, tokens[:64], rig.take(1))
    assert rig.frontiers(tokens) == [64]
    rig.index.extend(lease, tokens[64:128], rig.take(1))
    assert rig.frontiers(tokens) == [128, 64]
    rig.index.release(lease)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 66, 127, 128, 129, 130])
def test_11_every_prompt_length_keeps_at_least_one_token_to_compute(length: int) -> None:
    rig = Rig()
    tokens = rig.tokens(("a", 200))
    taps = [(frontier, BOUNDARY) for frontier in (1, 62, 63, 64, 65, 126, 127, 128, 129, 200)]
    rig.turn(tokens, *taps)
    found = [c.frontier for c in rig.index.match(rig.index.prepare(tokens[:length])).candidates]
    assert found == sorted((frontier for frontier, _ in taps if frontier < length), reverse=True)


def test_12_cancelling_one_of_four_leaves_the_other_three_as_they_were() -> None:
    rig = Rig()
    system = rig.tokens(("s", 128))
    rig.turn(system, (128, BOUNDARY))
    prompts = [[*system, *rig.tokens((stem, 100))] for stem in "wxyz"]
    leases = [rig.lease(prompt) for prompt in prompts]
    before = rig.index.digest()
    extra = rig.lease(prompts[0])
    rig.index.cancel(extra)
    assert rig.index.digest() == before
    for lease, prompt in zip(leases[1:], prompts[1:], strict=True):
        rig.commit(lease, prompt)
    rig.index.cancel(leases[0])
    rig.index.check_invariants()
    for lease, prompt in zip(leases[1:], prompts[1:], strict=True):
        rig.publish(lease, prompt, len(prompt), ENDPOINT)
        rig.index.release(lease)
    assert [rig.frontiers(prompt)[0] for prompt in prompts] == [128, 228, 228, 228]


def test_17_a_short_shared_system_prompt_hits_for_the_second_user() -> None:
    """300 tokens are enough: blocks are 64 tokens, not the size of a state."""
    rig = Rig()
    system = rig.tokens(("s", 300))
    first = [*system, *rig.tokens(("x", 50))]
    taps = plan_taps(len(first), 0, TapHints(structural=(300,)))
    rig.turn(first, *((tap.position, tap.kind) for tap in taps))
    assert rig.frontiers([*system, *rig.tokens(("y", 50))])[0] == 300


def test_18_a_prefix_that_raw_prompts_share_is_resumable_for_the_third() -> None:
    """S+a, S+b, S+c without any hint: the second plans a tap where it diverges from the first."""
    rig = Rig()
    shared = rig.tokens(("s", 320))
    reused = []
    for stem in "abc":
        prompt = [*shared, *rig.tokens((stem, 100))]
        match = rig.index.match(rig.index.prepare(prompt))
        base = match.best.frontier if match.best is not None else 0
        reused.append(base)
        taps = plan_taps(len(prompt), base, TapHints(), matched_tokens=match.matched_tokens)
        rig.turn(prompt, *((tap.position, tap.kind) for tap in taps))
    assert reused == [0, 0, 320]


def test_20_a_growing_history_of_images_reuses_the_first() -> None:
    index = PrefixIndex(snapshots=False)
    tokens = list(range(300))
    lease = index.acquire(index.match(index.prepare(tokens, extras=((70, 111),))))
    index.extend(lease, tokens[:256], range(4))
    index.release(lease)
    two = index.match(index.prepare(tokens, extras=((70, 111), (200, 222))))
    assert two.matched_tokens == 192
    assert index.match(index.prepare(tokens, extras=((70, 112),))).matched_tokens == 64


def test_22_pressure_demotes_what_the_host_holds_and_never_prunes_it() -> None:
    rig = Rig()
    tokens = rig.tokens(("a", 320))
    rig.turn(tokens, (128, BOUNDARY), (320, ENDPOINT), host=True)
    rig.index.evict_device(100)
    while rig.index.claim_slot() is not None:
        pass
    rig.index.check_invariants()
    assert rig.frontiers(tokens) == [320, 128]


def test_24_slot_exhaustion_is_an_answer_not_an_error() -> None:
    """With every owner pinned a claim finds no victim; the caller skips the snapshot and goes on."""
    rig = Rig()
    leases = []
    for stem in "abcd":
        tokens = rig.tokens((stem, 64))
        rig.turn(tokens, (64, ENDPOINT))
        leases.append(rig.lease(tokens))
    assert rig.index.claim_slot() is None
    for lease in leases:
        rig.index.release(lease)
    for _ in range(4):
        assert rig.checked(rig.index.claim_slot() or Freed()).slots != ()
    assert rig.index.claim_slot() is None


def test_26_a_long_turn_then_short_turns_keep_the_last_boundary() -> None:
    """Nothing is thinned by distance: the snapshot the next turn needs is the one worth most."""
    rig = Rig()
    conversation = rig.tokens(("long", 6400))
    rig.turn(conversation, (6400, ENDPOINT))
    for turn in range(6):
        conversation = [*conversation, *rig.tokens((f"t{turn}", 20))]
        rig.turn(conversation, (len(conversation), ENDPOINT))
        while rig.index.stats().snapshots > 2:
            rig.index.claim_slot()
        assert rig.frontiers(conversation)[0] == len(conversation)


def test_27_siblings_share_the_system_prompt_and_a_full_index_evicts_and_counts() -> None:
    rig = Rig()
    system = rig.tokens(("s", 1024))
    rig.turn(system, (1024, BOUNDARY))
    for sibling in range(8):
        rig.turn([*system, *rig.tokens((f"c{sibling}", 128))], (1152, ENDPOINT))
    stats = rig.index.stats()
    assert stats.device_blocks == 16 + 8 * 2, "the shared pages are counted once"
    assert stats.hits == 8
    assert stats.tokens_resumed == 8 * 1024
    rig.index.evict_device(8)
    assert rig.index.stats().device_evictions == 8
    assert rig.frontiers([*system, *rig.tokens(("new", 128))]) == [1024]


def test_31_a_client_that_drops_the_reasoning_resumes_at_the_generation_opener() -> None:
    rig = Rig()
    history = rig.tokens(("h", 500))
    taps = plan_taps(500, 0, TapHints(opener=480))
    assert [(tap.position, tap.source) for tap in taps] == [(480, TapSource.OPENER)]
    with_reasoning = [*history, *rig.tokens(("think", 300))]
    rig.turn(with_reasoning, (480, TAP), (800, ENDPOINT))
    stripped = [*history[:480], *rig.tokens(("answer", 300))]
    assert rig.frontiers(stripped)[0] == 480


def test_34_a_tool_loop_keeps_the_last_stable_boundary() -> None:
    """Endpoints of the loop go by, the opener before it stays: the lineage supersedes all but its last prompt tap."""
    rig = Rig()
    prompt = rig.tokens(("p", 400))
    rig.turn(prompt, (384, TAP), (400, ENDPOINT))
    longer = [*prompt, *rig.tokens(("tool", 200))]
    rig.turn(longer, (600, ENDPOINT))
    assert 384 in rig.frontiers([*prompt[:390], *rig.tokens(("other", 50))])


def test_36_the_budget_is_bytes() -> None:
    """An image takes the slabs of its size, and a restore plan counts slabs, not snapshots."""
    rig = Rig()
    rig.turn(rig.tokens(("a", 100)), (100, ENDPOINT), host=True)
    tables = rig.index.export()
    assert tables.num_slabs == 1 + 4 + 1
    plan = plan_host_restore(tables, 5, cost=CostModel(), block_bytes=1, image_bytes=4)
    assert (plan.snapshots, plan.num_slabs) == ((), 0)


def test_39_a_restore_reuses_or_refuses() -> None:
    rig = Rig()
    tokens = rig.tokens(("a", 320))
    rig.turn(tokens, (320, ENDPOINT), host=True)
    other = Rig()
    other.index.import_tables(rig.index.export())
    assert other.frontiers(tokens) == [320]
    with pytest.raises(Exception, match="must be empty"):
        other.index.import_tables(rig.index.export())


def test_43_only_skipped_tokens_are_counted() -> None:
    """A long cached path under a shallow snapshot counts as the snapshot's frontier."""
    rig = Rig()
    tokens = rig.tokens(("a", 640))
    rig.turn(tokens, (64, BOUNDARY))
    rig.turn(tokens)
    assert rig.index.stats().tokens_resumed == 64
    match = rig.index.match(rig.index.prepare([*tokens, 7]))
    assert (match.matched_tokens, match.best.frontier) == (640, 64)  # type: ignore[union-attr]


def test_45_47_one_namespace_never_sees_another() -> None:
    """A tenant's salt, or a new version of an adapter, is a namespace: equal tokens there are strangers."""
    index = PrefixIndex(snapshots=False)
    for page, namespace in enumerate((b"salt-1", b"salt-2", b"adapter@1", b"adapter@2")):
        prompt = index.prepare(range(65), namespace)
        assert index.match(prompt).matched_tokens == 0
        lease = index.acquire(index.match(prompt))
        assert index.extend(lease, range(64), [page]).inserted == ((0, 1),)
        index.release(lease)
    assert index.stats().namespaces == 4


def test_46_two_images_with_colliding_hashes_stay_apart() -> None:
    """Extras are compared, not hashed: a block hash that ignores them changes nothing."""
    index = PrefixIndex(snapshots=False, block_hash=lambda parent, tokens, extra: 1)
    lease = index.acquire(index.match(index.prepare(range(65), extras=((3, 5),))))
    index.extend(lease, range(64), [0])
    index.release(lease)
    assert index.match(index.prepare(range(65), extras=((3, 5),))).matched_tokens == 64
    assert index.match(index.prepare(range(65), extras=((3, 5 + (1 << 16)),))).matched_tokens == 0


def test_49_work_of_a_cancelled_prefill_is_kept() -> None:
    """Released at 80 %: blocks and taps so far are there for the retry."""
    rig = Rig()
    tokens = rig.tokens(("a", 1000))
    lease = rig.lease(tokens)
    rig.index.extend(lease, tokens[:768], rig.take(12))
    rig.publish(lease, tokens, 768, TAP)
    rig.index.release(lease)
    retry = rig.lease(tokens)
    assert (retry.frontier, retry.depth) == (768, 12)
    rig.index.cancel(retry)


def test_51_a_late_subscriber_sees_the_root_and_the_states() -> None:
    rig = Rig()
    tokens = rig.tokens(("a", 200))
    early, late = Follower(), Follower()
    rig.index.subscribe(early)
    rig.turn(tokens, (128, BOUNDARY), (200, ENDPOINT), host=True)
    late.catch_up(rig.index.state_events())
    rig.index.subscribe(late)
    rig.index.evict_device(2)
    rig.turn([*tokens, *rig.tokens(("b", 100))], (300, ENDPOINT), resume=-1)
    assert early.view() == late.view()
    assert early.sequence == late.sequence
    assert len(early.snapshots) == 3
    roots = set(early.parents.values()) - set(early.parents)
    assert len(roots) == 1, "every chain ends in the namespace's hash"


def test_a_snapshot_that_becomes_a_boundary_is_told_again() -> None:
    rig = Rig()
    tokens = rig.tokens(("a", 128))
    heard: list[Event] = []
    rig.index.subscribe(heard.append)
    rig.turn(tokens, (128, ENDPOINT))
    rig.turn(tokens, (128, BOUNDARY), resume=-1)
    rig.turn(tokens, (128, ENDPOINT), resume=-1)
    kinds = [event.kind for event in heard if isinstance(event, SnapshotPublished)]
    assert kinds == [ENDPOINT, BOUNDARY]
    (known,) = (event for event in rig.index.state_events() if isinstance(event, SnapshotPublished))
    assert known.kind == BOUNDARY


def test_who_unsubscribes_hears_nothing_of_what_is_being_told() -> None:
    rig = Rig()
    heard: list[Event] = []
    rig.index.subscribe(lambda event: second.close())
    second = rig.index.subscribe(heard.append)
    rig.turn(rig.tokens(("a", 64)), (64, ENDPOINT))
    assert heard == []


def test_a_listener_that_fails_is_told_no_more_and_harms_nobody() -> None:
    rig, alone = Rig(), Rig()
    failing, heard = [], []

    def fail(event: Event) -> None:
        failing.append(event)
        raise ValueError

    subscription = rig.index.subscribe(fail)
    rig.index.subscribe(heard.append)
    for each in (rig, alone):
        tokens = each.tokens(("a", 320))
        each.turn(tokens, (200, TAP), (320, ENDPOINT), host=True)
        each.index.evict_device(3)
        each.index.evict_host(2)
    assert len(failing) == 1
    assert len(heard) > 10
    assert isinstance(subscription.error, ValueError)
    rig.index.check_invariants()
    assert rig.index.digest() == alone.index.digest()


def test_53_counters_only_rise_and_add_up() -> None:
    rig = Rig()
    tokens = rig.tokens(("a", 320))
    rig.turn(tokens, (320, ENDPOINT), host=True)
    rig.index.evict_device(3)
    lease = rig.lease(tokens)
    rig.index.cancel(lease)  # preempted before it ran
    assert rig.index.stats().hits == 0
    lease = rig.lease(tokens)
    rig.index.land(rig.index.begin_fill(lease, Tier.DEVICE, rig.take(3)))
    rig.index.release(lease)
    stats = rig.index.stats()
    assert (stats.hits, stats.tokens_resumed) == (1, 320)
    assert stats.blocks_inserted + stats.blocks_reattached == stats.device_blocks - 3 + stats.device_evictions
    assert math.isfinite(stats.inflation)
