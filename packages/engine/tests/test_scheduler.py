"""The step's plan is a pure function of the lanes."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from qwen35_engine.scheduler import PrefillChunk, StepPlan, plan_step


@dataclass(frozen=True)
class View:
    """Lanes are numbered in the order of their admission."""

    lane: int
    computed: int
    prompt_tokens: int
    restoring: bool = False


view = View


def plan(*views: View, prefill_chunk: int = 128) -> StepPlan[int]:
    """The plan, with numbers for the lanes."""
    by_age = sorted(views, key=lambda view: view.lane)
    made = plan_step(by_age, prefill_chunk=prefill_chunk, block_tokens=64)
    chunk = made.prefill
    return StepPlan(
        None if chunk is None else PrefillChunk(chunk.sequence.lane, chunk.begin, chunk.end),
        tuple(view.lane for view in made.decode),
    )


def test_nothing_to_do() -> None:
    assert plan() == StepPlan(None, ())


def test_the_oldest_prompt_gets_the_chunk_and_every_finished_prompt_a_token() -> None:
    views = [view(7, 0, 500), view(3, 90, 90), view(5, 64, 200), view(4, 130, 100)]
    assert plan(*views) == StepPlan(PrefillChunk(5, 64, 192), (3, 4))


def test_chunks_end_at_block_borders_until_the_last() -> None:
    ends, computed = [], 70
    while computed < 400:
        chunk = plan(view(1, computed, 400)).prefill
        assert chunk is not None
        ends.append(chunk.end)
        computed = chunk.end
    assert ends == [192, 320, 400]


def test_a_chunk_smaller_than_a_block_still_moves() -> None:
    assert plan(view(1, 70, 400), prefill_chunk=10).prefill == PrefillChunk(1, 70, 80)
    assert plan(view(1, 120, 400), prefill_chunk=10).prefill == PrefillChunk(1, 120, 128)


def test_no_lane_waits_for_copies_that_are_another_lanes() -> None:
    restoring = view(1, 64, 200, restoring=True)
    assert plan(restoring, view(2, 9, 9)) == StepPlan(None, (2,))
    assert plan(restoring, view(2, 0, 50), view(3, 9, 9)) == StepPlan(PrefillChunk(2, 0, 50), (3,))
    # Alone it begins while they are on their way, and waits for each layer's.
    assert plan(restoring, view(2, 64, 99, restoring=True)) == StepPlan(PrefillChunk(1, 64, 192), ())


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300), st.booleans()), max_size=6),
    st.integers(1, 200),
)
def test_every_plan_is_sound(sizes: list[tuple[int, int, bool]], prefill_chunk: int) -> None:
    views = [
        view(lane, min(computed, prompt + 5), prompt, restoring=restoring)
        for lane, (computed, prompt, restoring) in enumerate(sizes)
    ]
    made = plan(*views, prefill_chunk=prefill_chunk)
    by_lane = {v.lane: v for v in views}
    unfinished = [v.lane for v in views if v.computed < v.prompt_tokens]
    assert set(made.decode) == set(by_lane) - set(unfinished)
    ready = [lane for lane in unfinished if not by_lane[lane].restoring]
    if made.prefill is None:
        assert not ready
        assert not unfinished or made.decode
    else:
        assert made.prefill.sequence == min(ready or unfinished)
        lane = by_lane[made.prefill.sequence]
        assert lane.computed == made.prefill.begin < made.prefill.end <= lane.prompt_tokens
        assert made.prefill.end - made.prefill.begin <= prefill_chunk
