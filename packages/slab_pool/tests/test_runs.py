"""The laws of runs: every pair exactly once, in order, as few as possible, never across a chunk."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slab_pool import Run, StaleSlab, plan_runs
from slab_pool_strategies import page_slab_pairs, small_pool


def plan(pairs, slabs_per_chunk=7, max_pitch_bytes=10_000, record_bytes=1000, slab_bytes=1500):
    return plan_runs(
        [page for page, _ in pairs],
        [slab for _, slab in pairs],
        slabs_per_chunk=slabs_per_chunk,
        record_bytes=record_bytes,
        slab_bytes=slab_bytes,
        max_pitch_bytes=max_pitch_bytes,
    )


def expand(runs, slabs_per_chunk=7):
    return [
        (run.record + i * run.record_stride, run.chunk * slabs_per_chunk + run.row + i * run.row_stride)
        for run in runs
        for i in range(run.num_records)
    ]


def is_run(pairs, slabs_per_chunk, max_page_stride, max_row_stride):
    """May these pairs be one run? Said from the definition alone."""
    if len({slab // slabs_per_chunk for _, slab in pairs}) != 1:
        return False
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(pairs)}
    if not steps:
        return True
    if len(steps) != 1:
        return False
    ((page_step, row_step),) = steps
    return 1 <= page_step <= max_page_stride and 1 <= row_step <= max_row_stride


def fewest_runs(pairs, *limits):
    """Dynamic programming over all ways to cut: the oracle for "as few as possible"."""
    best = [0] + [len(pairs)] * len(pairs)
    for end in range(1, len(pairs) + 1):
        for begin in range(end):
            if is_run(pairs[begin:end], *limits):
                best[end] = min(best[end], best[begin] + 1)
    return best[-1]


@settings(deadline=None)
@given(page_slab_pairs(), st.integers(1, 20), st.integers(1000, 5000))
def test_runs_cover_every_pair_once_in_order_with_the_fewest_runs(pairs, slabs_per_chunk, max_pitch):
    runs = plan(pairs, slabs_per_chunk, max_pitch)
    assert expand(runs, slabs_per_chunk) == pairs
    limits = (slabs_per_chunk, max_pitch // 1000, max_pitch // 1500)
    for run in runs:
        assert is_run(expand([run], slabs_per_chunk), *limits)
        assert 0 <= run.row < slabs_per_chunk
        assert run.num_records >= 1
    assert len(runs) == fewest_runs(pairs, *limits)


def test_consecutive_pages_and_slabs_are_one_run_a_chunk():
    pairs = [(100 + i, i) for i in range(20)]
    assert tuple(plan(pairs)) == (
        Run(100, 1, 0, 0, 1, 7),
        Run(107, 1, 1, 0, 1, 7),
        Run(114, 1, 2, 0, 1, 6),
    )


def test_a_step_between_two_stretches_belongs_to_neither():
    """Steps 1, 1, 2, 3, 3: the lone 2 joins no run, and its end begins the next one."""
    places = [0, 1, 2, 4, 7, 10]
    assert [run.num_records for run in plan([(place, place) for place in places], slabs_per_chunk=100)] == [3, 3]


def test_a_pitch_above_the_engine_s_maximum_is_split():
    pairs = [(0, 0), (1, 6), (2, 12)]
    assert len(plan(pairs, slabs_per_chunk=100, max_pitch_bytes=9000)) == 1
    assert len(plan(pairs, slabs_per_chunk=100, max_pitch_bytes=8999)) == 3
    far = [(0, 0), (9, 1)]
    assert len(plan(far, max_pitch_bytes=9000)) == 1
    assert len(plan(far, max_pitch_bytes=8999)) == 2


def test_single_records_have_strides_of_one():
    assert tuple(plan([(5, 9), (5, 9)])) == (Run(5, 1, 1, 2, 1, 1), Run(5, 1, 1, 2, 1, 1))


def test_nothing_is_no_run():
    assert tuple(plan([])) == ()
    assert len(plan([])) == 0


@pytest.mark.parametrize(
    ("pages", "slabs", "message"),
    [
        ([1], [1, 2], "equally long, got 1 and 2"),
        ([-1], [1], "at least 0, got -1 and 1"),
        ([1], [-1], "at least 0, got 1 and -1"),
        ([-1], [-1], "at least 0, got -1 and -1"),
        ([0, 1, 5, -1], [0, 1, 3, 2], "at least 0, got -1 and 2"),
    ],
)
def test_bad_lists_are_named(pages, slabs, message):
    with pytest.raises(ValueError, match=message):
        plan_runs(pages, slabs, slabs_per_chunk=4, record_bytes=1, slab_bytes=1)


def test_results_are_runs():
    (run,) = plan([(3, 3)])
    assert type(run) is Run
    assert run.num_records == 1
    runs = plan([(3, 3), (1, 1), (2, 2)])
    assert runs[1] == Run(1, 1, 0, 1, 1, 2)
    assert runs[0:1] == (run,)
    assert list(runs.plain()) == [tuple(run) for run in runs]


def test_a_pool_plans_by_handle_and_refuses_stale_ones():
    with small_pool(8, slabs_per_chunk=4) as pool:
        handles = pool.acquire(6)
        assert tuple(pool.plan_runs([0, 1, 2, 3, 4, 5], handles, record_bytes=4096)) == (
            Run(0, 1, 0, 0, 1, 4),
            Run(4, 1, 1, 0, 1, 2),
        )
        pool.release(handles[2:3])
        with pytest.raises(StaleSlab, match="plan_runs"):
            pool.plan_runs([0, 1, 2], handles[:3], record_bytes=4096)
