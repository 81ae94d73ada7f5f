"""The tap planner against hand-computed plans, and laws over random prompts."""

from __future__ import annotations

import random

import pytest

from prefix_index import InvalidArgument, SnapshotKind, TapHints, TapLimits, TapSource, plan_taps


def positions(num_tokens: int, base: int = 0, hints: TapHints | None = None, **options: object) -> list[int]:
    return [tap.position for tap in plan_taps(num_tokens, base, hints or TapHints(), **options)]  # type: ignore[arg-type]


LONG = TapHints(explicit=(12_345,), opener=30_010, structural=(100,), message_boundaries=(100, 13_000, 21_800, 29_990))


def test_the_reference_plan_with_a_split_cost() -> None:
    """n = 30,020, ladder 4,096: rungs at 25,924; 21,828, moved to the boundary 21,800; 13,636, moved to 13,000, which
    is within the gap of 12,345 and falls away. The prompt tail, 30,019, is less than a block behind the opener."""
    taps = plan_taps(30_020, 0, LONG, split_seconds=0.015)
    assert [(tap.position, tap.exact) for tap in taps] == [
        (100, True),
        (12_345, True),
        (21_800, False),
        (25_924, False),
        (30_010, True),
    ]


def test_without_a_split_cost_every_tap_is_exact() -> None:
    assert [tap.position for tap in plan_taps(30_020, 0, LONG)] == [100, 12_345, 21_800, 25_924, 30_010]
    assert all(tap.exact for tap in plan_taps(30_020, 0, LONG))


def test_explicit_and_structural_taps_are_boundaries() -> None:
    kinds = {tap.source: tap.kind for tap in plan_taps(30_020, 0, LONG)}
    assert kinds[TapSource.EXPLICIT] is SnapshotKind.BOUNDARY
    assert kinds[TapSource.STRUCTURAL] is SnapshotKind.BOUNDARY
    assert kinds[TapSource.OPENER] is SnapshotKind.TAP
    assert kinds[TapSource.LADDER] is SnapshotKind.TAP


def test_a_budget_of_one_goes_to_the_explicit_marker() -> None:
    assert positions(30_020, hints=LONG, limits=TapLimits(max_taps=1)) == [12_345]
    assert positions(30_020, hints=LONG, limits=TapLimits(max_taps=0)) == []


def test_within_a_priority_the_deepest_come_first() -> None:
    assert positions(5_000, hints=TapHints(explicit=(100, 900, 400)), limits=TapLimits(max_taps=2)) == [400, 900]


def test_close_semantic_positions_form_one_cluster_and_its_earliest_inherits_sharing() -> None:
    hints = TapHints(opener=1_000, structural=(1_040,))
    taps = plan_taps(1_100, 0, hints)
    assert [(tap.position, tap.source, tap.kind) for tap in taps] == [
        (1_000, TapSource.OPENER, SnapshotKind.BOUNDARY),
        (1_099, TapSource.TAIL, SnapshotKind.TAP),
    ]
    apart = plan_taps(1_200, 0, TapHints(opener=1_000, structural=(1_064,)))
    assert [tap.position for tap in apart] == [1_000, 1_064, 1_199]


def test_a_cluster_is_measured_from_what_was_kept() -> None:
    assert positions(400, hints=TapHints(structural=(100, 150, 170))) == [100, 170, 399]


def test_the_opener_absorbs_the_prompt_tail() -> None:
    assert positions(1_100, hints=TapHints(opener=1_050)) == [1_050]
    assert positions(1_100, hints=TapHints(opener=1_035)) == [1_035, 1_099]


def test_after_an_endpoint_neither_opener_nor_tail_is_tapped() -> None:
    hints = TapHints(opener=1_000, explicit=(1_090,))
    assert positions(1_100, 500, hints, resumed=SnapshotKind.ENDPOINT) == [1_090]
    assert positions(1_100, 500, hints, resumed=SnapshotKind.TAP) == [1_000, 1_090]


