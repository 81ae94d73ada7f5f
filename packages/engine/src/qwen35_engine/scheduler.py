"""What the next step computes. Pure: sequences in, a frozen plan out; tokens and counts only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

__all__ = ["PrefillChunk", "Schedulable", "StepPlan", "plan_step"]


class Schedulable(Protocol):
    """A running sequence as the scheduler sees it."""

    @property
    def computed(self) -> int:
        """Tokens that have their KV and state."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def restoring(self) -> bool:
        """Whether a part of what is computed is still on its way from the Host."""


S = TypeVar("S", bound=Schedulable)


@dataclass(frozen=True)
class PrefillChunk(Generic[S]):
    """Compute the tokens ``begin .. end`` of a sequence's prompt."""

    sequence: S
    begin: int
    end: int


@dataclass(frozen=True)
class StepPlan(Generic[S]):
    """At most one prefill chunk, then one token of each sequence in ``decode``."""

    prefill: PrefillChunk[S] | None
    decode: tuple[S, ...]


def plan_step(running: Iterable[S], *, prefill_chunk: int, block_tokens: int) -> StepPlan[S]:
    """The oldest sequence still in its prompt gets a chunk, every one past its prompt a token.

    A chunk that has to wait for copies would make every sequence wait for them: as long as others can go on, it is put
    off until they have landed. With nothing else to do it starts at once and waits layer by layer.

    A chunk that does not reach the prompt's end ends at a block border where it can, so that every later one starts at
    one and fills whole blocks.

    Args:
        running: every sequence that has a lane, in the order of their admission.
        prefill_chunk: tokens of a chunk at most.
        block_tokens: tokens of a block.
    """
    prefilling: list[S] = []
    decode: list[S] = []
    for sequence in running:
        (prefilling if sequence.computed < sequence.prompt_tokens else decode).append(sequence)
    ready = [sequence for sequence in prefilling if not sequence.restoring]
    if not prefilling or (not ready and decode):
        return StepPlan(None, tuple(decode))
    first = (ready or prefilling)[0]
    begin = first.computed
    end = begin + prefill_chunk
    if end < first.prompt_tokens:
        aligned = end // block_tokens * block_tokens
        end = aligned if aligned > begin else end
    return StepPlan(PrefillChunk(first, begin, min(end, first.prompt_tokens)), tuple(decode))
