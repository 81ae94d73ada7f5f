"""What the next step computes. Pure: a view of the lanes in, a frozen plan out; tokens and counts only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LaneView", "PrefillChunk", "StepPlan", "plan_step"]


@dataclass(frozen=True, kw_only=True)
class LaneView:
    """One running sequence as the scheduler sees it.

    ``lane`` numbers lanes in the order of their admission. ``computed`` tokens of ``prompt_tokens`` have their KV and
    state. ``restoring``: a part of these is still on its way from the Host.
    """

    lane: int
    computed: int
    prompt_tokens: int
    restoring: bool = False


@dataclass(frozen=True)
class PrefillChunk:
    """Compute the tokens ``begin .. end`` of a lane's prompt."""

    lane: int
    begin: int
    end: int


@dataclass(frozen=True)
class StepPlan:
    """At most one prefill chunk, then one token of each lane in ``decode``."""

    prefill: PrefillChunk | None
    decode: tuple[int, ...]


def plan_step(lanes: Sequence[LaneView], *, prefill_chunk: int, block_tokens: int) -> StepPlan:
    """The oldest lane still in its prompt gets a chunk, every lane past its prompt a token.

    A chunk that has to wait for copies would make every lane wait for them: as long as others can go on, it is put off
    until they have landed. With nothing else to do it starts at once and waits layer by layer.

    A chunk that does not reach the prompt's end ends at a block border where it can, so that every later one starts at
    one and fills whole blocks.
    """
    prefilling = [view for view in lanes if view.computed < view.prompt_tokens]
    decode = tuple(view.lane for view in lanes if view.computed >= view.prompt_tokens)
    if not prefilling:
        return StepPlan(None, decode)
    ready = [view for view in prefilling if not view.restoring]
    if not ready and decode:
        return StepPlan(None, decode)
    view = min(ready or prefilling, key=lambda view: view.lane)
    begin = view.computed
    end = begin + prefill_chunk
    if end < view.prompt_tokens:
        aligned = end // block_tokens * block_tokens
        end = aligned if aligned > begin else end
    return StepPlan(PrefillChunk(view.lane, begin, min(end, view.prompt_tokens)), decode)