def test_the_divergence_tap_marks_the_end_of_the_cached_path_as_a_boundary() -> None:
    taps = plan_taps(2_000, 0, TapHints(), matched_tokens=1_280)
    assert [(tap.position, tap.source, tap.kind, tap.exact) for tap in taps] == [
        (1_280, TapSource.DIVERGENCE, SnapshotKind.BOUNDARY, True),
        (1_999, TapSource.TAIL, SnapshotKind.TAP, True),
    ]
    assert positions(2_000, 1_280, matched_tokens=1_280) == [1_999]


def test_positions_leave_excluded_spans_at_their_start() -> None:
    hints = TapHints(explicit=(700,), opener=1_020)
    assert positions(1_100, hints=hints, exclude=[(600, 800), (1_000, 1_050)]) == [600, 1_000, 1_099]
    assert positions(1_000, hints=TapHints(), exclude=[(900, 1_000)]) == [900]
    assert positions(1_000, 900, exclude=[(900, 1_000)]) == []


def test_taps_near_what_is_there_are_dropped() -> None:
    assert positions(1_000, 950) == []  # the tail, 49 past the base
    assert positions(1_000, 935) == [999]  # exactly a block past it
    assert positions(2_000, 0, TapHints(structural=(1_030,)), existing=[1_000]) == [1_999]
    assert positions(2_000, 0, TapHints(explicit=(1_030, 1_000)), existing=[1_000]) == [1_030, 1_999]


def test_a_ladder_in_a_long_prompt_grows_with_its_logarithm() -> None:
    taps = positions(240_000, limits=TapLimits(max_taps=64))
    assert taps == [108_928, 174_464, 207_232, 223_616, 231_808, 235_904, 239_999]


def test_a_ladder_keeps_its_gap_on_both_sides() -> None:
    limits = TapLimits(max_taps=64)
    assert positions(20_000, hints=TapHints(explicit=(15_000, 12_500)), limits=limits) == [
        3_616,
        12_500,
        15_000,
        19_999,
    ]


@pytest.mark.parametrize("seed", range(200))
def test_laws_of_a_plan(seed: int) -> None:
    rng = random.Random(seed)
    num_tokens = rng.choice([2, 65, 700, 5_000, 60_000])
    base = rng.randrange(num_tokens)

    def places(most: int) -> tuple[int, ...]:
        return tuple(sorted(rng.randrange(num_tokens + 50) for _ in range(rng.randrange(most))))

    spans = []
    at = 0
    for _ in range(rng.randrange(4)):
        begin = at + rng.randrange(1, 2 + num_tokens // 4)
        at = begin + rng.randrange(1, 400)
        spans.append((begin, at))
    hints = TapHints(
        explicit=places(4), opener=rng.choice([None, *places(3)]), structural=places(4), message_boundaries=places(9)
    )
    limits = TapLimits(max_taps=rng.randrange(9))
    split = rng.choice([0.0, 0.01])
    existing = places(3)
    plan = plan_taps(num_tokens, base, hints, limits=limits, existing=existing, exclude=spans, split_seconds=split)
    found = [tap.position for tap in plan]
    assert found == sorted(set(found))
    assert all(base < position <= num_tokens - 1 for position in found)
    assert not any(begin < position < end for position in found for begin, end in spans)
    assert len(plan) <= limits.max_taps
    assert not set(found) & set(existing)
    free = {position for position in hints.explicit if base < position < num_tokens and position not in existing}
    free -= {position for position in free if any(begin < position < end for begin, end in spans)}
    if len(plan) < limits.max_taps:
        assert free <= set(found), "an explicit marker may only fall to the budget"
    for tap in plan:
        if tap.source is TapSource.LADDER:
            others = [*existing, base, *(other.position for other in plan if other is not tap)]
            assert min(abs(tap.position - other) for other in others) >= 1024
    again = plan_taps(num_tokens, base, hints, limits=limits, existing=existing, exclude=spans, split_seconds=split)
    assert plan == again


def test_defaults_follow_the_prefill_chunk() -> None:
    assert TapLimits.for_engine(2048, host_tier=True) == TapLimits(max_taps=8, ladder_tokens=4096, min_gap_tokens=2048)
    assert TapLimits.for_engine(8192, host_tier=False) == TapLimits(
        max_taps=2, ladder_tokens=16_384, min_gap_tokens=8192
    )
    with pytest.raises(InvalidArgument, match="max_taps must not be negative, got -1"):
        TapLimits(max_taps=-1)
